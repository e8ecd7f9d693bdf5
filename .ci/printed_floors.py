"""Latencies that the papers print beside the floors of their GPUs, for a page of the documentation."""

import re
from collections.abc import Sequence

from specbench.models.catalog import find_model
from specbench.models.facts import BYTES, ModelFacts
from specbench.papers.forecasts import decoder_of, printed_tokens_per_step, printed_values, row_settings
from specbench.papers.table import Row, Table
from specbench.papers.table_files import load_table, load_tables
from specbench.reporting.forecast import PROMPT_TOKENS
from specbench.runs.memory_estimate import usual_columns
from specbench.runs.settings import RunSettings
from specbench.system.device_peaks import KNOWN, SHORT_NAMES, Peak, known_peak

LATENCY = "latency_ms"


def printed_latencies(tables: Sequence[str] = ()) -> list[dict[str, object]]:
    """Printed latencies beside the floor of the GPU they were measured on (dev/notes/gpu.md).

    The floor of a step is the larger of its bytes over the data sheet's bandwidth and its operations over the data
    sheet's FLOP/s, as in `specbench.stats.speed.floor_ms`, at the mean context of an image.

    Args:
        tables: names of `specbench list tables`; all if empty.

    Returns:
        One dict per latency: `table, row, model, decoder, hardware` (as printed), `device` (data sheet used;
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
        if LATENCY in printed_values(table, one)
        for row in [_beside(table, one)]
    ]


def _beside(table: Table, row: Row) -> dict[str, object]:
    printed = printed_values(table, row)
    seconds, name = printed[LATENCY] / 1e3, row.model
    found: dict[str, object] = {
        "table": table.name,
        "row": f"{row.group}: {row.label}" if row.group else row.label,
        "model": name,
        "decoder": row.decoder,
        "hardware": row.hardware,
        "printed_s": seconds,
    }
    unknown = dict.fromkeys(
        ("device", "steps", "printed_step_ms", "weights_ms", "floor_step_ms", "floor_s", "over_floor", "over_weights")
    )
    model = find_model(str(name)) if name else None
    tokens = model and printed_tokens_per_step(table, row, model)
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
    settings = row_settings(table, row)
    columns = usual_columns(decoder_of(settings), model) if settings else 1
    weights_ms, floor_ms = _floor(model, known_peak(device, model.dtype), row.settings, columns)
    ratios = {"over_floor": known["printed_step_ms"] / floor_ms, "over_weights": known["printed_step_ms"] / weights_ms}
    floors = {"device": device, "weights_ms": weights_ms, "floor_step_ms": floor_ms, "floor_s": floor_ms * steps / 1e3}
    loose = "" if re.search(re.escape(device.removeprefix("NVIDIA ")), row.hardware) else f"taken as {device}"
    return found | known | floors | ratios | {"note": loose}


def _floor(model: ModelFacts, peak: Peak, settings: RunSettings, columns: int) -> tuple[float, float]:
    """Milliseconds to read the weights once, and the floor of one step of `columns`."""
    size, item = model.size, BYTES[settings.dtype or model.dtype]
    guidance = settings.sampling.get("guidance", model.sampling().guidance)
    rows, context = (1 if guidance == 1 else 2), PROMPT_TOKENS + model.stream / 2
    bandwidth = peak.bandwidth(item * size.weights)
    read = size.read(1, rows, context + columns, item) / bandwidth
    computed = size.operations(columns, rows, columns * (context + columns)) / peak.flops
    return 1e3 * item * size.weights / bandwidth, 1e3 * max(read, computed)


def device_of(hardware: str) -> str | None:
    """The device in `KNOWN` that a paper's words name, the fastest variant if they name none; None if not one."""
    if whole := [name for name in KNOWN if re.search(rf"{re.escape(name)}(?![\w-])", hardware)]:
        return whole[0] if len(whole) == 1 else None
    named = [full for short, full in SHORT_NAMES.items() if re.search(rf"\b{short}\b", hardware)]
    return named[0] if len(named) == 1 else None
