"""Reader of stored runs, independent of specbench's own readers."""

from pathlib import Path

import numpy as np
import pandas as pd

FACTS = ["status", "seed", "nfe", "tokens", "logp", "committed_step", "accepted", "image"]


def contents(out: Path) -> dict:
    """Everything that may not depend on how a run came about, read as a stranger would: pandas and plain files."""
    images = {}
    for folder in sorted(out.iterdir()):
        rows = pd.read_parquet(folder / "samples")
        assert not rows.duplicated(["prompt_id", "sample"]).any()
        for _, row in rows.iterrows():
            facts = {name: np.asarray(row[name]).tolist() for name in FACTS}
            images[folder.name, row["prompt_id"], row["sample"]] = facts, (folder / row["image"]).read_bytes()
        assert {path.name for path in (folder / "images").iterdir()} == {Path(name).name for name in rows["image"]}
    return images
