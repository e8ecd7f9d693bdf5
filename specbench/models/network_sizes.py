"""Sizes of the families' language models, and what follows from them. No torch here.

A checkpoint's own configuration gives the same numbers as the official sizes below, so that one of another size is
planned for as what it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkSize:
    """A decoder-only transformer with SwiGLU feed-forward layers.

    Attributes:
        words: rows of the token table.
        width, inner, layers: of the network; `inner` is the width of a feed-forward layer.
        heads, kv_heads: attention heads of queries, and of keys and values.
        head_width: of one head; width / heads if 0.
        layer_extra: parameters of a layer besides its six or seven matrices and two norms.
        extra, step_extra: parameters beside the layers, the token table and the head: all, and those read in a step.
        head_rows: rows of the output matrix that are stored; 0 where it shares the token table.
        image_rows: image tokens with a table of their own, beside the one of `words`.
    """

    words: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int = 0
    layer_extra: int = 0
    extra: int = 0
    step_extra: int = 0
    head_rows: int = 0
    image_rows: int = 0

    @property
    def table(self) -> int:
        """Rows of the token table that a draft head has a copy of."""
        return self.words + self.image_rows

    def config(self) -> dict[str, int]:
        """The sizes under transformers' names."""
        return {
            "vocab_size": self.words,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }

    @property
    def query_width(self) -> int:
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def key_width(self) -> int:
        return self.kv_heads * (self.head_width or self.width // self.heads)

    @property
    def trunk(self) -> int:
        """Parameters of the layers and the last norm."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        layer = attention + 3 * self.width * self.inner + 2 * self.width + self.layer_extra
        return self.layers * layer + self.width

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

    @property
    def attention_numbers(self) -> int:
        """Width of the queries, summed over layers."""
        return self.layers * self.query_width


def chameleon(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> NetworkSize:
    """Chameleon: every head of queries and keys has a norm with bias."""
    norms = 2 * (heads + kv_heads) * (width // heads)
    return NetworkSize(words, width, inner, layers, heads, kv_heads, layer_extra=norms, head_rows=words)


def llamagen(
    codes: int, width: int, inner: int, layers: int, text_width: int = 2048, caption: int = 120
) -> NetworkSize:
    """LlamaGen: heads of 64, a caption projection, and learned vectors of the unconditional caption."""
    caption_parameters = (text_width + width) * width + caption * text_width
    heads = width // 64
    return NetworkSize(codes, width, inner, layers, heads, heads, extra=caption_parameters, head_rows=codes)


def janus(
    words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, codes: int = 16_384
) -> NetworkSize:
    """Janus-Pro: image tokens have a table of eight numbers each, an aligner of two layers and a head of two."""
    table, aligner = 8 * codes, (8 + 1) * width + (width + 1) * width
    head = (width + 1) * width + codes
    return NetworkSize(
        words,
        width,
        inner,
        layers,
        heads,
        kv_heads,
        extra=table + aligner + head + codes * width,
        step_extra=aligner + head,
        image_rows=codes,
    )


def qwen(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> NetworkSize:
    """Qwen2 (SimpleAR): queries, keys and values have biases; the head shares the token table."""
    biases = width + 2 * kv_heads * (width // heads)
    return NetworkSize(words, width, inner, layers, heads, kv_heads, layer_extra=biases)


def emu3(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> NetworkSize:
    """Emu3."""
    return NetworkSize(words, width, inner, layers, heads, kv_heads, head_rows=words)


CHAMELEON_7B = chameleon(65_536, 4096, 11_008, 32, 32, 32)
CHAMELEON_34B = chameleon(65_536, 8192, 22_016, 48, 64, 8)
LLAMAGEN_XL = llamagen(16_384, 1280, 3584, 36)
JANUS_1B = janus(102_400, 2048, 5632, 24, 16, 16)
JANUS_7B = janus(102_400, 4096, 11_008, 30, 32, 32)
SIMPLEAR_05B = qwen(215_672, 896, 4864, 24, 14, 2)
SIMPLEAR_15B = qwen(215_672, 1536, 8960, 28, 12, 2)
EMU3_8B = emu3(184_622, 4096, 14_336, 32, 32, 8)
