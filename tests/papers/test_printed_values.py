"""Promise: the files in `benchmarks/` hold what the papers print, and every row of them can be asked for. It
concerns several modules: the files in benchmarks/, with every module that reads them."""

import tomllib
from pathlib import Path

import pytest
from synthetic import bare_row

from specbench import prompts
from specbench.metrics import catalog as metric_catalog
from specbench.models.catalog import find_model
from specbench.papers import table_files
from specbench.papers.forecasts import printed_beside
from specbench.papers.join import join
from specbench.papers.table import Table
from specbench.reporting.marks import label as row_label
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.settings import merge, run_settings
from specbench.specs.presets import resolve

COUNTS = {"sjd": 11, "sjdpp": 10, "gsd": 2, "cool-sd": 3}
TABLES = [f"{paper}-{n}" for paper, count in COUNTS.items() for n in range(1, count + 1)]
REPORTS = ["janus-geneval", "models-geneval", "models-dpg", "sjd-pac-1"]
REPORTS += ["sjd-sv-1", "sjd-sv-2", "scd-1", "pjd-1", "vvs-1", "mulo-sd-1", "adt-tree-1"]
"""Of reports of models, a repository's README, notes on papers and an abstract; their source is no table of a paper."""
FIGURES = [
    f"{paper}-fig{n}"
    for paper, numbers in (
        ("sjd", (6, 7, 8, 9, 11, 12, 13, 14, 17)), ("sjdpp", (5, 6, 10, 11, 12, 13)), ("gsd", (2, 4, 5, 7, 10)),
        ("cool-sd", (3, 4, 5)),
    )
    for n in numbers
]  # fmt: skip

READ_AGAIN = tomllib.loads((Path(__file__).parent / "read_again.toml").read_text(encoding="utf-8"))
"""Of some rows of each table, what a second reading of the papers found."""
SPREADS = {
    ("Lumina-mGPT", "Target Model"): ("0.00", "1.32"),
    ("LlamaGen-XL", "LANTERN++ (lambda = 2, k = 10)"): ("0.18", "0.38"),
}


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return {name: table_files.load_table(name) for name in table_files.table_names()}


def test_every_table_and_data_figure_is_there_once(tables):
    assert set(tables) == {*TABLES, *FIGURES, *REPORTS}
    assert {table.paper for table in tables.values()} == set(table_files.papers())
    assert [tables[name].source for name in ("sjdpp-10", "sjd-fig6")] == ["Table 10", "Figure 6"]
    assert set(READ_AGAIN) >= {*TABLES, *REPORTS}


@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_second_reading_of_the_paper_finds_the_same_numbers(tables, name):
    headers = READ_AGAIN[name]["headers"]
    columns = {column.header: column.name for column in tables[name].columns}
    rows = {(row.group, row.label): row for row in tables[name].rows}
    assert len(rows) == len(tables[name].rows), "two rows look the same to a reader"
    for group, label, text in READ_AGAIN[name]["rows"]:
        values = [rows[group or None, label].paper.get(columns[header]) for header in headers]
        assert values == [None if part == "-" else float(part) for part in text.split()], (group, label)


def test_every_row_names_a_model_a_decoder_and_prompts_that_exist(tables):
    for table in tables.values():
        for case in table.all_settings():
            spec = resolve(case.decoder[0], case.options)
            assert case.options.items() <= {**vars(spec), **spec.options}.items(), (table.name, case)
            model = find_model(case.model)
            assert case.sampling.get("top_k", 0) <= model.v_image and case.prompts in prompts.prompt_set_names()


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
            values = {(case.options if kind == "option" else case.sampling)[setting] for case in table.all_settings()}
            assert len(values) > 1, (name, axis)


def test_a_column_of_a_paper_has_a_value_unless_the_file_says_why(tables):
    beside = {"score:geneval[hf-m2f]", "step_compression", "perplexity"}  # of sjdpp-2, sjdpp-10 and sjd-6; notes say so
    for name in TABLES:
        for column in tables[name].columns:
            lost = [row for row in tables[name].rows if column.name not in row.paper]
            explained = all(column.name in row.notes for row in lost)
            no_reference_images = column.name == "score:fid" and all(row.settings.prompts == "parti" for row in lost)
            assert not lost or explained or no_reference_images or column.key in beside, (name, column.header)


def test_doubtful_cells_say_so_and_standard_deviations_are_those_in_brackets(tables):
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
                assert any("latency ratio is above the printed step ratio" in note for note in notes), row.label
    rows = {(row.group, row.label): row for row in tables["cool-sd-1"].rows}
    for place, (length, latency) in SPREADS.items():
        assert rows[place].spread == {"acceptance_length": float(length), "latency_s": float(latency)}


def test_a_report_gets_what_papers_print_for_its_cells_and_labels_name_differences():
    def row(name, model, options):
        (planned,) = plan_decoders(merge(run_settings(), {"decoder": name, "model": model}, env={}))
        published = planned.spec.options
        return bare_row(decoder=planned.spec.name, model=model, options=published | options, label=name)

    [printed] = printed_beside([row("gsd:G=50", "lumina", {})])  # two other tables repeat it
    for fact in ("gsd, Table 1, Parti-prompt, window 16", "NFE 636.75, latency 24.13 s", "32.075", "NVIDIA RTX 3090"):
        assert fact in printed
    lines = printed_beside([row("sjd", "lumina", {}), row("gsd:G=50", "lumina", {})])
    assert len(lines) == 3 and "Printed for sjd" in lines[1]
    nothing = [row("gsd:G=49", "lumina", {}), row("ar", "lumina", {}), row("sjd", "shapes", {})]
    assert not printed_beside(nothing)
    for decoder, label in (("gsd:G=50", "gsd G=50"), ("gsd:G=50,fresh-q=uniform", "gsd G=50 fresh-q=uniform")):
        (planned,) = plan_decoders(merge(run_settings(), {"decoder": decoder, "model": "lumina"}, env={}))
        assert row_label(planned.spec, {}, "lumina+released-rows") == label
