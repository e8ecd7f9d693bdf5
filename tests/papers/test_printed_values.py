"""Promise: the files in `benchmarks/` hold what the papers print, and every row of them can be asked for.

It concerns several modules: the files in benchmarks/, with every module that reads them.
"""

from __future__ import annotations

import tomllib

import pytest

from specbench import prompts
from specbench.metrics import catalog as metric_catalog
from specbench.models.catalog import find_model
from specbench.papers import table_files
from specbench.papers.join import join
from specbench.papers.table import Table
from specbench.specs.presets import resolve
from specbench.system.files import data_folder

COUNTS = {"sjd": 11, "sjdpp": 10, "gsd": 2, "cool-sd": 3}
TABLES = [f"{paper}-{n}" for paper, count in COUNTS.items() for n in range(1, count + 1)]
REPORTS = ["janus-geneval", "models-geneval", "models-dpg"]
"""Of the models' own reports, whose rows are printed in several places."""
FIGURES = [
    f"{paper}-fig{n}"
    for paper, numbers in (
        ("sjd", (6, 7, 8, 9, 11, 12, 13, 14)),
        ("sjdpp", (5, 6, 11, 12, 13)),
        ("gsd", (2, 4, 5, 7, 10)),
        ("cool-sd", (3, 4, 5)),
    )
    for n in numbers
]

SPEED = ("Average latency (s)", "Acceleration, latency", "Acceleration, step")
QUALITY = ("CLIP-Score", "HPSv2")
LOGP = ("Log p, average", "Log p, standard deviation")
GENEVAL = ("Overall Score", "Counting", "Colors", "Two", "Position", "ColorAttri", "Single")
TAGS = ("Overall", "Single object", "Two objects", "Counting", "Colours", "Position", "Colour attributes")
COMPBENCH = ("Color", "Shape", "Texture", "2D", "3D", "CLIP", "3-in-1")
GSD = ("Latency (s)", "NFE", "Acceleration, latency", "Acceleration, NFE", "FID", "CLIP-Score")

# Read from the papers a second time, apart from the files: headers, then rows by (group, label); "-" is not printed.
READ_AGAIN = {
    "janus-geneval": (
        TAGS,
        {
            (None, "Released script: guidance 5, temperature 1, four images"): "0.73 0.98 0.82 0.51 0.89 0.65 0.56",
            (None, "SJD++'s AR: guidance 3, top-k 2000, one image"): "0.73 0.9862 0.8324 0.4392 0.8867 0.6073 0.4981",
        },
    ),
    "models-geneval": (
        TAGS,
        {
            ("Janus-Pro", "Janus-Pro-7B"): "0.80 0.99 0.89 0.59 0.90 0.79 0.66",
            ("LlamaGen", "LlamaGen"): "0.32 0.71 0.34 0.21 0.58 0.07 0.04",
            ("Emu3", "Emu3-Gen"): "0.54 0.98 0.71 0.34 0.81 0.17 0.21",
            ("SimpleAR", "SimpleAR-1.5B-RL"): "0.63 - - - - - -",
            ("Lumina-mGPT 2.0", "Lumina-mGPT 2.0 7B"): "0.69 0.99 0.87 0.44 0.85 0.44 0.54",
        },
    ),
    "models-dpg": (
        ("Overall", "Global", "Entity", "Attribute", "Relation", "Other"),
        {
            ("Janus-Pro", "Janus-Pro-1B"): "82.63 87.58 88.63 88.17 88.98 88.30",
            ("Janus-Pro", "Janus-Pro-7B"): "84.19 86.90 88.90 89.40 89.32 89.48",
            ("Emu3", "Emu3-Gen"): "80.60 85.21 86.68 86.84 90.22 83.15",
            ("SimpleAR", "SimpleAR-0.5B-RL"): "79.66 - - - - -",
        },
    ),
    "sjd-1": (
        (*SPEED, "FID", "CLIP-Score"),
        {
            ("Lumina-mGPT", "A Lumina-mGPT"): "87.23 1.00 1.00 30.76 31.29",
            ("Lumina-mGPT", "D w. SJD (ISP)"): "42.49 2.05 2.23 31.13 31.33",
            ("Anole", "F w. SJD (ISP)"): "26.18 1.87 1.97 29.14 30.61",
        },
    ),
    "sjd-2": (
        (*SPEED, "CLIP-Score"),
        {
            ("Lumina-mGPT", "B w. JD"): "100.00 1.01 1.04 32.17",
            ("Lumina-mGPT", "C w. SJD"): "47.52 2.12 2.26 32.13",
            ("Anole", "E Anole"): "48.24 1.00 1.00 30.46",
        },
    ),
    "sjd-3": (
        ("Acceleration, latency", "Acceleration, step", "FID", "CLIP-Score"),
        {
            ("COCO", "LlamaGen-stage1 + Ours"): "1.56 1.63 29.00 30.82",
            ("COCO", "LlamaGen-stage2"): "1.00 1.00 56.21 28.26",
            ("Parti", "LlamaGen-stage2 + Ours"): "1.62 1.69 - 28.16",
        },
    ),
    "sjd-4": (
        (*SPEED, "FID", "CLIP-Score"),
        {(None, "B w. JD"): "47.60 1.03 1.06 29.34 30.64", (None, "C w. SJD"): "27.08 1.81 1.94 29.04 30.54"},
    ),
    "sjd-5": ((*SPEED, "CLIP-Score"), {(None, "B w. JD"): "44.65 1.08 1.14 30.57"}),
    "sjd-6": (
        ("K = 10", "K = 100", "K = 2000"),
        {(None, "A Lumina-mGPT"): "7.31 43.37 204.06", (None, "C w. SJD"): "7.34 43.87 217.96"},
    ),
    "sjd-7": (
        QUALITY,
        {
            ("Auto-regression", "Top-100 Sampling"): "32.41 0.3020",
            ("Jacobi Decoding", "Top-1 Sampling"): "26.34 0.1413",
            ("Ours", "Top-2000 Sampling"): "31.83 0.3020",
        },
    ),
    "sjd-8": (QUALITY, {("Auto-regression", "512"): "29.49 0.2503", ("Ours", "1024"): "31.11 0.2935"}),
    "sjd-9": (QUALITY, {(None, "Window 4"): "31.91 0.3046", (None, "Window 32"): "31.55 0.3045"}),
    "sjd-10": (QUALITY, {(None, "Vertical Sample"): "30.91 0.2622", (None, "Random"): "31.37 0.2681"}),
    "sjd-11": (LOGP, {(None, "Auto-regression"): "-4.8950 2.3457", (None, "Ours"): "-4.9007 2.3275"}),
    "sjd-fig7": (("Step compression",), {(None, "512 x 512"): "-", (None, "1024 x 1024"): "2.43"}),
    "sjd-fig14": (
        ("Steps", "Latency (s)"),
        {
            ("Without refinement, random initialisation", "Example 4"): "2355 107.64",
            ("Without refinement, horizontal repeat", "Example 1"): "2273 99.25",
            ("Without refinement, horizontal repeat", "Example 5"): "2291 95.42",
        },
    ),
    "sjdpp-1": (
        (*SPEED, "FID", "HPSv2", "CLIP"),
        {
            ("SimpleAR (0.5B)", "+ SJD++"): "29.88 2.78 3.28 37.20 0.2344 28.10",
            ("Janus-Pro (1B)", "+ SJD"): "8.01 1.81 1.96 34.20 0.2819 31.38",
            ("Lumina-mGPT (7B)", "Lumina-mGPT (7B)"): "87.23 1.00 1.00 30.77 0.2857 31.52",
            ("Emu3-Gen (8B)", "+ SJD++"): "124.62 3.01 7.50 35.79 0.2524 29.83",
        },
    ),
    "sjdpp-2": (
        (*SPEED, *GENEVAL),
        {
            ("LlamaGen (0.8B)", "+ SJD++"): "19.45 2.30 3.25 0.5887 0.3150 0.8185 0.7301 0.2158 0.2850 0.9800",
            ("Janus-Pro (1B)", "Janus-Pro (1B)"): "14.42 1.00 1.00 0.7300 0.4392 0.8867 0.8324 0.6073 0.4981 0.9862",
            ("Emu3-Gen (8B)", "+ SJD"): "207.27 1.81 2.01 0.4800 0.2361 0.8163 0.5537 0.1115 0.1319 0.9396",
        },
    ),
    "sjdpp-3": (
        (*SPEED, "HPSv2", "CLIP"),
        {
            ("LlamaGen (0.8B)", "+ SJD"): "32.45 1.41 2.09 0.2660 31.28",
            ("Lumina-mGPT (7B)", "+ SJD++"): "27.91 3.12 6.40 0.2873 32.07",
            ("Emu3-Gen (8B)", "+ SJD"): "207.58 1.82 2.03 0.2142 30.30",
        },
    ),
    "sjdpp-4": (
        (*SPEED, *COMPBENCH),
        {
            ("SimpleAR (0.5B)", "+ SJD"): "42.93 1.95 2.31 0.6374 0.3505 0.4930 0.2045 0.3038 0.3074 0.3541",
            ("Janus-Pro (1B)", "+ SJD++"): "6.32 2.28 2.47 0.6297 0.3484 0.4899 0.2050 0.3010 0.3052 0.3530",
            ("Lumina-mGPT (7B)", "+ SJD++"): "27.97 3.13 6.42 0.5578 0.3279 0.4107 0.1996 0.2799 0.2582 0.3163",
        },
    ),
    "sjdpp-5": (
        ("Acceleration, latency", "Acceleration, step", "CLIP-Score"),
        {
            (None, "EAGLE"): "2.10 2.94 33.3",
            (None, "LANTERN"): "2.56 3.63 32.7",
            (None, "ZipAR"): "1.82 4.00 31.2",
            (None, "SJD++"): "3.12 6.44 31.3",
        },
    ),
    "sjdpp-6": (
        QUALITY,
        {("SJD", "Top-10"): "32.27 0.2942", ("SJD++", "Top-1"): "26.25 0.1583", ("SJD++", "Top-2000"): "31.72 0.3049"},
    ),
    "sjdpp-7": (QUALITY, {("SJD", "512"): "29.69 0.2558", ("SJD++", "768"): "31.70 0.3197"}),
    "sjdpp-8": (QUALITY, {(None, "Horizontal Sample"): "31.52 0.2567", (None, "Vertical Repeat"): "31.15 0.2651"}),
    "sjdpp-9": (LOGP, {(None, "SJD"): "-4.9007 2.3275"}),
    "sjdpp-10": (
        ("Geneval", "NFE", "Step Compression (NFE / tokens)"),
        {(None, "WS = 32"): "0.6838 198.04 0.3438", (None, "WS = 96"): "0.7248 189.71 0.3294"},
    ),
    "gsd-1": (
        GSD,
        {
            ("Parti-prompt", "B Jacobi Decoding"): "116.31 2300.0 0.97 1.04 - 32.091",
            ("Parti-prompt", "C Addition (eps = 0.3)"): "24.93 644.57 4.50 3.71 - 31.776",
            ("Parti-prompt", "D Ours (G = 100)"): "23.01 611.75 4.88 3.91 - 31.975",
            ("MS-COCO 2017", "A Lumina-mGPT"): "122.45 2379 1.00 1.00 30.79 31.308",
            ("MS-COCO 2017", "C Addition (eps = 0.1)"): "47.80 909.12 2.56 2.62 32.75 31.2707",
            ("MS-COCO 2017", "D Ours (G = 10)"): "33.79 701.35 3.62 3.39 33.12 31.25",
        },
    ),
    "gsd-2": (
        ("NFE", "CLIP-Score"),
        {(None, "(A) Embed distance"): "913.80 32.081", (None, "(D) Ours"): "636.75 32.075"},
    ),
    "cool-sd-1": (
        ("CLIP", "FID", "IR", "Accepted length", "Latency (s)", "Speed-up"),
        {
            ("Lumina-mGPT", "Eagle-1"): "0.3330 29.05 0.6883 2.76 71.66 2.37",
            ("Lumina-mGPT", "LANTERN++ (lambda = 2, k = 10)"): "0.3328 30.31 0.6697 2.99 68.64 2.48",
            ("LlamaGen-XL", "Target Model"): "0.3162 21.08 -0.0763 1.00 10.11 1.00",
            ("LlamaGen-XL", "Cool-SD (delta = 2)"): "0.3154 21.20 -0.1353 3.34 3.72 2.72",
        },
    ),
    "cool-sd-2": (
        ("CLIP", "FID", "ImageReward", "Speed-up"),
        {
            ("Lumina-mGPT", "SJD"): "0.3305 31.81 0.6764 2.06",
            ("LlamaGen-XL", "SJD"): "0.3160 21.01 -0.1006 1.84",
        },
    ),
    "sjdpp-fig6": (("Step compression",), {("SJD++", "1024"): "2.43"}),
    "sjdpp-fig12": (
        ("Steps", "Latency (s)"),
        {
            ("Without refinement, random initialisation", "Example 4"): "2355 107.64",
            ("Without refinement, horizontal repeat", "Example 1"): "2273 99.25",
        },
    ),
    "gsd-fig4": (("CLIP-Score",), {(None, "50% random replacement"): "32.089"}),
    "cool-sd-3": (("TV distance",), {("LlamaGen-XL", "Eagle-1"): "-", ("Lumina-mGPT", "Eagle-1"): "-"}),
}
SPREADS = {
    ("Lumina-mGPT", "Target Model"): ("0.00", "1.32"),
    ("LlamaGen-XL", "LANTERN++ (lambda = 2, k = 10)"): ("0.18", "0.38"),
}


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return {name: table_files.load_table(name) for name in table_files.table_names()}


def printed(text: str) -> float | None:
    return None if text == "-" else float(text)


def test_every_table_and_data_figure_is_there_once(tables):
    assert set(tables) == {*TABLES, *FIGURES, *REPORTS}
    assert {table.paper for table in tables.values()} == set(table_files.papers())
    assert [tables[name].source for name in ("sjdpp-10", "sjd-fig6")] == ["Table 10", "Figure 6"]
    assert set(READ_AGAIN) >= {*TABLES, *REPORTS}


@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_second_reading_of_the_paper_finds_the_same_numbers(tables, name):
    headers, expected = READ_AGAIN[name]
    columns = {column.header: column.name for column in tables[name].columns}
    rows = {(row.group, row.label): row for row in tables[name].rows}
    assert len(rows) == len(tables[name].rows), "two rows look the same to a reader"
    for place, text in expected.items():
        values = [rows[place].paper.get(columns[header]) for header in headers]
        assert values == [printed(part) for part in text.split()], place


def test_standard_deviations_are_those_in_brackets(tables):
    rows = {(row.group, row.label): row for row in tables["cool-sd-1"].rows}
    for place, (length, latency) in SPREADS.items():
        assert rows[place].spread == {"acceptance_length": float(length), "latency_s": float(latency)}


def test_every_row_names_a_model_a_decoder_and_prompts_that_exist(tables):
    for table in tables.values():
        for case in table.all_settings():
            spec = resolve(case.decoder, dict(case.options))
            assert dict(case.options).items() <= {**vars(spec), **dict(spec.options)}.items(), (table.name, case)
            model = find_model(case.model)
            assert dict(case.sampling).get("top_k", 0) <= model.v_image
            assert case.prompts in prompts.prompt_set_names()


def test_scores_are_of_metrics_that_exist(tables):
    used = {metric for table in tables.values() for metric in table.metrics()}
    assert used <= {*metric_catalog.metric_names(), *metric_catalog.IMPORTED}
    protocols = {name: tables[name].metrics() for name in ("sjd-1", "cool-sd-1")}
    assert protocols == {
        "sjd-1": ["fid[pytorch-fid]", "clip[b16+299]"],
        "cool-sd-1": ["clip[b32+prefix+center256]", "fid[clean+center256]", "imagereward"],
    }


def test_axes_are_columns_or_settings_that_vary(tables):
    for name in FIGURES:
        table = tables[name]
        names = {column.name for column in table.columns}
        assert table.axes or table.maps, f"{name} draws nothing"
        for axis in (axis for panel in table.axes for axis in panel.values()):
            kind, _, setting = axis.partition(":")
            if kind not in ("option", "sampling"):
                assert axis == "model" or axis in names, (name, axis)
                continue
            values = {
                dict(case.options if kind == "option" else case.sampling)[setting] for case in table.all_settings()
            }
            assert len(values) > 1, (name, axis)


def test_a_column_of_a_paper_has_a_value_unless_the_file_says_why(tables):
    beside = {"score:geneval[hf-m2f]", "step_compression"}  # of sjdpp-2 and sjdpp-10, where their notes say so
    for name in TABLES:
        for column in tables[name].columns:
            lost = [row for row in tables[name].rows if column.name not in row.paper]
            explained = all(column.name in row.notes for row in lost)
            no_reference_images = column.name == "score:fid" and all(row.settings["prompts"] == "parti" for row in lost)
            assert not lost or explained or no_reference_images or column.key in beside, (name, column.header)


def test_doubtful_cells_say_so(tables):
    """A latency ratio above the step ratio, and an overall score that is not the mean of its parts."""
    parts = ("counting", "colors", "two_object", "position", "color_attr", "single_object")
    for row in tables["sjdpp-2"].rows:
        mean = sum(row.paper[part] for part in parts) / 6
        stated = row.notes.get("overall", "").removeprefix("the six parts average ")
        assert (stated and abs(float(stated) - mean) <= 1e-4) or abs(row.paper["overall"] - mean) <= 1e-4
    for table in tables.values():
        for row, line in zip(table.rows, join(table, {}).lines, strict=True):
            names = ("step_compression", "step_ratio", "acceptance_length")
            steps = next((row.paper[name] for name in names if name in row.paper), float("inf"))
            if row.paper.get("speedup", 0) > steps:
                notes = line.cells["speedup"].printed_notes
                assert any("latency ratio above the printed step ratio" in note for note in notes), (
                    table.name,
                    row.label,
                )


def test_printed_digits_are_kept():
    """A file says 32.090 where the paper does; what a program reads of it is the same number."""
    text = (data_folder("benchmarks") / "gsd-2.toml").read_text(encoding="utf-8")
    assert "32.090" in text and tomllib.loads(text)["rows"][0]["paper"]["score:clip"] == 32.09
