"""Commands in odd surroundings: home, user, terminal, locale, umask, time zone, clock, matplotlib's settings.

    python dev/drills/surroundings.py [--only PLACE ...]    # a line per command that differs from usual surroundings

Run as root, which can become any user and mount a full disk. A command passes if its exit code and output are as usual,
without a traceback or "a bug"; a figure must also have the same bytes. A command that cannot work must say so.
"""

import argparse
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from specbench.system.environment import git_state
from specbench.system.version import __version__

LOG = Path(__file__).parents[2] / "results" / "drills" / "surroundings.jsonl"
ROOT = Path(__file__).parents[2]
COMMANDS = """--version
--help
run --help all
list models
list decoders
list metrics
list prompts
list tables
list runs --out RUNS
status --out RUNS
report --out RUNS
report --out RUNS --html page.html
report --out RUNS --to table.csv
methods --out RUNS
show --out RUNS ar
prompts show shapes --limit 2
figure pictures --out RUNS --to a.png
figure map-of-entropy --out RUNS --to a.pdf
figure time-per-step --out RUNS --to a.svg
compare --out RUNS ar sjd
pack RUNS --to packed.zip
verify RUNS
score --out RUNS --bundled-only
run --decoder ar --limit 1 --threads 1 --baseline 0 --out new
run --decoder ar --limit 1 --dry-run --out new
bench --help
forecast --out RUNS --on a100
doctor
fetch nothing
export dataset RUNS --to exported""".splitlines()
CLOCK = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { return atol(getenv("CLOCK_SHIFT")); }
int clock_gettime(clockid_t id, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += shift();
  return code;
}
int gettimeofday(struct timeval *t, void *zone) {
  struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec; t->tv_usec = now.tv_nsec / 1000; return 0;
}
time_t time(time_t *t) {
  struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""
_HOMELESS = {"HOME": None, "USER": None, "LOGNAME": None, "user": "12345"}
_YEAR = 31_556_952


def places(aside: Path) -> dict[str, Mapping[str, str | None]]:
    """Environment variables of each place; the drill applies `user`, `columns`, `umask`, `gone` and `clock` itself."""
    odd = aside / "my home's é ünï"
    odd.mkdir(exist_ok=True)
    style = aside / "matplotlibrc"
    style.write_text("text.usetex: True\nfont.size: 30\naxes.facecolor: red\nsavefig.bbox: tight\nsvg.fonttype: path\n")
    named = {
        "no home, no name": _HOMELESS,
        "odd home": {"HOME": str(odd), "SPECBENCH_CACHE": None, "XDG_CACHE_HOME": None},
        "odd cache": {"SPECBENCH_CACHE": str(odd / "c")},
        "read-only home": {"HOME": "/proc/1"},
        "full home": {"HOME": str(aside / "full"), "SPECBENCH_CACHE": None, "XDG_CACHE_HOME": None},
        "full TMPDIR": {"TMPDIR": str(aside / "full")},
        "no folder for compiled code": {"TORCHINDUCTOR_CACHE_DIR": "/proc/1/none"},
        "empty home": {"HOME": ""},
        "dumb terminal": {"TERM": "dumb", "columns": "80"},
        "columns 0": {"COLUMNS": "0", "columns": "80"},
        "columns nonsense": {"COLUMNS": "-3", "TERMINAL_WIDTH": "x", "columns": "0"},
        "columns 100000": {"COLUMNS": "100000", "columns": "80"},
        "LC_ALL=C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "umask 077": {"umask": "077"},
        "time zone with a jump": {"TZ": "America/Sao_Paulo"},
        "time zone nonsense": {"TZ": "Nowhere/Land"},
        "clock in 1970": {"clock": str(-55 * _YEAR)},
        "clock in 2110": {"clock": str(84 * _YEAR)},
        "matplotlibrc": {"MATPLOTLIBRC": str(style)},
        "MPLBACKEND": {"MPLBACKEND": "module://not_here.backend"},
        "MPLBACKEND nonsense": {"MPLBACKEND": "nonsense"},
        "OMP_NUM_THREADS=1,1": {"OMP_NUM_THREADS": "1,1"},
        "OMP_NUM_THREADS=abc": {"OMP_NUM_THREADS": "abc", "MKL_NUM_THREADS": "0"},
        "working folder deleted": {"gone": "1"},
    }
    return named | {f"{width} columns": {"columns": str(width)} for width in (1, 2, 3, 5, 8, 13, *range(22, 31))}


def call(command: str, runs: Path, work: Path, place: Mapping[str, str | None]) -> tuple[int, str]:
    """Exit code and output of a command in a new folder; on a terminal if the place has `columns`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPECBENCH_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name, value in place.items():
        env.pop(name, None) if value is None else env.update({name: value})
    shutil.copytree(runs, work / "RUNS")
    for path in (work, *work.rglob("*")):
        path.chmod(0o777)
    before = [f"umask {place['umask']};"] if "umask" in place else []
    if "clock" in place:
        env |= {"LD_PRELOAD": str(runs.parent / "clock.so"), "CLOCK_SHIFT": str(place["clock"])}
    if "gone" in place:
        before.append("mkdir gone; cd gone; rmdir ../gone;")
    who = "setpriv --reuid=12345 --regid=12345 --clear-groups " if "user" in place else ""
    line = f"{' '.join(before)} exec {who}{sys.executable} -m specbench {command}"
    if "columns" not in place:
        done = subprocess.run(["bash", "-c", line], env=env, cwd=work, capture_output=True, timeout=300)
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, int(place["columns"]), 0, 0))
    process = subprocess.Popen(["bash", "-c", line], env=env, cwd=work, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 2**16):
            printed += part
    except OSError:  # the terminal was closed
        pass
    os.close(ours)
    return process.wait(), printed.decode(errors="replace")


def problem(code: int, text: str, usual: int, refuses: bool) -> str | None:
    if "Traceback" in text or "(a bug" in text:
        return "a bug"
    if not text.strip():
        return "no output"
    if refuses:
        return None if code and "error: " in text else "no error line"
    return None if code == usual else f"exit code {code}, usually {usual}"


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Full file system mounted at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
    try:
        (folder / "space").write_bytes(bytes(2**16))
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def failures(
    name: str,
    place: Mapping[str, str | None],
    commands: Sequence[str],
    aside: Path,
    usual: dict[str, tuple[int, bytes]],
) -> int:
    """Count and print the commands that fail in a place. `usual`: exit codes and figures, filled by the first calls."""
    failed = 0
    for command in commands:
        with tempfile.TemporaryDirectory(dir=aside) as inside:
            code, text = call(command, aside / "runs", Path(inside), place)
            figure = b"".join(path.read_bytes() for path in sorted(Path(inside).glob("a.*")))
        expected = usual.setdefault(command, (code, figure))
        refuses = "gone" in place and not {"--help", "--version"} & {*command.split()}
        what = problem(code, text, expected[0], refuses)
        if what is None and figure != expected[1] and "gone" not in place:
            what = "other bytes"
        if what:
            failed += 1
            print(f"{name}: {command}: {what}: {text.strip()[-300:]!r}", flush=True)
    print(f"{name}: {len(commands)} commands, {failed} not as they should be", flush=True)
    if place:
        with LOG.open("a") as log:
            line = {"place": name, "specbench": __version__, "commit": git_state()["revision"]}
            print(json.dumps(line | {"commands": len(commands), "wrong": failed}), file=log)
    return failed


def drill(only: Sequence[str], commands: Sequence[str], jobs: int) -> int:
    with tempfile.TemporaryDirectory() as folder, full_disk(Path(folder, "full")):
        aside, usual = Path(folder), {}
        aside.chmod(0o777)
        made = [sys.executable, "-m", "specbench", "run", "--decoder", "ar,sjd", "--limit", "2", "--threads", "1"]
        made += ["--compile", "off", "--out", aside / "runs"]
        subprocess.run(made, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        (aside / "clock.c").write_text(CLOCK)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", aside / "clock.so", aside / "clock.c", "-ldl"], check=True)
        wrong = failures("usual", {}, commands, aside, usual)
        odd = [(name, place) for name, place in places(aside).items() if name in (only or [name])]
        with ThreadPoolExecutor(jobs) as pool:
            return wrong + sum(pool.map(lambda one: failures(*one, commands, aside, usual), odd))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="one of the places")
    parser.add_argument("--command", action="append", help="one of the commands")
    parser.add_argument("--jobs", type=int, default=2, help="places at once")
    chosen = parser.parse_args()
    sys.exit(bool(drill(chosen.only, chosen.command or COMMANDS, chosen.jobs)))
