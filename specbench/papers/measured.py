"""Find the runs in a results folder that belong to a paper's table, without planning or running anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench.errors import BAD_INPUT, SpecbenchError
from specbench.papers.join import PaperTable, join
from specbench.papers.reproduce import PlannedCell, resolve_cells, without_replaced_choices
from specbench.papers.substituted_model import one_row_per_run, with_bundled_scores
from specbench.papers.table import CellSettings, Table
from specbench.prompts import load_prompts
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import plan_model, plan_sampling
from specbench.runs.settings import Value
from specbench.store.find import find_runs_like, read_infos, without_options
from specbench.store.run_store import RunStore

NOT_FOUND = "not in the results"


def measured_table(
    table: Table, model: str | None = None, prompts: str | None = None, out: Path | str = "results"
) -> PaperTable:
    """A table joined with the runs of a results folder.

    Args:
        model, prompts: used in place of the table's own.

    Raises:
        SpecbenchError: an unknown model or prompt set, or a damaged run folder.
    """
    if Path(out).is_file():
        raise SpecbenchError(f"--out {out}: is a file", "name a folder")
    if prompts is not None:
        _check_prompts(prompts)
    cells = resolve_cells(table, {"model": model, "prompts": prompts, "out": str(out)}, env={})
    found = find_measured(cells, out)
    table = without_replaced_choices(table, cells)
    if model is not None:
        table = one_row_per_run(table, cells, model)
        table = with_bundled_scores(table, [folder for folder in found.values() if isinstance(folder, Path)])
    return join(table, found)


def find_measured(cells: Sequence[PlannedCell], out: Path | str) -> dict[CellSettings, Path | str]:
    """The run folder of each cell in `out`, whatever machine it was measured on: most images first, then the newest."""
    infos = read_infos(out)
    found: dict[CellSettings, Path | str] = {}
    for cell in cells:
        alike = find_runs_like(infos, **wanted_fields(cell.values)) if infos and cell.values else {}
        order = {folder: (_images(folder), info.invocations[-1].started_at) for folder, info in alike.items()}
        found[cell.settings] = sorted(order, key=order.__getitem__)[-1] if order else NOT_FOUND
    return found


def wanted_fields(values: Mapping[str, Value]) -> dict[str, object]:
    """The fields of the `RunSpec` that the settings ask for; dtype, device and threads only where they were given, and
    whatever draft head.
    """
    value = {name: held.value for name, held in values.items()}
    model, (planned,) = plan_model(values), plan_decoders(value["decoder"], values)
    fields = {"model": model.name, "prompts": value["prompts"], "seed": value["seed"], "batch": value["batch"]}
    fields |= {"sampling": plan_sampling(model, values), "decoder": without_options(planned.spec, "head")}
    return fields | {name: value[name] for name in ("dtype", "device", "threads") if values[name].given}


def _check_prompts(name: str) -> None:
    """Refuse an unknown prompt set; one that is not on this disk may still have runs."""
    try:
        load_prompts(name)
    except SpecbenchError as error:
        if error.exit_code == BAD_INPUT:
            raise


def _images(folder: Path) -> int:
    return len(RunStore(folder).completed())
