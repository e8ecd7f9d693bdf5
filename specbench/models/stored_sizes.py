"""The size of a language model, read from the configuration of its checkpoint. No torch until it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models import network_sizes as sizes
from specbench.models.checkpoint_files import MAX_JSON_BYTES
from specbench.models.network_sizes import NetworkSize
from specbench.system.json_values import parse_json
from specbench.system.reading import read_regular

OFFICIAL = {
    "anole": {"anole": sizes.CHAMELEON_7B},
    "lumina": {"lumina": sizes.CHAMELEON_7B, "lumina-34b": sizes.CHAMELEON_34B},
    "llamagen": {"llamagen": sizes.LLAMAGEN_XL},
    "janus": {"janus": sizes.JANUS_1B, "janus-7b": sizes.JANUS_7B},
    "simplear": {"simplear": sizes.SIMPLEAR_05B, "simplear-1.5b": sizes.SIMPLEAR_15B},
    "emu3": {"emu3": sizes.EMU3_8B},
}
"""Published sizes of each family by the name of a model that has it."""
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS = {
    "anole": _LLAMA | {"vocab_size": 65_536},
    "lumina": _LLAMA | {"vocab_size": 65_536},
    "janus": _LLAMA | {"vocab_size": 32_000},
    "simplear": _LLAMA | {"vocab_size": 151_936, "intermediate_size": 22_016},
    "emu3": sizes.EMU3_8B.config(),
}
"""What transformers takes for an entry that a configuration leaves out."""
_MAKERS = {
    "anole": sizes.chameleon,
    "lumina": sizes.chameleon,
    "janus": sizes.janus,
    "simplear": sizes.qwen,
    "emu3": sizes.emu3,
}


_DOES_NOT_TELL = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, SpecbenchError)
"""What reading sizes off files of others may raise."""


def stored_size(family: str, official: NetworkSize, folder: Path, weights: str | None = None) -> NetworkSize | None:
    """The size of the checkpoint in `folder`; None where its files do not tell: whoever loads it says why.

    Args:
        weights: what the user calls it, if not `folder`.

    Raises:
        SpecbenchError: it has the published size of another model of the family.
    """
    try:
        size = _llamagen(folder) if family == "llamagen" else _configured(family, folder)
    except _DOES_NOT_TELL:
        return None
    if size != official:
        for name, published in OFFICIAL[family].items():
            if size == published:
                raise SpecbenchError(f"--weights {weights or folder}: has the size of '{name}'", f"use --model {name}")
    return size


def _configured(family: str, folder: Path) -> NetworkSize:
    meta = next((path for path in (folder / "models/7b/params.json", folder / "params.json") if path.is_file()), None)
    if family == "anole" and meta:
        return _meta(_read(meta))
    held = _read(folder / "config.json")
    text = held.get("text_config", held.get("language_config", held))
    given = _DEFAULTS[family] | {name: text[name] for name in sizes.EMU3_8B.config() if name in text}
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    if min(map(int, given.values())) < 1 or given["hidden_size"] % given["num_attention_heads"]:
        raise ValueError("sizes that make no network")
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    return _MAKERS[family](*(int(given[name]) for name in names.split()))


def _meta(held: Mapping) -> NetworkSize:
    """Meta's `params.json`; the width of feed-forward layers follows from the others."""
    params = held.get("model", held)
    width, heads = params["dim"], params["n_heads"]
    wanted = int(params.get("ffn_dim_multiplier", 1) * int(8 * width / 3))
    unit = params.get("multiple_of", 256)
    inner = unit * -(-wanted // unit)
    words = params.get("vocab_size", sizes.CHAMELEON_7B.words)
    return sizes.chameleon(words, width, inner, params["n_layers"], heads, params.get("n_kv_heads") or heads)


def _llamagen(folder: Path) -> NetworkSize:
    """LlamaGen has no configuration: the shapes of its tensors tell, which are mapped into memory rather than read."""
    import argparse  # only for LlamaGen's pickled files

    import torch  # only for LlamaGen's pickled files

    paths = sorted(folder.glob("t2i_*.pt"))
    if not paths:
        raise ValueError("no t2i_*.pt")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            held = torch.load(paths[0], map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch promises nothing about damaged files
        raise ValueError(str(error)) from error
    tensors = held["model"] if "model" in held else held["module"] if "module" in held else held["state_dict"]
    codes, width = tensors["output.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    caption, text_width = tensors["cls_embedding.uncond_embedding"].shape
    inner = len(tensors["layers.0.feed_forward.w1.weight"])
    return sizes.llamagen(codes, width, inner, layers, text_width, caption)


def _read(path: Path) -> dict:
    held = parse_json(read_regular(path, MAX_JSON_BYTES))
    if not isinstance(held, dict):
        raise ValueError(f"no JSON object in {path}")
    return held
