"""Choice of compilation, number format and CPU threads for this machine. Imports no torch."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar, get_args

from specbench.errors import CompileError, SpecbenchError
from specbench.models.facts import EIGHT_BITS
from specbench.specs.options import SettingSource
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import RunSpec
from specbench.store.run_folders import find_runs_like
from specbench.system.console import counted, duration
from specbench.system.digests import own_code, remember, remembered
from specbench.system.limits import asked_threads, available_threads
from specbench.system.monitor import cores_in_use
from specbench.system.surroundings import COMPILED
from specbench.system.torch_device import emulates_bfloat16

_Result = TypeVar("_Result")
CompileMode = Literal["auto", "on", "off"]
MODES = get_args(CompileMode)
COMPILING_TORCH = {"cuda": (2, 11), "cpu": (2, 13)}
"""{kind of device: first version of torch that compiles every step}; earlier versions fail."""
_CALLS_S, _SAVED = 4e-4, 0.5
"""Assumptions: call overhead of an eager layer in seconds, on a CPU of 2023; ratio of a decoder's steps to AR's."""
_FIRST_S, _LAYER_S, _DECODER_S = 20.0, 2.5, 15.0
"""Assumed seconds to compile: for the forwards, for each layer in addition, and for the functions of each decoder."""
_LOADED_S = 1.5
"""Assumed seconds to load the stored code of the forwards; the code of each decoder takes the same time."""
_KEPT = "compiled/kept.json"  # in the folder of the compiled code, so that both are deleted together


def should_compile(mode: CompileMode, device: str) -> tuple[bool, str | None]:
    """Decide whether to compile for `device`; also return a note if compilation was requested but is impossible. "auto"
    compiles on CUDA; for a CPU, `worth_compiling` decides."""
    if mode == "off" or (mode == "auto" and not device.startswith("cuda")):
        return False, None
    reason = missing(device)
    return reason is None, f"--compile {mode}: {reason}; running eagerly" if reason else None


def worth_compiling(stored: Sequence[bool], layers: int, steps: int, keys: Sequence[str]) -> tuple[bool, str | None]:
    """Return whether "auto" compiles on a CPU, and a note if it does (compiling takes minutes). `stored`: for each
    stored run of the model, whether it was compiled; if any was eager, new runs are eager, to be comparable. `steps`:
    target forwards of all images if each commits one token. `keys`: `code_key` of each decoder."""
    if stored and all(stored):
        return should_compile("on", "cpu")
    saved, cost = steps * layers * _CALLS_S * _SAVED, _FIRST_S + layers * _LAYER_S + len(keys) * _DECODER_S
    if _is_kept(keys):
        cost = _LOADED_S * (1 + len(keys))
    if stored or saved <= cost or missing("cpu"):
        return False, None
    gain = f"saves about {duration(saved)} and costs about {duration(cost)}"
    return True, f"compiling the steps {gain} (to omit it: --compile off)"


def code_key(model: str, dtype: str, threads: int, batch: int, guidance: float, decoder: DecoderSpec) -> str:
    """Digest all inputs on which the compiled code of a decoder depends."""
    versions = own_code(), metadata.version("torch")
    return sha256(repr((model, dtype, threads, batch, guidance, decoder, versions)).encode()).hexdigest()[:32]


def remember_compiled(specs: Sequence[RunSpec]) -> None:
    """Record the folder of the compiled code of CPU runs. Later, "auto" only counts the time to load recorded code."""
    runs = [it for it in specs if it.device == "cpu"]
    keys = [code_key(it.model, it.dtype, it.threads, it.batch, it.sampling.guidance, it.decoder) for it in runs]
    with suppress(SpecbenchError, OSError):
        if (folder := os.environ.get(COMPILED)) and not _is_kept(keys):
            remember(_KEPT, dict.fromkeys(keys, folder))


def _is_kept(keys: Sequence[str]) -> bool:
    """Return whether the code of all `keys` is still stored, in the folder of the environment variable if it is set."""
    folders, named = [remembered(_KEPT).get(key) for key in keys], os.environ.get(COMPILED)
    return all(isinstance(folder, str) and os.path.isdir(folder) and named in (None, folder) for folder in folders)


def settle_precision(
    asked: str | None, default: str, mode: CompileMode, device: str
) -> tuple[str, bool, tuple[str, ...]]:
    """Decide number format and compilation on `device`; also return notes on requests that cannot be met. `asked`: the
    requested number format; None: the model's `default`. With "int8wo", all tensors except matrices have the
    default format."""
    asked = None if asked == EIGHT_BITS else asked
    dtype = asked or default
    if not emulates_bfloat16(device):
        compiled, note = should_compile(mode, device)
        return dtype, compiled, (note,) if note else ()
    # torch cannot compile steps in emulated bfloat16, and for the oldest GPUs without bfloat16 cannot compile at all.
    dtype = asked or ("float32" if default == "bfloat16" else default)
    compiled, note = should_compile(mode, device) if mode == "on" and dtype != "bfloat16" else (False, None)
    how = f"decoding in {dtype}{'' if compiled else ', eagerly'}"
    half = "; --dtype float16 needs half the memory" if dtype == "float32" and not asked else ""
    return dtype, compiled, (*((note,) if note else ()), f"{device} has no native bfloat16: {how}{half}")


def compiled_or_eagerly(
    mode: CompileMode, compiled: bool, work: Callable[[bool], _Result], tell: Callable[[str], object]
) -> _Result:
    """Call `work(compiled)`. If compilation fails under "auto", report a line and call `work(False)`."""
    try:
        return work(compiled)
    except CompileError as error:
        if mode != "auto":
            raise
        reason = error.what
    tell(f"{reason}; running eagerly")  # outside `except`, because the traceback references the model
    return work(False)


def missing(device: str) -> str | None:
    """Name the missing prerequisite for compiling on `device`; None if compiling is possible."""
    kind = device.partition(":")[0]
    if kind == "mps":
        return "compilation is not supported on mps"
    if kind == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed"
    if find_spec("torch") and _minor_version("torch") < COMPILING_TORCH[kind]:
        return f"torch before {'.'.join(map(str, COMPILING_TORCH[kind]))} cannot compile the steps on {kind}"
    variable, usual = ("CC", ("gcc", "clang", "cc")) if kind == "cuda" else ("CXX", ("g++", "clang++"))
    compilers = (os.environ[variable],) if os.environ.get(variable) else usual
    if not any(map(shutil.which, compilers)):
        return f"no compiler ({', '.join(compilers)}) is installed"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files are not installed (package python3-dev or similar)"
    torch = find_spec("torch")
    # From 2.14 on, torch quotes the path of its libraries for the linker.
    if kind == "cpu" and torch and " " in str(torch.origin) and _minor_version("torch") < (2, 14):
        return f"torch before 2.14 cannot compile if its path has spaces: {torch.origin}"
    return None


def _minor_version(package: str) -> tuple[int, int]:
    major, minor = metadata.version(package).split(".")[:2]
    return int(major), int(minor)


def free_threads(out: Path, model: str, device: str) -> tuple[int, list[str]]:
    """Return the number of threads, and a note if it is below the maximum. If runs of the model are stored, use their
    number, to resume or to compare. Otherwise use the free cores, because more threads make steps many times slower."""
    most = available_threads()
    if most == 1 or device != "cpu" or asked_threads():
        return most, []
    there = find_runs_like(out, model=model, device=device).values()
    unnamed = [
        info.spec.threads
        for info in there
        if SettingSource.of((info.origins or {}).get("threads")) is SettingSource.DEFAULT
    ]
    if unnamed and 0 < unnamed[-1] <= most:
        threads, why = unnamed[-1], f"the number of the runs in {out}"
    else:
        threads = min(most, max(1, round(most - cores_in_use())))
        why = f"because other processes use {cores_in_use():.1f} of {most} cores"
    return threads, [f"{counted(threads, 'thread')}, {why}; --threads {most}: all"] if threads < most else []
