"""The plot of `make speed` shows the medians of its JSON files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image

PLOT = runpy.run_path(str(Path(__file__).parents[2] / "dev" / "speed" / "plot.py"))
MACHINE = {"threads": 1, "hardware": {"gpus": [], "cpu": "Test CPU"}}


def row(name: str, nfe: int, **spans_ms: float) -> dict:
    return {"name": name, "nfe": nfe, "spans_ms": spans_ms, "wall_ms": sum(spans_ms.values())}


def test_a_part_is_the_median_of_its_share_of_a_step():
    rows = [row("sjd", 2, target=20.0), row("sjd", 4, target=80.0), row("sjd", 2, target=24.0)]
    assert PLOT["part_ms"](rows, "target") == pytest.approx(12.0)
    assert PLOT["part_ms"](rows, "draft") == 0.0


def test_bars_end_where_the_step_does(tmp_path):
    axes = PLOT["plt"].figure().subplots()
    PLOT["draw_parts"](axes, [row("ar", 4, target=40.0, verify=4.0), row("sjd", 2, target=30.0, draft=2.0, host=1.0)])
    ends = {}
    for bar in axes.patches:
        ends[round(bar.get_y(), 1)] = max(ends.get(round(bar.get_y(), 1), 0.0), bar.get_x() + bar.get_width())
    assert list(ends.values()) == pytest.approx([11.0, 16.5])


def test_what_there_is_becomes_one_picture(tmp_path):
    assert PLOT["plot"](tmp_path) is None
    windows = [row(f"{kind} {width}", 2, target=10.0 * width) for kind in ("sjd", "forward") for width in (1, 4)]
    (tmp_path / "window.json").write_text(json.dumps({"rows": windows} | MACHINE))
    narrow = Image.open(PLOT["plot"](tmp_path)).width
    (tmp_path / "decoders.json").write_text(json.dumps({"rows": [row("ar", 4, target=40.0)]} | MACHINE))
    assert Image.open(PLOT["plot"](tmp_path)).width == 2 * narrow
