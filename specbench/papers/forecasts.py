"""Forecasts of speed from the tokens per step of runs or of papers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path

from specbench.errors import SpecbenchError, chosen
from specbench.models.catalog import find_model, models
from specbench.models.facts import BYTES, DTYPES, EIGHT_BITS, RANDOM, ModelChoice, ModelFacts
from specbench.models.hub_model import MODELS
from specbench.papers.table import SCORE, STEP_RATIOS, Row, Table
from specbench.papers.table_files import is_table, load_table, load_tables, refuse_mistyped
from specbench.reporting.columns import number
from specbench.reporting.forecast import Accepted, ForecastSetting, Printed, Range, accepted_lengths, forecast_rows
from specbench.reporting.marks import label
from specbench.reporting.row import ReportRow
from specbench.runs.settings import RunSettings
from specbench.specs.presets import DecoderSpec, named_ar, printed_acceptances, resolve
from specbench.store.run_folders import Names, find_runs
from specbench.system.device_peaks import peak_of

BANDWIDTH, FLOPS, OVERHEAD_MS, WINDOW = (0.6, 0.9), (0.4, 0.75), (0.1, 5.0), (1.0, 1.25)
"""Default assumptions: reached fractions of the data sheet's peaks, overhead in milliseconds per step, and the factor
by which a forward of several columns takes longer than its bytes and operations predict (results/gpu)."""
MOST_FACTOR = 10  # Largest such factor
OWN_OVERHEAD = "run"  # Value of --overhead-ms: use the measured overhead of each run
MOST_IMAGES, MOST_MS = 65_536, 60_000  # Largest batch and overhead of a step in a forecast


def forecast(
    on: str,
    sources: Names = (),
    model: str | None = None,
    out: str | Path = "results",
    batch: int = 1,
    dtype: str | None = None,
    bandwidth: Range = BANDWIDTH,
    flops: Range = FLOPS,
    overhead_ms: Range | None = OVERHEAD_MS,
    threads: int = 0,
    window: Range = WINDOW,
) -> list[dict[str, object]]:
    """Forecast the speed of decoders on another device (`specbench forecast`): a model, not a measurement.

    Args:
        on: device, for example "A100", "RTX 4090", "cpu" or "2039GB/s,312TFLOP/s".
        sources: run ids, unique prefixes of run ids, run folders, names of papers' tables, or a table's file
            (FILE.toml); all runs in `out` by default.
        model: a name of `specbench list models`; if None, the sources' model.
        batch, dtype: images decoded together, and number format; if None, the model's format.
        bandwidth, flops: lowest and highest fraction of the device's peaks that is reached.
        overhead_ms: milliseconds of a step outside forward and drafting; None: as measured in each run.
        threads: number of threads, if the device is this machine's CPU.
        window: lowest and highest factor by which a forward of several columns takes longer than the roofline
            predicts; unused if products were measured on the device for each number of columns.

    Returns:
        One dict per source with `kind` "forecast", see `specbench.reporting.forecast.forecast_rows`.

    Raises:
        SpecbenchError: an unknown source, device or model; sources of several models without `model`; a value
            outside its range.
    """
    _check_ranges(batch, dtype, bandwidth, flops, overhead_ms, window)
    asked = [str(name) for name in chosen("source", sources)]
    names = [name for name in asked if is_table(name)]
    runs = [name for name in asked if name not in names]
    refuse_mistyped(runs, out)
    accepted = accepted_lengths(find_runs(out, runs or ())) if runs or not names else []
    accepted += [entry for name in names for entry in _printed_lengths(load_table(name, out), model)]
    if not accepted:
        raise SpecbenchError(f"no runs in {out}", "name a run, or a paper's table: specbench list tables")
    measured = sorted({entry.model for entry in accepted})
    if not model and len(measured) > 1:
        what = f"the sources belong to several models ({', '.join(measured)})"
        raise SpecbenchError(what, "choose one with --model")
    name, choice = ModelChoice.of_name(model or measured[0])
    if not model and name not in models():
        raise SpecbenchError(f"model '{name}' is a plug-in that is not installed", "name it: --model MODULE:NAME")
    facts = find_model(name).configured(replace(choice, eight_bits=choice.eight_bits or dtype == EIGHT_BITS))
    accepted = [
        entry if entry.model == facts.name else replace(entry, printed=printed_elsewhere(entry)) for entry in accepted
    ]
    computed, guidance = dtype if dtype in BYTES else facts.dtype, facts.sampling().guidance
    peak = peak_of(on, computed, threads)
    setting = ForecastSetting(facts, peak, computed, guidance, batch, bandwidth, flops, overhead_ms, window)
    return forecast_rows(accepted, setting)


def _check_ranges(
    batch: int, dtype: str | None, bandwidth: Range, flops: Range, overhead_ms: Range | None, window: Range
) -> None:
    if not 1 <= batch <= MOST_IMAGES:
        raise SpecbenchError(f"--batch {batch}: must be at least 1 and at most {MOST_IMAGES:,}")
    if dtype not in (None, *DTYPES):
        raise SpecbenchError(f"--dtype {dtype}: unknown", f"valid: {', '.join(DTYPES)}")
    shares = {"bandwidth-share": bandwidth, "flops-share": flops}
    for name, pair in (shares | {"overhead-ms": overhead_ms, "window-factor": window}).items():
        numbers = isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(end, Real) for end in pair)
        if not numbers and (pair is not None or name != "overhead-ms"):
            raise SpecbenchError(f"--{name} {pair!r:.50}: not a range", "in Python: two numbers")
    for name, (low, high) in shares.items():
        if not 0 < low <= high <= 1:
            raise SpecbenchError(f"--{name} {low:g},{high:g}: invalid shares", "use 0 < LOW <= HIGH <= 1")
    if overhead_ms and not 0 <= overhead_ms[0] <= overhead_ms[1] <= MOST_MS:
        what = f"--overhead-ms {overhead_ms[0]:g},{overhead_ms[1]:g}: invalid range"
        raise SpecbenchError(what, f"use 0 <= LOW <= HIGH <= {MOST_MS:,}, or write run")
    if not 1 <= window[0] <= window[1] <= MOST_FACTOR:
        what = f"--window-factor {window[0]:g},{window[1]:g}: invalid range"
        raise SpecbenchError(what, f"use 1 <= LOW <= HIGH <= {MOST_FACTOR}")


def _printed_lengths(table: Table, model: str | None) -> list[Accepted]:
    """Return the tokens per step that a table prints; if it has rows of `model`, only from these rows."""
    lengths = []
    for row in table.rows:
        settings = row_settings(table, row)
        if settings is None or (tokens := printed_tokens_per_step(table, row, find_model(settings.model))) is None:
            continue
        decoder = decoder_of(settings)
        source = f"{table.name}: {f'{row.group}, ' if row.group else ''}{row.label}"
        lengths.append(Accepted(source, settings.model, decoder, label(decoder), tokens))
    if all(not length.decoder.drafts for length in lengths):
        raise SpecbenchError(f"{table.name} prints no steps", "tables with steps: gsd-1, sjd-1, sjdpp-1 and more")
    return [length for length in lengths if length.model == model] or lengths


def printed_elsewhere(accepted: Accepted) -> tuple[Printed, ...]:
    """Return the tokens per step that papers print for this decoder with the same options on models other than the
    measured model. For exact decoders with a draft head, values of all decoders with this kind of head are included."""
    elsewhere = [
        Printed(tokens, settings.model, f"{table.name}, {row.label}")
        for table in load_tables()
        for row in table.rows
        if row.decoder == accepted.decoder.name and (settings := row_settings(table, row)) is not None
        if _same_options(decoder_of(settings), accepted.decoder)
        if (tokens := printed_tokens_per_step(table, row, find_model(settings.model))) is not None
    ]
    if accepted.decoder.head_kind and accepted.decoder.lossless:
        elsewhere += [Printed(*entry) for entry in printed_acceptances(accepted.decoder.head_kind)]
    return tuple(entry for entry in elsewhere if entry.model != accepted.model and accepted.decoder.drafts)


def _same_options(decoder: DecoderSpec, other: DecoderSpec) -> bool:
    """Return whether the options are equal, except the choices of q for fresh drafts and of the head's weights."""
    ignored = {"fresh-q", "head"}
    differing = {key for key, _ in decoder.options.items() ^ other.options.items()}
    return differing <= ignored


def row_settings(table: Table, row: Row) -> RunSettings | None:
    """Return the settings of the first run of a row; None if the row cannot be run."""
    return next(iter(table.runs_of_row(row)), None)


def decoder_of(settings: RunSettings) -> DecoderSpec:
    """Resolve the decoder of a cell."""
    return resolve(settings.decoder[0], settings.options)


def printed_tokens_per_step(table: Table, row: Row, model: ModelFacts) -> float | None:
    """Tokens per step: 1 for AR, else from the first number printed: NFE, step ratio, compression, accepted length."""
    printed = printed_values(table, row)
    if named_ar(row.decoder):
        return 1.0
    if "nfe" in printed:
        return max(1.0, model.stream / printed["nfe"])
    return next((printed[key] for key in STEP_RATIOS if key in printed), None)


def printed_values(table: Table, row: Row) -> dict[str, float]:
    """Return {key: printed value in the measured unit}. Values that are printed in this unit keep their decimals."""
    columns = [column for column in table.columns if column.name in row.paper]
    values = {column.key: (row.paper[column.name], column.scale) for column in columns}
    return {key: value if scale == 1 else value / scale for key, (value, scale) in values.items()}


def read_range(name: str, text: str) -> Range:
    """Parse a range from "LOW,HIGH" or one number."""
    try:
        low, high = [float(part) for part in (text if "," in text else f"{text},{text}").split(",")]
    except ValueError:
        raise SpecbenchError(f"--{name} {text}: not a range", "write two numbers: LOW,HIGH") from None
    if not (abs(low) < float("inf") and abs(high) < float("inf")):  # also false for NaN
        raise SpecbenchError(f"--{name} {text}: not finite", "write two numbers: LOW,HIGH")
    return low, high


_MOST, _MOST_SCORES = 3, 2
_SPEEDS = {"nfe": "NFE", "latency_ms": "latency", "speedup": "speed-up", "step_compression": "step compression"}


def printed_beside(rows: Sequence[ReportRow]) -> list[str]:
    """Describe up to three cells of papers with the decoder, options and model of a report row, one line each. Cells
    that print most speeds come first. Empty if no paper uses the model."""
    models = {model.name for model in MODELS}
    ours = [row for row in rows if not row.is_ar and RANDOM not in row.model]
    ours = [row for row in ours if row.model.partition("+")[0] in models]
    like_ours = [cell for table in load_tables() for row in ours for cell in _cells(table, row)] if ours else []
    like_ours.sort(key=lambda cell: -cell[0])
    lines, seen = [], set()
    for _, name, numbers, line in like_ours:
        if (name, numbers[0]) not in seen:  # other tables may repeat a cell
            lines.append(line)
        seen |= {(name, text) for text in numbers}
    return lines[:_MOST]


def _cells(table: Table, ours: ReportRow) -> Iterator[tuple[int, str, list[str], str]]:
    """Yield (number of printed speeds, our label, printed numbers, line) of each cell with the settings of our row."""
    for row in table.rows:
        try:
            settings = None if row.own or not row.paper else row_settings(table, row)
            theirs = decoder_of(settings) if settings else None
        except SpecbenchError:  # a head or file is missing
            continue
        if not settings or not theirs or theirs.name != ours.decoder or settings.model != ours.model.partition("+")[0]:
            continue
        stated = {name: value for name, value in theirs.options.items() if name not in ("window", "head")}
        numbers = _numbers(table, row)
        if numbers and all(str(ours.options.get(key)) == str(value) for key, value in stated.items()):
            line = _line(table, row, ours.label, theirs.options.get("window"), numbers)
            yield sum(key in _SPEEDS for key in printed_values(table, row)), ours.label, numbers, line


def _line(table: Table, row: Row, label: str, window: object, numbers: Sequence[str]) -> str:
    """Format the line that compares a cell's printed values with our row `label`."""
    place = f"{table.paper}, {table.source}{f', {row.group}' if row.group else ''}"
    place += f", window {window}" if window is not None else ""
    on = f"; on {hardware.partition(' (')[0]}" if (hardware := row.hardware or table.hardware) else ""
    return f"Printed for {label} ({place}): {', '.join(numbers)}{on}."


def _numbers(table: Table, row: Row) -> list[str]:
    """Format the printed NFE, latency, speed-up and scores of a row."""
    printed = {column.key: column for column in table.columns if column.name in row.paper}
    shown = []
    for key in (*_SPEEDS, *[key for key in printed if key.startswith(SCORE)][:_MOST_SCORES]):
        if column := printed.get(key):
            unit = " s" if key == "latency_ms" else ""
            value = number(row.paper[column.name] * (1e-3 / column.scale if unit else 1), column.precision)
            shown.append(f"{_SPEEDS.get(key, column.header)} {value}{unit}")
    return shown
