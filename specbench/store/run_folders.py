"""Run folders by name. Imports nothing heavy, for `list` and `--help`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import SpecbenchError, unknown_name
from specbench.store.run_info import RUN_JSON


def find_runs(out: Path | str, names: Sequence[str] = ()) -> list[Path]:
    """Run folders: those called `names` (a folder, a run id in `out`, or the start of one), or all of `out`.

    Raises:
        SpecbenchError: a name matches no run, or several.
    """
    out = Path(out)
    known = runs_in(out)
    if names:
        return list(dict.fromkeys(folder for name in names for folder in _find(name, known)))
    if not known:
        raise SpecbenchError(
            f"no runs in {out}", "create one with `specbench run`, or name the results folder with --out"
        )
    return known


def _find(name: str, known: Sequence[Path]) -> list[Path]:
    exact = [folder for folder in known if folder.name == name]
    if exact:
        return exact
    inside = _runs_at(name)
    if inside:
        return inside
    near = [folder for folder in known if folder.name.startswith(name)]
    if len(near) == 1:
        return near
    if near:
        ids = ", ".join(folder.name for folder in near)
        raise SpecbenchError(f"run '{name}' is ambiguous", f"it could be {ids}")
    raise unknown_name("run", name, [folder.name for folder in known])


def _runs_at(path: str) -> list[Path]:
    try:
        return [Path(path)] if (Path(path) / RUN_JSON).is_file() else runs_in(Path(path))
    except (OSError, ValueError):  # not a possible path
        return []


def runs_in(folder: Path) -> list[Path]:
    """The run folders directly inside `folder`, by name."""
    if not folder.is_dir():
        return []
    return [
        folder / name for name in sorted(os.listdir(folder)) if os.path.isfile(os.path.join(folder, name, RUN_JSON))
    ]
