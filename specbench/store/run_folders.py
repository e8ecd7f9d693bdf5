"""Run folders by name, and the `run.json` that says what is in one. Imports nothing heavy, for `list` and
`--help`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from specbench.errors import SpecbenchError, unknown_name
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import RunSpec, Sampling

RUN_JSON = "run.json"
SCHEMA_VERSION = 2
"""Version of everything specbench stores: `run.json`, sample rows, traces, scores. Version 2 added the sample columns
`attempts` and `machine`."""
OLDEST_VERSION = 1
"""Files from this version on are read as they are; the next run that writes to their folder brings them up to date."""

_RUN_ID = re.compile(r"[^\W_][\w+.-]{0,150}")  # becomes the name of a folder


def check_version(path: Path, version: object) -> None:
    """Refuse a file of a version that cannot be read."""
    if not isinstance(version, int) or not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise SpecbenchError(
            f"{path} has schema version {version}; this specbench reads {OLDEST_VERSION} to {SCHEMA_VERSION}",
            "pip install --upgrade specbench" if newer else "use the specbench version that wrote it",
        )


def read_info(folder: Path) -> dict:
    """The content of a run's `run.json`.

    Raises:
        SpecbenchError: missing, damaged, or of another schema version.
    """
    path = folder / RUN_JSON
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version = info["schema"]
        _check_shape(info)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SpecbenchError(
            f"{path} cannot be read as a run description",
            "move the run's folder away and run again, or put the file back",
        ) from error
    check_version(path, version)
    return info


def _check_shape(info: Mapping) -> None:
    """Raise a LookupError, TypeError or ValueError unless everything is there that readers of a run count on."""
    spec = info["spec"]
    decoder, sampling = _build(DecoderSpec, spec["decoder"]), _build(Sampling, spec["sampling"])
    _build(RunSpec, {**spec, "decoder": decoder, "sampling": sampling})
    if not isinstance(decoder.options, dict) or not _RUN_ID.fullmatch(info["run_id"]) or not info["invocations"]:
        raise ValueError("options, run_id or invocations")
    for call in info["invocations"]:
        if not all(isinstance(call[part], dict) for part in ("versions", "git", "hardware")):
            raise TypeError("invocation")
        list(call["hardware"].get("gpus") or ())
        float(call.get("load") or 0)


_PLAIN = {"str": str, "int": int, "float": int | float, "bool": bool}


def _build(kind: type, content: Mapping):
    """An instance of a spec's dataclass, or an error where a field is missing, unknown or of another type."""
    for field in fields(kind):
        if field.name not in content and field.default is None:
            continue
        if not isinstance(content[field.name], _PLAIN.get(str(field.type), object)):
            raise TypeError(field.name)
        if field.type == "float":
            float(content[field.name])
    return kind(**content)


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
        raise SpecbenchError(f"no runs in {out}", "make one with `specbench run`, or say where they are with --out")
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
    return sorted(path for path in folder.iterdir() if (path / RUN_JSON).is_file())


def spec_dict(spec: RunSpec) -> dict:
    """The spec as it stands in `run.json`: options as an object, infinity as "inf" so that any JSON reader
    copes."""
    content = spec.content()
    content["decoder"]["options"] = dict(content["decoder"]["options"])
    return finite(content)


def check_same_run(folder: Path, spec: RunSpec) -> None:
    """Refuse a run folder that holds another run than `spec`."""
    check_same_spec(folder, read_info(folder)["spec"], spec_dict(spec))


def check_same_spec(folder: Path, stored: Mapping, wanted: Mapping) -> None:
    """The same for two specs as they stand in `run.json`."""
    there, here = _flat(stored), _flat(wanted)
    differing = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
    if differing:
        name = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise SpecbenchError(
            f"{folder} holds another run: {name} is {there.get(name)} there, {here.get(name)} here{more}",
            "choose another folder with --out",
        )


def _flat(content: Mapping, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def finite(value):
    """`value` with infinite and missing numbers as text, which every JSON reader understands."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
