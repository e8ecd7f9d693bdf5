"""Image decoders from image tokens to pixels, and the codebook for distance rules.

All decoders return values in [-1, 1]; pixels are round((x + 1) * 127.5) after clamping. The official scripts differ by
at most one grey level, because some truncate instead of rounding.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Emu3VQVAE, JanusVQVAEConfig
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig
from transformers.models.emu3.modeling_emu3 import Emu3VQVAESpatialNorm
from transformers.models.janus.modeling_janus import JanusVQVAE

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import build_network, drop, fill, randomise, read_tensors, rename


class ImageDecoder(Protocol):
    """Attributes: codebook: [V, d] float32, as the decoder reads it (normalised if the decoder normalises codes)."""

    codebook: Tensor

    def decode(self, codes: Tensor) -> Tensor:
        """Decode image tokens [1, h, w] to [1, 3, H, W] in about [-1, 1]."""


def to_pixels(image: Tensor) -> Tensor:
    """Convert [..., 3, H, W] in [-1, 1] to uint8."""
    return ((image.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def render_codes(decoder: ImageDecoder, codes: Tensor) -> Tensor:
    """Decode image tokens [B, h, w] to uint8 [B, 3, H, W], one image at a time to bound the memory."""
    return torch.cat([to_pixels(decoder.decode(code[None])) for code in codes])


class TamingDecoder:
    """The VQGAN of taming-transformers, which transformers ships as `JanusVQVAE`: Chameleon, LlamaGen and Janus; only
    its codebook, `post_quant_conv` and decoder are used. `normalise`: l2-normalise codes (LlamaGen and Janus)."""

    def __init__(self, network: JanusVQVAE, normalise: bool):
        self._network = network
        table = network.quantize.embedding.weight
        self._table = functional.normalize(table, dim=-1) if normalise else table
        self.codebook = self._table.float()

    def decode(self, codes: Tensor) -> Tensor:
        # `JanusVQVAE.decode` always normalises and accepts square grids only.
        return self._network.decoder(self._network.post_quant_conv(self._table[codes].permute(0, 3, 1, 2)))


CHAMELEON_VQ: dict[str, Any] = {
    "embed_dim": 256,
    "num_embeddings": 8192,
    "latent_channels": 256,
    "base_channels": 128,
    "channel_multiplier": [1, 1, 2, 2, 4],
    "num_res_blocks": 2,
}
LLAMAGEN_VQ = CHAMELEON_VQ | {"embed_dim": 8, "num_embeddings": 16384}
TINY_VQ = {"latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1]}
TINY_CHAMELEON_VQ = TINY_VQ | {"embed_dim": 32}
ENCODER_SIDE = ("encoder.", "quant_conv.", "loss.")


def taming_network(config: JanusVQVAEConfig, attention: bool = True) -> JanusVQVAE:
    """Build the decoding half of a `JanusVQVAE` on meta. `attention`: whether its lowest level has attention."""
    network = build_network(JanusVQVAE, config)
    del network.encoder, network.quant_conv
    if not attention:
        network.decoder.up[0].attn = nn.ModuleList()
    return network


def taming_config(tensors: Mapping[str, Tensor]) -> JanusVQVAEConfig:
    """Return the configuration that fits the shapes of stored tensors with transformers' names."""
    codes, width = tensors["quantize.embedding.weight"].shape
    levels = len({name.split(".")[2] for name in tensors if name.startswith("decoder.up.")})
    outputs = [tensors[f"decoder.up.{level}.block.0.conv1.weight"].shape[0] for level in range(levels)]
    blocks = len({name.split(".")[4] for name in tensors if name.startswith("decoder.up.0.block.")})
    return JanusVQVAEConfig(
        embed_dim=width,
        num_embeddings=codes,
        latent_channels=tensors["post_quant_conv.weight"].shape[0],
        base_channels=outputs[-1],
        channel_multiplier=[output // outputs[-1] for output in reversed(outputs)],
        num_res_blocks=blocks - 1,
    )


def load_chameleon_vq(tensors: Mapping[str, Tensor], files: CheckpointFiles, device: str) -> TamingDecoder:
    """Load, in float32, Chameleon's decoder from Meta's `vqgan.ckpt` or from the converted repositories, or a decoder
    of the same kind, perhaps with attention in the lowest level.

    Stored levels are numbered from the image to the latent, transformers' levels from the latent to the image.
    """
    first = "decoder.conv_in.weight"
    prefix = next((name.removesuffix(first) for name in tensors if name.endswith(first)), "")
    inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    levels = 1 + max((int(name.split(".")[2]) for name in inner if name.startswith("decoder.up.")), default=0)
    up = re.compile(r"^decoder\.up\.(\d+)")
    renamed = rename(inner, lambda name: up.sub(lambda level: f"decoder.up.{levels - 1 - int(level[1])}", name))
    attention = any(name.startswith("decoder.up.0.attn.") for name in renamed)
    return _load_taming(renamed, files, device, normalise=False, attention=attention)


def load_llamagen_vq(files: CheckpointFiles, device: str) -> TamingDecoder:
    """Load LlamaGen's decoder from `vq_ds16_t2i.pt`, in float32."""
    renamed = rename(drop(read_tensors(files), ["quantize.codebook_used"]), llamagen_name)
    return _load_taming(renamed, files, device, normalise=True, attention=True)


def _load_taming(
    tensors: dict[str, Tensor], files: CheckpointFiles, device: str, normalise: bool, attention: bool
) -> TamingDecoder:
    kept = drop(tensors, ENCODER_SIDE)
    try:
        config = taming_config(kept)
    except (KeyError, ValueError):
        config = JanusVQVAEConfig(**(LLAMAGEN_VQ if attention else CHAMELEON_VQ))
    return TamingDecoder(fill(taming_network(config, attention), kept, files, device, torch.float32), normalise)


def random_taming(config: Mapping[str, Any], normalise: bool, attention: bool, device: str) -> TamingDecoder:
    network = taming_network(JanusVQVAEConfig(**config), attention)
    return TamingDecoder(randomise(network, device, torch.float32), normalise)


def llamagen_name(name: str) -> str:
    """Return transformers' name for a tensor name of LlamaGen's image tokenizer, which Janus-Pro shares."""
    name = re.sub(r"^decoder\.conv_blocks\.(\d+)", r"decoder.up.\1", name)
    name = re.sub(r"^(decoder\.up\.\d+)\.res\.", r"\1.block.", name)
    for index, part in enumerate(("block_1", "attn_1", "block_2")):
        name = name.replace(f"decoder.mid.{index}.", f"decoder.mid.{part}.")
    return name


def movq_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a MoVQ's tensors from its authors' names to `Emu3VQVAE`'s; 1 x 1 convolutions become matrices."""
    renamed = rename(tensors, _movq_name)
    return {name: tensor.flatten(1) if "_proj.weight" in name else tensor for name, tensor in renamed.items()}


def _movq_name(name: str) -> str:
    name = name.replace("decoder.mid.attn_1.norm.", "decoder.middle_block.attn_norm.")
    name = name.replace("decoder.mid.", "decoder.middle_block.").replace("decoder.up.", "decoder.up_block.up.")
    name = re.sub(r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1.", name)
    name = re.sub(r"\.(attn\.\d+|attn_1)\.([qkv])\.", r".\1.\2_proj.", name)
    return re.sub(r"\.(attn\.\d+|attn_1)\.proj_out\.", r".\1.out_proj.", name)


MOVQ: dict[str, Any] = {
    "codebook_size": 16_384,
    "embed_dim": 4,
    "latent_channels": 4,
    "base_channels": 256,
    "num_res_blocks": 2,
    "channel_multiplier": [1, 2, 2, 4],
    "attn_resolutions": [3],
    "hidden_size": 1024,
}
"""Settings of ai-forever's MoVQGAN of 270 M parameters."""
TINY_MOVQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "hidden_size": 32}


_SLICE = 64  # Channels that `spatial_norm` processes at a time


class MovqDecoder:
    """MoVQGAN's decoder: the decoder of Emu3's video tokenizer without layers over time, see `movq_network`."""

    def __init__(self, network: nn.Module):
        self._network = network
        self.codebook = network.quantize.embedding.weight.float()
        for module in network.decoder.modules():
            if isinstance(module, Emu3VQVAESpatialNorm):
                module.forward = partial(spatial_norm, module)

    def decode(self, codes: Tensor) -> Tensor:
        latents = self.codebook[codes].permute(0, 3, 1, 2)
        return self._network.decoder(self._network.post_quant_conv(latents)[:, None], latents[:, None])


def spatial_norm(norm: Emu3VQVAESpatialNorm, hidden: Tensor, latents: Tensor) -> Tensor:
    """Compute `norm`'s forward in slices of channels, which saves three maps of the picture's size in memory."""
    normed, size = norm.norm_layer(hidden), hidden.shape[-2:]
    scale, shift = norm.conv_y(latents), norm.conv_b(latents)  # before enlarging `latents`, which only repeats pixels
    for start in range(0, normed.shape[1], _SLICE):
        part = slice(start, start + _SLICE)
        normed[:, part] *= functional.interpolate(scale[:, part], size=size, mode="nearest")
        normed[:, part] += functional.interpolate(shift[:, part], size=size, mode="nearest")
    return normed


def movq_network(settings: Mapping[str, Any]) -> nn.Module:
    """Build the decoding half of a MoVQGAN on meta; settings as in `MOVQ`."""
    network = build_network(Emu3VQVAE, Emu3VQVAEConfig(**settings))
    del network.encoder, network.quant_conv
    network.decoder.time_res_stack, network.decoder.time_conv = nn.ModuleList(), nn.ModuleList()
    channels = settings["embed_dim"], settings["latent_channels"]
    network.post_quant_conv = build_network(lambda: nn.Conv2d(*channels, 1))
    return network


def load_movq(files: CheckpointFiles, device: str) -> MovqDecoder:
    """Load MoVQGAN's decoder from `movqgan_270M.ckpt`, in float32."""
    kept = drop(movq_tensors(read_tensors(files)), (*ENCODER_SIDE, "ema_"))
    try:
        codes, width = kept["quantize.embedding.weight"].shape
        ups = {int(name.split(".")[3]) for name in kept if name.startswith("decoder.up_block.up.")}
        outputs = [len(kept[f"decoder.up_block.up.{level}.block.0.conv1.weight"]) for level in sorted(ups)]
        blocks = len({name.split(".")[5] for name in kept if name.startswith("decoder.up_block.up.0.block.")})
        settings = MOVQ | {
            "codebook_size": codes,
            "embed_dim": width,
            "latent_channels": len(kept["post_quant_conv.weight"]),
            "base_channels": outputs[0],
            "channel_multiplier": [output // outputs[0] for output in outputs],
            "num_res_blocks": blocks - 1,
            "attn_resolutions": [level for level in ups if f"decoder.up_block.up.{level}.attn.0.q_proj.bias" in kept],
            "hidden_size": outputs[-1],
        }
    except (KeyError, ValueError, IndexError):
        settings = MOVQ
    return MovqDecoder(fill(movq_network(settings), kept, files, device, torch.float32))


class Emu3Decoder(MovqDecoder):
    """Emu3's video tokenizer used for one picture. Its layers over time make several frames; the first frame is the
    picture. Later layers do not mix frames, so only the first frame is decoded. The encoder is not used."""

    def __init__(self, network: nn.Module):
        super().__init__(network)
        decoder = network.decoder
        self._mixing, self._growing = decoder.time_res_stack, decoder.time_conv
        decoder.time_res_stack, decoder.time_conv = nn.ModuleList(), nn.ModuleList()

    def decode(self, codes: Tensor) -> Tensor:
        latents = self.codebook[codes].permute(0, 3, 1, 2)[:, :, None]
        frames = torch.cat([self._network.post_quant_conv(latents), latents])
        for layer in self._mixing:
            frames = layer(frames)
        for layer in self._growing:
            frames = functional.silu(layer(frames))
        hidden, latents = frames[:, :, :1].permute(0, 2, 1, 3, 4).chunk(2)
        return self._network.decoder(hidden, latents)
