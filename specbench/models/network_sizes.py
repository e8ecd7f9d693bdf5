"""Sizes of language models and draft heads: parameters, memory reads and operations. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_BLOCK = 256  # Slots of a block of a KV cache
_LARGEST_VERTICAL_LAYER = 1024
"""Maximum hidden units of a vertical draft head: each draft reads most layers again, so they must be small."""


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""transformers' names of the first six fields of `NetworkSize`, in their order."""


@dataclass(frozen=True)
class Size:
    """Counts of numbers, independent of their dtype."""

    weights: int  # parameters that one forward reads: not the input embedding, and of the head only image rows
    kv: int  # numbers cached per token and row
    attention: int  # width of the queries, summed over layers
    eight_bits: int = 0  # number of weights that are stored in one byte each

    def read(self, forwards: float, rows: int, visible: float, itemsize: int) -> float:
        """Return the bytes read by `forwards`. `visible`: cached tokens that a row attends to, summed over forwards.
        `itemsize`: bytes of a number not stored in eight bits."""
        weights = itemsize * self.weights - (itemsize - 1) * self.eight_bits
        return forwards * weights + itemsize * rows * visible * self.kv

    def operations(self, columns: float, rows: int, seen: float) -> float:
        """Return the floating-point operations of the matrix products: two per weight, and two per number of the keys
        and values of a query. `columns`: columns of a row; `seen`: tokens that they attend to; sums over forwards."""
        return rows * (2 * columns * self.weights + 4 * seen * self.attention)


@dataclass(frozen=True)
class NetworkSize:
    """A decoder-only transformer with SwiGLU feed-forward layers."""

    words: int  # rows of the token table
    # width, inner, layers: of the network; `inner` is the width of a feed-forward layer
    width: int
    inner: int
    layers: int
    # heads, kv_heads: attention heads of queries, and of keys and values
    heads: int
    kv_heads: int
    head_width: int = 0  # width of a head; 0 for width / heads
    head_norms: int = 0  # norms of a layer that are as wide as a head
    layer_extra: int = 0  # parameters of a layer other than its six or seven matrices and two norms
    # parameters outside layers, token table and head: `extra` of them in total, `step_extra` of them read in each step
    extra: int = 0
    step_extra: int = 0
    head_rows: int = 0  # stored rows of the output matrix; 0 if it shares the token table
    image_rows: int = 0  # image tokens with a second table, in addition to the table of `words`

    @property
    def table(self) -> int:
        """Rows of the token table, which a draft head copies."""
        return self.words + self.image_rows

    def config(self) -> dict[str, int]:
        """Return the sizes under transformers' names."""
        sizes = self.words, self.width, self.inner, self.layers, self.heads, self.kv_heads
        return dict(zip(SIZES, sizes, strict=True)) | ({"head_dim": self.head_width} if self.head_width else {})

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def layer_weights(self) -> int:
        """Parameters of a layer."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        layer = attention + 3 * self.width * self.inner + 2 * self.width + self.layer_extra
        return layer + self.head_norms * self.head_size

    @property
    def moved(self) -> int:
        """Number of values that eager layers read and write per query position, without matrix products: two norms (six
        passes each), rotary embedding of queries and keys, two residual sums, and the gate with its multiplication."""
        return self.layers * (40 * self.width + 5 * self.inner)

    @property
    def trunk(self) -> int:
        """Parameters of the layers and the last norm."""
        return self.layers * self.layer_weights + self.width

    @property
    def parameters(self) -> int:
        return (self.words + self.head_rows) * self.width + self.trunk + self.extra

    def step_parameters(self, codes: int) -> int:
        """Return the parameters that a forward reads: not the token table, only the head's rows for `codes` tokens."""
        return self.trunk + codes * self.width + self.step_extra

    @property
    def kv_numbers(self) -> int:
        """Numbers cached per token and row."""
        return 2 * self.layers * self.key_width

    def size(self, codes: int, eight_bits: bool = False) -> Size:
        """Return the counts of a forward. With `eight_bits` the whole trunk counts as eight bits, also its norms."""
        weights, queries = self.step_parameters(codes), self.layers * self.query_width
        return Size(weights, self.kv_numbers, queries, self.trunk * eight_bits)


def whole_blocks(slots: int) -> int:
    """Round the slots of a KV cache up to whole blocks, as on a GPU, so that prompts of all lengths give few shapes."""
    return -(-slots // _BLOCK) * _BLOCK


def vertical_hidden(width: int) -> int:
    """Hidden units of a new vertical draft head for features of `width` numbers."""
    return min(3 * width, _LARGEST_VERTICAL_LAYER)


def first_layer_weights(width: int) -> int:
    """Return the weights of a vertical draft head's first layer, which is read once for a run of drafts."""
    return 6 * width * vertical_hidden(width)  # inputs: three features and three embeddings


def draft_weights(width: int) -> int:
    """Return the weights of a vertical head that each draft reads: two layers, and a sixth of the first layer."""
    hidden = vertical_hidden(width)
    return 2 * width * hidden + hidden**2


def vertical_weights(width: int) -> int:
    """Return the weights of the three layers of a vertical draft head, without biases."""
    return first_layer_weights(width) + vertical_hidden(width) * (vertical_hidden(width) + width)


class HeadSize(NamedTuple):
    """Memory of a draft head for a target of a given size, known before the head is on this disk."""

    weights: Callable[[NetworkSize], int]
    cached_layers: int = 0  # layers with a KV cache as wide as the target's
    projected: int = 0  # size of its projections, divided by the square of the width


def _eagle(projected: int) -> HeadSize:
    """Size of an EAGLE head: a layer of the target, projections, and a token table."""
    return HeadSize(lambda size: size.layer_weights + projected * size.width**2 + size.table * size.width, 1, projected)


HEAD_SIZES = {  # by kind of draft head
    "eagle": _eagle(2),
    "eagle3": _eagle(6),  # with a projection of four hidden states
    "vertical": HeadSize(lambda size: vertical_weights(size.width)),
}
