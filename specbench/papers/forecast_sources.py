"""The sources of forecasts: runs, and rows of the papers' tables that print steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.models.facts import BYTES
from specbench.papers.mistyped_tables import refuse_mistyped
from specbench.papers.printed_speed import printed_lengths
from specbench.papers.table_files import load_table, table_names
from specbench.reporting.forecast import Accepted, ForecastSetting, Range, accepted_lengths, forecast_rows
from specbench.store.run_folders import find_runs
from specbench.system.device_peaks import peak_of

BANDWIDTH, FLOPS, OVERHEAD_MS = (0.6, 0.9), (0.4, 0.75), (0.5, 5.0)
"""Assumed where the caller states nothing: shares of a data sheet's peaks, and milliseconds of a step."""
OWN_OVERHEAD = "run"
MOST_IMAGES, MOST_MS = 65_536, 60_000
"""Largest batch, and overhead of a step, that a forecast is made for."""


def forecast_sources(
    sources: Sequence[str],
    on: str,
    model: str | None,
    out: str | Path,
    batch: int = 1,
    dtype: str | None = None,
    bandwidth: Range = BANDWIDTH,
    flops: Range = FLOPS,
    overhead_ms: Range | None = OVERHEAD_MS,
    threads: int = 0,
) -> list[dict[str, object]]:
    """Forecast rows of runs and tables, see `specbench.reporting.forecast.forecast_rows`.

    Args:
        sources: run ids, unique beginnings of them, run folders, or names of tables; all runs in `out` if empty.
        on: see `specbench.system.device_peaks.peak_of`.
        model: what to forecast for; the sources' own if None.
        threads: of a CPU that was measured.

    Raises:
        SpecbenchError: an unknown source, device or model; sources of several models where none is named; a value
            outside its range.
    """
    _check(batch, dtype, bandwidth, flops, overhead_ms)
    names = [name for name in sources if name in table_names()]
    runs = [name for name in sources if name not in names]
    refuse_mistyped(runs, out)
    accepted = accepted_lengths(find_runs(out, runs)) if runs or not names else []
    accepted += [one for name in names for one in printed_lengths(load_table(name), model)]
    if not accepted:
        raise SpecbenchError(f"no runs in {out}", "name a run, or a paper's table: specbench list tables")
    facts = find_model(model or _only_model(accepted))
    chosen = dtype or facts.dtype
    guidance = facts.sampling().guidance
    peak = peak_of(on, chosen, threads)
    setting = ForecastSetting(facts, peak, chosen, guidance, batch, bandwidth, flops, overhead_ms)
    return forecast_rows(accepted, setting)


def _only_model(accepted: Sequence[Accepted]) -> str:
    models = sorted({one.model for one in accepted})
    if len(models) > 1:
        raise SpecbenchError(f"these are of several models ({', '.join(models)})", "choose one with --model")
    return models[0]


def _check(batch: int, dtype: str | None, bandwidth: Range, flops: Range, overhead_ms: Range | None) -> None:
    if not 1 <= batch <= MOST_IMAGES:
        raise SpecbenchError(f"--batch {batch}: at least 1, at most {MOST_IMAGES:,}")
    if dtype not in (None, *BYTES):
        raise SpecbenchError(f"--dtype {dtype}: unknown", f"valid: {', '.join(BYTES)}")
    for name, (low, high) in (("bandwidth-share", bandwidth), ("flops-share", flops)):
        if not 0 < low <= high <= 1:
            raise SpecbenchError(f"--{name} {low:g},{high:g}: no shares", "LOW,HIGH with 0 < LOW <= HIGH <= 1")
    if overhead_ms and not 0 <= overhead_ms[0] <= overhead_ms[1] <= MOST_MS:
        raise SpecbenchError("--overhead-ms: no range", f"LOW,HIGH with 0 <= LOW <= HIGH <= {MOST_MS:,}, or run")


def read_range(name: str, text: str) -> Range:
    """A range from "LOW,HIGH" or one number.

    Raises:
        SpecbenchError: something else.
    """
    try:
        low, high = [float(part) for part in (text if "," in text else f"{text},{text}").split(",")]
    except ValueError:
        raise SpecbenchError(f"--{name} {text}: no range", "LOW,HIGH, for example 0.6,0.9") from None
    if not (abs(low) < float("inf") and abs(high) < float("inf")):  # false for NaN, too
        raise SpecbenchError(f"--{name} {text}: not finite", "LOW,HIGH, for example 0.6,0.9")
    return low, high
