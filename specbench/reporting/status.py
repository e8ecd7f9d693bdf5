"""Progress of runs (`specbench status`)."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Group

from specbench import stats
from specbench.reporting.columns import MISSING, TOO_FEW, between, number
from specbench.reporting.comparability import Run, code_text, with_ar_runs
from specbench.reporting.marks import label, window_of
from specbench.reporting.report_rows import over_ar
from specbench.reporting.row import with_bounds
from specbench.specs.presets import named_ar
from specbench.store.merge_shards import incomplete_shards
from specbench.store.run_folders import SHARDS, find_runs, runs_in, shards_in
from specbench.store.run_info import RunInfo
from specbench.system.console import duration
from specbench.system.text_tables import distinct_columns, plain_table, terminal_table

_SILENT_S, _SILENT_IMAGES = 60.0, 10
"""A run is silent if nothing was written for `_SILENT_S` seconds, and in the usual time of `_SILENT_IMAGES` images."""
STATUS_COLUMNS = ("model", "part", "decoder", "window", "images", "failed", "tokens per second", "speed-up [95 %]",
                  "left", "state")  # fmt: skip


def status(out: str | Path = "results", runs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the progress of the runs in a results folder and its shards, also while other processes decode.

    Args:
        out: the results folder.
        runs: run ids, prefixes of run ids, their decoders, or run folders; empty means all.

    Returns:
        One dict per run: `run_id, folder, part` (the shard's folder), `model, decoder, window, images` (decoded),
        `wanted` (requested by the last call; None in older runs), `failed, tokens_per_second, speedup, speedup_low,
        speedup_high` (over AR so far), `seconds_left, silent_s` (seconds since the last write) and `state`: done,
        stopped, decoding, silent (the process may have been killed), or what a merge of shards lacks. A shard's run is
        left out once all its images are in the merged run.

    Raises:
        SpecbenchError: no runs, or a damaged one.
    """
    shards = shards_in(out)
    parts = [folder for shard in shards for folder in runs_in(shard)]
    whole = find_runs(out, runs) if runs or not parts else runs_in(Path(out))
    parts = [folder for folder in parts if not runs or folder.name in {run.name for run in whole}]
    return _merged(status_of([*whole, *parts]), "; ".join(incomplete_shards(shards)))


def _merged(rows: Sequence[dict[str, Any]], lacking: str) -> list[dict[str, Any]]:
    """Remove shards whose images are in a merged run. A merged run is done if `lacking` is empty."""
    shown = []
    for row in rows:
        shards = [other for other in rows if other["part"] and other["run_id"] == row["run_id"]]
        whole = next((other["images"] for other in rows if not other["part"] and other["run_id"] == row["run_id"]), 0)
        total = sum(other["images"] for other in shards)
        if row["part"] and 0 < total <= whole and row["silent_s"] is None:
            continue
        if shards and not row["part"] and whole <= total:
            state = lacking or ("done" if whole == total else "shards not merged")
            row = row | {"wanted": None if lacking else total, "state": state}
        shown.append(row)
    return shown


def status_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return `status` of those run folders that contain rows."""
    runs = with_ar_runs(folder for folder in folders if folder in runs_in(folder.parent))
    return [_status(run, ar_runs) for run, ar_runs in runs.values()]


def _status(run: Run, ar_runs: Sequence[Run]) -> dict[str, Any]:
    info, rows = run.info, run.rows
    call = info.invocations[-1]
    over = over_ar(run, ar_runs)
    silent_s = _now() - _written(run.folder) if call.finished_at is None else None
    edited = [code_text(info)] if info.spec.decoder_code else []
    edited += [f"model {code_text(info, 'model')}"] if info.spec.model_code else []
    left = max((call.wanted or 0) - len(rows), 0)
    return {
        "run_id": info.run_id,
        "folder": str(run.folder),
        "part": run.folder.parent.name if run.folder.parent.match(SHARDS) else None,
        "model": info.spec.model,
        "decoder": ", ".join([label(info.spec.decoder, info.origins, info.spec.model), *edited]),
        "window": window_of(info.spec.decoder.options),
        "images": len(rows),
        "wanted": call.wanted,
        "failed": run.failed,
        "tokens_per_second": stats.tokens_per_second(rows),
        **with_bounds("speedup", over.speedup),
        "eager_ar": over.eager_ar,
        "seconds_left": _seconds_left(run, left),
        "silent_s": silent_s,
        "state": _state(info, rows, left, silent_s),
    }


def _state(info: RunInfo, rows: pd.DataFrame, left: int, silent_s: float | None) -> str:
    if silent_s is None:
        return "stopped" if left else "done"
    pace = stats.throughput(rows)
    usual_s = max(_SILENT_S, _SILENT_IMAGES * info.spec.batch / pace if pace else 0)
    return "silent" if silent_s > usual_s else "decoding"


def _seconds_left(run: Run, left: int) -> float | None:
    """Estimate the seconds for `left` images from this call's time per image, which includes alternating runs."""
    call = run.info.invocations[-1]
    if not left or call.finished_at is not None:
        return None
    begun = sorted(datetime.fromisoformat(text).timestamp() for text in run.started if text >= str(call.started_at))
    if run.info.spec.batch > 1:
        return left * (_written(run.folder) - begun[0]) / len(begun) if begun else None
    return left * (begun[-1] - begun[0]) / (len(begun) - 1) if len(begun) > 1 else None


def _written(folder: Path) -> float:
    """Return the time of the last write of the run's rows, in seconds since 1970."""
    return (folder / "samples").stat().st_mtime


def _now() -> float:
    return datetime.now(UTC).timestamp()


def status_table(rows: Sequence[Mapping[str, Any]], width: int) -> Group:
    """Format the rows of `status` as a table for a terminal of this width."""
    lines = [list(status_line(row).values()) for row in rows]
    cells = [[MISSING if cell is None else str(cell) for cell in line] for line in lines]
    table = distinct_columns(plain_table(STATUS_COLUMNS, cells), ("decoder", "images", "state"))
    quoted = (row["eager_ar"] for row in rows if row["speedup"] is not None and not named_ar(row["decoder"]))
    return Group(
        terminal_table(table, width, (*STATUS_COLUMNS[:3], STATUS_COLUMNS[-1])),
        *(f"{sentence}." for sentence in dict.fromkeys(quoted) if sentence),
    )


def status_line(row: Mapping[str, Any]) -> dict[str, object]:
    """Format a row of `status` as cells of the columns `STATUS_COLUMNS`."""
    low, high = row["speedup_low"], row["speedup_high"]
    interval = "" if named_ar(row["decoder"]) else f" [{TOO_FEW if low is None else between(low, high)}]"  # 1 for AR
    wanted = f" of {row['wanted']}" if (row["wanted"] or 0) >= row["images"] else ""
    state = f"silent for {duration(row['silent_s'])}" if row["state"] == "silent" else row["state"]
    return {
        **{name: row[name] for name in ("model", "part", "decoder", "window")},
        "images": f"{row['images']}{wanted}",
        "failed": row["failed"] or None,
        "tokens per second": number(row["tokens_per_second"], 0),
        "speed-up [95 %]": MISSING if row["speedup"] is None else f"{number(row['speedup'])}x{interval}",
        "left": MISSING if row["seconds_left"] is None else duration(row["seconds_left"]),
        "state": state,
    }
