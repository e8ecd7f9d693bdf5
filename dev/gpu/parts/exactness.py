"""The audit's transformer settings, sampled on the device, for every decoder."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from parts.claims import Outcome, claim
from parts.scales import Scale, has_graphs
from specbench.checks.audit_settings import (
    AUDIT_SETTINGS,
    COMPILED_SETTINGS,
    DEVICE_SETTINGS,
    AuditSetting,
    setting_model,
)
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.losslessness import observe
from specbench.errors import SpecbenchError
from specbench.specs.presets import PRESETS, resolve

_AUDITORS = 8
"""Processes of the audit at most."""


def exactness(device: str, scale: Scale) -> Iterator[Outcome]:
    """Audit decoders on the enumerable transformer, with its weights and noise on the device; yield each row.

    Calls of such a small model leave a GPU waiting, so several processes share the GPU.
    """
    names = scale.decoders or tuple(PRESETS)
    settings = [*(setting for setting in AUDIT_SETTINGS if setting.model == "transformer"), *DEVICE_SETTINGS]
    jobs = [(setting, name) for name in names for setting in settings]
    if has_graphs(device):
        jobs += [(setting, name) for setting in COMPILED_SETTINGS for name in ("ar", "sjd", "gsd", "scd-gs")]
    audit = partial(_audited, device, scale.images)
    workers, rows = min(_AUDITORS, len(os.sched_getaffinity(0))), []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for row in (map if len(jobs) < 10 else pool.map)(audit, jobs):
            rows.append(row)
            yield [], [row]
    yield judged(rows), []


def recorded(device: str, scale: Scale) -> Iterator[Outcome]:
    """`audit --run --recompute` of runs decoded on the device: eager, and compiled if steps are captured."""
    from recorded import KEYS, measure, settings

    tried = [setting for compiled in (False, True) for setting in settings(device, compiled)]
    # Sharp sampling is tried with AR on one model only, because the part has only minutes.
    tried = [job for job in tried if "sjd" in job or "shapes" in job] if has_graphs(device) else tried[:1]
    rows = []
    with ProcessPoolExecutor(min(len(tried), _AUDITORS), get_context("spawn")) as pool:
        for row in (map if len(tried) == 1 else pool.map)(measure, *zip(*tried, strict=True)):
            rows.append(row)
            yield [], [row]
    wrong = [row for row in rows if row["verdict"] != "consistent"]
    value = f"{len(rows) - len(wrong)} of {len(rows)}" + "".join(f"; {[row[name] for name in KEYS]}" for row in wrong)
    yield [claim("audit --run --recompute finds runs decoded here consistent", value, "all", not wrong)], []


def judged(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the claim about decoders that their audits support."""
    tried = [row for row in rows if row.get("p_value") is not None]
    lossless, lossy = ([row for row in tried if row["lossless"] == kind] for kind in (True, False))
    wrong = [row for row in lossless if row["p_value"] < AUDIT_LEVEL]
    value = f"{len(lossless) - len(wrong)} of {len(lossless)} audits"
    value += "".join(f"; deviates: {row['decoder']}" for row in wrong)
    claims = [claim("no decoder declared lossless deviates from the exact joint", value, "all", not wrong)]
    if lossy:
        seen = sum(row["p_value"] < AUDIT_LEVEL for row in lossy)
        claims.append(claim("decoders declared lossy deviate from it", f"{seen} of {len(lossy)} audits"))
    return claims


def _audited(device: str, images: int, job: tuple[AuditSetting, str]) -> dict[str, object]:
    setting, name = job
    decoder = resolve(name)
    row = {"setting": setting.name, "decoder": name, "lossless": decoder.lossless}
    start = time.perf_counter()
    try:
        with _moved(setting_model(setting, 0)[0], device):
            p = p_value(observe(setting, decoder, images, 0))
    except SpecbenchError as error:
        return row | {"p_value": None, "refused": str(error)}
    return row | {"p_value": p, "images": images * setting.tables, "seconds": time.perf_counter() - start}


@contextmanager
def _moved(model, device: str) -> Iterator[None]:
    """Move a cached model to the device for the block, and then back to the CPU."""
    model.move(device)
    try:
        yield
    finally:
        model.move("cpu")
