"""Cells of a paper's table: printed value, and measured value with its interval or the reason why it is missing."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from specbench import stats
from specbench.metrics.score_store import scores_to_show
from specbench.papers.table import STEP_RATIOS, Column, Row
from specbench.reporting.comparability import Run, mismatched_fields, nearest_ar
from specbench.reporting.compare import real_differences, stall_note
from specbench.reporting.report_rows import report_row, shown_audit
from specbench.reporting.row import ReportRow, ShownScore
from specbench.stats.intervals import FEW_UNITS
from specbench.store.run_info import Invocation, RunInfo
from specbench.store.run_store import read_audit

RATIOS_TO_AR = stats.PAIR_NUMBERS
_STALLING = ("latency_ms", "latency_e2e_ms", "step_ms", "tokens_per_second", "speedup", "speedup_e2e")
"""Numbers that are distorted by stalled images."""
_TIME_UNITS = ("ms", "tokens/s", "images/s", "images/h")
TIMES = {name for name, of in stats.NUMBERS.items() if of.unit in _TIME_UNITS} | {*RATIOS_TO_AR} - {"step_ratio"}
"""Hardware-dependent numbers."""
NOT_SCORED = "not scored"
OVER_BASELINE = "over_baseline"  # Key of the added column of speed-ups over a row; not allowed in table files
_BIASED = "The distance was computed over other images than in the paper, so no difference from the paper is printed."


@dataclass(frozen=True)
class Measured:
    """A run that measures a row of the table; input of the row's cells."""

    run: Run
    row: ReportRow  # with `real`
    ar: Run | None  # the AR baseline run, if any
    unlike: tuple[str, ...]  # differences from the paper's configuration; if any, cells have no `difference`
    same_machine: bool | None  # whether the run used the paper's hardware; None if the paper names no hardware
    expected: int | None = None  # number of images that the table requires; None if unknown

    @property
    def prompts(self) -> int:
        """Number of prompts of the run, the independent units of its intervals."""
        return int(self.run.rows["prompt_id"].nunique())

    @property
    def partial(self) -> bool:
        """Whether the number of images differs from the number that the table requires."""
        return self.expected is not None and self.row.n != self.expected


@dataclass(frozen=True)
class Cell:
    """Contents of one table cell, in the printed unit."""

    # paper, spread: printed value and spread
    paper: float | None = None
    spread: float | None = None
    # value, low, high: measured value, with a 95 % interval if available
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None  # number of images
    difference: float | None = None  # measured minus printed
    outside: bool = False  # whether the printed value, including its rounding error, lies outside the measured interval
    # whether the value differs from AR's by `specbench.stats.RULE`; False for numbers that are not tested
    real: bool = False
    too_few: bool = False  # whether the interval is omitted because of too few prompts
    why: str | None = None  # reason why the measured value is missing
    mark: str = ""  # mark of a value that differs from a baseline's, see `specbench.reporting.compare.marks`
    # printed_notes, notes: notes on the printed and on the measured value
    printed_notes: tuple[str, ...] = ()
    bold: bool = False  # whether the paper prints its value in bold
    notes: tuple[str, ...] = ()


def make_cell(row: Row, column: Column, measured: Measured | None, why: str | None, fingerprint: str | None) -> Cell:
    """Make the cell of a row and a column. `why`: reason for a missing run; `fingerprint`: required for scores."""
    remarks = tuple(note for note in (row.notes.get(column.name), _above_steps(row.paper, column)) if note)
    printed, spread = row.paper.get(column.name), row.spread.get(column.name)
    as_printed = Cell(printed, spread, printed_notes=remarks, bold=column.name in row.bold)
    if measured is None or not column.measurable:
        return replace(as_printed, why=why if column.measurable else None)
    cell = _score(column, measured, fingerprint) if column.score else _number(column, measured)
    if cell.value is None:
        return replace(as_printed, why=cell.why, notes=cell.notes)
    value = cell.value * column.scale
    low, high = (x if x is None else x * column.scale for x in (cell.low, cell.high))
    biased = column.score is not None and any(score.kind == "distance" for score in _scores(column, measured))
    biased = biased and not measured.unlike and (measured.partial or measured.expected is None)
    elsewhere = column.key in TIMES and measured.same_machine is not True
    notes, difference, outside = cell.notes, None, False
    if printed is not None:
        notes += (_BIASED,) if biased else ()
        if elsewhere:
            there = f"the paper on {row.hardware}" if row.hardware else "the paper names no hardware"
            here = dict.fromkeys(", ".join(_processors(call)) for call in measured.run.info.invocations)
            notes += (f"Measured on {' and '.join(here)}; {there}.",)
        difference = None if measured.unlike or biased else value - printed
    if printed is not None and difference is not None and low is not None and high is not None and not elsewhere:
        half_a_digit = 0.5 * 10.0**-column.precision
        outside = not low - half_a_digit <= printed <= high + half_a_digit
    real = (column.score or column.key) in (measured.row.real or ())
    return replace(
        as_printed, value=value, low=low, high=high, n=cell.n, difference=difference, outside=outside, real=real,
        too_few=cell.too_few, notes=notes,
    )  # fmt: skip


def column_fingerprint(column: Column, runs: Sequence[Measured]) -> str | None:
    """Return the most common metric fingerprint of a column. On a tie, the latest code decides, then the order."""
    scores = [score for measured in runs for score in _scores(column, measured)]
    edits = {score.fingerprint: score.edited or "" for score in scores}
    digests = [score.fingerprint for score in scores]
    return max(digests, key=lambda digest: (digests.count(digest), edits[digest]), default=None)


def same_hardware(printed: str | None, run: Run) -> bool | None:
    """Return whether all machines of a run have the processor that the paper names; None if no processor is named."""
    if printed is None:
        return None
    names = [_words(part) for part in re.sub(r"\(.*?\)", "", printed).split(",")]
    machines = [_words(" ".join(_processors(call))) for call in run.info.invocations]
    return all(any(name and name <= machine for name in names) for machine in machines)


def _number(column: Column, measured: Measured) -> Cell:
    """Return the cell of a column that shows no score: the measured number, or the reason why it is missing."""
    row, key = measured.row, column.key
    estimate, over = row.number(key), row.over_ar
    if estimate is None:
        return _missing(column, measured)
    if key == "speedup" and over.step_ratio and estimate.value > over.step_ratio:
        notes = [f"The measured latency ratio is above the step ratio ({over.step_ratio:.2f}): {_SUSPICIOUS}"]
    else:
        notes = [f"Compared {over.speedup_note}."] if key in RATIOS_TO_AR and over.speedup_note else []
    stall = stall_note(row.machine.stalled, row.n, row.number("latency_p50_ms"))
    if key in _STALLING and not notes and stall:
        notes = [f"{stall}."]
    low, high, few = _interval(key, measured, estimate) if math.isfinite(estimate.value) else (None, None, False)
    n = over.pairs if key in RATIOS_TO_AR else row.n
    return Cell(value=estimate.value, low=low, high=high, n=n, too_few=few, notes=tuple(notes))


def _missing(column: Column, measured: Measured) -> Cell:
    """Return a cell without a number, with the reason as a short text and as a sentence."""
    if column.key in RATIOS_TO_AR:
        unlike = mismatched_fields(measured.run.info, measured.ar.info) if measured.ar else {}
        if unlike:
            why = f"{', '.join(unlike)} {'differs' if len(unlike) == 1 else 'differ'}"
            return Cell(why=why, notes=(f"Not comparable: {measured.row.over_ar.speedup_note}.",))
        return Cell(why=str(measured.row.over_ar.speedup_note).partition(":")[0])
    if stats.NUMBERS[column.key].of == "traces":
        if len(measured.run.traced):
            return Cell(why="no drafts")
        return Cell(why="no trace", notes=("Traces are recorded by `specbench run --trace` and by `specbench bench`.",))
    if column.key in TIMES and (batch := measured.row.setting.batch) > 1:
        return Cell(why=f"batch {batch}", notes=("Latency is measured one image at a time.",))
    return Cell(why="missing")


def _score(column: Column, measured: Measured, fingerprint: str | None) -> Cell:
    scores = _scores(column, measured)
    for score in scores:
        if score.fingerprint == fingerprint:
            some = score.n != measured.row.n and score.whole
            notes = (f"Scored over {score.n} of {measured.row.n} images.",) if some else ()
            return Cell(None, None, **vars(score.estimate), n=score.n, too_few=score.too_few, notes=notes)
    if not scores:
        return Cell(why=NOT_SCORED)
    note = (
        f"The fingerprint of {column.header} is {scores[0].fingerprint} in this row, but {fingerprint} in other rows: "
        "the scores are not comparable."
    )
    return Cell(why="other fingerprint", notes=(note,))


def _scores(column: Column, measured: Measured) -> list[ShownScore]:
    return [score for score in measured.row.scores if score.metric == column.score]


def _interval(key: str, measured: Measured, estimate: stats.Estimate) -> tuple[float | None, float | None, bool]:
    """Return the 95 % interval of a report row's number, if any, and whether it is omitted for too few prompts."""
    if key == "speedup":
        return estimate.low, estimate.high, estimate.low is None
    if key == "step_ratio" and measured.ar is not None:
        pairs = stats.paired(measured.run.rows, measured.ar.rows)
        whole = stats.ratio_of_totals(pairs["nfe_base"], pairs["nfe"], pairs["prompt_id"])
        shown = stats.without_few(whole, pairs["prompt_id"].nunique())
        return shown.low, shown.high, shown.low != whole.low
    interval = key in stats.MEANS or stats.NUMBERS[key].bounded
    return estimate.low, estimate.high, estimate.low is None and interval and measured.prompts < FEW_UNITS


_SUSPICIOUS = "fewer forwards alone cannot explain this, so another factor differs between the two."


def _above_steps(paper: Mapping[str, float], column: Column) -> str | None:
    """Return a note if the printed latency ratio of a row is above its printed step ratio."""
    ratios = [paper[name] for name in STEP_RATIOS if name in paper]
    if column.key != "speedup" or column.name not in paper or not ratios or paper[column.name] <= ratios[0]:
        return None
    return f"The printed latency ratio is above the printed step ratio: {_SUSPICIOUS}"


def _processors(call: Invocation) -> list[str]:
    """Return the GPUs of an invocation, or the CPU if there is no GPU."""
    return call.gpus or [str(call.hardware.get("cpu"))]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))


SEEDS = (
    "Rows of several seeds: numbers are over the images of all seeds. The independent units are prompts, each with all "
    "its seeds. Scores and their bounds are means over the seeds, so their intervals are rather too wide than too "
    "narrow."
)


@dataclass(eq=False)
class _Seeds(Run):
    """Combined run of several seeds: its images are samples of the same prompts."""

    runs: Sequence[Run] = ()

    @cached_property
    def info(self) -> RunInfo:
        calls = [call for run in self.runs for call in run.info.invocations]
        return replace(self.runs[0].info, invocations=calls)

    @cached_property
    def _read(self) -> tuple[pd.DataFrame, int]:
        return self._together(lambda run: run.rows), sum(run.failed for run in self.runs)

    @cached_property
    def traced(self) -> pd.DataFrame:
        return self._together(lambda run: run.traced)

    def _together(self, read: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
        """Concatenate the rows of all runs. The seed is part of the sample name, for pairing with other decoders."""
        parts = [(run.info.spec.seed, read(run)) for run in self.runs]
        named = [
            rows.assign(sample=[f"{seed}/{sample}" for sample in rows["sample"]]) for seed, rows in parts if len(rows)
        ]
        return pd.concat(named, ignore_index=True) if named else parts[0][1]


def seeds_of(run: Run) -> Sequence[Run]:
    """Return the runs of single seeds; a run that does not combine seeds is returned alone."""
    return run.runs if isinstance(run, _Seeds) else [run]


def runs_as_one(members: Sequence[tuple[Run, Sequence[Run]]]) -> tuple[Run, ReportRow, Run | None]:
    """Combine runs that differ in the seed: return one run, its report row, the nearest AR run. `members`: runs, each
    with its candidate AR runs. `real` of the row: the numbers that differ from AR's with every seed."""
    nearest = [nearest_ar(run, beside) for run, beside in members]
    run, beside = members[0]
    if len(members) == 1:
        row = report_row(run, beside)
        real = real_differences(row.folder, row.over_ar)
        return run, replace(row, real=real), nearest[0] and nearest[0][1]
    run = _Seeds(run.folder, [run for run, _ in members])
    unlike = [nearby for nearby in nearest if nearby is None or nearby[0]]
    ars = [] if unlike else [nearby[1] for nearby in nearest if nearby]
    ar = (unlike[0] and unlike[0][1]) if unlike else _Seeds(ars[0].folder, ars)
    row = report_row(run, [ar] if ar else [])
    of_seeds = [
        real_differences(one.folder, replace(row.over_ar, ar_folder=ar_of_seed.folder))
        for one, ar_of_seed in zip(run.runs, ars, strict=not unlike)
    ]
    failed = [stored for one in run.runs if (stored := read_audit(one.folder)) and stored["failed"]]
    audit = shown_audit(failed[0]) if failed else row.audit
    real = set.intersection(*of_seeds) if of_seeds else set()
    return run, replace(row, scores=_mean_scores(run.runs), real=real, audit=audit), ar


def _mean_scores(runs: Sequence[Run]) -> list[ShownScore]:
    """Average the scores that all runs have: values and bounds are means over the runs."""
    by_seed = [
        {(score["metric"], score["fingerprint"]): score for score in scores_to_show(run.folder, run.rows["prompt_id"])}
        for run in runs
    ]
    means = []
    for key in (score for score in by_seed[0] if all(score in seed for seed in by_seed)):
        alike = pd.DataFrame([seed[key] for seed in by_seed])
        low, high = (None if alike[end].isna().any() else float(np.mean(alike[end])) for end in ("low", "high"))
        value, n = float(alike["value"].mean()), int(alike["n"].sum())
        means.append(ShownScore.of({**by_seed[0][key], "value": value, "low": low, "high": high, "n": n}))
    return means
