"""`run.json`: the settings of a run, the invocations that wrote it, and facts for reports. Only `RunStore` writes it.
Imports nothing heavy."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from specbench.errors import SpecbenchError
from specbench.models.facts import EIGHT_BITS
from specbench.models.network_sizes import Size
from specbench.specs.options import Options, plain
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import RunSpec, Sampling
from specbench.system.environment import core_count, describe_machine
from specbench.system.files import blaming, read_regular
from specbench.system.json_values import nonfinite_as_text, parse_json

RUN_JSON = "run.json"
_MAX_BYTES = 2**26  # A description grows by a few kilobytes with each invocation
SCHEMA_VERSION = 6
"""Version of everything specbench stores. Version 2 added the sample columns `attempts` and `machine`, version 3 the
columns of the Rosenblatt transform (`u_id`, `u_p`, `u_pq`, `u_qq`), version 4 `image_sha256`, version 5 the owner of
every row, and one schema for the scores of all metrics; version 6 renamed the columns in `FORMER_NAMES`."""
FORMER_NAMES = {"latency_ms": "ar_ms", "latency_e2e_ms": "e2e_ms"}  # Names of columns before schema version 6
OLDEST_VERSION = 1  # Oldest readable version; the next run that writes to the folder upgrades its files

_Spec = TypeVar("_Spec")
_RUN_ID = re.compile(r"[^\W_][\w+.-]{0,150}")  # run ids are folder names
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass
class Invocation:
    """One call of specbench that wrote to the run."""

    # started_at, finished_at: UTC, ISO 8601; `finished_at` is None until the call ends normally
    started_at: str | None
    versions: Mapping[str, str | None]  # versions of Python and packages; None if not installed
    git: Mapping[str, object]  # `revision` and `dirty` of the checkout
    hardware: Mapping[str, Any]  # `platform, cpu, cores, memory_gib, gpus` (all that torch sees)
    load: float | None = None  # load average at the start
    # compile_s, compiled_forms, graph_bytes: seconds of compilation, compiled functions, bytes of captured CUDA graphs;
    # None if nothing was compiled
    compile_s: float | None = None
    compiled_forms: int | None = None
    # Inductor's options by compiled part of a step, "forward" or "sampling"; None in older files
    compile_options: Mapping[str, Mapping[str, object]] | None = None
    graph_bytes: int | None = None
    workers: int | None = None  # number of workers; None if the calling process decoded
    # device, threads: used for decoding; None in older files, whose `RunSpec` has them
    device: str | None = None
    threads: int | None = None
    finished_at: str | None = None
    drawn: str | None = None  # description of the selected prompts of the set; None for all
    # number of images of the complete run; None in older files
    wanted: int | None = None
    # the object as read from the file, with keys of other versions
    stored: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Invocation:
        """Build an invocation from JSON; raise a LookupError, TypeError or ValueError if the JSON is malformed."""
        if not all(isinstance(content[name], dict) for name in ("versions", "git", "hardware")):
            raise TypeError("invocation")
        list(content["hardware"].get("gpus") or ())
        if not isinstance(content.get("drawn"), str | None) or not isinstance(content.get("device"), str | None):
            raise TypeError("drawn or device")
        if not all(isinstance(content.get(name), int | None) for name in ("wanted", "compiled_forms")):
            raise TypeError("wanted or compiled_forms")
        parts = content.get("compile_options") or {}
        if not (isinstance(parts, dict) and all(isinstance(options, dict) for options in parts.values())):
            raise TypeError("compile_options")
        float(content.get("load") or 0)
        facts: dict[str, Any] = {name: content.get(name) for name in _NAMES[cls]}
        return cls(**facts, stored=content)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object without optional facts that are None."""
        return _merged(self, always=("started_at", "versions", "git", "hardware", "load", "finished_at"))

    @property
    def environment(self) -> str:
        """Hardware, versions and revision as the line printed under tables."""
        others = len(self.hardware.get("gpus") or ()) - 1
        beside = f" (and {others} more)" if others > 0 else ""
        return describe_machine(
            {**self.hardware, "gpus": [f"{gpu}{beside}" for gpu in self.gpus]}, self.versions, self.git
        )

    @property
    def gpus(self) -> list[str]:
        """List the GPU that decoded; empty for the CPU. A worker sees a single GPU, so that its GPU is the first."""
        seen = list(map(str, self.hardware.get("gpus") or ()))
        kind, _, number = (self.device or "cuda").partition(":")
        return (seen[int(number or 0) :] or seen)[:1] if kind == "cuda" else []

    @property
    def stack(self) -> dict[str, str]:
        """Return the versions that determine the speed of a forward, if known; with a GPU, also the host's threads."""
        python = str(self.versions.get("python") or "").split(".")[:2]
        parts: dict[str, Any] = {"python": ".".join(python)}
        parts |= {name: self.versions.get(name) for name in ("torch", "transformers")}
        if self.gpus:
            parts |= {"CUDA": self.hardware.get("cuda"), "driver": self.hardware.get("driver"), "threads": self.threads}
        return {name: str(value) for name, value in parts.items() if value}

    @property
    def machine(self) -> str:
        """Platform, processor, cores and decoding GPU as one line. If lines are equal, latencies are comparable."""
        platform, cpu, cores = (self.hardware.get(name) or "unknown" for name in ("platform", "cpu", "cores"))
        return ", ".join([str(platform), str(cpu), core_count(cores), *self.gpus])


@dataclass
class RunInfo:
    """The content of `run.json`."""

    spec: RunSpec  # full specification of the run; its hash is the run id
    run_id: str = ""
    invocations: list[Invocation] = field(default_factory=list)  # the calls that wrote rows, oldest first
    origins: Mapping[str, str] | None = None  # source of each setting, by name
    # the measurements of `--window auto`, a dict per window
    window_curve: list[dict[str, float]] | None = None
    # stored under the key "floor", see `specbench.runs.preparation.roofline_facts`; None if unknown
    roofline: Mapping[str, object] | None = None
    # the memory estimate that determined the batch size, see `specbench.runs.memory_estimate.settle_batch`
    memory: Mapping[str, object] | None = None
    # weights, revision, layout and sha256 of an unofficial checkpoint; None for the official checkpoint
    source: Mapping[str, object] | None = None
    # commit of every hub repository that the model's files were read from; None without a repository
    commits: Mapping[str, str] | None = None
    # SHA-256 of every file of the model, by folder and name; None for bundled models
    file_digests: Mapping[str, str] | None = None
    # logits processors of the checkpoint's `generation_config.json` that are part of the target distribution, for
    # example {"repetition_penalty": 1.1}; None without any
    processors: Mapping[str, object] | None = None
    # settings of `specbench run` that the user gave, without decoder options
    asked: Mapping[str, object] | None = None
    # plug-in code: {"decoder": ..., "model": ...} with the result of `specbench.system.foreign_code.Code.to_json`; None
    # if decoder and model are specbench's
    code: Mapping[str, Mapping[str, Any]] | None = None
    # the `specbench.runs.engine.Engine` that generated the tokens, as an object; None if specbench generated them
    engine: Mapping[str, str] | None = None
    schema: int = SCHEMA_VERSION  # version of the files in the folder
    # the object as read from the file, with keys of other versions
    stored: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    # the `Invocation.stack` whose times are used, if invocations differ; not in the file
    stack: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        self.run_id = self.run_id or self.spec.run_id
        for call in self.invocations:
            call.device, call.threads = call.device or self.spec.device, call.threads or self.spec.threads
        self.stack = self.stack or " or ".join(dict.fromkeys(self.stacks))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunInfo:
        """Build a run's description from JSON; raise a LookupError, TypeError or ValueError if malformed."""
        if not _RUN_ID.fullmatch(content["run_id"]) or not content["invocations"]:
            raise ValueError("run_id or invocations")
        _check_optional(content)
        fields: dict[str, Any] = {name: content.get(_KEYS.get(name, name)) for name in _NAMES[cls]}
        calls = [Invocation.from_json(call) for call in content["invocations"]]
        fields |= {"spec": _read_spec(content["spec"]), "invocations": calls, "schema": content["schema"]}
        return cls(**fields, stored=content)

    def command(self, decoder: str, out: Path) -> str:
        """The command that decodes the same images with another decoder into the results folder `out`."""
        asked = {"model": self.spec.model.partition("+")[0], **(self.asked or {"prompts": self.spec.prompts})}
        asked.pop("out", None)  # the folder may have been moved
        asked |= {} if out == Path("results") else {"out": str(out)}
        words = ["specbench", "run", "--decoder", decoder]
        for name, value in asked.items():
            values = [",".join(map(str, value))] if isinstance(value, list) else [] if value is True else [plain(value)]
            words += [f"--{name}", *map(shlex.quote, values)] if value is not False else []
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object: keys from the file keep their order, new keys follow."""
        content = _merged(self, always=("schema", "run_id", "spec", "invocations", "roofline"))
        content["spec"] = self.stored.get("spec") or spec_json(self.spec)
        content["invocations"] = [call.to_json() for call in self.invocations]
        return content

    @property
    def owner(self) -> dict[str, str | None]:
        """Columns of every stored row that identify its run."""
        return {"run_id": self.run_id, "model": self.spec.model, "decoder": self.spec.decoder.name}

    @property
    def source_text(self) -> str | None:
        """Unofficial checkpoint as one line: source, revision, layout, start of the digest."""
        if not self.source:
            return None
        names = (("revision", 12), ("layout", None), ("sha256", 12))
        facts = ((name, self.source.get(name), length) for name, length in names)
        details = ", ".join(f"{name} {str(value)[:length]}" for name, value, length in facts if value)
        return f"{self.source.get('weights')}" + (f" ({details})" if details else "")

    @property
    def compiled(self) -> bool:
        """Whether an invocation compiled anything; if no invocation recorded it, whether it was requested."""
        forms = [call.compiled_forms for call in self.invocations if call.compiled_forms is not None]
        return any(forms) if forms else bool(self.spec.compiled)

    @property
    def steps(self) -> str:
        """Mode of the steps: "eager", or "compiled" with the compiled parts and their options."""
        if not self.compiled:
            return "eager"
        parts = {part: options for call in self.invocations for part, options in (call.compile_options or {}).items()}
        texts = (" ".join([part, *(f"{name}={plain(value)}" for name, value in parts[part].items())]) for part in parts)
        return f"compiled ({'; '.join(texts)})" if parts else "compiled"

    @property
    def processors_text(self) -> str | None:
        """Logits processors of the checkpoint, as one line."""
        processors = (self.processors or {}).items()
        return ", ".join(f"{name.replace('_', ' ')} {plain(value)}" for name, value in processors) or None

    @property
    def stacks(self) -> list[str]:
        """Return a line per invocation with the `stack` facts common to all. Equal lines mean comparable latencies."""
        of_matrices = ("torchao",) if self.spec.dtype == EIGHT_BITS else ()
        stacks = [
            call.stack | {name: str(version) for name in of_matrices if (version := call.versions.get(name))}
            for call in self.invocations
        ]
        return [
            ", ".join(f"{name} {facts[name]}" for name in facts if all(name in other for other in stacks))
            for facts in stacks
        ]

    @property
    def machines(self) -> tuple[str, ...]:
        """The distinct machines of the invocations, sorted."""
        return tuple(sorted({call.machine for call in self.invocations}))

    @property
    def drawn(self) -> list[str]:
        """Descriptions of the prompts that the invocations selected; empty if all."""
        return list(dict.fromkeys(call.drawn for call in self.invocations if call.drawn))


_KEYS = {"roofline": "floor"}  # {attribute: key in the file}, if they differ


_NAMES: Mapping[type, tuple[str, ...]] = {
    kind: tuple(dict.fromkeys((*first, *(kept.name for kept in fields(kind) if kept.name not in ("stored", "stack")))))
    for kind, first in ((Invocation, ()), (RunInfo, ("schema", "run_id")))
}


def _merged(item: Invocation | RunInfo, always: tuple[str, ...]) -> dict[str, Any]:
    """Return the item's `stored` object with its fields. A None is stored only for keys in `always` or in the file."""
    content = dict(item.stored)
    for name in _NAMES[type(item)]:
        key, value = _KEYS.get(name, name), getattr(item, name)
        if value is not None or key in content or (name in always and not item.stored):
            content[key] = value
    return content


def read_info(folder: Path) -> RunInfo:
    """The description of a run folder."""
    path = folder / RUN_JSON
    advice = "move the run's folder away and run again, or put the file back"
    with blaming(path, "cannot be read as a run description", advice):
        info = RunInfo.from_json(parse_json(read_regular(path, _MAX_BYTES)))
    check_version(path, info.schema)
    return info


def check_version(path: Path, version: object) -> None:
    """Raise an error if the schema version of a file is not supported."""
    if not isinstance(version, int) or not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        what = f"{path} has schema version {version}; this specbench reads {OLDEST_VERSION} to {SCHEMA_VERSION}"
        raise SpecbenchError(what, "use a newer specbench" if newer else "use the specbench version that wrote it")


def spec_json(spec: RunSpec) -> dict[str, object]:
    """A spec as in `run.json`: options as an object, infinity as the text "inf", because JSON has no infinity."""
    return nonfinite_as_text({**spec.content(), "decoder": decoder_json(spec.decoder)})


def identity_json(spec: RunSpec) -> dict[str, object]:
    """The part of `spec_json` that identifies a run: if it is equal, two runs are the same."""
    identity = spec.identity()
    kept = {name: value for name, value in spec_json(spec).items() if name in identity}
    return kept | {"device": identity["device"]}


def decoder_json(decoder: DecoderSpec) -> dict[str, object]:
    """A decoder as in `run.json`."""
    return nonfinite_as_text(dict(vars(decoder)))


def check_same_run(folder: Path, stored: RunInfo, spec: RunSpec) -> None:
    """Raise an error if a run folder, described by `stored`, contains another run than `spec`."""
    there, here = _flat(identity_json(stored.spec)), _flat(identity_json(spec))
    if differing := [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]:
        name = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        what = f"{folder} holds another run: {name} is {there.get(name)} there, {here.get(name)} here{more}"
        raise SpecbenchError(what, "choose another folder with --out")


def _read_spec(content: Mapping[str, Any]) -> RunSpec:
    decoder, sampling = dict(content["decoder"]), _build(Sampling, content["sampling"])
    if not isinstance(decoder["options"], dict):
        raise TypeError("options")
    # Undoes `nonfinite_as_text`.
    options = {name: _NOT_FINITE.get(str(value), value) for name, value in decoder["options"].items()}
    built = _build(DecoderSpec, {**decoder, "options": Options(options)})
    return _build(RunSpec, {**content, "decoder": built, "sampling": sampling})


def _check_optional(content: Mapping[str, Any]) -> None:
    """Raise a TypeError, LookupError or ValueError for a malformed optional key."""
    known = ("origins", "memory", "floor", "source", "commits", "file_digests", "processors", "asked", "code")
    for name in (*known, "engine"):
        if not isinstance(content.get(name), dict | None):
            raise TypeError(name)
    if not all(isinstance(code, dict) for code in (content.get("code") or {}).values()):
        raise TypeError("code")
    curve = content.get("window_curve")
    if not isinstance(curve, list | None) or not all(isinstance(point, dict) for point in curve or ()):
        raise TypeError("window_curve")
    if (facts := content.get("floor")) is not None:
        Size(**facts["size"])
        counts = [facts[name] for name in ("itemsize", "rows_per_image", "bytes_per_s", "flops")]
        counts += facts["size"].values()
        if not all(isinstance(count, int | float) and 0 < float(count) < math.inf for count in counts):
            raise ValueError("floor")


_PLAIN = {
    "str": str,
    "str | None": str | None,
    "Mode | None": str | None,
    "int": int,
    "float": int | float,
    "float | None": int | float,
    "bool": bool,
}


def _build(kind: Callable[..., _Spec], content: Mapping[str, Any]) -> _Spec:
    """Build a spec's dataclass. Raise an error if a field is missing, unknown or of another type."""
    for name, expected, optional, number in _types(kind):
        if optional and name not in content:
            continue
        value = content[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected not in (bool, object)):
            raise TypeError(name)
        if number:
            float(value)
    return kind(**content)


@cache
def _types(kind: Any) -> tuple[tuple[str, Any, bool, bool], ...]:
    """List for each field of a spec's dataclass: name, accepted type, whether it is optional, whether it is a float."""
    return tuple(
        (kept.name, _PLAIN.get(str(kept.type), object), kept.default is None, kept.type == "float")
        for kept in fields(kind)
    )


def _flat(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def describe_point(point: Mapping[str, float | None]) -> str:
    """Describe a point of the curve that `--window auto` measured, in words."""
    rate = point.get("acceptance")
    accepted = "" if rate is None else f", {rate:.2f} of the drafts accepted"
    speed = f", {point['speed_up']:.2f} times AR's speed" if "speed_up" in point else ""
    tokens = point.get("tokens_per_step", point.get("step_compression"))  # the key until version 0.3
    return (
        f"{tokens:.2f} tokens per forward; a forward takes {point['window_cost']:.2f} times as long as with one "
        f"token{accepted}: {point['latency_ms']:,.0f} ms per image{speed}"
    )
