"""python collect.py RUNS TO: what all runs in a folder gave: `scores.parquet`, `images.parquet` and `decoders.png`.

`scores.parquet` has a row per run and score; `images.parquet` a row per image, with its tokens, from which the model's
tokenizer draws it again.
"""

import sys
from pathlib import Path

import pandas as pd

from specbench.metrics.shapes_clip import ShapesClip
from specbench.metrics.shapes_detector import ShapesDetector
from specbench.records import KEY
from specbench.reporting.gallery import gallery
from specbench.reporting.rows import label
from specbench.scores import image_values, read_scores
from specbench.store import RunStore

COLUMNS = ("run_id", "decoder", "metric", "value", "low", "high", "n", "note", "images")


def images(store: RunStore) -> pd.DataFrame:
    """One row per image: key, category, steps, tokens and what scores single images."""
    rows = store.samples(["category", "nfe", "tokens"])
    for metric in (ShapesDetector(), ShapesClip()):
        values = image_values(store.folder, metric).rename(columns={"value": metric.name})
        rows = rows.merge(values[[*KEY, metric.name]], on=list(KEY), how="left")
    return rows


def main(runs: Path, to: Path) -> None:
    stores = {folder.name: RunStore(folder) for folder in sorted(runs.glob("shapes-*"))}
    infos = {name: store.info()["spec"] for name, store in stores.items()}
    names = {name: label(info["decoder"]) for name, info in infos.items()}
    names |= {name: "ar top-k 1" for name, info in infos.items() if info["sampling"]["top_k"] == 1}
    scores = [{"run_id": n, "decoder": names[n], **row} for n, s in stores.items() for row in read_scores(s.folder)]
    pd.DataFrame(scores)[list(COLUMNS)].to_parquet(to / "scores.parquet", index=False)
    parts = [images(store).assign(decoder=names[name]) for name, store in stores.items()]
    pd.concat(parts).to_parquet(to / "images.parquet", index=False, compression="zstd")
    order = sorted(stores, key=lambda name: (names[name] != "ar", infos[name]["decoder"]["name"], names[name]))
    gallery([stores[name].folder for name in order], to / "decoders.png", limit=10)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
