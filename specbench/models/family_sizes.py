"""Sizes of each family's language model: parameters that do not follow from the six common sizes, sizes that a
configuration may omit, and the size of a checkpoint, so that plans use its real size. Unlike the
families' modules, it imports torch only to read LlamaGen's tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles, Source, json_object
from specbench.models.network_sizes import SIZES, NetworkSize

CHAMELEON_WORDS = 65_536


@dataclass(frozen=True)
class FamilySizes:
    # computes further fields of `NetworkSize` from the six common sizes and from sizes that only this family has
    beside: Callable[..., dict[str, int]]
    # transformers' values for entries that a configuration omits; if the last value is missing, kv_heads = heads
    usual: tuple[int, ...] = ()
    head_width: int = 0  # 0 for width / heads
    head_rows: bool = False  # whether the head is separate from the token table unless the configuration ties them
    # returns the grids before the last grid of the stream, from its height and width
    before: Callable[[int, int], tuple[tuple[int, int], ...]] | None = None
    # returns the size of a checkpoint whose layout has no transformers configuration, else None
    unconfigured: Callable[[Path, Source | None, NetworkSize], NetworkSize | None] = lambda *_: None


_LLAMAGEN_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
"""Attention heads of the authors' models by width; the tensors do not show the number of heads."""


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


def _of_llamagen(folder: Path, source: Source | None, named: NetworkSize) -> NetworkSize | None:
    """Return the size from the shapes of LlamaGen's mapped tensors, because it has no configuration file. A
    folder holds several models; only the first file of the source belongs to this model."""
    from specbench.models.checkpoint_loading import read_tensors  # imports torch

    if source is None:
        return None
    tensors = read_tensors(CheckpointFiles(source, (folder / source.files[0],)))
    codes, width, inner, layers, head = llamagen_shape(tensors, named)
    shape = codes, width, inner, layers, width // head, width // head
    if (classes := tensors.get("cls_embedding.embedding_table.weight")) is not None:
        return network_size("llamagen_class", *shape, classes=len(classes) - 1)
    caption, text_width = tensors["cls_embedding.uncond_embedding"].shape
    return network_size("llamagen", *shape, text_width=text_width, caption=caption)


def _of_meta(folder: Path, source: Source | None, named: NetworkSize) -> NetworkSize | None:
    """Return the size in Meta's `params.json`; the feed-forward width follows from the other entries."""
    for path in (folder / "models/7b/params.json", folder / "params.json"):
        if path.is_file():
            content = json_object(path)
            params = content.get("model", content)
            width, heads = params["dim"], params["n_heads"]
            least = int(params.get("ffn_dim_multiplier", 1) * int(8 * width / 3))
            unit = params.get("multiple_of", 256)
            inner = unit * -(-least // unit)
            words, kv_heads = params.get("vocab_size", CHAMELEON_WORDS), params.get("n_kv_heads") or heads
            return network_size("anole", words, width, inner, params["n_layers"], heads, kv_heads)
    return None


def _chameleon(size: NetworkSize) -> dict[str, int]:
    """Chameleon: every head of queries and keys has a norm with bias."""
    return {"layer_extra": 2 * (size.heads + size.kv_heads) * size.head_size, "head_rows": size.words}


def _llamagen(size: NetworkSize, text_width: int = 2048, caption: int = 120) -> dict[str, int]:
    """LlamaGen: a caption projection, and learned vectors of the unconditional caption."""
    return {"extra": (text_width + size.width) * size.width + caption * text_width, "head_rows": size.words}


def _janus(size: NetworkSize, codes: int = 16_384) -> dict[str, int]:
    """Janus-Pro: image tokens have a table of eight numbers each, an aligner of two layers and a head of two layers."""
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


def _glm_preview(height: int, width: int) -> tuple[tuple[int, int], ...]:
    """Return GLM-Image's preview grid: about 256 tokens in the grid's ratio, rounded down as in its processor."""
    ratio = height / width
    return ((int(math.sqrt(ratio) * 16), int(math.sqrt(1 / ratio) * 16)),)


_CHAMELEON, _QWEN = (CHAMELEON_WORDS, 4096, 11_008, 32, 32), (151_936, 4096, 22_016, 32, 32)
_EMU3 = (184_622, 4096, 14_336, 32, 32, 8)
FAMILIES: Mapping[str, FamilySizes] = {  # by family
    "anole": FamilySizes(_chameleon, _CHAMELEON, unconfigured=_of_meta),
    **dict.fromkeys(("lumina", "lumina2"), FamilySizes(_chameleon, _CHAMELEON)),
    "simplear": FamilySizes(_qwen, _QWEN),
    "tar": FamilySizes(_qwen, _QWEN, head_rows=True),
    "llamagen": FamilySizes(_llamagen, unconfigured=_of_llamagen),
    # learned vectors of the classes, and a vector for the unconditional row
    "llamagen_class": FamilySizes(
        lambda size, classes=1000: {"extra": (classes + 1) * size.width, "head_rows": size.words},
        unconfigured=_of_llamagen,
    ),
    "tar_dtok": FamilySizes(_tar_detokenizer),
    "janus": FamilySizes(_janus, (32_000, 4096, 11_008, 32, 32)),
    "x_omni": FamilySizes(_x_omni, _QWEN),
    "glm": FamilySizes(_glm, (168_064, 4096, 13_696, 40, 32, 2), before=_glm_preview),
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


CONFIGS = ("config.json", "vision_language_encoder/config.json")
"""Path of the language model's configuration in a repository."""


def stored_size(family: str, official: NetworkSize, folder: Path, source: Source | None = None) -> NetworkSize | None:
    """Return the size of the checkpoint in `folder`; None if its files do not show it (later the loader reports the
    reason). `source`: the language model's files."""
    try:
        return FAMILIES[family].unconfigured(folder, source, official) or _configured_size(family, folder)
    except (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, SpecbenchError):
        return None


def _configured_size(family: str, folder: Path) -> NetworkSize:
    config = json_object(next((path for path in map(folder.joinpath, CONFIGS) if path.is_file()), folder / CONFIGS[0]))
    text = config.get("text_config", config.get("language_config", config))
    usual = default_sizes(family)
    numbers = {name: value for name, value in (usual | text).items() if name in SIZES}
    numbers.setdefault("num_key_value_heads", numbers["num_attention_heads"])
    if min(map(int, numbers.values())) < 1 or numbers["hidden_size"] % numbers["num_attention_heads"]:
        raise ValueError("these sizes are not of a valid network")
    size = network_size(family, *(int(numbers[name]) for name in SIZES))
    if FAMILIES[family].head_rows and not text.get("tie_word_embeddings"):
        size = replace(size, head_rows=size.words)
    head = text.get("head_dim") or usual.get("head_dim", 0)
    return replace(size, head_width=int(head) if head * size.heads != size.width else 0)
