"""Files of a draft head: a folder, a hub repository, or a model's own. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles, Source, WantedFiles
from specbench.models.facts import RANDOM
from specbench.models.hub_downloads import require_permission
from specbench.system.downloads import Download

CONFIG, WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")


def _source(repo: str, licence: str = "see its page on the hub") -> Source:
    return Source("the draft head", repo, (CONFIG, "*model.[sb]*"), licence)


_CARDS_UNREAD = "not stated where it was found; LANTERN's code: Chameleon research licence (Meta), non-commercial"
PUBLISHED_HEADS: Mapping[str, Source] = {
    "lumina": _source("sihwanpark/LANTERN-Lumina-mGPT-7B-768", "Apache-2.0"),
    "anole": _source("jadohu/anole_drafter", _CARDS_UNREAD),
    "llamagen": _source("jadohu/llamagen_drafter", _CARDS_UNREAD),
    "llamagen-512": _source("jadohu/llamagen2_drafter", _CARDS_UNREAD),
}
"""EAGLE heads that LANTERN's authors publish, by model (README of jadohu/LANTERN at 3a56e45, and its issue 1). No
commit is stated; that of the first use is kept."""


def published_head(model: str, kind: str = "eagle") -> str:
    """Hub id of the head that the authors of a method publish for a model; empty where none is known, and for random
    weights. `model` may carry what was added to its name."""
    known = PUBLISHED_HEADS.get(model.partition("+")[0]) if kind == "eagle" and RANDOM not in model else None
    return known.repo if known else ""


def find_head(given: str, model: str, folder: Path | None, download: bool = False) -> CheckpointFiles:
    """Find the files of the head `given`, a folder or hub id, or of `folder` if that is empty.

    Args:
        model: name of the target, for messages.
        own: folder of the target's own head, if any.
        download: whether a hub repository that is not on this disk may be downloaded.
    """
    if not given and folder is None:
        raise no_own_head(model)
    if not given or not _is_hub_id(given):
        return head_in(Path(given).expanduser() if given else folder)
    known = WantedFiles(_known(given))
    return head_in((known.fetch() if download else known.find()).named(CONFIG).parent)


def no_own_head(model: str) -> SpecbenchError:
    """The error for a model without a draft head; `model` may carry what was added to its name."""
    name = model.partition("+")[0]
    return SpecbenchError(
        f"model '{model}' has no draft head of its own, and none is published that fits",
        f"pass one with --head FOLDER, or train one with 'specbench train-head --model {name}'",
        MISSING_PREREQUISITE,
    )


def require_head(given: str, model: str, folder: Path | None) -> None:
    """Raise the error of `find_head` unless the head can be downloaded."""
    try:
        find_head(given, model, folder)
    except SpecbenchError:
        if not _is_hub_id(given):
            raise
        require_permission(given, None)


def missing_head(given: str) -> Download | None:
    """What `find_head` downloads; None for a folder, and for what is on this disk."""
    return WantedFiles(_known(given)).missing() if _is_hub_id(given) else None


def _known(repo: str) -> Source:
    return next((source for source in PUBLISHED_HEADS.values() if source.repo == repo), _source(repo))


def _is_hub_id(given: str) -> bool:
    """Whether OWNER/NAME is meant, not a folder, nor a mistyped one in a folder that is here."""
    named = given.count("/") == 1 and not given.startswith((".", "/", "~")) and not Path(given).is_dir()
    return named and (given in {source.repo for source in PUBLISHED_HEADS.values()} or not Path(given).parent.is_dir())


def head_in(folder: Path) -> CheckpointFiles:
    """Configuration and weights of the head in `folder`; a SpecbenchError with exit code 5 if they are missing."""
    weights = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not weights or not (folder / CONFIG).is_file():
        raise SpecbenchError(
            f"no draft head in {folder}",
            f"it needs {CONFIG} and {' or '.join(WEIGHTS)}; 'specbench train-head' makes one",
            MISSING_PREREQUISITE,
        )
    source = Source("the draft head", folder.name, (), "")
    return CheckpointFiles(source, (folder / CONFIG, weights[0]))
