"""Tables of runs pooled over seeds, with varied options as columns (`specbench report --over seed`)."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.metrics.score_store import pooled_score, read_scores
from specbench.reporting.columns import MISSING, number, with_interval
from specbench.reporting.comparability import Run, code_text, copies, is_ar, nearest_ar
from specbench.reporting.row import ARROWS
from specbench.specs.options import plain
from specbench.specs.presets import named_ar
from specbench.store.run_folders import runs_in, setting_texts
from specbench.store.run_info import identity_json
from specbench.system.json_values import json_text
from specbench.system.text_tables import TextTable, latex_label, latex_table, markdown_table, plain_table

NOTE = (
    "Runs that differ only in the seed are one row. Value: over the images of all seeds; ±: standard deviation of the "
    "values per seed; in brackets: 95 % interval, with prompts as the independent units (a prompt has all its seeds). "
    "Speed-up: ratio of the summed latencies; geometric mean: of the ratios per image."
)


@dataclass(frozen=True)
class Pooled(stats.Estimate):
    """Estimate over the images of all seeds. `spread`: standard deviation of the seeds' values."""

    spread: float | None = None
    better: stats.Better = "higher"


@dataclass(frozen=True)
class SeedsRow:
    """Row of runs that differ only in the seed."""

    model: str
    decoder: str
    options: Mapping[str, object]  # options and settings that vary among the rows of the decoder
    seeds: Sequence[int]
    images: int
    numbers: Mapping[str, Pooled]
    copies: Sequence[str] = ()  # folders of copies of a run, which are not counted
    not_pooled: Mapping[str, str] = field(default_factory=dict)  # {score: reason}

    @property
    def record(self) -> dict[str, object]:
        """Convert to plain values, for json."""
        parts = ("value", "spread", "low", "high")
        numbers = {name: {part: getattr(own, part) for part in parts} for name, own in self.numbers.items()}
        rare = ("copies", "not_pooled")
        return {key: value for key, value in vars(self).items() if value or key not in rare} | {"numbers": numbers}


def over_seeds(folders: Sequence[Path]) -> list[SeedsRow]:
    """Pool runs that differ only in the seed; raise a SpecbenchError for a damaged run, or two runs with one seed."""
    groups: dict[str, list[Run]] = {}
    every = [Run(folder) for folder in folders]
    left_out = copies(every)
    for run in (run for run in every if run.folder not in left_out):
        same = {name: value for name, value in identity_json(run.info.spec).items() if name != "seed"}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    places = dict.fromkeys(folder.parent for folder in folders)
    baselines = [run for place in places for run in map(Run, runs_in(place)) if is_ar(run.info)]
    shown_scores = {key for runs in groups.values() for key in _common_scores(runs)}
    several = {metric for metric, count in Counter(metric for metric, _ in shown_scores).items() if count > 1}
    rows = []
    for runs in groups.values():
        _refuse_one_seed(runs)
        originals = {run.folder for run in runs}
        row = _row(sorted(runs, key=lambda run: run.info.spec.seed), baselines, several)
        rows.append(replace(row, copies=[str(copy) for copy, folder in left_out.items() if folder in originals]))
    shown = []
    for row in rows:
        alike = [other for other in rows if other.decoder == row.decoder]
        swept = [name for name in _option_names(alike) if len({plain(one.options.get(name)) for one in alike}) > 1]
        shown.append(replace(row, options={name: row.options.get(name) for name in swept}))
    return sorted(shown, key=lambda row: (not named_ar(row.decoder), row.model, row.decoder))


def _refuse_one_seed(runs: Sequence[Run]) -> None:
    """Raise a SpecbenchError if two runs have the same seed: their images are the same, or are shards of one run."""
    folders: dict[int, Path] = {}
    for run in runs:
        if (other := folders.setdefault(run.info.spec.seed, run.folder)) != run.folder:
            what = f"--over seed: {other} and {run.folder} have the same seed {run.info.spec.seed}"
            raise SpecbenchError(what, "name one of them; shards: specbench merge")


def _option_names(rows: Sequence[SeedsRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.options))


def _row(runs: Sequence[Run], baselines: Sequence[Run], several: Set[str]) -> SeedsRow:
    spec = runs[0].info.spec
    settings = {name: text for name, text in setting_texts(spec).items() if name not in ("seed", "decoder-code")}
    settings |= {"code": code_text(runs[0].info)} if spec.decoder_code else {}
    decoded = [run for run in runs if len(run.rows)]
    every = pd.concat([run.rows[["prompt_id", "nfe"]] for run in runs], ignore_index=True)
    nfe = stats.interval("nfe", every)  # unknown for imported tokens
    numbers = {"nfe": _pooled(nfe, every, [stats.nfe(run.rows) for run in decoded])} if nfe else {}
    scores, not_pooled = _scores(decoded, several) if decoded else ({}, {})
    numbers |= _speedups(decoded, baselines) | scores
    options, seeds = settings | spec.decoder.options, [run.info.spec.seed for run in decoded]
    return SeedsRow(spec.model, spec.decoder.full_name, options, seeds, len(every), numbers, (), not_pooled)


def _common_scores(runs: Sequence[Run]) -> set[tuple[str, str]]:
    """Return metric and fingerprint of the scores that all runs with images have."""
    scored = [{(row["metric"], row["fingerprint"]) for row in read_scores(run.folder)} for run in runs if len(run.rows)]
    return set.intersection(*scored) if scored else set()


def _scores(runs: Sequence[Run], several: Set[str]) -> tuple[dict[str, Pooled], dict[str, str]]:
    """Pool the overall scores that all runs have, if they are means over images or categories. Also return the reasons
    why other scores are not pooled. `several`: metrics of the table with several fingerprints, shown in their names."""
    scored = [{(row["metric"], row["fingerprint"]): row for row in read_scores(run.folder)} for run in runs]
    common: list[Any] = sorted(set.intersection(*map(set, scored)))
    numbers: dict[str, Pooled] = {}
    whole = {key for scores in scored for key in scores if ":" not in key[0]}
    reasons = {metric: "not every seed has it with this fingerprint" for metric, _ in sorted(whole.difference(common))}
    for metric, fingerprint in (key for key in common if ":" not in key[0]):
        own = [scores[metric, fingerprint] for scores in scored]
        values: list[Any] = [score["value"] for score in own]
        estimate = pooled_score([run.folder for run in runs], own[0])
        name = f"{metric} ({fingerprint})" if metric in several else metric
        if estimate is None or pd.isna(values).any():
            reasons[name] = "it is not a mean of values per image" if estimate is None else "a seed has no value"
        else:
            numbers[name] = Pooled(estimate.value, estimate.low, estimate.high, _spread(values), own[0]["better"])
    return numbers, reasons


def _speedups(runs: Sequence[Run], baselines: Sequence[Run]) -> dict[str, Pooled]:
    """Pool the speed-up over AR, and compute its geometric mean; empty if a run has no comparable AR images."""
    pairs = []
    for run in runs:
        nearest = nearest_ar(run, baselines)
        if nearest and not nearest[0]:
            both = stats.paired(run.rows, nearest[1].rows).dropna(subset=["latency_ms", "latency_ms_base"])
            pairs.append(both.assign(log=np.log(both["latency_ms_base"] / both["latency_ms"])))
    if not pairs or not all(map(len, pairs)):
        return {}
    every = pd.concat(pairs)
    logs = stats.mean_interval(every["log"], every["prompt_id"])
    low, high = (None if bound is None else float(np.exp(bound)) for bound in (logs.low, logs.high))
    geometric = stats.Estimate(float(np.exp(logs.value)), low, high)
    ratios = [seed["latency_ms_base"].sum() / seed["latency_ms"].sum() for seed in pairs]
    return {
        "speedup": _pooled(stats.speedup(every), every, ratios),
        "speedup_geometric": _pooled(geometric, every, [np.exp(seed["log"].mean()) for seed in pairs]),
    }


def _pooled(estimate: stats.Estimate, every: pd.DataFrame, own: Sequence[float | None]) -> Pooled:
    """Make a `Pooled` from the estimate over all images. `own`: the value of each seed."""
    shown = stats.without_few(estimate, every["prompt_id"].nunique())
    return Pooled(shown.value, shown.low, shown.high, _spread(own))


def _spread(values: Sequence[float | None]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def over_table(rows: Sequence[SeedsRow]) -> TextTable:
    """Format the rows of `over_seeds` as a table of texts."""
    options = _option_names(rows)
    numbers = {name: f"{name} {ARROWS[pooled.better]}" for row in rows for name, pooled in row.numbers.items()}
    speed_up = ARROWS[stats.speedup.better or "higher"]
    named = {"nfe": f"NFE {ARROWS[stats.nfe.better or 'lower']}", "speedup": f"speed-up {speed_up}"}
    named |= {"speedup_geometric": f"geometric mean {speed_up}"}
    digits = {name: 1 if name == "nfe" else 2 if name in named else 3 for name in numbers}
    lines = []
    for row in rows:
        chosen = [MISSING if row.options.get(name) is None else plain(row.options[name]) for name in options]
        itself = ("speedup", "speedup_geometric") if named_ar(row.decoder) else ()
        cells = [_cell(row.numbers.get(name), digits[name], name in itself) for name in numbers]
        lines.append([row.decoder, *chosen, str(len(row.seeds)), str(row.images), *cells])
    headings = ["decoder", *options, "seeds", "images", *(named.get(name, title) for name, title in numbers.items())]
    notes = [f"{copy} is a copy and is omitted." for row in rows for copy in row.copies]
    notes += [f"{name} is not pooled: {why}." for row in rows for name, why in row.not_pooled.items()]
    return plain_table(headings, lines, NOTE, [*dict.fromkeys(notes)])


def over_markdown(table: TextTable, records: Sequence[Mapping[str, Any]], label: str | None) -> str:
    """Format as markdown, with title and notes below."""
    return f"{markdown_table(table)}\n\n{' '.join((table.title, *table.notes))}\n"


def over_latex(table: TextTable, records: Sequence[Mapping[str, Any]], label: str | None) -> str:
    """Format as a booktabs `table`."""
    return latex_table(table, latex_label(label, *(cell.text for row in table.rows for cell in row)))


def over_json(table: TextTable, records: Sequence[Mapping[str, Any]], label: str | None) -> str:
    """Format the records as JSON."""
    return json_text(records)


def _cell(pooled: Pooled | None, digits: int, itself: bool) -> str:
    """Format a number with its interval; `itself`: whether it compares AR with itself, which needs no interval."""
    if pooled is None or itself:
        return MISSING if pooled is None else number(pooled.value, digits)
    spread = "" if pooled.spread is None else f" ± {number(pooled.spread, digits)}"
    return with_interval(pooled, digits, unit=spread, too_few=True)
