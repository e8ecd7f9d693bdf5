"""A row of a report: values and estimates that writers format.

Numbers are named after the function of `specbench.stats` that defines them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specbench.metrics.base import Kind
from specbench.reporting.report_schema import KEYS
from specbench.specs.presets import named_ar
from specbench.specs.run_spec import RunSetting
from specbench.stats import MEANS, NUMBERS, Better, Difference, Estimate
from specbench.stats.intervals import is_real
from specbench.store.run_store import AuditVerdict
from specbench.system.json_values import Word

SIGNS: Mapping[Better, int] = {"lower": -1, "higher": 1}
ARROWS: Mapping[Better, str] = {"lower": "↓", "higher": "↑"}
NumberValue = Estimate | float | Sequence[float | None] | None
"""Number of a run, whose interval may be missing; or a list per depth or position; or None if missing."""


def typed_heading(text: str) -> str:
    """Return a heading as it was typed, or copied from a table, in lower case and without arrow and "[95 %]"."""
    return re.sub(r"\s*(?:[↓↑]|\[95 %\])", "", text).strip().lower()


@dataclass(frozen=True)
class ShownScore:
    """A stored score of a run; `too_few`: whether the interval is omitted because of too few prompts."""

    metric: str
    fingerprint: str
    estimate: Estimate
    n: int
    stored: Mapping[str, Any]  # all fields of the score, for csv, json and parquet
    too_few: bool = False
    prompts_needed: int | None = None
    note: str | None = None
    edited: str | None = None  # edit time of the metric's code, for plug-ins
    better: Better = "higher"
    kind: Kind = "plain"

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> ShownScore:
        """Make a score from a row of `specbench.metrics.score_store.scores_to_show`."""
        estimate = Estimate(stored["value"], stored["low"], stored["high"])
        given = {field.name: stored[field.name] for field in fields(cls) if stored.get(field.name) is not None}
        return cls(**given, estimate=estimate, stored=stored)

    @property
    def whole(self) -> bool:
        """Whether this is the overall score of a metric, not a part."""
        return ":" not in self.metric


@dataclass(frozen=True)
class Compared:
    """A number compared between two runs, see `specbench.reporting.compare.compare_runs`."""

    name: str
    estimate: Estimate | None = None
    p: float | None = None
    p_holm: float | None = None
    n: int | None = None
    prompts_needed: int | None = None
    note: str | None = None
    better: Better = "higher"
    kind: Kind = "plain"
    fingerprint: str | None = None  # fingerprint of a score that both runs have

    @property
    def value(self) -> float | None:
        return None if self.estimate is None else self.estimate.value

    @property
    def real(self) -> bool:
        """Whether the difference is real, by `specbench.stats.RULE`."""
        return is_real(self.p_holm)

    @property
    def record(self) -> dict[str, object]:
        """Convert to plain values, for csv, json and parquet."""
        bounds = {part: getattr(self.estimate, part, None) for part in _ENDS.values()}
        others = ("p", "p_holm", "n", "prompts_needed", "note")
        return {"name": self.name} | bounds | {name: getattr(self, name) for name in others}


@dataclass(frozen=True)
class Against:
    """{name: number of a run compared with a baseline}, for a baseline that the user chose."""

    baseline: str  # label of the baseline
    numbers: Mapping[str, Compared]


class Part:
    """Group of fields of a report row. The fields become keys of the row, like the row's other fields."""


@dataclass(frozen=True)
class OverAR(Part):
    """A run compared with the most similar AR run; without a speed-up, `speedup_note` gives the reason."""

    speedup: Estimate | None = None
    speedup_p: float | None = None
    step_ratio: float | None = None
    window_cost: float | None = None
    overhead: float | None = None
    speedup_e2e: float | None = None
    pairs: int | None = None  # number of images that both runs decoded
    baseline: str | None = None  # run id of the AR run
    decoded_apart: bool | None = None  # whether AR's images were decoded in other calls
    ar_folder: Path | None = None  # folder of the AR run, because its name may differ from the run id; not in reports
    eager_ar: str | None = None  # warning that the AR run was not compiled
    speedup_note: str | None = None
    unlike_ar: bool = False  # whether the only stored AR runs differ in settings or versions; not in reports
    equal_forwards: float | None = None  # see `specbench.stats.speed.equal_forwards`; not in reports


@dataclass(frozen=True)
class Quoted:
    """The speed-up that a sentence may quote: over the fastest AR in the run's number format."""

    speedup: Estimate
    speedup_p: float | None
    pairs: int
    ar_run: str
    ar: str  # number format, threads, and whether AR was compiled
    eager_ar: str | None


@dataclass(frozen=True)
class OverFastest(Part):
    """A run compared with the fastest comparable AR configuration."""

    speedup_fastest: Estimate | None = None
    fastest_ar: str | None = None
    quoted: Quoted | None = None


@dataclass(frozen=True)
class Stalled:
    """Images that took much longer than other images, see `specbench.stats.stalled`."""

    images: int
    slowest_ms: float


@dataclass(frozen=True)
class Machine(Part):
    """Machine and versions of a run, and what disturbed its measurements."""

    load: Sequence[float | None]
    environment: Sequence[str]
    stalled: Stalled | None
    disturbed: float | None  # mean number of cores that the run needed and other processes took
    gpu_disturbed: Sequence[str] | None = None
    untimed: Mapping[str, int] | None = None  # number of images without times, by versions
    versions: str | None = None  # versions that decoded the timed images
    one_by_one: int | None = None  # images in smaller batches than requested


@dataclass(frozen=True)
class Roofline(Part):
    """Decode time of a run over its roofline time."""

    over_floor: float | None
    roofline_note: str | None  # reason for a missing ratio
    floor: Mapping[str, Any] | None  # inputs of the roofline


@dataclass(frozen=True)
class ShownAudit:
    """Summary of the stored audit of a run, see `specbench.checks.run_audit.audit_run`."""

    verdict: AuditVerdict
    failed: bool
    tv: Estimate | None
    p_value: float | None
    detectable: float | None
    images: int
    recomputed: bool
    current: bool  # whether the images have not changed since the audit


class Claim(Word):
    """Value of the column `lossless`: what is declared, without the audit."""

    LOSSLESS = "yes"
    LOSSY = "no"
    FOREIGN = "theirs"


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """Numbers and settings of a run. Intervals are missing below `FEW_UNITS` prompts. `record` omits fields with a
    default if they are empty."""

    run_id: str
    folder: Path
    model: str
    source: str | None  # checkpoint if it is not the official one
    processors: str | None  # logits processors of the checkpoint
    decoder: str
    label: str
    lossless: bool
    imported: str | None = None  # digest of tokens from another program
    options: Mapping[str, Any]
    setting: RunSetting
    steps: str  # how the steps ran: eager, compiled
    n: int  # decoded images
    failed: int
    numbers: Mapping[str, NumberValue]  # `specbench.stats.RUN_NUMBERS`, and the means of the two categories below
    slowest_category: str | None
    fewest_tokens_category: str | None
    machine: Machine
    roofline: Roofline
    over_ar: OverAR
    over_fastest: OverFastest
    beside_ar: Mapping[str, Difference]  # token statistics minus AR's, with corrected p-values
    scores: Sequence[ShownScore]
    audit: ShownAudit | None = None
    settings_changed: bool | None = None  # whether the settings in run.json contradict the run id
    drawn: Sequence[str] | None = None  # descriptions of the selected prompts
    model_edited: str | None = None  # edit time of the model's code, for plug-ins
    captions_cut: int | None = None  # number of images whose caption was too long for the model
    copies: Sequence[str] | None = None  # folders of copies of the run, which are not shown
    against: Against | None = None
    real: Collection[str] | None = None  # names of the numbers that differ from AR's

    @property
    def claim(self) -> Claim:
        return Claim.FOREIGN if self.imported else Claim.LOSSLESS if self.lossless else Claim.LOSSY

    @property
    def is_ar(self) -> bool:
        return not self.imported and named_ar(self.decoder)

    @cached_property
    def by_key(self) -> Mapping[str, Any]:
        """All values by key: the fields, with the fields of each `Part` and the entries of `numbers` in their place."""
        keys: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            keys |= vars(value) if isinstance(value, Part) else {field.name: value}
        numbers = keys.pop("numbers")
        return keys | numbers

    def number(self, name: str) -> Estimate | None:
        """Return a number of the run by its name; its interval may be missing."""
        value = self.by_key.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return Estimate(value)
        return value if isinstance(value, Estimate) else None

    def series(self, name: str) -> Sequence[float | None]:
        """Return a list-valued number of the run (by depth or position); empty if missing."""
        value = self.by_key.get(name)
        return value if isinstance(value, Sequence) else ()

    def score(self, metric: str, fingerprint: str) -> ShownScore | None:
        scores = (score for score in self.scores if (score.metric, score.fingerprint) == (metric, fingerprint))
        return next(scores, None)


def unique_names(rows: Sequence[ReportRow]) -> dict[str, ReportRow]:
    """Return {unique name: row}. The name is the label, followed by model, window or run id if labels are equal."""
    names: dict[str, ReportRow] = {}
    for row in rows:
        name, alike = row.label, [other for other in rows if other.label == row.label]
        if len({other.model for other in alike}) > 1:
            name = f"{row.model} {name}"
        if len({other.options.get("window") for other in alike}) > 1:
            name = f"{name} W={row.options.get('window', 1)}"
        names[f"{name} {row.run_id.rpartition('-')[2][:8]}" if name in names else name] = row
    return names


_ENDS = {"": "value", "_low": "low", "_high": "high"}
_RARE = {field.name for part in (ReportRow, Machine) for field in fields(part) if field.default is None}
_PLACES = {key: place for place, key in enumerate(KEYS)}


def record(row: ReportRow) -> dict[str, object]:
    """Convert a row to plain values with the keys of `specbench.reporting.report_schema`, for csv, json and parquet."""
    means = {name: row.number(name) for name in MEANS}
    bounds = {name: [mean.low, mean.high] for name, mean in means.items() if mean and mean.low is not None}
    values = {**row.by_key, "intervals": bounds}
    del values["ar_folder"], values["unlike_ar"], values["equal_forwards"]
    ordered = {key: values[key] for key in sorted(values, key=lambda key: _PLACES.get(key, len(KEYS)))}
    return {key: value for key, value in _by_key(ordered).items() if value is not None or key not in _RARE}


_BOUNDED = {"slowest_category_ms", "fewest_tokens_per_step", "speedup_fastest", "tv"}
_BOUNDED |= {name for name, number in NUMBERS.items() if number.bounded}
"""Estimates whose bounds have separate keys in a record. Bounds of means are in `intervals`."""


def with_bounds(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Convert an estimate to three keys: value and bounds."""
    return {name + end: getattr(estimate, part, None) for end, part in _ENDS.items()}


def _by_key(values: Mapping[str, Any]) -> dict[str, object]:
    """Convert values to plain values, with separate keys for bounds."""
    plain = (with_bounds(name, value) if name in _BOUNDED else {name: _plain(value)} for name, value in values.items())
    return {key: value for keys in plain for key, value in keys.items()}


def _plain(value: object) -> object:
    """Convert a value to plain values according to its type."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, RunSetting):
        return value.content()
    if isinstance(value, ShownScore):
        return value.stored
    if isinstance(value, Compared):
        return value.record
    if isinstance(value, Difference):
        return {name: getattr(value, name) for name in ("value", "low", "high", "p")} | {"real": is_real(value.p)}
    if isinstance(value, Estimate):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return _by_key(vars(value)) if is_dataclass(value) else value
