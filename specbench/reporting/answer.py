"""Summary of a report in sentences: speed-up, loss of quality, unclear differences, disturbed timings."""

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from specbench.errors import enumerated
from specbench.reporting.columns import FAILED_AUDIT, between, bracketed, failed_audit, number
from specbench.reporting.compare import CONSTANT_NOTE, corrected, scores_beside, stall_note, with_fingerprints
from specbench.reporting.marks import window_of
from specbench.reporting.row import SIGNS, Quoted, ReportRow
from specbench.specs.components import columns_fed
from specbench.stats.intervals import CHANGE, holm, is_real
from specbench.store.run_info import read_info
from specbench.system.console import counted
from specbench.system.monitor import BUSY_CORES

_COSTLY_WINDOW = 1.1
_IMPLAUSIBLE_WINDOW = 0.8
"""Smallest plausible window cost. A smaller cost shows that the machine changed between the runs."""


class _Timed(NamedTuple):
    """A report row and the speed-up that sentences quote."""

    row: ReportRow
    quoted: Quoted

    @property
    def exact(self) -> bool:
        return self.row.lossless and not failed_audit(self.row)

    @property
    def real(self) -> bool:
        """Whether the run's speed differs from AR's, by `specbench.stats.RULE`."""
        return is_real(self.quoted.speedup_p)

    @property
    def baseline(self) -> str:
        """Name of the baseline: AR in the same configuration, or in a faster configuration."""
        return "AR" if self.quoted.ar_run == self.row.over_ar.baseline else f"the fastest AR ({self.quoted.ar})"


def answer(rows: Sequence[ReportRow]) -> list[str]:
    """Summarise the report rows of one section, the most important sentence first; empty if AR is the only decoder."""
    quoted = [(row, row.over_fastest.quoted) for row in rows if not row.is_ar]
    against_ar = [_Timed(row, speed) for row, speed in quoted if speed]
    apart = [timed.row for timed in against_ar if (timed.row.over_ar.window_cost or 1) < _IMPLAUSIBLE_WINDOW]
    timed = [run for run in against_ar if (run.row.over_ar.window_cost or 1) >= _IMPLAUSIBLE_WINDOW]
    timed.sort(key=lambda run: -run.quoted.speedup.value)
    exact = [run for run in timed if run.exact]
    faster = [run for run in timed[:1] if not run.exact]
    chosen = [run.row for run in (*exact[:1], *faster)]
    return [
        *([_fastest(exact)] if exact else []),
        *map(_with_loss, faster),
        *(sentence for row in chosen[:1] if (sentence := _free_window(row))),
        *_quality(chosen, rows),
        *map(_apart, apart),
        *_other_calls([run.row for run in timed]),
        *([] if against_ar else _untimed(rows)),
        *(f"{_name(row)}: {copy} is a copy of this run and is omitted." for row in rows for copy in row.copies or ()),
        *_unequal_windows(rows),
        *disturbances(rows),
    ]


def _unequal_windows(rows: Sequence[ReportRow]) -> list[str]:
    """Name the windows if decoders have unequal windows, unless one decoder was run with several windows (a sweep)."""
    windows: dict[str, set[int]] = {}
    for row in rows:
        if isinstance(window := row.options.get("window"), int):
            windows.setdefault(row.decoder, set()).add(window)
    swept = any(len(several) > 1 for several in windows.values())
    listed = ", ".join(f"{name} {window}" for name, (window, *_) in windows.items())
    alike = len(set(map(frozenset, windows.values()))) < 2
    return [] if swept or alike else [f"Windows differ: {listed}. --window N gives all decoders the same window."]


def disturbances(rows: Sequence[ReportRow]) -> list[str]:
    """Describe disturbed measurements: stalled images, batches that did not fit in memory, and other processes."""
    lines = _stalls(rows)
    lines += [
        f"{_name(row)}: {row.machine.one_by_one} of {row.n} images were decoded in smaller batches."
        for row in rows
        if row.machine.one_by_one
    ]
    lines += [
        f"{_name(row)}: {count} of {row.n} images were decoded under {stack}"
        f"{f', not {row.machine.versions}' * (str(row.machine.versions) not in stack)}; their times are omitted."
        for row in rows
        for stack, count in (row.machine.untimed or {}).items()
    ]
    cores = max((row.machine.disturbed or 0 for row in rows), default=0)
    if cores > BUSY_CORES and any(row.number("latency_ms") for row in rows):
        taken = f"Other processes used up to {number(cores, 1)} CPU cores that these runs needed"
        lines += [f"{taken}: repeat the timings on an idle machine."]
    slowed = [(row, row.machine.gpu_disturbed) for row in rows]
    lines += [f"{_name(row)}: {'; '.join(why)}." for row, why in slowed if why]
    lines += [
        f"{_name(row)}: its run.json was edited after the run, so the settings do not match the run id."
        for row in rows
        if row.settings_changed
    ]
    return lines + _versions(rows)


def _versions(rows: Sequence[ReportRow]) -> list[str]:
    """Name the versions of specbench that decoded the rows, if there are several."""
    by: dict[str, list[str]] = {}
    for row in rows:
        for version in dict.fromkeys(re.findall(r"specbench ([^,]+)", ", ".join(row.machine.environment))):
            by.setdefault(version, []).append(row.label)
    listed = "; ".join(f"{version} ({', '.join(dict.fromkeys(labels))})" for version, labels in by.items())
    return [f"Decoded by several versions of specbench: {listed}."] if len(by) > 1 else []


def _stalls(rows: Sequence[ReportRow]) -> list[str]:
    """Describe the slowest stalled image and its decoder, and name other decoders with stalled images."""
    stalled = [(row.machine.stalled.slowest_ms, row) for row in rows if row.machine.stalled]
    if not stalled:
        return []
    _, worst = max(stalled, key=itemgetter(0))
    others = [row for _, row in stalled if row is not worst]
    named = _name(others[0]) if len(others) == 1 else f"{len(others)} other decoders"
    also = f" Images of {named} also stalled." if others else ""
    note = stall_note(worst.machine.stalled, worst.n, worst.number("latency_p50_ms"))
    return [f"{_name(worst)}: {note}.{also}"]


def _name(row: ReportRow) -> str:
    window = window_of(row.options)
    return f"{row.label} (window {window})" if window and "window" in row.options else row.label


def _fastest(exact: Sequence[_Timed]) -> str:
    """Name the fastest lossless decoder, and decoders whose intervals overlap it; p is corrected for the selection."""
    best, *others = exact
    p = dict(zip((run.row.run_id for run in exact), holm([run.quoted.speedup_p for run in exact]), strict=True))
    corrected = p[best.row.run_id]
    quoted, name, ar, best_is_real = best.quoted, _name(best.row), best.baseline, is_real(corrected)
    speed, value, interval = quoted.speedup, number(quoted.speedup.value), _interval(quoted, corrected, len(exact))
    images = f"{quoted.pairs} image{'s' if quoted.pairs != 1 else ''}"
    if speed.low is None and speed.value < 1:
        sentence = (
            f"{ar[:1].upper()}{ar[1:]} was the fastest lossless decoder; the next, {name}, ran {value} times as fast "
            f"in {images}: too few for an interval"
        )
    elif speed.low is None:
        sentence = (
            f"{name} ran {value} times as fast as {ar} in {images}: too few for an interval, and to call it the fastest"
        )
    elif speed.value > 1 and best_is_real:
        sentence = f"{name} is the fastest lossless decoder: {value} times as fast as {ar} {interval} over {images}"
    elif shown := next((run for run in others if run.quoted.speedup.value > 1 and is_real(p[run.row.run_id])), None):
        sentence = (
            f"{name} has the largest speed-up of a lossless decoder, {value} {interval} over {images}, but is not "
            f"shown to be faster than {ar}; {_name(shown.row)} is faster: {number(shown.quoted.speedup.value)} "
            f"{_interval(shown.quoted, shown.quoted.speedup_p)}"
        )
    elif speed.value < 1 and best_is_real:
        sentence = f"No lossless decoder is faster than {ar}: the best, {name}, runs {value} {interval} times as fast"
    else:
        sentence = (
            f"No lossless decoder is shown to be faster than {ar}: the best, {name}, runs {value} times as fast "
            f"{interval} over {images}"
        )
    highest = ((run.row, run.quoted.speedup.high) for run in others)
    level = [_name(row) for row, high in highest if high and high >= (speed.low or 0)]
    sentence += f"; intervals overlap with {', '.join(level)}" if level else ""
    sentence += ", on a busy machine" * any((run.row.machine.disturbed or 0) > BUSY_CORES for run in exact)
    return "; ".join(filter(None, (sentence, quoted.eager_ar))) + "."


def _with_loss(run: _Timed) -> str:
    """Describe the fastest of all decoders, given that this decoder is not lossless."""
    quoted, value = run.quoted, run.quoted.speedup.value
    kind = f"is declared lossless and {FAILED_AUDIT}" if failed_audit(run.row) else "is lossy"
    slower = ", and slower" if value < 1 and run.real else ", not shown to be faster"
    shown = "" if value > 1 and run.real else slower
    speed = f"{number(value)} times as fast as {run.baseline} {_interval(quoted, quoted.speedup_p)}".rstrip()
    return "; ".join(filter(None, (f"{_name(run.row)} {kind}{shown}: {speed}", quoted.eager_ar))) + "."


def _apart(row: ReportRow) -> str:
    """Explain why the speed-up of a run over AR is not meaningful."""
    return (
        f"The speed-up of {_name(row)} is meaningless: its forwards took {number(row.over_ar.window_cost)} times "
        "as long as AR's forwards of a single token, so AR ran on a slower or busy machine. Decode both in one "
        "command, with another --out."
    )


def _other_calls(timed: Sequence[ReportRow]) -> list[str]:
    """Name the runs decoded in another call than AR: the intervals exclude changes of the machine between calls."""
    if not (names := [_name(row) for row in timed if row.over_ar.decoded_apart]):
        return []
    listed = f"{names[0]} and {len(names) - 1} others" if len(names) > 3 else enumerated(names)
    return [
        f"{listed}: not decoded in the same call as AR; the intervals do not include changes of the machine between "
        "the calls. To decode all in turn, use one command, with another --out."
    ]


def _free_window(row: ReportRow) -> str | None:
    """Predict the speed-up if a wide forward took as long as a forward of a single token; None if it nearly does."""
    cost, speed = row.over_ar.window_cost, row.over_ar.equal_forwards
    nfe, tokens = row.number("nfe"), row.number("tokens_per_step")
    if not cost or cost <= _COSTLY_WINDOW or not speed or not nfe or not tokens:
        return None
    length = round(nfe.value * tokens.value)  # number of tokens of an image, which limits the window
    window = window_of(row.options)
    fed = columns_fed({**row.options, "window": min(window, length)}) if window else "several"
    return (
        f"A target forward of {fed} tokens takes {number(cost)} times as long as a forward of a single token here. If "
        f"both cost the same, and all other times stayed, {row.label} would be {number(speed)} times as fast as AR."
    )


def _quality(chosen: Sequence[ReportRow], rows: Sequence[ReportRow]) -> list[str]:
    """Describe the score differences between the chosen runs and AR: real differences, then the other scores."""
    compared = [
        (_name(row), score, score.estimate)
        for row in chosen
        if row.over_ar.ar_folder is not None
        for score in with_fingerprints(corrected(scores_beside(row.over_ar.ar_folder, row.folder)))
        if score.estimate
    ]
    scores = {score.fingerprint for _, score, _ in compared}
    equal: dict[str, list[str]] = {}
    untested: dict[str, list[str]] = {}
    unclear: dict[str, list[str]] = {}
    open_scores = []
    for who, score, gap in compared:
        if gap.value == 0 and CONSTANT_NOTE in (score.note or ""):
            equal.setdefault(who, []).append(score.name)
        elif score.p_holm is None:
            untested.setdefault(who, []).append(score.name)
        elif not score.real:
            unclear.setdefault(who, []).append(score.name + bracketed(gap, 3))
            open_scores.append(score)
    sentences = [
        f"{who} scores {number(abs(gap.value), 3)} {'lower' if gap.value < 0 else 'higher'} "
        f"({'better' if gap.value * SIGNS[score.better] > 0 else 'worse'}) in {score.name} than "
        f"AR{bracketed(gap, 3)} over {score.n} images."
        for who, score, gap in compared
        if score.real
    ]
    sentences += [f"{who} and AR have the same {', '.join(of)} for every prompt." for who, of in equal.items()]
    sentences += [f"Not tested: {', '.join(of)} of {who} (too few prompts)." for who, of in untested.items()]
    if not unclear:
        return sentences
    # Number of prompts that detects a change: from the unclear differences if known, else from AR's scores.
    needed = [score.prompts_needed for score in open_scores if score.prompts_needed]
    of_ar = [score for row in rows if row.is_ar for score in row.scores if score.fingerprint in scores]
    needed = needed or [score.prompts_needed for score in of_ar if score.prompts_needed]
    change = f" To detect a change of {100 * CHANGE:g} %, up to {max(needed):,} prompts are needed." if needed else ""
    listed = "; ".join(f"{who} in {', '.join(of)}" for who, of in unclear.items())
    least, most = (pick(score.n or 0 for score in open_scores) for pick in (min, max))
    over = f"{least} to {most} images" if least < most else counted(most, "image")
    return [*sentences, f"No difference from AR's scores is shown over {over}: {listed}.{change}"]


def _untimed(rows: Sequence[ReportRow]) -> list[str]:
    """If no decoder of the section has a speed-up, give the reason."""
    missing = [row for row in rows if row.over_ar.speedup is None and not row.is_ar]
    if not missing:
        return []
    reasons = dict.fromkeys(re.sub(r"\s+", " ", str(row.over_ar.speedup_note)) for row in missing)
    sentences = [f"No speed-up can be given: {'; '.join(reasons)}."]
    decoded = [row for row in missing if not row.imported]  # times of other programs are not comparable
    if decoded and all(row.over_ar.baseline is None for row in missing):
        folder = decoded[0].folder
        if any(row.is_ar for row in rows):  # AR has other settings, or lacks latencies or images in common
            unlike = all(row.over_ar.unlike_ar for row in missing)
            return [*sentences, *["To compare: decode both in one command, with another --out."] * unlike]
        sentences.append(f"To add AR: {read_info(folder).command('ar', folder.parent)}")
    return sentences


def _interval(quoted: Quoted, p: float | None, tests: int = 1) -> str:
    """Format the interval. If p, corrected for `tests` tests, disagrees with the interval, add p."""
    low, high = quoted.speedup.low, quoted.speedup.high
    if low is None or high is None:
        return ""
    p_text = "" if is_real(p) or low <= 1 <= high else f", p = {number(p, 3)} in a paired t test"
    of_several = f" as the best of {tests}" if p_text and tests > 1 else ""
    return f"[{between(low, high)}{p_text}{of_several}]"
