"""Find run folders by name or by settings. Imports nothing heavy, for `list` and `--help`."""

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from specbench.errors import SpecbenchError, chosen, enumerated, unknown_name
from specbench.specs.options import plain
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import RunSpec
from specbench.store.run_info import RUN_JSON, RunInfo, read_info
from specbench.system.files import files_named

SHARDS = "shard-*-of-*"
Names = str | Path | Iterable[str | Path]
"""Runs as users name them: a run id or its unique prefix, a decoder, or a folder; a list or column of these; or the
result of `run`."""


def find_runs(out: Path | str, names: Names = ()) -> list[Path]:
    """Find run folders by `names` (a folder, a run id in `out`, the start of an id, or a decoder), or all folders of
    `out` for () and None."""
    out = Path(out)
    runs, called = runs_in(out), chosen("run", names)
    if called:
        return list(dict.fromkeys(folder for name in called for folder in _find(str(name), runs)))
    if not runs and shards_in(out):
        place = "" if out == Path("results") else f" --out {shlex.quote(str(out))}"
        raise SpecbenchError(f"no runs in {out}, only shards of runs", f"merge them first: specbench merge{place}")
    if not runs:
        advice = "create runs with `specbench run`, or name the results folder with --out"
        raise SpecbenchError(f"no runs in {out}", _pack_in(out) or advice)
    return runs


def _pack_in(folder: Path) -> str:
    """Return a hint if a folder without runs contains packed runs."""
    packs = [shlex.quote(str(file)) for file in files_named(folder, "*.zip")] if os.path.isdir(folder) else []
    return f"read packed runs: --out {enumerated(packs[:5], 'or')}" if packs else ""


def shards_in(out: str | Path) -> list[Path]:
    """The folders of shards in a results folder."""
    return files_named(Path(out), SHARDS)


def find_run(out: Path | str, name: str | Path) -> Path:
    """Find the run folder of a name. Raises the errors of `find_runs`, and an error if several runs have the name."""
    if len(folders := find_runs(out, [name])) > 1:
        raise SpecbenchError(f"{name} holds {len(folders)} runs", f"name one of them, with --out {name}")
    return folders[0]


def _find(name: str, runs: Sequence[Path]) -> list[Path]:
    if exact := [folder for folder in runs if folder.name == name]:
        return exact
    with suppress(OSError, ValueError):  # the name is no valid path
        if inside := [Path(name)] if (Path(name) / RUN_JSON).is_file() else runs_in(Path(name)):
            return inside
    near = [folder for folder in runs if folder.name.startswith(name)]
    near = near or [folder for folder in runs if _decoder_of(folder) == name]
    if len(near) > 1:
        near = [folder for folder in near if _is_named(folder, name)] or near
    if len(near) == 1:
        return near
    if near:
        differing = distinctions({folder.name: read_info(folder) for folder in near})
        ids = "; ".join(f"{run} ({text})" if text else run for run, text in differing.items())
        raise SpecbenchError(f"run '{name}' is ambiguous", f"it could be {ids}")
    if os.sep in name or name.endswith(".zip"):
        what = "holds no runs" if os.path.exists(name) else "does not exist"
        advice = "give a results folder, a run in it, or a file of specbench pack"
        raise SpecbenchError(f"{name} {what}", _pack_in(Path(name)) or advice)
    raise unknown_name("run", name, [folder.name for folder in runs])


def _is_named(folder: Path, name: str) -> bool:
    """Return whether `name` is the folder's run id without its hash ("shapes-sjd" does not match a run of sjd-isp)."""
    try:
        return folder.name.rpartition("-")[0] == name == read_info(folder).spec.run_id.rpartition("-")[0]
    except SpecbenchError:  # damaged; reported when it is read
        return folder.name.rpartition("-")[0] == name


def _decoder_of(folder: Path) -> str | None:
    with suppress(SpecbenchError):  # damaged; reported when it is read
        return read_info(folder).spec.decoder.name
    return None


def run_folder(out: Path | str, spec: RunSpec) -> Path:
    """Folder of a run in a results folder; an existing folder under an earlier id has precedence."""
    places = [Path(out) / name for name in (spec.run_id, *spec.earlier_ids)]
    return next((place for place in places if (place / RUN_JSON).is_file()), places[0])


def runs_in(folder: Path) -> list[Path]:
    """List the run folders directly inside `folder`, or in a packed file, sorted by name."""
    if folder.is_file():
        from specbench.store.packed import unpacked  # imports zipfile

        return runs_in(unpacked(folder))
    if not folder.is_dir():
        return []
    return [
        folder / name for name in sorted(os.listdir(folder)) if os.path.isfile(os.path.join(folder, name, RUN_JSON))
    ]


def find_runs_like(out: Path | str | Mapping[Path, RunInfo], **fields: object) -> dict[Path, RunInfo]:
    """Find the runs whose `RunSpec` has the given field values, by run folder. `out`: a results folder, or the
    descriptions of its runs, for several searches. If a value is a dict, only its entries must agree, as in
    `decoder={"name": "gsd", "options": {"G": 10}}`."""
    infos = out if isinstance(out, Mapping) else read_infos(out)
    if str(fields.get("device")).startswith("cuda"):  # GPU number and host threads are not part of a run's identity
        fields = {name: value for name, value in fields.items() if name not in ("device", "threads")}
        infos = {folder: info for folder, info in infos.items() if info.spec.device.startswith("cuda")}
    return {folder: info for folder, info in infos.items() if _agrees(info.spec, fields)}


def _agrees(stored: object, expected: object) -> bool:
    """Return whether a spec's value equals the wanted value, or contains the entries of the wanted dict."""
    if not isinstance(expected, Mapping):
        return stored == expected
    parts = stored if isinstance(stored, Mapping) else vars(stored)
    return all(name in parts and _agrees(parts[name], value) for name, value in expected.items())


def without_options(decoder: DecoderSpec, *names: str) -> dict[str, object]:
    """Return a decoder as a dict without the named options, so that `find_runs_like` does not compare these options."""
    return {**vars(decoder), "options": {name: value for name, value in decoder.options.items() if name not in names}}


def same_but_for_threads(runs: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Describe runs that differ only in the number of CPU threads, one sentence for each group.
    `runs`: `RunSpec.identity` of each run id; on a GPU it does not include the threads."""
    groups: dict[str, dict[str, object]] = {}
    for name, content in runs.items():
        rest = {key: value for key, value in content.items() if key != "threads"}
        if content.get("threads") is not None:
            groups.setdefault(json.dumps(rest, sort_keys=True, default=str), {})[name] = content["threads"]
    return [
        " and ".join(f"{name} ({threads})" for name, threads in sorted(group.items()))
        + " differ only in the number of threads; with the same --threads N they would be one run"
        for group in groups.values()
        if len(group) > 1
    ]


def distinctions(infos: Mapping[str, RunInfo]) -> dict[str, str]:
    """Map each run to the decoder options or settings in which it differs from the other runs."""
    settings = {run: setting_texts(info.spec) for run, info in infos.items()}
    options = {run: info.spec.decoder.options for run, info in infos.items()}
    texts = {}
    for run, info in infos.items():
        decoder = info.spec.decoder.name
        alike = [options[other] for other, info in infos.items() if info.spec.decoder.name == decoder]
        texts[run] = ", ".join([*_differing(options[run], alike), *_differing(settings[run], settings.values())])
    return texts


def setting_texts(spec: RunSpec) -> dict[str, str]:
    """Return the settings that identify a run, except its decoder, as {name: text}."""
    left_out = ("decoder", "sampling", "prompts_sha256", "weights_sha256", "head_sha256", "decoder_code", "model_code")
    flat = {name: value for name, value in spec.identity().items() if name not in left_out}
    flat |= {name: value for name, value in vars(spec.sampling).items() if value is not None}
    digests = {"weights": spec.weights_sha256, "prompt-file": spec.prompts_sha256}
    digests |= {"decoder-code": spec.decoder_code or "", "model-code": spec.model_code or ""}
    flat |= {name: digest[:8] for name, digest in digests.items()}
    return {name.replace("_", "-"): plain(value) for name, value in flat.items()}


def _differing(values: Mapping[str, object], others: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the non-empty entries of `values`, as "name=value", that differ in at least one of the `others`."""
    others = list(others)
    differing = [name for name, value in values.items() if any(other.get(name) != value for other in others)]
    return [f"{name}={plain(values[name])}" for name in differing if values[name] != ""]


def read_infos(out: Path | str) -> dict[Path, RunInfo]:
    """Return {run folder: description} of every run in a results folder."""
    return {folder: read_info(folder) for folder in runs_in(Path(out))}
