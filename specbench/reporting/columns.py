"""Columns of the printed tables: heading, cell text, and definition printed below the table."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import Kind
from specbench.reporting.marks import window_of
from specbench.reporting.row import SIGNS, ReportRow
from specbench.stats import Estimate
from specbench.stats.intervals import FEW_UNITS, is_real
from specbench.system.foreign_code import edited_text

MISSING = "-"
MARK = "†"  # Marks a difference that is real by `specbench.stats.RULE`
TOO_FEW = "too few"  # Replaces the interval below `specbench.stats.intervals.FEW_UNITS` prompts
FEW_PROMPTS = f"{TOO_FEW.capitalize()}: below {FEW_UNITS} prompts, no interval is printed."


@dataclass(frozen=True)
class ReportColumn:
    """A table column."""

    heading: str
    cell: Callable[[ReportRow], str]  # formats a report row as text
    source: Callable | str | None = None  # the definition, or a function whose docstring is the definition
    better: int = 0  # 1 if higher is better, -1 if lower is better, 0 if neither
    tested: str = ""  # name of its number if a difference from AR is tested: "speedup" or a metric
    value: Callable[[ReportRow], float | None] = lambda row: None  # that number as printed

    @property
    def title(self) -> str:
        """The heading, with an arrow up or down for the better direction."""
        name, bracket, interval = self.heading.partition(" [")
        return f"{name}{('', ' ↑', ' ↓')[self.better]}{bracket}{interval}"

    def best(self, rows: Sequence[ReportRow]) -> float:
        """Best number of the column, as printed; NaN if it has no numbers."""
        values = [value for row in rows if (value := self.value(row)) is not None and math.isfinite(value)]
        return max(values, key=lambda value: self.better * value, default=math.nan)

    def definition(self) -> str | None:
        """Definition of the column on one line after its heading, from a text or the first paragraph of a docstring."""
        text = self.source if isinstance(self.source, str | None) else definition_of(self.source)
        return text and f"{self.heading}: {' '.join(text.partition(': ')[2].split())}"


def definition_of(number: Callable) -> str:
    """First paragraph of the docstring of a function of `specbench.stats`, on one line."""
    if not (text := inspect.getdoc(number)):
        raise SpecbenchError(
            "python removed the docstrings, from which the definitions are printed", "set PYTHONOPTIMIZE=1, not 2"
        )
    return " ".join(text.split("\n\n")[0].split())


def number(value: float | None, digits: int = 2) -> str:
    """Format `value` with `digits` decimals; "-" for None."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:z,.{digits}f}"


def between(low: float, high: float, digits: int = 2) -> str:
    """Format the bounds of an interval: "2.20–2.41", or "-0.1 to 0.2" if a bound is negative."""
    return f"{number(low, digits)}{'–' if low >= 0 else ' to '}{number(high, digits)}"


def with_interval(estimate: Estimate | None, digits: int = 2, unit: str = "", too_few: bool = False) -> str:
    """Format an estimate: "2.31x [2.20, 2.41]", or "2.31x [too few]"."""
    if estimate is None or estimate.value is None:
        return MISSING
    interval = f" [{TOO_FEW}]" if too_few else ""
    if estimate.low is not None and estimate.high is not None:
        interval = f" [{number(estimate.low, digits)}, {number(estimate.high, digits)}]"
    return f"{number(estimate.value, digits)}{unit}{interval}"


def value_of(estimate: Estimate | None) -> float | None:
    """The value of an estimate, or None."""
    return estimate and estimate.value


def _plain(key: str, digits: int, unit: str = "") -> Callable[[ReportRow], str]:
    """A number without its interval."""

    def cell(row: ReportRow) -> str:
        estimate = row.number(key)
        return MISSING if estimate is None else number(estimate.value, digits) + unit

    return cell


def _mean(key: str, digits: int, category: str = "") -> Callable[[ReportRow], str]:
    """A number with its interval, if it has one; prefixed with the category if this field of the row names one."""

    def cell(row: ReportRow) -> str:
        mean, name = row.number(key), category and getattr(row, category)
        text = with_interval(mean, 0 if mean and mean.value >= 1000 else digits)
        return f"{name}: {text}" if name else text

    return cell


def _beside_ar(key: str, digits: int) -> Callable[[ReportRow], str]:
    """Difference from AR, marked if it is real."""

    def cell(row: ReportRow) -> str:
        if not (difference := row.beside_ar.get(key)):
            return MISSING
        text = with_interval(difference, digits, MARK if is_real(difference.p) else "")
        return f"+{text}" if difference.value > 0 else text

    return cell


def _series(key: str, most: int = 5) -> Callable[[ReportRow], str]:
    """Format the first `most` values of a list."""

    def cell(row: ReportRow) -> str:
        values = row.value(key) or ()
        shown = [number(value) for value in values[:most]]
        return " ".join([*shown, "..."] if len(values) > most else shown) or MISSING

    return cell


def _duration(key: str) -> Callable[[ReportRow], str]:
    def cell(row: ReportRow) -> str:
        value = value_of(row.number(key))
        return number(value, 0 if (value or 0) >= 100 else 2)

    return cell


def _speedup(row: ReportRow) -> str:
    over = row.over_ar
    if over.speedup is None:
        return over.speedup_note or MISSING
    if over.baseline == row.run_id:
        return f"{number(over.speedup.value)}x"  # 1 by definition, so it has no interval
    cell = with_interval(over.speedup, unit="x", too_few=True)
    return f"{cell}, {over.speedup_note}" if over.speedup_note else cell


def _short_speedup(row: ReportRow) -> str:
    """The speed-up without the images, which a note below the table names."""
    reason = str(row.over_ar.speedup_note or "").partition(" (")[0]
    note = None if row.over_ar.speedup is not None else reason
    return _speedup(replace(row, over_ar=replace(row.over_ar, speedup_note=note)))


def _seconds(row: ReportRow) -> str:
    value = value_of(row.latency_ms)
    return MISSING if value is None else number(value / 1e3, 2 if value >= 1e3 else 3)


def _roofline(row: ReportRow) -> str:
    return "wrong roofline" if row.roofline_note else _plain("over_floor", 2, "x")(row)


def _fastest(row: ReportRow) -> str:
    return MISSING if row.speedup_fastest is None else f"{number(row.speedup_fastest.value)}x ({row.fastest_ar})"


def _gap(row: ReportRow) -> str:
    if row.zero_probability:
        return f"inf ({row.zero_probability} tokens of probability 0)"
    error = "" if row.nll_gap_se is None else f" ± {number(row.nll_gap_se, 3)}"
    return f"{row.nll_gap.value:+.3f}{error}" if row.nll_gap is not None else MISSING


def _images(row: ReportRow) -> str:
    return f"{row.n} (+{row.failed} failed)" if row.failed else str(row.n)


_FASTEST = (
    "vs fastest AR: speed-up over the fastest AR configuration among the runs on this machine (in brackets: number "
    "format, threads, compiled)."
)
_BY_DEPTH = (
    "Acceptance by depth: acceptance at each draft depth, counted from 1; in a draft tree a depth counts as accepted "
    "if one of the siblings verified there is accepted."
)
_WINDOW = (
    "Window: tokens per target forward, without siblings and further paths (for a static draft tree: its nodes and "
    "the root token); varies for ZipAR."
)
_BESIDE_AR = "difference from AR over the images in common, with its 95 % interval over prompts."
_LATENCY = "Latency: seconds per image from the start of prefill to the last token, mean over images decoded alone."
_LOSSLESS = (
    "Lossless: the joint distribution of the image tokens equals AR sampling; theirs: tokens and times come from "
    "another program."
)

FAILED_AUDIT = "NOT LOSSLESS: fails its audit"


def failed_audit(row: ReportRow) -> bool:
    """Whether the decoder is declared lossless but the audit of this run found a deviation."""
    return bool(row.lossless and row.audit and row.audit.failed)


def _label(row: ReportRow) -> str:
    """Label of a decoder, with a failed audit. For a lossy decoder it means: recorded values are not the model's."""
    if not (row.audit and row.audit.failed):
        return row.label
    return f"{row.label} ({FAILED_AUDIT if row.lossless else row.audit.verdict})"


def audit_cell(row: ReportRow) -> str:
    """The verdict of the stored audit in one line."""
    if not (audit := row.audit):
        return MISSING
    if audit.verdict == "deviates":
        bound = with_interval(audit.tv, 3)
        cell = f"deviates, TV >= {bound}" if value_of(audit.tv) else "deviates (too few images for its size)"
    elif audit.verdict != "consistent":
        cell = audit.verdict
    else:
        cell = f"consistent (detectable: {number(audit.detectable, 3)})"
    notes = [f"n={audit.images}"] * (audit.images != row.n) + ["out of date"] * (not audit.current)
    return f"{cell} ({', '.join(notes)})" if notes else cell


def _with_window(row: ReportRow) -> str:
    label, window = _label(row), row.options.get("window")
    return label if window is None else label.replace(row.label, f"{row.label} window={window}", 1)


def _declared(row: ReportRow) -> str:
    return "theirs" if row.imported else "yes" if row.lossless else "no"


def _exactness(row: ReportRow) -> str:
    """Whether a decoder is lossless, and the result of the audit of its run."""
    audit = row.audit
    cell = _declared(row)
    if not audit:
        return cell
    if audit.verdict == "consistent":
        least = "" if audit.detectable is None else f" to TV {number(audit.detectable, 3)}"
        shown = ("audited" if row.lossless else "nothing seen") + least + " in part" * (audit.images != row.n)
    elif audit.verdict == "deviates":
        shown = f"TV ≥ {number(audit.tv.value, 3)}" if value_of(audit.tv) else "audit deviates"
    else:
        shown = audit.verdict
    return f"{cell}, {shown}" + " (out of date)" * (not audit.current)


_SPEEDUP = "speedup", lambda row: row.over_ar.speedup and round(row.over_ar.speedup.value, 2)
DECODER = ReportColumn("decoder", _label)
WINDOW = ReportColumn("window", lambda row: str(window_of(row.options) or "-"), _WINDOW)
IMAGES = ReportColumn("images", _images)

FASTEST = ReportColumn("vs fastest AR", _fastest, _FASTEST, 1)
NFE = ReportColumn("NFE", _plain("nfe", 1), stats.nfe, -1)
TOKENS_PER_STEP = ReportColumn("tokens per step", _plain("tokens_per_step", 2), stats.tokens_per_step, 1)

NFE_BOUNDED = ReportColumn("NFE [95 %]", _mean("nfe", 1), stats.nfe, -1)
TOKENS_BOUNDED = ReportColumn("tokens per step [95 %]", _mean("tokens_per_step", 2), stats.tokens_per_step, 1)
ROOFLINE = ReportColumn("roofline ratio", _roofline, stats.roofline_ratio, -1)
SPEED = (
    DECODER,
    WINDOW,
    IMAGES,
    NFE_BOUNDED,
    TOKENS_BOUNDED,
    ReportColumn("window cost", _plain("window_cost", 2, "x"), stats.window_cost),
    ReportColumn("overhead", _plain("overhead", 2, "x"), stats.overhead),
    ReportColumn("speed-up [95 %]", _speedup, stats.speedup, 1, *_SPEEDUP),
    FASTEST,
    ReportColumn("step ms [95 %]", _mean("step_ms", 2), stats.step_ms, -1),
    ReportColumn("latency ms [95 %]", _mean("latency_ms", 1), stats.latency_ms, -1),
    ReportColumn("end-to-end ms [95 %]", _mean("latency_e2e_ms", 1), stats.latency_e2e_ms, -1),
    ROOFLINE,
)

LOSSLESS = ReportColumn("lossless", _declared, _LOSSLESS)
TOKENS_PER_SECOND = ReportColumn("tokens per second", _plain("tokens_per_second", 1), stats.tokens_per_second, 1)
IMAGES_PER_HOUR = ReportColumn("images per hour", _plain("images_per_hour", 0), stats.images_per_hour, 1)

THROUGHPUT = (DECODER, WINDOW, IMAGES, NFE_BOUNDED, TOKENS_BOUNDED, IMAGES_PER_HOUR, ROOFLINE)

QUALITY = (
    DECODER,
    WINDOW,
    LOSSLESS,
    ReportColumn("NLL - H gap", _gap, stats.nll_gap),
    ReportColumn("log p [95 %]", _mean("logp_mean", 3), stats.logp_mean),
    ReportColumn(
        "log p - AR [95 %]", _beside_ar("logp_mean", 3), f"Log p - AR: {_BESIDE_AR} {MARK}: real. {stats.RULE}"
    ),
    ReportColumn("std", _plain("logp_std", 2), stats.logp_std),
    ReportColumn("perplexity [95 %]", _mean("perplexity", 2), stats.perplexity),
    ReportColumn("entropy [95 %]", _mean("entropy_mean", 3), stats.entropy_mean),
    ReportColumn("entropy - AR [95 %]", _beside_ar("entropy_mean", 3), f"Entropy - AR: {_BESIDE_AR}"),
    ReportColumn("acceptance [95 %]", _mean("acceptance", 3), stats.acceptance, 1),
    ReportColumn("acceptance length [95 %]", _mean("acceptance_length", 2), stats.acceptance_length, 1),
)

FIRST = (
    ReportColumn("decoder", _with_window),
    IMAGES,
    NFE,
    ReportColumn("latency s", _seconds, _LATENCY, -1),
    ReportColumn("speed-up [95 %]", _short_speedup, stats.speedup, 1, *_SPEEDUP),
    TOKENS_PER_STEP,
    IMAGES_PER_HOUR,
)
_SHOWN = "Audited runs add the lower bound on the per-token total variation (TV), or the smallest detectable TV."
EXACTNESS = ReportColumn("lossless", _exactness, f"{_LOSSLESS} {_SHOWN}")

DRAFTS = (
    DECODER,
    ReportColumn("rounds", _plain("rounds", 1), stats.rounds),
    ReportColumn("drafting ms", _plain("draft_ms", 1), stats.draft_ms),
    ReportColumn("acceptance by depth", _series("acceptance_by_offset"), _BY_DEPTH),
    ReportColumn("acceptance by sibling", _series("acceptance_by_sibling"), stats.acceptance_by_sibling),
    ReportColumn("TV(P, Q) by depth", _series("draft_tv_by_depth"), stats.draft_tv_by_depth),
    ReportColumn("Theorem 2 bound", _plain("theorem2_bound", 2), stats.theorem2_bound),
)
"""Columns of decoders with a draft head or relaxed acceptance."""

TAILS = (
    DECODER,
    ReportColumn("latency p50 [95 %]", _mean("latency_p50_ms", 0), stats.latency_p50_ms, -1),
    ReportColumn("latency p95 [95 %]", _mean("latency_p95_ms", 0), stats.latency_p95_ms, -1),
    ReportColumn(
        "slowest category [95 %]", _mean("slowest_category_ms", 0, "slowest_category"), stats.slowest_category
    ),
    ReportColumn("tokens per step p50 [95 %]", _mean("tokens_per_step_p50", 2), stats.tokens_per_step_p50, 1),
    ReportColumn("tokens per step p95 [95 %]", _mean("tokens_per_step_p95", 2), stats.tokens_per_step_p95, 1),
    ReportColumn(
        "its slowest category [95 %]",
        _mean("fewest_tokens_per_step", 2, "fewest_tokens_category"),
        stats.fewest_tokens_category,
    ),
)
"""Columns on the slow images of a run."""

STAGES = (
    DECODER,
    WINDOW,
    ReportColumn("steps of stage 2", _plain("stage2_nfe", 1), stats.stage2_nfe, -1),
    ReportColumn("acceptance of stage 2", _plain("stage2_acceptance", 3), stats.stage2_acceptance),
    ReportColumn("stage 2 ms", _duration("stage2_ms"), stats.stage2_ms, -1),
    ReportColumn("both stages ms", _duration("both_stages_ms"), stats.both_stages_ms, -1),
)
"""Columns of models with a second stage."""

TRACED = (
    ReportColumn("TV(p, q)", _plain("draft_tv", 3), stats.draft_tv),
    ReportColumn("top-1 of p [95 %]", _mean("top1", 3), stats.top1),
    ReportColumn("top-1 of q", _plain("draft_top1", 3), stats.draft_top1),
)
"""Columns of runs with --trace."""

AUDIT = (
    ReportColumn(
        "audit",
        audit_cell,
        "Audit: whether the tokens are exact samples of the model (specbench audit --run). If they deviate, a lower "
        "bound on the mean total variation per token with its 95 % interval; else the deviation that the audit detects "
        "with probability 0.95.",
    ),
)
"""Shown if a run was audited."""


def first_columns(rows: Sequence[ReportRow]) -> list[ReportColumn]:
    """Return the columns of the first table, as in a paper; later tables have the others. Times of another program are
    shown as tokens per second, because its number of steps may be unknown."""
    pace = [TOKENS_PER_SECOND] if any(row.imported for row in rows) else []
    return [*FIRST, *pace, *score_columns(rows), EXACTNESS]


def score_columns(rows: Sequence[ReportRow]) -> list[ReportColumn]:
    """Build one column per metric and fingerprint, because differently computed values are not comparable."""
    scores = [score for row in rows for score in row.scores]
    whole = dict.fromkeys(score.metric for score in scores if score.whole)
    bounded = {score.metric: score.kind for score in scores if score.estimate.low is not None}
    return [column for name in whole for column in _columns_of(name, name, rows, _summary(name, bounded.get(name)))]


def part_columns(rows: Sequence[ReportRow]) -> dict[str, list[ReportColumn]]:
    """Build the columns for the parts of metrics ("metric:part"), by metric; headings are the part names."""
    columns: dict[str, list[ReportColumn]] = {}
    for name in dict.fromkeys(score.metric for row in rows for score in row.scores if not score.whole):
        metric, _, part = name.partition(":")
        columns.setdefault(metric, []).extend(_columns_of(name, part, rows, None))
    return columns


def _columns_of(name: str, heading: str, rows: Sequence[ReportRow], definition: str | None) -> list[ReportColumn]:
    signs = {score.fingerprint: SIGNS[score.better] for row in rows for score in row.scores if score.metric == name}
    return [
        ReportColumn(heading + version, _score_cell(name, made), definition, signs[made], name, _score(name, made))
        for made, version in score_versions(name, rows).items()
    ]


def score_versions(name: str, rows: Sequence[ReportRow]) -> dict[str, str]:
    """By fingerprint, a text that distinguishes scores of a metric: edit time of plug-in code, or the fingerprint."""
    scores = [score for row in rows for score in row.scores if score.metric == name]
    edits = {score.fingerprint: edited_text(score.edited) if score.edited else "" for score in scores}
    alone = {digest for digest, text in edits.items() if text and list(edits.values()).count(text) == 1}
    which = {digest: text if digest in alone else f"{text} {digest}".strip() for digest, text in edits.items()}
    return {digest: f" ({text})" if len(which) > 1 else "" for digest, text in which.items()}


def _score_cell(name: str, fingerprint: str) -> Callable[[ReportRow], str]:
    def cell(row: ReportRow) -> str:
        if (score := row.score(name, fingerprint)) is None:
            return MISSING
        some = "" if not score.whole or score.n == row.n else f" (n={score.n})"
        return with_interval(score.estimate, 3, too_few=score.too_few) + some

    return cell


def _score(name: str, fingerprint: str) -> Callable[[ReportRow], float | None]:
    def value(row: ReportRow) -> float | None:
        score = row.score(name, fingerprint)
        return None if score is None or score.estimate.value is None else round(score.estimate.value, 3)

    return value


def _summary(metric: str, bounded: Kind | None) -> str | None:
    """Definition of a metric; `bounded`: the kind of its scores if they have intervals."""
    interval = ", with 95 % confidence interval" if bounded else ""
    if bounded == "proportions":
        interval += " (Wilson of each part, its n from the variance over prompts with n - 1; combined by MOVER)"
    try:
        return f"{metric}: {metric_catalog.metric_summary(metric)}{interval}."
    except SpecbenchError:  # the metric belongs to a plug-in that is not installed
        return None
