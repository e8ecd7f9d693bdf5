"""Prove on a CUDA machine what a CPU cannot show: `make gpu MINUTES=9`, again until nothing is left.

Parts run in the order of their worth, as many as fit into the minutes, each in a process of its own with a time limit,
so that one that fails, hangs or breaks the CUDA context leaves the others alone. Parts that measure nothing run side by
side. A part that was measured on this device with the same files of this project is not measured again unless it is
named; one that failed is. A failed part is a row that says so; the exit code is then 1. Writes `raw.json` (every
measurement, versions, hardware) and `report.md` to results/gpu/<device>/ after every part; `make docs` brings the table
into the README. Each part has its date and commit, and its last line tells what is left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev" / name) for name in ("speed", "audit")]

from parts import PARTS  # noqa: E402  needs the path above
from parts.claims import FAILED, failure  # noqa: E402
from parts.scales import SCALES  # noqa: E402

from specbench.system import environment  # noqa: E402
from specbench.system.device_peaks import device_name  # noqa: E402
from specbench.system.files import write_atomically  # noqa: E402

OVER = 1.2
"""A part may take so much longer than it took before."""


def run_part(name: str, device: str, scale: str) -> dict[str, object]:
    """Claims and raw rows of one part, or the claim that it failed."""
    start = time.perf_counter()
    try:
        claims, rows = PARTS[name].run(device, SCALES[scale])
    except Exception as error:  # another part may still work
        claims, rows = [failure(f"{type(error).__name__}: {error}")], []
    seconds = time.perf_counter() - start
    files = _own_files([path for row in rows for path in row.pop("files", ())])
    return {"part": name, "seconds": seconds, "claims": claims, "rows": rows, "files": files}


def _own_files(more: Sequence[str]) -> list[str]:
    """Files of this project that this process has imported, and `more` of programs that it started."""
    imported = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(path) for path in (*filter(None, imported), *more)]
    own = {path for path in paths if any(path.is_relative_to(ROOT / folder) for folder in ("specbench", "dev"))}
    return sorted(path.relative_to(ROOT).as_posix() for path in own)


def _digest(files: Sequence[str]) -> str | None:
    """Digest of files of this project; None if there are none, or one is gone."""
    if not files or not all((ROOT / file).is_file() for file in files):
        return None
    return hashlib.sha256(b"\0".join((ROOT / file).read_bytes() for file in files)).hexdigest()[:16]


def run_apart(name: str, device: str, scale: str, seconds: float) -> dict[str, object]:
    """`run_part` in a process of its own."""
    command = [sys.executable, __file__, "--part", name, "--device", device, "--scale", scale]
    start, said = time.perf_counter(), ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])
        said = f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    except subprocess.TimeoutExpired:
        said = f"not done after {seconds:.0f} s"
    return {"part": name, "seconds": time.perf_counter() - start, "claims": [failure(said)], "rows": []}


def report(facts: dict[str, object], found: Sequence[dict]) -> str:
    """The markdown report."""
    lines = [
        f"# {facts['device']}",
        "",
        f"Measured {_dates(found)} by `{facts['command']}`, scale {facts['scale']}.",
        "",
    ]
    lines += ["| part | what | value | goal | verdict |", "| --- | --- | --- | --- | --- |"]
    for part in found:
        for one in part["claims"]:
            cells = [part["part"], one["what"], one["value"], one["goal"], one["verdict"]]
            lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    times = ", ".join(f"{part['part']} {part['seconds']:.0f} s" for part in found)
    return "\n".join([*lines, "", f"Times: {times}. Every measurement is in `raw.json`.", ""])


def _dates(found: Sequence[dict]) -> str:
    """The dates of the parts."""
    return ", ".join(sorted({part["date"] for part in found}))


def _before(path: Path, scale: str) -> list[dict]:
    """Parts of earlier calls at this scale that still exist."""
    if not path.is_file():
        return []
    raw = json.loads(path.read_text())
    return [part for part in raw["parts"] if raw["scale"] == scale and part["part"] in PARTS]


def is_current(part: dict) -> bool:
    """Whether a part was measured, with the files of this project as they are now."""
    failed = any(one["verdict"] == FAILED for one in part["claims"])
    return not failed and part.get("digest") is not None and part["digest"] == _digest(part["files"])


def expected_seconds(name: str, before: Sequence[dict]) -> float:
    """What a part may take: its limit, or a little more than it took when it was last measured."""
    took = [part["seconds"] for part in before if part["part"] == name and part["claims"][0]["verdict"] != FAILED]
    return min(PARTS[name].seconds, OVER * took[0]) if took else PARTS[name].seconds


def prove(
    device: str, scale: str, out: Path, names: Sequence[str], minutes: float | None = None, apart: bool = True
) -> tuple[Path, list[dict], list[str]]:
    """Run the parts that fit and write the results; returns the folder, what was found, and the parts that are left.

    Args:
        names: parts to measure, also again; all that are not current if there are none.
        minutes: that this call may take; None for all it needs.
    """
    folder = out / re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    found, here = _before(folder / "raw.json", scale), environment.environment_facts()
    current = {part["part"] for part in found if is_current(part)}
    names = list(names) or [name for name in PARTS if name not in current]
    end = time.perf_counter() + 60 * minutes if minutes else float("inf")
    lock = Lock()

    def done(name: str) -> bool:
        """Measure one part, if it fits; written at once, so that a program that is stopped loses no other."""
        left = end - time.perf_counter()
        if expected_seconds(name, found) > left:
            return False
        part = (
            run_apart(name, device, scale, min(PARTS[name].seconds, left)) if apart else run_part(name, device, scale)
        )
        said = [f"  {one['verdict']}: {one['what']}: {one['value']}" for one in part["claims"]]
        print("\n".join([name, *said]), file=sys.stderr, flush=True)
        measured = {"date": environment.now()[:10], "git": here["git"], "digest": _digest(part.get("files", ()))}
        with lock:
            found[:] = [*(one for one in found if one["part"] != name), {**part, **measured}]
            write(folder, device, scale, here, found)
        return True

    together = [name for name in names if not PARTS[name].alone]
    left = [name for name in names if PARTS[name].alone and not done(name)]
    with ThreadPoolExecutor(len(together) if apart and together else 1) as pool:
        left += [name for name, ran in zip(together, pool.map(done, together), strict=True) if not ran]
    return folder, found, left


def write(folder: Path, device: str, scale: str, here: dict[str, object], found: list[dict]) -> None:
    """Write `raw.json` and `report.md`; `here`: facts of the machine."""
    order = {name: number for number, name in enumerate(PARTS)}
    found.sort(key=lambda part: order.get(part["part"], len(order)))
    facts = {"device": device_name(device), "command": "make gpu", "scale": scale}
    if device == "cpu" or scale != "full":
        facts["command"] = f"python dev/gpu/prove.py --device {device} --scale {scale}"
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**facts, **here, "parts": found}
    write_atomically(folder / "raw.json", (json.dumps(raw, indent=1) + "\n").encode())
    write_atomically(folder / "report.md", report(facts, found).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*PARTS, []],
        help="parts to measure again; default: those that are not measured with these files",
    )
    parser.add_argument("--device", default="cuda", help="torch device")
    parser.add_argument("--scale", choices=SCALES, help="full, or tiny for a trial; tiny on a CPU by default")
    parser.add_argument("--minutes", type=float, help="that this call may take; all that it needs by default")
    parser.add_argument("--out", type=Path, help="folder of the results; results/gpu, or build/gpu of a trial")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = options.scale or ("tiny" if options.device == "cpu" else "full")
    # What is under results/gpu goes into the README.
    out = options.out or ROOT / ("results" if scale == "full" else "build") / "gpu"
    if out.exists() and not out.is_dir():
        parser.error(f"--out {out}: is not a folder")
    if options.part:
        print(json.dumps(run_part(options.part, options.device, scale)))
        return 0
    if problem := missing(options.device):
        print(f"error: --device {options.device}: {problem}", file=sys.stderr)
        return 5
    folder, found, left = prove(options.device, scale, out, options.parts, options.minutes)
    print(folder)
    if left:
        seconds = sum(expected_seconds(name, found) for name in left)
        print(f"left, at most {seconds / 60:.0f} minutes: {', '.join(left)}; type the same again", file=sys.stderr)
    return int(any(one["verdict"] == FAILED for part in found for one in part["claims"]))


def missing(device: str) -> str | None:
    """Why the device cannot be used; None if it can."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds none; for a trial on a CPU: --device cpu"
    return None


if __name__ == "__main__":
    sys.exit(main())
