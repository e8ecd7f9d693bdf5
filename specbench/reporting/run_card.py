"""What `specbench show` says about one run: what it was, who made it where, what failed, and its numbers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from specbench import stats
from specbench.reporting.report_rows import report_rows
from specbench.store.run_store import RunStore
from specbench.system.environment import describe


def card(folder: Path) -> dict:
    """One run as nested plain values.

    Keys: `run_id, folder, model, decoder` (every choice and option), `setting, origins` (where each setting came
    from), `window_curve` (of `--window auto`), `invocations` (each with `started_at, finished_at, environment`),
    `images, failed` (counts), `errors` (how often each), `facts` (means of what the decoder noted per image) and
    `numbers` (the report row).
    """
    store = RunStore(folder)
    info = store.info()
    rows = store.samples(["status", "error", "facts"])
    decoded = rows[rows["status"] == "ok"]
    (numbers,) = report_rows([Path(folder)])
    return {
        "run_id": info["run_id"],
        "folder": str(folder),
        "model": info["spec"]["model"],
        "decoder": info["spec"]["decoder"],
        "setting": numbers["setting"],
        "origins": info.get("origins", {}),
        "window_curve": info.get("window_curve"),
        "invocations": [
            {name: call.get(name) for name in ("started_at", "finished_at")} | {"environment": describe(call)}
            for call in info["invocations"]
        ],
        "images": len(decoded),
        "failed": len(rows) - len(decoded),
        "errors": {str(error): int(times) for error, times in rows["error"].value_counts().items()},
        "facts": _means(stats.with_facts(decoded[["facts"]]).drop(columns="facts")),
        "numbers": numbers,
    }


def _means(numbers: pd.DataFrame) -> dict[str, float | None]:
    """Mean of each column over the images that have it."""
    return {name: None if pd.isna(mean) else float(mean) for name, mean in numbers.mean().items()}
