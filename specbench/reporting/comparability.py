"""Comparability of two runs: the fields that must agree for a speed-up."""

from __future__ import annotations

from dataclasses import asdict

from specbench.store.run_info import RunInfo

_WORK = ("model", "weights_sha256", "model_code", "prompts_sha256", "seed", "batch", "device")
_CONFIGURATION = ("dtype", "threads", "compiled")
_TIME = ("threads", "compiled", "batch", "device", "mode", "hardware", "versions")
"""Fields that the number of steps does not depend on, but for rounding."""


def is_ar(info: RunInfo) -> bool:
    """Whether a run used AR sampling without drafts, here."""
    return info.spec.decoder.drafter == "none" and info.spec.tokens_sha256 is None


def mismatched_fields(
    info: RunInfo, baseline: RunInfo, any_configuration: bool = False, other: str = "AR", steps_alone: bool = False
) -> list[str]:
    """List the fields that must agree for a speed-up but differ, each as "dtype (bfloat16, AR float32)".
    `any_configuration`: allow different dtype, threads and compilation (same work on the same machine); `other`: name
    of the baseline in the output; `steps_alone`: list those that must agree for a ratio of steps."""
    free = _TIME if steps_alone else _CONFIGURATION if any_configuration else ()
    mine, theirs = _fields(info), _fields(baseline)
    mine["versions"], theirs["versions"] = _apart(info.stack, baseline.stack)
    differing = [name for name in mine if name in theirs and name not in free and mine[name] != theirs[name]]
    return [f"{name} ({_short(mine[name])}, {other} {_short(theirs[name])})" for name in differing]


def _apart(mine: str, theirs: str) -> tuple[str, str]:
    """Of two lists of versions those that differ; one that only one of them knows is not known to differ."""
    if " or " in mine + theirs:
        return mine, theirs
    one, two = (dict(part.rsplit(" ", 1) for part in text.split(", ") if part) for text in (mine, theirs))
    names = [name for name in one if name in two and one[name] != two[name]]
    return tuple(", ".join(f"{name} {held[name]}" for name in names) for held in (one, two))


def configuration(info: RunInfo) -> str:
    """Format the settings that change only the speed of AR, for example "float32, 2 threads"."""
    spec = info.spec
    threads = [f"{count} thread{'s' * (count != 1)}"] if (count := spec.identity().get("threads")) else []
    return ", ".join([spec.dtype, *threads, *(["compiled"] if info.compiled else [])])


def _fields(info: RunInfo) -> dict[str, object]:
    spec = info.spec
    identity = spec.identity()
    fields = {name: identity.get(name) for name in (*_WORK, *_CONFIGURATION)} | {"mode": spec.mode or "latency"}
    fields["compiled"] = "yes" if info.compiled else "no"
    fields |= asdict(spec.sampling)
    if fields["threads"] is None:  # on a GPU
        del fields["threads"]
    return fields | {"hardware": " and ".join(info.machines)}


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:8]}..." if len(text) == 64 and text.isalnum() else text
