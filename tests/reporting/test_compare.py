"""`compare` and `show`: paired numbers in both directions, gates with their exit code, reasons for missing values,
run and image cards."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import synthetic
from brightness import Brightness, register
from refusals import refused
from synthetic import AR, SJD, changed

from specbench import stats
from specbench.metrics import scoring
from specbench.prompts import Prompt, Request
from specbench.reporting import compare, html, render, report_rows
from specbench.reporting.comparability import Run
from specbench.reporting.compare import (
    CONSTANT_NOTE,
    FEW_NOTE,
    OTHER_CAPTIONS,
    Gate,
    compare_rows,
    compare_runs,
    comparison_lines,
    corrected,
    real_differences,
    verdict,
)
from specbench.reporting.image_tiles import ACCEPTED, DRAWN, commit_steps, grid_of, origins
from specbench.reporting.over import over_seeds
from specbench.reporting.row import Compared, unique_names
from specbench.reporting.sections import BOLD_RULE, sections
from specbench.specs.options import Options
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, sample_row
from specbench.system.table_formats import formats_with


@pytest.fixture(autouse=True)
def known(monkeypatch):
    register(monkeypatch, "brightness", "brightness:Brightness")


def pictured(out: Path, spec, generations, values, caption="prompt", first="p", sample=0) -> Path:
    """A scored run whose images have these mean pixels; `caption` begins each prompt, or returns its beginning,
    as `first` begins ids."""
    with RunStore(out / spec.run_id).lock(spec).begin(spec, synthetic.INVOCATION) as store:
        for number, (item, value) in enumerate(zip(generations, values, strict=True)):
            begin = caption(number) if callable(caption) else caption
            prompt = Prompt(f"{first}{number}", f"{begin} {number}", "pets", {})
            item.image = np.full((3, 4, 4), value, dtype=np.uint8)
            row = base_row(Request.of(prompt, sample), 7, synthetic.INVOCATION["started_at"])
            row = sample_row(row, item, spec.batch == 1)
            store.append([row], {row["image"]: item.image})
    scoring.score([store.folder], ["brightness"])
    return store.folder


SJD_VALUES = (102, 153, 203, 51, 82, 123, 92, 113)


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    return (
        pictured(tmp_path, AR, synthetic.ar(8), (100, 150, 200, 50, 80, 120, 90, 110)),
        pictured(tmp_path, SJD, synthetic.sjd(8), SJD_VALUES),
    )


def named(rows: list) -> dict[str, dict]:
    records = [row if isinstance(row, dict) else row.record for row in rows]
    return {row["name"]: row for row in records}


def test_images_of_other_captions_are_not_common(tmp_path):
    a = pictured(tmp_path, AR, synthetic.ar(8), range(8))
    other, edited = (changed(SJD, prompts_sha256=name * 64) for name in "23")
    b = pictured(tmp_path, other, synthetic.sjd(8), range(10, 18), "another")
    row = named(compare_runs(a, b))["brightness"]
    assert row["value"] is row["low"] is row["p"] is None and row["note"] == OTHER_CAPTIONS
    values = [*range(10, 17), 200]
    c = pictured(tmp_path, edited, synthetic.sjd(8), values, lambda number: "prompt" if number < 7 else "another")
    row = named(compare_runs(a, c))["brightness"]
    assert (row["value"], row["n"]) == (10, 7), "the edited caption is no pair"
    shown = sections(report_rows([a, b, c]))
    assert len({section.heading for section in shown}) == 3 and "prompt file 22222222" in shown[1].heading
    rows = [replace(row, drawn=[f"first {place} of 9"]) for place, row in enumerate(report_rows([b, c]))]
    assert all("prompt file" in section.heading for section in sections(rows)), "of which other prompts were drawn"


@pytest.mark.parametrize(("change", "kept", "note"), [
    ({"first": "x"}, "prompt", "the captions in common have different ids: import tokens --prompts shapes gives"),
    ({"sample": 1}, "prompt", "no images in common: the runs have different sample numbers"),
    ({"first": "x"}, "another", "no captions in common"), ({}, "another", OTHER_CAPTIONS),
])  # fmt: skip
def test_a_comparison_of_no_pair_says_how_the_images_differ(tmp_path, change, kept, note):
    a = pictured(tmp_path, changed(AR, prompts="shapes"), synthetic.ar(8), range(8))
    imported = changed(SJD, prompts_sha256="2" * 64, prompts="t.jsonl", tokens_sha256="3" * 64)
    b = pictured(tmp_path, imported, synthetic.sjd(8), range(8), kept, **change)
    assert named(compare_runs(a, b))["brightness"]["note"].startswith(note)


def test_a_copied_folder_counts_once(runs):
    copy = shutil.copytree(runs[1], runs[1].parent / f"{runs[1].name} copy")
    rows = report_rows([copy, *runs])
    assert [row.n for row in rows] == [8, 8] and rows[1].folder == runs[1] and rows[1].copies == [str(copy)]
    [_, once] = over_seeds([copy, *runs])
    assert (once.images, once.seeds, once.copies) == (8, [SJD.seed], [str(copy)])
    edited = synthetic.folder(runs[1].parent, replace(SJD, prompts_sha256="2" * 64), synthetic.sjd(8))
    assert {row.options.get("prompt-file") for row in over_seeds([*runs, edited])} == {None, "11111111", "22222222"}


def test_seeds_are_pooled_over_scores_of_the_same_fingerprint(runs, monkeypatch):
    second = pictured(runs[0].parent, replace(SJD, seed=SJD.seed + 1), synthetic.sjd(8), range(8))
    monkeypatch.setattr(Brightness, "identity", lambda self: {"version": "edited"})
    scoring.score([second], ["brightness"])
    [_, pooled] = over_seeds([*runs, second])
    assert pooled.numbers["brightness"].value == pytest.approx((np.mean(SJD_VALUES) + 3.5) / 2)
    scoring.score(runs, ["brightness"])
    assert sum(name.startswith("brightness (") for name in over_seeds([*runs, second])[1].numbers) == 2


def test_runs_that_differ_in_the_window_alone_keep_names_of_their_own(runs, cli, tmp_path):
    wide = replace(SJD, decoder=replace(SJD.decoder, options=Options({**SJD.decoder.options, "window": 64})))
    other = pictured(runs[0].parent, wide, synthetic.sjd(8), range(8))
    narrow, broad = (spec.decoder.options["window"] for spec in (SJD, wide))
    names = [*unique_names(rows := report_rows([*runs, other]))]
    assert names == ["ar", *(f"sjd W={window}" for window in sorted((narrow, broad)))]
    chosen = cli("report", "--out", tmp_path, "--columns", "nfe").out
    assert f"| sjd window={narrow} |" in chosen and f"| sjd window={broad} |" in chosen
    assert {row.folder for row in unique_names(rows).values()} == {*runs, other}
    drawn = cli("figure", "pictures", "--to", str(tmp_path / "p.svg"), "--out", str(runs[0].parent))
    assert drawn.code == 0 and all(name in (tmp_path / "p.csv").read_text() for name in names)
    refused(f"is ambiguous: {names[1]} or {names[2]}", compare_rows, rows, "sjd")
    against = [row.against for row in compare_rows(rows, names[2])]
    assert [item and item.baseline for item in against] == [names[2], names[2], None]
    assert [row.against for row in compare_rows(rows, other.name)] == against
    seeds = [replace(row, setting=replace(row.setting, seed=seed)) for seed in (0, 1) for row in rows]
    assert [row.against for row in compare_rows(seeds, names[2])] == 2 * against, "a name counts within its setting"


@pytest.mark.parametrize("fmt", formats_with("report"))
def test_a_renamed_ar_folder_is_found_by_every_format(runs, fmt):
    expected = render(report_rows(runs), fmt)
    renamed = runs[0].rename(runs[0].with_name("baseline"))
    row = report_rows([runs[1]])[0]
    assert row.over_ar.ar_folder == renamed and real_differences(row.folder, row.over_ar) == {"brightness"}
    assert len(render(report_rows([renamed, runs[1]]), fmt)) > 0.9 * len(expected)


def test_bold_follows_the_verdict_of_compare_in_latex_and_on_the_page(runs, tmp_path):
    rows = report_rows(runs)
    real = {row.name for row in compare_runs(*runs) if row.real}
    other, unmarked = (real_differences(row.folder, row.over_ar) for row in rows[::-1])
    assert real == {"brightness"} == other and not unmarked
    over = rows[1].over_ar
    assert over.speedup.value > 1 and over.speedup_p > 0.05, "a best speed-up that shows nothing is not bold"
    assert [row["real"] for row in json.loads(render(rows, "json"))] == [[], ["brightness"]]
    latex, page = render(rows, "latex"), html.page(rows)
    assert latex.count("\\textbf") == 1 and BOLD_RULE in latex and BOLD_RULE.partition(":")[0] in page
    marked = compare_rows(rows, "ar")
    assert all("†: differs from" in render(marked, fmt) for fmt in ("latex", "markdown"))
    unclear = pictured(tmp_path / "unclear", AR, synthetic.ar(8), (100, 150, 200, 50, 80, 120, 90, 110)).parent
    pictured(unclear, SJD, synthetic.ar(8), (100, 151, 199, 50, 81, 119, 90, 110))
    assert "\\textbf" not in render(report_rows(find_runs(unclear)), "latex"), "a best value that shows nothing"


def test_latencies_appear_with_their_medians_and_a_stalled_image_is_named(tmp_path):
    a = pictured(tmp_path, AR, synthetic.ar(3), (100, 150, 200))
    b = pictured(tmp_path, SJD, [*synthetic.sjd(2), synthetic.generation(2, 8000.0)], (100, 150, 200))
    rows = named(compare_runs(a, b))
    mean, median = rows["latency_b_ms"]["value"], rows["median_b_ms"]["value"]
    assert mean > 2 * median == 2 * stats.latency_p50_ms(Run(b).rows).value
    assert "1 of 3 images stalled: the slowest took 8.00 s" in rows["latency_b_ms"]["note"]
    assert rows["latency_a_ms"]["note"] is None


def test_speed_is_compared_both_ways_and_taken_apart(runs):
    rows = named(compare_runs(*runs))
    forth, back = rows["speedup"], rows["speedup_reverse"]
    assert forth["value"] == pytest.approx(8 * 45 / 314) and back["value"] == pytest.approx(1 / forth["value"])
    assert back["low"] == pytest.approx(1 / forth["high"]) and back["high"] == pytest.approx(1 / forth["low"])
    factors = rows["step_ratio"]["value"] / (rows["window_cost"]["value"] * rows["overhead"]["value"])
    assert factors == pytest.approx(forth["value"]) and forth["n"] == 8
    assert named(compare_runs(*runs[::-1]))["speedup"]["value"] == pytest.approx(back["value"])


def test_scores_are_paired_and_p_values_corrected_together(runs):
    rows = named(compare_runs(*runs))
    paired = rows["brightness"]
    gaps = [2, 3, 3, 1, 2, 3, 2, 3]
    expected = stats.mean_difference(gaps, range(8))
    assert (paired["value"], paired["low"], paired["p"]) == pytest.approx((expected.value, expected.low, expected.p))
    assert paired["p_holm"] == paired["p"] and rows["speedup"]["p_holm"] == rows["speedup"]["p"], "one test each"
    speed, score = (Compared(name) for name in ("speedup", "brightness"))
    two = corrected([replace(row, p=p) for row, p in ((speed, 0.04), (score, 0.03), (score, 0.04))])
    assert [row.p_holm for row in two] == [0.04, 0.06, 0.06], "the speed-up is a separate test"
    two = corrected([replace(score, p=0.04), Compared("fid[clean]", p=0.5, kind="distance")])
    assert [row.p_holm for row in two] == [0.04, 0.5], "as in a report, which has no distances"
    assert paired["prompts_needed"] == stats.prompts_needed(np.std(gaps, ddof=1), 0.02 * 900 / 8)


def test_an_interval_that_says_more_than_the_corrected_p_is_explained():
    def row(name, value, low, high, p):
        return Compared(name, stats.Estimate(value, low, high), p_holm=p)

    text = verdict([row("speedup", 1.4, 1.1, 1.8, 0.054), row("brightness", -0.1, -0.2, 0.1, 0.3)])
    assert "speed (1.40 [1.10–1.80]; p = 0.0540)" in text
    assert "brightness (-0.100 [-0.200 to 0.100])" in text, "an interval that holds 0 explains itself"
    scores = [row(name, -0.1, -0.2, -0.01, 0.06) for name in ("brightness", "clip")]
    assert verdict(scores).count("p = 0.0600 after correction for 2 scores") == 2


def test_few_prompts_give_values_without_intervals_and_p_values(runs, tmp_path):
    a = pictured(tmp_path / "few", AR, synthetic.ar(7), range(7))
    b = pictured(tmp_path / "few", SJD, synthetic.sjd(7), range(1, 8))
    rows = {row.name: row for row in compare_runs(a, b)}
    alone = ((AR, synthetic.ar(1), (9,)), (SJD, synthetic.sjd(1), (7,)))
    records = named(compare_runs(*(pictured(tmp_path / "one", *each) for each in alone)))
    assert records["brightness"]["value"] == -2 and records["speedup"]["value"] > 1
    for row in records.values():
        assert row["low"] is row["high"] is row["p"] is row["p_holm"] is row["prompts_needed"] is None
    json.dumps(list(records.values()), allow_nan=False)
    for name in ("speedup", "speedup_reverse", "brightness"):
        row = rows[name]
        assert row.value and row.estimate.low is row.estimate.high is row.p_holm is None and FEW_NOTE in row.note
    assert all("too few" in line for line in comparison_lines([rows["speedup"], rows["brightness"]]))
    assert named(compare_runs(*runs))["speedup"]["low"], "eight prompts are enough"


@pytest.mark.parametrize(("change", "steps"), [
    ({"dtype": "bfloat16"}, False), ({"seed": 3}, False), ({"top_k": 5}, False), ({"threads": 4}, True),
    ({"batch": 8}, True),
])  # fmt: skip
def test_speed_needs_what_must_agree_steps_less_of_it_and_scores_nothing(tmp_path, change, steps):
    a = pictured(tmp_path, AR, synthetic.ar(3), (1, 2, 3))
    b = pictured(tmp_path, changed(SJD, **change), synthetic.sjd(3), (2, 4, 6))
    rows = compare_runs(a, b)
    speed, ratio = (named(rows)[name] for name in ("speedup", "step_ratio"))
    assert speed["value"] is None and speed["note"].startswith(f"differs in {next(iter(change))} (")
    assert named(rows)["brightness"]["value"] == pytest.approx(2.0)
    alone = verdict([row for row in rows if row.name != "brightness"])
    assert alone.startswith("Only steps could be" if steps else "Nothing could be")
    expected = stats.nfe(Run(a).rows) / stats.nfe(Run(b).rows)
    assert (ratio["value"], ratio["n"]) == ((pytest.approx(expected), 3) if steps else (None, None))


def test_equal_values_of_all_prompts_have_no_interval(tmp_path):
    a, b = (pictured(tmp_path, spec, rows, [2] * 9) for spec, rows in ((AR, synthetic.ar(9)), (SJD, synthetic.sjd(9))))
    score = named(compare_runs(a, b))["brightness"]
    assert (score["value"], score["low"], score["high"], score["p"]) == (0, None, None, 1)
    assert score["note"] == "every prompt has the same difference, so there is no interval"


def test_scores_computed_differently_are_refused_by_name(tmp_path, monkeypatch):
    a = pictured(tmp_path, AR, synthetic.ar(3), (1, 2, 3))
    monkeypatch.setattr(Brightness, "version", "2")
    b = pictured(tmp_path, SJD, synthetic.sjd(3), (2, 4, 6))
    score = named(compare_runs(a, b))["brightness"]
    assert score["value"] is None and score["note"] == "computed differently: different version"
    scoring.score([a], ["brightness"])
    assert named(compare_runs(a, b))["brightness"]["value"] == pytest.approx(2.0)
    monkeypatch.setattr(Brightness, "version", "3")
    again = named(compare_runs(a, b))["brightness"]
    assert again["value"] == pytest.approx(2.0), "the stored values of both runs agree in their version"


def test_a_score_of_one_run_alone_names_that_run(tmp_path):
    a, b = pictured(tmp_path, AR, synthetic.ar(3), (1, 2, 3)), synthetic.folder(tmp_path, SJD, synthetic.sjd(3))
    for pair in ((a, b), (b, a)):
        assert named(compare_runs(*pair))["brightness"]["note"] == f"scored only in {a.name}"
    twin = synthetic.folder(tmp_path / "twin", AR, synthetic.ar(3))
    assert named(compare_runs(a, twin))["brightness"]["note"] == f"scored only in {a}", "both have the same id"


def test_a_distance_over_eight_prompts_has_too_few_images_not_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(Brightness, "kind", "distance")
    a, b = (
        pictured(tmp_path, spec, images, range(8)) for spec, images in ((AR, synthetic.ar(8)), (SJD, synthetic.sjd(8)))
    )
    monkeypatch.setattr(compare, "stored_difference", lambda *_: (stats.Difference(6.0, None, None, prompts=8), 8))
    assert named(compare_runs(a, b))["brightness"]["note"] == "too few images for an interval"


def test_a_score_with_an_infinite_image_is_not_tested(runs, monkeypatch):
    infinite = stats.mean_difference([np.nan, *[1.0] * 8], range(9))  # inf - inf
    assert infinite.p is infinite.low is stats.mean_difference([np.inf, *[1.0] * 8], range(9)).p is None
    monkeypatch.setattr(compare, "stored_difference", lambda *_: (infinite, 9))
    row = named(compare_runs(*runs))["brightness"]
    assert row["value"] is row["p_holm"] is None and row["note"] == "an image has an infinite value"


def test_a_gate_stops_a_script_with_4(runs, cli, tmp_path):
    ids = [folder.name for folder in runs]
    assert cli("compare", *ids, "--out", tmp_path, "--fail-if", "speedup<0.98").code == 0
    back = cli("compare", *ids[::-1], "--out", tmp_path, "--fail-if", "speedup < 0.98", "--json")
    assert back.code == 4 and "--fail-if 'speedup < 0.98' holds: speedup = 0.87" in back.err
    assert named(json.loads(back.out))["speedup"]["value"] < 0.98, "the numbers are printed all the same"
    bound = cli("compare", *ids, "--out", tmp_path, "--fail-if", "brightness.high>2")
    assert bound.code == 4 and "holds: brightness.high = " in bound.err
    close = Gate.parse("nfe>126.01")
    refused("holds: nfe = 126.015625", close.check, [Compared("nfe", stats.Estimate(126.015625))])
    assert cli("compare", *ids, "--out", tmp_path, "--fail-if", "brightness<-1").code == 0


def test_a_gate_knows_every_declared_number(runs, cli, tmp_path, monkeypatch):
    """Numbers of pairs of runs are B over A, other numbers are B's in reports."""
    [row] = report_rows([runs[1]])
    call = "compare", *(folder.name for folder in runs), "--out", tmp_path, "--fail-if"
    numbers = {name: found for name in stats.RUN_NUMBERS if (found := row.number(name))}
    paired = named(compare_runs(*runs))
    numbers |= {name: stats.Estimate(paired[name]["value"]) for name in stats.PAIR_NUMBERS}
    assert {"nfe", "tokens_per_second", "speedup_e2e"} <= numbers.keys()
    for name, number in numbers.items():
        assert cli(*call, f"{name}>{number.value - 1e-3}").code == 4, name
        assert cli(*call, f"{name}<{number.value - 1e-3}").code == 0, name
    for name in ("throughput", "acceptance_by_offset", "stage2_nfe", "over_floor", "label"):
        cli(*call, f"{name}<1").refused("cannot be evaluated: run B has no single number of this name")
    of_row = replace(row, roofline=replace(row.roofline, over_floor=1.5))
    monkeypatch.setattr(compare, "report_row", lambda *_: of_row)
    assert [cli(*call, text).code for text in ("over_floor>1.4", "over_floor>1.6", "failed>0", "n<99")] == [4, 0, 0, 4]
    offered = cli(*call, "zzz<1").err
    assert "over_floor" in offered and not re.search("by_offset|stage2|throughput|lossless", offered)


@pytest.mark.parametrize(("condition", "problem"), [
    ("spedup<1", "did you mean 'speedup'"), ("speedup=1", "is not a condition"), ("speedup<fast", "is not a condition"),
    ("speedup<nan", "is not a condition"), ("step_ratio.low<1", "cannot be evaluated: no low"),
])  # fmt: skip
def test_a_gate_that_cannot_be_evaluated_does_not_pass(runs, cli, tmp_path, condition, problem):
    answer = cli("compare", *(folder.name for folder in runs), "--out", tmp_path, "--fail-if", condition)
    answer.refused(problem, alone=True)


def test_a_gate_on_a_bound_of_a_constant_difference_takes_the_value():
    row = [Compared("x", stats.Estimate(0.0), 1.0, note=f"edited 29 Nov 22:01; {CONSTANT_NOTE}")]
    Gate.parse("x.low<-0.01").check(row)
    refused("holds: x.high = 0", Gate.parse("x.high>=0").check, row)


def test_every_comparison_sign_of_a_gate_is_strict_or_not_as_written():
    row = [Compared("x", stats.Estimate(2.0, 1.0, 3.0))]
    signs = {"x<2": False, "x<=2": True, "x>2": False, "x>=2": True, "x.low<2": True, "x.high<2": False}
    for text, fails in signs.items():
        if fails:
            refused("", Gate.parse(text).check, row)
        else:
            Gate.parse(text).check(row)


def test_rows_read_in_batches_are_the_rows_read_at_once(tmp_path):
    """With parts, replaced rows and failures, and any size of a batch."""
    folder = synthetic.folder(tmp_path, SJD, [*synthetic.sjd(5), None])
    with RunStore(folder).lock(SJD).begin(SJD, synthetic.INVOCATION) as store:
        store.append(synthetic.stored_rows(synthetic.ar(2)))
        whole = store.samples()
        for size in (1, 2, 5, 100):
            pieces = list(store._samples.batches(whole.columns, size))
            assert max(map(len, pieces)) <= size and pa.concat_tables(pieces).to_pandas().equals(whole)
    assert len(whole) == 6 and whole["nfe"].to_list()[-2:] == [4, 4], "the last of each key counts"
    assert len(Run(folder).rows) == 5


def test_grids_and_maps_of_hand_made_images():
    forced = [False, False, True] * 2
    assert grid_of(forced, (20, 20)) == (2, 2) and grid_of([False] * 12, (30, 40)) == (3, 4)
    assert grid_of([False] * 7, (20, 20)) is None
    steps = [1, 1, 1, 1, 2, 2]
    assert commit_steps(steps, forced, (2, 2)).tolist() == [[1, 1], [1, 2]]
    assert origins(steps, forced, [3], (2, 2)).tolist() == [[ACCEPTED, ACCEPTED], [DRAWN, ACCEPTED]]
    assert origins([1, 1, 2, 2], [False] * 4, [1, 1], (2, 2)).tolist() == [[ACCEPTED, DRAWN], [ACCEPTED, DRAWN]]
    assert origins([1, 1, 2, 2], [False] * 4, [2, 1], (2, 2)).tolist() == [[ACCEPTED, DRAWN], [ACCEPTED, ACCEPTED]]
    assert origins([1, 2, 3, 4], [False] * 4, [0], (2, 2)).tolist() == [[DRAWN, DRAWN], [DRAWN, DRAWN]]


def test_a_card_shows_one_image_and_a_run_is_shown_in_words(runs, cli, tmp_path):
    shown = cli("show", runs[1].name, "prompt 2", "--out", tmp_path)
    assert shown.code == 0 and "nfe" in shown.out and "brightness" in shown.out
    (card,) = json.loads(cli("show", runs[1].name, "p2", "--out", tmp_path, "--json").out)
    assert (card["prompt_id"], card["seed"], card["nfe"]) == ("p2", 7, 3)
    assert card["step_compression"] == pytest.approx(4 / 3) and card["scores"] == {"brightness": 203.0}
    assert card["committed_step"] is None, "three free tokens are no square"
    cli("show", runs[1].name, "prompt", "--out", tmp_path).refused("is ambiguous (8 prompts match")
    assert cli("show", runs[1].name, "nothing", "--out", tmp_path).code == 2
    text = cli("show", runs[1].name, "--out", tmp_path).out
    assert "speed-up [95 %]" in text and "lossless" in text and "8 images" in text
    assert "{" not in text and "None" not in text, "no raw values"
    assert "follows" in text and "arXiv 2410.01699" in text


def test_files_have_the_format_of_their_ending_and_the_columns_that_were_asked_for(runs, cli, tmp_path):
    tex, page = tmp_path / "t.tex", tmp_path / "p.html"
    written = cli("report", "--out", tmp_path, "--columns", "steps,Speed-Up ↑ [95 %]", "--to", tex, "--html", page)
    assert (written.code, written.out.split()) == (0, [str(page), str(tex)])
    head = next(line for line in tex.read_text().splitlines() if line.startswith("decoder"))
    assert head == r"decoder & NFE $\downarrow$ & speed-up $\uparrow$ {[}95 \%{]} \\"
    assert "footnotesize" not in tex.read_text()
    assert "footnotesize" in cli("report", "--out", tmp_path, "--format", "latex", "--notes").out
    assert page.read_text().startswith("<!doctype html>")
    nowhere = cli("report", "--out", tmp_path, "--html", "/proc/page.html")
    assert nowhere.code != 0 and nowhere.err.startswith("error: cannot write /proc/page.html")
    compared = cli("compare", runs[0], runs[1], "--to", tmp_path / "c.tex")
    assert compared.code == 0 and r"speed-up $\uparrow$ & " in (tmp_path / "c.tex").read_text()
    assert json.loads(cli("compare", runs[0], runs[1], "--json").out)[0]["name"] == "speedup"
    other = cli("compare", runs[0], runs[1], "--json", "--to", tmp_path / "c.csv")
    assert (
        other.code == 0
        and "c.csv is written as json, as requested, although its ending is of another format" in other.err
    )
    cli("report", "--out", tmp_path, "--columns", "steps,sped", "--format", "latex").refused("unknown column 'sped'")
    paper = ("report", "gsd-1", "--out", tmp_path, "--format", "latex", "--columns")
    tables = [cli(*paper, names).out for names in ("NFE ↓,steps saved,clip", "nfe,step_ratio,score:clip")]
    assert cli("report", "gsd-1", "--out", tmp_path, "--caption", "Mine").out.startswith("### Mine")
    assert tables[0] == tables[1] and "NFE" in tables[0], "what reports of runs call a number, or the table's file"
