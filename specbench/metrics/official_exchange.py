"""Export images to the official GenEval and T2I-CompBench++ programs, and import their results.

Imported scores are named `geneval[official]` and `compbench[official]`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from PIL import Image

from specbench.errors import SpecbenchError, unknown_name
from specbench.metrics.base import Metric, Sample, Score
from specbench.metrics.compbench_rules import THREE_IN_ONE, three_in_one
from specbench.metrics.geneval import JudgedMetric
from specbench.metrics.score_store import read_scores
from specbench.metrics.scoring import run_images, score_with
from specbench.prompts.geneval import official_row
from specbench.prompts.t2i_compbench import CATEGORIES
from specbench.stats import mean_interval
from specbench.store.run_store import RunStore
from specbench.system.downloads import digest_of
from specbench.system.images import read_picture

BENCHMARKS = ("geneval", "t2i-compbench")

RESULTS: Mapping[str, str] = {
    "color": "annotation_blip/vqa_result.json",
    "shape": "annotation_blip/vqa_result.json",
    "texture": "annotation_blip/vqa_result.json",
    "spatial": "labels/annotation_obj_detection_2d/vqa_result.json",
    "3d_spatial": "labels/annotation_obj_detection_3d/vqa_result.json",
    "numeracy": "annotation_num/vqa_result.json",
    "non_spatial": "annotation_clip/vqa_result.json",
    "complex": "annotation_3_in_1/vqa_result.json",
}
"""Where the official programs leave the results of a category, under the folder its images were exported to."""

PARTS: Mapping[str, str] = {"blip": RESULTS["color"], "clip": RESULTS["non_spatial"], "spatial": RESULTS["spatial"]}
"""The same of what the score of complex prompts is made of. The official program that combines them takes exactly ten
images a prompt; where it left nothing, the parts are combined here, for any number."""


LOWEST: Mapping[str, float] = {"non_spatial": -1.0, "complex": -1.0, "complex/clip": -1.0}
"""Least possible answer, where it is a cosine or the mean of one with others; elsewhere 0."""


def export_images(benchmark: str, run: Path, target: Path) -> int:
    """Export a run's images for the official evaluator of a benchmark; see `export_geneval`, `export_compbench`.

    Raises:
        SpecbenchError: an unknown benchmark, a run of other prompts, or a folder that is not empty or not writable.
    """
    write = {"geneval": export_geneval, "t2i-compbench": export_compbench}.get(benchmark)
    if write is None:
        raise unknown_name("benchmark", benchmark, BENCHMARKS)
    try:
        return write(run, target)
    except OSError as error:
        raise SpecbenchError(f"cannot write to {target}: {error.strerror or error}") from error


def import_scores(benchmark: str, run: Path, results: Path) -> list[dict[str, object]]:
    """Store the results of a benchmark's official evaluator as scores of a run, and return them.

    Args:
        results: GenEval's results file, or the folder that T2I-CompBench++ was exported to.

    Raises:
        SpecbenchError: an unknown benchmark, or results that do not match the run.
    """
    if benchmark not in BENCHMARKS:
        raise unknown_name("benchmark", benchmark, BENCHMARKS)
    images = run_images(run)
    if benchmark == "geneval":
        metric: Metric = OfficialGenEval(results)
    else:
        metric = OfficialCompBench(results, 1 + int(images.rows["sample"].max()))
    outcome = score_with(images, metric)
    if outcome.skipped:
        raise SpecbenchError(f"the results cannot be scores of {outcome.run_id}: {outcome.skipped}")
    own = (row for row in read_scores(run) if str(row["metric"]).partition(":")[0] == metric.name)
    return [{"run_id": images.name, **row} for row in own]


def export_geneval(run: Path, target: Path) -> int:
    """Export a run's images for the official evaluator: `<line>/metadata.jsonl` and `<line>/samples/<sample>.png`.

    Returns:
        The number of images.

    Raises:
        SpecbenchError: not a run of GenEval prompts, or `target` is not empty.
    """
    rows = _rows(run, target, lambda category, meta: category and "include" in meta and "line" in meta, "GenEval")
    for row in rows:
        folder = target / f"{row.meta['line']:05d}"
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        content = json.dumps(official_row(row.category, row.prompt, row.meta))
        (folder / "metadata.jsonl").write_text(content, encoding="utf-8")
        _save(row.image, folder / "samples" / f"{row.sample:04d}.png")
    return len(rows)


def export_compbench(run: Path, target: Path) -> int:
    """Export a run's images for the official scripts: `<category>/samples/<prompt>_<number>.png`, the number being
    the prompt's line times the images per prompt plus the sample.

    Returns:
        The number of images.

    Raises:
        SpecbenchError: not a run of T2I-CompBench prompts, a prompt lacks a sample, a category lacks a prompt at its
            start (the scripts pair by position), or `target` is not empty.
    """
    rows = _rows(run, target, lambda category, meta: category in CATEGORIES and "line" in meta, "T2I-CompBench")
    for category in dict.fromkeys(row.category for row in rows):
        mine = [row for row in rows if row.category == category]
        samples = _samples_per_prompt(category, mine)
        folder = target / category / "samples"
        folder.mkdir(parents=True)
        for row in mine:
            number = row.meta["line"] * samples + row.sample
            _save(row.image, folder / f"{row.prompt}_{number:06d}.png")
    return len(rows)


class OfficialGenEval(JudgedMetric):
    """The official evaluator's verdicts, joined by folder and file name."""

    name = "geneval[official]"
    summary = "share of right images by the official evaluator, mean over tags"

    def __init__(self, results: Path):
        super().__init__()
        self.results = results
        self._verdicts = _read_geneval(results)

    def identity(self) -> Mapping[str, str]:
        return {"results": digest_of(self.results)}

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        return [self._verdict(sample) for sample in samples]

    def _verdict(self, sample: Sample) -> dict[str, object]:
        key = (sample.meta["line"], sample.sample)
        if key not in self._verdicts:
            raise SpecbenchError(f"{self.results} has no result for {key[0]:05d}/samples/{key[1]:04d}.png")
        found = self._verdicts[key]
        if found.get("prompt", sample.prompt) != sample.prompt:
            raise SpecbenchError(f"{self.results}: {key[0]:05d} is about '{found['prompt']}', not '{sample.prompt}'")
        return {"correct": found["correct"], "reason": found.get("reason", ""), "details": found.get("details")}


class OfficialCompBench(Metric):
    """The official scripts' answers, per category and as the plain mean of the categories that are there.

    Args:
        results: the folder that images were exported to, in which the scripts left theirs.
        samples: images per prompt at export, which their numbering depends on.
    """

    name = "compbench[official]"
    summary = "answers of the official T2I-CompBench++ scripts, mean over images, per category"
    columns: ClassVar = {"value": pa.float32()}

    def __init__(self, results: Path, samples: int):
        super().__init__()
        self.results, self.samples = results, samples
        self._files = {
            category: results / category / file
            for category, file in RESULTS.items()
            if (results / category / file).is_file()
        }
        if "complex" not in self._files:
            parts = {f"complex/{part}": results / "complex" / file for part, file in PARTS.items()}
            self._files |= parts if all(file.is_file() for file in parts.values()) else {}
        self._answers = {name: _read_answers(file, LOWEST.get(name, 0.0)) for name, file in self._files.items()}
        if not self._answers:
            raise SpecbenchError(f"{results} holds no official results", "looked for <category>/" + RESULTS["color"])

    def identity(self) -> Mapping[str, str]:
        return {name: digest_of(file) for name, file in self._files.items()}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return "line" in meta and (category in self._answers or self._combines(category, meta))

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        return [{"value": self._value(sample)} for sample in samples]

    def _combines(self, category: str | None, meta: Mapping[str, object]) -> bool:
        """Whether an answer is combined from the answers of its parts."""
        return category == "complex" and "complex/blip" in self._answers and meta.get("kind") in THREE_IN_ONE

    def _value(self, sample: Sample) -> float:
        number = sample.meta["line"] * self.samples + sample.sample
        if sample.category in self._answers:
            return self._answer(sample.category, number)
        kind = sample.meta["kind"]
        return three_in_one(kind, {part: self._answer(f"complex/{part}", number) for part in THREE_IN_ONE[kind]})

    def _answer(self, name: str, number: int) -> float:
        if number not in self._answers[name]:
            raise SpecbenchError(f"{self._files[name]} has no answer {number}")
        return self._answers[name][number]

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        return [
            Score(f"{self.name}:{category}", mean_interval(rows["value"], rows["prompt_id"]), len(rows))
            for category, rows in statistics.groupby("category", sort=True)
        ]


@dataclass(frozen=True)
class _Row:
    prompt: str
    sample: int
    category: str
    meta: Mapping
    image: Path


def _rows(run: Path, target: Path, fits, what: str) -> list[_Row]:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SpecbenchError(f"{target} is not an empty folder", "the official programs would take in what is there")
    stored = RunStore(run).samples(["prompt", "category", "meta", "status", "image"])
    stored = stored[(stored["status"] == "ok") & stored["image"].notna()]
    rows = [
        _Row(row.prompt, int(row.sample), row.category, json.loads(row.meta), run / row.image)
        for row in stored.itertuples()
        if fits(row.category, json.loads(row.meta))
    ]
    if not rows:
        raise SpecbenchError(f"{run} has no images of {what} prompts")
    return rows


def _samples_per_prompt(category: str, rows: Sequence[_Row]) -> int:
    samples = 1 + max(row.sample for row in rows)
    found = {(row.meta["line"], row.sample) for row in rows}
    prompts = 1 + max(line for line, _ in found)
    if len(found) != prompts * samples:
        raise SpecbenchError(
            f"category '{category}' has {len(found)} images of {prompts} x {samples}",
            "the official scripts need every sample of every prompt from the first on: finish the run",
        )
    return samples


def _save(image: Path, target: Path) -> None:
    pixels: np.ndarray = read_picture(image)
    Image.fromarray(pixels).save(target)


def _read_geneval(path: Path) -> dict[tuple[int, int], dict]:
    verdicts: dict[tuple[int, int], dict] = {}
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            place = re.search(r"(\d+)/samples/(\d+)\.png$", row["filename"])
            key = int(place[1]), int(place[2])
            _refuse_contradiction(path, row["filename"], _verdict(path, row), verdicts.get(key, row)["correct"])
            verdicts[key] = row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecbenchError(f"{path} is not a result of the official GenEval evaluator ({error})") from None
    return verdicts


def _verdict(path: Path, row: Mapping) -> bool:
    if not isinstance(row["correct"], bool):
        raise SpecbenchError(
            f"{path}: the verdict on {row['filename']} is {row['correct']!r:.40}",
            "the official evaluator writes true or false",
        )
    return row["correct"]


def _read_answers(path: Path, lowest: float) -> dict[int, float]:
    """Answers by question, each between `lowest` and 1."""
    answers: dict[int, float] = {}
    try:
        for row in json.loads(path.read_text(encoding="utf-8")):
            number, answer = int(str(row["question_id"])), _answer(path, row, lowest)
            _refuse_contradiction(path, f"question {number}", answer, answers.get(number, answer))
            answers[number] = answer
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecbenchError(f"{path} is not a result of the official scripts ({error})") from None
    return answers


def _answer(path: Path, row: Mapping, lowest: float) -> float:
    """The answer of a line; some of the scripts write it as text."""
    answer = math.nan if isinstance(row["answer"], bool) else float(row["answer"])
    if not lowest <= answer <= 1:
        raise SpecbenchError(
            f"{path}: the answer to question {row['question_id']} is {row['answer']!r:.40}",
            f"the official scripts write numbers from {lowest:g} to 1",
        )
    return answer


def _refuse_contradiction(path: Path, what: str, found: float, before: float) -> None:
    if found != before:
        raise SpecbenchError(
            f"{path} contradicts itself: {what} is {before} in one line and {found} in another",
            "import the results of one evaluation",
        )
