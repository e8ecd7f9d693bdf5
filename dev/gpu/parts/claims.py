"""Claims: the lines of the report."""

MET, MISSED, TOLD, FAILED = "met", "missed", "told", "failed"
"""Verdicts of a claim; `told` means a number without a goal."""

Outcome = tuple[list[dict], list[dict]]
"""Claims and raw rows of a part, or of a piece of it."""


def claim(what: str, value: object, goal: str = "-", met: bool | None = None) -> dict[str, object]:
    """One line; if `met` is None, the number has no goal."""
    return {"what": what, "value": value, "goal": goal, "verdict": TOLD if met is None else MET if met else MISSED}


def failure(text: str) -> dict[str, object]:
    """The claim of a part that failed."""
    return {"what": "the part runs to its end", "value": " ".join(text.split())[:300], "goal": "-", "verdict": FAILED}
