"""DPG-Bench (Hu et al. 2024, after DSG, Cho et al. 2024): export images for the released program, and score the answers
of the program's judge, mPLUG-large. The program differs from the paper in two points: it skips the first row of its
table, and category scores use only the last image of each grid."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import SpecbenchError
from specbench.metrics import base
from specbench.metrics.base import MEAN_OF_IMAGES, RESULTS_FILE, PerImageMetric, Sample, Score
from specbench.system.images import png_bytes

TABLE_COLUMNS = ("item_id", "proposition_id", "dependency", "tuple", "question_natural_language")
"""Columns of the published table that the program reads."""
GRID_IMAGES = 4  # Number of images in a grid, which is filled row by row
_VERDICT = re.compile(r"(.+), \((\d{1,6}), (\d{1,6}), (\d{1,6}), (\d{1,6})\), (.+), (.*)")
Question = Mapping[str, Any]
Answers = Mapping[int, bool]  # {question id: whether the judge answered yes}


def read_verdict(line: str) -> tuple[str, int, str, str]:
    """Parse a line of the released program's `_detail.txt` (path of the grid, crop, question, answer). Return item,
    number of the image in its grid, question and answer. Raise a ValueError for other lines."""
    match = _VERDICT.fullmatch(line)
    if match is None:
        raise ValueError("every line is: path, (left, top, right, bottom), question, answer")
    left, top, right, bottom = (int(match[place]) for place in range(2, 6))
    side = right - left
    if side <= 0 or bottom - top != side or left not in (0, side) or top not in (0, side):
        raise ValueError(f"({left}, {top}, {right}, {bottom}) is not a quarter of a 2x2 grid")
    return re.split(r"[/\\]", match[1])[-1].partition(".")[0], (left + 2 * top) // side, match[6], match[7]


def dpg_score(questions: Sequence[Question], answers: Answers, strict: bool = False) -> float:
    """Compute the fraction of questions answered yes. A question also counts as no if a parent question counts as no.
    If `strict`, raise a KeyError for a parent without an answer."""
    scores = {question["id"]: answers[question["id"]] for question in questions}
    for question in questions:
        if any(not scores[parent] for parent in question["parents"] if parent and (strict or parent in scores)):
            scores[question["id"]] = False
    return sum(scores.values()) / len(scores)


def released_score(questions: Sequence[Question], answers: Answers) -> float | None:
    """Compute the released program's score of an image; None if the program fails and skips the image."""
    try:
        return dpg_score(questions, answers, strict=True)
    except (KeyError, ZeroDivisionError):
        return None


def questions_of(prompt_id: str, meta: Mapping[str, Any]) -> list[Question]:
    """Return the questions in a prompt's metadata; of questions with the same id only the last, as in the program."""
    questions = meta["questions"]
    try:
        whole = bool(questions) and all(
            isinstance(question["question"], str) and isinstance(question["tuple"], str)
            and all(type(number) is int for number in (question["id"], *question["parents"]))
            for question in questions
        )  # fmt: skip
    except (TypeError, KeyError):
        whole = False
    if not whole:
        what = f"prompt '{prompt_id}' has no questions of DPG-Bench"
        raise SpecbenchError(what, "use the prompt set that has questions: specbench fetch dpg-bench")
    return list({question["id"]: question for question in questions}.values())


def grid_files(rows: Sequence[Any]) -> Iterator[tuple[bytes, *tuple[str, ...]]]:
    """Make the program's input files: `images/<prompt id>.png`, a 2x2 grid of a prompt's samples, row by row, and
    `questions.csv`, the table of these prompts. `rows`: the samples in order, grouped by prompt, each with `prompt_id`,
    `sample`, `meta` and `pixels()`."""
    grids = {name: list(mine) for name, mine in groupby(rows, key=lambda row: row.prompt_id)}
    samples, side = 1 + max(row.sample for row in rows), rows[0].pixels().shape[0]
    for name, mine in grids.items():
        if len(mine) != samples or samples > GRID_IMAGES:
            what = f"prompt '{name}' has {len(mine)} of {samples} images"
            raise SpecbenchError(what, "a grid needs equally many samples of each prompt, at most four; finish the run")
    lines = [
        (name, question["id"], ",".join(map(str, question["parents"])), question["tuple"], question["question"])
        for name, mine in grids.items()
        for question in questions_of(name, mine[0].meta)
    ]
    table = io.StringIO()
    csv.writer(table).writerows([TABLE_COLUMNS, *lines[:1], *lines])  # the program skips the first row
    yield table.getvalue().encode(), "questions.csv"
    for name, mine in grids.items():
        grid = np.zeros((2 * side, 2 * side, 3), np.uint8)
        for place, row in enumerate(mine):
            if (pixels := row.pixels()).shape != (side, side, 3):
                what = f"an image of '{name}' has {pixels.shape[1]} x {pixels.shape[0]} pixels"
                raise SpecbenchError(what, f"a grid needs square images of one size, here {side}")
            top, left = side * (place // 2), side * (place % 2)
            grid[top : top + side, left : left + side] = pixels
        yield png_bytes(grid), "images", f"{name}.png"


class OfficialDpgBench(PerImageMetric):
    """DPG-Bench's scores from its judge's answers: `dpg-bench` by the paper's rule, `dpg-bench[released]` by the
    released program's rule. `verdicts`: {(prompt, number of the image): {question: answer}} of images in the run's
    `rows`. `digest`: digest of the file of answers."""

    name = "dpg-bench"
    columns: ClassVar = {"value": pa.float32(), "released": pa.float32(), "answers": pa.string()}

    def __init__(self, verdicts: Mapping[tuple[str, int], Mapping[str, str]], digest: str, rows: pd.DataFrame):
        super().__init__()
        self.digest, self._verdicts = digest, verdicts
        images = {(row.prompt_id, int(row.sample)) for row in rows.itertuples()}
        for name, sample in sorted(verdicts.keys() - images)[:1]:
            what = f"the results contain image {sample} of '{name}', which the run does not have"
            raise SpecbenchError(what, "import results that were computed from an export of this run")

    def identity(self) -> Mapping[str, str]:
        return {"program": "DPG-Bench's program", "score": MEAN_OF_IMAGES, RESULTS_FILE: self.digest}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return "questions" in meta and "line" in meta

    def features_of(self, sample: Sample) -> dict[str, object]:
        questions = questions_of(sample.prompt_id, sample.meta)
        verdicts, first = self._verdicts.get((sample.prompt_id, sample.sample), {}), sample.meta["line"] == 0
        unanswered = [question["question"] for question in questions if question["question"] not in verdicts]
        if unanswered and not first:  # the program skips a question of the first item
            about = f"image {sample.sample} of '{sample.prompt_id}'"
            what = f"for {about}, the results have no answer to '{unanswered[0]:.80}'"
            raise SpecbenchError(what, "the program skips grids that it cannot read; see its output")
        answered = [question for question in questions if question["question"] in verdicts]
        answers = {question["id"]: verdicts[question["question"]] == "yes" for question in answered}
        kinds = {
            kind: [[_category(question), answers[question["id"]]] for question in those if question["id"] in answers]
            for kind, those in (("value", questions), ("released", questions[first:]))
        }
        return {
            "value": None if unanswered else dpg_score(questions, answers),
            "released": released_score(questions[first:], answers),
            "answers": json.dumps(kinds),
        }

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        scores: list[Score] = []
        for column, name in {"value": self.name, "released": f"{self.name}[released]"}.items():
            rows = statistics[statistics[column].notna()]
            if rows.empty:
                continue
            left_out = len(statistics) - len(rows)
            note = f"{left_out} images are omitted: the program did not ask all of their questions"
            scores.append(replace(base.mean_score(name, rows, column), note=note if left_out else None))
            if column == "released":
                rows = rows[rows["sample"] == rows["sample"].max()]
            scores += base.answer_scores(name, rows, (json.loads(text)[column] for text in rows["answers"]))
        return scores


def _category(question: Question) -> str:
    """Return the category of a question: the beginning of its tuple, without details."""
    return str(question["tuple"]).partition("(")[0].partition("-")[0].strip()
