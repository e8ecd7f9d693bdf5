"""The public functions that adapt settings and names of runs, each a few lines over the package that does the work.

The others stand where they work; `specbench.__init__` names all of them.

    prompts -> model.encode -> decoding.loop.decode -> Generation -> store -> scoring -> reporting

Settings have the names of the command line's flags, with underscores: `top_k=100`, `G=50`. Environment variables are
not read. Functions import what needs torch, pandas or matplotlib when called, so that importing this module is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specbench import prompts as prompt_sets
from specbench.errors import SpecbenchError
from specbench.runs.settings import OF_TOKENS, merge, run_settings
from specbench.runs.sweep import sweep_plans, sweep_values
from specbench.store.run_folders import find_run, find_runs

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.generation import Generation
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import Images, ScoreReporter
    from specbench.papers.join import PaperTable
    from specbench.papers.reproduce import Warn
    from specbench.runs.run_progress import Reporter, RunSummary

# Imports inside functions: a program waits only for what it calls.

T = TypeVar("T")
Rows = list[dict[str, object]]


def generate(
    prompt: str | Sequence[str], model: str = "shapes", decoder: str = "sjd", **settings: object
) -> Generation | list[Generation]:
    """Decode images without storing anything.

    Args:
        prompt: one caption, or several to decode as one batch.
        model: a name of `specbench list models`.
        decoder: a name of `specbench list decoders`, with inline options if wanted.
        settings: `seed`, `cfg`, `temperature`, `top_k`, `top_p`, `dtype`, `device`, `threads`, `compile`, `weights`,
            `revision`, `random_weights`, `scale`, `trace`, and every option of the decoder, for example `G=50`.

    Returns:
        A `Generation` for one caption, a list for several. Pixels are in `.image`, uint8 [3, H, W].

    Raises:
        SpecbenchError: an unknown or invalid setting, missing weights, or an image that failed.
    """
    from specbench.runs.preparation import generate_images  # brings torch

    values = merge(run_settings(), _flags(settings | {"model": model, "decoder": decoder}), env={})
    if isinstance(prompt, str):
        return generate_images([prompt], values)[0]
    return generate_images(list(prompt), values)


def run(
    reporter: Reporter | None = None, sweep: Mapping[str, Sequence[object]] | None = None, **settings: object
) -> RunSummary:
    """Decode a prompt set with one or several decoders into the results folder; stored images are not decoded again.

    Args:
        reporter: receives progress; silent if None.
        sweep: settings with several values each, for example `{"G": [3, 10], "window": [8, 16]}`; every combination is
            run.
        settings: those of `specbench run`, for example `decoder=["ar", "gsd:G=50"], prompts="shapes", limit=8`.

    Returns:
        Run folders and counts. Failed images and an interruption are in `.problem()`, not raised.

    Raises:
        SpecbenchError: an unknown or invalid setting, something that must be installed or downloaded first, an
            unusable results folder.
    """
    from specbench.runs.runner import run_plans  # brings torch

    values = merge(run_settings(), _flags(settings), env={})
    return run_plans(sweep_plans(values, _flags(sweep or {})), reporter)


def dry_run(sweep: Mapping[str, Sequence[object]] | None = None, **settings: object) -> Rows:
    """List what `run` would decode (`specbench run --dry-run`); nothing is decoded.

    Args:
        sweep, settings: as for `run`.

    Returns:
        One dict per run: `run_id`, every setting, `images, done, seconds, megabytes, memory_gib`, where `weights` and
        `head` are, and `obstacles`; see `specbench.runs.dry_run.Outlook`.

    Raises:
        SpecbenchError: an unknown or invalid setting.
    """
    from specbench.runs.dry_run import distinct_outlooks  # brings pandas

    values = merge(run_settings(), _flags(settings), env={})
    return [dict(one.row) for one in distinct_outlooks(sweep_values(values, _flags(sweep or {})))]


def score(
    runs: str | Sequence[str] = (),
    metrics: str | Sequence[str] | None = None,
    out: str | Path = "results",
    protocol: str | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    problems: list[SpecbenchError] | None = None,
    bundled_only: bool = False,
) -> Rows:
    """Score the images of runs; scores that exist are not computed again.

    Args:
        runs: run id, unique beginning of one, or folder, or a list of them; all runs in `out` if empty.
        metrics: names; with neither metrics nor protocol, those of `specbench.metrics.catalog.default_metrics` that
            apply to the prompts.
        protocol: "sjd" or "cool-sd" adds that protocol's metrics where they apply to the prompts.
        settings: device, batch, reference images, offline.
        reporter: receives progress; silent if None.
        problems: receives why a run could not be scored, instead of this being raised when the others are.
        bundled_only: with neither metrics nor protocol, only the metrics that need no download.

    Returns:
        One dict per score: `run_id, metric, value, low, high, n, fingerprint, identity, images, too_few` (whether the
        interval was left out because it is of too few prompts), `prompts_needed` (how many prompts per run show a
        change of 2 % between runs of different prompts; fewer do where the prompts are the same).

    Raises:
        SpecbenchError: an unknown run or metric, or something that must be installed or downloaded first; exit code 3
            where some runs were scored and others, for example for a missing image, were not.
    """
    from specbench.metrics.scoring import run_images  # brings pandas and pillow

    found: list[SpecbenchError] = []
    shown = []
    for folder in find_runs(out, runs):
        try:
            shown.append(run_images(folder))
        except SpecbenchError as error:
            found.append(error)
    return _scores(shown, metrics, protocol, settings, reporter, found, problems, bundled_only)


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
) -> Rows:
    """Score images made elsewhere, named by prompt id or as the papers' programs name them.

    Args:
        images: their folder.
        prompts: the set or file of their prompts; those of the folder's metadata file if None.
        column: of that file, the one that holds the texts.
        layout: of the folder, see `specbench score --help`; None for the one that fits.
        metrics, out, protocol, settings, reporter, bundled_only: as for `score`.

    Returns:
        As `score` does.

    Raises:
        SpecbenchError: an image without a prompt or a prompt without an image, and what `score` raises.
    """
    from specbench.metrics.external_images import external_images, prompts_of_images  # brings pandas and pillow

    say = reporter.note if reporter else lambda text: None
    found = external_images(Path(images), prompts_of_images(Path(images), prompts, column), Path(out), layout, say)
    return _scores([found], metrics, protocol, settings, reporter, [], None, bundled_only)


def _scores(
    shown: Sequence[Images],
    metrics: str | Sequence[str] | None,
    protocol: str | None,
    settings: Settings | None,
    reporter: ScoreReporter | None,
    found: list[SpecbenchError],
    problems: list[SpecbenchError] | None,
    bundled_only: bool,
) -> Rows:
    """Scores of images, beside those that were `found` to be unreadable; `problems` as for `score`."""
    from specbench.metrics.catalog import find_protocol
    from specbench.metrics.score_store import scores_to_show
    from specbench.metrics.scoring import joint_problem, score_images

    added = find_protocol(protocol) if protocol else ()
    named = ([metrics] if isinstance(metrics, str) else metrics) or (() if protocol else None)
    outcomes = score_images(shown, found, named, settings, reporter, added, bundled_only)
    scored = any(outcome.skipped is None for outcome in outcomes)
    if found and (problems is None or not scored):
        raise joint_problem(found, scored)
    if problems is not None:
        problems += found
    return [
        {"run_id": found.name, **row}
        for found in shown
        for row in scores_to_show(found.folder, found.rows["prompt_id"])
    ]


def differences(
    baseline: str,
    runs: str | Sequence[str] = (),
    metrics: Sequence[str] = (),
    out: str | Path = "results",
    settings: Settings | None = None,
) -> Rows:
    """Scored runs minus a scored baseline over the images both have, with paired 95 % intervals.

    Args:
        baseline, runs: as for `score`.
        metrics: names of metrics the runs were scored with.

    Returns:
        One dict per run and metric: `run_id, baseline, metric, difference, low, high, p, spread, n, fingerprint`.

    Raises:
        SpecbenchError: an unknown run or metric, or only one of two runs is scored.
    """
    from specbench.metrics import score_store  # brings pandas
    from specbench.metrics.catalog import metric

    reference = find_run(out, baseline)
    folders = [folder for folder in find_runs(out, runs) if folder.resolve() != reference.resolve()]
    chosen = [metric(name)(settings) for name in metrics]
    rows = [score_store.difference(folder, reference, one) for folder in folders for one in chosen]
    return [row for row in rows if row is not None]


def compare(run_a: str, run_b: str, out: str | Path = "results", settings: Settings | None = None) -> Rows:
    """Compare two runs over the images both have, with A as the baseline.

    Args:
        run_a, run_b: run ids, unique beginnings of them, or folders.
        settings: of the metrics, for example a reference folder.

    Returns:
        One dict per number: `name, value, low, high, p, p_holm, n, prompts_needed, note`.

    Raises:
        SpecbenchError: an unknown or damaged run, or one run twice.
    """
    from specbench.reporting.compare import compare_runs  # brings pandas and scipy

    a, b = find_run(out, run_a), find_run(out, run_b)
    if a.resolve() == b.resolve():
        raise SpecbenchError(f"'{a.name}' is both runs", "name two runs: specbench list runs")
    return compare_runs(a, b, settings)


def report(runs: str | Sequence[str] = (), out: str | Path = "results") -> Rows:
    """The numbers of runs, one row per run.

    Args:
        runs: run id, unique beginning of one, or folder, or a list of them; all runs in `out` if empty.

    Returns:
        One dict per run; the keys are listed in `specbench.reporting.report_rows`. `specbench.reporting.render` turns
        them into markdown, csv or json.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    from specbench.reporting import report_rows  # brings pandas and scipy

    return report_rows(find_runs(out, runs))


def show(run: str, prompt: str | None = None, sample: int = 0, out: str | Path = "results") -> Rows:
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
    from specbench.reporting.terminal import (
        card,
        image_card,  # brings pandas and scipy
    )

    folders = find_runs(out, [run])
    if prompt is None:
        return [card(folder) for folder in folders]
    if len(folders) > 1:
        raise SpecbenchError(f"'{run}' matches {len(folders)} runs", "name the run of the image")
    return [image_card(folders[0], prompt, sample)]


def report_page(path: str | Path, runs: str | Sequence[str] = (), out: str | Path = "results") -> Path:
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


def bench(
    table: str,
    scoring: Settings | None = None,
    reporter: Reporter | None = None,
    score_reporter: ScoreReporter | None = None,
    warn: Warn = lambda text: None,
    **settings: object,
) -> PaperTable:
    """Reproduce a paper's table: run and score what is missing, and join it with the paper's values.

    Args:
        table: a name of `specbench list tables`.
        scoring: device, batch, reference images, offline.
        reporter, score_reporter: receive progress; silent if None.
        warn: called with a line for each row that cannot run and each metric that cannot score.
        settings: those of `specbench bench`, for example `model="shapes", limit=16`.

    Returns:
        The joined table, which `specbench.papers.render.render_tables` writes in any format. Failed images and an
        interruption are in its `problem`, not raised.

    Raises:
        SpecbenchError: an unknown table, an invalid setting, or nothing could be run.
    """
    from specbench.metrics.base import Settings as ScoreSettings  # brings pandas
    from specbench.papers.reproduce import bench_table
    from specbench.papers.table_files import load_table

    scoring = scoring or ScoreSettings(str(settings.get("device", "cpu")))
    out = str(settings.get("out", "results"))
    return bench_table(load_table(table), _flags(settings), out, scoring, {}, reporter, score_reporter, warn)


def estimate(table: str, **settings: object) -> Rows:
    """Estimate what `bench` would take (`specbench bench --dry-run`); nothing is decoded.

    Args:
        table, settings: as for `bench`.

    Returns:
        One dict per run: `rows` of the table, `chosen` settings, the keys of `dry_run`, `on_disk` and `problem`.

    Raises:
        SpecbenchError: an unknown table or an invalid setting.
    """
    from specbench.papers.estimate import estimate as estimate_table  # brings pandas
    from specbench.papers.planned_cells import plan_table
    from specbench.papers.table_files import load_table

    found = load_table(table)
    return estimate_table(found, plan_table(found, _flags(settings), env={}))


def load(run: str, out: str | Path = "results") -> pd.DataFrame:
    """The stored sample rows of one run.

    Args:
        run: a run id, a unique beginning of one, or a folder.

    Returns:
        One row per image, with the columns of `specbench.store.schema.SAMPLES`, and those of `TRACES` where
        `run --trace` stored them.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    from specbench.store.run_store import RunStore  # brings pandas
    from specbench.store.schema import KEY

    store = RunStore(find_run(out, run))
    traces = store.traces()
    return store.samples() if traces.empty else store.samples().merge(traces, on=KEY, how="left")


def export(benchmark: str, run: str, to: str | Path, out: str | Path = "results") -> int:
    """Write a run's images in the layout of an official benchmark program (`specbench export`).

    Args:
        benchmark: "geneval", "t2i-compbench" or "dpg-bench".
        run: a run id, a unique beginning of one, or a folder.
        to: an empty or new folder.

    Returns:
        The number of images.

    Raises:
        SpecbenchError: an unknown benchmark or run, a run of other prompts, or a folder that is not empty.
    """
    from specbench.metrics.official_exchange import export_images  # brings pandas and pillow

    return export_images(benchmark, find_run(out, run), Path(to))


def import_results(benchmark: str, run: str, results: str | Path, out: str | Path = "results") -> Rows:
    """Store the results of an official benchmark program as scores of a run (`specbench import`).

    Args:
        benchmark, run: as for `export`.
        results: GenEval's results file, the folder that was exported to for T2I-CompBench++, or the `_detail.txt` of
            DPG-Bench's program.

    Returns:
        The scores, as `score` does.

    Raises:
        SpecbenchError: an unknown benchmark or run, or results that do not match it.
    """
    from specbench.metrics.official_exchange import import_scores  # brings pandas and pillow

    return import_scores(benchmark, find_run(out, run), Path(results))


def import_tokens(
    path: str | Path, program: str, out: str | Path = "results", ids: str | None = None, **settings: object
) -> Path:
    """Make a run of image tokens that another program has drawn (`specbench import tokens`).

    Args:
        path: file of JSON lines, parquet or npz with `prompt` and `tokens`, see `specbench.runs.token_import`.
        program: name and version of the program.
        ids: "codes" (of the codebook) or "model" (of its vocabulary); the kind that fits if None.
        settings: the model and the sampling that is claimed, for example `model="janus", cfg=5.0`.

    Returns:
        The run's folder.

    Raises:
        SpecbenchError: an invalid setting, or a file whose tokens are no images of the model.
    """
    from specbench.runs.token_import import run_of_tokens  # brings torch

    values = merge([one for one in run_settings() if one.name in OF_TOKENS], _flags(settings), env={})
    return run_of_tokens(Path(path), program, values, Path(out), ids)


def show_prompts(
    prompts: str | Path,
    limit: int | None = None,
    offset: int = 0,
    sample: int | None = None,
    per_category: int | None = None,
    categories: Sequence[str] = (),
    ids: Sequence[str] = (),
    column: str | None = None,
) -> Rows:
    """The prompts of a set or file (`specbench prompts show`).

    Args:
        prompts: a name of `specbench list prompts`, or a file.
        limit: number of prompts, from the first; all if None.
        offset, sample, per_category, categories, ids: as `specbench run` takes them, and in the same order.
        column: the one of a file that holds the texts.

    Returns:
        One dict per prompt: `id, text, category, meta`.

    Raises:
        SpecbenchError: no such set or file, a malformed one, a public set that was not fetched, an unknown id or
            category, or nothing to show.
    """
    from specbench.prompts.prompt_set import Drawing

    drawing = Drawing(tuple(ids), tuple(categories), offset, per_category, sample, limit)
    return [dict(vars(prompt)) for prompt in drawing.of(prompt_sets.load_prompts(prompts, column))]


def _flags(settings: Mapping[str, T]) -> dict[str, T]:
    return {name.replace("_", "-"): value for name, value in settings.items()}
