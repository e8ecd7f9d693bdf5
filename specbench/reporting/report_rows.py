"""Compute the numbers of a report: a `ReportRow` per run, with the speed-up over AR. Missing values are None."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from specbench import stats
from specbench.metrics.score_store import scores_to_show
from specbench.reporting import comparability
from specbench.reporting.comparability import Run, code_text, is_ar, mismatched_fields, nearest_ar
from specbench.reporting.marks import label, natural
from specbench.reporting.row import (
    Machine,
    OverAR,
    OverFastest,
    Quoted,
    ReportRow,
    Roofline,
    ShownAudit,
    ShownScore,
    Stalled,
)
from specbench.specs.presets import PRESETS
from specbench.stats import Difference, Estimate
from specbench.stats.intervals import FEW_UNITS
from specbench.stats.numbers import Needs
from specbench.store.run_info import RunInfo
from specbench.store.run_store import RunStore, images_fingerprint, read_audit
from specbench.store.schema import RowStatus
from specbench.system.json_values import nonfinite_as_text
from specbench.system.monitor import gpu_disturbances, taken_cores

_MOST_READINGS = 20_000  # For more images, the readings of the machine are skipped, because they are large

ROOFLINE_WRONG = (
    "no ratio, because decoding was faster than the device's peak allows. A peak that was measured on a busy machine "
    "is too low, and a cache may hold the weights. On an idle machine: specbench doctor --measure, then run again"
)
"""Note instead of a roofline ratio below 1, which is impossible."""

EAGER_RATIO = 2.0  # Above this roofline ratio, eager AR is limited by call overhead


def report_rows(folders: Sequence[Path]) -> list[ReportRow]:
    """Compute the report rows of the runs in `folders`, in the order of the presets (AR first). AR baselines are taken
    from the same results folders."""
    runs = comparability.with_ar_runs({folder.resolve(): folder for folder in folders}.values())
    copied = comparability.copies([run for run, _ in runs.values()])
    runs = {folder: with_ar for folder, with_ar in runs.items() if folder not in copied}
    rows = []
    for run, ar_runs in runs.values():
        twice = [str(copy) for copy, folder in copied.items() if folder == run.folder]
        rows.append(replace(report_row(run, ar_runs), copies=twice or None))
    return sorted(_beside_ours(_with_versions(rows, [run.info for run, _ in runs.values()])), key=_order)


_UNKNOWN = ("device", "threads", "seed", "batch", "mode", "compiled")  # Unknown for imported tokens


def _beside_ours(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Give rows of imported tokens the setting of runs with the same prompts and sampling; return all rows."""
    unknown: dict[str, Any] = dict.fromkeys((*_UNKNOWN, "prompts"))

    def shared(row: ReportRow) -> object:
        return row.model, replace(row.setting, **unknown)

    ours = {shared(row): row.setting for row in sorted(rows, key=lambda row: row.is_ar) if not row.imported}
    return [replace(row, setting=ours.get(shared(row), row.setting)) if row.imported else row for row in rows]


def _with_versions(rows: Sequence[ReportRow], infos: Sequence[RunInfo]) -> list[ReportRow]:
    """If rows with the same label differ in plug-in code, add its edit time: "power, edited 26 Nov 14:02"."""
    groups: dict[object, dict[str | None, str]] = {}
    keys = [(row.model, row.setting, row.label, str(row.options)) for row in rows]
    for key, info in zip(keys, infos, strict=True):
        groups.setdefault(key, {})[info.spec.decoder_code] = code_text(info)
    named = []
    for row, key, info in zip(rows, keys, infos, strict=True):
        times, code = groups[key], info.spec.decoder_code
        version = (
            times[code] if list(times.values()).count(times[code]) == 1 else f"{times[code]}, code {str(code)[:6]}"
        )
        named.append(replace(row, label=f"{row.label}, {version}") if len(times) > 1 else row)
    return named


def report_row(run: Run, ar_runs: Sequence[Run]) -> ReportRow:
    """Compute the row of one run, with its speed-up over AR runs."""
    info, rows = run.info, run.rows
    spec, slow = info.spec, stats.slowest_category(rows) or (None, None)
    few = stats.fewest_tokens_category(rows) or (None, None)
    ratio = stats.roofline_ratio(rows, info.roofline)
    wrong = ratio is not None and ratio < 1
    cut = int((rows.get("caption_tokens_cut", pd.Series()) > 0).sum())
    return ReportRow(
        run_id=info.run_id,
        folder=run.folder,
        model=spec.model,
        source=info.source_text,
        processors=info.processors_text,
        decoder=spec.decoder.name,
        label=label(spec.decoder, info.origins, spec.model),
        lossless=spec.decoder.lossless,
        imported=spec.tokens_sha256 or None,
        options={name: nonfinite_as_text(value) for name, value in spec.decoder.options.items()},
        setting=spec.setting,
        steps=info.steps,
        n=len(rows),
        failed=run.failed,
        numbers=_numbers(run) | {"slowest_category_ms": slow[1], "fewest_tokens_per_step": few[1]},
        slowest_category=slow[0],
        fewest_tokens_category=few[0],
        machine=_machine(run),
        roofline=Roofline(None, ROOFLINE_WRONG, info.roofline) if wrong else Roofline(ratio, None, info.roofline),
        over_ar=over_ar(run, ar_runs),
        over_fastest=_over_fastest(run, ar_runs),
        beside_ar=_beside_ar(run, ar_runs),
        scores=[ShownScore.of(score) for score in scores_to_show(run.folder, rows["prompt_id"])],
        audit=_audit(run),
        settings_changed=info.run_id not in (info.spec.run_id, *info.spec.earlier_ids) or None,
        drawn=info.drawn or None,
        model_edited=code_text(info, "model") if spec.model_code else None,
        captions_cut=cut or None,
    )


def _numbers(run: Run) -> dict[str, Any]:
    """Compute `stats.RUN_NUMBERS`, with intervals of means if there are enough prompts."""
    rows, enough = run.rows, run.rows["prompt_id"].nunique() >= FEW_UNITS
    numbers: dict[str, Any] = {}
    there: dict[Needs, bool] = {
        "images": True,
        "tokens": stats.tokens_measured(rows),
        "traces": len(run.traced) > 0,
        "batches": run.info.spec.batch > 1,
        "second stage": "stage2_nfe" in rows,
        "bias of acceptance alone": not run.info.spec.decoder.biased_elsewhere,
    }
    for name, number in stats.RUN_NUMBERS.items():
        value: Any = number.compute(run.traced if number.of == "traces" else rows) if there[number.of] else None
        if number.of == "second stage" and value is None:  # rows of models without a second stage lack these keys
            continue
        if name in stats.MEANS and value is not None:
            bounded = stats.interval(name, rows) if enough else None
            value = replace(bounded, value=value) if bounded else Estimate(value)
        numbers[name] = value
    return numbers


def _beside_ar(run: Run, ar_runs: Sequence[Run]) -> dict[str, Difference]:
    """Subtract the token statistics of the AR run with the most images. The machines of the two runs may differ."""
    others = [ar for ar in ar_runs if ar.folder.resolve() != run.folder.resolve()]
    alike = [ar for ar in others if not mismatched_fields(run.info, ar.info, steps_alone=True)]
    if is_ar(run.info) or not alike:
        return {}
    ar = max(alike, key=lambda run: len(run.rows))
    differences = {name: stats.difference_from(name, run.rows, ar.rows) for name in stats.TOKEN_MEANS}
    shown = {name: stats.difference_to_show(difference) for name, difference in differences.items() if difference}
    corrected = stats.holm([difference.p for difference in shown.values()])
    return {name: replace(shown[name], p=p) for name, p in zip(shown, corrected, strict=True)}


def stalled_images(rows: pd.DataFrame) -> Stalled | None:
    """Summarise the decoded images that stalled; None if no image stalled."""
    images = stats.stalled(rows)
    return Stalled(len(images), float(images["latency_ms"].max())) if len(images) else None


def _machine(run: Run) -> Machine:
    info, rows = run.info, run.rows
    batches = RunStore(run.folder).batches(["machine"]) if len(rows) <= _MOST_READINGS else ()
    readings = [json.loads(text) for batch in batches for text in batch["machine"].to_pylist() if text]
    cores = [taken for reading in readings if (taken := taken_cores(reading)) is not None]
    return Machine(
        load=[call.load for call in info.invocations],
        environment=list(dict.fromkeys(call.environment for call in info.invocations)),
        stalled=stalled_images(rows),
        disturbed=sum(cores) / len(cores) if cores else None,
        gpu_disturbed=gpu_disturbances(readings) or None,
        untimed=run.untimed or None,
        versions=info.stack if run.untimed else None,
        one_by_one=int(((rows["batch"] < info.spec.batch) & rows["target_ms"].notna()).sum()) or None,
    )


def _audit(run: Run) -> ShownAudit | None:
    if (stored := read_audit(run.folder)) is None:
        return None
    rows = RunStore(run.folder).samples(["status", "started_at"])
    return shown_audit(stored, images_fingerprint(rows[rows["status"] == RowStatus.OK]) == stored["fingerprint"])


def shown_audit(stored: Mapping[str, Any], current: bool = True) -> ShownAudit:
    """Summarise a stored audit."""
    tv = Estimate(stored["tv"], stored.get("tv_low"), stored.get("tv_high")) if stored.get("tv") is not None else None
    kept: dict[str, Any] = {field.name: stored.get(field.name) for field in fields(ShownAudit)}
    return ShownAudit(**kept | {"tv": tv, "current": current})


def _order(row: ReportRow) -> tuple[Any, ...]:
    names = list(PRESETS)
    place = names.index(row.decoder) if row.decoder in names else len(names)
    return row.model, str(row.setting.content()), place, natural(row.label), row.options.get("window", 1), row.run_id


def over_ar(run: Run, ar_runs: Sequence[Run]) -> OverAR:
    """Compare the run with the most similar AR run."""
    spec, nearest = run.info.spec, nearest_ar(run, ar_runs)
    if spec.tokens_sha256:
        unlike = nearest[0] if nearest else {}
        texts = unlike | {"prompts_sha256": "the prompt set (import --prompts)"}
        apart = [texts[name] for name in unlike if name not in (*_UNKNOWN, "hardware", "versions")]
        why = f"; not compared with AR, which differs in {', '.join(apart)}" if apart else ""
        return OverAR(speedup_note=f"the times are of another program{why}")
    if nearest is None:
        return OverAR(speedup_note="no AR run")
    differing, ar = nearest
    if differing:
        return OverAR(speedup_note=f"differs from AR in {', '.join(differing.values())}", unlike_ar=True)
    if (result := run.speed_up(ar)) is None:
        how = f"batch {spec.batch}" if spec.batch > 1 else "throughput mode"
        untimed = not stats.paired(run.rows, ar.rows).empty and (run.untimed or ar.untimed)
        lacking = "no image was decoded" if run.rows.empty else "no images in common with AR"
        why = "its images were decoded under different versions" if untimed else lacking
        why = why if spec.timed else f"{how}: latency is not measured"
        return OverAR(speedup_note=why, unlike_ar=bool(spec.timed and untimed))
    shared = f"{result.pairs} images" if result.pairs > 1 else "one image"
    partial = f"over the {shared} in common with AR" if result.pairs < len(run.rows) else None
    return OverAR(
        _shown(result), result.p, result.steps, result.window_cost, result.overhead, result.end_to_end, result.pairs,
        ar.info.run_id, comparability.decoded_apart(run, ar), ar.folder, eager_ar(ar), partial,
        equal_forwards=result.equal_forwards,
    )  # fmt: skip


def _over_fastest(run: Run, ar_runs: Sequence[Run]) -> OverFastest:
    """Compute the speed-up over the fastest comparable AR, and, to quote, over the fastest AR of the same dtype."""
    comparable = [ar for ar in ar_runs if not mismatched_fields(run.info, ar.info, any_configuration=True)]
    results = [(run.speed_up(ar), ar) for ar in comparable]
    pairs = sorted(((r, ar) for r, ar in results if r is not None), key=lambda pair: pair[0].total.value)
    if not pairs:
        return OverFastest()
    fastest, quoted = pairs[0], None
    for result, ar in [pair for pair in pairs if pair[1].info.spec.dtype == run.info.spec.dtype][:1]:
        how = comparability.configuration(ar.info)
        quoted = Quoted(_shown(result), result.p, result.pairs, ar.info.run_id, how, eager_ar(ar))
    result, ar = fastest
    how = comparability.configuration(ar.info)
    if result.pairs < max(other.pairs for other, _ in pairs):
        how += f", {result.pairs} image{'s' * (result.pairs > 1)} of {len(run.rows)}"
    return OverFastest(_shown(result), how, quoted)


def _shown(result: stats.SpeedUp) -> Estimate:
    return stats.without_few(result.total, result.prompts)


def eager_ar(ar: Run) -> str | None:
    """Warn about a speed-up over an AR run that was not compiled; None if the AR run is near its roofline."""
    ratio = None if ar.info.compiled else stats.roofline_ratio(ar.rows, ar.info.roofline)
    if ar.info.compiled or (ratio is not None and ratio <= EAGER_RATIO):
        return None
    takes = f" and takes {ratio:,.{0 if ratio >= 10 else 1}f} times its roofline" if ratio else ""
    spec, advice = ar.info.spec, "before you quote the speed-up, run with --compile on"
    if spec.model_code:  # a plug-in's model, of which a run does not record whether it can be compiled
        advice += "; if the model cannot be compiled, state that AR is eager"
    elif spec.device == "mps":
        advice = "if you quote the speed-up, state that AR is eager, because steps cannot be compiled on mps"
    return f"AR is not compiled{takes}: {advice}"
