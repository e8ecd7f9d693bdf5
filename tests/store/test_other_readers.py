"""It concerns several modules: the parquet files of a results folder, new and old, read by programs of others."""

import glob
import json
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import synthetic
from drawn import drawn_run

from specbench.metrics import scoring
from specbench.metrics.score_store import read_scores
from specbench.reporting.report_rows import report_rows
from specbench.reporting.report_schema import KEYS, LONG_REPORT, REPORT
from specbench.reporting.row import record
from specbench.reporting.text_formats import report_arrow
from specbench.store.image_scores import ImageScores, parquet_bytes
from specbench.store.merge_shards import merge_runs
from specbench.store.schema import FILE_KINDS, column_facts

OLD = Path(__file__).parents[2] / "results" / "older"
STORED = ("samples/*.parquet", "image_scores/*/*.parquet", "scores/*.parquet")


def needed(name: str):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def _datasets(pattern: str) -> int:
    cache = str(Path(pattern.split("*")[0]) / ".cache")
    return len(needed("datasets").load_dataset("parquet", data_files=pattern, split="train", cache_dir=cache))


READERS = {
    "pandas": lambda pattern: len(pd.concat(map(pd.read_parquet, glob.glob(pattern)))),
    "arrow": lambda pattern: pyarrow.dataset.dataset(sorted(glob.glob(pattern))).to_table().num_rows,
    "duckdb": lambda pattern: len(needed("duckdb").sql(f"SELECT * FROM read_parquet('{pattern}')").fetchall()),
    "polars": lambda pattern: len(needed("polars").read_parquet(pattern)), "datasets": _datasets,
}  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A run without any interval, another with them, and an old one that was rewritten, of two metrics."""
    out = tmp_path_factory.mktemp("results")
    for n, spec in ((1, synthetic.AR), (9, synthetic.SJD)):
        scoring.score([drawn_run(out, n=n, wrong=(0,), spec=spec)], ["shapes-detector", "shapes-frechet"])
    shutil.copytree(old := next(OLD.glob("shapes-gsd-*")), out / old.name)
    before = read_scores(out / old.name), report_rows([out / old.name])[0]
    merge_runs([out], out)
    assert (read_scores(out / old.name), report_rows([out / old.name])[0]) == before
    return out


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", STORED)
def test_one_line_reads_all_runs_old_and_new(out, kind, reader):
    count = sum(pq.read_metadata(path).num_rows for path in out.glob(f"*/{kind}"))
    assert READERS[reader](f"{out}/*/{kind}") == count


@pytest.mark.parametrize("kind", STORED)
def test_types_are_the_declared_ones_and_every_row_says_whose_it_is(out, kind):
    assert not any(path.is_dir() for path in out.glob("*/scores/*")), "files of two kinds are in two folders"
    for path in out.glob(f"*/{kind}"):
        table, run = pq.read_table(path), path.relative_to(out).parts[0]
        schema = FILE_KINDS[kind]
        declared = dict(zip(schema.names, schema.types, strict=True))
        assert {field.name: field.type for field in table.schema if field.name in declared} == declared
        assert set(table["run_id"].to_pylist()) <= {run} and table["decoder"].null_count == 0
        about = json.loads(table.schema.metadata[b"specbench.columns"])
        assert about == column_facts(schema) and all(facts["meaning"] for facts in about.values())


def test_a_report_has_the_same_types_whatever_its_values(tmp_path):
    run = drawn_run(tmp_path, n=1)
    rows = report_rows([run])
    assert (
        {*rows[0].by_key} - {"ar_folder", "equal_forwards", "unlike_ar"} <= {*REPORT.names} >= {*record(rows[0]), *KEYS}
    )
    for long, schema in ((False, REPORT), (True, LONG_REPORT)):
        written = pq.read_table(pa.BufferReader(parquet_bytes(report_arrow(rows, long))))
        assert written.schema.equals(schema)
    [nfe] = [row for row in written.to_pylist() if row["number"] == "nfe"]
    assert nfe == {"label": "sjd", "run_id": run.name, "model": "enumerable", "decoder": "sjd", "number": "nfe",
                   "fingerprint": None, "value": rows[0].number("nfe").value, "low": None, "high": None, "n": 1,
                   "unit": "forwards"}  # fmt: skip


def test_columns_of_a_metric_survive_the_common_schema(tmp_path):
    columns = {"correct": pa.bool_(), "feature": pa.list_(pa.uint8(), 2), "blip": pa.float32(), "why": pa.string()}
    kept = ImageScores(tmp_path / "elsewhere", "m", "0", columns)
    row = {"prompt_id": "p", "sample": 0, "started_at": "t", "category": None, "correct": True, "feature": [0, 255],
           "blip": 0.1, "why": None}  # fmt: skip
    kept.append([row])
    assert kept.read().to_pylist() == [row | {"blip": pytest.approx(0.1)}]
    assert kept.read(["correct"]).column_names == ["prompt_id", "sample", "correct"]
    [part] = kept.folder.glob("*.parquet")
    assert pq.read_table(part)["run_id"].to_pylist() == ["elsewhere"], "images of other programs have no run"
