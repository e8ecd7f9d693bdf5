"""Printed latencies beside the floor of their GPU."""

import sys
from pathlib import Path

import pytest

from specbench.papers.table_files import load_tables

sys.path.insert(0, str(Path(__file__).parents[2] / ".ci"))
from printed_floors import printed_latencies


def test_ar_of_the_sjd_paper_stands_beside_the_weight_read_of_its_gpu():
    rows = printed_latencies(["sjd-1"])
    ar = rows[0]
    weights_ms = 1e3 * 13_020_700_672 / 2039e9
    assert ar["decoder"] == "ar" and ar["steps"] == 2352 and ar["weights_ms"] == pytest.approx(weights_ms)
    assert ar["over_weights"] == pytest.approx(1e3 * ar["printed_s"] / 2352 / weights_ms)
    assert 1 < ar["over_floor"] < ar["over_weights"], "the floor has the KV cache too"


def test_every_printed_latency_has_a_row_and_no_floor_is_above_it():
    tables = load_tables()
    printed = sum(
        column.key == "latency_ms" and column.name in row.paper
        for table in tables
        for column in table.columns
        for row in table.rows
    )
    rows = printed_latencies()
    assert len(rows) == printed > 80 and all(row["over_floor"] is None or row["over_floor"] > 1 for row in rows)
    assert all(row["note"] for row in rows if row["over_floor"] is None)
