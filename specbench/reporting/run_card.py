"""Run card (`specbench show RUN`): spec, origins of settings, invocations, failures, numbers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from specbench.reporting.report_rows import report_rows
from specbench.specs.presets import PRESETS
from specbench.store.run_info import decoder_json
from specbench.store.run_store import RunStore
from specbench.store.schema import read_facts


def card(folder: Path) -> dict:
    """Collect the facts of one run as nested plain values.

    Keys: `run_id, folder, model, source` (of a checkpoint that is not the official one), `processors` (logits
    processors of its `generation_config.json`), `decoder` (components and options), `method` (the paper or released
    program that its preset follows), `setting, origins` (source of each setting), `window_curve` (of `--window auto`),
    `invocations` (each with `started_at, finished_at, environment`), `images, failed` (counts), `errors` (count by
    message), `facts` (means of the decoder's per-image statistics) and `numbers` (the report row).
    """
    store = RunStore(folder)
    info = store.info()
    rows = store.samples(["status", "error", "facts"])
    decoded = rows[rows["status"] == "ok"]
    (numbers,) = report_rows([Path(folder)])
    return {
        "run_id": info.run_id,
        "folder": str(folder),
        "model": info.spec.model,
        "source": info.source_text,
        "processors": info.processors_text,
        "decoder": decoder_json(info.spec.decoder),
        "method": _method(info.spec.decoder.name),
        "setting": numbers["setting"],
        "origins": info.origins or {},
        "window_curve": info.window_curve,
        "invocations": [
            {"started_at": call.started_at, "finished_at": call.finished_at, "environment": call.environment}
            for call in info.invocations
        ],
        "images": len(decoded),
        "failed": len(rows) - len(decoded),
        "errors": {str(error): int(times) for error, times in rows["error"].value_counts().items()},
        "facts": _means(read_facts(pa.array(decoded["facts"], pa.string())).to_pandas()),
        "numbers": numbers,
    }


def _method(name: str) -> str | None:
    """Source of a preset, with the equation and known omissions; None where there is none."""
    preset = PRESETS.get(name)
    return None if preset is None or preset.paper == "-" else f"{preset.paper}: {preset.equation}"


def _means(numbers: pd.DataFrame) -> dict[str, float | None]:
    """Mean of each column over the images that have it."""
    return {name: None if pd.isna(mean) else float(mean) for name, mean in numbers.mean().items()}
