"""A comparison of two runs in words: which is which, what is real, and the numbers as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.reporting.columns import MISSING, TOO_FEW, between, number
from specbench.reporting.compare import CHANGE, FEW_NOTE

SIGNIFICANT = 0.05
HEADINGS = ("number", "value", "95 %", "p (Holm)", "images", "prompts needed")
_NAMES = {
    "speedup": "speed-up, B over A",
    "speedup_reverse": "speed-up, A over B",
    "step_ratio": "steps, A over B",
    "window_cost": "window cost, B over A",
    "overhead": "overhead, B over A",
    "latency_a_ms": "mean latency of A, ms",
    "median_a_ms": "median latency of A, ms",
    "latency_b_ms": "mean latency of B, ms",
    "median_b_ms": "median latency of B, ms",
}
"""Names of the numbers about speed; every other row is a score difference, B minus A."""
_LEAST_P = 0.0001


def verdict(rows: Sequence[Mapping]) -> str:
    """What of the rows of `specbench.reporting.compare.compare_runs` is real at the 5 % level, in one sentence."""
    said = {True: [], False: []}
    tests = sum(row["p_holm"] is not None for row in rows)
    for row in rows:
        if row["value"] is None or (row["name"] in _NAMES and row["name"] != "speedup"):
            continue
        real = row["p_holm"] is not None and row["p_holm"] < SIGNIFICANT
        said[real].append(
            _speed(row) if real and row["name"] == "speedup" else _score(row) if real else _open(row, tests)
        )
    real = f"Real: {', '.join(said[True])}" if said[True] else "No difference is shown to be real"
    open_ = f"; not told apart: {', '.join(said[False])}" if said[False] else ""
    if said[True] or said[False]:
        return f"{real}{open_}."
    steps = next((row["value"] for row in rows if row["name"] == "step_ratio"), None)
    if steps is None:
        return "Nothing could be compared."
    return f"Only steps could be compared: A takes {number(steps)} times as many as B."


def directions(a: str, b: str) -> list[str]:
    """Which run is A and which is B, and what the signs mean."""
    return [
        f"A (baseline): {a}",
        f"B: {b}",
        "A speed-up above 1 means that B is faster; a difference above 0 means that B scores higher.",
    ]


def comparison_lines(rows: Sequence[Mapping]) -> list[tuple[str, ...]]:
    """One line per compared number, in the order of `HEADINGS`; rows without a value are left to `reasons`."""
    return [
        (
            _title(row),
            _value(row),
            _bounds(row),
            _p(row["p_holm"]),
            str(row["n"] or MISSING),
            f"{row['prompts_needed']:,}" if row["prompts_needed"] else MISSING,
        )
        for row in rows
        if row["value"] is not None
    ]


def reasons(rows: Sequence[Mapping]) -> list[str]:
    """Why numbers are missing or restricted, and what the last column means."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["note"]:
            said.setdefault(row["note"], []).append(_title(row))
    needed = (
        f"Prompts needed: to detect a change of {100 * CHANGE:g} % of the speed-up, or of A's score, with 80 % power."
    )
    return [
        *(f"{'; '.join(names)}: {note}." for note, names in said.items()),
        *([needed] if any(row["prompts_needed"] for row in rows) else []),
    ]


def _correction(row: Mapping, tests: int) -> str:
    """Why a number whose own interval leaves out "no difference" is not told apart."""
    none = 1 if row["name"] == "speedup" else 0
    if row["low"] is None or row["p_holm"] is None or row["low"] <= none <= row["high"]:
        return ""
    return f"; p = {_p(row['p_holm'])} once corrected for {tests} comparisons"


def _open(row: Mapping, tests: int) -> str:
    name = "speed" if row["name"] == "speedup" else row["name"]
    return f"{name} ({_value(row)}{_interval(row)}{_correction(row, tests)})"


def _speed(row: Mapping) -> str:
    way = "faster" if row["value"] > 1 else "slower"
    return f"B is {way} than A, {_value(row)} times its speed{_interval(row)}"


def _score(row: Mapping) -> str:
    return f"B scores {'higher' if row['value'] > 0 else 'lower'} in {row['name']}, by {_value(row)}{_interval(row)}"


def _interval(row: Mapping) -> str:
    return "" if row["low"] is None else f" [{between(row['low'], row['high'], _digits(row))}]"


def _bounds(row: Mapping) -> str:
    if row["low"] is not None:
        return between(row["low"], row["high"], _digits(row))
    return TOO_FEW if FEW_NOTE in (row["note"] or "") else MISSING


def _title(row: Mapping) -> str:
    return _NAMES.get(row["name"], f"{row['name']}, B minus A")


def _value(row: Mapping) -> str:
    whole = row["name"].endswith("_ms") and row["value"] >= 100
    return number(row["value"], 0 if whole else 2) if row["name"] in _NAMES else f"{row['value']:+,.3f}"


def _digits(row: Mapping) -> int:
    return 2 if row["name"] in _NAMES else 3


def _p(p: float | None) -> str:
    if p is None:
        return MISSING
    return f"< {_LEAST_P}" if p < _LEAST_P else f"{p:.4f}"
