"""Sizes of each family's language model: parameters that do not follow from the six common sizes, and sizes that a
configuration may omit. Imports no torch, unlike the families' modules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specbench.models.network_sizes import SIZES, NetworkSize

CHAMELEON_WORDS = 65_536


@dataclass(frozen=True)
class FamilySizes:
    # computes further fields of `NetworkSize` from the six common sizes and from sizes that only this family has
    beside: Callable[..., dict[str, int]]
    # transformers' values for entries that a configuration omits; if the last value is missing, kv_heads = heads
    usual: tuple[int, ...] = ()
    head_width: int = 0  # 0 for width / heads


_LLAMAGEN_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
"""Attention heads of the authors' models by width; their tensors do not show them."""


def llamagen_shape(tensors: Mapping[str, Any], named: NetworkSize) -> tuple[int, int, int, int, int]:
    """Return codes, width, feed-forward width, layers and head width of LlamaGen's tensors. The head width comes from
    the rotary table, else from the authors' model of this width, else from the `named` model."""
    codes, width = tensors["output.weight"].shape
    inner = len(tensors["layers.0.feed_forward.w1.weight"])
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    if (table := tensors.get("freqs_cis")) is not None:
        return codes, width, inner, layers, 2 * table.shape[1]
    head = width // _LLAMAGEN_HEADS[width] if width in _LLAMAGEN_HEADS else named.head_size
    return codes, width, inner, layers, head


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
    """Qwen2 (SimpleAR, Tar): queries, keys and values have biases; in most models the head shares the token table."""
    return {"layer_extra": size.query_width + 2 * size.key_width, "head_rows": head_rows}


def _x_omni(size: NetworkSize, codes: int = 16_448) -> dict[str, int]:
    """X-Omni: a Qwen2 with a second table and norm, and a head for codes only."""
    return _qwen(size, codes) | {"extra": (codes + 1) * size.width, "step_extra": size.width, "image_rows": codes}


def _glm(size: NetworkSize, codes: int = 16_512) -> dict[str, int]:
    """GLM-Image: four norms a layer, queries, keys and values with biases, and a head for image tokens only."""
    return {"layer_extra": size.query_width + 2 * size.key_width + 2 * size.width, "head_rows": codes}


def glm_preview(height: int, width: int) -> tuple[tuple[int, int], ...]:
    """Return GLM-Image's preview grid: about 256 tokens in the grid's ratio, rounded down as in its processor."""
    ratio = height / width
    return ((int(math.sqrt(ratio) * 16), int(math.sqrt(1 / ratio) * 16)),)


_EMU3 = (184_622, 4096, 14_336, 32, 32, 8)
FAMILIES: Mapping[str, FamilySizes] = {  # by family
    **dict.fromkeys(("anole", "lumina", "lumina2"), FamilySizes(_chameleon, (CHAMELEON_WORDS, 4096, 11_008, 32, 32))),
    **dict.fromkeys(("simplear", "tar"), FamilySizes(_qwen, (151_936, 4096, 22_016, 32, 32))),
    "llamagen": FamilySizes(_llamagen),
    # learned vectors of the classes, and a vector for the unconditional row
    "llamagen_class": FamilySizes(
        lambda size, classes=1000: {"extra": (classes + 1) * size.width, "head_rows": size.words}
    ),
    "tar_dtok": FamilySizes(_tar_detokenizer),
    "janus": FamilySizes(_janus, (32_000, 4096, 11_008, 32, 32)),
    "x_omni": FamilySizes(_x_omni, (151_936, 4096, 22_016, 32, 32)),
    "glm": FamilySizes(_glm, (168_064, 4096, 13_696, 40, 32, 2)),
    "emu3": FamilySizes(lambda size: {"head_rows": size.words}, _EMU3),
    # one norm for all query heads, and another for all key heads
    "emu35": FamilySizes(lambda size: {"head_width": 128, "head_norms": 2, "head_rows": size.words}, _EMU3, 128),
    "liquid": FamilySizes(lambda size, **more: more, (264_192, 3072, 24_576, 28, 16, 16), 256),
}


def network_size(
    family: str, words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int
) -> NetworkSize:
    """Return the size of a family's network from the six numbers and, in `more`, sizes that only this family has."""
    size = NetworkSize(words, width, inner, layers, heads, kv_heads)
    return replace(size, **FAMILIES[family].beside(size, **more))


def default_sizes(family: str) -> dict[str, int]:
    """Return the sizes that a configuration may omit, by their names in a configuration."""
    sizes = FAMILIES[family]
    return dict(zip(SIZES, sizes.usual, strict=False)) | ({"head_dim": sizes.head_width} if sizes.head_width else {})
