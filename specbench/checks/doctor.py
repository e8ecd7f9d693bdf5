"""Check the prerequisites of a run on this machine: a row for each, with a fix for a missing prerequisite."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from specbench.errors import SpecbenchError, read_name
from specbench.metrics import catalog as metric_catalog
from specbench.models.catalog import check_model, default_prompts, find_model, models
from specbench.models.facts import AS_PUBLISHED, EIGHT_BITS_GAIN, SCALES, ModelChoice, ModelFacts, Scale
from specbench.models.hub_model import HubModel
from specbench.runs import compiler
from specbench.runs.memory_estimate import footprint, free_memory
from specbench.runs.needs import fetch_command, needs_of, score_needs
from specbench.runs.problems import check_writable
from specbench.specs.presets import resolve
from specbench.system import plugins
from specbench.system.environment import requirements
from specbench.system.files import PACKAGE
from specbench.system.json_values import Word
from specbench.system.limits import available_cores, available_memory, available_threads
from specbench.system.torch_device import has_gpu_driver, no_gpu_reason

if TYPE_CHECKING:
    from specbench.system.device_peaks import Peak

# Imports inside functions: a missing or broken package is a finding, and importing torch takes seconds.

LOW_DISK_GIB = 1.0


class Readiness(Word):
    """Whether a prerequisite is met; only a missing prerequisite fails the command."""

    OK, WARNING, MISSING = "ok", "warning", "missing"


OK, WARNING, MISSING = Readiness


class Area(Word):
    """Subject of a row. The names of models, metrics and plug-ins begin with it."""

    MACHINE, PACKAGE, ACCELERATION, MEMORY = "machine", "package", "acceleration", "memory"
    PEAK, UNKNOWN_PEAK = "peak", "unknown peak"
    MODEL, FILES, METRIC, PLUGIN = "model", "files", "metric", "plug-in"


class DoctorRow(TypedDict):
    """One prerequisite."""

    name: str
    kind: Area
    status: Readiness
    detail: str
    fix: str


def in_short(rows: Sequence[DoctorRow]) -> list[DoctorRow]:
    """Return the rows that describe this machine, and rows with problems; absent models share one row."""
    without = (Area.PACKAGE, Area.ACCELERATION, Area.UNKNOWN_PEAK)
    shown = [row for row in rows if row["status"] != OK or row["kind"] not in without]
    absent = [row for row in shown if row["kind"] == Area.MODEL and row["status"] == WARNING]
    if len(absent) < 2:
        return shown
    names = ", ".join(row["name"].removeprefix(f"{Area.MODEL} ") for row in absent)
    others = _row("other models", Area.FILES, OK, f"{len(absent)} not on this disk: {names}", "specbench fetch NAME")
    return [row for row in shown if row not in absent] + [others]


def doctor(
    model: str | None = None,
    out: str | Path = "results",
    weights: str | None = None,
    revision: str | None = None,
    random_weights: bool = False,
    scale: Scale = "full",
    metrics: Sequence[str] = (),
    measure: bool = False,
    protocol: str | None = None,
) -> list[DoctorRow]:
    """Check whether this machine is ready to run.

    Args:
        model: the model that must be ready; its files are checked by name and shape. None: all models.
        out: the results folder to test for writing.
        weights, revision, random_weights, scale: choose the weights of `model`, as for `run`.
        metrics: metrics that must also be ready.
        measure: time memory copies and matrix products, for the roofline numbers of reports.
        protocol: a paper's protocol, whose metrics must also be ready.

    Returns:
        One dict per prerequisite: `name, kind` (see `Area`), `status` ("ok", "warning" or "missing"), `detail, fix`.

    Raises:
        SpecbenchError: an unknown model or metric, or a choice of weights without a model or for a model that offers
            no choice.
    """
    scale = read_name("size of a model", scale, SCALES)
    choice = ModelChoice(weights, revision, random=random_weights, tiny=scale == "tiny")
    if choice != AS_PUBLISHED and not model:
        raise SpecbenchError("--weights, --revision, --random-weights and --scale require --model")
    chosen = metric_catalog.with_protocol(metrics, protocol)
    named = [find_model(model).configured(choice)] if model else []
    torch = _torch()
    imports = torch["status"] == OK
    return [
        _row("python", Area.MACHINE, OK, f"{platform.python_version()} in {sys.prefix}"),
        *_packages(),
        torch,
        *_torchvision(),
        *(_acceleration() if imports else ()),
        _limits(),
        *(_model(info, required=bool(named)) for info in named or models().values()),
        *(row for info in named for row in _needs(info)),
        *(row for info in named if imports for row in _memory(info)),
        *(_peaks(measure) if imports else ()),
        *(row for name in chosen for row in _metric(name)),
        *_plugins(),
        _disk(Path(out)),
    ]


def _row(name: str, kind: Area, status: Readiness, detail: str, fix: str = "") -> DoctorRow:
    name = f"{kind} {name}" if kind in (Area.MODEL, Area.METRIC, Area.PLUGIN) else name
    return {"name": name, "kind": kind, "status": status, "detail": detail, "fix": fix}


def _packages() -> list[DoctorRow]:
    rows = []
    for requirement in requirements():
        name = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0]
        if "extra ==" in requirement:
            continue
        try:
            here = metadata.version(name)
            if _older(here, requirement):
                detail = f"version {here} is too old (needed: {requirement})"
                rows.append(_row(name, Area.PACKAGE, MISSING, detail, f"pip install --upgrade '{requirement}'"))
            elif name != "torch":  # torch has a separate row
                rows.append(_row(name, Area.PACKAGE, OK, here))
        except metadata.PackageNotFoundError:
            if name != "torch":
                detail = f"not installed (needed: {requirement})"
                rows.append(_row(name, Area.PACKAGE, MISSING, detail, f"pip install '{requirement}'"))
    return rows


def _older(here: str, requirement: str) -> bool:
    """Return whether an installed version is below the lower bound of a requirement such as "torch>=2.8"."""
    bound = re.search(r">=\s*([\d.]+)", requirement)
    numbers = [list(map(int, re.findall(r"\d+", text)[:3])) for text in (here, bound[1] if bound else "0")]
    return numbers[0] < numbers[1]


def _torch() -> DoctorRow:
    try:
        import torch
    except (ImportError, OSError) as error:
        return _row("torch", Area.MACHINE, MISSING, f"cannot be imported: {error}", "pip install torch")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    threads = available_threads()
    cpu = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    return _row("torch", Area.MACHINE, OK, f"{torch.__version__}, {cpu}, {', '.join(devices) or 'no GPU'}")


def _torchvision() -> list[DoctorRow]:
    """Check torchvision. It is optional; if installed, transformers imports it, and a build for another torch fails."""
    if importlib.util.find_spec("torchvision") is None:
        return []
    version = metadata.version("torchvision")
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        fix = "install torchvision built for this torch version, from the same package index, or uninstall it"
        return [_row("torchvision", Area.PACKAGE, MISSING, f"{version} does not fit this torch: {error}", fix)]
    return [_row("torchvision", Area.PACKAGE, OK, version)]


def _acceleration() -> list[DoctorRow]:
    """Check requirements of a GPU other than torch: a usable driver, a compiler, NVML, float32 without TF32."""
    import torch

    rows, gpu = [], torch.cuda.is_available()
    if not gpu:
        fix = "install the torch build and the driver of this GPU: https://pytorch.org" if has_gpu_driver() else ""
        rows.append(_row("GPU", Area.MACHINE, WARNING if fix else OK, f"torch finds no GPU: {no_gpu_reason()}", fix))
    lacking = compiler.missing("cuda" if gpu else "cpu")
    fix = "install it, or decode more slowly with --compile off" if lacking and gpu else ""
    text = lacking or "compiler and headers are installed"
    rows.append(_row("compilation", Area.ACCELERATION, WARNING if fix else OK, text, fix))
    if importlib.util.find_spec("pynvml"):
        rows.append(_row("nvidia-ml-py", Area.ACCELERATION, OK, metadata.version("nvidia-ml-py")))
    else:
        detail = "not installed: clocks, power and other processes of an NVIDIA GPU are not recorded"
        fix = "pip install 'nvidia-ml-py>=12'" if torch.version.cuda and gpu else ""
        rows.append(_row("nvidia-ml-py", Area.ACCELERATION, WARNING if fix else OK, detail, fix))
    forced = os.environ.get("NVIDIA_TF32_OVERRIDE", "0")
    tf32 = (OK, "off while decoding") if forced == "0" else (WARNING, f"NVIDIA_TF32_OVERRIDE={forced} may enable it")
    return [*rows, _row("TF32", Area.ACCELERATION, *tf32, "unset that variable" if forced != "0" else "")]


def _limits() -> DoctorRow:
    """Check the cores and memory available to this process, limited by affinity, container or cluster allocation."""
    free = available_memory()
    memory = "" if free is None else f", {free / 2**30:.1f} GiB of memory free"
    return _row("limits", Area.MACHINE, OK, f"{available_cores()} of {os.cpu_count()} CPU cores{memory}")


def _model(info: ModelFacts, required: bool) -> DoctorRow:
    try:
        files = info.files()
        if required:
            check_model(info)
    except SpecbenchError as error:
        official = required and needs_of(info, None)
        detail, fix = error.what, error.try_this
        if official:
            detail, fix = f"{official[0].what} not on this disk: {official[0].text()}", fetch_command(info, None)
        return _row(info.name, Area.MODEL, MISSING if required else WARNING, detail, fix)
    if not files:
        return _row(info.name, Area.MODEL, OK, "random weights, no files needed")
    size = sum(path.stat().st_size for path in files)
    complete = ", names and shapes of all tensors correct" if required else ""
    folder = files[0].parent
    where = "this package" if folder.is_relative_to(PACKAGE) else folder
    return _row(info.name, Area.MODEL, OK, f"{size / 2**20:.1f} MiB in {where}{complete}")


def _needs(info: ModelFacts) -> list[DoctorRow]:
    """List missing files of the model, of its prompts, and of the networks of its default metrics."""
    prompts = default_prompts(info.name.partition("+")[0])
    of_model = needs_of(info, None)
    others = [need for need in needs_of(info, prompts) if need not in of_model[:1]]  # `_model` reports the first
    lacking = [(need, MISSING, False) for need in others]
    lacking += [(need, WARNING, True) for need in score_needs(info, prompts)]
    return [
        _row(need.what, Area.FILES, status, f"not on this disk: {need.text()}", fetch_command(info, prompts, scores))
        for need, status, scores in lacking
    ]


def _memory(info: ModelFacts) -> list[DoctorRow]:
    """Check that one image with guidance fits into the first GPU, or into main memory if there is no GPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, dtype = free_memory(device), compiler.settle_precision(None, info.dtype, "off", device)[0]
    ar, wide = (footprint(info, resolve(name), info.sampling(), dtype, device) for name in ("ar", "scd-mc"))
    if ar is None or wide is None or size is None:
        return []
    where = "of main memory free" if device == "cpu" else "free on the GPU"
    detail = f"about {ar.total(1) / 2**30:.1f} GiB in {dtype} with guidance, of {size / 2**30:.1f} GiB {where}"
    # Memory per image for AR, and for a window of 64.
    each = " to ".join(f"{need.per_image / 2**20:,.0f} MiB" for need in (ar, wide))
    detail += f"; {each} per image in a batch (from AR to window 64; AR's KV cache: {ar.cache / 2**20:,.0f} MiB)"
    detail += f"; {info.size_note}" if info.size_note else ""
    if ar.total(1) > size:
        fix = "use another device, or a smaller model"
        if isinstance(info, HubModel):
            light = replace(info, choice=replace(info.choice, eight_bits=True))
            less = footprint(light, resolve("ar"), info.sampling(), dtype, device)
            fix += f"; --dtype int8wo needs about {less.total(1) / 2**30:.1f} GiB ({EIGHT_BITS_GAIN})" if less else ""
        return [_row("memory", Area.MEMORY, WARNING, detail, fix)]
    return [_row("memory", Area.MEMORY, OK, detail)]


def _peaks(measure: bool) -> list[DoctorRow]:
    """Report peak bandwidth and FLOP/s of each device, in the number formats of the models."""
    import torch

    from specbench.system import device_peaks

    rows = []
    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        for threads in sorted({1, available_threads()}) if device == "cpu" else (0,):
            for dtype in ("float32", "bfloat16"):
                refusal = None
                if measure:
                    try:
                        device_peaks.measure_peak(device, dtype, threads)
                    except SpecbenchError as error:
                        refusal = error
                rows.append(_peak(device, dtype, threads, device_peaks.find_peak(device, dtype, threads), refusal))
    return rows


def _peak(device: str, dtype: str, threads: int, peak: Peak | None, refusal: SpecbenchError | None) -> DoctorRow:
    name = f"peak of {device}, {dtype}" + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")
    if refusal:
        kept = f"; the earlier value is still used: {peak.source}" if peak else ""
        return _row(name, Area.PEAK, WARNING, f"{refusal.what}{kept}", refusal.try_this)
    if peak is None:
        text = "unknown; each run measures it briefly for its roofline ratio"
        return _row(name, Area.UNKNOWN_PEAK, OK, text, "specbench doctor --measure")
    large, small = peak.bandwidth(2**40) / 1e9, peak.bandwidth(0) / 1e9
    cached = f" ({small:,.1f} from cache)" if small > 1.05 * large else ""
    return _row(name, Area.PEAK, OK, f"{large:,.1f} GB/s{cached}, {peak.flops / 1e12:,.3g} TFLOP/s: {peak.source}")


def _metric(name: str) -> list[DoctorRow]:
    """Check a metric: one row per missing prerequisite."""
    try:
        missing = metric_catalog.metric(name)().missing()
    except SpecbenchError as error:
        if name not in metric_catalog.metric_names():
            raise
        missing = [(error.what, error.try_this)]
    if not missing:
        return [_row(name, Area.METRIC, OK, "all files are on this disk")]
    return [_row(name, Area.METRIC, MISSING, what, fix) for what, fix in missing]


def _plugins() -> list[DoctorRow]:
    rows = []
    for kind in plugins.PLUGIN_KINDS:
        for name, point in plugins.plugins(kind).items():
            try:
                plugins.load_object(point.value, f"plug-in {name}")
                rows.append(_row(name, Area.PLUGIN, OK, f"{kind}: {point.value}"))
            except SpecbenchError as error:
                rows.append(_row(name, Area.PLUGIN, WARNING, error.what, "reinstall or remove it"))
    return rows


def _disk(out: Path) -> DoctorRow:
    try:
        check_writable(out)
    except SpecbenchError as error:
        return _row("results folder", Area.MACHINE, MISSING, error.what, error.try_this)
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if free < LOW_DISK_GIB:
        text = f"{out.absolute()}, only {free:.1f} GiB free"
        return _row("results folder", Area.MACHINE, WARNING, text, "free some space")
    return _row("results folder", Area.MACHINE, OK, f"{out.absolute()}, {free:.0f} GiB free")
