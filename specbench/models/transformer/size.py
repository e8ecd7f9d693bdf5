"""Memory reads and operations of one forward of a transformer, and weights of a vertical draft head, from sizes.

Serves training, memory estimates and forecasts. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCK = 256
"""Slots of a block of a KV cache."""
_LARGEST_VERTICAL_LAYER = 1024
"""Most hidden units of a vertical draft head: each draft reads most layers again, so that they have to stay small
beside the target."""
_VERTICAL_INPUTS = 6
"""Features and embeddings that a vertical draft head looks at."""


@dataclass(frozen=True)
class Size:
    """Counts of numbers, whatever their dtype.

    Attributes:
        weights: parameters that one forward reads: no input embedding, image rows of the head only.
        kv: numbers cached per token and row.
        attention: width of the queries, summed over layers.
        eight_bits: of the weights, those that are stored in one byte each.
    """

    weights: int
    kv: int
    attention: int
    eight_bits: int = 0

    def layer(self, layers: int, outputs: int) -> Layer:
        """Size of one of its `layers`, if the head is linear with `outputs` and queries are as wide as hidden
        states.
        """
        width = self.attention // layers
        weights = (self.weights - outputs * width) // layers
        projections = 2 * width * (width + self.kv // (2 * layers))
        return Layer(width, (weights - projections) // (3 * width), weights)

    def read(self, forwards: float, rows: int, visible: float, itemsize: int) -> float:
        """Bytes read by `forwards` that attend to `visible` cached tokens in each row, summed over forwards; `itemsize`
        is that of a number not stored in eight bits."""
        weights = itemsize * self.weights - (itemsize - 1) * self.eight_bits
        return forwards * weights + itemsize * rows * visible * self.kv

    def operations(self, columns: float, rows: int, seen: float) -> float:
        """Floating-point operations of the matrix products of `columns` per row that attend to `seen` tokens, both
        summed over forwards: a multiplication and an addition per weight, and per number of each query's keys and
        values."""
        return rows * (2 * columns * self.weights + 4 * seen * self.attention)


@dataclass(frozen=True)
class Layer:
    """Widths of a layer's hidden states and of its gated MLP, and its `weights`."""

    width: int
    inner: int
    weights: int

    @property
    def moved(self) -> int:
        """Numbers that an eager layer reads and writes per column besides its products: two norms of six passes each,
        the rotation of queries and keys, two residual sums, the gate and what it multiplies."""
        return 40 * self.width + 5 * self.inner


def llama_size(
    hidden: int, inner: int, layers: int, heads: int, outputs: int, kv_heads: int | None = None, head: int | None = None
) -> Size:
    """The size of a Llama with a linear head of `outputs`; `head` is the width of an attention head."""
    head = head or hidden // heads
    queries, keys = heads * head, (kv_heads or heads) * head
    layer = 2 * hidden * (queries + keys) + 3 * hidden * inner + 2 * hidden
    return Size(layers * layer + hidden + hidden * outputs, 2 * layers * keys, layers * queries)


def whole_blocks(slots: int) -> int:
    """Round the slots of a KV cache up to whole blocks, as on a GPU, where prompts of many lengths are to give few
    shapes to compile."""
    return -(-slots // _BLOCK) * _BLOCK


def vertical_hidden(width: int) -> int:
    """Hidden units of a new vertical draft head for features of `width` numbers."""
    return min(3 * width, _LARGEST_VERTICAL_LAYER)


def vertical_weights(width: int) -> int:
    """Weights of a vertical draft head, without biases."""
    hidden = vertical_hidden(width)
    return first_layer_weights(width) + hidden**2 + hidden * width


def ssd_weights(width: int) -> int:
    """Weights of SSD's seven heads, each of a projection and a gated layer with half as many hidden units."""
    return 7 * (2 * width**2 + 3 * width * (width // 2) + width)


def first_layer_weights(width: int) -> int:
    """Weights of the first layer of a vertical draft head, which is read once for a run of drafts."""
    return _VERTICAL_INPUTS * width * vertical_hidden(width)


def draft_weights(width: int) -> int:
    """Weights of a vertical draft head that are read again for each draft: the other layers, and the part of the first
    for the token before."""
    hidden = vertical_hidden(width)
    return 2 * width * hidden + hidden**2
