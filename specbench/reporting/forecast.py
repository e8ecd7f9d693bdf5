"""Forecast of a decoder's speed on another device, from accepted lengths and the roofline of the model.

    step     = forward of the window x window factor + drafting of a draft head + overhead
    seconds  = (prefill + NFE x step) / 1000,   NFE = stream slots / tokens per step
    speed-up = seconds of AR / seconds of the decoder, both by this model

All numbers are computed, not measured. The rows state this, are never stored, and are never in a table of measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.models.catalog import ModelInfo
from specbench.models.facts import BYTES, EIGHT_BITS, EIGHT_BITS_GAIN, RANDOM, ModelFacts
from specbench.models.forward_time import Forward, Reached, forward_ms
from specbench.models.network_sizes import HEAD_SIZES, NetworkSize, Size, draft_weights, first_layer_weights
from specbench.reporting.comparability import Run
from specbench.reporting.marks import label, window_of
from specbench.runs.memory_estimate import usual_columns
from specbench.specs.components import CHOICES, node_paths
from specbench.specs.presets import DecoderSpec
from specbench.stats.speed import with_times
from specbench.system.device_peaks import Peak

FORECAST = "forecast"  # The `kind` of every row
PROMPT_TOKENS = 128  # Assumed prompt length
Range = tuple[float, float]


class Printed(NamedTuple):
    """Tokens per step printed by a paper, with the model and the place in the paper."""

    tokens_per_step: float
    model: str
    source: str


@dataclass(frozen=True)
class Accepted:
    """Tokens per target forward of a decoder, and the source of this number."""

    source: str  # the run, or the row of a paper's table
    model: str  # the model of the measurement
    decoder: DecoderSpec
    label: str
    tokens_per_step: float  # stream tokens over target forwards
    # milliseconds of a step without forward and drafting; None if the run was not timed
    overhead_ms: float | None = None
    # values printed by papers for this kind of decoder on other models. A forecast for another model than `model` has a
    # range that spans these values and `tokens_per_step`
    printed: tuple[Printed, ...] = ()

    @property
    def range(self) -> Range:
        """Lowest and highest tokens per step."""
        tokens = [self.tokens_per_step, *(entry.tokens_per_step for entry in self.printed)]
        return min(tokens), max(tokens)


@dataclass(frozen=True)
class ForecastSetting:
    """Target of a forecast and the assumed ranges."""

    model: ModelFacts
    peak: Peak
    dtype: str
    guidance: float  # scale; 1: no guidance
    batch: int  # images decoded together
    # bandwidth, flops: lowest and highest fraction of the device's peak that is reached
    bandwidth: Range
    flops: Range
    overhead_ms: Range | None  # lowest and highest of a step; None: the overhead measured in each run (also in AR's)
    window: Range = (1.0, 1.0)  # lowest and highest factor of the time of a forward of several columns

    @property
    def network(self) -> NetworkSize:
        """Sizes of the model's network."""
        if self.model.network is None or self.model.size is None:
            own = isinstance(self.model, ModelInfo)
            hint = "add width, inner and heads to its configuration" if own else "choose a model at full scale"
            raise SpecbenchError(f"the sizes of '{self.model.name}' are unknown", hint)
        return self.model.network

    @property
    def size(self) -> Size:
        """Sizes of a forward; eight-bit weights count as sixteen-bit, because they are converted before products."""
        return self.network.size(self.model.v_image)

    def factors(self, columns: float) -> Range:
        """Lowest and highest factor of the time of a forward; 1 if products were measured by number of columns."""
        return (1.0, 1.0) if columns <= 1 or self.peak.products else self.window

    def forward(self, columns: float, context: float | None = None, slots: int | None = None) -> Forward:
        """Describe a forward. `context`: tokens in the KV cache; None: the mean over an image (cache of `slots`)."""
        slots = slots or self.model.stream
        mean = PROMPT_TOKENS + slots * (1 - slots / self.model.stream / 2) if context is None else context
        guided = self.guidance != 1
        moved, v_image = self.network.moved, self.model.v_image
        return Forward(self.size, moved, v_image, BYTES[self.dtype], columns, self.batch, guided, mean)


def accepted_lengths(folders: Sequence[Path]) -> list[Accepted]:
    """Compute the tokens per target forward of runs."""
    lengths = []
    for run in map(Run, folders):
        spec, name, tokens = run.info.spec, run.info.run_id, stats.tokens_per_step(run.rows)
        if RANDOM in spec.model:
            what = f"{name}: {spec.model} has random weights, so its numbers of steps are meaningless"
            raise SpecbenchError(what, "name other runs to forecast")
        if tokens is None:
            raise SpecbenchError(f"run {name} has no images yet", "decode images, or name another run")
        if any(vars(spec.decoder)[kind] not in known for kind, known in CHOICES.items()):
            what = f"{name}: the decoder '{spec.decoder.name}' has a component of a plug-in that is not installed"
            raise SpecbenchError(what, "install the plug-in, or name other runs to forecast")
        # The overhead excludes drafting by a head, which has a separate model.
        spans = ["verify_ms", "host_ms", *([] if spec.decoder.head_kind else ["draft_ms"])]
        timed = with_times(run.rows)
        beside = timed[spans].sum().sum() / timed["nfe"].sum() if spec.batch == 1 and len(timed) else None
        lengths.append(Accepted(f"run {name}", spec.model, spec.decoder, label(spec.decoder), tokens, beside))
    return lengths


def forecast_rows(accepted: Sequence[Accepted], setting: ForecastSetting) -> list[dict[str, object]]:
    """Compute a forecast row for each accepted length.

    Returns:
        One dict each: `kind` ("forecast"), `source, decoder, label, window, columns` (of a forward, in the middle of an
        image), `model, device, dtype, batch, nfe`, `tokens_per_step` with the range of `Accepted.range`; as low, middle
        and high value `forward_ms, step_ms, seconds, ar_seconds, speed_up, window_cost, images_per_hour` (`NAME_low`,
        `NAME`, `NAME_high`; low is the smaller number), seconds for all images of a batch together; `parts_ms` of the
        middle forward; `assumptions`, sentences.
    """
    ar = next((length.overhead_ms for length in accepted if not length.decoder.drafts), None)
    accepted = [_with_window(length, accepted) for length in accepted]
    overheads = [_overheads(length, setting, ar) for length in accepted]
    return [_row(length, setting, of_steps) for length, of_steps in zip(accepted, overheads, strict=True)]


def _with_window(length: Accepted, others: Sequence[Accepted]) -> Accepted:
    """Add the window to a label that other windows share."""
    windows = {other.decoder.options.get("window") for other in others if other.label == length.label}
    window = length.decoder.options.get("window")
    return length if len(windows) < 2 else replace(length, label=f"{length.label} window={window}")


def _overheads(length: Accepted, setting: ForecastSetting, ar: float | None) -> list[Range]:
    """Return pairs (overhead of a decoder's step, overhead of an AR step) in milliseconds: the measured pair, or the
    extremes of the assumed range. A decoder's overhead is assumed to be at least AR's."""
    if setting.overhead_ms is not None:
        low, high = setting.overhead_ms
        return [(low, low), (high, high)] + [(high, low)] * length.decoder.drafts
    if ar is None or length.overhead_ms is None:
        what = "--overhead-ms run needs runs that were timed one image at a time, including a run of ar"
        raise SpecbenchError(what, "give --overhead-ms LOW,HIGH")
    return [(length.overhead_ms, ar)]


def _row(length: Accepted, setting: ForecastSetting, overheads: Sequence[Range]) -> dict[str, object]:
    model, columns = setting.model, usual_columns(length.decoder, setting.model)
    factors = setting.factors(columns)
    ends = [
        _numbers(length, setting, Reached(bandwidth, flops), overhead, tokens, factor)
        for bandwidth, flops, overhead, tokens, factor in product(
            setting.bandwidth, setting.flops, overheads, length.range, factors
        )
    ]
    shares, factor = Reached(sum(setting.bandwidth) / 2, sum(setting.flops) / 2), sum(factors) / 2
    mean, ar_mean = (sum(values) / len(values) for values in zip(*overheads[:2], strict=True))
    middle = _numbers(length, setting, shares, (mean, ar_mean), length.tokens_per_step, factor)
    row: dict[str, object] = {
        "kind": FORECAST,
        "source": length.source,
        "decoder": length.decoder.name,
        "label": length.label,
        "window": window_of(length.decoder.options),
        "columns": columns,
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
    parts = forward_ms(setting.forward(columns, slots=model.stream), setting.peak, shares)
    row["parts_ms"] = {name: factor * spent for name, spent in parts.items()}
    return row | {"assumptions": assumptions(setting, [length])}


def _numbers(
    length: Accepted, setting: ForecastSetting, reached: Reached, overhead: Range, tokens: float, factor: float
) -> dict[str, float]:
    """Compute the forecast under one set of assumptions: reached fractions of the peaks, overheads of the decoder and
    of AR, tokens per step, and factor of the forward."""
    model, columns = setting.model, usual_columns(length.decoder, setting.model)

    def ms(forward: Forward) -> float:
        return sum(forward_ms(forward, setting.peak, reached).values())

    prefill, single = ms(setting.forward(PROMPT_TOKENS, 0)), ms(setting.forward(1))
    forward = factor * ms(setting.forward(columns, slots=model.stream))
    rounds = 1.0  # drafting rounds per forward
    if interval := length.decoder.options.get("interval"):
        rounds = interval / (interval - 1)
    step = forward + rounds * sum(ms(level) for level in _drafting(length.decoder, setting)) + overhead[0]
    seconds = (prefill + model.stream / tokens * step) / 1e3
    ar_seconds = (prefill + model.stream * (single + overhead[1])) / 1e3
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
    """Forwards of a draft head per step, each with the output matrix. EAGLE: a forward per tree level (a layer and a
    projection of 2d x d). Vertical head: a forward per draft, and its first layer once per step without this matrix."""
    model, network = setting.model, setting.network
    if decoder.head_kind == "vertical":
        drafts, width = int(decoder.options["window"]) - 1, network.width
        first = Size(first_layer_weights(width), 0, width)
        at_once = replace(setting.forward(1), size=first, moved=0.0, v_image=0, columns=drafts)
        size = Size(draft_weights(width) + model.v_image * width, 0, width)
        each = replace(setting.forward(1), size=size, moved=0.0, columns=1)
        return [at_once, *[each] * drafts] if drafts else []
    if decoder.head_kind not in HEAD_SIZES:
        return []
    projection = HEAD_SIZES[decoder.head_kind].projected * network.width**2
    weights = network.layer_weights + projection + model.v_image * network.width
    head = Size(weights, setting.size.kv // network.layers, setting.size.attention // network.layers)
    whole, moved = setting.forward(1), network.moved / network.layers
    return [replace(whole, size=head, moved=moved, columns=columns) for columns in _head_columns(decoder.options)]


def _head_columns(options: Mapping[str, Any]) -> list[int]:
    """Return for each depth the number of columns that an EAGLE head extrapolates: columns with children."""
    if "paths" in options or "tree" not in options:  # several paths, or an adaptive tree of maximum depth
        depth = int(options["window"]) - 1
        return [1, *[int(options.get("paths", 1))] * (depth - 1)][:depth]
    paths = node_paths(str(options["tree"]))
    return [len({path[:-1] for path in paths if len(path) == depth}) for depth in range(1, max(map(len, paths)) + 1)]


def assumptions(setting: ForecastSetting, accepted: Sequence[Accepted]) -> list[str]:
    """Describe the assumptions of a forecast, a sentence each."""
    model, peak, size = setting.model, setting.peak, setting.size
    rows = "1 row" if setting.guidance == 1 else f"2 rows (guidance {setting.guidance:g})"
    others = list(dict.fromkeys(length.model for length in accepted if length.model != model.name))
    if setting.overhead_ms is None:
        overhead = "per step as measured in each run (for AR in the AR run) on its machine; elsewhere it may differ"
    else:
        overhead = (
            f"{_span(*setting.overhead_ms)} ms per step outside forward and drafting (assumed; at most this for AR)"
        )
    lines = [
        f"This is a forecast: none of its numbers was measured on {peak.name}.",
        f"Device: {peak.bandwidth(2**40) / 1e9:,.0f} GB/s and {peak.flops / 1e12:,.4g} TFLOP/s in {setting.dtype} "
        f"({peak.source}); assumed to reach {_percent(setting.bandwidth)} and {_percent(setting.flops)} of these.",
        f"Model: {model.name} in {setting.dtype}; a forward reads {_counted(size.weights)} weights once, and the KV "
        f"cache of each row ({size.kv * BYTES[setting.dtype] / 1024:,.0f} KiB per token); {rows} per image, batch "
        f"{setting.batch}.",
        f"An image has {model.stream:,} stream slots after a prompt of {PROMPT_TOKENS}; every step is computed with "
        "the mean context and its full window.",
        f"Overhead: {overhead}.",
        "The text encoder and the image decoder are left out.",
    ]
    if model.eight_bits:
        lines.append(
            f"--dtype {EIGHT_BITS} {EIGHT_BITS_GAIN}: reading its weights takes at least as long as in {setting.dtype}."
        )
    if peak.products:
        lines.append(
            "Weight products take the time measured on this device for as many columns, at the assumed share; "
            "--window-factor is not applied."
        )
    else:
        if any(setting.factors(usual_columns(length.decoder, model)) != (1, 1) for length in accepted):
            lines.append(
                f"A forward of several columns takes {_span(*setting.window)} times as long as its bytes and "
                "operations predict, compared with AR's; up to 64 columns, an H100 and an H200 took 1.08 to 1.18 times."
            )
        lines.append("Steps are compiled; eager steps take several times as long on a GPU, which waits for the host.")
    if any(length.decoder.head_kind == "eagle" for length in accepted):
        lines.append("A draft head is one layer, a projection and the output matrix; it runs once per tree level.")
    if any(length.decoder.head_kind == "vertical" for length in accepted):
        lines.append(
            "A vertical head is three small layers and the output matrix; it runs once for each draft, but most of "
            "the first layer runs once per step (a few times if the window is wider than an image row)."
        )
    if any("rows-window" in length.decoder.options for length in accepted):
        lines.append("Decoders of several image rows: the active rows are counted as if all advanced at equal rates.")
    if others:
        lines.append(f"Tokens per step were measured on {', '.join(others)}, not on {model.name}.")
        elsewhere = [length for length in accepted if length.decoder.drafts and length.model != model.name]
        lines += _printed_sentences(elsewhere)
    lines += ["A batch row that finishes is refilled at once."] if setting.batch > 1 else []
    return lines


def _printed_sentences(accepted: Sequence[Accepted]) -> list[str]:
    """Describe the tokens per step that papers print for these decoders on other models."""
    lines = []
    for name, printed in {length.label: length.printed for length in accepted if length.printed}.items():
        low, high = (pick(printed, key=lambda entry: entry.tokens_per_step) for pick in (min, max))
        texts = dict.fromkeys(f"{entry.tokens_per_step:.3g} on {entry.model} ({entry.source})" for entry in (low, high))
        lines.append(f"{name}: papers print {' to '.join(texts)}; the ranges include these values.")
    if unknown := dict.fromkeys(length.label for length in accepted if not length.printed):
        why = "no known paper prints tokens per step with these options on another model"
        lines.append(f"Without a range: {', '.join(unknown)}; {why}.")
    return lines


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _percent(shares: Range) -> str:
    return f"{_span(*(100 * share for share in shares))} %"


def _counted(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
