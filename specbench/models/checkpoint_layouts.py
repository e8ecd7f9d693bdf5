"""The layouts in which the supported families are published, and how a folder's layout is recognised. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import (
    INDEX,
    MAX_JSON_BYTES,
    CheckpointFiles,
    Source,
    fetch_checkpoint,
    find_checkpoint,
    local_folder,
    missing_checkpoint,
)
from specbench.models.hub_downloads import cached_snapshot, repository_download, require_permission
from specbench.system.downloads import Download, fetch_all
from specbench.system.files import read_regular
from specbench.system.json_values import parse_json

_MARKS = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "models/7b/params.json",
    INDEX,
    "vision_language_encoder/config.json",
)
"""Small files that suffice to recognise a repository."""


_CHAMELEON_WORDS = 65_536


@dataclass(frozen=True)
class Layout:
    """One way in which a model's files are published.

    Attributes:
        name: a key of `LAYOUTS`.
        sources: the language model's files, then what it needs besides.
    """

    name: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class LayoutMark:
    """What identifies a folder of a layout.

    Attributes:
        family: module of `specbench.models.families` that reads it.
        models: names for `--model`.
        what: for messages.
        test: whether a folder is of this layout.
        shared: other families that pass the test where a copy lacks their own mark: there the user knows better.
    """

    family: str
    models: str
    what: str
    test: Callable[[Path], bool]
    shared: tuple[str, ...] = ()


def _model_type(*names: str) -> Callable[[Path], bool]:
    return lambda folder: _config(folder).get("model_type") in names


def _config(folder: Path) -> dict[str, object]:
    """`config.json`, or nothing where it cannot be read: whoever loads it says why."""
    try:
        held = parse_json(read_regular(folder / "config.json", MAX_JSON_BYTES))
    except (OSError, ValueError, SpecbenchError):
        return {}
    return held if isinstance(held, dict) else {}


def _chameleon(decodes: bool | None) -> Callable[[Path], bool]:
    """Lumina-mGPT and Anole share an architecture; only Anole's repository holds the image decoder. Lumina-mGPT 2.0,
    None, has a larger vocabulary."""

    def test(folder: Path) -> bool:
        config = _config(folder)
        words = config.get("vocab_size")
        if not str(config.get("model_type")).startswith("chameleon"):
            return False
        if decodes is None:
            return isinstance(words, int) and words > _CHAMELEON_WORDS
        return _holds(folder, "model.vqmodel.decoder.") is decodes

    return test


def _holds(folder: Path, prefix: str) -> bool | None:
    """Whether a stored tensor's name starts so; None where the files do not tell."""
    try:
        if (folder / INDEX).is_file():
            names = parse_json(read_regular(folder / INDEX, MAX_JSON_BYTES))["weight_map"]
        else:
            with (folder / INDEX.removesuffix(".index.json")).open("rb") as file:
                names = parse_json(file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000)))
        return any(name.startswith(prefix) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecbenchError):
        return None


def _any(*patterns: str) -> Callable[[Path], bool]:
    return lambda folder: any(next(folder.glob(pattern), None) for pattern in patterns)


LAYOUTS = {
    "janus": LayoutMark("janus", "janus or janus-7b", "Janus-Pro converted for transformers", _model_type("janus")),
    "janus-deepseek": LayoutMark(
        "janus", "janus or janus-7b", "Janus-Pro as deepseek-ai publishes it", _model_type("multi_modality")
    ),
    # Emu3.5 has the model type of Emu3, which has no norms of queries and keys.
    "emu3.5": LayoutMark(
        "emu35",
        "emu3.5",
        "Emu3.5",
        lambda folder: _model_type("Emu3")(folder) and bool(_holds(folder, "model.layers.0.self_attn.q_norm.")),
    ),
    "emu3": LayoutMark("emu3", "emu3", "Emu3 converted for transformers", _model_type("emu3")),
    "emu3-baai": LayoutMark(
        "emu3",
        "emu3",
        "Emu3 as BAAI publishes it",
        lambda folder: _model_type("Emu3")(folder) or _any("emu3.tiktoken")(folder),
    ),
    "lumina2": LayoutMark("lumina2", "lumina2", "Lumina-mGPT 2.0", _chameleon(decodes=None)),
    "anole": LayoutMark("anole", "anole", "Anole converted for transformers", _chameleon(decodes=True)),
    "anole-meta": LayoutMark(
        "anole",
        "anole",
        "a Chameleon model in Meta's layout",
        _any("models/7b/params.json", "params.json", "models/7b/consolidated*.pth", "consolidated*.pth"),
    ),
    "lumina": LayoutMark(
        "lumina", "lumina, lumina-512, lumina-1024 or lumina-34b", "Lumina-mGPT", _chameleon(decodes=False)
    ),
    "tar": LayoutMark(
        "tar", "tar-1.5b or tar-7b", "Tar's language model", lambda folder: "num_scale_tokens" in _config(folder)
    ),
    "tar-dtok": LayoutMark(
        "tar_dtok", "tar-dtok-256, tar-dtok-512 or tar-dtok-1024", "Tar's de-tokenizer", _any("ar_dtok_*.pth")
    ),
    "llamagen": LayoutMark(
        "llamagen",
        "llamagen or llamagen-512",
        "LlamaGen text-to-image",
        _any("t2i_*.pt", "vq_ds16_t2i.pt"),
        ("tar", "tar_dtok"),
    ),
    "llamagen-c2i": LayoutMark(
        "llamagen_class", "llamagen-c2i-b to llamagen-c2i-3b", "LlamaGen by class", _any("c2i_*.pt", "vq_ds16_c2i.pt")
    ),
    "glm": LayoutMark("glm", "glm-image", "GLM-Image", _any("vision_language_encoder/config.json")),
    "liquid": LayoutMark("liquid", "liquid", "Liquid", _model_type("gemma")),
    "simplear": LayoutMark("simplear", "simplear or simplear-1.5b", "SimpleAR", _model_type("qwen2"), ("tar",)),
}


def recognise(folder: Path) -> str | None:
    """Name of the layout that a folder's files are in, None if it is none of the known ones."""
    return next((name for name, mark in LAYOUTS.items() if mark.test(folder)), None)


def _refuse_unread(folder: Path, weights: str, family: str) -> None:
    """Refuse what other programs keep in folders beside whole checkpoints: adapters, and formats that are not read."""
    holds = _any("*.safetensors", "*.bin", "*.pt", "*.pth")(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        what = "is a LoRA adapter, not a model"
        fix = "merge it into its base and save that: peft's merge_and_unload(), save_pretrained()"
    elif _any("*.gguf")(folder) and not holds:
        what, fix = "holds GGUF, weights for llama.cpp", "name the safetensors that they were made from"
    elif _any("consolidated*.pth")(folder) and family != "anole" and not _any("config.json", "*.safetensors")(folder):
        what = "holds consolidated.*.pth, Meta's layout, which only --model anole reads"
        fix = "convert it with transformers' convert_*_weights_to_hf.py, and name the result"
    else:
        return
    raise SpecbenchError(f"--weights {weights} {what}", fix)


def find_marks(source: Source, repo: str, revision: str | None, download: bool) -> Path | None:
    """Snapshot of a hub repository with the small files that identify it; None where it is not on this disk.

    Raises:
        SpecbenchError: exit code 5 where a download fails; exit code 2 for what is no hub id.
    """
    found = cached_snapshot(repo, revision)
    if download and not (found and any((found / name).is_file() for name in _MARKS)):
        fetch_all([repository_download(repo, revision, (), source.licence_of(repo), _MARKS)])
        found = cached_snapshot(repo, revision)
    return found


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model as a user asks for them.

    Attributes:
        model: its name, for messages.
        family: whose layouts these are; the first is the one that is used by default.
        weights: a folder or a hub id that takes the place of the first layout's language model.
        revision: of the hub repository.
    """

    model: str
    family: str
    layouts: tuple[Layout, ...]
    weights: str | None
    revision: str | None

    def locate(self, download: bool) -> tuple[CheckpointFiles, ...]:
        """All files, the language model's first, with `download` after fetching what is not on this disk.

        Raises:
            SpecbenchError: exit code 5, naming what is missing; exit code 2 where the files are of another family.
        """
        get = fetch_checkpoint if download else find_checkpoint
        return tuple(get(*asked) for asked in self._asked(download))

    def missing(self) -> list[Download]:
        """What `locate` would download; errors as there."""
        return [found for asked in self._asked(download=True) if (found := missing_checkpoint(*asked))]

    def absent(self) -> list[tuple[Source, str | None, str | None, bool]]:
        """Those of `_asked` whose files are not on this disk."""

        def here(*asked: Any) -> bool:
            try:
                return bool(find_checkpoint(*asked))
            except SpecbenchError:
                return False

        return [asked for asked in self._asked(download=False) if not here(*asked)]

    def require_known(self) -> None:
        """Check that every file is on this disk or may be downloaded; errors as of `locate`."""
        for source, weights, revision, main in self.absent():
            require_permission((main and weights) or source.repo, revision)

    def _asked(self, download: bool) -> list[tuple[Source, str | None, str | None, bool]]:
        """Arguments of `find_checkpoint` for each source of the layout at hand."""
        main, *companions = self._layout(download).sources
        return [(main, self.weights, self.revision, True), *((one, self.weights, None, False) for one in companions)]

    def _layout(self, download: bool) -> Layout:
        if self.weights is None:
            return self.layouts[0]
        folder = local_folder(self.weights)
        if folder is None:
            for layout in self.layouts:
                if layout.sources[0].repo == self.weights:
                    return layout
            download = download and len(self.layouts) > 1
            folder = find_marks(self.layouts[0].sources[0], self.weights, self.revision, download)
        main = self.layouts[0]
        if folder and all((folder / name).is_file() for name in main.sources[0].files):
            return main  # its files by name, though others' may lie beside them
        if folder:
            _refuse_unread(folder, self.weights, self.family)
        name = recognise(folder) if folder else None
        if name and self.family not in (LAYOUTS[name].family, *LAYOUTS[name].shared):
            what = f"--weights {self.weights}: holds {LAYOUTS[name].what}, not '{self.model}'"
            raise SpecbenchError(what, f"use --model {LAYOUTS[name].models}")
        return next((layout for layout in self.layouts if layout.name == name), self.layouts[0])
