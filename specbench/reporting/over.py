"""Tables of several runs together: over seeds, with swept options as columns (`specbench report --over seed`), and
score losses as known damage (`report --ruler`): the share of tokens that, replaced at random, costs as much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.metrics.score_store import read_scores
from specbench.reporting.columns import MISSING, number, with_interval
from specbench.reporting.comparability import Run, code_text, copies, is_ar, nearest_ar
from specbench.reporting.compare import quality_rows
from specbench.reporting.plot_data import lower_is_better
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import ReportRow
from specbench.specs.options import plain
from specbench.store.image_scores import feature_place, stored_values
from specbench.store.run_folders import runs_in, setting_texts
from specbench.store.run_info import identity_json
from specbench.system.text_tables import TextTable, plain_table

NOTE = (
    "Runs that differ in the seed alone are one row. Value: over the images of all seeds; ±: standard deviation of the "
    "seeds' own values; in brackets: 95 % interval with prompts as the independent units, each with all its seeds. "
    "Speed-up: ratio of the summed latencies; geometric mean: of the ratios of single images."
)


def over_seeds(folders: Sequence[Path]) -> list[dict[str, object]]:
    """One dict per group of runs: `model, decoder, options` (with settings; those in which runs of its decoder differ),
    `seeds, images, copies` (folders with a copy of a run, which are left out), and by name of a number `value, spread,
    low, high`; raises a SpecbenchError for a damaged run."""
    groups: dict[str, list[Run]] = {}
    every = [Run(folder) for folder in folders]
    left_out = copies(every)
    for run in (run for run in every if run.folder not in left_out):
        same = {name: value for name, value in identity_json(run.info.spec).items() if name != "seed"}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    baselines = [
        run for place in dict.fromkeys(folder.parent for folder in folders) for run in map(Run, runs_in(place))
        if is_ar(run.info)
    ]  # fmt: skip
    rows = [_row(sorted(alike, key=lambda run: run.info.spec.seed), baselines) for alike in groups.values()]
    swept = {
        decoder: [name for name in _names(alike) if len({plain(row["options"].get(name)) for row in alike}) > 1]
        for decoder in dict.fromkeys(row["decoder"] for row in rows)
        if (alike := [row for row in rows if row["decoder"] == decoder])
    }
    for row, runs in zip(rows, groups.values(), strict=True):
        twice = [str(copy) for copy, folder in left_out.items() if folder in {run.folder for run in runs}]
        row |= {"copies": twice} if twice else {}
        row["options"] = {name: row["options"].get(name) for name in swept[row["decoder"]]}
    return sorted(rows, key=lambda row: (row["decoder"] != "ar", str(row["model"]), str(row["decoder"])))


def _names(rows: Sequence[Mapping]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["options"]))


def _row(runs: Sequence[Run], baselines: Sequence[Run]) -> dict[str, object]:
    spec = runs[0].info.spec
    settings = {name: text for name, text in setting_texts(spec).items() if name not in ("seed", "decoder-code")}
    settings |= {"code": code_text(runs[0].info)} if spec.decoder_code else {}
    numbers = {"nfe": _number([run.rows.assign(top=run.rows["nfe"], bottom=1.0) for run in runs])}
    pairs = []
    for run in runs:
        nearest = nearest_ar(run, baselines)
        if nearest and not nearest[0]:
            both = stats.paired(run.rows, nearest[1].rows).dropna(subset=["latency_ms", "latency_ms_base"])
            pairs.append(both.assign(top=both["latency_ms_base"], bottom=both["latency_ms"]))
    if pairs and all(map(len, pairs)):
        numbers["speedup"] = _number(pairs)
        logs = [seed.assign(top=np.log(seed["top"] / seed["bottom"]), bottom=1.0) for seed in pairs]
        geometric = {name: None if x is None else float(np.exp(x)) for name, x in _number(logs).items()}
        numbers["speedup_geometric"] = geometric | {"spread": _spread(_values(logs, np.exp))}
    scored = [{(row["metric"], row["fingerprint"]) for row in read_scores(run.folder)} for run in runs]
    common = sorted(set.intersection(*scored))
    for metric, fingerprint in common:
        values = [_image_values(feature_place(run.folder, f"{metric}-{fingerprint}")) for run in runs]
        if ":" not in metric and all(seed is not None and len(seed) for seed in values):
            several = sum(name == metric for name, _ in common) > 1
            name = f"{metric} ({fingerprint})" if several else metric
            numbers[name] = _number([seed.assign(bottom=1.0) for seed in values])
    return {
        "model": spec.model,
        "decoder": spec.decoder.full_name,
        "options": settings | dict(spec.decoder.options),
        "seeds": [run.info.spec.seed for run in runs],
        "images": sum(len(run.rows) for run in runs),
        "numbers": numbers,
    }


def _image_values(place: Path) -> pd.DataFrame | None:
    """`top`, the metric's number of each image, for a metric that is a mean of one number per image."""
    values = stored_values(place)
    return None if values is None else values.assign(top=values["value"].astype("float64"))


def _values(seeds: Sequence[pd.DataFrame], scale=float) -> list[float]:
    return [float(scale(seed["top"].sum() / seed["bottom"].sum())) for seed in seeds]


def _number(seeds: Sequence[pd.DataFrame]) -> dict[str, float | None]:
    """The ratio of the sums of `top` and `bottom` over all seeds; `spread`: of the seeds' own ratios."""
    every = pd.concat(seeds)
    signed = (every["top"] < 0).any()  # a bootstrap of sums does for both; a mean of logarithms may be negative
    if signed or (every["bottom"] == 1.0).all():
        estimate = stats.mean_interval(every["top"].astype("float64"), every["prompt_id"])
    else:
        estimate = stats.ratio_of_totals(every["top"], every["bottom"], every["prompt_id"])
    estimate = stats.without_few(estimate, every["prompt_id"].nunique())
    return {"value": estimate.value, "spread": _spread(_values(seeds)), "low": estimate.low, "high": estimate.high}


def _spread(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def over_table(rows: Sequence[Mapping]) -> TextTable:
    """The rows of `over_seeds` as texts."""
    options = _names(rows)
    numbers = list(dict.fromkeys(name for row in rows for name in row["numbers"]))
    headings = {"nfe": "NFE", "speedup": "speed-up", "speedup_geometric": "geometric mean"}
    head = ["decoder", *options, "seeds", "images", *(headings.get(name, name) for name in numbers)]
    lines = []
    for row in rows:
        cells = [
            _cell(row["numbers"].get(name), 1 if name == "nfe" else 2 if name in headings else 3) for name in numbers
        ]
        options_of_row = [
            plain(row["options"][name]) if row["options"].get(name) is not None else MISSING for name in options
        ]
        lines.append([str(row["decoder"]), *options_of_row, str(len(row["seeds"])), str(row["images"]), *cells])
    return plain_table(head, lines, NOTE)


def _cell(value: Mapping | None, digits: int) -> str:
    if value is None:
        return MISSING
    spread = "" if value["spread"] is None else f" ± {number(value['spread'], digits)}"
    estimate = stats.Estimate(value["value"], value["low"], value["high"])
    return with_interval(estimate, digits, unit=spread, too_few=True)


RULER_NOTE = (
    "As if so many percent of the tokens were replaced by one of the 100 most probable at random: the share of the "
    "decoder replace that loses as much, both against AR on the same prompts; its 95 % interval holds those of both "
    "losses. A metric does not see damage where the loss does not grow with the share, or is not real at the largest."
)
_UNSEEN = "does not see it"
DamagePoint = tuple[float, float, float, float]
"""A share of replaced tokens, and the loss of a metric with its interval."""


def ruler_rows(folders: Sequence[Path]) -> list[dict[str, object]]:
    """One dict per decoder that is neither AR nor `replace`, and metric: `model, label, metric, share, low, high` (of
    the tokens; `low` and `high` None beyond the ruler) and `note`, why there is no share.
    """
    rows, damages = report_rows(folders), []
    for setting in {str((row.model, row.setting)): None for row in rows}:
        alike = [row for row in rows if str((row.model, row.setting)) == setting]
        base = next((row for row in alike if row.decoder == "ar"), None)
        rulers = [row for row in alike if row.decoder == "replace"]
        if base is None or not rulers:
            continue
        points: dict[str, list[DamagePoint]] = {}
        for row in rulers:
            for metric, loss in _losses(base, row).items():
                points.setdefault(metric, []).append((float(row.options["share"]), *loss))
        for row in alike:
            if row.decoder not in ("ar", "replace"):
                for metric, loss in _losses(base, row).items():
                    named = {"model": row.model, "label": row.label, "metric": metric}
                    damages.append(named | damage(loss, points.get(metric, [])))
    if not damages:
        what = "--ruler: no setting with AR, replace and another decoder that share a score with an interval"
        shares = "replace:share=0.01,replace:share=0.02,replace:share=0.05,replace:share=0.1,replace:share=0.2"
        raise SpecbenchError(what, f"specbench run --decoder ar,{shares} on the same prompts, then specbench score")
    return damages


def damage(loss: tuple[float, float, float], points: Sequence[DamagePoint]) -> dict[str, object]:
    """The share of replaced tokens that loses as much; `points` need not be sorted."""
    none = {"share": None, "low": None, "high": None}
    shares, value, low, high = (np.array(column) for column in zip((0.0, 0.0, 0.0, 0.0), *sorted(points), strict=True))
    if len(points) < 2:
        return none | {"note": "fewer than two shares of replace"}
    if (np.diff(value) <= 0).any() or low[-1] <= 0:
        return none | {"note": _UNSEEN}
    # The ends: the least loss on the steepest ruler, the largest on the flattest.
    steep, flat = np.maximum.accumulate(high), np.maximum.accumulate(low)
    ends = np.interp(max(0.0, loss[1]), steep, shares), np.interp(loss[2], flat, shares)
    beyond = [loss[1] > steep[-1], loss[2] > flat[-1]]
    if loss[0] > value[-1]:
        return none | {"low": float(ends[0]), "note": f"more than {shares[-1]:.0%}"}
    low_end, high_end = (None if out else float(end) for end, out in zip(ends, beyond, strict=True))
    share = float(np.interp(max(0.0, loss[0]), value, shares))
    return {"share": share, "low": low_end, "high": high_end, "note": None}


def _losses(base: ReportRow, row: ReportRow) -> dict[str, tuple[float, float, float]]:
    """Loss against AR by metric, with its interval; positive is worse."""
    losses = {}
    for score in quality_rows(base.folder, row.folder):
        if score.estimate and None not in (values := (score.value, score.estimate.low, score.estimate.high)):
            losses[score.name] = values if lower_is_better(score.name) else (-values[0], -values[2], -values[1])
    return losses


def ruler_table(rows: Sequence[Mapping]) -> TextTable:
    """The rows of `ruler_rows` as texts: a line per decoder, a column per metric."""
    metrics = list(dict.fromkeys(str(row["metric"]) for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["label"]), {})[row["metric"]] = _damage_cell(row)
    cells = [[*key, *(cells.get(metric, MISSING) for metric in metrics)] for key, cells in lines.items()]
    return plain_table(["model", "decoder", *metrics], cells, RULER_NOTE)


def _damage_cell(row: Mapping) -> str:
    if row["share"] is None:
        return row["note"]
    low, high = ("..." if row[name] is None else f"{100 * row[name]:.1f}" for name in ("low", "high"))
    return f"{100 * row['share']:.1f} % [{low}, {high}]"
