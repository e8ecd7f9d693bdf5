"""Make images: decode, estimate the cost of decoding, and import tokens of other programs.

Settings have the names of the command line's flags, with underscores: `top_k=100`, `G=50`. Environment variables are
not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from specbench import prompts as prompt_sets
from specbench.api.results import report, samples
from specbench.errors import SpecbenchError, chosen
from specbench.runs.plan import plan_drawing
from specbench.runs.run_progress import RunSummary
from specbench.runs.settings import decoder_settings, merge, run_settings
from specbench.runs.sweep import sweep_plans, sweep_values
from specbench.specs.options import Use, split_list

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from specbench.decoding.generation import Generation
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import ScoreReporter
    from specbench.papers.join import PaperTable
    from specbench.papers.reproduce import Warn
    from specbench.reporting.notebook import Figures
    from specbench.runs.run_progress import Reporter

# Imports inside functions: a program only imports modules that it needs.

Rows = list[dict[str, object]]


class Runs(RunSummary):
    """Result of `run`: run folders, and counts as in `specbench.runs.run_progress.RunSummary`. A notebook displays it
    as the report of the runs."""

    def __iter__(self) -> Iterator[Path]:
        return iter(self.folders)

    def report(self, long: bool = False) -> pd.DataFrame:
        """Return `specbench.report` of these runs."""
        return report(self.folders, long=long)

    def samples(self) -> pd.DataFrame:
        """Return `specbench.samples` of these runs."""
        return samples(self.folders)

    def images(self, prompts: str | Sequence[str] = ()) -> Figure:
        """Draw the runs' images of the same prompts side by side, see `specbench.reporting.notebook.Report.images`."""
        figure: Figure = self.report().images(prompts)
        return figure

    def plot(self, *names: str) -> Figures:
        """Draw the charts of the HTML page, all or only `names`, for these runs; return {name: matplotlib figure}."""
        figures: Figures = self.report().plot(*names)
        return figures

    def _repr_html_(self) -> str:
        return str(self.report()._repr_html_())


@overload
def generate(prompt: str, model: str = "shapes", decoder: str = "sjd", **settings: object) -> Generation: ...


@overload
def generate(
    prompt: list[str] | tuple[str, ...], model: str = "shapes", decoder: str = "sjd", **settings: object
) -> list[Generation]: ...


def generate(
    prompt: str | Sequence[str], model: str = "shapes", decoder: str = "sjd", **settings: object
) -> Generation | list[Generation]:
    """Decode images without storing anything.

    Args:
        prompt: a caption, or several captions to decode as a batch. A repeated caption gives further samples of it.
        model: a name of `specbench list models`.
        decoder: a name of `specbench list decoders`, with inline options if wanted.
        settings: `seed`, `cfg`, `temperature`, `top_k`, `top_p`, `dtype`, `device`, `threads`, `compile`, `weights`,
            `revision`, `random_weights`, `scale`, `trace`, and every option of the decoder, for example `G=50`.

    Returns:
        A `Generation` for one caption, a list for several captions. Pixels are in `.image`, uint8 [3, H, W].

    Raises:
        SpecbenchError: an unknown or invalid setting, missing weights, or an image that failed.
    """
    from specbench.runs.preparation import generate_images  # brings torch

    accepted = (*run_settings(use=Use.IMAGES), *decoder_settings())
    read = merge(accepted, _flags(settings | {"model": model, "decoder": decoder}), env={})
    if isinstance(prompt, str):
        return generate_images([prompt], read)[0]
    return generate_images(list(prompt), read)


def run(
    reporter: Reporter | None = None,
    sweep: Mapping[str, Iterable[object]] | None = None,
    progress: bool = True,
    **settings: object,
) -> Runs:
    """Decode a prompt set with one or several decoders into the results folder; stored images are not decoded again.

    Args:
        reporter: a subclass of `specbench.runs.run_progress.Reporter`, which receives progress instead of the bar.
        sweep: settings with several values each, for example `{"G": [3, 10], "window": [8, 16]}`; every combination is
            run.
        progress: if False, print no bar and no notes.
        settings: as for `specbench run`, for example `decoder=["ar", "gsd:G=50"], prompts="shapes", limit=8`.

    Returns:
        Run folders and counts, with `.report()`, `.samples()`, `.images()` and `.plot()`. Failed images or an
        interruption (of a notebook cell) raise no error: `.problem()` returns the error. The same call resumes the run.

    Raises:
        SpecbenchError: an unknown or invalid setting, something that must be installed or downloaded first, an
            unusable results folder.
    """
    from specbench.runs.progress_bar import ProgressReporter
    from specbench.runs.runner import run_plans  # brings torch

    read = merge(run_settings(), _flags(settings), env={})
    reporting: Any = reporter or (ProgressReporter() if progress and not settings.get("quiet") else None)
    summary = run_plans(sweep_plans(read, _axes(sweep)), reporting)
    if reporting and (problem := summary.problem()):
        reporting.note(str(problem))
    return Runs(**vars(summary))


def dry_run(sweep: Mapping[str, Iterable[object]] | None = None, **settings: object) -> Rows:
    """List the runs that `run` would decode (`specbench run --dry-run`); nothing is decoded.

    Args:
        sweep, settings: as for `run`.

    Returns:
        One dict per run: `run_id`, every setting, `images, done, seconds, megabytes, memory_gib`, `weights` and `head`
        (locations), and `obstacles`; see `specbench.runs.dry_run.Outlook`.

    Raises:
        SpecbenchError: an unknown or invalid setting.
    """
    from specbench.runs.dry_run import distinct_outlooks  # brings pandas

    read = merge(run_settings(), _flags(settings), env={})
    return [outlook.row for outlook in distinct_outlooks(sweep_values(read, _axes(sweep)))]


def bench(
    table: str,
    scoring: Settings | None = None,
    reporter: Reporter | None = None,
    score_reporter: ScoreReporter | None = None,
    warn: Warn = lambda text: None,
    progress: bool = True,
    **settings: object,
) -> PaperTable:
    """Reproduce a paper's table: run and score missing cells, and join the results with the paper's values.

    Args:
        table: a name of `specbench list tables`.
        scoring: settings of the metrics: device, batch, reference images, offline.
        reporter, score_reporter: receive progress instead of the bars.
        progress: if False, print no bars.
        warn: called with a line for each row that cannot run and each metric that cannot score.
        settings: as for `specbench bench`, for example `model="shapes", limit=16`.

    Returns:
        The joined table, which `specbench.papers.render.render_tables` writes in any format. Failed images or an
        interruption raise no error: `.problem` contains the error.

    Raises:
        SpecbenchError: an unknown table, an invalid setting, or nothing could be run.
    """
    from specbench.metrics.base import Settings as ScoreSettings  # brings pandas
    from specbench.papers.reproduce import bench_table
    from specbench.papers.table_files import load_table
    from specbench.runs.progress_bar import ProgressReporter, ScoreProgress

    of_runs: Any = reporter or (ProgressReporter() if progress else None)
    of_scores: Any = score_reporter or (ScoreProgress() if progress else None)
    scoring = scoring or ScoreSettings(str(settings.get("device", "cpu")))
    out = str(settings.get("out", "results"))
    return bench_table(load_table(table, out), _flags(settings), out, scoring, {}, of_runs, of_scores, warn)


def estimate(table: str, **settings: object) -> Rows:
    """Estimate the cost of `bench` (`specbench bench --dry-run`); nothing is decoded.

    Args:
        table, settings: as for `bench`.

    Returns:
        One dict per run: the keys of `dry_run`, `rows` (labels in the table), `chosen` (settings that the paper does
        not state, with reasons), `on_disk` (whether the weights are) and `problem` (the first obstacle).

    Raises:
        SpecbenchError: an unknown table or an invalid setting.
    """
    from specbench.papers.planned_cells import plan_table
    from specbench.papers.reproduce import estimate as estimate_table  # brings pandas
    from specbench.papers.table_files import load_table

    read = load_table(table, str(settings.get("out", "results")))
    return estimate_table(read, plan_table(read, _flags(settings), env={}))


def import_tokens(
    path: str | Path,
    program: str | None = None,
    out: str | Path = "results",
    ids: str | None = None,
    served: str | None = None,
    **settings: object,
) -> Path:
    """Make a run from image tokens of another program (`specbench import tokens`).

    Args:
        path: file of JSON lines, parquet or npz with `prompt` and `tokens`, see `specbench.runs.token_import`; or the
            address of a serving engine ("http://127.0.0.1:8000"), which generates them, see `specbench.runs.engine`.
        program: name and version of the program; for an engine, None means the values that it reports.
        ids: kind of the token ids in a file, "codes" (codebook) or "model" (vocabulary of the model); None: detect it.
        served: the engine's name for the model, if it differs from the checkpoint's.
        settings: the model and the claimed sampling, for example `model="janus", cfg=5.0`; for an engine also
            `limit` and `batch`.

    Returns:
        The run's folder.

    Raises:
        SpecbenchError: an invalid setting, tokens that form no image of the model, or an address at which no engine
            serves the model.
    """
    from specbench.runs.token_import import import_run  # brings torch

    return import_run(str(path), program, _flags(settings), Path(out), ids, served)


def show_prompts(
    prompts: str | Path,
    limit: int | None = None,
    offset: int = 0,
    sample: int | None = None,
    per_category: int | None = None,
    categories: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
    column: str | None = None,
) -> Rows:
    """Return the prompts of a set or file (`specbench prompts show`).

    Args:
        prompts: a name of `specbench list prompts`, or a file.
        limit: number of prompts, from the first; None for all.
        offset, sample, per_category, categories, ids: as for `specbench run`, applied in the same order.
        column: the column of a file that holds the texts.

    Returns:
        One dict per prompt: `id, text, category, meta`.

    Raises:
        SpecbenchError: no such set or file, a malformed file, a public set that was not fetched, an unknown id or
            category, or no prompt to show.
    """
    numbers = {"limit": limit, "offset": offset, "sample": sample, "per-category": per_category}
    listed, kinds = tuple(chosen("ids", ids)), tuple(chosen("categories", categories))
    drawing = replace(plan_drawing(merge(run_settings(use=Use.DRAWING), numbers, env={})), ids=listed, categories=kinds)
    return [dict(vars(prompt)) for prompt in drawing.of(prompt_sets.load_prompts(prompts, column))]


def _axes(sweep: Mapping[str, Iterable[object]] | None) -> dict[str, list[object]]:
    """Return {flag: swept values}. A text is parsed as on the command line."""
    if sweep is not None and not isinstance(sweep, Mapping):
        raise SpecbenchError(f"sweep={sweep!r}: not a dict", 'write it as {"window": [8, 16]}')
    texts = {name: split_list(values) if isinstance(values, str) else values for name, values in (sweep or {}).items()}
    return _flags({name: [*values] if isinstance(values, Iterable) else [values] for name, values in texts.items()})


def _flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by flag. () becomes an empty list, because it is no value only on the command line."""
    return {
        name.replace("_", "-"): [] if isinstance(value, tuple) and not value else value
        for name, value in settings.items()
    }
