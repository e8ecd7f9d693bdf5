"""When two runs may be compared: what must agree before a ratio of their latencies means anything."""

from __future__ import annotations

from collections.abc import Mapping

SAMPLING = ("guidance", "temperature", "top_k", "top_p")
_WORK = ("model", "weights_sha256", "prompts_sha256", "seed", "batch", "device")
_CONFIGURATION = ("dtype", "threads", "compiled")


def is_ar(info: Mapping) -> bool:
    """Whether a run (its `run.json`) is plain autoregressive sampling."""
    return info["spec"]["decoder"]["drafter"] == "none"


def differences(info: Mapping, baseline: Mapping, any_configuration: bool = False, other: str = "AR") -> list[str]:
    """Fields that must agree for a speed-up and do not, each as "dtype (bfloat16, AR float32)".

    With `any_configuration` number format, threads and compilation are free: the same work on the same machine. `other`
    is what the baseline is called.
    """
    mine, theirs = _fields(info), _fields(baseline)
    free = _CONFIGURATION if any_configuration else ()
    return [
        f"{name} ({_short(mine[name])}, {other} {_short(theirs[name])})"
        for name in mine
        if name not in free and mine[name] != theirs[name]
    ]


def configuration(info: Mapping) -> str:
    """The part of a run's setting that only changes its speed, for example "float32, 2 threads"."""
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
