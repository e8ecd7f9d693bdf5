"""python dev/speed/batches.py RUNS AR TO: plot speed-up against batch size, and tokens per step against the entropy of
the prompts, and store the raw rows.

RUNS has decoders and `ar` at several batch sizes (`specbench run --sweep batch=1,2,4,8`); TO/batches.parquet has a row
per image. AR is a run of `ar` over all prompts; the entropy of a prompt is the mean over the tokens of its images there
(TO/entropy.parquet). Images by entropy come from results/reference. Without RUNS and AR the rows in TO are drawn.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from specbench.reporting.charts import Curve, figure_chart
from specbench.reporting.figures import chart_figure, figure_csv, saved
from specbench.reporting.marks import label
from specbench.stats.intervals import Estimate, ratio_of_totals
from specbench.store.run_store import RunStore
from specbench.store.schema import AR_SPANS

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "images.parquet"
BY_ENTROPY = ("sjd", "scd-mc", "pjd", "eagle", "best-lossless", "vertical", "vertical-coupled")
GROUPS = 6


def kept(runs: Path) -> pd.DataFrame:
    """Images of all runs: decoder, batch, prompt, steps, and the image's share of the batch's milliseconds."""
    parts = []
    for folder in sorted(path.parent for path in runs.glob("*/run.json")):
        store = RunStore(folder)
        spans = [f"{span}_ms" for span in AR_SPANS]
        spec, rows = store.info().spec, store.samples(["nfe", "batch", *spans])
        rows = rows.assign(decoder=label(spec.decoder), ms=rows[spans].sum(axis=1) / rows["batch"])
        parts.append(rows[["decoder", "batch", "prompt_id", "sample", "nfe", "ms"]])
    return pd.concat(parts)


def batch_curves(images: pd.DataFrame) -> list[Curve]:
    """Ratio of AR's time to each decoder's time at the same batch size, for images paired by prompt."""
    key = ["batch", "prompt_id", "sample"]
    ar = images[images["decoder"] == "ar"].set_index(key)["ms"]
    curves = []
    for decoder, rows in images[images["decoder"] != "ar"].groupby("decoder", sort=False):
        points = []
        for batch, same in rows.groupby("batch"):
            base = ar.loc[list(same[key].itertuples(index=False, name=None))]
            # Images of the same batch share their time, so batches are the units.
            unit = np.arange(len(same)) // batch if batch > 1 else same["prompt_id"]
            points.append((Estimate(batch), ratio_of_totals(base.to_numpy(), same["ms"].to_numpy(), unit)))
        curves.append(Curve(str(decoder), True, points))
    return curves


def entropy_curves(entropy: pd.Series) -> list[Curve]:
    """Tokens per step of groups of prompts, which have equal size and are formed by AR's entropy."""
    group = pd.qcut(entropy, GROUPS, labels=False)
    images = pd.read_parquet(REFERENCE)
    images = images.assign(length=images["tokens"].map(len), group=images["prompt_id"].map(group))
    curves = []
    for decoder in BY_ENTROPY:
        rows = images[images["decoder"] == decoder].groupby("group")
        points = [
            (Estimate(entropy[group == number].mean()), ratio_of_totals(part["length"], part["nfe"], part["prompt_id"]))
            for number, part in rows
        ]
        curves.append(Curve(decoder, True, points))
    return curves


def main() -> None:
    *sources, to = map(Path, sys.argv[1:])
    if sources:
        runs, ar = sources
        kept(runs).to_parquet(to / "batches.parquet", index=False)
        rows = RunStore(ar).samples(["entropy"])
        rows = rows.assign(entropy=rows["entropy"].map(np.mean))
        rows.groupby("prompt_id")["entropy"].mean().to_frame().to_parquet(to / "entropy.parquet")
    entropy = pd.read_parquet(to / "entropy.parquet")["entropy"]
    drawn = {
        "batches": figure_chart(
            batch_curves(pd.read_parquet(to / "batches.parquet")), "batch", "times AR of that batch"
        ),
        "entropy": figure_chart(entropy_curves(entropy), "entropy of the prompt, nats", "tokens per step"),
    }
    for name, chart in drawn.items():
        (to / f"{name}.png").write_bytes(saved(chart_figure(chart, "page"), "png"))
        (to / f"{name}.csv").write_text(figure_csv(chart))


if __name__ == "__main__":
    main()
