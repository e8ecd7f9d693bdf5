"""The answer of a report in sentences: speed-up, loss of quality, unclear differences, disturbed timings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from specbench.errors import enumerated
from specbench.reporting.columns import FAILED_AUDIT, between, failed_audit, number
from specbench.reporting.compare import CHANGE, corrected, scores_beside, stall_note
from specbench.reporting.marks import window_of
from specbench.reporting.row import Compared, ReportRow
from specbench.specs.components import columns_fed
from specbench.stats.intervals import holm, is_real
from specbench.store.run_info import read_info
from specbench.system.monitor import BUSY_CORES

_COSTLY_WINDOW = 1.1
_IMPLAUSIBLE_WINDOW = 0.8
"""Smallest plausible window cost. A smaller ratio shows that the machine changed between the runs."""


def answer(rows: Sequence[ReportRow]) -> list[str]:
    """Sentences about the report rows of one section, the most important first; empty if there is only AR."""
    against_ar = [row for row in rows if row.quoted and row.decoder != "ar"]
    apart = [row for row in against_ar if (row.over_ar.window_cost or 1) < _IMPLAUSIBLE_WINDOW]
    timed = [row for row in against_ar if (row.over_ar.window_cost or 1) >= _IMPLAUSIBLE_WINDOW]
    timed.sort(key=lambda row: -row.quoted.speedup.value)
    exact = [row for row in timed if _exact(row)]
    faster = [row for row in timed[:1] if not _exact(row)]
    chosen = [*exact[:1], *faster]
    return [
        *([_fastest(exact)] if exact else []),
        *(_with_loss(row) for row in faster),
        *(sentence for row in chosen[:1] if (sentence := _free_window(row))),
        *_quality(chosen, rows),
        *(_apart(row) for row in apart),
        *_other_calls(timed),
        *_untimed(rows, against_ar),
        *(f"{_name(row)}: {copy} is a copy of this run and is left out." for row in rows for copy in row.copies or ()),
        *_unequal_windows(rows),
        *disturbances(rows),
    ]


def _unequal_windows(rows: Sequence[ReportRow]) -> list[str]:
    """Name the windows if decoders were compared with unequal windows, unless the windows are a sweep."""
    windows: dict[str, set] = {}
    for row in rows:
        if isinstance(window := row.options.get("window"), int):
            windows.setdefault(row.decoder, set()).add(window)
    swept = any(len(several) > 1 for several in windows.values())
    listed = ", ".join(f"{name} {window}" for name, (window, *_) in windows.items())
    alike = len(set(map(frozenset, windows.values()))) < 2
    return [] if swept or alike else [f"Windows differ: {listed}. --window N gives all decoders the same window."]


def disturbances(rows: Sequence[ReportRow]) -> list[str]:
    """Sentences on disturbed measurements: stalled images, batches that did not fit, and other processes."""
    lines = _stalls([row for row in rows if row.stalled])
    lines += [
        f"{_name(row)}: {row.one_by_one} of {row.n} images were decoded in smaller batches."
        for row in rows
        if row.one_by_one
    ]
    lines += [
        f"{_name(row)}: {count} of {row.n} images were decoded under {stack}"
        f"{f', not {row.versions}' * (str(row.versions) not in stack)}; their times are left out."
        for row in rows
        for stack, count in (row.untimed or {}).items()
    ]
    busy = [row.disturbed for row in rows if (row.disturbed or 0) > BUSY_CORES]
    if busy and any(row.latency_ms is not None for row in rows):
        cores = number(max(busy), 1)
        lines += [f"Other processes took up to {cores} CPU cores from these runs: repeat timings on a quiet machine."]
    lines += [f"{_name(row)}: {'; '.join(row.gpu_disturbed)}." for row in rows if row.gpu_disturbed]
    lines += [
        f"{_name(row)}: its run.json was edited after the run: its settings do not match the run id."
        for row in rows
        if row.settings_changed
    ]
    return lines + _versions(rows)


def _versions(rows: Sequence[ReportRow]) -> list[str]:
    """The versions of specbench that decoded the rows, if there are several."""
    by: dict[str, list[str]] = {}
    for row in rows:
        for version in dict.fromkeys(re.findall(r"specbench ([^,]+)", ", ".join(row.environment))):
            by.setdefault(version, []).append(row.label)
    listed = "; ".join(f"{version} ({', '.join(dict.fromkeys(labels))})" for version, labels in by.items())
    return [f"Decoded by several versions of specbench: {listed}."] if len(by) > 1 else []


def _stalls(rows: Sequence[ReportRow]) -> list[str]:
    """Describe the decoder with the slowest stalled image, and mention other decoders with stalled images."""
    if not rows:
        return []
    worst = max(rows, key=lambda row: row.stalled.slowest_ms)
    others = f" Images of {len(rows) - 1} other decoders also stalled." if len(rows) > 2 else ""
    if len(rows) == 2:
        others = f" Images of {_name(next(row for row in rows if row is not worst))} also stalled."
    return [f"{_name(worst)}: {stall_note(worst.stalled, worst.n, worst.latency_p50_ms)}.{others}"]


def _exact(row: ReportRow) -> bool:
    return row.lossless and not failed_audit(row)


def _name(row: ReportRow) -> str:
    window = window_of(row.options)
    return f"{row.label} (window {window})" if window and "window" in row.options else row.label


def _fastest(exact: Sequence[ReportRow]) -> str:
    """Name the fastest lossless decoder and those whose intervals overlap; p-values are corrected for the selection."""
    best, *others = exact
    p = dict(zip((row.run_id for row in exact), holm([row.quoted.speedup_p for row in exact]), strict=True))
    quoted, value, ar = best.quoted, number(best.quoted.speedup.value), _baseline(best)
    speed, interval, best_is_real = quoted.speedup, _interval(best, p[best.run_id], len(exact)), is_real(p[best.run_id])
    images = f"{quoted.pairs} image{'s' if quoted.pairs != 1 else ''}"
    if speed.low is None and speed.value < 1:
        sentence = (
            f"{ar} was the fastest; the next lossless decoder, {_name(best)}, ran {value} times as fast in {images}: "
            "too few for an interval"
        )
    elif speed.low is None:
        sentence = (
            f"{_name(best)} ran {value} times as fast as {ar} in {images}: too few for an interval or for calling "
            "it the fastest"
        )
    elif speed.value > 1 and best_is_real:
        sentence = (
            f"{_name(best)} is the fastest lossless decoder: {value} times as fast as {ar} {interval} over {images}"
        )
    elif shown := next((row for row in others if row.quoted.speedup.value > 1 and is_real(p[row.run_id])), None):
        sentence = (
            f"{_name(best)} has the largest speed-up of a lossless decoder, {value} {interval} over {images}, but is "
            f"not shown to be faster than {ar}; {_name(shown)} is faster: {number(shown.quoted.speedup.value)} "
            f"{_interval(shown)}"
        )
    elif speed.value < 1 and best_is_real:
        sentence = (
            f"No lossless decoder is faster than {ar}: the best, {_name(best)}, runs {value} {interval} times as fast"
        )
    else:
        sentence = (
            f"No lossless decoder is shown to be faster than {ar}: the best, {_name(best)}, runs {value} times as "
            f"fast {interval} over {images}"
        )
    highest = ((row, row.quoted.speedup.high) for row in others)
    level = [_name(row) for row, high in highest if high and high >= (speed.low or 0)]
    sentence += f"; intervals overlap with {', '.join(level)}" if level else ""
    busy = any((row.disturbed or 0) > BUSY_CORES for row in exact)
    return _with_eager(sentence + ", on a busy machine" * busy, best)


def _baseline(row: ReportRow) -> str:
    """Name of the baseline of a row's speed-up: AR in the same configuration, or in a faster configuration."""
    return "AR" if row.quoted.ar_run == row.over_ar.baseline else f"the fastest AR ({row.quoted.ar})"


def _with_eager(sentence: str, row: ReportRow) -> str:
    return f"{sentence}; {row.quoted.eager_ar}." if row.quoted.eager_ar else f"{sentence}."


def _with_loss(row: ReportRow) -> str:
    """The fastest decoder, if it is not lossless."""
    value = row.quoted.speedup.value
    kind = f"is declared lossless and {FAILED_AUDIT}" if failed_audit(row) else "is lossy"
    slower = ", and slower" if value < 1 and _real(row) else ", not shown to be faster"
    shown = "" if value > 1 and _real(row) else slower
    speed = f"{number(value)} times as fast as {_baseline(row)} {_interval(row)}".rstrip()
    return _with_eager(f"{_name(row)} {kind}{shown}: {speed}", row)


def _apart(row: ReportRow) -> str:
    """Reason why the speed-up of a run over AR is not meaningful."""
    return (
        f"The speed-up of {_name(row)} is not meaningful: its forwards took {number(row.over_ar.window_cost)} times "
        "as long as AR's forwards of a single token, so AR ran on a slower or busy machine. Decode both in one "
        "command, with another --out."
    )


def _other_calls(timed: Sequence[ReportRow]) -> list[str]:
    """Name the runs not decoded in turn with AR. Their intervals do not include changes of the machine."""
    if not (names := [_name(row) for row in timed if row.over_ar.decoded_apart]):
        return []
    listed = f"{names[0]} and {len(names) - 1} others" if len(names) > 3 else enumerated(names)
    return [
        f"{listed}: decoded in another call than AR; the intervals do not include changes of the machine between the "
        "calls. One command decodes all in turn (with another --out)."
    ]


def _free_window(row: ReportRow) -> str | None:
    """The speed-up if a wide forward took as long as a forward of a single token."""
    cost, steps, overhead = row.over_ar.window_cost, row.over_ar.step_ratio, row.over_ar.overhead
    if not cost or cost <= _COSTLY_WINDOW or not steps or not overhead:
        return None
    length = round(row.number("nfe").value * row.number("tokens_per_step").value)  # of an image; no window is wider
    window = window_of(row.options)
    fed = columns_fed({**row.options, "window": min(window, length)}) if window else "several"
    return (
        f"A target forward of {fed} tokens takes {number(cost)} times as long as a forward of a single token here. At "
        f"equal cost {row.label} would be {number(steps / overhead)} times as fast as AR."
    )


def _quality(chosen: Sequence[ReportRow], rows: Sequence[ReportRow]) -> list[str]:
    """Describe the score differences between the chosen runs and AR: real differences, then the other scores."""
    compared: list[tuple[str, Compared]] = []
    for row in (row for row in chosen if row.over_ar.ar_folder is not None):
        beside = scores_beside(row.over_ar.ar_folder, row.folder)
        compared += [(_name(row), score) for score in corrected(beside) if score.estimate]
    names = {score.name for _, score in compared}
    scores = [score for row in rows if row.decoder == "ar" for score in row.scores] if compared else []
    needed = [score.prompts_needed for score in scores if score.metric in names]
    equal: dict[str, list[str]] = {}
    unclear: dict[str, list[Compared]] = {}
    for who, score in compared:
        if score.estimate.value == score.estimate.low == score.estimate.high == 0:
            equal.setdefault(who, []).append(score.name)
        elif not score.real:
            unclear.setdefault(who, []).append(score)
    return [
        *(
            f"{who} scores {number(abs(score.value), 3)} {'lower' if score.value < 0 else 'higher'} in {score.name} "
            f"than AR{_bounds(score)} over {score.n} images."
            for who, score in compared
            if score.real
        ),
        *(f"{who} has the same scores as AR, image by image, in {', '.join(names)}." for who, names in equal.items()),
        *_untold(unclear, needed),
    ]


def _untold(unclear: Mapping[str, Sequence[Compared]], needed: Sequence[int | None]) -> list[str]:
    """Name the differences that are not real, and the prompts needed to detect one: theirs if known, else `needed`."""
    if not unclear:
        return []
    scores = [score for of_one in unclear.values() for score in of_one]
    counts = [score.prompts_needed for score in scores if score.prompts_needed] or [n for n in needed if n]
    change = f"{100 * CHANGE:g} %"
    most = f" To detect a change of {change}, up to {max(counts):,} prompts are needed." if counts else ""
    listed = (f"{who} in {', '.join(s.name + _bounds(s) for s in of_one)}" for who, of_one in unclear.items())
    images = min(score.n for score in scores)
    few = f"{images} image{'s' if images != 1 else ''}"
    return [f"No difference from AR's scores is shown over {few}: {'; '.join(listed)}.{most}"]


def _bounds(score: Compared) -> str:
    low, high = score.estimate.low, score.estimate.high
    return "" if low is None else f" [{between(low, high, 3)}]"


def _untimed(rows: Sequence[ReportRow], timed: Sequence[Mapping]) -> list[str]:
    """The reason if no decoder of the section has a speed-up."""
    missing = [row for row in rows if row.over_ar.speedup is None and row.decoder != "ar"]
    if timed or not missing:
        return []
    reasons = dict.fromkeys(re.sub(r"\s+", " ", str(row.over_ar.speedup_note)) for row in missing)
    sentences = [f"No speed-up can be given: {'; '.join(reasons)}."]
    decoded = [row for row in missing if not row.imported]  # the times of another program are not comparable with AR's
    if decoded and all(row.over_ar.baseline is None for row in missing):
        folder = decoded[0].folder
        if all(reason.startswith("differs") for reason in reasons) and any(row.decoder == "ar" for row in rows):
            return [*sentences, "To compare: decode both in one command, with another --out."]  # AR is stored already
        sentences.append(f"To add AR: {read_info(folder).command('ar', folder.parent)}")
    return sentences


def _interval(row: ReportRow, corrected_p: float | None = None, tests: int = 1) -> str:
    """Format the interval; add the p-value if it disagrees. `corrected_p` is corrected for `tests` tests."""
    speed = row.quoted.speedup
    if speed.low is None:
        return ""
    p = row.quoted.speedup_p if corrected_p is None else corrected_p
    p_text = "" if is_real(p) or speed.low <= 1 <= speed.high else f", p = {number(p, 3)} in a paired t test"
    of_several = f" as the best of {tests}" if p_text and tests > 1 else ""
    return f"[{between(speed.low, speed.high)}{p_text}{of_several}]"


def _real(row: ReportRow) -> bool:
    """Return whether the run's speed differs from AR's, by `specbench.stats.RULE`."""
    return is_real(row.quoted.speedup_p)
