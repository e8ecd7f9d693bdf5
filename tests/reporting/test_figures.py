"""Figures for papers: every run can be recognised, no text is lost silently, colours have a scale."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic
from matplotlib.figure import Figure

from specbench.prompts import Prompt, Request
from specbench.reporting.figures import _axes
from specbench.reporting.image_tiles import mean_map
from specbench.reporting.marks import distinct, marks_of
from specbench.reporting.picture_figures import Grid, grid_figure
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, sample_row


def test_runs_of_one_decoder_have_different_shapes_in_a_figure():
    of = marks_of(["sjd", "jacobi"])
    shown = distinct({"sjd window=8": of["sjd"], "jacobi": of["jacobi"], **{f"sjd {n}": of["sjd"] for n in range(7)}})
    assert shown["sjd window=8"] == of["sjd"] and shown["jacobi"] == of["jacobi"]
    assert {mark.colour for name, mark in shown.items() if name != "jacobi"} == {of["sjd"].colour}
    assert len({mark.symbol for name, mark in shown.items() if name != "jacobi"}) == 6, "more runs than shapes"


@pytest.mark.parametrize(
    ("limits", "labels"),
    [((0.2, 10), ["0.2", "0.5", "2", "5"]), ((0.6, 2.2), ["0.7", "2"]), ((0.8, 2.2), ["0.8", "0.9", "2"])],
)
def test_ticks_of_a_wide_logarithmic_axis_are_not_all_labelled(limits, labels):
    axes = Figure().subplots()
    axes.set_xlim(*limits)
    _axes(axes, {"x": {"type": "log"}}, {})
    axes.set_xlim(*limits)
    texts = [label.get_text() for label in axes.xaxis.get_minorticklabels()]
    low, high = limits
    assert [text for text in texts if text and low <= float(text) <= high] == labels


def traced(out, tv: float):
    """A run of an image of 2 x 2 tokens, with traces."""
    item = replace(synthetic.generation(4, 40.0), forced=np.zeros(4, dtype=bool))
    with RunStore(out / synthetic.SJD.run_id).lock(synthetic.SJD).begin(synthetic.SJD, synthetic.INVOCATION) as store:
        base = base_row(Request.of(Prompt("p", "a cat", None, {})), 0, synthetic.INVOCATION["started_at"])
        row, lists = sample_row(base, item, True), np.full(4, tv, np.float32)
        trace = {name: row[name] for name in ("prompt_id", "sample", "started_at")}
        store.append([row], {row["image"]: item.image}, [trace | {"draft_tv": lists, "draft_top1": lists}])
    return store.folder


def test_a_traced_run_without_drafts_has_no_map(tmp_path):
    assert mean_map(traced(tmp_path / "ar", np.nan), "draft_tv") is None
    assert mean_map(traced(tmp_path / "sjd", 0.5), "draft_tv").tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_long_prompt_next_to_small_pictures_ends_with_dots():
    text = "a cross and a circle on a striped background with much more text than fits"
    figure = grid_figure(Grid([*"abcdefgh"], [text], [[np.zeros((2, 2, 3), np.uint8)] * 8], None, []))
    label = figure.axes[0].get_ylabel()
    assert label.endswith(" …") and label.count("\n") == 2
