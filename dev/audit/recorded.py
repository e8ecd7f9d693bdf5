"""Compare recorded and recomputed values of clean runs: every family (tiny, random weights) and `shapes`.

    python dev/audit/recorded.py [--device cuda] [--compile]

Each model and dtype is written to results/audit/recorded.jsonl at once, and a later call continues after the last line.
No line may have `differs`: these are the measurements behind the tolerances of `specbench.checks.teacher_forced`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))

from json_rows import read_rows  # noqa: E402 - found through the line above

from specbench import api  # noqa: E402
from specbench.checks.run_audit import audit_run  # noqa: E402
from specbench.store.run_info import read_info  # noqa: E402

OUT = ROOT / "results" / "audit" / "recorded.jsonl"
KEYS = ("model", "decoder", "sampling", "dtype", "batch", "device", "compiled")
MODELS = ("shapes", "janus", "llamagen", "lumina", "anole", "simplear", "emu3")


SHARP = {
    "as the model's": {},
    "guidance 7": {"cfg": 7.0, "top_k": 0, "top_p": 1.0},
    "guidance 7, temperature 0.3": {"cfg": 7.0, "temperature": 0.3},
    "top-k 1": {"top_k": 1},
}
"""Sampling settings under which rounding changes p most, and settings under which it rarely changes p, but strongly."""


def measure(
    model: str, decoder: str, sampling: str, dtype: str, batch: int, device: str, compiled: bool
) -> dict[str, object]:
    """Audit a few images. `compiled` in the result says whether the run was really compiled."""
    # Tiny images have few tokens, and a test needs hundreds.
    tiny = {"limit": 2} if model == "shapes" else {"random_weights": True, "scale": "tiny", "limit": 24}
    with tempfile.TemporaryDirectory() as out:
        (folder,) = api.run(
            model=model, decoder=[decoder], batch=batch, prompts="shapes", dtype=dtype, device=device, quiet=True,
            baseline=0, compile="on" if compiled else "off", threads=1, out=out, **tiny, **SHARP[sampling],
        ).folders  # fmt: skip
        compiled = read_info(folder).compiled
        audit = audit_run(folder, recompute=True, device=device, keep=False)
    setting = dict(zip(KEYS, (model, decoder, sampling, dtype, batch, device, compiled), strict=True))
    return setting | {name: audit[name] for name in ("verdict", "tokens", "impossible_tokens", "agreement")}


def settings(device: str, compiled: bool) -> Iterator[tuple]:
    """Measurements to make, each with the keys `KEYS`."""
    for model in MODELS:
        for dtype, batch in (("float32", 1), ("float32", 2), ("bfloat16", 2)):
            yield model, "sjd", "as the model's", dtype, batch, device, compiled
        for sampling in SHARP:
            yield model, "ar", sampling, "bfloat16", 2, device, compiled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = {tuple(row[key] for key in KEYS) for row in read_rows(OUT)}
    with OUT.open("a") as out:
        for setting in settings(options.device, options.compile):
            if setting not in done:
                out.write(json.dumps(measure(*setting)) + "\n")
                out.flush()
    wrong = [row for row in read_rows(OUT) if any(column["differs"] for column in row["agreement"].values())]
    print(f"{len(read_rows(OUT))} runs, {len(wrong)} of them flagged")
    for row in wrong:
        print(row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
