"""Prove on a CUDA machine what a CPU cannot show: `make gpu`, at most 20 minutes.

Every part runs in a process of its own with a time limit, so that one that fails, hangs or breaks the CUDA context
leaves the others alone. Parts that measure nothing run side by side, before the others. A failed part is a row that
says so; the exit code is then 1. Writes `raw.json` (every measurement, versions, hardware) and `report.md` to
results/gpu/<device>/; `make docs` brings the table into the README. Parts that are not run again stay as they were,
each with its date and commit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "speed"))

from parts import PARTS  # noqa: E402  needs the path above
from parts.claims import FAILED, failure  # noqa: E402
from parts.scales import SCALES  # noqa: E402

from specbench.system import environment  # noqa: E402
from specbench.system.device_peaks import device_name  # noqa: E402
from specbench.system.files import write_atomically  # noqa: E402

MINUTES = 20


def run_part(name: str, device: str, scale: str) -> dict[str, object]:
    """Claims and raw rows of one part, or the claim that it failed."""
    start = time.perf_counter()
    try:
        claims, rows = PARTS[name].run(device, SCALES[scale])
    except Exception as error:  # another part may still work
        claims, rows = [failure(f"{type(error).__name__}: {error}")], []
    return {"part": name, "seconds": time.perf_counter() - start, "claims": claims, "rows": rows}


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


def _kept(path: Path, scale: str, again: Sequence[str]) -> list[dict]:
    """Parts of an earlier run of this scale, without those that are run again."""
    if not path.is_file():
        return []
    before = json.loads(path.read_text())
    return [part for part in before["parts"] if before["scale"] == scale and part["part"] not in again]


def prove(device: str, scale: str, out: Path, names: Sequence[str], apart: bool = True) -> tuple[Path, list[dict]]:
    """Run the parts and write the results; returns the folder and what was found."""
    folder = out / re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    found, here = _kept(folder / "raw.json", scale, names), environment.environment_facts()
    end = time.perf_counter() + 60 * MINUTES

    def done(name: str) -> dict:
        limit = min(PARTS[name].seconds, end - time.perf_counter())
        part = run_apart(name, device, scale, limit) if apart else run_part(name, device, scale)
        said = [f"  {one['verdict']}: {one['what']}: {one['value']}" for one in part["claims"]]
        print("\n".join([name, *said]), file=sys.stderr, flush=True)
        return {**part, "date": environment.now()[:10], "git": here["git"]}

    together = [name for name in names if not PARTS[name].alone]
    alone = (done(name) for name in names if PARTS[name].alone)
    with ThreadPoolExecutor(len(together) if apart and together else 1) as pool:
        # Written after every part, so that a program that is stopped loses one.
        for part in chain(pool.map(done, together), alone):
            found.append(part)
            write(folder, device, scale, here, found)
    return folder, found


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
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="parts to run; all by default")
    parser.add_argument("--device", default="cuda", help="torch device")
    parser.add_argument("--scale", choices=SCALES, help="full, or tiny for a trial; tiny on a CPU by default")
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
    folder, found = prove(options.device, scale, out, options.parts or list(PARTS))
    print(folder)
    return int(any(one["verdict"] == FAILED for part in found for one in part["claims"]))


def missing(device: str) -> str | None:
    """Why the device cannot be used; None if it can."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds none; for a trial on a CPU: --device cpu"
    return None


if __name__ == "__main__":
    sys.exit(main())
