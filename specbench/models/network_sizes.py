"""Sizes of the families' language models: the official ones, those of a checkpoint, and what follows from them.

A checkpoint's own configuration gives the same numbers as the official sizes below, so that one of another size is
planned for as what it is. No torch, but for LlamaGen's checkpoints, which have no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import MAX_JSON_BYTES
from specbench.system.files import read_regular
from specbench.system.json_values import parse_json


@dataclass(frozen=True)
class NetworkSize:
    """A decoder-only transformer with SwiGLU feed-forward layers.

    Attributes:
        words: rows of the token table.
        width, inner, layers: of the network; `inner` is the width of a feed-forward layer.
        heads, kv_heads: attention heads of queries, and of keys and values.
        head_width: of one head; width / heads if 0.
        head_norms: norms of a layer that are as wide as a head.
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
    head_norms: int = 0
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
        """The sizes under transformers' names, in the order of the arguments."""
        return {
            "vocab_size": self.words,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        } | ({"head_dim": self.head_width} if self.head_width else {})

    @property
    def query_width(self) -> int:
        return self.heads * self.one_head

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.one_head

    @property
    def one_head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def trunk(self) -> int:
        """Parameters of the layers and the last norm."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        layer = attention + 3 * self.width * self.inner + 2 * self.width + self.layer_extra
        return self.layers * (layer + self.head_norms * self.one_head) + self.width

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


_LLAMAGEN_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
"""Attention heads of the authors' sizes by width: their tensors do not tell."""


def llamagen_head(tensors: Mapping, named: NetworkSize) -> int:
    """Width of a head in LlamaGen's tensors, by their rotary table, else by the authors' size of this width, else by
    the `named` model."""
    if (table := tensors.get("freqs_cis")) is not None:
        return 2 * table.shape[1]
    width = tensors["output.weight"].shape[1]
    return width // _LLAMAGEN_HEADS[width] if width in _LLAMAGEN_HEADS else named.one_head


def llamagen(
    codes: int, width: int, inner: int, layers: int, heads: int, text_width: int = 2048, caption: int = 120
) -> NetworkSize:
    """LlamaGen: a caption projection, and learned vectors of the unconditional caption."""
    caption_parameters = (text_width + width) * width + caption * text_width
    return NetworkSize(codes, width, inner, layers, heads, heads, extra=caption_parameters, head_rows=codes)


def llamagen_class(codes: int, width: int, inner: int, layers: int, heads: int, classes: int = 1000) -> NetworkSize:
    """LlamaGen by class: learned vectors of the classes and of none."""
    return NetworkSize(codes, width, inner, layers, heads, heads, extra=(classes + 1) * width, head_rows=codes)


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


def tar_detokenizer(
    image_tokens: int, width: int, layers: int, heads: int, features: int = 1152, codes: int = 729
) -> NetworkSize:
    """Tar's de-tokenizer, a LlamaGen with a projection of features and a vector for each position."""
    extra = (features + 1 + codes + image_tokens - 1) * width
    inner = 256 * -(-(8 * width // 3) // 256)
    return NetworkSize(16_384, width, inner, layers, heads, heads, extra=extra, head_rows=16_384)


def qwen(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> NetworkSize:
    """Qwen2 (SimpleAR, Tar): queries, keys and values have biases; the head shares the token table."""
    biases = width + 2 * kv_heads * (width // heads)
    return NetworkSize(words, width, inner, layers, heads, kv_heads, layer_extra=biases)


def emu3(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> NetworkSize:
    """Emu3: nothing besides the matrices; the head is stored."""
    return NetworkSize(words, width, inner, layers, heads, kv_heads, head_rows=words)


def glm(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, codes: int = 16_512) -> NetworkSize:
    """GLM-Image: four norms a layer, queries, keys and values with biases, and a head of its own for image tokens."""
    more = width + 2 * kv_heads * (width // heads) + 2 * width
    return NetworkSize(words, width, inner, layers, heads, kv_heads, layer_extra=more, head_rows=codes)


def emu35(words: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> NetworkSize:
    """Emu3.5: as Emu3, with a norm that all heads of the queries share and one for the keys; heads of 128."""
    return NetworkSize(words, width, inner, layers, heads, kv_heads, 128, head_norms=2, head_rows=words)


CHAMELEON_7B = chameleon(65_536, 4096, 11_008, 32, 32, 32)
CHAMELEON_34B = chameleon(65_536, 8192, 22_016, 48, 64, 8)
LUMINA2_7B = chameleon(171_384, 4096, 11_008, 32, 32, 32)
"""The fewest words that hold the image tokens; how many more its configuration has was not seen."""
LLAMAGEN_XL = llamagen(16_384, 1280, 3584, 36, 20)
LLAMAGEN_CLASS = {
    "b": llamagen_class(16_384, 768, 2048, 12, 12),
    "l": llamagen_class(16_384, 1024, 2816, 24, 16),
    "xl": llamagen_class(16_384, 1280, 3584, 36, 20),
    "xxl": llamagen_class(16_384, 1536, 4096, 48, 24),
    "3b": llamagen_class(16_384, 3200, 8704, 24, 32),
}
JANUS_1B = janus(102_400, 2048, 5632, 24, 16, 16)
JANUS_7B = janus(102_400, 4096, 11_008, 30, 32, 32)
SIMPLEAR_05B = qwen(215_672, 896, 4864, 24, 14, 2)
SIMPLEAR_15B = qwen(215_672, 1536, 8960, 28, 12, 2)
TAR_15B = qwen(217_206, 1536, 8960, 28, 12, 2)
"""Words as the authors' training script adds them to Qwen2.5's; the published configuration was not seen."""
TAR_7B = replace(qwen(217_206, 3584, 18_944, 28, 28, 4), head_rows=217_206)
LIQUID_7B = NetworkSize(264_192, 3072, 24_576, 28, 16, 16, head_width=256)
GLM_9B = glm(168_064, 4096, 13_696, 40, 32, 2)
EMU3_8B = emu3(184_622, 4096, 14_336, 32, 32, 8)
EMU35_34B = emu35(282_926, 5120, 25_600, 64, 64, 8)
OFFICIAL = {
    "anole": {"anole": CHAMELEON_7B},
    "lumina": {"lumina": CHAMELEON_7B, "lumina-34b": CHAMELEON_34B},
    "lumina2": {"lumina2": LUMINA2_7B},
    "llamagen": {"llamagen": LLAMAGEN_XL},
    "llamagen_class": {f"llamagen-c2i-{name}": size for name, size in LLAMAGEN_CLASS.items()},
    "janus": {"janus": JANUS_1B, "janus-7b": JANUS_7B},
    "simplear": {"simplear": SIMPLEAR_05B, "simplear-1.5b": SIMPLEAR_15B},
    "tar": {"tar-1.5b": TAR_15B, "tar-7b": TAR_7B},
    "emu3": {"emu3": EMU3_8B},
    "liquid": {"liquid": LIQUID_7B},
    "glm": {"glm-image": GLM_9B},
    "emu35": {"emu3.5": EMU35_34B},
}
"""Published sizes of each family by the name of a model that has it."""
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS = {
    "anole": _LLAMA | {"vocab_size": 65_536},
    "lumina": _LLAMA | {"vocab_size": 65_536},
    "lumina2": _LLAMA | {"vocab_size": 65_536},
    "janus": _LLAMA | {"vocab_size": 32_000},
    "simplear": _LLAMA | {"vocab_size": 151_936, "intermediate_size": 22_016},
    "tar": _LLAMA | {"vocab_size": 151_936, "intermediate_size": 22_016},
    "emu3": EMU3_8B.config(),
    "liquid": LIQUID_7B.config(),
    "glm": GLM_9B.config(),
    "emu35": EMU3_8B.config() | {"head_dim": 128},
}
"""What transformers takes for an entry that a configuration leaves out."""
_MAKERS = {"liquid": NetworkSize, "glm": glm, "emu35": emu35, "janus": janus, "simplear": qwen, "emu3": emu3}
_MAKERS |= {"tar": qwen} | dict.fromkeys(("anole", "lumina", "lumina2"), chameleon)
_DOES_NOT_TELL = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, SpecbenchError)
"""What reading sizes off files of others may raise."""


def stored_size(
    family: str, official: NetworkSize, folder: Path, weights: str | None = None, file: str = ""
) -> NetworkSize | None:
    """The size of the checkpoint in `folder`; None where its files do not tell: whoever loads it says why.

    Args:
        file: name of the model's own file, in a folder that may hold several models.
        weights: what the user calls it, if not `folder`.

    Raises:
        SpecbenchError: it has the published size of another model of the family.
    """
    try:
        of_llamagen = family.startswith("llamagen")
        size = _llamagen_size(folder / file, official) if of_llamagen else _configured_size(family, folder)
    except _DOES_NOT_TELL:
        return None
    if size != official:
        for name, published in OFFICIAL[family].items():
            if size == published:
                raise SpecbenchError(f"--weights {weights or folder}: has the size of '{name}'", f"use --model {name}")
    return size


CONFIGS = ("config.json", "vision_language_encoder/config.json")
"""Where a repository keeps the configuration of its language model."""


def _configured_size(family: str, folder: Path) -> NetworkSize:
    meta = next((path for path in (folder / "models/7b/params.json", folder / "params.json") if path.is_file()), None)
    if family == "anole" and meta:
        return _meta_size(_read_object(meta))
    held = _read_object(next((path for path in map(folder.joinpath, CONFIGS) if path.is_file()), folder / CONFIGS[0]))
    text = held.get("text_config", held.get("language_config", held))
    given = _DEFAULTS[family] | {name: text[name] for name in EMU3_8B.config() if name in text}
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    if min(map(int, given.values())) < 1 or given["hidden_size"] % given["num_attention_heads"]:
        raise ValueError("sizes that make no network")
    size = _MAKERS[family](*(int(given[name]) for name in EMU3_8B.config()))
    if family == "tar" and not text.get("tie_word_embeddings"):
        size = replace(size, head_rows=size.words)
    head = text.get("head_dim") or _DEFAULTS[family].get("head_dim", 0)
    return replace(size, head_width=int(head) if head * size.heads != size.width else 0)


def _meta_size(held: Mapping) -> NetworkSize:
    """Meta's `params.json`; the width of feed-forward layers follows from the others."""
    params = held.get("model", held)
    width, heads = params["dim"], params["n_heads"]
    wanted = int(params.get("ffn_dim_multiplier", 1) * int(8 * width / 3))
    unit = params.get("multiple_of", 256)
    inner = unit * -(-wanted // unit)
    words = params.get("vocab_size", CHAMELEON_7B.words)
    return chameleon(words, width, inner, params["n_layers"], heads, params.get("n_kv_heads") or heads)


def _llamagen_size(path: Path, named: NetworkSize) -> NetworkSize:
    """LlamaGen has no configuration: the shapes of its tensors tell, which are mapped into memory rather than read."""
    import argparse  # only for LlamaGen's pickled files

    import torch  # only for LlamaGen's pickled files

    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch promises nothing about damaged files
        raise ValueError(str(error)) from error
    tensors = next((held[name] for name in ("model", "module", "state_dict") if name in held), held)
    codes, width = tensors["output.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    inner = len(tensors["layers.0.feed_forward.w1.weight"])
    sizes = codes, width, inner, layers, width // llamagen_head(tensors, named)
    if (classes := tensors.get("cls_embedding.embedding_table.weight")) is not None:
        return llamagen_class(*sizes, len(classes) - 1)
    caption, text_width = tensors["cls_embedding.uncond_embedding"].shape
    return llamagen(*sizes, text_width, caption)


def _read_object(path: Path) -> dict:
    held = parse_json(read_regular(path, MAX_JSON_BYTES))
    if not isinstance(held, dict):
        raise ValueError(f"no JSON object in {path}")
    return held
