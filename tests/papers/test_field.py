"""The field on one page: rules for contradictions, and the figure as typed."""

import csv

import pytest
from refusals import refused

import specbench
from specbench.papers.field import AR_SECONDS, MORE_LATENCY, NO_GPU, STEPS, UNEXPLAINED, field, gpu_family


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return field()


def row(rows, table, decoder, prompts="coco", model="lumina") -> dict:
    wanted = {"table": table, "decoder": decoder, "prompts": prompts, "model": model}
    return next(row for row in rows if {name: row[name] for name in wanted} == wanted)


@pytest.mark.parametrize(("table", "decoder", "contradiction", "reason"), [
    ("sjd-1", "ar", None, None),
    ("sjd-sv-1", "ar", None, None),  # 86.55 s against 79.37 on the same GPU
    ("gsd-1", "ar", None, None),  # on another GPU than the lowest
    ("cool-sd-1", "ar", AR_SECONDS, UNEXPLAINED),
    ("scd-1", "ar", AR_SECONDS, NO_GPU),
    ("pjd-1", "ar", AR_SECONDS, NO_GPU),
    ("pjd-1", "pjd rows-window=11", MORE_LATENCY, UNEXPLAINED),
    ("gsd-1", "gsd G=3", None, None),
    ("gsd-1", "gsd G=10", MORE_LATENCY, UNEXPLAINED),
    ("sjd-pac-1", "eagle", None, None),  # 2.94 against 2.76
    ("sjd-pac-1", "gsd G=10", MORE_LATENCY, "the number printed in gsd-1"),
])  # fmt: skip
def test_a_contradiction_is_named_with_the_reason_that_its_file_has(rows, table, decoder, contradiction, reason):
    found = row(rows, table, decoder)
    assert (found["contradiction"], found["reason"]) == (contradiction, reason)


def test_step_ratios_of_a_decoder_that_differ_between_papers_are_contradictions(rows):
    apart = [one for one in rows if one["contradiction"] == STEPS]
    assert {(one["decoder"], one["model"], one["prompts"]) for one in apart} == {
        ("sjd", model, prompts) for model in ("llamagen-512", "emu3") for prompts in ("coco", "parti")
    }
    assert len({one["paper"] for one in apart}) == 3 and {one["reason"] for one in apart} == {UNEXPLAINED}


def test_ratios_are_printed_or_of_the_printed_seconds_and_nfe(rows):
    printed, computed = row(rows, "pjd-1", "pjd rows-window=11"), row(rows, "sjd-sv-1", "sjd")
    assert (printed["latency_ratio"], printed["step_ratio"]) == (7.96, 6.35)
    assert (computed["latency_ratio"], computed["step_ratio"]) == pytest.approx((86.55 / 40.10, 2379 / 1058.6))
    assert printed["ar_step_ms"] == pytest.approx(197160 / 2357) and printed["step_ms"] == pytest.approx(24780 / 371)
    assert not [row for row in rows if row["contradiction"] == MORE_LATENCY and not row["step_ratio"]]
    assert [*map(gpu_family, ("A100", "A100-SXM4-40GB", "A100 80GB"))] == ["A100"] * 3
    assert gpu_family("RTX 3090") == "RTX 3090" and gpu_family(None) is gpu_family("a TPU") is None


def test_the_figure_has_every_printed_row_and_the_runs_that_are_named(rows, tmp_path, cli):
    assert cli("figure", "field", "results/readme/runs.zip", "--to", str(tmp_path / "field.svg")).code == 0
    points = [line["run"] for line in csv.DictReader((tmp_path / "field.csv").open()) if line["mark"] == "dot"]
    both = [row for row in rows if row["decoder"] != "ar" and row["latency_ratio"] and row["step_ratio"]]
    assert len(both) > 100 and points.count("measured here, shapes") == len(points) - len(both) == 12
    refused("no-such-run", specbench.field_figure, "no-such-run", out=tmp_path)
