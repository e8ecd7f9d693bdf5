"""A hub on the loopback with a checkpoint of every model under its official names: small in width and layers, with the
official vocabularies, grids and file names.

`python official_hub.py FOLDER MODEL...` writes the checkpoints, in a process of its own because the vocabularies are
constants of the writers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loopback_hub import Hub

from specbench.models.families.model_specs import MODELS

INFO = {model.name: model for model in MODELS}
COMMIT = "c" * 40


def serve(hub: Hub, folder: Path, models: Sequence[str]) -> None:
    """Put the repositories of models on a hub; a pinned repository at its pinned commit."""
    from specbench.models.hub_downloads import REVISIONS

    env = {**os.environ, "OFFICIAL_VOCABULARIES": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(folder), *models], env=env, check=True)
    for repo in (path for owner in folder.iterdir() for path in owner.iterdir()):
        name = f"{repo.parent.name}/{repo.name}"
        hub.put(name, REVISIONS.get(name, COMMIT), repo)


def _write(folder: Path, model: str) -> None:
    """The repositories of a model: its own, and one for each companion that stands in a folder of its name."""
    from checkpoints import write

    made = folder / "made"
    made.mkdir(parents=True)
    write(model, made)
    info = INFO[model]
    for source in info.companions:
        own = made / source.folder_name
        target = folder / source.repo
        target.mkdir(parents=True, exist_ok=True)
        if own.is_dir():
            shutil.copytree(own, target, dirs_exist_ok=True)
            shutil.rmtree(own)
        else:
            for name in source.files:
                shutil.move(made / name, target / name)
    shutil.copytree(made, folder / info.source.repo, dirs_exist_ok=True)
    shutil.rmtree(made)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        _write(Path(sys.argv[1]), name)
