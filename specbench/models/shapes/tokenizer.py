"""The VQ tokenizer between 64 x 64 images and 16 x 16 tokens in raster order.

The encoder reads only a token's own 4 x 4 pixels, so equal patches have equal tokens. The decoder also reads several
tokens around and draws the edges. A second network computes the features that `shapes-frechet` compares.
"""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from specbench.models.shapes import FEATURE_FILE, FEATURES

GRID = 16
PATCH = 4
TOKENS = GRID * GRID


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip connection."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(self.norm(x)))))


class ShapesTokenizer(nn.Module):
    """Encoder, codebook and decoder. `codes`: number K of codes, with `dim` numbers each. `encoder`, `decoder`, `fine`:
    channels of the encoder, and of the decoder at 16 x 16 and at 32 x 32."""

    def __init__(self, codes: int = 512, dim: int = 8, encoder: int = 96, decoder: int = 128, fine: int = 48):
        super().__init__()
        self.config = {"codes": codes, "dim": dim, "encoder": encoder, "decoder": decoder, "fine": fine}
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(PATCH),
            nn.Conv2d(3 * PATCH**2, encoder, 1),
            nn.SiLU(),
            nn.Conv2d(encoder, encoder, 1),
            nn.SiLU(),
            nn.Conv2d(encoder, encoder, 1),
            nn.SiLU(),
            nn.Conv2d(encoder, dim, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, decoder, 3, padding=1),
            ResidualBlock(decoder),
            ResidualBlock(decoder),
            nn.Conv2d(decoder, 4 * fine, 1),
            nn.PixelShuffle(2),
            ResidualBlock(fine),
            nn.GroupNorm(8, fine),
            nn.SiLU(),
            nn.Conv2d(fine, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )
        self.register_buffer("codebook", torch.zeros(codes, dim))

    def latents(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, 3, 64, 64] to float latents [B, dim, 16, 16], before quantization."""
        return self.encoder(to_float(images).to(self.codebook.dtype))

    def nearest(self, latents: Tensor) -> Tensor:
        """Return the id [B, 256] of the nearest code of each latent [B, dim, 16, 16]."""
        flat = latents.permute(0, 2, 3, 1).reshape(-1, latents.shape[1]).float()
        codes = self.codebook.float()
        scores = flat @ codes.T - 0.5 * codes.square().sum(1)
        return scores.argmax(1).view(latents.shape[0], TOKENS)

    def quantized(self, tokens: Tensor) -> Tensor:
        """Look up codebook entries [B, dim, 16, 16] of ids [B, 256]."""
        return self.codebook[tokens].view(-1, GRID, GRID, self.codebook.shape[1]).permute(0, 3, 1, 2)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, 3, 64, 64] to ids [B, 256]."""
        return self.nearest(self.latents(images))

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Decode ids [B, 256] to uint8 [B, 3, 64, 64]."""
        return ((self.decoder(self.quantized(tokens)).float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 pixels to floats in -1..1."""
    return images.float() / 127.5 - 1


class FeatureNetwork(nn.Sequential):
    """Network from images, uint8 [B, 3, 64, 64], to the features [B, 64] of `shapes-frechet`, which distinguish
    objects, colors, counts and backgrounds: four convolutions down to 8 x 8 positions, averaged."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inner, outer, stride in ((3, 24, 2), (24, 48, 2), (48, 96, 2), (96, FEATURES, 1)):
            convolution = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outer), nn.ReLU()]
        super().__init__(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(to_float(images)).mean((2, 3))


def load_features(device: str = "cpu") -> FeatureNetwork:
    network = FeatureNetwork()
    network.load_state_dict(load_file(FEATURE_FILE))
    return network.eval().requires_grad_(False).to(device)
