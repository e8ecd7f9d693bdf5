"""Audit exact decoders with new seeds and count the false alarms. A later call continues after the last line.

    python dev/audit/false_alarms.py                      200 audits, the lossless presets in turn, a seed for each
    python dev/audit/false_alarms.py --samples 27000      the same with fewer images each

Each audit is written to results/audit/false_alarms.jsonl at once. An exact decoder is flagged with probability
AUDIT_LEVEL. P-values are corrected for several tests; therefore fewer than 5 % should be below 0.05.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))

from json_rows import read_rows  # noqa: E402 - found through the line above

from specbench.checks.divergence import AUDIT_LEVEL  # noqa: E402
from specbench.checks.losslessness import AUDIT_SAMPLES, audit_one  # noqa: E402
from specbench.specs.presets import PRESETS, resolve  # noqa: E402

FIRST_SEED = 1000
"""Lower seeds were used during the development of the audit."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "audit" / "false_alarms.jsonl")
    parser.add_argument("--audits", type=int, default=200)
    parser.add_argument("--samples", type=int, default=AUDIT_SAMPLES, help="images of each audit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    exact = [name for name in PRESETS if resolve(name).lossless]
    done = {row["seed"] for row in read_rows(options.out) if row["asked"] == options.samples}
    with options.out.open("a") as out:
        for seed in range(FIRST_SEED, FIRST_SEED + options.audits):
            if seed in done:
                continue
            name, start = exact[seed % len(exact)], time.process_time()
            row = audit_one(name, resolve(name), options.samples, seed)
            kept = {key: row[key] for key in ("decoder", "verdict", "samples", "p_value", "dependent", "alone_differ")}
            cost = round(time.process_time() - start, 2)
            out.write(json.dumps(kept | {"seed": seed, "asked": options.samples, "cpu_s": cost}) + "\n")
            out.flush()
    rows = read_rows(options.out)
    for asked in sorted({row["asked"] for row in rows}):
        p = [row["p_value"] for row in rows if row["asked"] == asked]
        alone = sum(row["alone_differ"] > 0 for row in rows if row["asked"] == asked)
        print(
            f"{asked:,} images: {len(p)} audits, {sum(value < AUDIT_LEVEL for value in p)} flagged at {AUDIT_LEVEL:g}, "
            f"{sum(value < 0.05 for value in p)} with p below 0.05, smallest p {min(p):.2g}, "
            f"{alone} with images that are others alone"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
