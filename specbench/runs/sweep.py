"""Sweeps: one `run` over all combinations of values of some settings. Imports no torch."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench.errors import SpecbenchError, unknown_name
from specbench.prompts import fetched_prompts
from specbench.runs.decoder_args import parse_decoders
from specbench.runs.plan import Plan, Shared, make_plan
from specbench.runs.settings import RunSettings, decoder_settings, names_with, run_settings
from specbench.specs.options import SettingOrigin, SettingSource, Use, split_list
from specbench.specs.presets import decoder_name
from specbench.system import console

_MANY = 1000  # Maximum number of runs planned without a progress line; each takes a millisecond


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse ["G=3,10", "window=8,16"] to {"G": ["3", "10"], "window": ["8", "16"]}."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name.strip() in axes:
            raise SpecbenchError(f"--sweep {text}: {name.strip()} is swept twice", "list all values in one --sweep")
        axes[name.strip()] = split_list(values)
    return axes


def sweep_plans(settings: RunSettings, axes: Mapping[str, Sequence[object]]) -> list[Plan]:
    """Make one plan per combination of the axes' values (one plan without axes). Download missing prompts."""
    shared = Shared(fetched_prompts)
    check_effects(settings, axes, shared)
    made: dict[tuple[object, ...], Plan] = {}
    plans = []
    for chosen in sweep_values(settings, axes):
        key = tuple(chosen.value(name) for name in axes if name != "seed")
        if key not in made or chosen.batch == "auto":  # a stored run may have chosen the batch
            made[key] = make_plan(chosen, shared=shared)
        plans.append(replace(made[key], settings=chosen))
    return plans


def sweep_values(settings: RunSettings, axes: Mapping[str, Sequence[object]]) -> Iterator[RunSettings]:
    """Yield the settings of each combination of the axes' values, without plans; print progress if there are many."""
    parsed, origin = _parsed_axes(settings, axes), SettingOrigin(SettingSource.SWEEP)
    total = math.prod(map(len, parsed.values()))
    for number, chosen in enumerate(itertools.product(*parsed.values())):
        if total > _MANY and number % _MANY == 0 and console.progress_shown():
            console.say(f"planned {number:,} of {total:,} runs")
        yield settings.changed(dict(zip(parsed, chosen, strict=True)), dict.fromkeys(parsed, origin))


def _parsed_axes(of_runs: RunSettings, axes: Mapping[str, Sequence[object]]) -> dict[str, list[Any]]:
    for reference, _ in parse_decoders(of_runs.decoder) if axes else ():
        decoder_name(reference)  # imports a user's decoder, whose options can then be swept
    settings = {setting.name: setting for setting in run_settings()}
    swept = [*names_with(Use.RUN), *(setting.name for setting in decoder_settings())]
    for name in axes:
        if name not in settings:
            raise unknown_name("setting to sweep", name, swept)
        if not axes[name]:
            raise SpecbenchError(f"--sweep {name}: no values", "write it as --sweep G=3,10,25")
        if name not in swept:
            raise SpecbenchError(f"--sweep {name}: its values would not give different runs", f"set it with --{name}")
    return {name: list(dict.fromkeys(map(settings[name].parse, values))) for name, values in axes.items()}


def check_effects(settings: RunSettings, axes: Mapping[str, Sequence[object]], shared: Shared) -> None:
    """Reject an axis without effect, for example an option that a decoder's inline option overrides."""
    parsed = _parsed_axes(settings, axes)
    first = {name: choices[:1] for name, choices in parsed.items()}
    for name, choices in parsed.items():
        two = sweep_values(settings, {**first, name: choices[:2]})
        first_runs, *other_runs = (_runs(make_plan(each, shared)) for each in two)
        if first_runs in other_runs:
            what = f"--sweep {name}: its values have no effect"
            raise SpecbenchError(what, f"omit {name} in --decoder, which already sets it")


def _runs(plan: Plan) -> tuple[object, ...]:
    setting = (plan.sampling, plan.prompts.sha256, plan.settings.seed, plan.compute)
    return plan.model, [(decoder.spec, decoder.auto_window) for decoder in plan.decoders], setting
