"""Reader of stored runs, independent of specbench's own readers, and changes of what they hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

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


def rewritten(folder: Path, change: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """Change the tables of all parts of a run, which lose the digests in their names; return the last one."""
    for path in sorted((folder / "samples").iterdir()):
        table = change(pq.read_table(path))
        path.unlink()
        pq.write_table(table, path.with_name(f"{path.name[:17]}.parquet"))
    return table
