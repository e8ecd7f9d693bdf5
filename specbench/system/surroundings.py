"""Environment of the process: home folder and user name, working folder, width of the terminal. `settle` corrects
values that libraries cannot use, before the libraries are imported."""

import os
import pwd
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.system.console import stderr, warn
from specbench.system.limits import whole_number

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_LEAST_COLUMNS = 40  # Minimum table width; a narrower terminal breaks the lines
_MOST_COLUMNS = 10_000
_LAST_SECOND = 253_402_300_799  # Largest SOURCE_DATE_EPOCH of gcc, the end of the year 9999


def settle() -> None:
    """Correct the environment variables of the process."""
    settle_home()
    if os.environ.get("HF_ENDPOINT") == "":  # the hub's client would use "" as an address
        del os.environ["HF_ENDPOINT"]
    if (named := os.environ.get(COMPILED)) is not None and not os.path.isdir(named):
        try:
            os.makedirs(named, exist_ok=True)  # torch also creates this folder on import
        except OSError as error:
            warn(f"{COMPILED}={named} is ignored: {error.strerror}")
            del os.environ[COMPILED]
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "0")  # numpy, which scipy imports, and gcc fail on other values
    if not re.fullmatch("[0-9]{1,12}", epoch) or int(epoch) > _LAST_SECOND:
        del os.environ["SOURCE_DATE_EPOCH"]
    for variable in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):  # variables of rich and typer
        if not 0 < whole_number(os.environ.get(variable, "")) <= _MOST_COLUMNS:
            os.environ.pop(variable, None)
    if stderr().width < _LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(_LEAST_COLUMNS)


def check_working_folder() -> None:
    """Raise an error if the working folder was deleted, because numerical libraries would then abort the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise SpecbenchError("the working folder does not exist any more", "cd to another folder") from None


def settle_home() -> None:
    """Set HOME and LOGNAME if they are missing (containers, batch systems). HOME becomes the user's home, or else a
    private folder, because libraries store their caches there."""
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ["LOGNAME"] = os.environ.get("LOGNAME") or f"user-{os.getuid()}"
        user = None
    if not os.environ.get("HOME", "").startswith("/"):
        os.environ["HOME"] = user.pw_dir if user else str(private_folder())


@contextmanager
def plain_matplotlib() -> Iterator[None]:
    """Context to import matplotlib without the user's backend and settings, because specbench only draws files and
    MPLBACKEND may name a package that is not installed. A notebook keeps its backend for its own figures."""
    asked = {name: os.environ.pop(name, None) for name in ("MPLBACKEND", "MATPLOTLIBRC")}
    os.environ["MATPLOTLIBRC"] = os.devnull
    try:
        yield
    finally:
        del os.environ["MATPLOTLIBRC"]
        os.environ.update({name: value for name, value in asked.items() if value is not None})
    if asked["MPLBACKEND"] is not None:
        with suppress(KeyError, ValueError):
            sys.modules["matplotlib"].rcParams["backend"] = asked["MPLBACKEND"]


@cache
def private_folder() -> Path:
    """Return a folder for temporary files that only this user can write to, shared by all of the user's processes. If
    possible, its path contains no spaces or quotes."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    plain = [place for place in places if re.fullmatch(r"[^\s'\"\\]+", place) and os.access(place, os.W_OK)]
    within = next(iter(plain), places[0])
    folder = Path(within, f"specbench-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        raise SpecbenchError(f"cannot make {folder}: {error.strerror}", "set TMPDIR", MISSING_PREREQUISITE) from error
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise SpecbenchError(f"other users may write to {folder}", "remove it, or set TMPDIR", MISSING_PREREQUISITE)
    return folder
