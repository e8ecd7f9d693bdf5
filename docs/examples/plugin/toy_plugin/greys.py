"""A model: 8 x 8 pixels in 16 shades of grey, each drawn near the one before it; "bright" and "dark" are understood."""

from pathlib import Path

import torch

from specbench.models.catalog import ModelInfo
from specbench.models.interface import TokenLayout

CODES = 16
HERE = Path(__file__).parent


class Greys:
    name = "greys"

    def __init__(self, device, dtype):
        self.layout = TokenLayout.plain(8, 8, CODES)
        self.codebook = torch.arange(CODES, dtype=torch.float32, device=device)[:, None]  # [V, d], or None
        self.device, self.dtype = torch.device(device), dtype
        self.weights_sha256 = MODEL.weights_sha256()

    def encode(self, prompts):
        """Prompts to anything that `begin` and `refill` understand; here [B] wanted shades, -1 for no wish."""
        shades = [14.0 if "bright" in text else 1.0 if "dark" in text else -1.0 for text in prompts]
        return torch.tensor(shades, device=self.device)

    def begin(self, prefix, guidance, columns):
        """Prefill for a batch. No later forward has more than `columns` columns."""
        return GreysSession(self, prefix, guidance)

    def render(self, image_tokens, prompts=(), seeds=()):
        """[B, 64] image tokens to uint8 pixels [B, 3, 8, 8]."""
        return (image_tokens * 17).to(torch.uint8).view(-1, 1, 8, 8).expand(-1, 3, -1, -1)


class GreysSession:
    """One batch being decoded. A network would keep a KV cache here, addressed by position."""

    def __init__(self, model, prefix, guidance):
        self._shades, self._wanted, self._guidance = model.codebook[:, 0], prefix, guidance

    def forward(self, tokens, positions, tree=None):
        """Guided logits [B, T, V]. Column t consumes tokens[:, t] and predicts the slot positions[:, t]; the column of
        slot 0 consumes the prompt, and its entry of `tokens` is ignored."""
        before = torch.where(positions > 0, tokens, CODES // 2).float()
        free = -((self._shades - before[..., None]) ** 2) / 8  # [B, T, V] without the prompt
        pull = -((self._shades - self._wanted[:, None]) ** 2) / 32 * (self._wanted[:, None] >= 0)
        return free + self._guidance * pull[:, None]

    def keep(self, columns, positions):
        """Move cache entries of an accepted branch into place; nothing is cached here."""

    def refill(self, rows, prefix):
        """Give the images `rows` to other prompts."""
        self._wanted[rows] = prefix


def load(device, dtype):
    return Greys(device, dtype)


MODEL = ModelInfo(
    name="greys",
    summary="8 x 8 shades of grey",
    target="toy_plugin.greys:load",
    resolution=(8, 8),
    tokens=64,
    licence="Apache-2.0",
    config=HERE / "greys.json",
    weights=(),
)
