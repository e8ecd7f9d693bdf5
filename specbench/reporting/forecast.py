"""Forecast of a decoder's speed on a device that is not here, from accepted lengths and the roofline of the model.

    step     = forward of the window + drafting of a draft head + overhead
    seconds  = (prefill + NFE x step) / 1000,   NFE = stream slots / tokens per step
    speed-up = seconds of AR / seconds of the decoder, both by this model

Everything here is a model. Its rows say so, are stored nowhere and enter no table with measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.models.facts import BYTES, EIGHT_BITS, EIGHT_BITS_GAIN, RANDOM, ModelFacts
from specbench.models.forward_time import Forward, Reached, forward_ms
from specbench.models.network_sizes import Size, draft_weights, first_layer_weights
from specbench.reporting.comparability import Run
from specbench.reporting.marks import label
from specbench.runs.memory_estimate import most_columns
from specbench.specs.components import node_paths
from specbench.specs.presets import DecoderSpec
from specbench.stats.speed import with_times
from specbench.system.device_peaks import Peak

FORECAST = "forecast"  # The `kind` of every row
PROMPT_TOKENS = 128  # Assumed elements of a prompt
HEADS = ("eagle", "eagle-cascade", "eagle-paths", "eagle-skips", "eagle3", "vertical", "vertical-coupled")
"""Drafters with a head, whose drafting is modelled and not part of a run's overhead."""
Range = tuple[float, float]


class Printed(NamedTuple):
    """Tokens per step that a paper prints, on which model, and where."""

    tokens_per_step: float
    model: str
    source: str


@dataclass(frozen=True)
class Accepted:
    """Tokens that a decoder commits per target forward, and where that number is from."""

    source: str  # the run or the row of a paper's table
    model: str  # what it was measured on
    decoder: DecoderSpec
    label: str
    tokens_per_step: float  # stream tokens over target forwards
    # milliseconds of a step besides its forward and drafting, where the run was measured; else None
    overhead_ms: float | None = None
    # what papers print for its kind on other models; a forecast for another model than `model` reaches from there to
    # `tokens_per_step`
    printed: tuple[Printed, ...] = ()

    @property
    def range(self) -> Range:
        """Lowest and highest tokens per step."""
        tokens = [self.tokens_per_step, *(entry.tokens_per_step for entry in self.printed)]
        return min(tokens), max(tokens)


@dataclass(frozen=True)
class ForecastSetting:
    """What a forecast is for, and the ranges that are assumed."""

    model: ModelFacts
    peak: Peak
    dtype: str
    guidance: float  # scale; 1 is without
    batch: int  # images decoded together
    # bandwidth, flops: shares of the device's peaks that are reached, low and high
    bandwidth: Range
    flops: Range
    overhead_ms: Range | None  # of a step, low and high; None takes each run's own, and AR's from the AR run

    @property
    def size(self) -> Size:
        """Sizes of the model."""
        if self.model.size is None:
            raise SpecbenchError(f"the sizes of '{self.model.name}' are unknown", "choose a model at full scale")
        # Eight bits are written as sixteen before they are multiplied.
        return replace(self.model.size, eight_bits=0)

    def forward(self, columns: float, context: float | None = None, slots: int | None = None) -> Forward:
        """A forward of the model; with the mean context of an image if None, of whose slots the cache keeps `slots`."""
        slots = slots or self.model.stream
        mean = PROMPT_TOKENS + slots * (1 - slots / self.model.stream / 2) if context is None else context
        guided = self.guidance != 1
        moved, v_image = self.model.network.moved, self.model.v_image
        return Forward(self.size, moved, v_image, BYTES[self.dtype], columns, self.batch, guided, mean)


def accepted_lengths(folders: Sequence[Path]) -> list[Accepted]:
    """What the images of runs committed per forward."""
    lengths = []
    for run in map(Run, folders):
        spec, name, tokens = run.info.spec, run.info.run_id, stats.tokens_per_step(run.rows)
        if RANDOM in spec.model:
            what = f"{name}: {spec.model} has random weights, so its steps mean nothing"
            raise SpecbenchError(what, "name the runs to forecast")
        if tokens is None:
            raise SpecbenchError(f"run {name} has no image yet", "run it, or name another run")
        spans = ["verify_ms", "host_ms", *["draft_ms"] * (spec.decoder.drafter not in HEADS)]
        timed = with_times(run.rows)
        beside = timed[spans].sum().sum() / timed["nfe"].sum() if spec.batch == 1 and len(timed) else None
        lengths.append(Accepted(f"run {name}", spec.model, spec.decoder, label(spec.decoder), tokens, beside))
    return lengths


def forecast_rows(accepted: Sequence[Accepted], setting: ForecastSetting) -> list[dict[str, object]]:
    """Forecast rows, one for each accepted length.

    Returns:
        One dict each: `kind` ("forecast"), `source, decoder, label, window, model, device, dtype, batch, nfe`,
        `tokens_per_step` with the range of `Accepted.range`; as low, middle and high value `forward_ms, step_ms,
        seconds, ar_seconds, speed_up, window_cost, images_per_hour` (`NAME_low`, `NAME`, `NAME_high`; low is the
        smaller number), seconds of a batch's images together; `parts_ms` of the middle forward; `assumptions`, a
        sentence each.
    """
    ar = next((length.overhead_ms for length in accepted if length.decoder.name == "ar"), None)
    if setting.overhead_ms is None and (ar is None or any(length.overhead_ms is None for length in accepted)):
        raise SpecbenchError(
            "--overhead-ms run needs runs timed one image at a time, one of them of ar", "--overhead-ms LOW,HIGH"
        )
    return [_row(length, setting, ar) for length in accepted]


def _row(length: Accepted, setting: ForecastSetting, ar_overhead: float | None) -> dict[str, object]:
    model = setting.model
    ends = [_numbers(length, setting, corner) for corner in _corners(length, setting, ar_overhead)]
    shares = Reached(sum(setting.bandwidth) / 2, sum(setting.flops) / 2)
    mean = setting.overhead_ms and sum(setting.overhead_ms) / 2
    overheads = (length.overhead_ms, ar_overhead) if mean is None else (mean, mean)
    assumed = Assumed(shares, *overheads, length.tokens_per_step)
    middle, columns = _numbers(length, setting, assumed), most_columns(length.decoder, model)
    slots = model.stream
    row: dict[str, object] = {
        "kind": FORECAST,
        "source": length.source,
        "decoder": length.decoder.name,
        "label": length.label,
        "window": columns,
        "model": model.name,
        "device": setting.peak.name,
        "dtype": setting.dtype,
        "batch": setting.batch,
        "tokens_per_step": length.tokens_per_step,
        "tokens_per_step_low": length.range[0],
        "tokens_per_step_high": length.range[1],
        "nfe": model.stream / length.tokens_per_step,
    }
    for name, value in middle.items():
        values = [end[name] for end in ends]
        row |= {name: value, f"{name}_low": min(values), f"{name}_high": max(values)}
    row["parts_ms"] = forward_ms(setting.forward(columns, slots=slots), setting.peak, assumed.reached)
    return row | {"assumptions": assumptions(setting, [length])}


class Assumed(NamedTuple):
    """One set of assumptions: shares reached, milliseconds of overhead of the decoder's step and of AR's, and tokens
    per step."""

    reached: Reached
    overhead: float
    ar_overhead: float
    tokens: float


def _corners(length: Accepted, setting: ForecastSetting, ar: float | None) -> Iterator[Assumed]:
    """The extremes of what is assumed; no decoder's step has less overhead than AR's."""
    if setting.overhead_ms is None:
        overheads = [(length.overhead_ms, ar)]
    else:
        low, high = setting.overhead_ms
        overheads = [(low, low), (high, high)] + [(high, low)] * (length.decoder.name != "ar")
    ranges = setting.bandwidth, setting.flops, overheads, length.range
    for bandwidth, flops, (overhead, ar_overhead), tokens in product(*ranges):
        yield Assumed(Reached(bandwidth, flops), overhead, ar_overhead, tokens)


def _numbers(length: Accepted, setting: ForecastSetting, assumed: Assumed) -> dict[str, float]:
    """The forecast under one set of assumptions."""
    model, columns = setting.model, most_columns(length.decoder, setting.model)

    def ms(forward: Forward) -> float:
        return sum(forward_ms(forward, setting.peak, assumed.reached).values())

    prefill, single = ms(setting.forward(PROMPT_TOKENS, 0)), ms(setting.forward(1))
    forward = ms(setting.forward(columns, slots=model.stream))
    rounds = 1.0  # of drafting, per forward
    if length.decoder.drafter == "eagle-skips":
        interval = dict(length.decoder.options)["interval"]
        rounds = interval / (interval - 1)
    step = forward + rounds * sum(ms(level) for level in _drafting(length.decoder, setting)) + assumed.overhead
    seconds = (prefill + model.stream / assumed.tokens * step) / 1e3
    ar_seconds = (prefill + model.stream * (single + assumed.ar_overhead)) / 1e3
    return {
        "forward_ms": forward,
        "step_ms": step,
        "seconds": seconds,
        "ar_seconds": ar_seconds,
        "speed_up": ar_seconds / seconds,
        "window_cost": forward / single,
        "images_per_hour": 3600 * setting.batch / seconds,
    }


def _drafting(decoder: DecoderSpec, setting: ForecastSetting) -> list[Forward]:
    """Forwards of a draft head in one step, each with the output matrix: one for each level of EAGLE's tree (a layer, a
    projection of 2d x d) or draft of a vertical head, whose first layer runs once for all, without that matrix."""
    model, network = setting.model, setting.model.network
    if decoder.head_kind == "vertical":
        drafts, width = int(dict(decoder.options)["window"]) - 1, network.width
        first = Size(first_layer_weights(width), 0, width)
        at_once = replace(setting.forward(1), size=first, moved=0.0, v_image=0, columns=drafts)
        size = Size(draft_weights(width) + model.v_image * width, 0, width)
        each = replace(setting.forward(1), size=size, moved=0.0, columns=1)
        return [at_once, *[each] * drafts] if drafts else []
    if not decoder.drafter.startswith("eagle"):
        return []
    weights = network.layer_weights + 2 * network.width**2 + model.v_image * network.width
    head = Size(weights, setting.size.kv // network.layers, setting.size.attention // network.layers)
    whole, moved = setting.forward(1), network.moved / network.layers
    return [replace(whole, size=head, moved=moved, columns=columns) for columns in _head_columns(dict(decoder.options))]


def _head_columns(options: Mapping[str, object]) -> list[int]:
    """Columns that an EAGLE head extrapolates, by depth: those with children."""
    if "paths" in options:
        return [1, *[int(options["paths"])] * (int(options["window"]) - 2)][: int(options["window"]) - 1]
    paths = node_paths(str(options["tree"]))
    return [len({path[:-1] for path in paths if len(path) == depth}) for depth in range(1, max(map(len, paths)) + 1)]


def assumptions(setting: ForecastSetting, accepted: Sequence[Accepted]) -> list[str]:
    """Everything that a forecast rests on, a sentence each."""
    model, peak, size = setting.model, setting.peak, setting.size
    rows = "1 row" if setting.guidance == 1 else f"2 rows (guidance {setting.guidance:g})"
    others = list(dict.fromkeys(length.model for length in accepted if length.model != model.name))
    if setting.overhead_ms is None:
        overhead = (
            "that of each run, on the machine where it was measured, which another device need not have, and of the AR "
            "run for AR"
        )
    else:
        overhead = (
            f"{_span(*setting.overhead_ms)} ms a step besides forward and drafting, stated; AR's is at most as much"
        )
    lines = [
        f"A forecast of a model: nothing was measured on {peak.name}.",
        f"Device: {peak.bandwidth(2**40) / 1e9:,.0f} GB/s and {peak.flops / 1e12:,.4g} TFLOP/s in {setting.dtype} "
        f"({peak.source}); of these {_percent(setting.bandwidth)} and {_percent(setting.flops)} are reached, stated.",
        f"Model: {model.name} in {setting.dtype}; a forward reads {_counted(size.weights)} weights once and "
        f"each row's KV cache, {size.kv * BYTES[setting.dtype] / 1024:,.0f} KiB a token; {rows} per image, batch "
        f"{setting.batch}.",
        f"An image has {model.stream:,} stream slots after a prompt of {PROMPT_TOKENS}; every step is taken at the "
        "mean context, with its full window.",
        f"Overhead: {overhead}.",
        "Encoding of the prompt and drawing of the picture are left out.",
    ]
    if setting.model.size.eight_bits:
        lines.append(
            f"--dtype {EIGHT_BITS} {EIGHT_BITS_GAIN}: its weights are read as those of {setting.dtype} at least."
        )
    if peak.products:
        lines.append("Products with weights take the time measured there for their number of columns, at that share.")
    else:
        lines.append("Steps are compiled: otherwise a GPU waits for the program, and they take several times as long.")
    if any(length.decoder.drafter.startswith("eagle") for length in accepted):
        lines.append("A draft head is one layer, a projection and the output matrix, run once for each level.")
    if any(length.decoder.head_kind == "vertical" for length in accepted):
        lines.append(
            "A vertical head is three small layers and the output matrix, run once for each draft, but for most of the "
            "first layer, which runs once for all (a window wider than an image row takes a few runs)."
        )
    if others:
        lines.append(f"Tokens per step were found on {', '.join(others)}, not on {model.name}.")
        lines += _printed_sentences(
            [length for length in accepted if length.decoder.name != "ar" and length.model != model.name]
        )
    lines += ["Rows of a batch that finish are refilled at once."] if setting.batch > 1 else []
    return lines


def _printed_sentences(accepted: Sequence[Accepted]) -> list[str]:
    """What papers print for decoders on other models than those that were measured."""
    lines = []
    for name, printed in {length.label: length.printed for length in accepted if length.printed}.items():
        low, high = (pick(printed, key=lambda entry: entry.tokens_per_step) for pick in (min, max))
        texts = dict.fromkeys(f"{entry.tokens_per_step:.3g} on {entry.model} ({entry.source})" for entry in (low, high))
        lines.append(f"{name}: papers print {' to '.join(texts)}; the ranges include these tokens per step.")
    if unknown := dict.fromkeys(length.decoder.name for length in accepted if not length.printed):
        lines.append(f"No tokens per step on another model were read in a paper for {', '.join(unknown)}: no range.")
    return lines


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _percent(shares: Range) -> str:
    return f"{_span(*(100 * share for share in shares))} %"


def _counted(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
