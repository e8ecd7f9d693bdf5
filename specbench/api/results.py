"""Score images, and read results: tables of runs and images as DataFrames, cards, pages and papers' tables.

A DataFrame has the column names of the parquet files (`columns`), and the units of its columns in `attrs["units"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError, chosen, read_name
from specbench.store.run_folders import Names, find_run, find_runs

if TYPE_CHECKING:
    import pandas as pd

    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import ScoreReporter
    from specbench.papers.join import PaperTable

# Imports inside functions: a program only imports modules that it needs.


def report(runs: Names = (), out: str | Path = "results", long: bool = False) -> pd.DataFrame:
    """Return the numbers of runs, one row per run.

    Args:
        runs: run id, unique prefix of an id, or folder, or a list of them; all runs in `out` by default.
        long: if True, one row per run and number or score, with its interval, images and unit.

    Returns:
        DataFrame with the columns of `specbench.columns("report")`, or of `specbench.columns("numbers")` if `long`.
        Missing numbers are NaN. AR comes first, then the order of `specbench list decoders`. Notebooks display the
        DataFrame as the first table of `specbench report`; `.plot()` draws the page's charts, `.images()` the pictures.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    from specbench.reporting.notebook import report_frame  # brings pandas and matplotlib

    return report_frame(find_runs(out, runs), long)


def samples(runs: Names = (), out: str | Path = "results") -> pd.DataFrame:
    """Return the images of runs, one row per image.

    Args:
        runs, out: as for `report`.

    Returns:
        DataFrame with the columns of `specbench.columns("samples")`, and a column per metric that scores single images,
        with the metric's name; if the runs were scored in several ways, a column per fingerprint. `path` is the image's
        file. Failed images have their error and no numbers.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    from specbench.reporting.image_tiles import sample_frame  # brings pandas

    return sample_frame(find_runs(out, runs))


def load(runs: Names = (), out: str | Path = "results") -> pd.DataFrame:
    """Return the stored sample rows of runs, including tokens and other lists.

    Args:
        runs, out: as for `report`.

    Returns:
        DataFrame with one row per image and the columns of `specbench.columns("images")`, and of `"traces"` if `run
        --trace` stored traces. Lists have an entry per stream slot (`logp`) or per window offset (`accepted`).

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    import pandas as pd

    from specbench.store.run_store import RunStore
    from specbench.store.schema import SAMPLES, TRACES, with_units

    frames = [RunStore(folder).with_traces() for folder in find_runs(out, runs)]
    return with_units(pd.concat(frames, ignore_index=True), SAMPLES, TRACES)


def columns(table: str | None = None) -> pd.DataFrame:
    """Return definitions of all columns of tables and parquet files.

    Args:
        table: "report", "numbers" (of `report(long=True)`), "samples", "images" (of `load`), "traces", "run scores" (of
            `score(long=True)`) or "image scores"; all of them if None.

    Returns:
        DataFrame with the columns `table, name, type, unit, meaning`.

    Raises:
        SpecbenchError: an unknown table.
    """
    import pandas as pd

    from specbench.reporting.report_schema import REPORT_TABLES
    from specbench.store.schema import column_facts

    kinds = REPORT_TABLES if table is None else [read_name("table", table, REPORT_TABLES)]
    return pd.DataFrame(
        {"table": kind, "name": field.name, "type": str(field.type), **column_facts(REPORT_TABLES[kind])[field.name]}
        for kind in kinds
        for field in REPORT_TABLES[kind]
    )


def compare(
    baseline: str | Path, runs: Names = (), out: str | Path = "results", settings: Settings | None = None
) -> pd.DataFrame:
    """Compare each run with a baseline, over the images that both runs have.

    Args:
        baseline: a run id, a unique prefix of an id, or a folder.
        runs: as for `report`; the baseline is left out.
        settings: settings of the metrics, for example a reference folder.

    Returns:
        DataFrame with one row per run and number: `run_id, baseline, name, value, low, high, p, p_holm, n,
        prompts_needed, note`.

    Raises:
        SpecbenchError: an unknown or damaged run, or no run other than the baseline.
    """
    import pandas as pd

    from specbench.reporting.compare import compare_runs

    a, folders = find_run(out, baseline), find_runs(out, runs)
    others = [folder for folder in folders if folder.resolve() != a.resolve()] or folders
    rows = [{"run_id": b.name, "baseline": a.name} | row.record for b in others for row in compare_runs(a, b, settings)]
    frame = pd.DataFrame(rows).astype(dict.fromkeys(("value", "low", "high", "p", "p_holm", "prompts_needed"), float))
    frame.attrs["units"] = {"n": "images", "prompts_needed": "prompts"}
    return frame


def show(run: str, prompt: str | None = None, sample: int = 0, out: str | Path = "results") -> list[dict[str, object]]:
    """Return the card of a run, or of one of its images (`specbench show`).

    Args:
        run: a run id, a unique prefix of an id, or a folder.
        prompt: prompt id, a unique prefix of an id, or words of the prompt; None for the run itself.
        sample: sample index of the image.

    Returns:
        One dict, with the keys of `specbench.reporting.terminal.card` or, for an image, of
        `specbench.reporting.terminal.image_card`.

    Raises:
        SpecbenchError: an unknown or damaged run, or a prompt that matches no image or several images.
    """
    from specbench.reporting.terminal import card, image_card  # brings pandas and scipy

    folders = find_runs(out, run)
    if prompt is None:
        return [card(folder) for folder in folders]
    if len(folders) > 1:
        raise SpecbenchError(f"'{run}' matches {len(folders)} runs", "name the run that contains the image")
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


def methods_paragraph(runs: Names = (), out: str | Path = "results") -> tuple[str, str]:
    """Draft the methods paragraph of a paper from the runs' files (`specbench methods`).

    Args:
        runs, out: as for `report`.

    Returns:
        The paragraph in LaTeX, and the BibTeX entries that it cites.

    Raises:
        SpecbenchError: an unknown or damaged run, or all runs are tokens imported from other programs.
    """
    from specbench.reporting.methods import paragraph_and_entries

    return paragraph_and_entries(find_runs(out, runs))


def report_table(
    table: str, model: str | None = None, prompts: str | None = None, out: str | Path = "results"
) -> PaperTable:
    """Join a paper's table with the runs in a results folder (`specbench report TABLE`); nothing is run.

    Args:
        table: a name of `specbench list tables`.
        model, prompts: replace the table's model and prompts.

    Returns:
        The joined table, which `specbench.papers.render.render_tables` writes in any format.

    Raises:
        SpecbenchError: an unknown table, model or prompt set, or a damaged run.
    """
    from specbench.papers.reproduce import measured_table  # brings pandas and scipy
    from specbench.papers.table_files import load_table

    return measured_table(load_table(table, out), model, prompts, out)


def score(
    runs: Names = (),
    metrics: str | Sequence[str] | None = None,
    out: str | Path = "results",
    protocol: str | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    problems: list[SpecbenchError] | None = None,
    bundled_only: bool = False,
    long: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Score the images of runs; existing scores are not computed again.

    Args:
        runs: run id, unique prefix of an id, or folder, or a list of them; all runs in `out` by default.
        metrics: one or several names; without metrics and protocol, all of
            `specbench.metrics.catalog.default_metrics` that apply to the prompts.
        protocol: "sjd" or "cool-sd": also compute this protocol's metrics that apply to the prompts.
        settings: settings of the metrics: device, batch, reference images, offline.
        reporter: receives progress instead of the bar.
        problems: receives errors of runs that could not be scored; by default raised after all other runs.
        bundled_only: without metrics and protocol, use only the metrics that need no download.
        long: if True, one row per run and score.
        progress: if False, print no bar.

    Returns:
        DataFrame with one row per run: `run_id, model, decoder`, and for each stored metric its value, `METRIC_low` and
        `METRIC_high` (95 % interval; NaN below eight prompts) and `METRIC_n` (images). If `long`, the columns of
        `specbench.columns("run scores")`, `too_few` (whether the interval was omitted because of too few prompts) and
        `prompts_needed` (number of prompts per run that suffices to detect a change of 2 % between runs of different
        prompts; runs of the same prompts need fewer).

    Raises:
        SpecbenchError: an unknown run or metric, or something that must be installed or downloaded first; exit code 3
            if some runs were scored and others were not, for example because of a missing image.
    """
    from specbench.metrics.score_store import score_frame  # brings pandas and pillow
    from specbench.metrics.scoring import score as score_runs
    from specbench.runs.progress_bar import ScoreProgress

    reporting: Any = reporter or (ScoreProgress() if progress else None)
    named = chosen("metric", metrics) or None
    scoring = score_runs(find_runs(out, runs), named, settings, reporting, (), bundled_only, protocol)
    scoring.check(partly=problems is not None)
    if problems is not None:
        problems += scoring.problems
    return score_frame(scoring.rows(), long)


def score_folder(
    images: str | Path,
    prompts: str | Path | None = None,
    metrics: str | Sequence[str] | None = None,
    out: str | Path = "results",
    protocol: str | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    bundled_only: bool = False,
    layout: str | None = None,
    column: str | None = None,
    long: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Score images of other programs, named by prompt id or in the formats of the papers' programs.

    Args:
        images: folder of the images.
        prompts: the set or file of their prompts; None for the folder's metadata file.
        column: the column with the texts in that file.
        layout: layout of the folder, see `specbench score --help`; None for the matching layout.
        metrics, out, protocol, settings, reporter, bundled_only, long, progress: as for `score`.

    Returns:
        As `score`.

    Raises:
        SpecbenchError: an image without a prompt or a prompt without an image, and the errors of `score`.
    """
    from specbench.metrics.external_images import external_images, prompts_of_images  # brings pandas and pillow
    from specbench.metrics.score_store import score_frame
    from specbench.metrics.scoring import score as score_images
    from specbench.runs.progress_bar import ScoreProgress

    reporting: Any = reporter or (ScoreProgress() if progress else None)
    named = chosen("metric", metrics) or None
    folder = Path(images)
    scored = external_images(folder, prompts_of_images(folder, prompts, column), Path(out), layout, reporting)
    scoring = score_images([scored], named, settings, reporting, (), bundled_only, protocol)
    return score_frame(scoring.check().rows(), long)


def differences(
    baseline: str | Path,
    runs: Names = (),
    metrics: str | Sequence[str] = (),
    out: str | Path = "results",
    settings: Settings | None = None,
) -> pd.DataFrame:
    """Subtract a baseline's scores from the scores of runs, over common images, with paired 95 % intervals.

    Args:
        baseline, runs: as for `compare`.
        metrics: one or several names of metrics with which the runs were scored.

    Returns:
        DataFrame with one row per run and metric: `run_id, baseline, metric, difference, low, high, p, spread, n,
        fingerprint`. `p` is of a single test; `compare` also corrects it for several scores (`p_holm`).

    Raises:
        SpecbenchError: an unknown run or metric, no metric, or a metric that scored only one run of a pair.
    """
    import pandas as pd

    from specbench.metrics.score_store import difference_rows

    return pd.DataFrame(difference_rows(find_run(out, baseline), find_runs(out, runs), metrics, settings))


def export(benchmark: str, run: str, to: str | Path, out: str | Path = "results") -> int:
    """Write a run's images in the layout of an official benchmark program (`specbench export`).

    Args:
        benchmark: "geneval", "t2i-compbench", "dpg-bench", "tiif", "wise-verified", "wise-legacy", "oneig",
            "longtext-bench", "cvtg-2k" or "dataset".
        run: a run id, a unique prefix of an id, or a folder.
        to: an empty or new folder.

    Returns:
        The number of images.

    Raises:
        SpecbenchError: an unknown benchmark or run, a run of other prompts, or a folder that is not empty.
    """
    from specbench.metrics.official_exchange import export_images  # brings pandas and pillow

    return export_images(benchmark, find_run(out, run), Path(to))


def import_results(
    benchmark: str, run: str, results: str | Path, out: str | Path = "results"
) -> list[dict[str, object]]:
    """Store the results of an official benchmark program as scores of a run (`specbench import`).

    Args:
        benchmark, run: as for `export`.
        results: the results file of GenEval or LongText-Bench; the exported folder, for T2I-CompBench++ or WISE; the
            `_detail.txt` of DPG-Bench's program; or the results folder of TIIF-Bench's or OneIG-Bench's program.

    Returns:
        One dict per score, with the keys of `score(long=True)`.

    Raises:
        SpecbenchError: an unknown benchmark or run, or results that do not match it.
    """
    from specbench.metrics.official_exchange import import_scores  # brings pandas and pillow

    return import_scores(benchmark, find_run(out, run), Path(results))
