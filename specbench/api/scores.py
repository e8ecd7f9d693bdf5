"""Score images: with the metrics here, and through the benchmarks' own programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError
from specbench.store.run_folders import Names, find_run, find_runs

if TYPE_CHECKING:
    import pandas as pd

    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import ScoreReporter

# Imports inside functions: a program waits only for what it calls.


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
    """Score the images of runs; scores that exist are not computed again.

    Args:
        runs: run id, unique beginning of one, or folder, or a list of them; all runs in `out` if empty.
        metrics: a name or several; with neither metrics nor protocol, those of
            `specbench.metrics.catalog.default_metrics` that apply to the prompts.
        protocol: "sjd" or "cool-sd" adds that protocol's metrics where they apply to the prompts.
        settings: device, batch, reference images, offline.
        reporter: receives progress in place of the bar.
        problems: receives why a run could not be scored, instead of this being raised when the others are.
        bundled_only: with neither metrics nor protocol, only the metrics that need no download.
        long: one row per run and score.
        progress: False for no bar.

    Returns:
        DataFrame with one row per run: `run_id, model, decoder`, and of each stored metric its value, `METRIC_low` and
        `METRIC_high` (95 % interval; NaN below eight prompts) and `METRIC_n` (images). If `long`, the columns of
        `specbench.columns("run scores")`, `too_few` (whether the interval was left out because it is of too few
        prompts) and `prompts_needed` (how many prompts per run show a change of 2 % between runs of different prompts;
        fewer do where the prompts are the same).

    Raises:
        SpecbenchError: an unknown run or metric, or something that must be installed or downloaded first; exit code 3
            where some runs were scored and others, for example for a missing image, were not.
    """
    from specbench.metrics.score_store import score_frame  # brings pandas and pillow
    from specbench.metrics.scoring import score as score_runs
    from specbench.runs.progress_bar import ScoreProgress

    told: Any = reporter or (ScoreProgress() if progress else None)
    scoring = score_runs(find_runs(out, runs), metrics or None, settings, told, (), bundled_only, protocol)
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
    """Score images made elsewhere, named by prompt id or as the papers' programs name them.

    Args:
        images: their folder.
        prompts: the set or file of their prompts; those of the folder's metadata file if None.
        column: of that file, the one that holds the texts.
        layout: of the folder, see `specbench score --help`; None for the one that fits.
        metrics, out, protocol, settings, reporter, bundled_only, long, progress: as for `score`.

    Returns:
        As `score` does.

    Raises:
        SpecbenchError: an image without a prompt or a prompt without an image, and what `score` raises.
    """
    from specbench.metrics.external_images import images_to_score  # brings pandas and pillow
    from specbench.metrics.score_store import score_frame
    from specbench.metrics.scoring import score as score_images
    from specbench.runs.progress_bar import ScoreProgress

    told: Any = reporter or (ScoreProgress() if progress else None)
    found = images_to_score(Path(images), prompts, column, Path(out), layout, told)
    scoring = score_images([found], metrics or None, settings, told, (), bundled_only, protocol)
    return score_frame(scoring.check().rows(), long)


def differences(
    baseline: str | Path,
    runs: Names = (),
    metrics: str | Sequence[str] = (),
    out: str | Path = "results",
    settings: Settings | None = None,
) -> pd.DataFrame:
    """Scored runs minus a scored baseline over the images both have, with paired 95 % intervals.

    Args:
        baseline, runs: as for `compare`.
        metrics: a name or several, of metrics that the runs were scored with.

    Returns:
        DataFrame with one row per run and metric: `run_id, baseline, metric, difference, low, high, p, spread, n,
        fingerprint`.

    Raises:
        SpecbenchError: an unknown run or metric, or only one of two runs is scored.
    """
    import pandas as pd

    from specbench.metrics.score_store import difference_rows

    return pd.DataFrame(difference_rows(find_run(out, baseline), find_runs(out, runs), metrics, settings))


def export(benchmark: str, run: str, to: str | Path, out: str | Path = "results") -> int:
    """Write a run's images in the layout of an official benchmark program (`specbench export`).

    Args:
        benchmark: "geneval", "t2i-compbench", "dpg-bench" or "tiif".
        run: a run id, a unique beginning of one, or a folder.
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
        results: GenEval's results file, the folder that was exported to for T2I-CompBench++, or the `_detail.txt` of
            DPG-Bench's program.

    Returns:
        One dict per score, with the keys of `score(long=True)`.

    Raises:
        SpecbenchError: an unknown benchmark or run, or results that do not match it.
    """
    from specbench.metrics.official_exchange import import_scores  # brings pandas and pillow

    return import_scores(benchmark, find_run(out, run), Path(results))
