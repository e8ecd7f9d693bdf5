"""Sweeps: one `run` over all combinations of values of some settings. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache

from specbench.errors import SpecbenchError, unknown_name
from specbench.prompts import fetched_prompts, load_prompts
from specbench.runs.plan import RUN_ORIGINS, Plan, make_plan
from specbench.runs.settings import Setting, Value, decoder_settings, run_settings, split_list
from specbench.system import console

_MANY = 1000
"""Runs that are planned without a word; each takes some milliseconds."""


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse ["G=3,10", "window=8,16"] to {"G": ["3", "10"], "window": ["8", "16"]}.

    Raises:
        SpecbenchError: no "=" or no values, or a name given twice.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not split_list(values):
            raise SpecbenchError(f"--sweep {text}: no values", "write it as --sweep G=3,10,25")
        if name.strip() in axes:
            raise SpecbenchError(f"--sweep {text}: {name.strip()} is swept twice", "list all its values once")
        axes[name.strip()] = split_list(values)
    return axes


def sweep_plans(
    values: Mapping[str, Value], axes: Mapping[str, Sequence[object]], download: bool = False
) -> list[Plan]:
    """Make one plan per combination of the axes' values; one plan without axes.

    Args:
        download: whether prompts that are not on this disk may be downloaded.

    Raises:
        SpecbenchError: an axis that is not a setting, does not identify a run or has no effect, a value out of range,
            or any error of `make_plan`.
    """
    known, combinations = _combined(axes)
    load = cache(fetched_prompts if download else load_prompts)
    if len(combinations) > _MANY:
        console.say(f"planning {len(combinations):,} runs")
    plans = [make_plan(_with(values, one), load=load) for one in combinations]
    for name, choices in known.items():
        _check_effect(name, choices, combinations, plans)
    return plans


def sweep_values(values: Mapping[str, Value], axes: Mapping[str, Sequence[object]]) -> list[dict[str, Value]]:
    """The settings of each combination of the axes' values, without plans."""
    return [_with(values, one) for one in _combined(axes)[1]]


def _combined(axes: Mapping[str, Sequence[object]]) -> tuple[dict[str, list[object]], list[dict[str, object]]]:
    """The axes with parsed values, and every combination of those."""
    settings = {setting.name: setting for setting in run_settings()}
    known = {name: _parsed(settings, name, texts) for name, texts in axes.items()}
    return known, [dict(zip(known, chosen, strict=True)) for chosen in itertools.product(*known.values())]


def _with(values: Mapping[str, Value], chosen: Mapping[str, object]) -> dict[str, Value]:
    return {**values, **{name: Value(value, "sweep") for name, value in chosen.items()}}


def _parsed(settings: Mapping[str, Setting], name: str, values: Sequence[object]) -> list[object]:
    swept = [*RUN_ORIGINS, *(setting.name for setting in decoder_settings())]
    if name not in swept:
        if name in settings:
            raise SpecbenchError(f"--sweep {name}: not what tells one run from another", f"set it once, with --{name}")
        raise unknown_name("setting to sweep", name, swept)
    return list(dict.fromkeys(settings[name].parse(value) for value in values))


def _check_effect(name: str, choices: Sequence[object], combinations: Sequence[Mapping], plans: Sequence[Plan]) -> None:
    """Reject an axis without effect, for example one overridden by a decoder's inline option."""
    if len(choices) < 2:
        return
    first, second = ({**combinations[0], name: choice} for choice in choices[:2])
    one, other = (plans[combinations.index(combination)] for combination in (first, second))
    if _runs(one) == _runs(other):
        raise SpecbenchError(f"--sweep {name}: changes nothing here", f"--decoder sets {name} itself; omit it there")


def _runs(plan: Plan) -> tuple:
    machine = (plan.dtype, plan.device, plan.threads, plan.compiled)
    setting = (plan.sampling, plan.prompts.sha256, plan.seed, plan.batch, *machine)
    decoders = [(decoder.spec, decoder.auto_window) for decoder in plan.decoders]
    return plan.model, decoders, setting
