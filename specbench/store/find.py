"""Search a results folder for runs with given settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbench.specs.presets import DecoderSpec
from specbench.store.run_folders import runs_in
from specbench.store.run_info import RunInfo, read_info


def read_infos(out: Path | str) -> dict[Path, RunInfo]:
    """The description of every run in a results folder, by run folder.

    Raises:
        SpecbenchError: a damaged `run.json`.
    """
    return {folder: read_info(folder) for folder in runs_in(Path(out))}


def find_runs_like(out: Path | str | Mapping[Path, RunInfo], **fields: object) -> dict[Path, RunInfo]:
    """The runs of a results folder whose `RunSpec` has the given field values, by run folder.

    Args:
        out: a results folder, or the descriptions of its runs where several searches share them.
        fields: values of `RunSpec` fields. A dict matches a part of a field: each of its entries must agree, as in
            `decoder={"name": "gsd", "options": {"G": 10}}`.

    Raises:
        SpecbenchError: a damaged `run.json`.
    """
    infos = out if isinstance(out, Mapping) else read_infos(out)
    return {folder: info for folder, info in infos.items() if _agrees(info.spec, fields)}


def without_options(decoder: DecoderSpec, *names: str) -> dict[str, object]:
    """The part of a decoder that leaves the named options open, for `find_runs_like`."""
    return {**vars(decoder), "options": {name: value for name, value in decoder.options if name not in names}}


def _agrees(found: object, wanted: object) -> bool:
    """Whether a value of a spec has the wanted value, or with a dict the wanted parts."""
    if not isinstance(wanted, Mapping):
        return found == wanted
    parts = dict(found) if isinstance(found, tuple) else vars(found)
    return all(name in parts and _agrees(parts[name], value) for name, value in wanted.items())
