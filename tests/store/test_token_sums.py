"""Sums of token lists that parts keep: right whatever wrote the part, and never the sums of other tokens."""

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import synthetic
from refusals import refused
from stored_rows import rewritten
from synthetic import AR, SJD

from specbench.reporting import report_rows
from specbench.store import token_sums
from specbench.store.run_store import RunStore
from specbench.store.schema import SAMPLES
from specbench.store.token_sums import LISTS, SUMS

KEPT = b"specbench.derived"


def run_folder(out: Path) -> Path:
    synthetic.folder(out, AR, synthetic.ar(5))
    return synthetic.folder(out, SJD, [*synthetic.sjd(4), None])


def marked(table: pa.Table, version: str | None) -> pa.Table:
    metadata = {key: value for key, value in table.schema.metadata.items() if key != KEPT}
    return table.replace_schema_metadata(metadata | ({} if version is None else {KEPT: version}))


def doubled(table: pa.Table) -> pa.Table:
    """Wrong sums of the log probabilities."""
    place = table.schema.get_field_index("logp_sum")
    return table.set_column(place, "logp_sum", pc.multiply(table["logp_sum"], 2.0))


def sums_of(folder: Path) -> pa.Table:
    return pa.concat_tables(RunStore(folder).batches(SUMS.names)).select(SUMS.names)


def test_the_sums_of_version_1():
    """A change here raises `token_sums.VERSION`: parts keep the sums of the version that wrote them."""
    images = [*synthetic.sjd(1), None, synthetic.generation(4, 1.0, logp=(-math.inf, -2.0, 0.0, -3.0))]
    rows = pa.Table.from_pylist(synthetic.stored_rows(images), schema=SAMPLES)
    assert token_sums.VERSION == "token sums 1"
    *plain, impossible = token_sums.token_sums(rows).to_pylist()
    assert [list(row.values()) for row in plain] == [
        [4, 10.0, 3, 3, -6.0, 2.0, 5.0, 1.5, 0], [0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0],
    ]  # fmt: skip
    assert (impossible["free_tokens"], impossible["logp_sum"], impossible["impossible"]) == (3, -math.inf, 1)


def test_every_part_keeps_the_sums_and_a_report_reads_no_list(tmp_path, monkeypatch):
    folder = run_folder(tmp_path)
    with RunStore(folder).lock(SJD).begin(SJD, synthetic.INVOCATION) as store:
        store.append(synthetic.stored_rows(synthetic.sjd(2)))
    lists = pa.concat_tables(RunStore(folder).batches(LISTS))
    before = report_rows([folder])
    monkeypatch.setattr(token_sums, "token_sums", lambda rows: pytest.fail("summed again"))
    assert report_rows([folder]) == before
    monkeypatch.undo()
    assert sums_of(folder).equals(token_sums.token_sums(lists))


@pytest.mark.parametrize("version", [None, "token sums 0"])
def test_sums_of_another_version_are_not_used(tmp_path, version):
    folder = run_folder(tmp_path)
    before, right = report_rows([folder]), sums_of(folder)
    wrong = rewritten(folder, lambda table: doubled(marked(table, version)))
    assert wrong["logp_sum"].to_pylist() != right["logp_sum"].to_pylist()
    assert sums_of(folder).equals(right) and report_rows([folder]) == before
    rewritten(folder, lambda table: marked(table, token_sums.VERSION))
    assert sums_of(folder)["logp_sum"].equals(wrong["logp_sum"]), "planted sums would be seen"


def test_parts_without_sums_are_read_as_before_and_get_them_when_merged(tmp_path):
    folder = run_folder(tmp_path)
    before, right = report_rows([folder]), sums_of(folder)
    rewritten(folder, lambda table: marked(table, None).drop_columns(SUMS.names))
    assert sums_of(folder).equals(right) and report_rows([folder]) == before
    with RunStore(folder).lock(SJD).begin(SJD, synthetic.INVOCATION) as store:
        store.append(synthetic.stored_rows(synthetic.sjd(1)))
    (part,) = (folder / "samples").iterdir()
    assert pq.read_schema(part).metadata[KEPT].decode() == token_sums.VERSION


@pytest.mark.parametrize("column", ["logp_sum", "free_tokens"])
def test_missing_sums_are_refused(tmp_path, column):
    """A part that says it keeps the sums, and keeps none."""
    folder = run_folder(tmp_path)

    def emptied(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, pa.nulls(len(table), table.schema.field(place).type))

    rewritten(folder, emptied)
    refused(f"column '{column}'", report_rows, [folder])
    rewritten(folder, lambda table: table.drop_columns([column]))
    refused("damaged", report_rows, [folder])
