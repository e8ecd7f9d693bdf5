"""Cells of a joined table: printed digits, differences of partial runs, intervals of too few images."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from synthetic import bare_row

from specbench.papers.cells import Cell, Measured, column_fingerprint, make_cell
from specbench.papers.formats import _exactly, _value
from specbench.papers.join import _expected
from specbench.papers.table import SCORE, Column, PrintedNumber, Row
from specbench.reporting.row import ShownScore, Stalled
from specbench.runs.settings import RunSettings
from specbench.stats import Estimate

FID = Column("fid", f"{SCORE}fid[pytorch-fid]", "FID", "fid[pytorch-fid]", 2, "lower", 1.0, RunSettings())


def score(n: int, expected: int | None, metric: str = "fid[pytorch-fid]") -> Measured:
    row = {"metric": metric, "fingerprint": "f", "value": 243.7, "low": 200.0, "high": 290.0, "n": n}
    row |= {"better": "lower", "kind": "distance" if metric.startswith("fid") else "plain"}
    run = SimpleNamespace(rows=pd.DataFrame({"prompt_id": range(n)}))
    return Measured(run, bare_row(n=n, scores=[ShownScore.of(row)]), None, (), None, expected)


@pytest.fixture
def printed() -> Row:
    return SimpleNamespace(notes={}, paper={"fid": 30.78, "clip": 250.0}, spread={}, hardware=None, bold=())


def test_a_distance_of_fewer_images_has_no_difference(printed):
    assert make_cell(printed, FID, score(5000, 5000), None, "f").difference == pytest.approx(212.92)
    cell = make_cell(printed, FID, score(40, 5000), None, "f")
    assert cell.difference is None and any("other images" in note for note in cell.notes)
    clip = replace(FID, name="clip", key=f"{SCORE}clip", score="clip", better="higher")
    assert make_cell(printed, clip, score(40, 5000, "clip"), None, "f").difference == pytest.approx(-6.3)
    assert make_cell(printed, FID, score(5000, None), None, "f").difference is None, "who knows what the paper's set is"


def test_an_interval_of_few_images_is_not_printed(printed):
    few = score(3, 5000)
    stored = few.row.scores[0].stored | {"low": None, "high": None, "too_few": True}  # as `scores_to_show` has it
    few.row.scores[0] = ShownScore.of(stored)
    cell = make_cell(printed, FID, few, None, "f")
    assert _value(FID, cell, True) == "243.70 [too few]" and cell.low is cell.high is None
    assert "too few" not in _value(FID, Cell(None, None, value=1.0, low=0.5, high=1.5, n=8), True)


def test_of_two_versions_of_a_metric_a_column_has_the_one_edited_last():
    both = score(9, 9)
    [first] = both.row.scores
    edits = {"f": "2026-11-27T09:00:00+00:00", "e": "2026-11-27T10:00:00+00:00"}
    both.row.scores[:] = [replace(first, fingerprint=name, edited=edited) for name, edited in edits.items()]
    assert column_fingerprint(FID, [both]) == "e" and column_fingerprint(FID, [both, score(9, 9)]) == "f"


def test_printed_values_keep_their_digits_and_the_images_that_a_table_asks_for_are_counted():
    asked = SimpleNamespace(prompts="coco", limit=None, samples=2)
    assert _expected(asked) == 10_000
    asked.limit = 50
    assert _expected(asked) == 100
    asked.prompts = None
    assert _expected(asked) is None
    values = PrintedNumber("31.2707"), PrintedNumber("2300.0"), 2392, PrintedNumber("1.00")
    assert [_exactly(value, FID) for value in values] == ["31.2707", "2,300.0", "2,392", "1.00"]


def test_a_stalled_image_is_named_at_the_latency(printed):
    latency = Column("latency", "latency_ms", "Latency (s)", None, 2, "lower", 0.001, RunSettings())
    times = [300.0] * 8 + [8000.0]
    run = SimpleNamespace(rows=pd.DataFrame({"prompt_id": range(9), "latency_ms": times}))
    mean, median = (Estimate(ms, None, None) for ms in (1155.6, 300.0))
    row_of_run = bare_row(n=9, latency_ms=mean, latency_p50_ms=median, stalled=Stalled(1, 8000.0))
    cell = make_cell(printed, latency, Measured(run, row_of_run, None, (), None, 9), None, None)
    assert any("1 of 9 images stalled: the slowest took 8.00 s, the median is 0.30 s" in note for note in cell.notes)
    calm = Measured(run, replace(row_of_run, machine=bare_row().machine), None, (), None, 9)
    assert not any("stalled" in note for note in make_cell(printed, latency, calm, None, None).notes)


@pytest.mark.parametrize(("traces", "why"), [(2, "no drafts"), (0, "no trace")])
def test_a_traced_run_without_drafts_is_not_said_to_lack_a_trace(printed, traces, why):
    measured = score(2, None)
    measured.run.traced = pd.DataFrame({"sample": range(traces)})
    column = Column("tv", "draft_tv", "TV", None, 2, "lower", 1.0, RunSettings())
    cell = make_cell(printed, column, measured, None, None)
    assert cell.why == why and bool(cell.notes) == (not traces)
