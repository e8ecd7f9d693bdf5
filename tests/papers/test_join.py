"""A paper's table next to measured runs: golden in every format, and a cell that cannot be filled says why."""

import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from refusals import refused
from rich.console import Console
from synthetic import AR, INVOCATION, SJD, ar, changed, folder, generation, sjd

from specbench.papers.cells import Measured, make_cell, same_hardware
from specbench.papers.html_page import figure_curves
from specbench.papers.join import PaperTable, join, with_baseline
from specbench.papers.render import render_tables, terminal
from specbench.papers.table import Column
from specbench.papers.table_files import read_table
from specbench.prompts import Prompt, Request, text_id
from specbench.reporting.charts import Curve, figure_chart
from specbench.reporting.columns import between
from specbench.reporting.comparability import Run, mismatched_fields
from specbench.reporting.report_rows import report_row
from specbench.runs.settings import RunSettings
from specbench.specs.options import SettingOrigin, SettingSource
from specbench.stats import Estimate
from specbench.store.run_info import RunInfo, read_info
from specbench.store.run_store import RunStore, write_audit
from specbench.store.schema import base_row, sample_row
from specbench.system.table_formats import formats_with

GOLDEN = Path(__file__).parents[1] / "golden"
TABLE = read_table(GOLDEN / "toy-1.toml")
PLAIN, SPECULATIVE, GROUPED, SMALL_GROUPS = TABLE.all_settings()
SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex", "json": "json", "html": "html"}


def scored(
    run: Path, value: float, fingerprint: str = "aaaaaaaa", metric: str = "fid[pytorch-fid]", n: int = 3
) -> Path:
    """The run with a score as `specbench score` leaves it."""
    row = {"metric": metric, "value": value, "low": value - 1, "high": value + 1, "n": n, "images": n}
    (run / "scores").mkdir(exist_ok=True)
    row |= {"fingerprint": fingerprint, "identity": "{}"}
    pq.write_table(pa.Table.from_pylist([row]), run / "scores" / f"{metric}-{fingerprint}.parquet")
    return run


@pytest.fixture
def joined(tmp_path) -> PaperTable:
    """AR and SJD measured, GSD with another number format and fingerprint, the second GSD not run."""
    grouped = changed(tiny.spec("gsd", G=50), dtype="bfloat16")
    return join(TABLE, {
        PLAIN: scored(folder(tmp_path, AR, ar(3)), 30.5),
        SPECULATIVE: scored(folder(tmp_path, SJD, [*sjd(3), None]), 31.0, n=2),
        GROUPED: scored(folder(tmp_path, grouped, sjd(3)), 33.0, "bbbbbbbb"), SMALL_GROUPS: "its weights are missing",
    })  # fmt: skip


def cell(joined: PaperTable, label: str, column: str):
    (line,) = [line for line in joined.lines if line.label.startswith(label)]
    return line.cells[column]


def on_terminal(joined: PaperTable, width: int) -> str:
    screen = Console(width=width, file=io.StringIO(), color_system=None)
    screen.print(terminal(joined, screen))
    return "\n".join(line.rstrip() for line in screen.file.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("name", [*SUFFIXES, "terminal"])
def test_tables_are_the_golden_ones(joined, name):
    """To accept a change: run with UPDATE_GOLDEN=1 in the environment, and read the difference."""
    text = on_terminal(joined, 80) if name == "terminal" else render_tables([joined], name, notes=True)
    if name == "html":
        text = text[text.index("<main>") : text.index("</main>")]  # the rest is style
    golden = GOLDEN / f"toy-1.{SUFFIXES.get(name, 'txt')}"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert _legible(text) == _legible(golden.read_text())


def _legible(text: str) -> str:
    """Without the last digits of long numbers, which depend on the processor's order of summing up."""
    return re.sub(r"-?\d+\.\d{9,}(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text)


def test_parquet_holds_the_rows_of_the_table_and_several_go_into_one_text_or_are_refused(joined):
    table = pq.read_table(io.BytesIO(render_tables([joined], "parquet")))
    rows = table.to_pylist()
    assert [row["label"] for row in rows] == [row.label for row in TABLE.rows]
    assert rows[1]["latency_s paper"] == 52.34 and rows[1]["nfe spread"] == 0.2
    assert rows[1]["latency_s measured"] == pytest.approx((35 + 35 + 52) / 3e3)
    assert rows[1]["speedup low"] is None and rows[1]["speedup measured"], "three prompts are too few for an interval"
    assert rows[2]["speedup measured"] is None and rows[2]["speedup why"] == "dtype differs"
    assert rows[4]["images"] is None and table.schema.metadata[b"specbench.table"] == b"toy-1"
    assert len(json.loads(render_tables([joined] * 2, "json"))) == 2 * len(TABLE.rows)
    for fmt in ("markdown", "latex", "html"):
        assert render_tables([joined] * 2, fmt).count(TABLE.title) >= 2
    for fmt in ("csv", "parquet"):
        refused("one table", render_tables, [joined] * 2, fmt)
    refused("unknown format 'xls'", render_tables, [joined], "xls")
    assert {*formats_with("tables")} == {*SUFFIXES, "parquet"}, "each has a golden table, or is read above"


def test_what_was_measured_is_in_the_printed_unit_with_its_interval_difference_and_hardware(joined):
    latency, nfe, speedup = (cell(joined, "B SJD", name) for name in ("latency_s", "nfe", "speedup"))
    assert latency.value == pytest.approx(0.122 / 3) and latency.too_few and latency.low is None
    assert nfe.value == pytest.approx(7 / 3) and nfe.difference == pytest.approx(7 / 3 - 6)
    assert nfe.too_few and not nfe.outside, "an interval that is not shown decides nothing"
    assert between(0.25, 0.5) == "0.25–0.50" and between(-4.9, -4.8, 1) == "-4.9 to -4.8", "no minus next to a dash"
    assert speedup.value == pytest.approx(3 * 45 / 122) and speedup.difference == pytest.approx(3 * 45 / 122 - 2.15)
    assert cell(joined, "A Plain", "nfe").difference == 0 and not cell(joined, "A Plain", "nfe").outside
    latency = cell(joined, "B SJD", "latency_s")
    assert latency.notes == ("Measured on Test CPU; the paper on NVIDIA RTX 4090.",)
    assert latency.difference is not None and not latency.outside


def many(tmp_path: Path, **counts: int) -> PaperTable:
    """AR and SJD measured over this many images each."""
    runs = {PLAIN: folder(tmp_path, AR, ar(counts["ar"])), SPECULATIVE: folder(tmp_path, SJD, sjd(counts["sjd"]))}
    return join(TABLE, runs)


def test_the_best_values_are_bold_and_measured_ones_only_if_they_differ_from_ar(tmp_path):
    done = many(tmp_path, ar=9, sjd=9)
    nfe = cell(done, "B SJD", "nfe")
    assert nfe.outside and not nfe.too_few, "6 forwards are far outside the interval around 2.3"
    printed, here, _ = re.search(r"\| B SJD.*\n.*\n.*", render_tables([done]))[0].splitlines()
    assert "| **52.34** |" in printed and "| 6 (0.2) |" in printed, "decimals and bold as the file has them"
    assert "**" not in here, "the speed-up may be chance, and forwards are not tested"
    slow = [generation(4, 400.0, 4.0, tested=(0,), accepted=(0,))] * 9
    runs = {PLAIN: folder(tmp_path / "slow", AR, slow), SPECULATIVE: folder(tmp_path / "slow", SJD, sjd(9))}
    bold = re.search(r"\| B SJD.*\n(.*)", render_tables([join(TABLE, runs)]))[1]
    assert re.findall(r"\*\*([\d.]+)", bold) == ["9.96"], "the speed-up alone is tested"
    noted = replace(TABLE, rows=tuple(replace(row, notes={"row": "a contradiction"}) for row in TABLE.rows))
    assert r"\textsuperscript{1} a contradiction" in render_tables([join(noted, {})], "latex")
    assert r"\textbf{52.34}" in render_tables([done], "latex") and "<b>52.34</b>" in render_tables([done], "html")
    few = render_tables([many(tmp_path / "few", ar=3, sjd=3)])
    assert "*" not in re.search(r"\| B SJD.*\n(.*)\n", few)[1]


@pytest.mark.parametrize(("printed", "gpus", "same"), [
    ("NVIDIA RTX 4090", ["NVIDIA GeForce RTX 4090"], True), ("NVIDIA A100", ["NVIDIA A100-SXM4-40GB"], True),
    ("NVIDIA RTX 3090 (a server with 8, AMD EPYC)", ["NVIDIA GeForce RTX 3090"], True),
    ("NVIDIA RTX 4090 (768), NVIDIA A100 (1024)", ["NVIDIA A100 80GB PCIe"], True),
    ("NVIDIA RTX 4090", ["NVIDIA GeForce RTX 4080"], False), ("NVIDIA A100", [], False), (None, ["NVIDIA A100"], None),
])  # fmt: skip
def test_hardware_is_the_papers_only_if_every_word_of_it_is_there(tmp_path, printed, gpus, same):
    assert same_hardware(printed, Run(folder(tmp_path, changed(SJD, device="cuda"), sjd(1), gpus=gpus))) is same


CHANGES = {
    "dtype": {"dtype": "bfloat16"}, "threads": {"threads": 2}, "seed": {"seed": 1}, "batch": {"batch": 2},
    "device": {"device": "cuda"}, "weights_sha256": {"weights_sha256": "9" * 64}, "guidance": {"guidance": 4.0},
    "prompts_sha256": {"prompts_sha256": "9" * 64}, "temperature": {"temperature": 0.5}, "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.9}, "mode": {"mode": "throughput"}, "hardware": {},
}  # fmt: skip


def test_every_field_that_must_agree_is_tried_below(tmp_path):
    folder_of_ar = folder(tmp_path, AR, ar())
    info = json.loads((folder_of_ar / "run.json").read_text())
    other = json.loads(json.dumps(info), parse_int=lambda text: int(text) + 1, parse_float=lambda text: float(text) + 1)
    other["spec"] |= {name: f"another {value}" for name, value in info["spec"].items() if isinstance(value, str)}
    other["spec"]["mode"] = "throughput"
    named = mismatched_fields(RunInfo.from_json(other), read_info(folder_of_ar)).keys()
    assert named == {*CHANGES, "model"}, "runs of another model are never each other's baseline"


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_that_must_agree_and_does_not_blanks_the_ratios_and_is_named(tmp_path, field):
    plain = folder(tmp_path, AR, ar())
    other = folder(tmp_path, changed(SJD, **CHANGES[field]), sjd(), cpu="Test CPU" if CHANGES[field] else "Another")
    done = join(TABLE, {PLAIN: plain, SPECULATIVE: other})
    for name in ("speedup", "step_ratio"):
        ratio = cell(done, "B SJD", name)
        assert ratio.value is None and ratio.difference is None and ratio.why == f"{field} differs"
        assert ratio.why in render_tables([done]) and any(field in note for note in ratio.notes)
    assert cell(done, "B SJD", "nfe").value is not None, "what compares with nothing stays"


def test_the_interval_of_the_gap_knows_how_few_images_it_has(tmp_path):
    runs = [generation(2, 30.0, logp=(-1.0, -2.0, 0.0, last)) for last in range(-10, -2)]
    row = report_row(Run(folder(tmp_path, SJD, runs)), [])
    column = Column("nll_gap", "nll_gap", "Gap", None, 3, "none", 1.0, RunSettings())
    measured = Measured(Run(tmp_path / SJD.run_id), row, None, (), None)
    gap = make_cell(TABLE.rows[1], column, measured, None, None)
    assert gap.high - gap.value == pytest.approx(2.3646242515928 * row.by_key["nll_gap_se"])


def test_other_prompts_than_the_table_asks_for_show_no_difference(tmp_path):
    def measured(texts: list[str], images: int = 3):
        file = tmp_path / "mine.txt"
        file.write_text("\n".join(texts))
        first_three = replace(TABLE.rows[1].settings, prompts=str(file), limit=3)
        table = replace(TABLE, rows=(replace(TABLE.rows[1], settings=first_three),))
        spec = changed(SJD, prompts=str(file))
        run = tmp_path / spec.run_id
        shutil.rmtree(run, ignore_errors=True)
        with RunStore(run).lock(spec).begin(spec, INVOCATION) as store:
            chosen = [Prompt(text_id(f"prompt {number}"), f"prompt {number}") for number in range(images)]
            bases = [base_row(Request.of(prompt), 0, INVOCATION["started_at"]) for prompt in chosen]
            store.append([sample_row(base, item, True) for base, item in zip(bases, sjd(images), strict=True)])
        return join(table, dict.fromkeys(table.all_settings(), run))

    same = measured(["prompt 0", "prompt 1", "prompt 2", "prompt 3"])
    assert cell(same, "B SJD", "nfe").difference is not None
    other = measured(["another", "prompt 1", "prompt 2", "prompt 0"])
    assert cell(other, "B SJD", "nfe").difference is None
    assert any("prompts other than the first 3 of" in text for text in other.remarks)
    part = measured(["prompt 0", "prompt 1", "prompt 2"], images=2)
    assert cell(part, "B SJD", "nfe").difference is not None and part.lines[0].expected == 3, "2 of 3 images"


@pytest.mark.parametrize(("images", "note"), [
    ([0, 1, 2], None), ([0, 1], "runs over different images: 2 to 3"), ([0, 1, 4], "3 images each"),
])  # fmt: skip
def test_a_row_whose_cells_are_of_different_images_says_so(tmp_path, images, note):
    nfe = next(column for column in TABLE.columns if column.name == "nfe")
    wide = replace(
        nfe,
        name="wide nfe",
        settings=RunSettings().changed({"window": 5}, {"window": SettingOrigin(SettingSource.FILE)}),
    )
    table = replace(TABLE, rows=TABLE.rows[1:2], columns=(nfe, wide))
    settings, other = table.all_settings()
    narrow = folder(tmp_path, SJD, sjd(3))
    pieces = [item if place in images else None for place, item in enumerate(sjd(5))]
    done = join(table, {settings: narrow, other: folder(tmp_path, tiny.spec("sjd", window=5), pieces)})
    notes = [note for note in done.lines[0].notes if "over different images" in note]
    assert (note is None and not notes) or (note in notes[0] and notes[0] in done.footnotes)


def test_a_score_computed_otherwise_than_its_column_is_refused_and_of_two_ways_its_own_is_shown(joined, tmp_path):
    assert cell(joined, "A Plain", "fid").value == 30.5 and cell(joined, "B SJD", "fid").value == 31.0
    other = cell(joined, "C GSD", "fid")
    assert other.value is None and other.why == "other fingerprint"
    assert "bbbbbbbb" in other.notes[0] and "aaaaaaaa" in other.notes[0]
    scored_in_part, unknown = cell(joined, "B SJD", "fid").notes
    assert scored_in_part == "Scored over 2 of 3 images." and "no difference" in unknown
    plain = scored(scored(folder(tmp_path / "two", AR, ar()), 99.0, "bbbbbbbb"), 30.5)
    done = join(TABLE, {PLAIN: plain, SPECULATIVE: scored(folder(tmp_path / "two", SJD, sjd()), 31.0)})
    assert cell(done, "A Plain", "fid").value == 30.5 and cell(done, "B SJD", "fid").value == 31.0


def test_a_latency_ratio_above_the_step_ratio_is_flagged(tmp_path, joined):
    slow = [generation(4, 400.0, 4.0) for _ in range(3)]
    done = join(TABLE, {PLAIN: folder(tmp_path / "slow", AR, slow), SPECULATIVE: folder(tmp_path / "slow", SJD, sjd())})
    flagged = cell(done, "B SJD", "speedup")
    assert flagged.value > cell(done, "B SJD", "step_ratio").value
    assert any(note.startswith("The measured latency ratio is above") for note in flagged.notes)
    assert any(note.startswith("The printed latency") for note in flagged.printed_notes), "2.15 above 2.0"
    fair = cell(joined, "A Plain", "speedup")
    assert not fair.printed_notes and len(fair.notes) == 1


def test_another_model_or_prompts_in_the_place_of_the_paper_s_show_no_difference(tmp_path):
    done = join(TABLE, {SPECULATIVE: folder(tmp_path, changed(SJD, model="shapes", prompts="shapes"), sjd())})
    line = next(line for line in done.lines if line.label == "B SJD")
    assert line.cells["nfe"].value is not None and all(value.difference is None for value in line.cells.values())
    assert any("model shapes instead of enumerable, prompts shapes instead of pets" in text for text in done.remarks)


def test_a_row_of_a_lossless_decoder_that_fails_its_audit_says_so(tmp_path):
    run = folder(tmp_path, SJD, sjd())
    verdict = {"verdict": "deviates", "deviates": True, "tv": 0.1, "tv_low": 0.05, "tv_high": 0.2, "detectable": 0.01}
    for failed in (True, False):
        write_audit(run, {**verdict, "failed": failed, "images": 3, "fingerprint": ""})
        line = next(line for line in join(TABLE, {SPECULATIVE: run}).lines if line.label == "B SJD")
        assert any("NOT LOSSLESS" in note for note in line.notes) == failed
        assert any(note.startswith("Declared lossless: ") for note in line.notes) != failed


def test_a_row_that_did_not_run_says_why_and_every_column_and_mark_is_explained(joined):
    lines = {line.label: line for line in joined.lines}
    why, choice = lines["D Ours_2 & more"].notes
    assert why == "Not run: its weights are missing." and choice.startswith("Chosen: fresh-q = onehot: ")
    assert lines["E Trained elsewhere"].notes == ("Not run: its network was not released.",)
    assert lines["E Trained elsewhere"].cells["latency_s"].paper == 30.0
    text = render_tables([joined])
    for column in TABLE.columns:
        assert f"- {column.header}: " in text
    for number in range(1, len(joined.footnotes) + 1):
        mark = str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        assert text.count(mark) >= 2, "once in the table, once below"


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_terminal_of_any_width_shows_every_column_whole(joined, width):
    text = on_terminal(joined, width)
    assert max(map(len, text.splitlines())) <= width
    for value in ("112.29", "too few", "dtype differs", "other fingerprint", "-3.7"):
        assert value in text


def test_a_figure_s_page_has_its_plot_and_loads_nothing(tmp_path):
    """Step compression against the window: printed values at two windows, measured ones at two."""
    plain = replace(TABLE.rows[1], group=None)
    settings = [replace(plain.settings, options={"window": w}) for w in (3, 300)]
    rows = [
        replace(plain, label=f"W = {w}", paper={"nfe": w}, settings=s) for w, s in zip((3, 300), settings, strict=True)
    ]
    figure = replace(TABLE, rows=tuple(rows), axes=({"x": "option:window", "y": "nfe"},))
    run = folder(tmp_path, SJD, sjd(9))
    done = join(figure, dict.fromkeys(figure.all_settings(), run))
    printed, measured = figure_curves(done, figure.axes[0])
    assert [(x.value, y.value) for x, y in printed.points] == [(3, 3), (300, 300)] and not printed.measured
    assert all(y.value == pytest.approx(7 / 3) and y.low < y.value < y.high for _, y in measured.points)
    silent = replace(figure, rows=tuple(replace(row, paper={}, spread={}, notes={}) for row in rows))
    alone = render_tables([join(silent, dict.fromkeys(silent.all_settings(), run))])
    assert "| W = 3" in alone and "| paper |" not in alone, "no line of dashes for a figure without printed numbers"
    text = render_tables([done], "html")
    (chart,) = json.loads(re.search('id="charts">(.*?)</script>', text)[1])
    texts = [point["told"] for layer in chart["layers"] for point in layer["points"] if layer["mark"] == "dot"]
    assert text.count("data-chart=") == 1 and sum("the paper's" in line for line in texts) == 2 == len(texts) - 2
    assert "default-src 'none'" in text and text.count("sha256-") == text.count("<script>") == 2
    assert "data-chart" not in render_tables([join(TABLE, {})], "html"), "a table has no plot"
    nothing = render_tables([join(replace(silent, maps=("top1",)), {})], "html")
    assert "is not drawn: neither the paper nor a run has numbers" in nothing and "No map of top-1 of p" in nothing
    assert "not drawn" not in text and "No map" not in text


def test_the_only_value_of_an_axis_has_room_around_it():
    """A single point would else be labelled with all digits of its value."""
    point = (Estimate(3.0, None, None), Estimate(32.089, None, None))
    alone = figure_chart([Curve("", False, [point])], "x", "y")["scales"]
    assert alone["y"]["domain"] == pytest.approx([28.8801, 35.2979])
    assert alone["x"]["domain"] == pytest.approx([2.7, 3.3])
    two = figure_chart([Curve("", False, [point, (point[1], point[0])])], "x", "y")["scales"]
    assert "domain" not in two["y"] and "domain" not in two["x"]


def test_a_row_of_two_seeds_is_the_mean_over_their_images_and_pairs_each_with_ar_of_its_seed(tmp_path):
    table = replace(TABLE, rows=tuple([replace(row, seeds=(1, 2)) for row in TABLE.rows[:2]]))
    runs = {}
    for place, settings in enumerate(table.all_settings()):
        slow = settings.seed == 2
        spec = changed(AR if settings.decoder == ("ar",) else SJD, seed=settings.seed)
        images = ar(9) if settings.decoder == ("ar",) else [generation(2 + 2 * slow, 20.0, 2.0)] * 9
        runs[settings] = scored(folder(tmp_path, spec, images), 30.0 + place, n=9)
    done = join(table, runs)
    steps, speedup, fid = (cell(done, "B SJD", name) for name in ("nfe", "speedup", "fid"))
    assert (steps.value, steps.n, speedup.n) == (3.0, 18, 18) and speedup.value == pytest.approx(2 * 45 / (23 + 23))
    assert (fid.value, fid.low, fid.high, fid.n) == (32.5, 31.5, 33.5, 18)
    line = done.lines[1]
    assert len(line.runs) == 2 and line.images == 18
    assert any(text.startswith("Rows of several seeds") for text in done.remarks)
    assert json.loads(render_tables([done], "json"))[1]["cells"]["fid"]["n"] == 18
    refused("several seeds", with_baseline, done, "ar")
    first = next(iter(runs))
    alone = join(table, {first: runs[first]})
    assert alone.lines[0].images == 9 and not any("several seeds" in text for text in alone.remarks)
