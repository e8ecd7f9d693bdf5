"""Comparison of two runs on their common images: speed-up, score differences, p-values, gates for scripts, and a
verdict in words.

Run A is the baseline: a speed-up above 1 means that B is faster; a difference is the score of B minus the score of A.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench import stats
from specbench.errors import GATE, SpecbenchError, unknown_name
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import Settings, made_score
from specbench.metrics.score_store import difference, of_same_captions, read_scores, stored_difference
from specbench.reporting.columns import MARK, MISSING, TOO_FEW, bounds, bracketed, number
from specbench.reporting.comparability import Run, decoded_apart, is_ar, mismatched_fields
from specbench.reporting.report_rows import eager_ar, report_row, stalled_images
from specbench.reporting.row import ARROWS, SIGNS, Against, Compared, OverAR, ReportRow, Stalled, unique_names
from specbench.stats.intervals import CHANGE, FEW_UNITS
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY
from specbench.system.foreign_code import code_of, edited_text
from specbench.system.plugins import is_reference

CONSTANT_NOTE = "every prompt has the same difference, so there is no interval"
FEW_NOTE = f"too few prompts for an interval or a p-value (fewer than {FEW_UNITS})"
FEW_IMAGES_NOTE = "too few images for an interval"  # not more images than features
"""Notes on a number whose interval is omitted."""
OTHER_CAPTIONS = "no images of the same captions: the runs share only the ids of their prompts"
_NO_NUMBER = "run B has no single number of this name"
_UNPAIRED = "no paired difference is defined for this metric"
HEADINGS = ("number", "value", "95 %", "p (Holm)", "images", "prompts needed")
_NAMES = dict.fromkeys((*stats.PAIR_NUMBERS, "speedup_reverse"), "") | {
    "speedup": "speed-up ↑",
    "step_ratio": "steps saved ↑",
    "window_cost": "window cost ↓",
    "overhead": "overhead ↓",
    "latency_a_ms": "latency of A, ms",
    "median_a_ms": "latency p50 of A, ms",
    "latency_b_ms": "latency of B, ms",
    "median_b_ms": "latency p50 of B, ms",
}
"""{key of a number about speed: printed name, "" if not printed}. Other numbers are score differences."""
MARKED = f"{MARK}: differs from the baseline. {stats.RULE}"
_LEAST_P = 0.0001
_BOUNDS = {"": "value", ".low": "low", ".high": "high"}
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def compare_runs(a: Path, b: Path, settings: Settings | None = None, may_be_one: bool = False) -> list[Compared]:
    """Compare the speed and all scores of two runs.

    `speedup` is B over A, `speedup_reverse` A over B, followed by the factors of `speedup` and the latencies per image,
    `latency_a_ms, median_a_ms, latency_b_ms, median_b_ms`, if runs have latencies; other names are metrics,
    with the fingerprint if a metric has several.
    `p` is the two-sided p-value of no difference, `p_holm` its correction (`specbench.stats.holm`),
    `prompts_needed` the number of prompts that detects a change of 2 % (of the speed-up, or of A's score). If values
    cannot be compared, the number is None and `note` gives the reason.
    """
    if a.resolve() == b.resolve() and not may_be_one:
        raise SpecbenchError(f"both names refer to the run '{a.name}'", "name two runs: specbench list runs")
    runs = Run(a), Run(b)
    latencies = (row for name, run in zip("ab", runs, strict=True) for row in _latency_rows(name, run))
    return with_fingerprints(corrected([*_speed_rows(*runs), *latencies, *quality_rows(a, b, settings)]))


def with_fingerprints(rows: Sequence[Compared]) -> list[Compared]:
    """Append the fingerprint to names that several rows have."""
    count = Counter(row.name for row in rows)
    return [replace(row, name=f"{row.name} ({row.fingerprint})") if count[row.name] > 1 else row for row in rows]


def against(baseline: Path, run: Path) -> dict[str, Compared]:
    """Compare a run with a baseline; return {name: speed-up or score difference}."""
    rows = compare_runs(baseline, run, may_be_one=True)
    return {row.name: row for row in rows if row.name == "speedup" or row.name not in _NAMES}


def compare_rows(rows: Sequence[ReportRow], baseline: str) -> list[ReportRow]:
    """Set `against` of report rows: numbers compared with the baseline in the same model and setting. `baseline`: name
    of a row or decoder, or the start of a run id."""
    alike: dict[object, list[ReportRow]] = {}
    for row in rows:
        alike.setdefault((row.model, row.setting), []).append(row)
    bases = {setting: base for setting, group in alike.items() if (base := _base(unique_names(group), baseline))}

    def compared(row: ReportRow) -> ReportRow:
        name, base = bases.get((row.model, row.setting), ("", row))
        if base is row:
            return row
        return replace(row, against=Against(name, against(base.folder, row.folder)))

    shown = list(map(compared, rows))
    if not any(row.against for row in shown):
        raise SpecbenchError(f"--baseline {baseline}: no run of this name is comparable with other runs")
    return shown


def _base(named: Mapping[str, ReportRow], baseline: str) -> tuple[str, ReportRow] | None:
    """Find the row that `baseline` names: by unique name, else by label, decoder, or start of the run id."""
    words = [(name, row.label, row.decoder) for name, row in named.items()]
    ways = [[names[0] for names in words if names[at].lower() == baseline.lower()] for at in range(3)]
    ways.append([name for name, row in named.items() if row.run_id.startswith(baseline)])
    meant = next(filter(None, ways), [])
    if len(meant) > 1:
        what = f"--baseline {baseline} is ambiguous: {' or '.join(meant)}?"
        raise SpecbenchError(what, "give one of these names, or the start of a run id")
    return (meant[0], named[meant[0]]) if meant else None


def marks(numbers: Mapping[str, Compared]) -> dict[str, str]:
    """Return {name: mark} of the numbers in `against` that differ from the baseline's."""
    return {name: MARK for name, row in numbers.items() if row.real}


def stall_note(stalled: Stalled | None, images: int, median: stats.Estimate | None) -> str | None:
    """Describe the stalled images of a run, with the median latency; None if no image stalled."""
    if stalled is None or median is None:
        return None
    return (
        f"{stalled.images} of {images} images stalled: the slowest took {number(stalled.slowest_ms / 1e3)} s, "
        f"the median is {number(median.value / 1e3)} s; the mean latency and the speed-up include these images"
    )


def corrected(rows: Sequence[Compared]) -> list[Compared]:
    """Add corrected p-values, `p_holm`, to the numbers of a pair of runs, corrected within each family of tests (see
    `specbench.stats.RULE`). Distances form a separate family, because reports, which verdicts must match, lack them."""
    p_values: dict[str, list[float | None]] = {}
    for row in rows:
        p_values.setdefault(_question(row), []).append(row.p)
    judged = {question: iter(stats.holm(tests)) for question, tests in p_values.items()}
    return [replace(row, p_holm=next(judged[_question(row)])) for row in rows]


def _question(row: Compared) -> str:
    return row.name if row.name in _NAMES else "distances" if row.kind == "distance" else "scores"


def real_differences(folder: Path, over_ar: OverAR) -> set[str]:
    """Return the names of the numbers that differ from AR's: "speedup" and scores, except distances to references."""
    if over_ar.ar_folder in (None, folder):
        return set()
    speed = Compared("speedup", p=over_ar.speedup_p)
    return {row.name for row in corrected([speed, *scores_beside(over_ar.ar_folder, folder)]) if row.real}


def scores_beside(a: Path, b: Path) -> list[Compared]:
    """Compute `quality_rows` without distances to reference images, because these take long."""
    return quality_rows(a, b, distances=False)


def _speed_rows(a: Run, b: Run) -> list[Compared]:
    """Compute the speed-up in both directions, and its factors; if times are not comparable, only the step ratio."""
    names = ("speedup", "speedup_reverse", *(name for name in stats.PAIR_NUMBERS if name != "speedup"))
    differing = mismatched_fields(b.info, a.info, other="A")
    result = None if differing else stats.speed_up(b.rows, a.rows)
    if result is None:
        why = "latency is measured at batch 1 only" if a.info.spec.batch > 1 else "no timed images in common"
        why = f"differs in {', '.join(differing.values())}" if differing else why
        # The step ratio does not depend on times.
        differing = mismatched_fields(b.info, a.info, other="A", steps_alone=True)
        common = stats.paired(b.rows, a.rows)
        if differing or common.empty:
            unlike = f"differs in {', '.join(differing.values())}" if differing else "no images in common"
            steps = Compared("step_ratio", note=unlike)
        else:
            steps = Compared("step_ratio", _estimate(stats.step_ratio(common)), n=len(common))
        return [steps if name == "step_ratio" else Compared(name, note=why) for name in names]
    pairs = stats.paired(b.rows, a.rows).dropna(subset=["latency_ms", "latency_ms_base"])
    saved = stats.difference_to_show(stats.speed_difference(pairs))
    needed = stats.prompts_needed(saved.spread, CHANGE)
    back = stats.ratio_of_totals(pairs["latency_ms"], pairs["latency_ms_base"], pairs["prompt_id"])
    total, back = (stats.without_few(estimate, result.prompts) for estimate in (result.total, back))
    notes = [] if result.pairs == len(a.rows) == len(b.rows) else ["over the images in common"]
    notes += ["decoded in different calls; the machine may have changed between them"] if decoded_apart(a, b) else []
    notes += [eager] if is_ar(a.info) and (eager := eager_ar(a)) else []
    note = "; ".join(notes if total.low is not None else [*notes, FEW_NOTE]) or None
    return [
        Compared(names[0], total, saved.p, None, result.pairs, needed, note),
        Compared(names[1], back, n=result.pairs, note=note),
        *(Compared(name, _estimate(stats.NUMBERS[name](pairs)), n=result.pairs) for name in names[2:]),
    ]


def _estimate(value: Any) -> stats.Estimate | None:
    return value if value is None or isinstance(value, stats.Estimate) else stats.Estimate(value)


def _latency_rows(name: str, run: Run) -> list[Compared]:
    """Compute mean and median latency of a run's images, with a note on stalled images; empty if not measured."""
    images, median = len(run.rows), stats.latency_p50_ms(run.rows)
    if median is None:
        return []
    stall = stall_note(stalled_images(run.rows), images, median)
    return [
        Compared(f"latency_{name}_ms", _estimate(stats.latency_ms(run.rows)), n=images, note=stall),
        Compared(f"median_{name}_ms", median, n=images),
    ]


def quality_rows(a: Path, b: Path, settings: Settings | None = None, distances: bool = True) -> list[Compared]:
    """Compute the paired differences of overall scores, B minus A. `distances`: whether to include distances."""
    own, other = ({(row["metric"], row["fingerprint"]): row for row in read_scores(folder)} for folder in (a, b))
    every: Mapping[Any, Mapping[str, Any]] = own | other | own  # for a score of both runs, the row of `a`
    whole = {key: row for key, row in every.items() if ":" not in key[0] and (distances or row["kind"] != "distance")}
    named = {row["metric"]: {fact: row[fact] for fact in ("better", "kind")} for row in whole.values()}
    common = of_same_captions(a, b) if whole else None
    if common is not None and common.empty:
        return [Compared(name, note=_nothing_common(a, b), **facts) for name, facts in named.items()]
    shared = {key: mine for key, mine in whole.items() if key in own and key in other}
    rows = []
    for key, mine in shared.items():
        row = _plain_difference(mine, other[key]) if common is None else None
        if row is None or mine["metric"] not in metric_catalog.METRICS:  # a plug-in's distance may define a difference
            paired = _quality_row(a, b, mine, settings)
            row = paired if row is None or paired.estimate is not None else _without_interval(row, paired)
        if sum(name == key[0] for name, _ in shared) > 1:
            row = replace(row, note="; ".join(filter(None, (mine["edited"] and edited_text(mine["edited"]), row.note))))
        rows.append(replace(row, better=mine["better"], kind=mine["kind"], fingerprint=key[1]))
    compared = {row.name for row in rows}
    for name in (name for name in named if name not in compared):
        first, second = (
            next((row for row in stored.values() if row["metric"] == name), None) for stored in (own, other)
        )
        if first and second:
            theirs = json.loads(str(second["identity"]))
            note = f"computed differently: different {_fields_that_differ(first['identity'], theirs)}"
        else:
            note = f"scored only in {_name(a, b) if first else _name(b, a)}"
        rows.append(Compared(name, note=note, **named[name]))
    return rows


def _nothing_common(a: Path, b: Path) -> str:
    """Explain why no images of two runs form pairs: a pair needs the same prompt id, sample and caption."""
    mine, theirs = (RunStore(folder).samples([*KEY, "prompt"]) for folder in (a, b))
    if not mine.merge(theirs, on=[*KEY]).empty:
        return OTHER_CAPTIONS
    shared = mine.merge(theirs, on="prompt")
    if shared.empty:
        return "no captions in common"
    if (shared["prompt_id_x"] == shared["prompt_id_y"]).any():
        return "no images in common: the runs have different sample numbers, see --samples"
    named = [info.spec.prompts for info in map(read_info, (a, b)) if not info.spec.tokens_sha256]
    advice = f": import tokens --prompts {named[0]} gives the ids of the other run" if len(named) == 1 else ""
    return f"the captions in common have different ids{advice}"


def _unpaired(a: Path, b: Path) -> str:
    """Explain why a score has no paired difference between two runs."""
    reason = _nothing_common(a, b)
    return _UNPAIRED if reason == OTHER_CAPTIONS else reason


def _plain_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Compared | None:
    """Compute the difference of two distances from the stored scores alone, which give no interval."""
    whole = mine["kind"] == "distance" and mine["images"] == theirs["images"] == mine["n"] == theirs["n"]
    if not whole or any(score["low"] is not None or score["value"] is None for score in (mine, theirs)):
        return None
    gap = stats.Estimate(theirs["value"] - mine["value"])
    return Compared(str(mine["metric"]), gap, n=mine["n"], note=FEW_IMAGES_NOTE)


def _without_interval(plain: Compared, paired: Compared) -> Compared:
    """Replace the note of a plug-in's distance without an interval."""
    undefined = paired.note == _UNPAIRED
    note = "its metric defines no interval" if undefined else f"the stored scores have no interval ({paired.note})"
    return replace(plain, note=note)


def _quality_row(a: Path, b: Path, score: Mapping[str, Any], settings: Settings | None) -> Compared:
    name, identity = str(score["metric"]), json.loads(score["identity"])
    if (stored := stored_difference(b, a, score)) is not None:
        if not math.isfinite(stored[0].value):
            return Compared(name, note="an image has an infinite value")
        return _difference(name, stats.difference_to_show(stored[0]), stored[1], score)
    reference = name if name in metric_catalog.metric_names() else identity.get("class")
    if reference is None:  # imported score
        return Compared(name, note=_unpaired(a, b))
    code = code_of([reference]) if reference != name and is_reference(reference) else None
    if reference != name and (code is None or code.digest[:16] != identity.get("code")):
        return Compared(name, note=f"its class {reference} is missing, or changed since the runs were scored")
    try:
        settings = settings or Settings()
        settings = replace(settings, device="cuda") if "float32" in identity else settings
        metric = metric_catalog.metric(reference)(settings)
        if made_score(metric).fingerprint != score["fingerprint"]:
            unlike = _fields_that_differ(score["identity"], made_score(metric).facts)
            return Compared(name, note=f"scored with a different {unlike}")
        paired: Mapping[str, Any] | None = difference(b, a, metric)
    except SpecbenchError as error:
        return Compared(name, note=error.what)
    if paired is None:
        return Compared(name, note=_unpaired(a, b))
    shown = stats.Difference(paired["difference"], paired["low"], paired["high"], paired["p"], paired["spread"])
    return _difference(name, shown, paired["n"], score)


def _difference(name: str, estimate: stats.Difference, n: int, score: Mapping[str, Any]) -> Compared:
    needed = None if score["value"] is None else stats.prompts_needed(estimate.spread, CHANGE * score["value"])
    if estimate.spread == 0:
        return Compared(name, estimate, estimate.p, None, n, needed, CONSTANT_NOTE)
    few = FEW_IMAGES_NOTE if score["kind"] == "distance" and n >= FEW_UNITS else FEW_NOTE
    return Compared(name, estimate, estimate.p, None, n, needed, None if estimate.low is not None else few)


def _name(folder: Path, other: Path) -> str:
    """Return the id of a run, or its folder if the other run has the same id."""
    return folder.name if folder.name != other.name else str(folder)


def _fields_that_differ(identity: Any, other: Mapping[str, object]) -> str:
    mine = json.loads(identity)
    return ", ".join(key for key in sorted(mine.keys() | other.keys()) if mine.get(key) != other.get(key))


@dataclass(frozen=True)
class Gate:
    """A failure condition on a compared number or a bound of its interval: `speedup<0.98`, `speedup.low<0.9`."""

    text: str
    name: str
    field: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse NAME SIGN NUMBER; raise a SpecbenchError for other texts."""
        match = re.fullmatch(r"\s*(.+?)(\.low|\.high)?\s*(<=|>=|<|>)\s*(\S+)\s*", text)
        try:
            bound = float(match[4]) if match else math.nan
        except ValueError:
            bound = math.nan
        if not match or math.isnan(bound):  # a gate with NaN would never fail, because comparisons with NaN are false
            raise SpecbenchError(f"'{text}' is not a condition", "write name, < <= > or >=, and number: speedup<0.98")
        return cls(text, match[1], _BOUNDS[match[2] or ""], match[3], bound)

    def check(self, rows: Sequence[Compared], run: Path | None = None) -> None:
        """Raise a SpecbenchError if the condition holds (exit code `GATE`), or if the value is missing. `run`: run B; a
        condition can also name a number of its report row."""
        named = [row for row in rows if self.name in (row.name, row.name.removesuffix(f" ({row.fingerprint})"))]
        if named and run and self.name in stats.RUN_NUMBERS:
            hint = f"name the score with its fingerprint: {self.name} ({named[0].fingerprint})"
            raise SpecbenchError(f"--fail-if '{self.text}': '{self.name}' is a number of runs and a metric", hint)
        if not named:
            of_run = report_row(Run(run), ()) if run else None
            numbers = {name: number for name in of_run.by_key if (number := of_run.number(name))} if of_run else {}
            if not of_run or self.name not in {*of_run.by_key, *stats.RUN_NUMBERS}:
                raise unknown_name("number", self.name, {*(row.name for row in rows), *numbers})
            named = [Compared(self.name, numbers.get(self.name), note=None if self.name in numbers else _NO_NUMBER)]
        for row in named:
            constant = CONSTANT_NOTE in (row.note or "")  # both bounds are the value, although no interval is printed
            value = row.value if constant else getattr(row.estimate, self.field, None)
            if value is None or math.isnan(value):
                raise SpecbenchError(f"--fail-if '{self.text}' cannot be evaluated: {row.note or f'no {self.field}'}")
            if _SIGNS[self.sign](value, self.bound):
                name = self.name if self.field == "value" else f"{self.name}.{self.field}"
                shown = f"{value:.4g}" if _SIGNS[self.sign](float(f"{value:.4g}"), self.bound) else str(value)
                raise SpecbenchError(f"--fail-if '{self.text}' holds: {name} = {shown}", exit_code=GATE)


def verdict(rows: Sequence[Compared]) -> str:
    """Summarise the real differences among the rows of `compare_runs` in one sentence."""
    real, unclear, untested = [], [], []
    tests = Counter(_question(row) for row in rows if row.p_holm is not None)
    for row in rows:
        if row.estimate is None or (row.name in _NAMES and row.name != "speedup"):
            continue
        if row.p_holm is None:
            untested.append(_open(row, row.estimate, 0))
        elif row.real:
            real.append(_told(row, row.estimate))
        else:
            unclear.append(_open(row, row.estimate, tests[_question(row)]))
    if real or unclear or untested:
        found = (f"No difference is shown in {', '.join(unclear)}", f"Not tested: {', '.join(untested)}")
        shown = [text for text, part in zip(("; ".join(real), *found), (real, unclear, untested), strict=True) if part]
        return " ".join(f"{text}." for text in shown)
    steps = next((row.value for row in rows if row.name == "step_ratio"), None)
    if steps is None:
        return "Nothing could be compared."
    return f"Only steps could be compared: A takes {number(steps)} times as many as B."


def _told(row: Compared, estimate: stats.Estimate) -> str:
    value, interval = _value(row, estimate.value), bracketed(estimate, _digits(row))
    if row.name == "speedup":
        return f"B is {'faster' if estimate.value > 1 else 'slower'} than A: {value} times as fast{interval}"
    favours = "better" if estimate.value * SIGNS[row.better] > 0 else "worse"
    return f"B scores {'higher' if estimate.value > 0 else 'lower'} ({favours}) in {row.name}, by {value}{interval}"


def _open(row: Compared, estimate: stats.Estimate, tests: int) -> str:
    """Describe a number whose difference is not real; add the p-value if the interval excludes "no difference"."""
    name, none = ("speed", 1) if row.name == "speedup" else (row.name, 0)
    corrected = ""
    low, high = estimate.low, estimate.high
    if low is not None and high is not None and row.p_holm is not None and not low <= none <= high:
        corrected = f"; p = {_p(row.p_holm)}"
        corrected += f" after correction for {tests} scores" if name != "speed" and tests > 1 else ""
    return f"{name} ({_value(row, estimate.value)}{bracketed(estimate, _digits(row))}{corrected})"


def directions(a: str, b: str) -> list[str]:
    """Return lines that name run A and run B, and explain the signs of differences."""
    return [
        f"A (baseline): {a}",
        f"B: {b}",
        "Speed-ups are B over A, score differences are B minus A; ↑: higher values favour B.",
    ]


def comparison_lines(rows: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Format each compared number as cells in the order of `HEADINGS`; `reasons` describes numbers without a value."""
    return [
        (
            _title(row),
            _value(row, row.estimate.value),
            bounds(row.estimate, _digits(row)) or (TOO_FEW if FEW_NOTE in (row.note or "") else MISSING),
            _p(row.p_holm),
            str(row.n or MISSING),
            f"{row.prompts_needed:,}" if row.prompts_needed else MISSING,
        )
        for row in rows
        if row.estimate is not None and _title(row)
    ]


def reasons(rows: Sequence[Compared]) -> list[str]:
    """Explain missing or restricted numbers, and the last column."""
    titles: dict[str, list[str]] = {}
    for row in rows:
        if row.note and _title(row):
            titles.setdefault(row.note, []).append(_title(row))
    needed = (
        f"Prompts needed: to detect, with 80 % power, a change of the speed-up or of A's score by {100 * CHANGE:g} %."
    )
    return [
        *(f"{'; '.join(names)}: {note}." for note, names in titles.items()),
        *([needed] if any(row.prompts_needed for row in rows) else []),
    ]


def _title(row: Compared) -> str:
    return _NAMES.get(row.name, f"{row.name} {ARROWS[row.better]}")


def _value(row: Compared, value: float) -> str:
    return number(value, _digits(row)) if row.name in _NAMES else f"{value:+,.3f}"


def _digits(row: Compared) -> int:
    """Return the decimals of a number and its bounds."""
    whole = row.name.endswith("_ms") and (row.value or 0) >= 100
    return 0 if whole else 2 if row.name in _NAMES else 3


def _p(p: float | None) -> str:
    if p is None:
        return MISSING
    return f"< {_LEAST_P}" if p < _LEAST_P else f"{p:.4f}"
