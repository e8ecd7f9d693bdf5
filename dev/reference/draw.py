"""python draw.py TO RUN...: copy runs of `shapes` without pictures to the folder TO, and draw their pictures there.

A run that was decoded on another machine needs only its tokens: the tokenizer draws the pictures from them here.
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch

from specbench.models.catalog import load_model
from specbench.models.interface import ImageModel
from specbench.store.run_store import RunStore

BATCH = 64


@torch.inference_mode()
def draw(model: ImageModel, run: Path, to: Path) -> None:
    """Copy one run, drawing its pictures."""
    with RunStore(to / run.name).adopt([RunStore(run).info()]) as store:
        for file in sorted((run / "samples").glob("*.parquet")):
            for part in pq.ParquetFile(file).iter_batches(BATCH):
                rows = part.to_pylist()
                tokens = torch.tensor([row["tokens"] for row in rows])
                pixels = model.render(model.layout.image_tokens(tokens)).numpy()
                store.append(rows, {row["image"]: picture for row, picture in zip(rows, pixels, strict=True)})


def main() -> None:
    model = load_model("shapes")
    for run in map(Path, sys.argv[2:]):
        draw(model, run, Path(sys.argv[1]))
        print(run)


if __name__ == "__main__":
    main()
