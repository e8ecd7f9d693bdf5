"""Sample rows and run folders with chosen numbers."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import tiny

from specbench import stats
from specbench.decoding.generation import ORDERS, Generation
from specbench.prompts import Prompt, Request
from specbench.reporting.row import Machine, OverAR, OverFastest, ReportRow, Roofline
from specbench.specs.run_spec import RunSpec
from specbench.store.run_store import RunStore
from specbench.store.schema import SAMPLES, base_row, failed_row, sample_row

INVOCATION = {
    "started_at": "2026-01-02T03:04:05.000+00:00",
    "versions": {"python": "3.11.0", "torch": "2.9.0", "specbench": "0.1.0"},
    "git": {"revision": "0123456789abcdef", "dirty": False},
    "hardware": {"platform": "Linux x86_64", "cpu": "Test CPU", "cores": 2, "memory_gib": 4.0, "gpus": []},
    "load": 0.5,
}


def generation(
    nfe: int,
    target_ms: float,
    verify_ms: float = 0.0,
    logp: Sequence[float] = (-1.0, -2.0, 0.0, -3.0),
    entropy: Sequence[float] = (1.5, 1.5, 0.0, 2.0),
    tested: Sequence[int] = (2, 1, 0),
    accepted: Sequence[int] = (1, 0, 0),
    batch: int = 1,
) -> Generation:
    """Four stream tokens, the third one forced; one millisecond each of encoding, prefill and rendering."""
    return Generation(
        tokens=np.array([0, 1, 3, 2], dtype=np.int32), forced=np.array([False, False, True, False]),
        logp=np.array(logp, dtype=np.float32), entropy=np.array(entropy, dtype=np.float32),
        top1=np.full(4, 0.5, dtype=np.float32), committed_step=np.arange(1, 5, dtype=np.int32), nfe=nfe, prefills=1,
        drafted=np.array(tested), tested=np.array(tested), accepted=np.array(accepted),
        spans_ms={"encode": 1.0, "prefill": 1.0, "target": target_ms, "verify": verify_ms, "render": 1.0}, batch=batch,
        uniforms={name: np.full(len(logp), 0.5, np.float32) for name in ORDERS},
        image=np.zeros((3, 2, 2), dtype=np.uint8),
    )  # fmt: skip


def stored_rows(generations: Sequence[Generation | None], timed: bool = True) -> list[dict]:
    """Stored rows of prompts p0, p1, ...; None is a failed image."""
    rows = []
    for number, item in enumerate(generations):
        prompt = Prompt(f"p{number}", f"prompt {number}", "pets", {})
        base = base_row(Request.of(prompt), 0, INVOCATION["started_at"])
        rows.append(failed_row(base, "no luck") if item is None else sample_row(base, item, timed))
    return rows


def frame(generations: Sequence[Generation], timed: bool = True) -> pd.DataFrame:
    """The rows as statistics see them."""
    return stats.condense(pa.Table.from_pylist(stored_rows(generations, timed), schema=SAMPLES))


def folder(out: Path, spec: RunSpec, generations: Sequence[Generation | None], **hardware: object) -> Path:
    """A run folder in `out` holding these images; `hardware` entries differ from the usual machine's."""
    invocation = json.loads(json.dumps(INVOCATION))
    invocation["hardware"] |= hardware
    with RunStore(out / spec.run_id).lock(spec).begin(spec, invocation) as store:
        store.append(stored_rows(generations, spec.timed))
    return store.folder


def pictured(
    out: Path,
    prompts: Sequence[Prompt],
    samples: int = 1,
    spec: RunSpec | None = None,
    picture: Callable[[int], np.ndarray] = lambda number: np.full((3, 8, 8), number, dtype=np.uint8),
) -> Path:
    """A run folder in `out` with `samples` images of each prompt; `picture` makes the pixels [3, H, W] of the n-th."""
    spec = spec or SJD
    with RunStore(out / spec.run_id).lock(spec).begin(spec, INVOCATION) as store:
        for number, (prompt, sample) in enumerate(itertools.product(prompts, range(samples))):
            base = base_row(Request.of(prompt, sample), 0, INVOCATION["started_at"])
            row = sample_row(base, generation(4, 40.0), True)
            store.append([row], {row["image"]: picture(number)})
    return store.folder


def ar(n: int = 3) -> list[Generation]:
    """AR: four forwards of 10 ms an image, 1 ms of verification each."""
    return [generation(4, 40.0, 4.0, tested=(0,), accepted=(0,)) for _ in range(n)]


def sjd(n: int = 3) -> list[Generation]:
    """Two, two, three, two, ... forwards of 15 ms an image, 2 ms of verification each."""
    return [generation(2 + (i % 3 == 2), 15.0 * (2 + (i % 3 == 2)), 2.0 * (2 + (i % 3 == 2))) for i in range(n)]


def changed(spec: RunSpec, **fields: object) -> RunSpec:
    """The spec with fields of itself or of its sampling replaced."""
    of_run = {name: value for name, value in fields.items() if name in RunSpec.__dataclass_fields__}
    sampling = {name: value for name, value in fields.items() if name not in of_run}
    return replace(spec, **of_run, sampling=replace(spec.sampling, **sampling))


SJD = tiny.spec("sjd")
AR = tiny.spec("ar")


def bare_row(**values) -> ReportRow:
    """A report row with these values and no others."""

    def part(kind: type, **empty: object) -> object:
        given = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
        return kind(**empty | given)

    parts = {"over_ar": values.pop("over_ar", None) or part(OverAR), "over_fastest": part(OverFastest)}
    parts["machine"] = part(Machine, load=[], environment=[], stalled=None, disturbed=None)
    parts["roofline"] = part(Roofline, over_floor=None, roofline_note=None, floor=None)
    numbers = {name: values.pop(name) for name in stats.NUMBERS if name in values}
    none = dict.fromkeys((field.name for field in fields(ReportRow)), None)
    return ReportRow(**none | {"options": {}, "scores": [], "beside_ar": {}, "numbers": numbers} | parts | values)
