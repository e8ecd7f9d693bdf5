"""Untrusted text (prompts, ids, categories, names) is escaped in markdown, csv, LaTeX, json, html, on a terminal,
and in file names. It concerns several modules: every module that prints or writes text."""

import csv
import html.parser
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import tiny
from hostile import TEXTS
from rich.console import Console

from specbench.cli.output import print_table
from specbench.papers.join import join
from specbench.papers.render import render_tables as render_paper
from specbench.papers.render import terminal
from specbench.papers.table_files import read_table
from specbench.prompts import Request
from specbench.reporting import render, report_rows
from specbench.reporting.figures import figure_csv
from specbench.reporting.html import write_page
from specbench.reporting.terminal import run_view
from specbench.reporting.text_formats import csv_text
from specbench.runs.executors.local import LocalExecutor
from specbench.runs.runner import run
from specbench.specs.run_spec import RunSpec
from specbench.store.run_folders import find_runs
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, image_name, sample_row

ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FORMULA = re.compile(r"^[=+\-@\t]")


def spec(text: str) -> RunSpec:
    """A run whose model, decoder and prompt set have this name."""
    base = tiny.spec("sjd")
    return replace(base, model=text, prompts=text, decoder=replace(base.decoder, name=text))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A results folder of runs with these names; the first one has prompts, ids and categories of all of them."""
    out = tmp_path_factory.mktemp("box") / "results"
    for text in TEXTS:
        run, numbers = spec(text), TEXTS if text == TEXTS[0] else TEXTS[:1]
        with RunStore(out / run.run_id).lock(run).begin(run, synthetic.INVOCATION) as store:
            images, rows = {}, []
            for number, item in zip(numbers, synthetic.sjd(len(numbers)), strict=True):
                base = base_row(Request(number, number, 0, number, {number: number}), 0, number)
                rows.append(sample_row(base, item, True))
                images[rows[-1]["image"]] = item.image
            store.append(rows, images)
    return out


@pytest.fixture(scope="module")
def everything(hostile) -> Path:
    """The run with all prompts."""
    return hostile / spec(TEXTS[0]).run_id


@pytest.fixture(scope="module")
def rows(hostile) -> list[dict]:
    return report_rows(find_runs(hostile))


def test_names_of_folders_and_pictures_stay_inside(hostile):
    assert [path.name for path in hostile.parent.iterdir()] == ["results"]
    assert len(find_runs(hostile)) == len(TEXTS) == len({spec(text).run_id for text in TEXTS})
    for folder in find_runs(hostile):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9+.-]{0,120}", folder.name)
    assert len(list(hostile.glob("*/images/*.png"))) == 2 * len(TEXTS) - 1
    texts = {*TEXTS, ".", "/", "con", "A", "a", "ä", "-rf"}
    names = {image_name(text, sample).lower() for text in texts for sample in (0, 1)}
    assert len(names) == 2 * len(texts) and image_name("shapes-0001", 2) == "shapes-0001-2.png"
    for name in names:
        assert re.fullmatch(r"[a-z0-9~][a-z0-9._~-]{0,90}\.png", name)


def test_every_name_is_kept_as_it_is(hostile, everything):
    assert {read_info(folder).spec.model for folder in find_runs(hostile)} == set(TEXTS)
    rows = RunStore(everything).samples(["prompt", "category", "meta"])
    assert list(rows["prompt"]) == list(rows["category"]) == list(TEXTS)
    assert [json.loads(text) for text in rows["meta"]] == [{text: text} for text in TEXTS]


def test_markdown_has_no_markup_and_no_further_cells(rows):
    text = render(rows)
    assert not re.search(r"(?<!&lt;)<[a-z/]", text) and not ESCAPES.search(text)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_csv_is_rectangular_and_runs_nothing_and_json_is_exactly_what_was_given(rows):
    header, *lines = csv.reader(io.StringIO(render(rows, "csv")))
    assert len(lines) == len(TEXTS) and {len(line) for line in lines} == {len(header)}
    for cell in (cell for line in lines for cell in line):
        assert not FORMULA.match(cell) or re.fullmatch(r"-?[0-9.e+-]+", cell), cell
    read = json.loads(render(rows, "json"))
    assert {row["model"] for row in read} == {row["decoder"] for row in read} == set(TEXTS)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝"])
def test_every_csv_guards_against_formulas_in_cells_and_headings(start, rows):
    """One function writes all: reports, long ones, papers' tables, numbers of figures."""
    text = f'{start}HYPERLINK("http://x")'
    assert csv_text([{"a": text, text: 1.5, "b": -2}]).startswith(f"""a,"'{start}HYPERLINK(""")
    assert [*csv.reader(io.StringIO(csv_text([{text: text}]), newline=""))] == [[f"'{text}"]] * 2
    assert csv_text([{"a": -1.5, "b": "plain"}]) == "a,b\n-1.5,plain\n"
    named = [replace(row, label=text) for row in rows[:1]]
    chart = {"layers": [{"mark": "dot", "points": [{"x": -1, "run": text}]}]}
    for table in (render(named, "csv", long=True), render(named, "csv"), figure_csv(chart)):
        read = [cell for line in csv.reader(io.StringIO(table, newline="")) for cell in line]
        assert text not in read and f"'{text}" in read


class Page(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.scripts = 0
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.scripts += tag == "script"
        self.attributes |= {name for name, _ in attributes}


def test_html_has_the_tags_of_a_harmless_page_and_no_others(everything, tmp_path):
    """As a browser sees it: see also test_html."""
    harmless = tmp_path / "harmless"
    synthetic.folder(harmless, spec("model"), synthetic.sjd())
    mine = Page(write_page([everything], tmp_path / "hostile.html").read_text())
    other = Page(write_page(find_runs(harmless), tmp_path / "plain.html").read_text())
    added = mine.tags - other.tags
    assert mine.scripts == other.scripts and added <= {"img", "figcaption", "figure", "bdi", "select", "option", "wbr"}
    assert not any(name.startswith("on") for name in mine.attributes)


def test_a_terminal_shows_the_letters_and_obeys_none(hostile, capsys):
    screen = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="truecolor")
    for folder in find_runs(hostile):
        screen.print(run_view(folder))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue())
    assert not ESCAPES.search(shown.replace("\r", "")) and "[bold red]markup[/bold red]" in shown and "]8;" not in shown
    for text in TEXTS:
        print_table([{"name": text, "list": [text], "dict": {text: text}}], ("name", "list", "dict"))
    shown = capsys.readouterr().out
    assert "[bold red]markup[/bold red]" in shown and not ESCAPES.search(shown)


def paper_table(tmp_path: Path):
    quoted = [json.dumps(text, ensure_ascii=False) for text in TEXTS if text.strip()]
    rows = "\n".join(
        f"[[rows]]\nlabel = {text}\ngroup = {text}\nrunnable = false\nwhy = {text}\nnotes = {{ row = {text} }}\n"
        for text in quoted
    )
    head = f'name = "x"\npaper = "sjd"\nsource = {quoted[6]}\ntitle = {quoted[7]}\nnotes = [{", ".join(quoted)}]\n'
    columns = f'columns = [{{ key = "nfe", header = {quoted[11]} }}, {{ key = "printed:a", header = {quoted[13]} }}]\n'
    (tmp_path / "x.toml").write_text(head + columns + rows)
    return join(read_table(tmp_path / "x.toml"), {})


def test_a_papers_table_is_inert_in_every_format_and_its_latex_has_no_command_of_a_stranger(tmp_path):
    joined = paper_table(tmp_path)
    needs, text = render_paper([joined], "latex").split("\n", 1)
    assert needs == r"% needs \usepackage{booktabs}"
    ours = {"begin", "end", "caption", "toprule", "midrule", "bottomrule", "multicolumn", "textit", "footnotesize",
            "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar",
            "textsuperscript", "uparrow", "downarrow", "centering", "small", "setlength", "tabcolsep",
            "label"}  # fmt: skip
    assert set(re.findall(r"\\([A-Za-z]+)", text)) <= ours
    text = re.sub(r"(?<=[{}])%$", "", text, flags=re.MULTILINE)  # our own ends of lines
    assert not re.search(r"(?<!\\)[%#]", text)
    assert text.count("{") - text.count("\\{") == text.count("}") - text.count("\\}")
    assert "<script" not in render_paper([joined], "html") and "<img" not in render_paper([joined], "html")
    assert not re.search(r"<[a-z/]", render_paper([joined], "markdown"))
    for row in csv.reader(io.StringIO(render_paper([joined], "csv"))):
        assert not any(FORMULA.match(cell) for cell in row)
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    screen.print(terminal(joined, screen))
    assert "[bold red]markup[/bold red]" in re.sub(r"\x1b\[[0-9;]*m|\s+", lambda m: "" if m[0][0] == "\x1b" else " ",
                                                   screen.file.getvalue())  # fmt: skip


def test_a_run_of_hostile_prompts_comes_to_its_end(tmp_path):
    requests = [Request("a cat", text, 0, text, {text: text}) for text in TEXTS]
    summary = run(LocalExecutor(tiny.tiny_model()), [tiny.spec()], requests, tmp_path / "out")
    assert (summary.done, summary.failed) == (len(TEXTS), 0) and [path.name for path in tmp_path.iterdir()] == ["out"]
