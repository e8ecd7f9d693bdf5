"""Files of a draft head: a folder, a hub repository, or part of a model. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles, Source, WantedFiles, json_object
from specbench.models.facts import RANDOM, typed_name
from specbench.models.hub_downloads import require_permission
from specbench.models.network_sizes import HEAD_SIZES
from specbench.system.downloads import Download
from specbench.system.files import blaming

CONFIG, WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")
NO_HEAD = ("is not the configuration of a draft head: {}", "train one with: specbench train-head")
"""Message and hint of `blaming` for the files of a head."""


def _source(repo: str, licence: str = "see its page on the hub") -> Source:
    return Source("the draft head", repo, (CONFIG, "*model.[sb]*"), licence)


_CARDS_UNREAD = "not stated where it was found; LANTERN's code: Chameleon research licence (Meta), non-commercial"
PUBLISHED_HEADS: Mapping[str, Source] = {
    "lumina": _source("sihwanpark/LANTERN-Lumina-mGPT-7B-768", "Apache-2.0"),
    "anole": _source("jadohu/anole_drafter", _CARDS_UNREAD),
    "llamagen": _source("jadohu/llamagen_drafter", _CARDS_UNREAD),
    "llamagen-512": _source("jadohu/llamagen2_drafter", _CARDS_UNREAD),
    "janus-7b": _source("seliny2/JanusPro-Eagle-Drafter", "not stated where it was found"),
}
"""EAGLE heads published by LANTERN's authors (README of jadohu/LANTERN at 3a56e45, and its issue 1) and by CASCADE's
(README of selinyldrm/Deepseek-JanusPro-EAGLE at 09cf7d2), by model. These sources state no commit."""


def published_head(model: str, kind: str = "eagle") -> str:
    """Return the hub id of the head published for a model (whose name may have endings); empty if unknown or random."""
    source = PUBLISHED_HEADS.get(model.partition("+")[0]) if kind == "eagle" and RANDOM not in model else None
    return source.repo if source else ""


@dataclass(frozen=True)
class HeadFiles:
    """A user's request for the files of a draft head."""

    place: str  # a folder or hub id; empty for the head that comes with the model
    model: str  # name of the target, for messages
    bundled: Path | None = None  # folder of the head that comes with the model
    features: int | None = None  # width of the target's features; None if unknown
    kind: str = ""  # kind of head that the decoder uses; empty if unknown

    def find(self, download: bool = False) -> CheckpointFiles:
        """Find the files on this disk. `download`: first fetch the files of a hub repository. A SpecbenchError with
        exit code 5 if they are missing."""
        if self._on_hub:
            files = self._wanted.fetch() if download else self._wanted.find()
            return head_in(files.named(CONFIG).parent)
        folder = Path(self.place).expanduser() if self.place else self.bundled
        if folder is None:
            raise no_head(self.model, kind=self.kind)
        return head_in(folder)

    def require(self) -> None:
        """Raise the error of `find` unless the head can be downloaded, or an error if its kind or size does not fit."""
        try:
            files = self.find()
        except SpecbenchError:
            if not self._on_hub:
                raise
            return require_permission(self.place, None)
        with blaming(config := files.named(CONFIG), *NO_HEAD):
            stored: Any = json_object(config)
            width = stored.get("width") or stored.get("language_config", stored).get("hidden_size")
        if len({kind := str(stored.get("kind")), self.kind} & HEAD_SIZES.keys()) == 2:
            what = f"--head {self.place}: its kind is {kind}, but the decoder uses {self.kind}"
            raise SpecbenchError(what, f"train a head: specbench train-head --kind {self.kind}")
        if self.features and width and width != self.features:
            raise wrong_width(self.place, width, self.model, self.features)

    def missing(self) -> Download | None:
        """Return the files that `find` downloads; None for a folder, or if all files are on this disk."""
        return self._wanted.missing() if self._on_hub else None

    @property
    def _wanted(self) -> WantedFiles:
        published = (source for source in PUBLISHED_HEADS.values() if source.repo == self.place)
        return WantedFiles(next(published, _source(self.place)))

    @property
    def _on_hub(self) -> bool:
        """True if `place` is a hub id OWNER/NAME; False for a folder, and for a mistyped path in an existing folder."""
        place = self.place
        named = place.count("/") == 1 and not place.startswith((".", "/", "~")) and not Path(place).is_dir()
        published = {source.repo for source in PUBLISHED_HEADS.values()}
        return named and (place in published or not Path(place).parent.is_dir())


def wrong_width(place: str, width: int, model: str, features: int) -> SpecbenchError:
    """Return the error for a head `place` that reads features of `width` numbers, if the model has `features`."""
    what = f"--head {place}: its feature size is {width}, but '{model}' has {features}"
    return SpecbenchError(what, "check that the head was trained for this model")


def no_head(model: str, named: bool = True, kind: str = "") -> SpecbenchError:
    """Return the error for a model without a draft head; `model` may have endings of its configuration. `named`:
    whether commands know the model by this name."""
    what = f"model '{model}' has no draft head in the package, and no published head fits"
    train = f"train a head: specbench train-head --model {typed_name(model.partition('+')[0])}"
    train += f" --kind {kind}" if kind not in ("", "eagle") else ""
    hint = f"use --head FOLDER, or {train if named else 'write a plug-in for this model, and train a head for it'}"
    return SpecbenchError(what, hint, MISSING_PREREQUISITE)


def head_in(folder: Path) -> CheckpointFiles:
    """Return the files of the head in `folder`; a SpecbenchError with exit code 5 if they are missing."""
    weights = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not weights or not (folder / CONFIG).is_file():
        needed = f"a head consists of {CONFIG} and {' or '.join(WEIGHTS)}; 'specbench train-head' trains a head"
        raise SpecbenchError(f"no draft head in {folder}", needed, MISSING_PREREQUISITE)
    return CheckpointFiles(Source("the draft head", folder.name, (), ""), (folder / CONFIG, weights[0]))
