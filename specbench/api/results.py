"""Read results: tables of runs and images as DataFrames, cards, pages and papers' tables.

A DataFrame has the column names of the parquet files (`columns`), and the units of its columns in `attrs["units"]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import SpecbenchError, read_name
from specbench.store.run_folders import Names, find_run, find_runs

if TYPE_CHECKING:
    import pandas as pd

    from specbench.metrics.base import Settings
    from specbench.papers.join import PaperTable

# Imports inside functions: a program waits only for what it calls.


def report(runs: Names = (), out: str | Path = "results", long: bool = False) -> pd.DataFrame:
    """The numbers of runs, one row per run.

    Args:
        runs: run id, unique beginning of one, or folder, or a list of them; all runs in `out` if empty.
        long: one row per run and number or score instead, with its interval, images and unit.

    Returns:
        DataFrame with the columns of `specbench.columns("report")`, or of `specbench.columns("numbers")` if `long`.
        Missing numbers are NaN. AR comes first, then the order of `specbench list decoders`. In a notebook it is shown
        as the first table of `specbench report`; `.plot()` draws the page's charts, `.images()` the pictures.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    from specbench.reporting.notebook import report_frame  # brings pandas and matplotlib

    return report_frame(find_runs(out, runs), long)


def samples(runs: Names = (), out: str | Path = "results") -> pd.DataFrame:
    """The images of runs, one row per image.

    Args:
        runs, out: as for `report`.

    Returns:
        DataFrame with the columns of `specbench.columns("samples")`, and one per metric that scores single images,
        named after the metric. `path` is the image's file. Failed images have their error and no numbers.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    from specbench.reporting.image_tiles import sample_frame  # brings pandas

    return sample_frame(find_runs(out, runs))


def load(runs: Names = (), out: str | Path = "results") -> pd.DataFrame:
    """The stored sample rows of runs, tokens and other lists included.

    Args:
        runs, out: as for `report`.

    Returns:
        DataFrame with one row per image and the columns of `specbench.columns("images")`, and of `"traces"` where
        `run --trace` stored them. N stream slots, W window offsets: `logp[N]`, `accepted[W]`.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    import pandas as pd

    from specbench.store.run_store import RunStore
    from specbench.store.schema import SAMPLES, TRACES, with_units

    found = [RunStore(folder).with_traces() for folder in find_runs(out, runs)]
    return with_units(pd.concat(found, ignore_index=True), SAMPLES, TRACES)


def columns(table: str | None = None) -> pd.DataFrame:
    """The definitions of all columns that tables and parquet files have.

    Args:
        table: "report", "numbers" (of `report(long=True)`), "samples", "images" (of `load`), "traces", "run scores" (of
            `score(long=True)`) or "image scores"; all of them if None.

    Returns:
        DataFrame with the columns `table, name, type, unit, meaning`.

    Raises:
        SpecbenchError: an unknown table.
    """
    import pandas as pd

    from specbench.store.schema import TABLES, column_facts

    kinds = TABLES if table is None else [read_name("table", table, TABLES)]
    return pd.DataFrame(
        {"table": kind, "name": field.name, "type": str(field.type), **column_facts(TABLES[kind])[field.name]}
        for kind in kinds
        for field in TABLES[kind]
    )


def compare(
    baseline: str | Path, runs: Names = (), out: str | Path = "results", settings: Settings | None = None
) -> pd.DataFrame:
    """Compare runs with a baseline, each over the images both have.

    Args:
        baseline: a run id, a unique beginning of one, or a folder.
        runs: as for `report`; the baseline among them is left out.
        settings: of the metrics, for example a reference folder.

    Returns:
        DataFrame with one row per run and number: `run_id, baseline, name, value, low, high, p, p_holm, n,
        prompts_needed, note`.

    Raises:
        SpecbenchError: an unknown or damaged run, or no run but the baseline.
    """
    import pandas as pd

    from specbench.reporting.compare import compare_runs

    a, found = find_run(out, baseline), find_runs(out, runs)
    others = [folder for folder in found if folder.resolve() != a.resolve()] or found
    rows = [{"run_id": b.name, "baseline": a.name} | row for b in others for row in compare_runs(a, b, settings)]
    frame = pd.DataFrame(rows).astype(dict.fromkeys(("value", "low", "high", "p", "p_holm", "prompts_needed"), float))
    frame.attrs["units"] = {"n": "images", "prompts_needed": "prompts"}
    return frame


def show(run: str, prompt: str | None = None, sample: int = 0, out: str | Path = "results") -> list[dict[str, object]]:
    """The card of a run, or of one of its images (`specbench show`).

    Args:
        run: a run id, a unique beginning of one, or a folder.
        prompt: prompt id, a unique beginning of one, or words of the prompt; None for the run itself.
        sample: sample index of the image.

    Returns:
        One dict, with the keys that `specbench.reporting.terminal.card` or, of an image,
        `specbench.reporting.terminal.image_card` lists.

    Raises:
        SpecbenchError: an unknown or damaged run, or no image or several match.
    """
    from specbench.reporting.terminal import card, image_card  # brings pandas and scipy

    folders = find_runs(out, run)
    if prompt is None:
        return [card(folder) for folder in folders]
    if len(folders) > 1:
        raise SpecbenchError(f"'{run}' matches {len(folders)} runs", "name the run of the image")
    return [image_card(folders[0], prompt, sample)]


def report_page(path: str | Path, runs: Names = (), out: str | Path = "results") -> Path:
    """Write one HTML page with tables, plots and images of runs (`specbench report --html`).

    Returns:
        The file that was written.

    Raises:
        SpecbenchError: an unknown or damaged run, or a file that cannot be written.
    """
    from specbench.reporting.html import write_page  # brings matplotlib

    return write_page(find_runs(out, runs), Path(path))


def report_table(
    table: str, model: str | None = None, prompts: str | None = None, out: str | Path = "results"
) -> PaperTable:
    """A paper's table joined with the runs in a results folder (`specbench report TABLE`); nothing is run.

    Args:
        table: a name of `specbench list tables`.
        model, prompts: used in place of the table's own.

    Returns:
        The joined table, which `specbench.papers.render.render_tables` writes in any format.

    Raises:
        SpecbenchError: an unknown table, model or prompt set, or a damaged run.
    """
    from specbench.papers.reproduce import measured_table  # brings pandas and scipy
    from specbench.papers.table_files import load_table

    return measured_table(load_table(table), model, prompts, out)
