"""Tables of runs as DataFrames, and how a notebook shows them."""

import ast
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from refusals import refused

import specbench
from specbench.api.images import Runs
from specbench.reporting.report_schema import LONG_REPORT, REPORT
from specbench.store.schema import IMAGE_TABLE

OLDER = Path(__file__).parents[2] / "results" / "older"
PACKED = OLDER.parent / "readme" / "runs.zip"
PAIR = ["shapes-ar", "shapes-sjd-8b"]


@pytest.fixture(scope="module")
def runs():
    return specbench.report(PAIR, OLDER)


def test_a_report_is_the_frame_of_its_parquet_file_and_the_long_one_has_every_number(runs, cli, tmp_path):
    assert cli("report", *PAIR, "--out", OLDER, "--to", tmp_path / "t.parquet").code == 0
    pd.testing.assert_frame_equal(pd.DataFrame(runs), pd.read_parquet(tmp_path / "t.parquet"))
    assert [*runs.columns] == REPORT.names and [*runs["decoder"]] == ["ar", "sjd"]
    assert runs.attrs["units"]["latency_p95_ms"] == "ms" and "decoder" not in runs.attrs["units"]
    row = specbench.report(PAIR[1], OLDER).squeeze()
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"] and row["run_id"] == runs["run_id"][1]
    long = specbench.report(PAIR, OLDER, long=True)
    assert [*long.columns] == LONG_REPORT.names and long.attrs["units"] == {"n": "images"}
    sjd = long[long["decoder"] == "sjd"].set_index("number")
    for name in ("latency_p50_ms", "tokens_per_step_p95", "fewest_tokens_per_step", "speedup"):
        wide = runs.loc[1, [name, f"{name}_low", f"{name}_high"]].astype(float)
        assert [*sjd.loc[name, ["value", "low", "high"]].astype(float).fillna(-1)] == [*wide.fillna(-1)]
    assert sjd.loc["shapes-clip", "fingerprint"] == "8424cd7b" and sjd.loc["latency_p50_ms", "unit"] == "ms"


def test_a_notebook_shows_the_first_table_with_arrows_and_the_best_in_bold(runs):
    several = specbench.report(["shapes-ar", "shapes-vertical"], PACKED.with_name("eager.zip"))
    shown = several._repr_html_().replace("\N{NO-BREAK SPACE}", " ")
    assert "<th>speed-up ↑ [95 %]</th>" in shown and "<b>" in shown.partition("<tbody>")[2] and "Bold" in shown
    assert type(runs[runs["nfe"] < 200]) is pd.DataFrame and "speed-up" not in runs[["nfe"]]._repr_html_()


def test_the_charts_of_the_page_and_the_pictures_are_figures(runs):
    charts = runs.plot()
    assert "speed-up-of-each-prompt" in charts and charts._repr_html_().count("<img") == len(charts)
    assert all(isinstance(chart, Figure) for chart in charts.values())
    assert [*runs.plot("time-per-step")] == ["time-per-step"]
    refused("did you mean 'time-per-step'", runs.plot, "time-per-stepp")
    assert runs.plot(x="nfe", y="latency_ms", kind="scatter").get_xlabel() == "nfe"
    pictures = runs.images(prompts="a ")
    assert pictures._repr_png_().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in pictures.axes[:2]] == ["ar", "sjd"]


def test_samples_are_a_row_per_image_and_runs_are_named_by_a_column_or_by_what_run_returned(runs):
    images = specbench.samples(PAIR, OLDER)
    assert [*images.columns[: len(IMAGE_TABLE)]] == IMAGE_TABLE.names
    assert {"shapes-clip", "shapes-detector"} <= {*images}
    assert images.groupby("run_id").size().tolist() == runs["n"].tolist()
    means = images.groupby("decoder")[["nfe", "latency_ms"]].mean()
    assert means.loc["sjd"].to_numpy() == pytest.approx(runs.loc[1, ["nfe", "latency_ms"]].to_numpy(float))
    assert images["logp_mean"].mean() == pytest.approx(runs["logp_mean"].mean(), rel=0.02)
    assert all(Path(path).is_file() for path in images["path"]) and images.attrs["units"]["logp_mean"] == "nats"
    assert [*specbench.report(runs["run_id"], OLDER)["run_id"]] == [*runs["run_id"]]
    assert specbench.load(out=OLDER)["run_id"].nunique() == 3
    summary = Runs([OLDER / name for name in runs["run_id"]], total=16, resumed=16)
    assert [*specbench.samples(summary)["run_id"].unique()] == [*runs["run_id"]]


def test_every_column_is_defined_and_runs_compare_with_a_baseline():
    columns = specbench.columns()
    assert columns["meaning"].str.len().gt(0).all() and not columns.duplicated(["table", "name"]).any()
    assert set(specbench.columns("images")["name"]) <= {*specbench.load(PAIR, OLDER)}
    refused("did you mean 'images'", specbench.columns, "image")
    rows = specbench.compare(PAIR[0], [PAIR[1], "shapes-gsd"], OLDER)
    everything = specbench.compare(PAIR[0], (), OLDER)
    assert {*everything["run_id"]} == {*rows["run_id"]} and len(everything) == len(rows)
    assert rows[["low", "high", "p", "p_holm"]].dtypes.eq(float).all() and rows.attrs["units"]["n"] == "images"
    assert set(rows["run_id"].str.split("-").str[1]) == {"sjd", "gsd"} and rows["baseline"].nunique() == 1


def test_type_checkers_find_every_public_function():
    """They read `__all__` only as lists of texts; a name that they miss is an `object` that cannot be called."""
    named = [
        ast.literal_eval(line.value)
        for line in ast.parse(Path(specbench.api.__file__).read_text()).body
        if isinstance(line, ast.Assign | ast.AugAssign)
    ]
    assert [*chain.from_iterable(named)] == specbench.api.__all__
