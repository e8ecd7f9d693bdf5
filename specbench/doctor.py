"""Is this machine ready? One row per thing that a run needs, with what to do about what is not there."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from specbench import registry
from specbench.errors import SpecbenchError
from specbench.models.catalog import ModelInfo, find_model, models
from specbench.plan import available_threads, check_writable

OK, WARNING, MISSING = "ok", "warning", "missing"
LOW_DISK_GIB = 1.0


def check(model: str | None = None, out: Path = Path("results")) -> list[dict[str, str]]:
    """Rows of `name, status ("ok", "warning" or "missing"), detail, fix`.

    Args:
        model: only this model's files; all models if None.
        out: the results folder to try.

    Raises:
        SpecbenchError: unknown model.
    """
    chosen = [find_model(model)] if model else list(models().values())
    return [
        _python(),
        *_packages(),
        _torch(),
        *_torchvision(),
        *(_model(info, required=bool(model)) for info in chosen),
        *_plugins(),
        *_disk(out),
    ]


def _row(name: str, status: str, detail: str, fix: str = "") -> dict[str, str]:
    return {"name": name, "status": status, "detail": detail, "fix": fix}


def _python() -> dict[str, str]:
    detail = f"{platform.python_version()} in {sys.prefix}"
    return _row("python", OK, detail)


def _packages() -> list[dict[str, str]]:
    rows = []
    for requirement in metadata.requires("specbench") or ():
        name = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0]
        if "extra ==" in requirement or name == "torch":
            continue
        try:
            rows.append(_row(name, OK, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append(_row(name, MISSING, f"not installed (needed: {requirement})", f"pip install '{requirement}'"))
    return rows


def _torch() -> dict[str, str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return _row("torch", MISSING, f"cannot be imported: {error}", "pip install torch")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return _row(
        "torch", OK, f"{torch.__version__}, {available_threads()} CPU threads, {', '.join(devices) or 'no GPU'}"
    )


def _torchvision() -> list[dict[str, str]]:
    """Optional; but transformers imports it where it is there, so one built for another torch breaks every model."""
    if importlib.util.find_spec("torchvision") is None:
        return []
    version = metadata.version("torchvision")
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        fix = "install the torchvision that belongs to this torch, from where torch came, or uninstall it"
        return [_row("torchvision", MISSING, f"{version} does not fit this torch: {error}", fix)]
    return [_row("torchvision", OK, version)]


def _model(info: ModelInfo, required: bool) -> dict[str, str]:
    try:
        info.require_weights()
    except SpecbenchError as error:
        return _row(f"model {info.name}", MISSING if required else WARNING, error.what, error.try_this)
    size = sum(path.stat().st_size for path in info.weights)
    return _row(f"model {info.name}", OK, f"{size / 2**20:.1f} MiB in {info.config.parent}")


def _plugins() -> list[dict[str, str]]:
    rows = []
    for kind in registry.KINDS:
        for name, point in registry.plugins(kind).items():
            try:
                registry.load_object(point.value, f"plug-in {name}")
                rows.append(_row(f"plug-in {name}", OK, f"{kind}: {point.value}"))
            except SpecbenchError as error:
                rows.append(_row(f"plug-in {name}", WARNING, error.what, "reinstall or remove it"))
    return rows


def _disk(out: Path) -> list[dict[str, str]]:
    try:
        check_writable(out)
    except SpecbenchError as error:
        return [_row("results folder", MISSING, error.what, error.try_this)]
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if free < LOW_DISK_GIB:
        return [_row("results folder", WARNING, f"{out.absolute()}, only {free:.1f} GiB free", "make room")]
    return [_row("results folder", OK, f"{out.absolute()}, {free:.0f} GiB free")]
