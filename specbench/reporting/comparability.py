"""Comparability of two runs: the fields that must agree for a speed-up."""

from __future__ import annotations

from collections.abc import Mapping

SAMPLING = ("guidance", "temperature", "top_k", "top_p")
_WORK = ("model", "weights_sha256", "prompts_sha256", "seed", "batch", "device")
_CONFIGURATION = ("dtype", "threads", "compiled")


def is_ar(info: Mapping) -> bool:
    """Whether a run (its `run.json`) used AR sampling without drafts."""
    return info["spec"]["decoder"]["drafter"] == "none"


def mismatched_fields(
    info: Mapping, baseline: Mapping, any_configuration: bool = False, other: str = "AR"
) -> list[str]:
    """List the fields that must agree for a speed-up but differ, each as "dtype (bfloat16, AR float32)".

    Args:
        any_configuration: allow different dtype, threads and compilation (same work on the same machine).
        other: name of the baseline in the output.
    """
    mine, theirs = _fields(info), _fields(baseline)
    free = _CONFIGURATION if any_configuration else ()
    return [
        f"{name} ({_short(mine[name])}, {other} {_short(theirs[name])})"
        for name in mine
        if name not in free and mine[name] != theirs[name]
    ]


def configuration(info: Mapping) -> str:
    """Format the settings that change only the speed of AR, for example "float32, 2 threads"."""
    spec = info["spec"]
    threads = f"{spec['threads']} thread{'s' if spec['threads'] != 1 else ''}"
    return ", ".join([spec["dtype"], threads, *(["compiled"] if spec.get("compiled") else [])])


def _fields(info: Mapping) -> dict[str, object]:
    spec = info["spec"]
    fields = {name: spec.get(name) for name in (*_WORK, *_CONFIGURATION)} | {"mode": spec.get("mode") or "latency"}
    fields["compiled"] = "yes" if fields["compiled"] else "no"
    fields |= {name: spec["sampling"][name] for name in SAMPLING}
    return fields | {"hardware": _hardware(info)}


def _hardware(info: Mapping) -> str:
    return " and ".join(sorted({_machine(call["hardware"]) for call in info["invocations"]}))


def _machine(hardware: Mapping) -> str:
    platform, cpu, cores = (hardware.get(name) or "unknown" for name in ("platform", "cpu", "cores"))
    return ", ".join([str(platform), str(cpu), f"{cores} cores", *map(str, hardware.get("gpus") or ())])


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:8]}..." if len(text) == 64 and text.isalnum() else text
