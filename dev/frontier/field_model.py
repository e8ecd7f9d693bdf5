"""A model with other statistics than `shapes`: a random field of 24 x 24 tokens, without objects or flat colours.

    p(x | left, above, above to the right) proportional to exp(-b |e(x) - m|^2)

with random embeddings e of 512 tokens in 8 dimensions and m a weighted mean of the neighbours' embeddings. The
sharpness b is set so that the mean entropy is 3.7 nats; tokens repeat far more rarely than in `shapes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.models.interface import TokenLayout, Tree

WEIGHTS = torch.tensor([0.5, 0.35, 0.15])
SHARPNESS = 1.1


class FieldModel:
    """An `ImageModel` without prompts or guidance."""

    name = "field"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, side: int = 24, vocab: int = 512, dimensions: int = 8, seed: int = 0):
        self.layout = TokenLayout.plain(side, side, vocab)
        draw = torch.Generator().manual_seed(seed)
        self.codebook = torch.randn(vocab, dimensions, generator=draw)
        self.weights_sha256 = hashlib.sha256(self.codebook.numpy().tobytes()).hexdigest()
        slots = torch.arange(self.layout.length)
        above = slots - side
        right = torch.where((slots + 1) % side == 0, -1, above + 1)
        self.neighbours = torch.stack([slots - 1, above, right], 1).clamp(min=-1) + 1
        """[N, 3] slot + 1 of each neighbour; 0 if there is no neighbour."""

    def encode(self, prompts: Sequence[str]) -> int:
        return len(prompts)

    def begin(self, prefix: int, guidance: float, columns: int) -> FieldSession:
        return FieldSession(self, prefix)

    def logits(self, around: Tensor) -> Tensor:
        """[..., V] logits of a slot with the neighbours `around` [..., 3]; -1 means no neighbour."""
        weights = (around >= 0).float() * WEIGHTS
        mean = (weights[..., None] * self.codebook[around.clamp(min=0)]).sum(-2)
        mean = mean / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return -SHARPNESS * torch.cdist(mean.flatten(0, 1), self.codebook).square().view(*mean.shape[:-1], -1)


class FieldSession:
    """Tokens consumed so far, indexed by slot + 1; entry 0 means no neighbour."""

    def __init__(self, model: FieldModel, rows: int):
        self._model = model
        self._tokens = torch.full((rows, model.layout.length + 2), -1)
        self._branches: Tensor | None = None

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        last = self._model.layout.length - 1
        # Columns at `positions` consume tokens of the previous slots; tokens past the end go to an entry never read.
        places = positions.clamp(max=last + 1)
        slots = self._model.neighbours[positions.clamp(max=last)]
        if tree is None:
            self._write(places, tokens)
            return self._model.logits(self._tokens.gather(1, slots.flatten(1)).view(slots.shape))
        self._branches, streams, around = tokens, [], []
        for column, parent in enumerate(tree.parents):
            stream = (self._tokens if parent < 0 else streams[parent]).clone()
            stream.scatter_(1, places[:, column : column + 1], tokens[:, column : column + 1])
            stream[:, 0] = -1
            streams.append(stream)
            around.append(stream.gather(1, slots[:, column]))
        trunk = torch.tensor(tree.in_trunk)
        self._write(places[:, trunk], tokens[:, trunk])
        return self._model.logits(torch.stack(around, 1))

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        self._write(positions.clamp(max=self._model.layout.length), self._branches.gather(1, columns))

    def _write(self, places: Tensor, tokens: Tensor) -> None:
        self._tokens.scatter_(1, places, tokens)
        self._tokens[:, 0] = -1
