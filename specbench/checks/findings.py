"""Results of conformance tests, for decoders, models, metrics and prompt sets alike; claims of runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specbench.errors import SpecbenchError, place
from specbench.system import console
from specbench.system.json_values import Word


class Status(Word):
    """Outcome of a conformance test."""

    OK, FAILED, SKIPPED, SLOW = "ok", "failed", "skipped", "slow"


OK, FAILED, SKIPPED, SLOW = Status


class Declared(Word):
    """Declared distribution of a run's tokens; `CLAIMED`: what the user claims about tokens of another program."""

    LOSSLESS, LOSSY, CLAIMED = "lossless", "lossy", "the model's"


@dataclass(frozen=True)
class Finding:
    """Result of one test: its name, its status, and what was measured, in words."""

    check: str
    status: Status
    detail: str


def finding(name: str, wrong: Sequence[str], fine: str) -> Finding:
    """Result of a test that found the problems `wrong`; repeated problems are listed once."""
    return Finding(name, FAILED, "; ".join(dict.fromkeys(wrong))) if wrong else Finding(name, OK, fine)


def run_tests(tests: Iterable[tuple[str, Callable[[], Finding]]]) -> list[Finding]:
    """Run named tests. A test that raises an error has failed."""
    findings = []
    for title, test in tests:
        if console.has_bars(console.stderr()):
            console.say(f"testing {title}")
        try:
            findings.append(test())
        except SpecbenchError as error:
            findings.append(Finding(title, FAILED, f"the test stopped with an error: {error.what}"))
        except Exception as error:  # user code may raise any error; the error is the finding
            findings.append(Finding(title, FAILED, f"the test raised {type(error).__name__}{place(error)}: {error}"))
    return findings
