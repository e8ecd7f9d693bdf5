"""Cards of `specbench show` as nested plain values: of a run (spec, origins of settings, invocations, failures,
numbers) and of one image (facts, numbers, token maps)."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench import stats
from specbench.decoding.generation import SPANS
from specbench.errors import SpecbenchError
from specbench.reporting.image_tiles import Tile, tiles
from specbench.reporting.report_rows import report_rows
from specbench.specs.presets import PRESETS
from specbench.store.run_info import decoder_json
from specbench.store.run_store import RunStore
from specbench.store.schema import SAMPLES, read_facts
from specbench.system.console import one_line

_MOST_NAMED = 5
"""Prompt ids that an error lists."""


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
    preset = PRESETS.get(info.spec.decoder.name)
    rows = store.samples(["status", "error", "facts"])
    decoded = rows[rows["status"] == "ok"]
    (numbers,) = report_rows([Path(folder)])
    facts = read_facts(pa.array(decoded["facts"], pa.string())).to_pandas().mean()
    return {
        "run_id": info.run_id,
        "folder": str(folder),
        "model": info.spec.model,
        "source": info.source_text,
        "processors": info.processors_text,
        "decoder": decoder_json(info.spec.decoder),
        "method": f"{preset.paper}: {preset.equation}" if preset and preset.paper != "-" else None,
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
        "facts": {name: None if pd.isna(mean) else float(mean) for name, mean in facts.items()},
        "numbers": numbers,
    }


def image_card(folder: Path, prompt: str, sample: int = 0) -> tuple[dict, Tile]:
    """Collect the facts of one image as nested plain values, and its tile.

    Keys: `run_id, prompt_id, sample, prompt, category, seed, status, error, started_at, image` (a path), the numbers of
    `specbench.stats` for this image alone (`nfe, step_compression, latency_ms, latency_e2e_ms, acceptance,
    acceptance_by_offset, logp_mean, logp_std, perplexity, nll_gap, top1`), `spans_ms`, `facts` (additional statistics
    of the decoder), `scores` by metric, `committed_step` and `accepted_draft` (rows of the token grid; None if the grid
    is unknown).

    Args:
        prompt: prompt id, unique prefix of an id, or part of the prompt text.

    Raises:
        SpecbenchError: no image matches, or several prompts match.
    """
    row = _find(folder, prompt, sample)
    rows = stats.condense(row)
    (stored,) = row.to_pylist()
    tile = tiles(folder, [stored["prompt_id"]], sample)[stored["prompt_id"]]
    columns = ("prompt_id", "sample", "prompt", "category", "seed", "status", "error", "started_at")
    decoded = stored["status"] == "ok"
    return {
        "run_id": folder.name,
        **{name: stored[name] for name in columns},
        "image": str(folder / stored["image"]) if stored["image"] else None,
        **(_numbers(rows) if decoded else {}),
        "spans_ms": {span: stored[f"{span}_ms"] for span in SPANS if stored[f"{span}_ms"] is not None},
        "facts": json.loads(stored["facts"] or "{}"),
        "scores": dict(tile.scores),
        "committed_step": None if tile.steps is None else tile.steps.tolist(),
        "accepted_draft": None if tile.origins is None else tile.origins.astype(bool).tolist(),
    }, tile


def _find(folder: Path, prompt: str, sample: int) -> pa.Table:
    """Read the stored row of the image (one row)."""
    store = RunStore(folder)
    names = store.samples(["prompt"])
    highest = names["sample"].max()
    names = names[names["sample"] == sample]
    if names.empty and highest == highest:  # NaN for a run without images
        raise SpecbenchError(f"--sample {sample}: this run has no such sample", f"its samples are 0 to {highest}")
    prompt = prompt.encode("utf-8", "replace").decode()  # typed bytes that are no text match nothing
    ids, texts, folded = names["prompt_id"], names["prompt"], prompt.casefold()
    for found in (ids == prompt, ids.str.startswith(prompt), texts.str.casefold().str.contains(folded, regex=False)):
        if found.any():
            break
    else:
        some = ", ".join(map(one_line, ids.head(_MOST_NAMED)))
        raise SpecbenchError(
            f"no prompt of this run matches '{prompt}'", f"give an id or words of its text; ids: {some}"
        )
    chosen = ids[found].to_list()
    if len(chosen) > 1:
        shown = ", ".join(map(one_line, chosen[:_MOST_NAMED]))
        raise SpecbenchError(f"prompt '{prompt}' is ambiguous", f"{len(chosen)} prompts match, for example {shown}")
    here = (pc.field("prompt_id") == chosen[0]) & (pc.field("sample") == sample)
    for piece in store.batches(SAMPLES.names):
        if (row := piece.filter(here)).num_rows:
            return row
    raise SpecbenchError(f"{folder} was changed while it was read", "try again")


def _numbers(rows: pd.DataFrame) -> dict[str, object]:
    tokens = stats.token_stats(rows)
    own = ("nfe", "step_compression", "latency_ms", "latency_e2e_ms", "acceptance", "acceptance_by_offset", "top1")
    shared = ("logp_mean", "logp_std", "perplexity", "nll_gap")
    return {name: getattr(stats, name)(rows) for name in own} | {name: getattr(tokens, name, None) for name in shared}
