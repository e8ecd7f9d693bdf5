"""python readings.py RUNS [LIMIT]: effect of other readings of papers on `shapes`.

Writes tokens per step of each reading, beginning with the reading of the papers' tables, on the first LIMIT captions
(default 32, one image each) to `results/reference/readings.json`, which `docs/readings.md` prints. Settings in that
file are not measured again. RUNS keeps the runs.
"""

import json
import math
import sys
from pathlib import Path

import specbench
from specbench.decoding.verification import ratio_tests

SHARED = {"model": "shapes", "prompts": "shapes", "batch": 48, "threads": 1, "mode": "throughput", "baseline": 0}
NU, DEPTH = 0.7, 5
"""Decay of Cool-SD's schedule, and depth of the tree."""
MEAN = sum(math.exp(-NU * depth) for depth in range(1, DEPTH + 1)) / DEPTH
SCHEDULES = {
    "geometric mean delta": f"cool-sd:delta={1.1 * MEAN / math.exp(-NU * (DEPTH + 1) / 2):.4f}",
    "first weight delta": f"cool-sd:delta={1.1 * MEAN / math.exp(-NU):.4f}",
}
READINGS = {
    "schedule": ("cool-sd", *SCHEDULES.values()),
    "floor": ("cool-sd", "cool-sd:floor=1", "eagle"),
    "G": ("gsd:G=10", "gsd:G=50"),
    "bounds": ("gsd", "gsd:bounds=inclusive"),
    "delta": ("lantern:delta=0.1", "lantern:delta=0.2"),
    "fresh-q": ("sjd:fresh-q=onehot", "sjd:fresh-q=uniform"),
    "init": ("sjd:init=left-sample", "sjd:init=left-repeat", "sjd:init=above-sample", "sjd:init=uniform"),
    "nu": ("cool-sd", "cool-sd:nu=0.35", "cool-sd:nu=1.4"),
    "order": ("gsd", "gsd:order=descending"),
    "rows-count": ("zipar:rows-count=released", "zipar"),
    "rows-window": ("zipar:rows-window=16", "zipar:rows-window=12", "zipar:rows-window=8"),
    "schedule (linear)": ("cool-sd-linear", "cool-sd-linear:slope=1"),
    "siblings": ("sjd-pac:siblings=4", "sjd-pac:siblings=3"),
    "tree": ("eagle", "eagle:tree=naive_extend_57", "eagle:tree=chain"),
    "window": ("sjd:window=16", "sjd:window=8", "sjd:window=32", "sjd:window=64"),
}
"""By setting: the decoder with the reading in the papers' tables, then with other readings."""
SAMPLING = {"guidance": (3.0, 1.0, 5.0), "temperature": (1.0, 0.9), "top-k": (0, 10, 50), "seed": (42, 43, 44, 45, 46)}
"""By setting of `sjd`: the tables' value, then other values."""


def measured(out: Path, decoder: str, limit: int, **settings: object) -> dict[str, object]:
    """The tokens per step of one run."""
    (folder,) = specbench.run(decoder=[decoder], out=str(out), limit=limit, **SHARED, **settings).folders
    (row,) = specbench.report(folder.name, out=str(out))
    low, high = row["intervals"]["tokens_per_step"]
    return {"reading": decoder, "images": row["n"], "value": row["tokens_per_step"], "low": low, "high": high}


def excess(drafts: int, delta: float, nu: float) -> list[float]:
    """Another reading of equation 16: only the excess over 1 decays, with mean delta - 1."""
    return [1 + weight for weight in _as_published(drafts, delta - 1, nu)]


_as_published = ratio_tests.exponential


def main(out: Path, limit: int) -> None:
    place = Path(__file__).parents[2] / "results/reference/readings.json"
    readings: dict[str, list[dict]] = json.loads(place.read_text()) if place.exists() else {}
    for name, decoders in READINGS.items():
        if name in readings:
            continue
        readings[name] = [measured(out, decoder, limit) for decoder in decoders]
        if name == "schedule":
            ratio_tests.exponential = excess
            readings[name].append(measured(out / "excess", "cool-sd", limit) | {"reading": "excess over 1 decays"})
            ratio_tests.exponential = _as_published
        place.write_text(json.dumps(readings, indent=1) + "\n")
    for name, values in ((name, values) for name, values in SAMPLING.items() if name not in readings):
        key = name.replace("-", "_")
        readings[name] = [measured(out, "sjd", limit, **{key: value}) | {"reading": f"{value:g}"} for value in values]
        place.write_text(json.dumps(readings, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32)
