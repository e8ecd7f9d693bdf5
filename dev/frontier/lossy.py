"""Which lossy decoder commits the most tokens per step with images as good as AR's; continues where it stopped.

    python dev/frontier/lossy.py RUNS                      2,226 images of each decoder (318 prompts, 7 samples)
    python dev/frontier/lossy.py RUNS --print              print what is known
    python dev/frontier/lossy.py RUNS --samples 1 --limit 24 --out /tmp/trial ar sjd    a trial

Images go to the folder RUNS, outside the repository; images that it holds are not decoded again. Per image, target
forwards and scores go to lossy.parquet, CPU seconds to lossy-cost.jsonl, the table to lossy.md.

Equivalence is declared before anything is decoded: a decoder's mean score is equivalent to AR's on the same prompts and
seeds if two one-sided t tests over prompts reject a difference of MARGINS and more, in both scores, at the level 0.05
(so that no correction for two scores is due), p-values corrected over decoders by Holm. Why these margins:
docs/frontier.md. Seconds are those of `specbench forecast` for Lumina-mGPT 7B, at this many tokens per step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from scipy.special import stdtr, stdtrit

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from search import DEVICES, modelled_seconds, shown, spec_of, tokens_per_step  # noqa: E402 - likewise

from specbench import api  # noqa: E402 - after the path
from specbench.metrics.score_store import image_values  # noqa: E402
from specbench.metrics.shapes_clip import ShapesClip  # noqa: E402
from specbench.metrics.shapes_detector import ShapesDetector  # noqa: E402
from specbench.models.catalog import find_model  # noqa: E402
from specbench.runs.memory_estimate import most_columns  # noqa: E402
from specbench.stats.intervals import clustered_mean  # noqa: E402
from specbench.stats.significance import holm  # noqa: E402
from specbench.store.run_store import RunStore  # noqa: E402
from specbench.store.schema import KEY  # noqa: E402

MARGINS = {"shapes-detector": 0.03, "shapes-clip": 0.01}
"""Largest difference of the mean score to AR's that counts as none, by metric."""
LEVEL = 0.05
BASELINE = "ar"
CANDIDATES = (
    BASELINE,
    "vertical",
    "best-lossless",
    "vertical:verifier=amplify,k=1.5",
    "vertical:verifier=amplify,k=2",
    "vertical:verifier=amplify,k=4",
    "vertical:verifier=relax,residual=optimal",
    "best-lossless:verifier=amplify,k=2",
    "best-lossless:verifier=relax,residual=optimal",
    "sjd++",
    "gsd",
    "cool-sd",
    "uniform-rsd",
    "lantern++",
)
"""AR, the two lossless decoders of fewest steps as controls, these two relaxed, and published lossy ones."""
OUT = Path("results/frontier")


def decode_and_score(runs: Path, decoder: str, samples: int, limit: int | None) -> pd.DataFrame:
    """One row per image of a decoder: prompt, sample, target forwards, score by metric."""
    chosen = {"limit": limit} if limit else {}
    summary = api.run(
        model="shapes", prompts="shapes", decoder=[decoder], samples=samples, batch=60, threads=1, mode="throughput",
        out=str(runs), **chosen,
    )  # fmt: skip
    if summary.problem():
        raise summary.problem()
    (folder,) = summary.folders
    api.score([str(folder)], list(MARGINS), out=runs)
    store = RunStore(Path(folder))
    rows = store.samples([*KEY, "nfe"])[[*KEY, "nfe"]]
    for metric in (ShapesDetector(), ShapesClip()):
        values = image_values(store.folder, metric).rename(columns={"value": metric.name})
        rows = rows.merge(values[[*KEY, metric.name]].astype({metric.name: float}), on=list(KEY))
    return rows.assign(decoder=decoder, weights=store.info().spec.weights_sha256)


def equivalence(gaps: Sequence[float], prompts: Sequence[str], margin: float) -> dict[str, float]:
    """Difference with its 90 % interval, and the p-value of the two one-sided tests of `margin`, over prompts."""
    mean, error, n = clustered_mean(gaps, prompts)
    if not error:  # one prompt, or differences that are all equal
        return {"difference": mean, "low": math.nan, "high": math.nan, "p": math.nan}
    half = float(stdtrit(n - 1, 1 - LEVEL)) * error
    p = float(stdtr(n - 1, -(margin - abs(mean)) / error))
    return {"difference": mean, "low": mean - half, "high": mean + half, "p": p}


def compare(images: pd.DataFrame) -> list[dict[str, object]]:
    """Per decoder its tokens per step, seconds, and differences to AR with the verdict; the fewest steps first."""
    baseline, length = images[images.decoder == BASELINE], find_model("shapes").stream
    rows = []
    for decoder, own in images.groupby("decoder", sort=False):
        counted = {"model": "shapes", "length": length, "forwards": own.nfe.tolist(), "decoder": decoder}
        tokens, spec = tokens_per_step(counted), spec_of(decoder)
        seconds = {
            name: [
                modelled_seconds({**counted, "forwards": [length / rate] * 2}, spec)[name]
                for rate in (tokens.value, *(r for r in (tokens.high, tokens.low) if r))
            ]
            for name in DEVICES
        }
        row = {"decoder": decoder, "lossless": spec.lossless}
        row |= {"columns": most_columns(spec, find_model("shapes")), "images": len(own), "tokens": tokens}
        if decoder != BASELINE:
            pairs = own.merge(baseline, on=list(KEY), suffixes=("", "_ar"))
            row |= {
                metric: equivalence(pairs[metric] - pairs[f"{metric}_ar"], pairs.prompt_id, margin)
                for metric, margin in MARGINS.items()
            }
        rows.append(row | {"seconds": seconds})
    judge(rows)
    return sorted(rows, key=lambda row: -row["tokens"].value)


def judge(rows: Sequence[dict[str, object]]) -> None:
    """Add to each row of another decoder than AR `p`, corrected by Holm, `equivalent`, and `front`."""
    others = [row for row in rows if row["decoder"] != BASELINE]
    worst = [max(row[metric]["p"] for metric in MARGINS) for row in others]
    for row, p in zip(others, holm([None if math.isnan(p) else p for p in worst]), strict=True):
        row |= {"p": p, "equivalent": p is not None and p < LEVEL}
    for row in rows:
        row["front"] = not any(better(other, row) for other in rows)


def better(one: Mapping, other: Mapping) -> bool:
    """Whether a decoder takes fewer modelled seconds on both devices, with a detector score at least as good."""
    faster = all(one["seconds"][device][0] < other["seconds"][device][0] for device in DEVICES)
    detector = [row.get("shapes-detector", {"difference": 0.0})["difference"] for row in (one, other)]
    return faster and detector[0] >= detector[1]


def table(rows: Sequence[Mapping]) -> str:
    """Markdown of `compare`."""
    devices = [f"{name}, s" for name in DEVICES]
    scores = [f"{metric.removeprefix('shapes-')} (margin {margin})" for metric, margin in MARGINS.items()]
    heads = ["decoder", "lossless", "columns", "images", "tokens per step [95 %]", *devices]
    lines = [[*heads, *[f"{score} [90 %]" for score in scores], "p", "equivalent to AR", "front"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        found = [f"{v[0]:.1f} [{min(v):.1f}, {max(v):.1f}]" for v in row["seconds"].values()]
        line = [f"`{row['decoder']}`", "yes" if row["lossless"] else "no", str(row["columns"]), str(row["images"])]
        line += [shown(row["tokens"]), *found]
        if row["decoder"] == BASELINE:
            line += ["-"] * (len(MARGINS) + 2)
        else:
            parts = (row[metric] for metric in MARGINS)
            line += [f"{one['difference']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]" for one in parts]
            line += ["-" if row["p"] is None else f"{row['p']:.2g}", "yes" if row["equivalent"] else "not shown"]
        lines.append([*line, "yes" if row["front"] else ""])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("decoders", nargs="*", help="as in `specbench run --decoder`; AR is always among them")
    parser.add_argument("--samples", type=int, default=7, help="images of each prompt")
    parser.add_argument("--limit", type=int, help="prompts; all 318 without it")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--print", action="store_true", dest="only_print", help="decode nothing")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "lossy.parquet"
    if not options.only_print:
        wanted = list(dict.fromkeys([BASELINE, *(options.decoders or CANDIDATES)]))
        images = None
        for decoder in wanted:
            start = time.process_time()
            own = decode_and_score(options.runs, decoder, options.samples, options.limit)
            cost = {"decoder": decoder, "images": len(own), "cpu_s": round(time.process_time() - start, 1)}
            with (options.out / "lossy-cost.jsonl").open("a") as out:
                out.write(json.dumps(cost) + "\n")
            images = own if images is None else pd.concat([images, own], ignore_index=True)
            print(cost, file=sys.stderr)
            images.to_parquet(kept)
    text = table(compare(pd.read_parquet(kept)))
    (options.out / "lossy.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
