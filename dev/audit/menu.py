"""Audit every lossless combination of components. A later call continues after the last line.

Each combination is written to results/audit/menu.jsonl at once. Combinations that have a line are skipped, so the
audit can run on several evenings; delete the file to audit all combinations again. The first combinations
cover all components, all option values and all pairs of them. `--limit N` stops after N more combinations.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "dev")]

from json_rows import read_rows  # noqa: E402 - found through the line above
from menu import described, lossless_decoders  # noqa: E402 - found through the line above
from menu_audit import audit_combination, widest_first  # noqa: E402 - likewise

from specbench.specs.presets import DecoderSpec  # noqa: E402 - likewise
from specbench.system.version import __version__  # noqa: E402 - likewise

KEPT = ("decoder", "verdict", "declared", "samples", "p_value", "tv", "tv_low", "tv_high", "detectable_tv")


def menu_row(spec: DecoderSpec) -> dict[str, object]:
    """Row of one audit."""
    start = time.process_time()
    row = audit_combination(spec)
    kept = {name: row[name] for name in (*KEPT, "worst_setting", "refused")}
    return {**kept, "cpu_s": round(time.process_time() - start, 2), "version": __version__}


def menu_rows(decoders: list[DecoderSpec], workers: int) -> Iterator[dict[str, object]]:
    """Yield the row of each decoder's audit as soon as it is done."""
    if workers == 1:
        yield from map(menu_row, decoders)
        return
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for job in as_completed([pool.submit(menu_row, spec) for spec in decoders]):
            yield job.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "audit" / "menu.jsonl")
    parser.add_argument("--limit", type=int, help="stop after so many combinations")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoders = list(lossless_decoders())
    by_decoder = {row["decoder"]: row for row in read_rows(options.out)}
    waiting = [spec for spec in widest_first(decoders) if described(spec) not in by_decoder]
    with options.out.open("a") as out:
        for number, row in enumerate(menu_rows(waiting[: options.limit], options.workers), start=1):
            by_decoder[str(row["decoder"])] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{number}/{len(waiting[: options.limit])} {row['verdict']} {row['decoder']}", file=sys.stderr)
    lossy = [name for name, row in by_decoder.items() if row["verdict"] == "lossy"]
    print(f"{len(by_decoder)} of {len(decoders)} combinations audited, {len(lossy)} of them not lossless")
    for name in lossy:
        print(f"not lossless: {name}, p {by_decoder[name]['p_value']:.2g}, {by_decoder[name]['worst_setting']}")
    return 4 if lossy else 0


if __name__ == "__main__":
    sys.exit(main())
