"""Problems that block a run, and checks of folder, memory and disk."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from specbench.errors import SpecbenchError

_T = TypeVar("_T")


class Problem(NamedTuple):
    """Error to resolve before a run, by installing, downloading or changing something."""

    of: object  # subject such as "prompts" or "weights", or the affected decoder
    error: SpecbenchError


class Problems(list[Problem]):
    """List of problems that collects errors of checks."""

    def check(self, of: object, work: Callable[..., _T], *given: object) -> _T | None:
        """Call `work` and return its result. If it raises a SpecbenchError, record the error and return None."""
        try:
            return work(*given)
        except SpecbenchError as error:
            self.append(Problem(of, error))
            return None


def check_writable(out: Path) -> None:
    """Raise an error if the results folder is not writable, tested with an unnamed temporary file."""
    try:
        existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise SpecbenchError(f"--out {out}: {existing} is a file", "name a folder")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecbenchError(f"--out {out}: cannot write there ({reason})", "choose a writable folder") from None


def check_memory(need: int, free: int | None, device: str) -> None:
    """Raise an error if more bytes are needed than are free. `free`: None (no check) if unknown."""
    if free is not None and need > free:
        what = f"memory: the estimate exceeds the {free // 2**30} GiB free on {device}"
        raise SpecbenchError(what, "use another device, a smaller batch or a smaller model")


def check_disk(megabytes: float, out: Path) -> None:
    """Raise an error if the images do not fit on the disk of the results folder."""
    there = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), None)
    if there is not None and (free := shutil.disk_usage(there).free / 1e6) < megabytes:
        what = f"disk: up to {megabytes:,.0f} MB needed, {free:,.0f} MB free in {out}"
        raise SpecbenchError(what, "name another folder with --out, or decode fewer images")
