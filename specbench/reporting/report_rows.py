"""Report rows: one flat dict per run with all values that tables show. Missing values are None.

Keys are the columns of `specbench.store.schema.REPORT`, most of them named after the function of
`specbench.stats` that defines them. Keys of what is rare are left out where there is none. Bounds are None below
`FEW_UNITS` prompts.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench import stats
from specbench.decoding.generation import SPANS
from specbench.metrics.score_store import scores_to_show
from specbench.reporting.comparability import configuration, is_ar, mismatched_fields
from specbench.reporting.marks import label, natural
from specbench.specs.presets import PRESETS
from specbench.specs.run_spec import RunSpec
from specbench.stats.intervals import FEW_UNITS
from specbench.store.run_folders import runs_in
from specbench.store.run_info import RunInfo, identity_json
from specbench.store.run_store import RunStore, images_fingerprint, read_audit
from specbench.store.schema import KEY
from specbench.store.token_sums import SUMS
from specbench.system.foreign_code import edited_text
from specbench.system.json_values import nonfinite_as_text
from specbench.system.monitor import gpu_disturbances, taken_cores

_COLUMNS = (
    *("status", "category", "nfe", "batch", "tested", "accepted", *SUMS.names),
    *(f"{span}_ms" for span in (*SPANS, "latency", "latency_e2e")),
)


DRAFTED = (
    *("rounds", "acceptance_length", "draft_ms", "acceptance_by_sibling", "draft_tv_by_depth", "theorem2_bound"),
)
"""Numbers of `specbench.stats` about drafting."""

_SLOW_IMAGES = ("latency_p50_ms", "latency_p95_ms", "tokens_per_step_p50", "tokens_per_step_p95")
"""Numbers of `specbench.stats` about the slow images of a run, each with its bounds."""

STAGE2 = ("stage2_nfe", "stage2_acceptance", "stage2_ms", "both_stages_ms")
"""Numbers of `specbench.stats` about a second stage."""

_MOST_READINGS = 20_000  # Images above which the readings of the machine are left unread: they are long

ROOFLINE_WRONG = (
    "the roofline is wrong: decoding was faster than it allows. The device was measured while the machine was busy, or "
    "keeps the weights in a cache; measure it again on an idle machine (specbench doctor --measure), and run again"
)
"""Stands in the place of a roofline ratio below 1."""

EAGER_RATIO = 2.0  # Roofline ratio of an eager AR above which calls, not arithmetic, are its cost

_ENDS = {"": "value", "_low": "low", "_high": "high"}
_TRACED = ("draft_tv", "draft_tv_by_offset", "draft_top1")  # Numbers of `specbench.stats` that need traces


@dataclass(eq=False)
class Run:
    """A run folder, read lazily."""

    folder: Path

    @cached_property
    def info(self) -> RunInfo:
        """Description of the run; of several stacks of versions, `stack` is the one of most images."""
        info, store = RunStore(self.folder).info(), RunStore(self.folder)
        if len(set(info.stacks)) > 1:
            started = store.samples(["started_at", "status"])
            counts = Counter(_stacks(info, started[started["status"] == "ok"]["started_at"]))
            info.stack = max(counts, key=counts.__getitem__, default=info.stacks[-1])
        return info

    @property
    def untimed(self) -> dict[str, int]:
        """Number of images by the versions under which they were decoded, of those whose times do not count for it."""
        return self.rows.attrs.get("untimed", {})

    @property
    def rows(self) -> pd.DataFrame:
        """Rows of the decoded images, with the decoder's additional statistics as columns."""
        return self._read[0]

    @property
    def failed(self) -> int:
        """Number of failed images."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[pd.DataFrame, int]:
        """`rows` and `failed`, from one pass over the parts."""
        pieces, failed = [], 0
        for piece in RunStore(self.folder).batches_with_facts((*_COLUMNS, "started_at")):
            failed += pc.sum(pc.equal(piece["status"], "failed")).as_py() or 0
            pieces.append(piece.filter(pc.equal(piece["status"], "ok")))
        found = stats.as_frame(pa.concat_tables(pieces, promote_options="default"))
        if len(set(self.info.stacks)) > 1:
            stacks = _stacks(self.info, found["started_at"])
            other = [stack != self.info.stack for stack in stacks]
            found.loc[other, [name for name in found if name.endswith("_ms")]] = None
            found.attrs["untimed"] = dict(Counter(stack for stack in stacks if stack != self.info.stack))
        return found, failed

    @property
    def started(self) -> list[str]:
        """When each image was begun, UTC."""
        return RunStore(self.folder).samples(["started_at"])["started_at"].tolist()

    @cached_property
    def traced(self) -> pd.DataFrame:
        """Traces of the traced images, with the step that committed each token."""
        store = RunStore(self.folder)
        traces = store.traces()
        return traces.merge(store.samples(["committed_step"]), on=KEY) if len(traces) else traces


def _stacks(info: RunInfo, started: Iterable[str]) -> list[str]:
    """The versions under which each image was decoded: those of the last invocation that began before it."""
    calls = sorted(zip((str(call.started_at) for call in info.invocations), info.stacks, strict=True))
    starts = [start for start, _ in calls]
    return [calls[max(0, bisect_right(starts, str(at)) - 1)][1] for at in started]


def report_rows(folders: Sequence[Path]) -> list[dict]:
    """Compute the report rows of the runs in `folders`, in the order of the presets (AR first). AR baselines are
    searched in the same results folders.
    """
    runs = with_ar_runs({folder.resolve(): folder for folder in folders}.values())
    copied = copies([run for run, _ in runs.values()])
    runs = {folder: found for folder, found in runs.items() if folder not in copied}
    rows = [report_row(*one) for one in runs.values()]
    for row in rows:
        if own := [str(copy) for copy, folder in copied.items() if str(folder) == row["folder"]]:
            row["copies"] = own
    _name_versions(rows, [run.info for run, _ in runs.values()])
    return sorted(rows, key=_order)


def copies(runs: Sequence[Run]) -> dict[Path, Path]:
    """Folders that hold a copy of another one's run, with that one: the id and the start of an image are the same."""
    groups, found = {}, {}
    for run in sorted(runs, key=lambda run: run.folder.name != run.info.run_id):
        groups.setdefault(run.info.run_id, []).append(run)
    for first, *others in groups.values():
        keys = {tuple(key) for key in RunStore(first.folder).samples(["started_at"]).values} if others else ()
        for run in others:
            if any(tuple(key) in keys for key in RunStore(run.folder).samples(["started_at"]).values):
                found[run.folder] = first.folder
    return found


def _name_versions(rows: Sequence[dict], infos: Sequence[RunInfo]) -> None:
    """Add to the labels of rows that differ in a plug-in's code alone when that was edited ("power, edited 26 Nov
    14:02")."""
    groups: dict[str, list[tuple[dict, RunInfo]]] = {}
    for row, info in zip(rows, infos, strict=True):
        same = [row["model"], row["setting"], row["label"], row["options"]]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append((row, info))
    for group in groups.values():
        times = {info.spec.decoder_code: code_text(info) for _, info in group}
        for row, info in group if len(times) > 1 else ():
            code = info.spec.decoder_code
            told = times[code] if list(times.values()).count(times[code]) == 1 else f"{times[code]}, code {code[:6]}"
            row["label"] += f", {told}"


def code_text(info: RunInfo, kind: str = "decoder") -> str:
    """When the code of the decoder or of the model was edited, in the reader's time."""
    digest = getattr(info.spec, f"{kind}_code")
    if digest is None:
        return "code not recorded"
    edited = ((info.code or {}).get(kind) or {}).get("edited")
    return edited_text(edited) if isinstance(edited, str) else f"code {digest[:6]}"


def with_ar_runs(folders: Iterable[Path]) -> dict[Path, tuple[Run, list[Run]]]:
    """By folder, the run and the AR runs of its results folder, each read once."""
    runs = {folder: Run(folder) for folder in folders}
    pools: dict[Path, list[Run]] = {}
    for place in dict.fromkeys(folder.parent for folder in runs):
        beside = (runs.get(folder) or Run(folder) for folder in runs_in(place))
        pools[place] = [run for run in beside if is_ar(run.info)]
    return {folder: (run, pools[folder.parent]) for folder, run in runs.items()}


def report_row(run: Run, ar_runs: Sequence[Run]) -> dict:
    """Compute the row of one run, with its speed-up over the comparable AR runs."""
    info, rows = run.info, run.rows
    spec = info.spec
    tokens, over = stats.token_stats(rows), cache(lambda ar: stats.speed_up(rows, ar.rows))
    audit = _audit(run)
    return {
        "run_id": info.run_id,
        "folder": str(run.folder),
        "model": spec.model,
        "source": info.source_text,
        "processors": info.processors_text,
        "decoder": spec.decoder.name,
        "label": label(spec.decoder, info.origins, spec.model),
        "lossless": spec.decoder.lossless,
        **({"imported": spec.tokens_sha256} if spec.tokens_sha256 else {}),
        "options": nonfinite_as_text(dict(spec.decoder.options)),
        "setting": setting(spec),
        "steps": info.steps,
        "n": len(rows),
        "failed": run.failed,
        "nfe": stats.nfe(rows),
        "tokens_per_step": stats.tokens_per_step(rows),
        "step_compression": stats.step_compression(rows),
        **latencies(rows),
        **_disturbances(run.folder if len(rows) <= _MOST_READINGS else None),
        "latency_e2e_ms": stats.latency_e2e_ms(rows),
        **_tails(rows),
        "step_ms": stats.step_ms(rows),
        "throughput": stats.throughput(rows) if spec.batch > 1 else None,
        "images_per_hour": stats.images_per_hour(rows) if spec.batch > 1 else None,
        **_roofline(rows, info.roofline),
        "floor": info.roofline,
        **against_ar(run, ar_runs, over),
        **_against_fastest(run, ar_runs, over),
        "acceptance": stats.acceptance(rows),
        "acceptance_by_offset": stats.acceptance_by_offset(rows),
        **{name: getattr(stats, name)(rows) for name in DRAFTED},
        "top1": stats.top1(rows),
        **{name: getattr(stats, name)(run.traced) if len(run.traced) else None for name in _TRACED},
        **{name: getattr(tokens, name, None) for name in stats.TokenStats.__dataclass_fields__},
        "intervals": _intervals(rows),
        "beside_ar": _beside_ar(run, ar_runs),
        "scores": scores_to_show(run.folder, rows["prompt_id"]),
        **({"audit": audit} if audit else {}),
        **({"drawn": info.drawn} if info.drawn else {}),
        **({"model_edited": code_text(info, "model")} if spec.model_code else {}),
        **({"untimed": untimed, "versions": info.stack} if (untimed := run.untimed) else {}),
        **({name: getattr(stats, name)(rows) for name in STAGE2} if "stage2_nfe" in rows else {}),
        **({"captions_cut": cut} if (cut := int((rows.get("caption_tokens_cut", pd.Series()) > 0).sum())) else {}),
        **({"one_by_one": singly} if (singly := int((rows["batch"] < spec.batch).sum())) else {}),
        "load": [call.load for call in info.invocations],
        "environment": list(dict.fromkeys(call.environment for call in info.invocations)),
    }


def _intervals(rows: pd.DataFrame) -> dict[str, list[float]]:
    if rows["prompt_id"].nunique() < FEW_UNITS:
        return {}
    known = {name: stats.interval(name, rows) for name in stats.MEANS}
    return {name: [one.low, one.high] for name, one in known.items() if one and one.low is not None}


def _beside_ar(run: Run, ar_runs: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """Token statistics minus those of the AR run with the most images; times and machines may differ."""
    others = [ar for ar in ar_runs if ar.folder.resolve() != run.folder.resolve()]
    alike = [ar for ar in others if not mismatched_fields(run.info, ar.info, steps_alone=True)]
    if is_ar(run.info) or not alike:
        return {}
    ar = max(alike, key=lambda one: len(one.rows))
    found = {name: stats.difference_from(name, run.rows, ar.rows) for name in stats.TOKEN_MEANS}
    shown = {name: stats.difference_to_show(one) for name, one in found.items() if one}
    judged = stats.verdicts([one.p for one in shown.values()])
    return {
        name: {"value": one.value, "low": one.low, "high": one.high, "p": verdict.p, "real": verdict.real}
        for (name, one), verdict in zip(shown.items(), judged, strict=True)
    }


def _tails(rows: pd.DataFrame) -> dict[str, object]:
    """The numbers about slow images and slow categories."""
    slow, few = (found or (None, None) for found in (stats.slowest_category(rows), stats.fewest_tokens_category(rows)))
    known = {name: getattr(stats, name)(rows) for name in _SLOW_IMAGES}
    known |= {"slowest_category_ms": slow[1], "fewest_tokens_per_step": few[1]}
    bounds = {"": "value", "_low": "low", "_high": "high"}
    numbers = {name + end: getattr(one, part, None) for name, one in known.items() for end, part in bounds.items()}
    return numbers | {"slowest_category": slow[0], "fewest_tokens_category": few[0]}


def latencies(rows: pd.DataFrame) -> dict[str, object]:
    """Mean latency of the decoded images, and the images that stalled."""
    found = stats.stalled(rows)
    return {
        "latency_ms": stats.latency_ms(rows),
        "stalled": {"images": len(found), "slowest_ms": float(found["latency_ms"].max())} if len(found) else None,
    }


def _disturbances(folder: Path | None) -> dict[str, object]:
    """Needed cores that other processes took on average, and what disturbed the GPU; None where not measured."""
    batches = RunStore(folder).batches(["machine"]) if folder else ()
    readings = [json.loads(text) for rows in batches for text in rows["machine"].to_pylist() if text]
    cores = [taken for one in readings if (taken := taken_cores(one)) is not None]
    found = {"disturbed": sum(cores) / len(cores) if cores else None}
    return found | ({"gpu_disturbed": said} if (said := gpu_disturbances(readings)) else {})


def _roofline(rows: pd.DataFrame, floor: Mapping | None) -> dict[str, object]:
    """The roofline ratio, or why there is none: nothing is faster than its device."""
    found = stats.roofline_ratio(rows, floor)
    wrong = found is not None and found < 1
    return {"over_floor": None if wrong else found, "roofline_note": ROOFLINE_WRONG if wrong else None}


def _audit(run: Run) -> dict | None:
    """The stored audit of the run in short; None where there is none."""
    found = read_audit(run.folder)
    if found is None:
        return None
    rows = RunStore(run.folder).samples(["status", "started_at"])
    current = images_fingerprint(rows[rows["status"] == "ok"]) == found["fingerprint"]
    names = ("verdict", "failed", "tv", "tv_low", "tv_high", "p_value", "detectable", "images", "recomputed")
    return {name: found.get(name) for name in names} | {"current": current}


def nearest_ar(run: Run, ar_runs: Sequence[Run]) -> tuple[list[str], Run] | None:
    """Find the AR run of the same model with the fewest mismatched fields; returns (mismatched fields, run)."""
    model = run.info.spec.model
    candidates = [(mismatched_fields(run.info, ar.info), ar) for ar in ar_runs if ar.info.spec.model == model]
    return min(candidates, key=lambda pair: (len(pair[0]), pair[1].folder.name), default=None)


def setting(spec: RunSpec) -> dict:
    """Settings shared by the rows of one table: what makes the run, without model, decoder and draft head."""
    left_out = ("decoder", "decoder_code", "head_sha256", "model", "tokens_sha256")
    return {name: value for name, value in identity_json(spec).items() if name not in left_out}


def _order(row: dict) -> tuple:
    names = list(PRESETS)
    place = names.index(row["decoder"]) if row["decoder"] in names else len(names)
    window = row["options"].get("window", 1)
    return row["model"], str(row["setting"]), place, natural(row["label"]), window, row["run_id"]


_Over = Callable[[Run], stats.SpeedUp | None]  # Computes the speed-up over an AR run


def against_ar(run: Run, ar_runs: Sequence[Run], over: _Over) -> dict:
    """The keys of a row that compare the run with the AR run that is most like it."""
    factors = ("speedup_p", "step_ratio", "window_cost", "overhead", "speedup_e2e", "pairs", "baseline", "eager_ar")
    empty = _bounds("speedup") | dict.fromkeys(factors)
    if run.info.spec.tokens_sha256:
        return empty | {"speedup_note": "theirs are other times"}
    nearest = nearest_ar(run, ar_runs)
    if nearest is None:
        return empty | {"speedup_note": "no AR run"}
    differing, ar = nearest
    if differing:
        return empty | {"speedup_note": f"differs from AR in {', '.join(differing)}"}
    result = over(ar)
    if result is None:
        spec = run.info.spec
        how = f"batch {spec.batch}" if spec.batch > 1 else "throughput mode"
        note = "no images in common with AR" if spec.timed else f"{how}: latency is not measured"
        return empty | {"speedup_note": note}
    shared = f"{result.pairs} images" if result.pairs > 1 else "one image"
    partial = f"over the {shared} in common with AR" if result.pairs < len(run.rows) else None
    return _bounds("speedup", result) | {
        "speedup_p": result.p,
        "step_ratio": result.steps,
        "window_cost": result.window_cost,
        "overhead": result.overhead,
        "speedup_e2e": result.end_to_end,
        "pairs": result.pairs,
        "baseline": ar.info.run_id,
        "eager_ar": eager_ar(ar),
        "speedup_note": partial,
    }


def _against_fastest(run: Run, ar_runs: Sequence[Run], over: _Over) -> dict:
    """Speed-up over the fastest comparable AR configuration (dtype, threads, compilation), and over the fastest in the
    run's own number format, which is what may be quoted."""
    comparable = [ar for ar in ar_runs if not mismatched_fields(run.info, ar.info, any_configuration=True)]
    results = [(over(ar), ar) for ar in comparable]
    known = sorted(((r, ar) for r, ar in results if r is not None), key=lambda pair: pair[0].total.value)
    alike = [pair for pair in known if pair[1].info.spec.dtype == run.info.spec.dtype]
    quoted = {"quoted": _quoted(*alike[0])} if alike else {"quoted": None}
    result, ar = known[0] if known else (None, None)
    return _bounds("speedup_fastest", result) | {"fastest_ar": ar and configuration(ar.info), **quoted}


def _bounds(name: str, found: stats.SpeedUp | None = None) -> dict[str, float | None]:
    """A speed-up and its interval as three keys of a row."""
    total = found and stats.without_few(found.total, found.prompts)
    return {f"{name}{end}": total and getattr(total, part) for end, part in _ENDS.items()}


def _quoted(result: stats.SpeedUp, ar: Run) -> dict[str, object]:
    """A speed-up in the words of a sentence: the keys of `against_ar`, and what its AR was (`ar`, `eager_ar`)."""
    quoted = {"speedup_p": result.p, "pairs": result.pairs, "ar_run": ar.info.run_id}
    return _bounds("speedup", result) | quoted | {"ar": configuration(ar.info), "eager_ar": eager_ar(ar)}


def eager_ar(ar: Run) -> str | None:
    """What must be said of a speed-up over an AR run that was not compiled; None where its roofline is near."""
    ratio = None if ar.info.compiled else stats.roofline_ratio(ar.rows, ar.info.roofline)
    if ar.info.compiled or (ratio is not None and ratio <= EAGER_RATIO):
        return None
    takes = f" and takes {ratio:.2g} times its roofline" if ratio else ""
    return f"AR is not compiled here{takes}: compile before you quote this (--compile on)"
