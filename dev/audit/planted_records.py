"""Audit runs of `shapes` in bfloat16: clean runs, runs with wrong records, and runs with changed tokens.

    python dev/audit/planted_records.py

Each run is written to results/audit/planted_records.jsonl at once, and a later call continues after the last line. The
lines show what `audit --run --recompute` finds, and which faults the rounding of bfloat16 hides.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "tests" / "support")]

from json_rows import read_rows  # noqa: E402 - found through the line above
from planted_bugs import RECORDING_FAULTS, plant  # noqa: E402

from specbench import api  # noqa: E402
from specbench.checks.run_audit import audit_run  # noqa: E402
from specbench.decoding.sampling import Target  # noqa: E402
from specbench.store.run_store import RunStore  # noqa: E402

OUT = ROOT / "results" / "audit" / "planted_records.jsonl"
FILTERS = {"temperature": 1.0, "top_k": 60, "top_p": 0.95}
FAULTS = RECORDING_FAULTS | {
    "temperature 1.3": (Target.__call__, lambda plain, self, logits, *rest: plain(self, logits.float() / 1.3, *rest))
}
SHARP = {
    "top-k 1": {"cfg": 1.5, "top_k": 1},
    "temperature 0.1": {"cfg": 1.5, "temperature": 0.1},
    "guidance 7, temperature 0.3": {"cfg": 7.0, "temperature": 0.3},
    "guidance 7": {"cfg": 7.0},
    "guidance 7, no filter": {"cfg": 7.0, "top_k": 0, "top_p": 1.0},
    "temperature 2": {"cfg": 1.5, "temperature": 2.0},
}


def _other_tokens(rows: pd.DataFrame) -> None:
    rows.at[0, "tokens"] = rows.at[1, "tokens"]


def _random_tokens(images: int, each: int) -> Callable[[pd.DataFrame], None]:
    def change(rows: pd.DataFrame) -> None:
        chance = np.random.default_rng(0)
        for row in range(images):
            tokens = rows.at[row, "tokens"].copy()
            tokens[chance.choice(len(tokens), each, replace=False)] = chance.integers(0, 512, each)
            rows.at[row, "tokens"] = tokens

    return change


def _moved(by: float) -> Callable[[pd.DataFrame], None]:
    def change(rows: pd.DataFrame) -> None:
        rows["logp"] = [logp - np.float32(by) for logp in rows["logp"]]

    return change


CHANGES = {
    "tokens of another image in one": _other_tokens,
    "20 random tokens in one image": _random_tokens(1, 20),
    "5 random tokens in each image": _random_tokens(20, 5),
    "a random token in one image": _random_tokens(1, 1),
    "log p 0.05 less": _moved(0.05),
    "log p 0.005 less": _moved(0.005),
}


def jobs() -> Iterator[tuple[str, str, str, int, dict]]:
    """Changed values, kind of change, decoder, images and sampling."""
    for decoder in ("ar", "sjd"):
        for name, sampling in SHARP.items():
            for images in (1, 2, 12):
                yield name, "none", decoder, images, FILTERS | sampling
    for guidance, images in ((1.5, 8), (1.5, 40), (7.0, 8)):
        for name in RECORDING_FAULTS:
            yield name, "planted", "sjd", images, FILTERS | {"cfg": guidance}
    for images, filters in ((8, {"top_k": 0, "top_p": 1.0}), (8, {}), (16, {})):
        yield "temperature 1.3", "planted", "ar", images, FILTERS | {"cfg": 7.0} | filters
    for guidance in (1.5, 7.0):
        for name in CHANGES:
            yield name, "changed", "ar", 20, FILTERS | {"cfg": guidance}


def measure(what: str, kind: str, decoder: str, images: int, sampling: dict) -> dict[str, object]:
    """Decode a run, change its values, and audit it."""
    with tempfile.TemporaryDirectory() as out, pytest.MonkeyPatch.context() as patch:
        with pytest.MonkeyPatch.context() as planted:
            if kind == "planted":
                plant(planted, *FAULTS[what])
            (folder,) = api.run(
                decoder=[decoder], limit=images, batch=min(images, 12), dtype="bfloat16", threads=1, quiet=True,
                baseline=0,
                out=out, **sampling,
            ).folders  # fmt: skip
        if kind == "changed":
            plain = RunStore.samples
            patch.setattr(RunStore, "samples", lambda self, columns: _changed(plain(self, columns), CHANGES[what]))
        audit = audit_run(folder, recompute=True, keep=False)
    kept = ("verdict", "failed", "tokens", "impossible_tokens", "impossible_by_rounding", "agreement")
    return {name: audit[name] for name in kept}


def _changed(rows: pd.DataFrame, change: Callable[[pd.DataFrame], None]) -> pd.DataFrame:
    change(rows)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    keys = ("what", "kind", "decoder", "images", "sampling")
    done = [[row[key] for key in keys] for row in read_rows(OUT)]
    with OUT.open("a") as out:
        for job in jobs():
            if list(job) not in done:
                out.write(json.dumps(dict(zip(keys, job, strict=True)) | measure(*job)) + "\n")
                out.flush()
    for row in read_rows(OUT):
        print(row["kind"], row["what"], row["decoder"], row["images"], row["sampling"]["cfg"], row["verdict"], sep=", ")


if __name__ == "__main__":
    main()
