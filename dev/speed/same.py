"""A/A check of measured speed: one decoder under four names, which must not differ significantly.

python dev/speed/same.py run --prompts 64 --out /tmp/same     # a later call continues
python dev/speed/same.py report --out /tmp/same               # writes results/speed/same.json
"""

import argparse
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd

from specbench import stats
from specbench.runs.plan import make_plan
from specbench.runs.progress_bar import ProgressReporter
from specbench.runs.runner import run_plans
from specbench.runs.settings import merge, run_settings
from specbench.store.run_folders import runs_in
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore
from specbench.system.version import __version__

RESULT = Path(__file__).parents[2] / "results" / "speed" / "same.json"
NAMES = ("sjd-a", "sjd-b", "sjd-c", "sjd-d")


def decode(prompts: int, out: Path) -> None:
    """AR, and SJD under each name."""
    flags = {"decoder": ["ar", "sjd"], "threads": 1, "limit": prompts, "out": str(out), "baseline": 0}
    plan = make_plan(merge(run_settings(), flags, env={}))
    ar, sjd = plan.decoders
    named = (replace(sjd, spec=replace(sjd.spec, name=name)) for name in NAMES)
    if problem := run_plans(replace(plan, decoders=(ar, *named)), ProgressReporter()).problem():
        raise problem


def compare(out: Path) -> dict:
    """Compute speed-ups over AR, and test each pair of names on common prompts."""
    rows = {read_info(folder).spec.decoder.name: _timed(folder) for folder in runs_in(out)}
    speed_ups = {name: vars(stats.speed_up(rows[name], rows["ar"]).total) for name in NAMES}
    pairs = {}
    for name, other in itertools.combinations(NAMES, 2):
        gap = stats.speed_difference(stats.paired(rows[name], rows[other]))
        pairs[f"{name} {other}"] = vars(stats.difference_to_show(gap))
    for gap, p in zip(pairs.values(), stats.holm([pair["p"] for pair in pairs.values()]), strict=True):
        gap |= {"p_holm": p, "real": stats.is_real(p)}  # Holm's correction over all pairs
    return {
        "version": __version__,
        "images": min(map(len, rows.values())),
        "load_when_reported": os.getloadavg()[1],
        "speed_ups": speed_ups,
        "turns": {name: frame["turn"].value_counts().sort_index().to_dict() for name, frame in rows.items()},
        "pairs": pairs,
    }


def _timed(folder: Path) -> pd.DataFrame:
    rows = RunStore(folder).samples()
    return rows.assign(turn=[json.loads(text)["turn"] for text in rows["machine"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("same"))
    asked = parser.parse_args()
    if asked.what == "run":
        decode(asked.prompts, asked.out)
    content = compare(asked.out)
    if asked.what == "report":
        RESULT.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
