"""Columns of the printed tables: heading, cell text, and definition printed below the table."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import Kind
from specbench.reporting.marks import window_of
from specbench.reporting.row import ARROWS, SIGNS, ReportRow, ShownScore
from specbench.stats import Better, Estimate, Number
from specbench.stats.intervals import FEW_UNITS, is_real
from specbench.store.run_store import AuditVerdict

MISSING = "-"
MARK = "†"  # Marks a difference that is real by `specbench.stats.RULE`
TOO_FEW = "too few"  # Text instead of an interval below `specbench.stats.intervals.FEW_UNITS` prompts
FEW_PROMPTS = f"{TOO_FEW.capitalize()}: below {FEW_UNITS} prompts, no interval is printed."


@dataclass(frozen=True)
class ReportColumn:
    """A table column."""

    heading: str
    cell: Callable[[ReportRow], str]  # formats a report row as text
    source: Number[..., Any] | str | None = None  # the number in the cells, or the column's definition
    better: Better | None = None
    tested: str = ""  # name of the number, "speedup" or a metric, if its difference from AR is tested
    value: Callable[[ReportRow], float | None] = lambda row: None  # the tested number, rounded as printed
    kept: bool = False  # whether it is shown even if all rows have the same value
    brief: bool = False  # whether a narrow table has it
    words: bool = False  # whether its cells are words, aligned left
    against: bool = False  # whether it compares with a baseline that the reader chose; such columns are never left out
    also: str = ""  # further name for `--columns`

    @property
    def title(self) -> str:
        """The heading, with an arrow up or down for the better direction."""
        name, bracket, interval = self.heading.partition(" [")
        return f"{name}{f' {ARROWS[self.better]}' if self.better else ''}{bracket}{interval}"

    def best(self, rows: Sequence[ReportRow]) -> float:
        """Return the best number of the column, as printed; NaN if there are no numbers."""
        values = [value for row in rows if (value := self.value(row)) is not None and math.isfinite(value)]
        sign = SIGNS[self.better] if self.better else 0
        return max(values, key=lambda value: sign * value, default=math.nan)

    def definition(self) -> str | None:
        """One line: heading and definition of the column."""
        text = self.source.definition if isinstance(self.source, Number) else self.source
        return text and f"{self.heading}: {text.partition(': ')[2]}"


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


def bounds(estimate: Estimate, digits: int = 2) -> str:
    """Format the interval of an estimate: "2.20–2.41"; empty if there is none."""
    low, high = estimate.low, estimate.high
    return "" if low is None or high is None else between(low, high, digits)


def bracketed(estimate: Estimate, digits: int = 2) -> str:
    """Format the interval of an estimate for a sentence: " [2.20–2.41]"; empty if there is none."""
    return f" [{text}]" if (text := bounds(estimate, digits)) else ""


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
    return None if estimate is None else estimate.value


_Number = Number[..., Any]


def _plain(heading: str, of: _Number, digits: int, unit: str = "") -> ReportColumn:
    """Make the column of a number without its interval."""

    def cell(row: ReportRow) -> str:
        estimate = row.number(of.name)
        return MISSING if estimate is None else number(estimate.value, digits) + unit

    return ReportColumn(heading, cell, of, of.better)


def _bounded(heading: str, of: _Number, digits: int, key: str = "") -> ReportColumn:
    """Make the column of a number with its interval, if any. `key`: key of the number, if `of` is a category."""

    def cell(row: ReportRow) -> str:
        estimate = row.number(key or of.name)
        text = with_interval(estimate, 0 if estimate and estimate.value >= 1000 else digits)
        category = key and getattr(row, of.name)
        return f"{category}: {text}" if category else text

    return ReportColumn(f"{heading} [95 %]", cell, of, of.better)


def _beside_ar(key: str, digits: int) -> Callable[[ReportRow], str]:
    """Return a function that formats the difference from AR, with `MARK` if it is real."""

    def cell(row: ReportRow) -> str:
        if not (difference := row.beside_ar.get(key)):
            return MISSING
        text = with_interval(difference, digits, MARK if is_real(difference.p) else "")
        return f"+{text}" if difference.value > 0 else text

    return cell


def _series(heading: str, of: _Number) -> ReportColumn:
    """Make the column of the first five values of a list."""

    def cell(row: ReportRow) -> str:
        values = row.series(of.name)
        shown = [number(value) for value in values[:5]]
        return " ".join([*shown, "..."] if len(values) > 5 else shown) or MISSING

    return ReportColumn(heading, cell, of)


def _duration(heading: str, of: _Number) -> ReportColumn:
    def cell(row: ReportRow) -> str:
        value = value_of(row.number(of.name))
        return number(value, 0 if (value or 0) >= 100 else 2)

    return ReportColumn(heading, cell, of, of.better)


def _speedup(row: ReportRow) -> str:
    over = row.over_ar
    if over.speedup is None:
        return over.speedup_note or MISSING
    if over.baseline == row.run_id:
        return f"{number(over.speedup.value)}x"  # 1 by definition, so it has no interval
    cell = with_interval(over.speedup, unit="x", too_few=True)
    return f"{cell}, {over.speedup_note}" if over.speedup_note else cell


def _short_speedup(row: ReportRow) -> str:
    """Format the speed-up without the number of images, because a note below the table states the number."""
    reason = str(row.over_ar.speedup_note or "").partition(" (")[0]
    note = None if row.over_ar.speedup is not None else reason
    return _speedup(replace(row, over_ar=replace(row.over_ar, speedup_note=note)))


def _seconds(row: ReportRow) -> str:
    value = value_of(row.number("latency_ms"))
    return MISSING if value is None else number(value / 1e3, 2 if value >= 1e3 else 3)


def _fastest(row: ReportRow) -> str:
    fastest = row.over_fastest
    return f"{number(fastest.speedup_fastest.value)}x ({fastest.fastest_ar})" if fastest.speedup_fastest else MISSING


def _roofline(row: ReportRow) -> str:
    if row.roofline.roofline_note:
        return "peak too low"
    return MISSING if row.roofline.over_floor is None else f"{number(row.roofline.over_floor)}x"


def _gap(row: ReportRow) -> str:
    gap, error = row.number("nll_gap"), value_of(row.number("nll_gap_se"))
    if impossible := row.by_key.get("zero_probability"):
        return f"inf ({impossible} tokens of probability 0)"
    return MISSING if gap is None else f"{gap.value:+.3f}" + ("" if error is None else f" ± {number(error, 3)}")


_FASTEST = (
    "vs fastest AR: speed-up over the fastest AR configuration among the runs on this machine (in brackets: its "
    "number format, its threads, whether compiled)."
)
_WINDOW = (
    "Window: tokens per target forward, not counting siblings and further paths; for a static draft tree: its nodes "
    "and the root token; varies for ZipAR."
)
_BESIDE_AR = "difference from AR over the images in common, with its 95 % interval over prompts."
_LATENCY = "Latency: seconds per image from the start of prefill to the last token, mean over images decoded alone."
_LOSSLESS = (
    "Lossless: yes if the joint distribution of the image tokens equals AR sampling; theirs: tokens and times come "
    "from another program."
)

FAILED_AUDIT = "NOT LOSSLESS: fails its audit"


def failed_audit(row: ReportRow) -> bool:
    """Return whether the decoder is declared lossless but the audit of this run found a deviation."""
    return bool(row.lossless and row.audit and row.audit.failed)


def _label(row: ReportRow) -> str:
    """Label of a decoder, with a remark if its audit failed. Lossy decoders fail by values that are not the model's."""
    if not (row.audit and row.audit.failed):
        return row.label
    why = "; why: audit --run" if row.imported else ""
    return f"{row.label} ({FAILED_AUDIT if row.lossless else row.audit.verdict}{why})"


def audit_cell(row: ReportRow) -> str:
    """Format the verdict of the stored audit in one line."""
    if not (audit := row.audit):
        return MISSING
    if audit.verdict == AuditVerdict.DEVIATES:
        bound = with_interval(audit.tv, 3)
        cell = f"deviates, TV >= {bound}" if value_of(audit.tv) else "deviates (too few images to measure its size)"
    elif audit.verdict != AuditVerdict.CONSISTENT:
        cell = audit.verdict
    else:
        cell = f"consistent (detectable: {number(audit.detectable, 3)})"
    notes = [f"n={audit.images}"] * (audit.images != row.n) + ["out of date"] * (not audit.current)
    return f"{cell} ({', '.join(notes)})" if notes else cell


def _with_window(row: ReportRow) -> str:
    label, window = _label(row), row.options.get("window")
    return label if window is None else label.replace(row.label, f"{row.label} window={window}", 1)


def _exactness(row: ReportRow) -> str:
    """Format whether a decoder is lossless, and the result of its run's audit."""
    cell = row.claim
    if not (audit := row.audit):
        return cell
    if audit.verdict == AuditVerdict.CONSISTENT:
        least = "" if audit.detectable is None else f" to TV {number(audit.detectable, 3)}"
        shown = ("audited" if row.lossless else "nothing seen") + least + " in part" * (audit.images != row.n)
    elif audit.verdict == AuditVerdict.DEVIATES:
        shown = f"TV ≥ {number(audit.tv.value, 3)}" if audit.tv and audit.tv.value else "audit deviates"
    else:
        shown = audit.verdict
    return f"{cell}, {shown}" + " (out of date)" * (not audit.current)


SPEEDUP = ReportColumn(
    "speed-up [95 %]",
    _speedup,
    stats.speedup,
    stats.speedup.better,
    tested="speedup",
    value=lambda row: round(row.over_ar.speedup.value, 2) if row.over_ar.speedup else None,
    kept=True,
)
DECODER = ReportColumn("decoder", _label, kept=True)
WINDOW = ReportColumn("window", lambda row: str(window_of(row.options) or "-"), _WINDOW)
IMAGES = ReportColumn("images", lambda row: f"{row.n} (+{row.failed} failed)" if row.failed else str(row.n))
FASTEST = ReportColumn("vs fastest AR", _fastest, _FASTEST, "higher")
NFE = replace(_plain("NFE", stats.nfe, 1), kept=True, also="steps")
TOKENS_PER_STEP = _plain("tokens per step", stats.tokens_per_step, 2)
NFE_BOUNDED = replace(_bounded("NFE", stats.nfe, 1), also="steps")
TOKENS_BOUNDED = _bounded("tokens per step", stats.tokens_per_step, 2)
ROOFLINE = ReportColumn("roofline ratio", _roofline, stats.roofline_ratio, "lower")
SPEED = (
    DECODER,
    WINDOW,
    IMAGES,
    NFE_BOUNDED,
    TOKENS_BOUNDED,
    _plain("window cost", stats.window_cost, 2, unit="x"),
    _plain("overhead", stats.overhead, 2, unit="x"),
    SPEEDUP,
    FASTEST,
    _bounded("step ms", stats.step_ms, 2),
    _bounded("latency ms", stats.latency_ms, 1),
    _bounded("end-to-end ms", stats.latency_e2e_ms, 1),
    ROOFLINE,
)

LOSSLESS = ReportColumn("lossless", lambda row: row.claim, _LOSSLESS, kept=True, words=True)
TOKENS_PER_SECOND = _plain("tokens per second", stats.tokens_per_second, 1)
IMAGES_PER_HOUR = _plain("images per hour", stats.images_per_hour, 0)

THROUGHPUT = (DECODER, WINDOW, IMAGES, NFE_BOUNDED, TOKENS_BOUNDED, IMAGES_PER_HOUR, ROOFLINE)

QUALITY = (
    DECODER,
    WINDOW,
    LOSSLESS,
    ReportColumn("NLL - H gap", _gap, stats.nll_gap),
    _bounded("log p", stats.logp_mean, 3),
    ReportColumn(
        "log p - AR [95 %]", _beside_ar("logp_mean", 3), f"Log p - AR: {_BESIDE_AR} {MARK}: real. {stats.RULE}"
    ),
    _plain("std", stats.logp_std, 2),
    _bounded("perplexity", stats.perplexity, 2),
    _bounded("entropy", stats.entropy_mean, 3),
    ReportColumn("entropy - AR [95 %]", _beside_ar("entropy_mean", 3), f"Entropy - AR: {_BESIDE_AR}"),
    _bounded("acceptance", stats.acceptance, 3),
    _bounded("acceptance length", stats.acceptance_length, 2),
)

FIRST = (
    replace(DECODER, cell=_with_window),
    IMAGES,
    NFE,
    ReportColumn("latency s", _seconds, _LATENCY, "lower", brief=True, also="latency"),
    replace(SPEEDUP, cell=_short_speedup),
    TOKENS_PER_STEP,
    IMAGES_PER_HOUR,
)
_SHOWN = "For audited runs, also the lower bound on the per-token total variation (TV), or the smallest detectable TV."
EXACTNESS = replace(LOSSLESS, cell=_exactness, source=f"{_LOSSLESS} {_SHOWN}")

DRAFTS = (
    DECODER,
    _plain("rounds", stats.rounds, 1),
    _plain("drafting ms", stats.draft_ms, 1),
    _series("acceptance by depth", stats.acceptance_by_offset),
    _series("acceptance by sibling", stats.acceptance_by_sibling),
    _series("TV(P, Q) by depth", stats.draft_tv_by_depth),
    _plain("Theorem 2 bound", stats.theorem2_bound, 2),
)
"""Columns that apply to decoders with a draft head or relaxed acceptance."""

TAILS = (
    DECODER,
    _bounded("latency p50", stats.latency_p50_ms, 0),
    _bounded("latency p95", stats.latency_p95_ms, 0),
    _bounded("slowest category", stats.slowest_category, 0, key="slowest_category_ms"),
    _bounded("tokens per step p50", stats.tokens_per_step_p50, 2),
    _bounded("tokens per step p95", stats.tokens_per_step_p95, 2),
    _bounded("its slowest category", stats.fewest_tokens_category, 2, key="fewest_tokens_per_step"),
)
"""Columns about the slowest images of a run."""

STAGES = (
    DECODER,
    WINDOW,
    _plain("steps of stage 2", stats.stage2_nfe, 1),
    _plain("acceptance of stage 2", stats.stage2_acceptance, 3),
    _duration("stage 2 ms", stats.stage2_ms),
    _duration("both stages ms", stats.both_stages_ms),
)
"""Columns that apply to models with a second stage."""

TRACED = (
    _plain("TV(p, q)", stats.draft_tv, 3),
    _bounded("top-1 of p", stats.top1, 3),
    _plain("top-1 of q", stats.draft_top1, 3),
)
"""Columns that apply to runs with --trace."""

AUDIT = (
    ReportColumn(
        "audit",
        audit_cell,
        "Audit: whether the tokens are exact samples of the model (specbench audit --run). If they deviate: lower "
        "bound on the mean total variation per token, with its 95 % interval; otherwise: the deviation that the audit "
        "detects with probability 0.95.",
        words=True,
    ),
)
"""Column that is shown if a run was audited."""


def first_columns(rows: Sequence[ReportRow]) -> list[ReportColumn]:
    """Return the columns of the first table, as in a paper. With imported tokens, tokens per second are added, because
    the number of steps may be unknown."""
    pace = [TOKENS_PER_SECOND] if any(row.imported for row in rows) else []
    return [*FIRST, *pace, *score_columns(rows), EXACTNESS]


def score_columns(rows: Sequence[ReportRow]) -> list[ReportColumn]:
    """Build one column per metric and fingerprint, because differently computed values are not comparable."""
    scores = [score for row in rows for score in row.scores]
    whole = dict.fromkeys(score.metric for score in scores if score.whole)
    bounded = {score.metric: score.kind for score in scores if score.estimate.low is not None}
    summaries = {score.metric: _summary(score, bounded.get(score.metric)) for score in scores if score.whole}
    return [column for name in whole for column in _columns_of(name, name, rows, summaries[name])]


def part_columns(rows: Sequence[ReportRow]) -> dict[str, list[ReportColumn]]:
    """Build {metric: columns of its parts}, for scores "metric:part"; headings are the names of the parts."""
    columns: dict[str, list[ReportColumn]] = {}
    for name in dict.fromkeys(score.metric for row in rows for score in row.scores if not score.whole):
        metric, _, part = name.partition(":")
        columns.setdefault(metric, []).extend(_columns_of(name, part, rows, None))
    return columns


def _columns_of(name: str, heading: str, rows: Sequence[ReportRow], definition: str | None) -> list[ReportColumn]:
    better = {score.fingerprint: score.better for row in rows for score in row.scores if score.metric == name}
    columns = []
    for fingerprint, version in score_versions(name, rows).items():

        def cell(row: ReportRow, fingerprint: str = fingerprint) -> str:
            if (score := row.score(name, fingerprint)) is None:
                return MISSING
            some = "" if not score.whole or score.n == row.n else f" (n={score.n})"
            return with_interval(score.estimate, 3, too_few=score.too_few) + some

        def value(row: ReportRow, fingerprint: str = fingerprint) -> float | None:
            score = row.score(name, fingerprint)
            return None if score is None or score.estimate.value is None else round(score.estimate.value, 3)

        columns.append(ReportColumn(heading + version, cell, definition, better[fingerprint], name, value))
    return columns


def score_versions(name: str, rows: Sequence[ReportRow]) -> dict[str, str]:
    """Map fingerprints of a metric to texts that distinguish its scores: " (fingerprint)" if there are several."""
    which = dict.fromkeys(score.fingerprint for row in rows for score in row.scores if score.metric == name)
    return {digest: f" ({digest})" if len(which) > 1 else "" for digest in which}


def _summary(score: ShownScore, bounded: Kind | None) -> str:
    """Return the definition of a score's metric; for a plug-in that is not installed, the facts stored with the score.
    `bounded`: the kind of the score if scores of the metric have intervals, else None."""
    metric = score.metric
    interval = ", with 95 % confidence interval" if bounded else ""
    if bounded == "proportions":
        interval += " (Wilson, effective n from the variance over prompts with divisor n - 1)"
    try:
        return f"{metric}: {metric_catalog.metric_summary(metric)}{interval}."
    except SpecbenchError:
        source = json.loads(score.stored.get("identity") or "{}").get("class")
        facts = (f"{score.better} values are better", score.stored.get("unit"), source and f"defined by {source}")
        return f"{metric}: {', '.join(filter(None, facts))}{interval}."
