"""Layouts in which the supported families are published, and recognition of a folder's layout. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import INDEX, CheckpointFiles, Source, WantedFiles, json_object, local_folder
from specbench.models.facts import ModelChoice
from specbench.models.family_sizes import CHAMELEON_WORDS
from specbench.models.hub_downloads import require_permission
from specbench.system.digests import sha256_of
from specbench.system.downloads import Download, offline
from specbench.system.json_values import parse_json


@dataclass(frozen=True)
class Layout:
    """Files in which a model is published; a model may have several layouts."""

    name: str  # a key of `LAYOUTS`
    sources: tuple[Source, ...]  # the language model's files, then other required files


@dataclass(frozen=True)
class LayoutMark:
    """Test that identifies a folder of a layout."""

    family: str  # module of `specbench.models.families` that reads this layout
    models: str  # names for `--model`
    what: str  # description for messages
    test: Callable[[Path], bool]  # whether a folder is of this layout
    # other families whose folders may also pass this test; the user's `--model` decides between the families
    shared: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()  # layouts that take precedence if a folder also passes their test


def _model_type(*names: str) -> Callable[[Path], bool]:
    return lambda folder: _config(folder).get("model_type") in names


def _config(folder: Path) -> dict[str, Any]:
    """Read `config.json`. If it cannot be read, return an empty dictionary; later the loader reports the reason."""
    try:
        return json_object(folder / "config.json")
    except (OSError, ValueError, SpecbenchError):
        return {}


def _chameleon(decodes: bool | None) -> Callable[[Path], bool]:
    """Test for Anole (`decodes` True), Lumina-mGPT (False: no image decoder) or 2.0 (None: larger vocabulary)."""

    def test(folder: Path) -> bool:
        config = _config(folder)
        words = config.get("vocab_size")
        if not str(config.get("model_type")).startswith("chameleon"):
            return False
        if decodes is None:
            return isinstance(words, int) and words > CHAMELEON_WORDS
        return _holds(folder, "model.vqmodel.decoder.") is decodes

    return test


def _holds(folder: Path, prefix: str) -> bool | None:
    """Return whether a stored tensor's name starts with `prefix`; None if unknown."""
    try:
        if (folder / INDEX).is_file():
            names: Any = json_object(folder / INDEX)["weight_map"]
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
    # Emu3.5 has Emu3's model type, but only Emu3.5 has norms of queries and keys.
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
        unless=("emu3.5", "emu3"),
    ),
    "lumina2": LayoutMark("lumina2", "lumina2", "Lumina-mGPT 2.0", _chameleon(decodes=None)),
    "anole": LayoutMark(
        "anole", "anole", "Anole converted for transformers", _chameleon(decodes=True), unless=("lumina2",)
    ),
    "anole-meta": LayoutMark(
        "anole",
        "anole",
        "a Chameleon model in Meta's layout",
        _any("models/7b/params.json", "params.json", "models/7b/consolidated*.pth", "consolidated*.pth"),
        unless=("anole", "lumina2", "emu3", "emu3-baai", "emu3.5", "janus", "janus-deepseek"),
    ),
    "lumina": LayoutMark(
        "lumina",
        "lumina, lumina-512, lumina-1024 or lumina-34b",
        "Lumina-mGPT",
        _chameleon(decodes=False),
        unless=("anole-meta", "lumina2"),
    ),
    "tar": LayoutMark(
        "tar", "tar-1.5b or tar-7b", "Tar's language model", lambda folder: "num_scale_tokens" in _config(folder)
    ),
    "tar-dtok": LayoutMark(
        "tar_dtok",
        "tar-dtok-256, tar-dtok-512 or tar-dtok-1024",
        "Tar's de-tokenizer",
        _any("ar_dtok_*.pth"),
        unless=("tar",),
    ),
    "llamagen": LayoutMark(
        "llamagen",
        "llamagen or llamagen-512",
        "LlamaGen text-to-image",
        _any("t2i_*.pt", "vq_ds16_t2i.pt"),
        ("tar", "tar_dtok"),
        unless=("tar", "tar-dtok"),
    ),
    "llamagen-c2i": LayoutMark(
        "llamagen_class",
        "llamagen-c2i-b to llamagen-c2i-3b",
        "LlamaGen by class",
        _any("c2i_*.pt", "vq_ds16_c2i.pt"),
        unless=("llamagen", "tar", "tar-dtok"),
    ),
    "glm": LayoutMark("glm", "glm-image", "GLM-Image", _any("vision_language_encoder/config.json")),
    "x-omni": LayoutMark("x_omni", "x-omni", "X-Omni", _model_type("x-omni")),
    "liquid": LayoutMark("liquid", "liquid", "Liquid", _model_type("gemma")),
    "simplear": LayoutMark(
        "simplear",
        "simplear or simplear-1.5b",
        "SimpleAR",
        _model_type("qwen2"),
        ("tar",),
        ("tar", "tar-dtok", "llamagen"),
    ),
}
_META = LAYOUTS["anole-meta"]


def recognise(folder: Path) -> str | None:
    """Return the name of the layout of a folder's files; None if unknown."""
    held = [name for name, mark in LAYOUTS.items() if mark.test(folder)]
    return next((name for name in held if not set(held) & set(LAYOUTS[name].unless)), None)


def _refuse_unread(folder: Path, weights: str, family: str) -> None:
    """Refuse folders of adapters and of unsupported formats."""
    holds = _any("*.safetensors", "*.bin", "*.pt", "*.pth")(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        what = "is a LoRA adapter, not a model"
        fix = "merge it into its base model and save the result: peft's merge_and_unload(), save_pretrained()"
    elif _any("*.gguf")(folder) and not holds:
        what, fix = "contains GGUF weights for llama.cpp", "use the safetensors from which they were made"
    elif (
        _any("consolidated*.pth")(folder)
        and family != _META.family
        and not _any("config.json", "*.safetensors")(folder)
    ):
        what = f"contains consolidated.*.pth, Meta's layout, which only --model {_META.models} can read"
        fix = "convert it with transformers' convert_*_weights_to_hf.py, and use the result"
    else:
        return
    raise SpecbenchError(f"--weights {weights} {what}", fix)


@dataclass(frozen=True)
class ModelFiles:
    """A user's request for the files of a model."""

    model: str  # the model's name, for messages
    layouts: tuple[Layout, ...]  # possible layouts; the first layout is the default and has the family's name
    choice: ModelChoice

    @property
    def official(self) -> bool:
        return self.choice.weights in (None, self._main.source.repo) and not self.choice.revision

    def folder(self, download: bool = False) -> Path | None:
        """Folder of an unofficial checkpoint, with at least its small files; None for the official checkpoint."""
        return None if self.official else self._main.folder(download)

    def find(self) -> tuple[CheckpointFiles, ...]:
        """Find all files, the language model's first, without downloads. Empty for random weights."""
        return tuple(part.find() for part in self._parts())

    def fetch(self) -> tuple[CheckpointFiles, ...]:
        """Download the files that are not on this disk, then `find`."""
        return tuple(part.fetch() for part in self._parts(download=True))

    def missing(self) -> list[Download]:
        """List the downloads of `fetch`; raises the same errors as `fetch`."""
        return [download for part in self._parts(download=True) if (download := part.missing())]

    def absent(self) -> list[WantedFiles]:
        """List the requests whose files are not on this disk."""

        def here(part: WantedFiles) -> bool:
            try:
                return bool(part.find())
            except SpecbenchError:
                return False

        return [part for part in self._parts() if not here(part)]

    def require_known(self) -> None:
        """Check that every file is on this disk or may be downloaded; raises like `fetch`."""
        try:
            self.find()
        except SpecbenchError:
            if offline() or local_folder(self.choice.weights):
                raise
            for part in self.absent():
                require_permission(part.repo, part.revision)

    def facts(self, weights_sha256: str) -> dict[str, object]:
        """See `ModelFacts.file_facts`; a repository's revision is the commit on this disk."""
        parts, choice, source = self.find(), self.choice, None
        if not self.official:
            folder = self.folder()
            source = {
                "weights": choice.weights or self._main.source.repo,
                "revision": folder.name if folder and not local_folder(choice.weights) else choice.revision,
                "layout": recognise(folder) if folder else None,
                "sha256": weights_sha256,
            }
        return {
            "source": source,
            "commits": {repo: commit for files in parts for repo, commit in files.commits.items()},
            "file_digests": {
                f"{next(iter(files.commits), path.parent.name)}/{path.name}": sha256_of(path)
                for files in parts
                for path in files.paths
            },
        }

    @property
    def _main(self) -> WantedFiles:
        return WantedFiles(self.layouts[0].sources[0], self.choice.weights, self.choice.revision)

    @property
    def sources(self) -> list[Source]:
        """List the official sources of every layout."""
        return [source for layout in self.layouts for source in layout.sources]

    def _parts(self, download: bool = False) -> list[WantedFiles]:
        if self.choice.random:
            return []
        main, *companions = self._layout(download).sources
        beside = local_folder(self.choice.weights)
        return [replace(self._main, source=main), *(WantedFiles(source, beside=beside) for source in companions)]

    def _layout(self, download: bool) -> Layout:
        usual, weights = self.layouts[0], self.choice.weights
        if weights is None:
            return usual
        if local_folder(weights) is None:
            for layout in self.layouts:
                if layout.sources[0].repo == weights:
                    return layout
        folder = self._main.folder(download and len(self.layouts) > 1)
        if folder is None or all((folder / name).is_file() for name in usual.sources[0].files):
            return usual  # all files of the default layout are there, perhaps among other files
        family = usual.name
        _refuse_unread(folder, weights, family)
        if (name := recognise(folder)) and family not in (LAYOUTS[name].family, *LAYOUTS[name].shared):
            what = f"--weights {weights} contains {LAYOUTS[name].what}, not '{self.model}'"
            raise SpecbenchError(what, f"use --model {LAYOUTS[name].models}")
        return next((layout for layout in self.layouts if layout.name == name), usual)
