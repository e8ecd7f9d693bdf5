"""Printed speeds of all papers, grouped by model and prompt set, with their contradictions."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.papers.forecasts import printed_values
from specbench.papers.table import STEP_RATIOS, Row, Table
from specbench.papers.table_files import load_tables
from specbench.reporting.charts import Chart, field_chart
from specbench.reporting.figures import Drawn, chart_figure
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import ReportRow
from specbench.specs.components import CHOICES
from specbench.specs.options import plain
from specbench.specs.presets import named_ar
from specbench.store.run_folders import Names, find_runs
from specbench.system.device_peaks import SHORT_NAMES

FIGURE = "field"
APART = 1.2  # Two papers' AR seconds of a model on a GPU contradict each other if their ratio is larger
_FASTEST = ("A100", "H100", "H200")
STEPS_APART = 1.1  # Two papers' step ratios of a decoder contradict each other if their ratio is larger
AR_SECONDS, MORE_LATENCY, STEPS = "AR seconds", "latency ratio above step ratio", "step ratio"
UNEXPLAINED, NO_GPU = "unexplained", "one of the two papers names no GPU"


def field() -> list[dict[str, object]]:
    """List the printed speeds of all papers' tables (not of figures), with contradictions.

    Returns:
        One dict per row with seconds of AR or a latency ratio: `model, prompts, paper, table, source, row, gpu`,
        `decoder` (with the options that its table varies), `seconds`, `latency_ratio`, `step_ratio` (printed, or else
        from printed NFE), `ar_step_ms`, `step_ms`, for AR `times_lowest`, and `contradiction` with its `reason`. None
        if unknown. Contradictions: `AR seconds` (above 1.2 times the lowest AR seconds of the model on this kind of GPU
        or an unnamed GPU, over all prompt sets), `latency ratio above step ratio`, `step ratio` (more than 10 % from a
        ratio that another paper prints for this decoder, model and prompt set). Printed values of `seconds`,
        `latency_ratio` and `step_ratio` keep the paper's number of decimals (`PrintedNumber`).

    Raises:
        SpecbenchError: a damaged table.
    """
    rows = [row for table in load_tables() if not table.axes for row in _speeds(table)]
    return [row | _contradiction(row, rows) for row in rows]


def field_figure(runs: Names = (), out: str | Path = "results", width: str = "column") -> Drawn:
    """Draw latency ratios against step ratios, both printed and measured in runs (`specbench figure field RUNS`).

    Args:
        runs: run id, unique beginning of a run id, or folder, or a list of these; default: no runs.
        out: the results folder of the runs.
        width: "column" or "page".

    Returns:
        The figure of matplotlib.

    Raises:
        SpecbenchError: an unknown or damaged run.
    """
    return chart_figure(chart_of_field(report_rows(find_runs(out, runs)) if runs else []), width)


def chart_of_field(measured: Sequence[ReportRow]) -> Chart:
    """Chart all printed rows that have both ratios, grouped by paper, and the given report rows."""
    printed = [row for row in field() if row["latency_ratio"] and row["step_ratio"]]
    printed = [row for row in printed if not named_ar(str(row["decoder"]))]
    return field_chart(printed, [row for row in measured if not row.is_ar and row.over_ar.speedup is not None])


def _speeds(table: Table) -> Iterator[dict[str, object]]:
    """Yield the rows of a table that print AR's seconds or a latency ratio."""
    for row in table.rows:
        printed = printed_values(table, row)
        place = row.model, row.settings.prompts
        ars = (one for one in table.rows if named_ar(one.decoder) and (one.model, one.settings.prompts) == place)
        ar = next((printed_values(table, one) for one in ars), {})
        latency = printed.get("speedup", _over(ar.get("latency_ms"), printed.get("latency_ms")))
        if latency is None or (named_ar(row.decoder) and "latency_ms" not in printed):
            continue
        steps = next((printed[key] for key in STEP_RATIOS if key in printed), _over(ar.get("nfe"), printed.get("nfe")))
        yield {
            "model": row.model,
            "prompts": row.settings.prompts,
            "paper": str(table.paper).replace("pp", "++"),
            "table": table.name,
            "source": table.source,
            "row": f"{row.group}: {row.label}" if row.group else row.label,
            "gpu": row.hardware and re.sub(r"NVIDIA | \(.*", "", row.hardware),
            "decoder": _name(table, row),
            "seconds": _seconds(table, row),
            "latency_ratio": latency,
            "step_ratio": steps,
            "ar_step_ms": _over(ar.get("latency_ms"), ar.get("nfe")),
            "step_ms": _over(printed.get("latency_ms"), printed.get("nfe")),
            "reason": row.notes.get("latency_s" if named_ar(row.decoder) else "speedup"),
        }


def _seconds(table: Table, row: Row) -> float | None:
    """Return the printed seconds, with the paper's number of decimals."""
    column = next((one for one in table.columns if one.key == "latency_ms" and one.name in row.paper), None)
    if column is None:
        return None
    return row.paper[column.name] if column.scale == 1e-3 else row.paper[column.name] / column.scale / 1e3


def _over(value: float | None, by: float | None) -> float | None:
    return value / by if value and by else None


def _name(table: Table, row: Row) -> str:
    """Name the decoder of a row, with the options that the table varies; the row's label if it cannot be run."""
    if not (name := row.decoder):
        return row.label
    alike = [one.settings.options for one in table.rows if (one.decoder, one.model) == (name, row.model)]
    values = {key: {str(options[key]) for options in alike if key in options} for key in row.settings.options}
    missing = {key for key in values if any(key not in options for options in alike)}
    varied = {
        key: value
        for key, value in row.settings.options.items()
        if len(values[key]) > 1 or (key in missing and key in CHOICES)
    }
    return " ".join([str(name), *(f"{key}={plain(value)}" for key, value in varied.items())])


def _contradiction(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the kind of contradiction of a row (None without a contradiction), and the reason."""
    if named_ar(row["decoder"]):
        family = gpu_family(row["gpu"])
        alike = [one for one in rows if named_ar(one["decoder"]) and one["model"] == row["model"]]
        comparable = {family, None} if family in _FASTEST else {family}  # a slow GPU may be slower than an unnamed GPU
        alike = [one for one in alike if family is None or gpu_family(one["gpu"]) in comparable]
        least = min(alike, key=lambda one: one["seconds"])
        times, named = row["seconds"] / least["seconds"], family and gpu_family(least["gpu"])
        kind, unknown = AR_SECONDS if times > APART else None, UNEXPLAINED if named else NO_GPU
    else:
        times, unknown, steps = None, UNEXPLAINED, row["step_ratio"]
        place = [row[key] for key in ("decoder", "model", "prompts")]
        alike = [one for one in rows if [one[key] for key in ("decoder", "model", "prompts")] == place]
        others = [one["step_ratio"] for one in alike if one["step_ratio"] and one["paper"] != row["paper"]]
        kind = MORE_LATENCY if steps and row["latency_ratio"] > steps else None
        if not kind and steps and None not in place and any(max(x / steps, steps / x) > STEPS_APART for x in others):
            kind = STEPS
    return {"contradiction": kind, "reason": (row["reason"] or unknown) if kind else None, "times_lowest": times}


def gpu_family(gpu: str | None) -> str | None:
    """Remove the variant from a GPU's name, as in "A100"; None if the GPU is unknown."""
    return next((short for short in SHORT_NAMES if gpu and re.search(rf"\b{short}\b", gpu)), None)
