"""Scores of runs and of images from elsewhere, computed where they are missing, as rows and as a DataFrame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from specbench.errors import SpecbenchError
from specbench.metrics import catalog
from specbench.metrics.base import Settings
from specbench.metrics.score_store import difference, scores_to_show
from specbench.metrics.scoring import Images, ScoreReporter, joint_problem, run_images, score_images
from specbench.store.image_scores import owner_of
from specbench.store.schema import OWNER, RUN_SCORES, with_units

_BOUNDED = ("value", "low", "high", "n")


def score_runs(
    folders: Sequence[Path],
    metrics: str | Sequence[str] | None = None,
    protocol: str | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    problems: list[SpecbenchError] | None = None,
    bundled_only: bool = False,
) -> list[dict[str, object]]:
    """Score runs, see `specbench.score`; one dict per score."""
    found: list[SpecbenchError] = []
    shown = []
    for folder in folders:
        try:
            shown.append(run_images(folder))
        except SpecbenchError as error:
            found.append(error)
    return scored_rows(shown, metrics, protocol, settings, reporter, bundled_only, found, problems)


def scored_rows(
    shown: Sequence[Images],
    metrics: str | Sequence[str] | None,
    protocol: str | None,
    settings: Settings | None,
    reporter: ScoreReporter | None,
    bundled_only: bool,
    found: Sequence[SpecbenchError] = (),
    problems: list[SpecbenchError] | None = None,
) -> list[dict[str, object]]:
    """Scores of images, beside those that were `found` to be unreadable; `problems` as for `specbench.score`."""
    found, added = list(found), catalog.find_protocol(protocol) if protocol else ()
    named = ([metrics] if isinstance(metrics, str) else metrics) or (() if protocol else None)
    outcomes = score_images(shown, found, named, settings, reporter, added, bundled_only)
    scored = any(outcome.skipped is None for outcome in outcomes)
    if found and (problems is None or not scored):
        raise joint_problem(found, scored)
    if problems is not None:
        problems += found
    return [
        {**owner_of(one.folder), "run_id": one.name, **row}
        for one in shown
        for row in scores_to_show(one.folder, one.rows["prompt_id"])
    ]


def score_frame(rows: Sequence[Mapping[str, object]], long: bool) -> pd.DataFrame:
    """Rows of scores as a DataFrame: if `long` one row per score, else one per run, with `METRIC`, `METRIC_low`,
    `METRIC_high` and `METRIC_n`; a metric that scored a run in several ways has its fingerprint in the name."""
    if long:
        names = dict.fromkeys([*OWNER, *RUN_SCORES.names, "too_few", "prompts_needed"])
        frame = pd.DataFrame(rows, columns=[*names])
        return with_units(frame.astype(dict.fromkeys((*_BOUNDED[:3], "cut", "prompts_needed"), float)), RUN_SCORES)
    ways = Counter((row["run_id"], row["metric"]) for row in rows)
    several = {name for (_, name), count in ways.items() if count > 1}
    wide: dict[object, dict[str, object]] = {}
    for row in rows:
        run = wide.setdefault(row["run_id"], {name: row[name] for name in OWNER})
        name = f"{row['metric']} ({row['fingerprint']})" if row["metric"] in several else row["metric"]
        run |= {f"{name}_{part}".removesuffix("_value"): row[part] for part in _BOUNDED}
    frame = pd.DataFrame([*wide.values()], columns=None if wide else [*OWNER])
    frame = frame.astype({name: float for name in frame if name not in OWNER})
    frame.attrs["units"] = {name: "images" for name in frame if str(name).endswith("_n")}
    return frame


def difference_rows(
    baseline: Path, folders: Sequence[Path], metrics: str | Sequence[str], settings: Settings | None = None
) -> list[dict[str, object]]:
    """Paired differences of runs from a baseline, see `specbench.differences`."""
    others = [folder for folder in folders if folder.resolve() != baseline.resolve()]
    chosen = [catalog.metric(name)(settings) for name in ([metrics] if isinstance(metrics, str) else metrics)]
    rows = [difference(folder, baseline, one) for folder in others for one in chosen]
    return [row for row in rows if row is not None]
