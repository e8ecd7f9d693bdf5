"""A session whose KV cache keeps a few image rows (LineAR, arXiv 2512.04857, after its abstract and its repository's
description; no code was released by commit 6bccc0e).

A *line* is an image row with its row end. The cache keeps the prompt, the first lines (anchors), and the last ones.
Whenever a line is complete and leaves the last ones, its entries and the others in the middle compete for the places of
the middle: those stay that receive most attention from the line just finished, summed over its tokens and the queries
of a group of heads, each layer and head of keys on its own. The rest is overwritten: the buffers are never larger.

Keys keep the rotary positions at which they were computed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaModel

from specbench.models.interface import TokenLayout, Tree
from specbench.models.transformer.kv_cache import PositionLayer
from specbench.models.transformer.llama_layer import runs_directly
from specbench.models.transformer.model import TransformerModel, TransformerSession

if TYPE_CHECKING:
    from specbench.models.transformer.model import Prefix


class Lines(NamedTuple):
    """Lines of `width` slots that the cache keeps: the first `anchors`, as many places as `middle` lines have, and the
    last `recent`."""

    width: int
    anchors: int
    middle: int
    recent: int

    @property
    def kept(self) -> int:
        """Number of lines kept between two lines; while one is decoded, there is one more."""
        return self.anchors + self.middle + self.recent


def line_width(model: object) -> int | None:
    """Stream slots per image row; None for a model whose rows differ, or of whose layers the queries are not seen."""
    if not isinstance(model, TransformerModel) or type(model.backbone) is not LlamaModel:
        return None
    layout: TokenLayout = model.layout
    starts = [row[0] for row in layout.rows[-1]]
    widths = {after - start for start, after in pairwise([*starts, layout.length])}
    column = torch.empty(1, 1, 1)
    if layout.before or len(widths) != 1 or starts[0] or not runs_directly(model.backbone.layers[0], column, None):
        return None
    return widths.pop()


class LineSession(TransformerSession):
    """A batch of images decoded token by token, all at the same slot. R rows, S cache slots."""

    def __init__(self, model: TransformerModel, prefix: Prefix, guidance: float, lines: Lines):
        room = min((lines.kept + 1) * lines.width, model.layout.length)
        super().__init__(model, prefix, guidance, columns=1, length=room)
        self._compiled, self._lines, self._evicted = None, lines, -1
        self._level = len({len(embeds) for embeds in self._prefix.embeds}) == 1

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        lines, tokens, positions = self._lines, self._twice(tokens), self._twice(positions)
        places = self._last + positions
        end, _ = self._extent.of(places[:, 0], 1)  # exact, as every step commits one token
        complete, column = divmod(end - self._longest, lines.width)
        if self._evicted < 0:  # a warm-up begins in the middle of an image
            self._evicted = max(0, complete - (column == 0) - lines.kept) * lines.width
        prunes = complete + (column > 0) > lines.kept  # at the end of this line
        for layer in self._cache.layers:
            layer.queries = layer.queries or [] if prunes and lines.middle else None
        slots, end = places - self._evicted, end - self._evicted
        logits = self._step(tokens, positions, slots, None, end, end - 1 if self._level else None)
        if prunes and column == 0:
            for layer in self._cache.layers:
                prune(layer, self._last + 1 + lines.anchors * lines.width, slots, lines)
            self._evicted += lines.width
        return logits


def prune(layer: PositionLayer, start: Tensor, last: Tensor, lines: Lines) -> None:
    """Evict one line from the cache of a layer.

    Args:
        start: [R, 1] first slot after the anchors; from there on are the middle, the line that joins it, and the last.
        last: [R, 1] slot of the last query of the line just finished; the layer holds its queries.
    """
    keys, width = layer.keys, lines.width
    places, recent = lines.middle * width, lines.recent * width
    count = torch.arange(places + width + recent, device=keys.device)
    row, head = (torch.arange(size, device=keys.device) for size in keys.shape[:2])
    row, head = row[:, None, None], head[:, None]
    kept = count[None, None, places + width :].expand(*keys.shape[:2], -1)
    if layer.queries:
        queries = torch.cat(layer.queries, 2)
        queried = last - torch.arange(queries.shape[2] - 1, -1, -1, device=keys.device)
        seen = attention_received(queries, keys, queried)
        best = seen[row, head, (start + count[: places + width])[:, None]].topk(places).indices.sort().values
        kept = torch.cat([best, kept], 2)
        layer.queries = None
    for buffer in (keys, layer.values):
        buffer[row, head, (start + count[: kept.shape[2]])[:, None]] = buffer[row, head, start[:, None] + kept]


def attention_received(queries: Tensor, keys: Tensor, queried: Tensor) -> Tensor:
    """Attention [R, heads, S] that keys [R, heads, S, d] receive from `queries` [R, G heads, W, d] at slots `queried`
    [R, W], summed over these and the G queries of each head of keys."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys[:, :, None].transpose(-1, -2) * queries.shape[-1] ** -0.5
    visible = torch.arange(keys.shape[2], device=keys.device) <= queried[..., None]
    return scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).sum((2, 3))
