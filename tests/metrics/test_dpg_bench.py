"""DPG-Bench: the layout that its program takes, the rule on its judge's answers, and refusals of other answers."""

import csv
import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import published
import pytest
import synthetic
from PIL import Image

from specbench.metrics.dpg_bench import dpg_score, released_score
from specbench.prompts import Prompt
from specbench.prompts.public_files import read_dpg_bench
from specbench.stats import Estimate, prompts_for_change


@pytest.fixture
def prompts(tmp_path) -> list[Prompt]:
    return read_dpg_bench(published.write("dpg-bench", tmp_path / "set"))


def a_run(out: Path, prompts: list[Prompt], samples: int = 4, shape: tuple[int, int] = (8, 8)) -> Path:
    draw = np.random.default_rng(0)

    def picture(number: int) -> np.ndarray:
        return draw.integers(0, 255, (3, *shape), dtype=np.uint8)

    return synthetic.pictured(out / "results", prompts, samples, picture=picture)


def judged(folder: Path, answer) -> list[str]:
    """The lines that the released program writes about an exported folder; `answer`: of item, image and question."""
    with (folder / "questions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[1:]  # pandas' row 0 is skipped
    lines = []
    for path, place in itertools.product(sorted((folder / "images").iterdir()), range(4)):
        side = Image.open(path).width // 2
        left, top = side * (place % 2), side * (place // 2)
        crop = (left, top, left + side, top + side)
        for row in rows:
            if row["item_id"] == path.stem:
                text = row["question_natural_language"]
                lines.append(f"{path}, {crop}, {text}, {answer(path.stem, place, row)}")
    return lines


def by_chance(item: str, place: int, row: dict) -> str:
    return ("yes", "no", "yes")[hashlib.sha256(f"{item}{place}{row['proposition_id']}".encode()).digest()[0] % 3]


def imported(cli, run: Path, path: Path) -> dict[str, float]:
    outcome = cli("import", "dpg-bench", run, "--from", path, "--json")
    assert outcome.code == 0, outcome.err
    return {row["metric"]: row["value"] for row in json.loads(outcome.out)}


def test_a_grid_holds_the_samples_row_by_row_and_the_table_a_row_to_skip(tmp_path, cli, prompts):
    run = a_run(tmp_path, prompts)
    assert cli("export", "dpg-bench", run, "--to", tmp_path / "out").code == 0
    grid = np.asarray(Image.open(tmp_path / "out/images/partiprompts7.png"))
    quarters = grid[:8, :8], grid[:8, 8:], grid[8:, :8], grid[8:, 8:]
    for sample, quarter in enumerate(quarters):
        assert np.array_equal(quarter, np.asarray(Image.open(run / f"images/partiprompts7-{sample}.png")))
    with (tmp_path / "out/questions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == rows[1] and len(rows) == 6
    assert (rows[5]["dependency"], rows[5]["tuple"]) == ("1,2", "relation - spatial (dogs, cat, near)")


@pytest.mark.parametrize("count", [3, 10])
def test_prompts_behind_a_category_are_counted_not_its_answers(tmp_path, cli, count):
    questions = [{"id": n, "parents": [0], "tuple": f"entity - {n}", "question": f"is {n}?"} for n in range(1, 11)]
    prompts = [Prompt(f"p{n}", f"text {n}", None, {"line": n + 1, "questions": questions}) for n in range(count)]
    run = a_run(tmp_path, prompts)
    cli("export", "dpg-bench", run, "--to", tmp_path / "out")
    (tmp_path / "d.txt").write_text("\n".join(judged(tmp_path / "out", by_chance)))
    outcome = cli("import", "dpg-bench", run, "--from", tmp_path / "d.txt", "--json")
    scores = {row["metric"]: row for row in json.loads(outcome.out)}
    for name, n in (("dpg-bench:entity", 4 * count), ("dpg-bench[released]:entity", count)):
        shown = scores[name]
        assert shown["n"] == n and shown["too_few"] == (count < 8) == (shown["low"] is None)
        estimate = Estimate(shown["value"], shown["low"], shown["high"])
        assert shown["prompts_needed"] == prompts_for_change(estimate, count)


def test_scores_match_the_rule_and_the_released_program(tmp_path, cli, prompts):
    run = a_run(tmp_path, prompts)
    cli("export", "dpg-bench", run, "--to", tmp_path / "out")
    (tmp_path / "d.txt").write_text("\n".join(judged(tmp_path / "out", by_chance)))
    scores = imported(cli, run, tmp_path / "d.txt")
    yes = {
        (prompt.id, place, q["id"]): by_chance(prompt.id, place, {"proposition_id": str(q["id"])}) == "yes"
        for prompt in prompts for place in range(4) for q in prompt.meta["questions"]
    }  # fmt: skip
    cup = [np.mean([yes["0", s, 1], yes["0", s, 1] and yes["0", s, 2]]) for s in range(4)]
    both = [(yes["partiprompts7", s, 1], yes["partiprompts7", s, 2]) for s in range(4)]
    dogs = [np.mean([*two, all(two) and yes["partiprompts7", s, 3]]) for s, two in enumerate(both)]
    assert scores["dpg-bench"] == pytest.approx(np.mean(cup + dogs))
    assert scores["dpg-bench:attribute"] == np.mean([yes["0", s, 2] for s in range(4)])
    assert scores["dpg-bench[released]"] == pytest.approx(np.mean(dogs)), "it fails on the first item"
    assert scores["dpg-bench[released]:relation"] == yes["partiprompts7", 3, 3], "of the last image only"
    assert "dpg-bench[released]:attribute" not in scores
    (tmp_path / "e.txt").write_text((tmp_path / "d.txt").read_text().replace("near it?, yes", "near it?, no"))
    assert imported(cli, run, tmp_path / "e.txt") != scores, "of the file that is imported, not of the earlier file"


def test_a_question_below_a_no_counts_as_no_down_to_its_grandchildren():
    questions = [{"id": 1, "parents": [0]}, {"id": 2, "parents": [1]}, {"id": 3, "parents": [2]}]
    assert dpg_score(questions, {1: False, 2: True, 3: True}) == 0
    assert dpg_score(questions, {1: True, 2: True, 3: True}) == 1
    assert released_score(questions[1:], {1: True, 2: True, 3: True}) is None, "it fails, and leaves the image out"


def changes(lines: list[str]) -> dict[str, list[str]]:
    """Answers that are refused, by what is wrong with them."""
    return {
        "a grid is missing": [line for line in lines if "partiprompts7" not in line],
        "an image is missing": [line for line in lines if "(8, 8," not in line],
        "other prompts": [line.replace("partiprompts7", "stanford7") for line in lines],
        "another question": [line.replace("Are they near it?", "Are they above it?") for line in lines],
        "not a quarter": [line.replace("(8, 8, 16, 16)", "(8, 8, 24, 24)") for line in lines],
        "another form": [*lines, "DPG-Bench score: 84.2"],
        "another scale": [line.replace(", yes", ", 0.9").replace(", no", ", 0.2") for line in lines],
        "two answers": [*lines, lines[0].rpartition(",")[0] + ", maybe"],
        "nothing": [],
    }


def test_other_answers_and_answers_about_other_images_are_refused_whole(tmp_path, cli, prompts):
    run, path = a_run(tmp_path, prompts), tmp_path / "d.txt"
    cli("export", "dpg-bench", run, "--to", tmp_path / "out")
    for kind, lines in changes(judged(tmp_path / "out", by_chance)).items():
        path.write_text("\n".join(lines))
        outcome = cli("import", "dpg-bench", run, "--from", path)
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and "a bug" not in outcome.err, (kind, outcome.err)
        assert not list(run.glob("scores/*")), "nothing is half-imported"


@pytest.mark.parametrize(("samples", "shape", "problem"), [
    (5, (8, 8), "at most 4 (use"), (2, (8, 6), "6 x 8 pixels"), (0, (8, 8), "no images"),
])  # fmt: skip
def test_what_is_no_grid_is_refused(tmp_path, cli, prompts, samples, shape, problem):
    outcome = cli("export", "dpg-bench", a_run(tmp_path, prompts, samples, shape), "--to", tmp_path / "out")
    assert outcome.code == 2 and problem in outcome.err and not (tmp_path / "out").exists()
