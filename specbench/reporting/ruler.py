"""Score losses as known damage: the share of tokens that, replaced at random, costs as much (`report --ruler`).

The ruler is made of stored runs of the decoder `replace` at several shares, on the prompts of the run that is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from specbench.errors import SpecbenchError
from specbench.reporting.columns import MISSING
from specbench.reporting.compare import quality_rows
from specbench.reporting.plot_data import lower_is_better
from specbench.reporting.report_rows import report_rows

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

    Raises:
        SpecbenchError: no setting has AR, runs of `replace` and another decoder, with a score in common.
    """
    rows, found = report_rows(folders), []
    for setting in {str((row["model"], row["setting"])): None for row in rows}:
        own = [row for row in rows if str((row["model"], row["setting"])) == setting]
        base = next((row for row in own if row["decoder"] == "ar"), None)
        rulers = [row for row in own if row["decoder"] == "replace"]
        if base is None or not rulers:
            continue
        points: dict[str, list[DamagePoint]] = {}
        for row in rulers:
            for metric, loss in _losses(base, row).items():
                points.setdefault(metric, []).append((float(row["options"]["share"]), *loss))
        for row in own:
            if row["decoder"] not in ("ar", "replace"):
                for metric, loss in _losses(base, row).items():
                    named = {"model": row["model"], "label": row["label"], "metric": metric}
                    found.append(named | damage(loss, points.get(metric, [])))
    if not found:
        what = "--ruler: no setting with AR, replace and another decoder that share a score with an interval"
        shares = "replace:share=0.01,replace:share=0.02,replace:share=0.05,replace:share=0.1,replace:share=0.2"
        raise SpecbenchError(what, f"specbench run --decoder ar,{shares} on the same prompts, then specbench score")
    return found


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


def _losses(base: Mapping, row: Mapping) -> dict[str, tuple[float, float, float]]:
    """Loss against AR by metric, with its interval; positive is worse."""
    found = {}
    for one in quality_rows(Path(base["folder"]), Path(row["folder"])):
        if None not in (one["value"], one["low"], one["high"]):
            values = one["value"], one["low"], one["high"]
            worse = values if lower_is_better(str(one["name"])) else (-values[0], -values[2], -values[1])
            found[str(one["name"])] = worse
    return found


def ruler_table(rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: a line per decoder, a column per metric."""
    metrics = list(dict.fromkeys(str(row["metric"]) for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["label"]), {})[row["metric"]] = _cell(row)
    return ["model", "decoder", *metrics], [
        [*key, *(cells.get(metric, MISSING) for metric in metrics)] for key, cells in lines.items()
    ]


def _cell(row: Mapping) -> str:
    if row["share"] is None:
        return row["note"]
    low, high = ("..." if row[name] is None else f"{100 * row[name]:.1f}" for name in ("low", "high"))
    return f"{100 * row['share']:.1f} % [{low}, {high}]"
