"""Exchange with the official programs: nothing is written outside the folder, overwritten or left half-written, and no
result of another form is a score."""

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import synthetic

from specbench.metrics.geneval_rules import TAGS
from specbench.metrics.score_store import read_scores
from specbench.prompts import Prompt
from specbench.reporting import report_rows
from specbench.reporting.columns import score_columns
from specbench.reporting.compare import compare_runs


def a_run(out: Path, *prompts: Prompt) -> Path:
    return synthetic.pictured(out / "results", prompts)


def colour(text: str, line: object = 0, name: str = "p") -> Prompt:
    return Prompt(name, text, "color", {"line": line})


def counting(name: str, line: object) -> Prompt:
    return Prompt(name, f"text {name}", "counting", {"line": line, "include": [{"class": "cup", "count": 1}]})


EXPORTS = [("geneval", counting), ("t2i-compbench", lambda name, line: colour(name, line, name))]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def refused(outcome, *problems: str) -> None:
    """Check that there is one error, of one of these problems."""
    outcome.refused(next((problem for problem in problems if problem in outcome.err), problems[0]), alone=True)


@pytest.mark.parametrize("text", ["{root}/victim/x", "../victim", "a/b", "a\0b", "x" * 300])
def test_a_prompt_is_no_path(tmp_path, cli, text):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "x_000000.png").write_bytes(b"precious")
    run = a_run(tmp_path, colour(text.format(root=tmp_path)))
    before = files(tmp_path)
    refused(cli("export", "t2i-compbench", run, "--to", tmp_path / "out"), "cannot be the name of an exported file")
    assert files(tmp_path) == before and (victim / "x_000000.png").read_bytes() == b"precious"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lines", [(3, 3), *((line,) for line in ("3", -1, 1.0, True, 10**30, [1], None))], ids=str)
@pytest.mark.parametrize(("benchmark", "make"), EXPORTS)
def test_two_prompts_of_one_line_and_a_line_that_is_no_number_are_refused(tmp_path, cli, benchmark, make, lines):
    run = a_run(tmp_path, *(make(name, line) for name, line in zip("pq", lines, strict=False)))
    problem = "not a whole number" if len(lines) == 1 else "'p' and 'q' have the same line 3"
    refused(cli("export", benchmark, run, "--to", tmp_path / "out"), problem)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_half_way_leaves_nothing(tmp_path, cli):
    run = a_run(tmp_path, counting("p", 0), counting("q", 1))
    (run / "images" / "q-0.png").unlink()
    (tmp_path / "out").mkdir()
    refused(cli("export", "geneval", run, "--to", tmp_path / "out"), "q-0.png is missing")
    assert sorted(os.listdir(tmp_path)) == ["out", "results"] and not files(tmp_path / "out")


def test_what_a_killed_export_left_is_taken_away_and_no_link_is_followed(tmp_path, cli):
    run = a_run(tmp_path, counting("p", 0))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / ".out.tmp").symlink_to(tmp_path / "precious")
    assert cli("export", "geneval", run, "--to", tmp_path / "out").code == 0
    assert files(tmp_path / "out") == {"00000/metadata.jsonl", "00000/samples/0000.png"}
    assert sorted(os.listdir(tmp_path)) == ["out", "precious", "results"] and files(tmp_path / "precious") == {"file"}


GENEVAL = {"filename": "x/00000/samples/0000.png", "prompt": "text p", "correct": True, "reason": "", "details": "{}"}
CHANGES = [
    {"correct": "true"}, {"correct": None}, {"correct": []}, {"correct": 0.3}, {"correct": 1}, {"correct": False},
    {"correct": float("nan")}, {"filename": 3}, {"filename": "x.png"}, {"reason": [1]}, {"details": {"a": 1}},
    {"prompt": 5}, {"reason": "\ud800"},
]  # fmt: skip
NO_ROWS = ("[]", "1", "null", "[" * 1000 + "]" * 1000, "{}", "\ud800", '{"a": 1, "a": 2}')


def test_geneval_results_of_another_form_are_refused(tmp_path, cli):
    run, path = a_run(tmp_path, counting("p", 0)), tmp_path / "results.jsonl"
    good = json.dumps(GENEVAL | {"reason": "a\u2028line"}, ensure_ascii=False)
    path.write_text(f"{good}\n{good}")
    done = json.loads(cli("import", "geneval", run, "--from", path, "--json").out)
    assert [row["metric"] for row in done] == [f"geneval[official]:{part}" for part in ("overall of 1 tag", "counting")]
    problems = "is not a result of the official GenEval evaluator", "the verdict on", "contradicts itself"
    for text in (*(f"{good}\n{json.dumps(GENEVAL | change)}" for change in CHANGES), *NO_ROWS):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        outcome = cli("import", "geneval", run, "--from", path)
        refused(outcome, *(problems[:1] if text in NO_ROWS else problems))
        assert "attribute" not in outcome.err


ANSWERS = [
    '[{"question_id": 0, "answer": Infinity}]', '[{"question_id": 0, "answer": 1e999}]',
    '[{"question_id": Infinity, "answer": 1}]', '[{"question_id": 0.5, "answer": 1}]',
    '[{"question_id": 0, "answer": []}]', '[{"question_id": true, "answer": 1}]', '[{"answer": 1}]', "[1]", "{}",
    "[" * 1000 + "]" * 1000, '[{"question_id": 0, "answer": "nan"}]',
    '[{"question_id": 0, "answer": 1}, {"question_id": 0, "answer": 0}]',
    *(f'[{{"question_id": 0, "answer": {answer}}}]' for answer in ("1.5", "-0.1", "true", '"false"')),
]  # fmt: skip


def test_compbench_results_of_another_form_are_refused(tmp_path, cli):
    run, path = a_run(tmp_path, colour("a red cup")), tmp_path / "out/color/annotation_blip/vqa_result.json"
    path.parent.mkdir(parents=True)
    path.write_text('[{"question_id": "0", "answer": "0.5"}]')
    assert cli("import", "t2i-compbench", run, "--from", tmp_path / "out").code == 0
    problems = "is not a result of the official scripts", "the answer to question", "contradicts itself"
    for rows in ANSWERS:
        path.write_text(rows)
        refused(cli("import", "t2i-compbench", run, "--from", tmp_path / "out"), *problems)


def test_cvtg_goes_out_in_its_layout(tmp_path, cli):
    kinds, to = ("CVTG-2", "CVTG-Style-5"), tmp_path / "out"
    run = a_run(tmp_path, *(Prompt(kind, "a sign", kind, {"line": 7}) for kind in kinds))
    assert cli("export", "cvtg-2k", run, "--to", to).out.strip() == str(to)
    assert files(to) == {"sample-0/CVTG/2/7.png", "sample-0/CVTG-Style/5/7.png"}


def test_tiif_goes_out_in_its_layout_and_answers_come_back_as_its_program_counts_them(tmp_path, cli):
    """Two kinds of a group have equal weight; questions of a kind are pooled."""
    right = {("color+2d", 0): [1, 1, 1, 0], ("color+2d", 1): [0, 0], ("color+3d", 0): [1], ("text", 0): [1, 0]}
    about = {kind + str(line): (kind, line) for kind, line in right}
    prompts = [Prompt(name, name, kind, {"line": n, "length": "short"}) for name, (kind, n) in about.items()]
    run, to = a_run(tmp_path, *prompts), tmp_path / "out"
    assert cli("export", "tiif", run, "--to", to).code == 0
    assert files(to) == {f"{kind}/sample-0/short_description/{line}.png" for kind, line in right}
    for (kind, line), answers in right.items():
        path = to / "sample-0" / kind / "short" / f"{line}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        pred = ["Yes" if right else "no" for right in answers]
        path.write_text(json.dumps({"gt_answers": ["yes"] * len(pred), "model_pred": pred}))
    scores = {row["metric"]: row["value"] for row in json.loads(cli("import", "tiif", run, "--from", to, "--json").out)}
    assert scores["tiif[official]:short attribute+relation"] == pytest.approx((3 / 6 + 1) / 2)
    assert scores["tiif[official]:short"] == pytest.approx((0.75 + 0.5) / 2)
    path.write_text('{"gt_answers": ["yes"], "model_pred": ["maybe"]}')
    refused(cli("import", "tiif", run, "--from", to), "is not a result of TIIF-Bench's program")
    path.unlink()
    refused(cli("import", "tiif", run, "--from", to), "text/short/0.json is missing")


def verdicts(path: Path, right: set[int]) -> Path:
    row = GENEVAL | {"prompt": None}
    names = [f"{line:05d}/samples/0000.png" for line in range(2 * len(TAGS))]
    rows = [row | {"filename": name, "correct": line in right} for line, name in enumerate(names)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_imported_scores_of_two_runs_are_one_column_and_compare_and_a_second_import_replaces_the_first(tmp_path, cli):
    about = {"include": [{"class": "cup", "count": 1}]}
    prompts = [Prompt(f"p{n}", "a cup", TAGS[n % 6], {**about, "line": n}) for n in range(2 * len(TAGS))]
    runs = [synthetic.pictured(tmp_path / "o", prompts, spec=spec) for spec in (synthetic.AR, synthetic.SJD)]
    for run, right in zip(runs, ({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5, 6, 7}), strict=True):
        assert cli("import", "geneval", run, "--from", verdicts(tmp_path / f"{run.name}.jsonl", right)).code == 0
    [row] = [row for row in compare_runs(*runs) if row.name == "geneval[official]"]
    assert row.value == pytest.approx(3 / 12) and row.n == 12 and len(score_columns(report_rows(runs))) == 1
    [old] = (runs[0] / "scores").glob("geneval[[]*.parquet")
    table = pq.read_table(old)  # of a version that took the fingerprint of the results' file
    older = table.set_column(table.schema.get_field_index("fingerprint"), "fingerprint", [["4a92abd5"] * len(table)])
    pq.write_table(older, old.with_name("geneval[official]-4a92abd5.parquet"))
    [features] = (runs[0] / "image_scores").iterdir()
    shutil.copytree(features, features.with_name("geneval[official]-4a92abd5"))
    assert {row["fingerprint"] for row in read_scores(runs[0])} > {"4a92abd5"}
    (tmp_path / "part.jsonl").write_text(json.dumps(GENEVAL | {"prompt": None}))
    refused(cli("import", "geneval", runs[0], "--from", tmp_path / "part.jsonl"), "has no result for 00001")
    assert compare_runs(*runs)[-1].value == row.value, "what is refused replaces nothing"
    next((runs[0] / "images").iterdir()).unlink()
    assert cli("import", "geneval", runs[0], "--from", verdicts(tmp_path / "b.jsonl", {0})).code == 0
    [whole] = [row for row in read_scores(runs[0]) if row["metric"] == "geneval[official]"]
    assert whole["value"] == pytest.approx(1 / 12) and len([*(runs[0] / "image_scores").iterdir()]) == 1
