"""Forecasts of speed from runs or from what a paper prints (`forecast`), and the papers' latencies beside the floors of
their GPUs (`printed_latencies`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.models.facts import BYTES, ModelFacts
from specbench.papers.table import CellSettings, Row, Table
from specbench.papers.table_files import load_table, load_tables, refuse_mistyped, table_names
from specbench.reporting.forecast import (
    PROMPT_TOKENS,
    Accepted,
    ForecastSetting,
    Range,
    accepted_lengths,
    forecast_rows,
)
from specbench.reporting.report_rows import label
from specbench.runs.memory_estimate import most_columns
from specbench.specs.presets import DecoderSpec, resolve
from specbench.store.run_folders import find_runs
from specbench.system.device_peaks import KNOWN, SHORT_NAMES, Peak, known_peak, peak_of

PRINTED = "printed latency beside a computed floor"
"""The `kind` of every row of `printed_latencies`."""
BANDWIDTH, FLOPS, OVERHEAD_MS = (0.6, 0.9), (0.4, 0.75), (0.5, 5.0)
"""Assumed where the caller states nothing: shares of a data sheet's peaks, and milliseconds of a step."""
OWN_OVERHEAD = "run"
"""Stands for the overhead that each run measured."""
MOST_IMAGES, MOST_MS = 65_536, 60_000
"""Largest batch, and overhead of a step, that a forecast is made for."""
_LATENCY = "latency_ms"


def printed_latencies(tables: Sequence[str] = ()) -> list[dict[str, object]]:
    """Printed latencies beside the floor of the GPU they were measured on (`specbench forecast --printed`).

    The floor of a step is the larger of its bytes over the data sheet's bandwidth and its operations over the data
    sheet's FLOP/s, as in `specbench.stats.speed.floor_ms`, at the mean context of an image.

    Args:
        tables: names of `specbench list tables`; all if empty.

    Returns:
        One dict per latency: `kind, table, row, model, decoder, hardware` (as printed), `device` (data sheet used;
        None where the paper names none or more than one), `printed_s` (per image), `steps` (from what the paper prints,
        None where it prints nothing), `printed_step_ms`, `weights_ms` (reading the weights once), `floor_step_ms`,
        `floor_s`, `over_floor`, `over_weights`, `note`.

    Raises:
        SpecbenchError: an unknown table.
    """
    return [
        row
        for table in ([load_table(name) for name in tables] if tables else load_tables())
        for one in table.rows
        if _LATENCY in _printed(table, one)
        for row in [_beside(table, one)]
    ]


def _beside(table: Table, row: Row) -> dict[str, object]:
    printed = _printed(table, row)
    seconds, name = printed[_LATENCY] / 1e3, row.settings.get("model")
    found: dict[str, object] = {
        "kind": PRINTED,
        "table": table.name,
        "row": f"{row.group}: {row.label}" if row.group else row.label,
        "model": name,
        "decoder": row.settings.get("decoder"),
        "hardware": row.hardware,
        "printed_s": seconds,
    }
    unknown = dict.fromkeys(
        ("device", "steps", "printed_step_ms", "weights_ms", "floor_step_ms", "floor_s", "over_floor", "over_weights")
    )
    model = find_model(str(name)) if name else None
    tokens = model and _tokens_per_step(table, row, model)
    if model is None or model.size is None:
        return found | unknown | {"note": "a model of unknown size"}
    if tokens is None and "nfe" not in printed:
        return found | unknown | {"note": "the paper prints no steps"}
    steps = printed.get("nfe", model.stream / (tokens or 1))
    known = {"steps": steps, "printed_step_ms": 1e3 * seconds / steps}
    if row.hardware is None:
        return found | unknown | known | {"note": "the paper does not name the GPU"}
    if (device := device_of(row.hardware)) is None:
        return found | unknown | known | {"note": "no single GPU with a known data sheet"}
    settings = _settings(table, row)
    columns = most_columns(_decoder(settings), model) if settings else 1
    weights_ms, floor_ms = _floor(model, known_peak(device, model.dtype), row.settings, columns)
    ratios = {"over_floor": known["printed_step_ms"] / floor_ms, "over_weights": known["printed_step_ms"] / weights_ms}
    floors = {"device": device, "weights_ms": weights_ms, "floor_step_ms": floor_ms, "floor_s": floor_ms * steps / 1e3}
    loose = "" if re.search(re.escape(device.removeprefix("NVIDIA ")), row.hardware) else f"taken as {device}"
    return found | known | floors | ratios | {"note": loose}


def _floor(model: ModelFacts, peak: Peak, settings: Mapping, columns: int) -> tuple[float, float]:
    """Milliseconds to read the weights once, and the floor of one step of `columns`."""
    size, item = model.size, BYTES[str(settings.get("dtype") or model.dtype)]
    guidance = settings.get("sampling", {}).get("guidance", model.sampling().guidance)
    rows, context = (1 if guidance == 1 else 2), PROMPT_TOKENS + model.stream / 2
    bandwidth = peak.bandwidth(item * size.weights)
    read = item * size.read(1, rows, context + columns) / bandwidth
    computed = size.operations(columns, rows, columns * (context + columns)) / peak.flops
    return 1e3 * item * size.weights / bandwidth, 1e3 * max(read, computed)


def device_of(hardware: str) -> str | None:
    """The device in `KNOWN` that a paper's words name, the fastest variant if they name none; None if not one."""
    if whole := [name for name in KNOWN if re.search(rf"{re.escape(name)}(?![\w-])", hardware)]:
        return whole[0] if len(whole) == 1 else None
    named = [full for short, full in SHORT_NAMES.items() if re.search(rf"\b{short}\b", hardware)]
    return named[0] if len(named) == 1 else None


def printed_sentence(row: Mapping[str, object]) -> str | None:
    """The ratios of an AR row in words; None for others, and without a floor."""
    if row["over_floor"] is None or row["decoder"] != "ar":
        return None
    return (
        f"{row['table']}, {row['row']}: AR's {row['printed_step_ms']:.3g} ms a token is {row['over_weights']:.1f}x the "
        f"weight read ({row['weights_ms']:.3g} ms) and {row['over_floor']:.1f}x the floor"
    )


def forecast(
    on: str,
    sources: Sequence[str] | str = (),
    model: str | None = None,
    out: str | Path = "results",
    batch: int = 1,
    dtype: str | None = None,
    bandwidth: Range = BANDWIDTH,
    flops: Range = FLOPS,
    overhead_ms: Range | None = OVERHEAD_MS,
    threads: int = 0,
) -> list[dict[str, object]]:
    """Forecast the speed of decoders on a device that is not here (`specbench forecast`); a model, no measurement.

    Args:
        on: device, for example "A100", "RTX 4090", "cpu" or "2039GB/s,312TFLOP/s".
        sources: run ids, unique beginnings of them, run folders, or names of papers' tables; all runs in `out` if
            empty.
        model: a name of `specbench list models`; the sources' own if None.
        batch, dtype: images decoded together, and number format; the model's own if None.
        bandwidth, flops: shares of the device's peaks that are reached, from low to high.
        overhead_ms: milliseconds of a step besides forward and drafting; None as measured in each run.
        threads: of a CPU that was measured.

    Returns:
        One dict per source with `kind` "forecast", see `specbench.reporting.forecast.forecast_rows`.

    Raises:
        SpecbenchError: an unknown source, device or model; sources of several models where none is named; a value
            outside its range.
    """
    _check_ranges(batch, dtype, bandwidth, flops, overhead_ms)
    sources = [sources] if isinstance(sources, str) else sources
    names = [name for name in sources if name in table_names()]
    runs = [name for name in sources if name not in names]
    refuse_mistyped(runs, out)
    accepted = accepted_lengths(find_runs(out, runs)) if runs or not names else []
    accepted += [one for name in names for one in _printed_lengths(load_table(name), model)]
    if not accepted:
        raise SpecbenchError(f"no runs in {out}", "name a run, or a paper's table: specbench list tables")
    models = sorted({one.model for one in accepted})
    if not model and len(models) > 1:
        raise SpecbenchError(f"these are of several models ({', '.join(models)})", "choose one with --model")
    facts = find_model(model or models[0])
    chosen, guidance = dtype or facts.dtype, facts.sampling().guidance
    peak = peak_of(on, chosen, threads)
    setting = ForecastSetting(facts, peak, chosen, guidance, batch, bandwidth, flops, overhead_ms)
    return forecast_rows(accepted, setting)


def _check_ranges(batch: int, dtype: str | None, bandwidth: Range, flops: Range, overhead_ms: Range | None) -> None:
    if not 1 <= batch <= MOST_IMAGES:
        raise SpecbenchError(f"--batch {batch}: at least 1, at most {MOST_IMAGES:,}")
    if dtype not in (None, *BYTES):
        raise SpecbenchError(f"--dtype {dtype}: unknown", f"valid: {', '.join(BYTES)}")
    for name, (low, high) in (("bandwidth-share", bandwidth), ("flops-share", flops)):
        if not 0 < low <= high <= 1:
            raise SpecbenchError(f"--{name} {low:g},{high:g}: no shares", "LOW,HIGH with 0 < LOW <= HIGH <= 1")
    if overhead_ms and not 0 <= overhead_ms[0] <= overhead_ms[1] <= MOST_MS:
        raise SpecbenchError("--overhead-ms: no range", f"LOW,HIGH with 0 <= LOW <= HIGH <= {MOST_MS:,}, or run")


def _printed_lengths(table: Table, model: str | None) -> list[Accepted]:
    """Printed tokens per step of a table's rows; only of the rows of `model` if it has any.

    Raises:
        SpecbenchError: the table prints none.
    """
    found = []
    for row in table.rows:
        settings = _settings(table, row)
        if settings is None or (tokens := _tokens_per_step(table, row, find_model(settings.model))) is None:
            continue
        decoder = _decoder(settings)
        source = f"{table.name}: {f'{row.group}, ' if row.group else ''}{row.label}"
        found.append(Accepted(source, settings.model, decoder, label(decoder), tokens))
    if all(one.decoder.name == "ar" for one in found):
        raise SpecbenchError(f"{table.name} prints no steps", "tables with steps: gsd-1, sjd-1, sjdpp-1, cool-sd-1")
    return [one for one in found if one.model == model] or found


def _settings(table: Table, row: Row) -> CellSettings | None:
    return next((found for column in table.columns if (found := table.cell_settings(row, column))), None)


def _decoder(settings: CellSettings) -> DecoderSpec:
    return resolve(settings.decoder, dict(settings.options))


def _tokens_per_step(table: Table, row: Row, model: ModelFacts) -> float | None:
    """From the printed NFE, step compression, step ratio or accepted length, the first that is printed; 1 for AR."""
    printed = _printed(table, row)
    if row.settings.get("decoder") == "ar":
        return 1.0
    if "nfe" in printed:
        return max(1.0, model.stream / printed["nfe"])
    return next(
        (printed[key] for key in ("step_compression", "step_ratio", "acceptance_length") if key in printed), None
    )


def _printed(table: Table, row: Row) -> dict[str, float]:
    """Printed values by key, in the unit of the measured ones."""
    return {column.key: row.paper[column.name] / column.scale for column in table.columns if column.name in row.paper}


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
