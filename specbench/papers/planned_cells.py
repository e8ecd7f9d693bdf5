"""The cells of a table as runs: settings, plans, and the stored runs that measured them.

A cell's settings come from the table; flags win over it, as for a small model in the place of the paper's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specbench import prompts
from specbench.errors import BAD_INPUT, SpecbenchError
from specbench.models.catalog import find_model
from specbench.models.facts import EIGHT_BITS
from specbench.papers.cells import RATIOS_TO_AR
from specbench.papers.table import CellSettings, Table, takes
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import SAMPLING_SETTINGS, Plan, Shared, make_plan, plan_model, plan_sampling
from specbench.runs.settings import OPEN_IN_TABLES, Setting, Value, merge, run_settings
from specbench.specs.presets import PRESETS
from specbench.store.run_folders import find_runs_like, read_infos, without_options
from specbench.store.run_store import RunStore

_TRACED = ("draft_tv", "draft_top1")
_NOT_FOUND = "not in the results"


@dataclass(frozen=True)
class PlannedCell:
    """The settings of one or more cells, with the plan of their run or the problem that prevents one."""

    settings: CellSettings  # as the table states them
    values: Mapping[str, Value]  # by setting name, with flags and environment applied; empty where they are refused
    plan: Plan | None = None
    problem: SpecbenchError | None = None


def resolve_cells(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """The distinct cells of a table with their settings, without plans.

    Args:
        flags: by the name of a setting of `specbench run`; None means not given.
        env: the environment; the process's own if None. What the table says wins over it.
    """
    settings, env = run_settings(), os.environ if env is None else env
    head_of(str(flags.get("head") or ""), "")
    every = table.all_settings()
    shared = {"trace": any(column.key in _TRACED for column in table.columns)}
    cells = [_resolve(asked, shared, f"{table.name}.toml", settings, flags, env) for asked in every]
    if not _lacks_ar(table, every):
        none = {"baseline": Value(0, "default of tables")}
        cells = [replace(cell, values=cell.values and {**cell.values, **none}) for cell in cells]
    _raise_if_all_refused(cells)
    return cells


def _resolve(
    asked: CellSettings,
    shared: Mapping[str, object],
    file: str,
    settings: Sequence[Setting],
    flags: Mapping[str, object],
    env: Mapping[str, str],
) -> PlannedCell:
    try:
        given = _settings(asked, flags.get("model")) | shared
        unused = {"head"} - takes(asked.decoder, dict(asked.options))
        flags = {name: value for name, value in flags.items() if name not in unused}
        if flags.get("head"):
            flags["head"] = head_of(str(flags["head"]), str(flags.get("model") or asked.model))
        open_here = {one.env for one in settings if one.name in OPEN_IN_TABLES - unused and one.name not in given}
        free = {name: value for name, value in env.items() if name in open_here}
        return PlannedCell(asked, merge(settings, flags, free, given, file))
    except SpecbenchError as problem:
        return PlannedCell(asked, {}, problem=problem)


def head_of(text: str, model: str) -> str | None:
    """The head that `--head` names for a model: a folder or hub id for all, or MODEL=PATH, several with commas."""
    if "=" not in text:
        return text
    named = dict(piece.partition("=")[::2] for piece in text.split(","))
    for name in named:
        find_model(name)
    return named.get(model)


def _lacks_ar(table: Table, every: Sequence[CellSettings]) -> bool:
    """Whether a table has speed-ups over AR, and no row of AR."""
    known = [PRESETS[one.decoder].choices["drafter"] for one in every if one.decoder in PRESETS]
    return "none" not in known and any(column.key in RATIOS_TO_AR for column in table.columns)


def _settings(asked: CellSettings, model: object) -> dict[str, object]:
    """The cell's values by setting name. A substituted model brings prompts it can read, and its vocabulary."""
    inline = ",".join(f"{name}={value}" for name, value in asked.options)
    settings = {
        name: getattr(asked, name) for name in ("model", "prompts", "limit", "samples", "seed", "batch", "dtype")
    }
    settings["decoder"] = [f"{asked.decoder}:{inline}" if inline else asked.decoder]
    settings |= {SAMPLING_SETTINGS[name]: value for name, value in asked.sampling}
    if model is None or model == asked.model:
        settings |= {"guidance-rows": asked.guidance_rows, "prompt-form": asked.prompt_form}
    else:
        own = find_model(str(model))
        settings["prompts"] = own.name if own.name in prompts.prompt_set_names() else asked.prompts
        settings["top-k"] = settings.get("top-k") if (settings.get("top-k") or 0) <= own.v_image else 0
    return {name: value for name, value in settings.items() if value is not None}


def _raise_if_all_refused(cells: Sequence[PlannedCell]) -> None:
    refused = [cell.problem for cell in cells if cell.problem is not None]
    if refused and len(refused) == len(cells) and all(problem.exit_code == BAD_INPUT for problem in refused):
        raise refused[0]


def plan_table(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """The distinct cells of a table, each with its plan or the problem that prevents one; see `resolve_cells`."""
    planned, shared = [], Shared()
    for cell in resolve_cells(table, flags, env):
        try:
            plan = None if cell.problem else make_plan(cell.values, shared=shared)
            planned.append(replace(cell, plan=plan))
        except SpecbenchError as problem:
            planned.append(replace(cell, problem=problem))
    _raise_if_all_refused(planned)
    return planned


def find_measured(cells: Sequence[PlannedCell], out: Path | str) -> dict[CellSettings, Path | str]:
    """The run folder of each cell in `out`, whatever machine it was measured on: most images first, then the newest."""
    infos = read_infos(out)
    found: dict[CellSettings, Path | str] = {}
    for cell in cells:
        alike = find_runs_like(infos, **wanted_fields(cell.values)) if infos and cell.values else {}
        order = {
            folder: (len(RunStore(folder).completed()), info.invocations[-1].started_at)
            for folder, info in alike.items()
        }
        found[cell.settings] = sorted(order, key=order.__getitem__)[-1] if order else _NOT_FOUND
    return found


def wanted_fields(values: Mapping[str, Value]) -> dict[str, object]:
    """The fields of the `RunSpec` that the settings ask for; dtype, device and threads only where they were given, and
    whatever draft head."""
    value = {name: held.value for name, held in values.items()}
    model, (planned,) = plan_model(values), plan_decoders(value["decoder"], values)
    fields = {"model": model.name, "prompts": value["prompts"], "seed": value["seed"], "batch": value["batch"]}
    fields |= {"sampling": plan_sampling(model, values), "decoder": without_options(planned.spec, "head")}
    value["dtype"] = model.dtype if value["dtype"] == EIGHT_BITS else value["dtype"]
    return fields | {name: value[name] for name in ("dtype", "device", "threads") if values[name].given}


def replaced_settings(cell: PlannedCell) -> set[str]:
    """Names of the settings whose values are not those that the table states."""
    stated = _settings(cell.settings, None)
    return {name for name, held in cell.values.items() if name in stated and held.value != stated[name]} - {"decoder"}
