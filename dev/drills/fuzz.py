"""Fuzz specbench with invalid inputs: each must be accepted correctly or rejected with one line.

    python dev/drills/fuzz.py [--cases 10500] [--seed 0] [--seconds 150]    # resumes from the log
    python dev/drills/fuzz.py --only "parquet parts"
    python dev/drills/fuzz.py --guided --only "parquet parts" --seconds 60    # needs `pip install atheris`
    python dev/drills/fuzz.py --report

A case fails by any error except a refusal (exit code 2 or 5), if it takes longer than a minute, or if it writes outside
its folder, uses the network or starts a shell. Hypothesis draws cases (`cases.py`) from the seed and shrinks a failing
case. With `--guided` it builds cases from inputs with which atheris reached new code. Groups of cases that passed
are lines of results/drills/fuzz.jsonl.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, seed, settings

from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, SpecbenchError
from specbench.system.version import __version__

LOG = Path(__file__).parents[2] / "results" / "drills" / "fuzz.jsonl"
PIECE = 50
"""Cases per log entry."""
LIMIT_S = 60.0
REFUSALS = (BAD_INPUT, MISSING_PREREQUISITE)
_LOOPBACK = "127.0.0.1"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_RELATIVE = {"os.mkdir", "os.remove", "os.rmdir"}
"""Events whose last argument may be an open folder; the path is then relative to this folder."""
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}


class Hang(BaseException):
    """A case took longer than `LIMIT_S`."""


class Watch:
    """Sandbox: watch audit events for actions outside one folder. A process has one hook, which cannot be removed."""

    def __init__(self):
        self._box: tuple[str, ...] | None = None
        self._seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def inside(self, box: Path) -> Iterator[None]:
        """Let the block write in `box` and the cache folder only, reach no network, start no shell, and end in time."""
        self._seen, alarm = [], signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        kept = os.environ.get("SPECBENCH_CACHE")  # the machine's own files are written there
        self._box = tuple(f"{Path(place).resolve()}{os.sep}" for place in (box, kept) if place)
        usual, tempfile.tempdir = tempfile.tempdir, str(box)
        try:
            yield
        finally:
            self._box, tempfile.tempdir = None, usual
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        assert not self._seen, self._seen

    def _hook(self, event: str, arguments: tuple) -> None:
        if self._box is None:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and flags & _WRITING:
                self._check(event, path)
        elif event in _CHANGES:
            folder = arguments[-1] if event in _RELATIVE else -1
            for path in arguments[event == "os.symlink" :]:  # the target of a link is not written
                if isinstance(path, str | bytes | os.PathLike):
                    self._check(event, path if folder == -1 else f"/proc/self/fd/{folder}/{os.fsdecode(path)}")
        elif event == "socket.connect" and arguments[1][0] == _LOOPBACK:  # a hub that the drill serves
            return
        elif event in ("socket.connect", "os.system", "pickle.find_class"):
            self._seen.append(event)
        elif event == "subprocess.Popen" and os.path.basename(str(arguments[0])) in ("sh", "bash"):
            self._seen.append(f"{event} {arguments[1]}")

    def _check(self, event: str, path) -> None:
        where = os.path.realpath(os.fsdecode(path))
        if not f"{where}{os.sep}".startswith(self._box) and where != os.devnull:
            self._seen.append(f"{event} {where}")


def _ring(*_) -> None:
    raise Hang


def attempt(call: Callable[[], object]) -> str:
    """Run a case; returns "accepted" or "refused", raises on any other outcome."""
    try:
        call()
        return "accepted"
    except SpecbenchError as error:
        assert error.exit_code in REFUSALS, error
        assert error.what.strip(), "a refusal names the refused input"
        return "refused"


def judge(target, outcomes: Counter, watch: Watch) -> Callable[[], None]:
    """Build the hypothesis test of a `targets.Target`; it raises on failures and counts other results in `outcomes`."""

    @given(target.cases)
    def test(case) -> None:
        before = time.perf_counter()
        with tempfile.TemporaryDirectory() as outside:
            box = Path(outside) / "box"
            box.mkdir()
            target.prepare(box, case)
            with watch.inside(box):
                outcomes[attempt(lambda: target.call(box, case))] += 1
            assert os.listdir(outside) == ["box"]
        outcomes["slowest_ms"] = max(outcomes["slowest_ms"], round(1000 * (time.perf_counter() - before)))

    return test


def drive(target, cases: int, number: int, watch: Watch) -> Counter:
    """Outcomes of `cases` cases, drawn from the seed `number`.

    Raises:
        AssertionError, Hang, or any error of a case, with the smallest case that raises it.
    """
    outcomes: Counter = Counter()
    limits = settings(
        max_examples=cases,
        database=None,
        deadline=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    # Files of a case are deleted after it, so they need not survive a power failure.
    with patch.dict(os.environ, HF_HUB_OFFLINE="1"), patch("os.fsync", lambda handle: None):
        seed(number)(limits(judge(target, outcomes, watch)))()
    return outcomes


def guide(only: str, seconds: float) -> None:
    """Run coverage-guided fuzzing with atheris until the time is up. Ends this process."""
    import atheris

    with atheris.instrument_imports(include=["specbench"]):  # some modules are imported only by the first case
        from targets import TARGETS

        (target,) = (target for target in TARGETS if target.name == only)
        seeds = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
        for number in range(64):
            (seeds / str(number)).write_bytes(random.Random(number).randbytes(1024))
        limits = ("-timeout=0", "-rss_limit_mb=0", "-len_control=0", f"-artifact_prefix={seeds}/")
        os.environ["HF_HUB_OFFLINE"] = "1"
        atheris.Setup([sys.argv[0], *limits, str(seeds)], _until(time.monotonic() + seconds, target))
        atheris.Fuzz()


def _until(ends: float, target) -> Callable[[bytes], None]:
    """Entry point of the fuzzer: logs the outcomes and exits when the time is up."""
    outcomes: Counter = Counter()
    limits = settings(deadline=None, database=None)
    fuzz = limits(judge(target, outcomes, Watch())).hypothesis.fuzz_one_input

    def entry(data: bytes) -> None:
        fuzz(data)
        if time.monotonic() > ends:
            log(f"{target.name}, by coverage", outcomes)
            os._exit(0)

    return entry


def drill(cases: int, base: int, seconds: float, only: str | None = None) -> None:
    """Run until every target has had its share of the cases, or until the time is up."""
    from targets import TARGETS

    ends, watch = time.monotonic() + seconds, Watch()
    LOG.parent.mkdir(exist_ok=True)
    for target in TARGETS:
        while only in (None, target.name) and time.monotonic() < ends:
            passed = [row for row in logged() if row["target"] == target.name]
            if sum(row["cases"] for row in passed) >= target.share * cases:
                break
            number = base * 10**6 + len(passed)
            log(target.name, drive(target, PIECE, number, watch), seed=number)
    print(report())


def log(target: str, tally: Counter, **more: object) -> None:
    row = {"target": target, **more, "specbench": __version__, "cases": tally["accepted"] + tally["refused"], **tally}
    with LOG.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def logged() -> list[dict]:
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


def report() -> str:
    """Format the log as a markdown table."""
    totals: dict[str, Counter] = {}
    for row in logged():
        counts = totals.setdefault(row["target"], Counter())
        slowest = max(counts["slowest_ms"], row["slowest_ms"])
        counts.update({name: row.get(name, 0) for name in ("cases", "accepted", "refused")})
        counts["slowest_ms"] = slowest
    everything = sum(totals.values(), Counter())
    everything["slowest_ms"] = max((counts["slowest_ms"] for counts in totals.values()), default=0)
    names = ("cases", "accepted", "refused", "slowest_ms")
    lines = ["| input | cases | accepted | refused in one line | slowest, ms |", "| --- | ---: | ---: | ---: | ---: |"]
    for target, counts in [*totals.items(), ("all", everything)]:
        lines.append(f"| {target} | {' | '.join(f'{counts[name]:,}' for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time; run again to continue")
    parser.add_argument("--only", help="use only this kind of input")
    parser.add_argument("--guided", action="store_true", help="coverage-guided, with atheris; requires --only")
    parser.add_argument("--report", action="store_true", help="print the table of the log")
    options = parser.parse_args()
    os.environ.setdefault("SPECBENCH_CACHE", tempfile.mkdtemp(prefix="specbench-fuzz-"))
    if options.report:
        print(report())
    elif options.guided:
        guide(options.only, options.seconds)
    else:
        drill(options.cases, options.seed, options.seconds, options.only)


if __name__ == "__main__":
    main()
