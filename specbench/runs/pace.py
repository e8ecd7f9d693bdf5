"""Known speed: seconds per image from stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from specbench.decoding.generation import SPANS
from specbench.store.find import find_runs_like
from specbench.store.run_store import RunStore


def seconds_per_image(out: Path, run_id: str | None, model: str, decoder: str, device: str) -> float | None:
    """Mean seconds per image of a run, or else of all runs of its model, decoder and device; None without any."""
    if run_id and (own := _pace([out / run_id])) is not None:
        return own
    return _pace(list(find_runs_like(out, model=model, decoder={"name": decoder}, device=device)))


def _pace(folders: Sequence[Path]) -> float | None:
    paces = [_count_and_pace(folder) for folder in folders if folder.is_dir()]
    images = sum(n for n, _ in paces)
    known = [(n, pace) for n, pace in paces if pace]
    return sum(n / pace for n, pace in known) / images if images and len(known) == len(paces) else None


def _count_and_pace(folder: Path) -> tuple[int, float | None]:
    """Number of decoded images of a run, and images per second."""
    from specbench import stats  # half a second of imports, only where such a run is stored

    columns = ("status", "batch", *(f"{span}_ms" for span in SPANS))
    pieces = [rows.filter(pc.equal(rows["status"], "ok")) for rows in RunStore(folder).batches(columns)]
    rows = stats.as_frame(pa.concat_tables(pieces)) if pieces else None
    return (0, None) if rows is None else (len(rows), stats.throughput(rows))
