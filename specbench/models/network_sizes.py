"""Sizes of the families' language models and of draft heads, and what follows from them: parameters, memory reads and
operations of a forward. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

_BLOCK = 256  # Slots of a block of a KV cache
_LARGEST_VERTICAL_LAYER = 1024
"""Most hidden units of a vertical draft head: each draft reads most layers again, so that they have to stay small
beside the target."""
_VERTICAL_INPUTS = 6  # Features and embeddings that a vertical draft head looks at


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
    """Counts of numbers, whatever their dtype."""

    weights: int  # parameters that one forward reads: no input embedding, image rows of the head only
    kv: int  # numbers cached per token and row
    attention: int  # width of the queries, summed over layers
    eight_bits: int = 0  # of the weights, those that are stored in one byte each

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
    head_width: int = 0  # of one head; width / heads if 0
    head_norms: int = 0  # norms of a layer that are as wide as a head
    layer_extra: int = 0  # parameters of a layer besides its six or seven matrices and two norms
    # extra, step_extra: parameters beside the layers, the token table and the head: all, and those read in a step
    extra: int = 0
    step_extra: int = 0
    head_rows: int = 0  # rows of the output matrix that are stored; 0 where it shares the token table
    image_rows: int = 0  # image tokens with a second table, beside that of `words`

    @property
    def table(self) -> int:
        """Rows of the token table that a draft head has a copy of."""
        return self.words + self.image_rows

    def config(self) -> dict[str, int]:
        """The sizes under transformers' names."""
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
        """Numbers that eager layers read and write per column besides their products: two norms of six passes each,
        the rotation of queries and keys, two residual sums, the gate and what it multiplies."""
        return self.layers * (40 * self.width + 5 * self.inner)

    @property
    def trunk(self) -> int:
        """Parameters of the layers and the last norm."""
        return self.layers * self.layer_weights + self.width

    @property
    def parameters(self) -> int:
        return (self.words + self.head_rows) * self.width + self.trunk + self.extra

    def step_parameters(self, codes: int) -> int:
        """What one forward reads: no token table, and the rows of the head that stand for `codes` image tokens."""
        return self.trunk + codes * self.width + self.step_extra

    @property
    def kv_numbers(self) -> int:
        """Numbers cached per token and row."""
        return 2 * self.layers * self.key_width

    def size(self, codes: int, eight_bits: bool = False) -> Size:
        """What a forward reads and computes; with eight bits all of the trunk counts, norms (one in a thousand) too."""
        weights, queries = self.step_parameters(codes), self.layers * self.query_width
        return Size(weights, self.kv_numbers, queries, self.trunk * eight_bits)


def whole_blocks(slots: int) -> int:
    """Round the slots of a KV cache up to whole blocks, as on a GPU, where prompts of many lengths are to give few
    shapes to compile."""
    return -(-slots // _BLOCK) * _BLOCK


def vertical_hidden(width: int) -> int:
    """Hidden units of a new vertical draft head for features of `width` numbers."""
    return min(3 * width, _LARGEST_VERTICAL_LAYER)


def first_layer_weights(width: int) -> int:
    """Weights of the first layer of a vertical draft head, which is read once for a run of drafts."""
    return _VERTICAL_INPUTS * width * vertical_hidden(width)


def draft_weights(width: int) -> int:
    """Weights of a vertical draft head that are read again for each draft: the other layers, and the part of the first
    for the token before."""
    hidden = vertical_hidden(width)
    return 2 * width * hidden + hidden**2


def _vertical_weights(size: NetworkSize) -> int:
    """Three layers, without biases."""
    hidden = vertical_hidden(size.width)
    return first_layer_weights(size.width) + hidden**2 + hidden * size.width


class HeadSize(NamedTuple):
    """What a draft head takes beside a target of a size; it may not be on this disk yet."""

    weights: Callable[[NetworkSize], int]
    cached_layers: int = 0  # with a KV cache as wide as the target's


HEAD_SIZES = {
    # a layer of the target, a projection of 2d x d, a token table
    "eagle": HeadSize(lambda size: size.layer_weights + 2 * size.width**2 + size.table * size.width, cached_layers=1),
    # that, and a projection of four hidden states
    "eagle3": HeadSize(lambda size: size.layer_weights + 6 * size.width**2 + size.table * size.width, cached_layers=1),
    "vertical": HeadSize(_vertical_weights),
}
"""By kind of draft head."""


_LLAMAGEN_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
"""Attention heads of the authors' sizes by width: their tensors do not tell."""


def llamagen_shape(tensors: Mapping, named: NetworkSize) -> tuple[int, int, int, int, int]:
    """Codes, width, width of a feed-forward layer, layers and width of a head in LlamaGen's tensors; of the last tells
    their rotary table, else the authors' size of this width, else the `named` model."""
    codes, width = tensors["output.weight"].shape
    inner = len(tensors["layers.0.feed_forward.w1.weight"])
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    if (table := tensors.get("freqs_cis")) is not None:
        return codes, width, inner, layers, 2 * table.shape[1]
    head = width // _LLAMAGEN_HEADS[width] if width in _LLAMAGEN_HEADS else named.head_size
    return codes, width, inner, layers, head


def network_size(
    family: str, words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int
) -> NetworkSize:
    """The size of a family's network, by the numbers in `families/models.toml` or in a configuration; `more` are those
    that only this family has."""
    size = NetworkSize(words, width, inner, layers, heads, kv_heads)
    return replace(size, **_BESIDES[family](size, **more))


def _chameleon(size: NetworkSize) -> dict[str, int]:
    """Chameleon: every head of queries and keys has a norm with bias."""
    return {"layer_extra": 2 * (size.heads + size.kv_heads) * size.head_size, "head_rows": size.words}


def _llamagen(size: NetworkSize, text_width: int = 2048, caption: int = 120) -> dict[str, int]:
    """LlamaGen: a caption projection, and learned vectors of the unconditional caption."""
    return {"extra": (text_width + size.width) * size.width + caption * text_width, "head_rows": size.words}


def _janus(size: NetworkSize, codes: int = 16_384) -> dict[str, int]:
    """Janus-Pro: image tokens have a table of eight numbers each, an aligner of two layers and a head of two."""
    table, aligner = 8 * codes, (8 + 1) * size.width + (size.width + 1) * size.width
    head = (size.width + 1) * size.width + codes
    extra = table + aligner + head + codes * size.width
    return {"extra": extra, "step_extra": aligner + head, "image_rows": codes}


def _tar_detokenizer(size: NetworkSize, image_tokens: int, features: int = 1152, codes: int = 729) -> dict[str, int]:
    """Tar's de-tokenizer, a LlamaGen with a projection of features and a vector for each position."""
    return {"extra": (features + 1 + codes + image_tokens - 1) * size.width, "head_rows": size.words}


def _qwen(size: NetworkSize, head_rows: int = 0) -> dict[str, int]:
    """Qwen2 (SimpleAR, Tar): queries, keys and values have biases; mostly the head shares the token table."""
    return {"layer_extra": size.query_width + 2 * size.key_width, "head_rows": head_rows}


def _glm(size: NetworkSize, codes: int = 16_512) -> dict[str, int]:
    """GLM-Image: four norms a layer, queries, keys and values with biases, and a head for image tokens alone."""
    return {"layer_extra": size.query_width + 2 * size.key_width + 2 * size.width, "head_rows": codes}


_BESIDES: Mapping[str, Callable[..., dict[str, int]]] = {
    **dict.fromkeys(("anole", "lumina", "lumina2"), _chameleon),
    **dict.fromkeys(("simplear", "tar"), _qwen),
    **{"llamagen": _llamagen, "tar_dtok": _tar_detokenizer, "janus": _janus, "glm": _glm},
    # learned vectors of the classes and of none
    "llamagen_class": lambda size, classes=1000: {"extra": (classes + 1) * size.width, "head_rows": size.words},
    "emu3": lambda size: {"head_rows": size.words},
    # a norm that all heads of the queries share, and another for the keys
    "emu35": lambda size: {"head_width": 128, "head_norms": 2, "head_rows": size.words},
    "liquid": lambda size, **more: more,
}
"""What a family's network has besides the six sizes of every network."""
