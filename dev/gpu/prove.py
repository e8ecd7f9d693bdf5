"""Prove on a CUDA machine what a CPU cannot show: call `make gpu MINUTES=9` until no part is left.

The most important parts run first, as many as fit into the minutes, each in a separate process with a time limit. If
a part fails, hangs or breaks the CUDA context, the other parts are not affected. Parts that measure nothing run side by
side. A part is not measured again if it was measured on this device with the same files of this project, unless it is
named or has failed. A failed part is a row that says so; the exit code is then 1.

Each claim is printed as it comes, and `raw.json` (every measurement, versions, hardware) and `report.md` in
results/gpu/<device>/ are then written again, so a part that is cut off keeps its claims. If only one folder comes back
from the machine, `make gpu OUT=folder` keeps a copy there. `make docs` copies the table to dev/notes. Each part has its
date and commit, and the last line names the parts that are not done.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Lock, Timer

STARTED = time.perf_counter()  # the imports below take some of the minutes
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev" / name) for name in ("speed", "audit")]

from parts import PARTS  # noqa: E402  needs the path above
from parts.claims import FAILED, failure  # noqa: E402
from parts.scales import SCALES  # noqa: E402

from specbench.system import environment  # noqa: E402
from specbench.system.device_peaks import device_name  # noqa: E402
from specbench.system.files import write_atomically  # noqa: E402

OVER = 1.2
"""Limit of a part's time, relative to its last measured time."""


Piece = dict[str, list]
"""Claims and raw rows of a part since its previous piece. The key `files`: files of this project that the part
uses."""


def pieces(name: str, device: str, scale: str) -> Iterator[Piece]:
    """Yield the outcome of one part in pieces, or the claim that it failed; the last piece contains its files."""
    files: list[str] = []
    try:
        outcome = PARTS[name].run(device, SCALES[scale])
        for claims, rows in [outcome] if isinstance(outcome, tuple) else outcome:
            files += [path for row in rows for path in row.pop("files", ())]
            yield {"claims": claims, "rows": rows}
    except Exception as error:  # another part may still work
        yield {"claims": [failure(f"{type(error).__name__}: {error}")], "rows": []}
    yield {"claims": [], "rows": [], "files": _own_files(files)}


def _own_files(more: Sequence[str]) -> list[str]:
    """Files of this project that this process has imported, and `more` files of programs that it started."""
    imported = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(path) for path in (*filter(None, imported), *more)]
    files = {path for path in paths if any(path.is_relative_to(ROOT / folder) for folder in ("specbench", "dev"))}
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def _digest(files: Sequence[str]) -> str | None:
    """Digest of files of this project; None if the list is empty or a file is missing."""
    if not files or not all((ROOT / file).is_file() for file in files):
        return None
    return hashlib.sha256(b"\0".join((ROOT / file).read_bytes() for file in files)).hexdigest()[:16]


_MARK = "piece "
_GROUPS: set[int] = set()
"""Process groups of the parts that run."""


def pieces_apart(name: str, device: str, scale: str, seconds: float) -> Iterator[Piece]:
    """`pieces` of a part in a separate process, which ends after `seconds` together with its child processes."""
    command = [sys.executable, __file__, "--part", name, "--device", device, "--scale", scale]
    with tempfile.TemporaryFile("w+") as stderr:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
        _GROUPS.add(child.pid)
        late = Timer(max(seconds, 1), _kill, [child.pid])
        late.start()
        done = False
        try:
            for line in child.stdout:
                if line.startswith(_MARK):
                    piece = json.loads(line.removeprefix(_MARK))
                    done = "files" in piece
                    yield piece
        finally:
            cut = not late.is_alive()
            late.cancel()
            _kill(child.pid)
            code = child.wait()
        if not done:
            stderr.seek(0)
            last = (stderr.read().strip().splitlines() or ["no message"])[-1]
            why = f"not done after {seconds:.0f} s" if cut else f"ended with {code}: {last}"
            yield {"claims": [failure(why)], "rows": []}


def _kill(group: int) -> None:
    """Kill a part and its child processes, which would disturb the next parts."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    _GROUPS.discard(group)


def _stop(number: int, _: object) -> None:
    for group in tuple(_GROUPS):
        _kill(group)
    sys.exit(128 + number)


def report(facts: dict[str, object], parts: Sequence[dict]) -> str:
    """Format the report as markdown."""
    lines = [
        f"# {facts['device']}",
        "",
        f"Measured {_dates(parts)} by `{facts['command']}`, scale {facts['scale']}.",
        "",
    ]
    lines += ["| part | what | value | goal | verdict |", "| --- | --- | --- | --- | --- |"]
    for part in parts:
        for claim in part["claims"]:
            cells = [part["part"], claim["what"], claim["value"], claim["goal"], claim["verdict"]]
            lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    times = ", ".join(f"{part['part']} {part['seconds']:.0f} s" for part in parts)
    return "\n".join([*lines, "", f"Times: {times}. Every measurement is in `raw.json`.", ""])


def _dates(parts: Sequence[dict]) -> str:
    """The dates of the parts."""
    return ", ".join(sorted({part["date"] for part in parts}))


def _before(path: Path, scale: str) -> list[dict]:
    """Results of earlier calls at this scale, for parts that still exist."""
    if not path.is_file():
        return []
    raw = json.loads(path.read_text())
    return [part for part in raw["parts"] if raw["scale"] == scale and part["part"] in PARTS]


def _failed(part: dict) -> bool:
    return any(claim["verdict"] == FAILED for claim in part["claims"])


def is_current(part: dict) -> bool:
    """Whether a part was measured with the current files of this project."""
    return not _failed(part) and part.get("digest") is not None and part["digest"] == _digest(part["files"])


def expected_seconds(name: str, before: Sequence[dict]) -> float:
    """Time limit of a part: its own limit, or a little more than its last measured time."""
    took = [part["seconds"] for part in before if part["part"] == name and not _failed(part)]
    return min(PARTS[name].seconds, OVER * took[0]) if took else PARTS[name].seconds


class Results:
    """Measured parts from a folder of the device and from other folders."""

    def __init__(self, device: str, scale: str, places: Sequence[Path]):
        self.device, self.scale, self._lock = device, scale, Lock()
        name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
        self.folders = [place / name for place in places]
        self.parts, self._here = _before(self.folders[0] / "raw.json", scale), environment.environment_facts()

    def put(self, part: dict) -> None:
        """Replace the earlier outcome of a part, and write all parts."""
        named = {"date": environment.now()[:10], "git": self._here["git"], "digest": _digest(part.get("files", ()))}
        with self._lock:
            self.parts = [*(old for old in self.parts if old["part"] != part["part"]), {**part, **named}]
            for folder in self.folders:
                write(folder, self.device, self.scale, self._here, self.parts)


def prove(
    results: Results,
    names: Sequence[str],
    minutes: float | None = None,
    run: Callable[[str, str, str, float], Iterator[Piece]] = pieces_apart,
    clock: Callable[[], float] = time.perf_counter,
    start: float | None = None,
) -> list[str]:
    """Run the parts that fit into the time, neighbours that are not `alone` side by side; returns the remaining parts.

    Args:
        names: parts to measure even if they are current; if empty, all parts that are not current.
        minutes: time limit of this call since its `start`; None means no limit.
        run: yields the pieces of a part; it takes the arguments of `pieces_apart`.
    """
    current = {part["part"] for part in results.parts if is_current(part)}
    names = list(names) or [name for name in PARTS if name not in current]
    end = (clock() if start is None else start) + 60 * minutes if minutes else float("inf")
    left: list[str] = []

    def done(name: str, room: float) -> None:
        began, part = clock(), {"part": name, "seconds": 0.0, "claims": [], "rows": []}
        for piece in run(name, results.device, results.scale, min(PARTS[name].seconds, room)):
            part = {**part, **{key: [*part.get(key, ()), *value] for key, value in piece.items()}}
            part["seconds"] = clock() - began
            lines = [f"{name}: {claim['verdict']}: {claim['what']}: {claim['value']}" for claim in piece["claims"]]
            print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr, flush=True)
            results.put(part)

    for alone, group in groupby(names, lambda name: PARTS[name].alone):
        for block in [[name] for name in group] if alone else [list(group)]:
            room = end - clock()
            # The first part of a call always runs, so that no part is left out forever.
            fits = [name for name in block if name is names[0] or expected_seconds(name, results.parts) <= room]
            left += [name for name in block if name not in fits]
            with ThreadPoolExecutor(len(fits) or 1) as pool:
                list(pool.map(partial(done, room=room), fits))
    return left


def write(folder: Path, device: str, scale: str, here: dict[str, object], parts: list[dict]) -> None:
    """Write `raw.json` and `report.md`; `here`: facts of the machine."""
    order = {name: number for number, name in enumerate(PARTS)}
    parts.sort(key=lambda part: order.get(part["part"], len(order)))
    facts = {"device": device_name(device), "command": "make gpu", "scale": scale}
    if device == "cpu" or scale != "full":
        facts["command"] = f"python dev/gpu/prove.py --device {device} --scale {scale}"
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**facts, **here, "parts": parts}
    write_atomically(folder / "raw.json", (json.dumps(raw, indent=1) + "\n").encode())
    write_atomically(folder / "report.md", report(facts, parts).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*PARTS, []],
        help="parts to measure again; default: all parts that are not measured with these files",
    )
    parser.add_argument("--device", default="cuda", help="torch device")
    parser.add_argument("--scale", choices=SCALES, help="full, or tiny for a trial; tiny on a CPU by default")
    parser.add_argument("--minutes", type=float, help="time limit of this call; no limit by default")
    parser.add_argument("--out", type=Path, help="folder of the results; results/gpu, or build/gpu for a trial")
    parser.add_argument("--copy", type=Path, help="folder of a copy of the results, updated with each claim")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = options.scale or ("tiny" if options.device == "cpu" else "full")
    # Only a full measurement belongs in results/gpu.
    out = options.out or ROOT / ("results" if scale == "full" else "build") / "gpu"
    places = [out, *([options.copy / "gpu"] if options.copy else [])]
    if unfit := [place for place in places if place.exists() and not place.is_dir()]:
        parser.error(f"{unfit[0]}: is not a folder")
    if options.part:
        for piece in pieces(options.part, options.device, scale):
            print(f"{_MARK}{json.dumps(piece)}", flush=True)
        return 0
    if problem := missing(options.device):
        print(f"error: --device {options.device}: {problem}", file=sys.stderr)
        return 5
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    results = Results(options.device, scale, places)
    left = prove(results, options.parts, options.minutes, start=STARTED)
    print(results.folders[0])
    if left:
        seconds = sum(expected_seconds(name, results.parts) for name in left)
        print(f"left, at most {seconds / 60:.0f} minutes: {', '.join(left)}; repeat the command", file=sys.stderr)
    return int(any(map(_failed, results.parts)))


def missing(device: str) -> str | None:
    """Reason why the device cannot be used; None if it can be used."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds none; for a trial on a CPU: --device cpu"
    return None


if __name__ == "__main__":
    sys.exit(main())
