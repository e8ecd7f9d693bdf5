"""Results of official programs that write tables or answers of single images: WISE, OneIG-Bench and LongText-Bench.

LongText-Bench's network, Qwen2.5-VL-7B, is not run here: its program's answers are read and scored."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import SpecbenchError
from specbench.metrics.base import (
    MEAN_OF_IMAGES,
    RESULTS_FILE,
    Metric,
    PerImageMetric,
    Sample,
    Score,
    mean_score,
    part_scores,
)
from specbench.metrics.reference import with_influence
from specbench.prompts.public_files import ONEIG_CATEGORIES
from specbench.stats import Estimate
from specbench.system.digests import digest_of
from specbench.system.files import blaming, read_regular, text_of
from specbench.system.images import png_bytes
from specbench.system.json_values import parse_json

MAX_LINES = 10**5  # Above the number of prompts of any benchmark; file names have five digits for them
_MAX_RESULTS_BYTES = 2**30
_WISE_PROMPTS = 1000
_WISE_MARKS: Mapping[str, Mapping[str, float]] = {
    "verified": {"score": 1.0},
    "legacy": {"consistency": 0.35, "realism": 0.1, "aesthetic_quality": 0.05},
}
"""Marks of an image by WISE's release, with their weights in its score; the highest marks give 1."""
_FRENCH = "àâäéèêëîïôöùûüç"
_LONGTEXT_PLACE = re.compile(r"([0-9]{1,4})_([1-9][0-9]{0,4})\.png$")
_ONEIG_FOLDERS = {"style": "anime", "text": "text", "reasoning": "reasoning"}
"""Folders of images of the dimensions whose tables have no folder in the names of their rows."""


class OfficialWise(PerImageMetric):
    """Scores of WISE's evaluator by field, and over all prompts if a run has them all. The fields' weights in the
    program are their shares of the prompts. `release`: "verified" (0 or 1) or "legacy" (WiScore of three marks);
    `results`: the exported folder, with the evaluator's `*_results.jsonl` in each `sample-<number>`."""

    def __init__(self, release: str, results: Path):
        super().__init__()
        self.name, self.release, self.results = f"wise[{release}]", release, results
        self._files = sorted(results.glob("sample-*/**/*_results.jsonl"))
        if not self._files:
            what = f"{results} holds no results of WISE's evaluator"
            raise SpecbenchError(what, "looked for sample-0/.../natural_science_scores_results.jsonl")
        self._scores: dict[tuple[str, int], tuple[float, object]] = {}
        for path in self._files:
            self._read(path)

    def _read(self, path: Path) -> None:
        weights, folder = _WISE_MARKS[self.release], path.relative_to(self.results).parts[0]
        highest = round(1 / sum(weights.values()))
        with blaming(path, f"is not a result of WISE's {self.release} evaluator ({{}})"):
            for row in json_rows(path):
                number, marks = row.get("prompt_id"), [row.get(name) for name in weights]
                if type(number) is not int or any(type(x) not in (int, float) or x not in range(3) for x in marks):
                    raise ValueError(f"every line has a prompt_id and {', '.join(weights)}, 0 to {highest}")
                if max(marks) > highest:
                    raise ValueError(f"prompt {number} has a mark above {highest}")
                value = sum(weight * mark for weight, mark in zip(weights.values(), marks, strict=True))
                first, _ = self._scores.setdefault((folder, number), (value, row.get("Subcategory")))
                refuse_contradiction(path, f"the score of prompt {number}", value, first)

    def identity(self) -> Mapping[str, str]:
        return imported(f"WISE's {self.release} evaluator", self.results, self._files) | {"score": MEAN_OF_IMAGES}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return meta.get("wise") == self.release and "line" in meta

    def features_of(self, sample: Sample) -> dict[str, object]:
        folder, line = f"sample-{sample.sample}", official_line(sample.prompt_id, sample.meta)
        if (folder, line) not in self._scores:
            what = f"{self.results} has no score of {folder}/{line}.png"
            raise SpecbenchError(what, "run the evaluator again: it asks about images without a score only")
        value, kind = self._scores[folder, line]
        if kind != sample.meta.get("subcategory"):
            what = f"{self.results}: prompt {line} is of '{kind!s:.40}', not of '{sample.meta.get('subcategory')}'"
            raise SpecbenchError(what, "import the results of this run's export")
        return {"value": value}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        whole = statistics["prompt_id"].nunique() == _WISE_PROMPTS  # as the program, which prints no other mean
        overall = [mean_score(self.name, statistics, "value")] if whole else []
        return overall + part_scores(self.name, statistics, "category", "value")


def oneig_files(rows: Sequence[Any]) -> Iterator[tuple[bytes, *tuple[str, ...]]]:
    """Files that OneIG-Bench's program reads: `<folder>/<run>/<number>.png`, the samples of a prompt in a row, as
    `--image_grid <samples>,1` says. `rows`: by prompt: `run`, `prompt_id`, `sample`, `category` and `pixels()`."""
    folders = {category: folder for folder, category in ONEIG_CATEGORIES.items()}
    samples = 1 + max(row.sample for row in rows)
    rows = sorted(rows, key=lambda row: (row.prompt_id, row.sample))
    for name, mine in groupby(rows, key=lambda row: row.prompt_id):
        images = [(row, row.pixels()) for row in mine]
        if len(images) != samples or len({pixels.shape for _, pixels in images}) > 1:
            what = f"prompt '{name}' has {len(images)} images of {samples}, or images of several sizes"
            raise SpecbenchError(what, "a grid holds the same samples of each prompt: finish the run")
        grid, row = np.concatenate([pixels for _, pixels in images], axis=1), images[0][0]
        yield png_bytes(grid), folders[row.category], row.run.name, f"{name.rpartition('-')[2]}.png"


class OfficialOneig(Metric):
    """Scores of OneIG-Bench's program: means over prompts by dimension; that of text is the program's own number,
    which its values by prompt do not determine. `results`: the folder of its tables; `run`: name of the model in
    them, if they have several; `prompts`: ids of the run's prompts."""

    name = "oneig[official]"
    columns: ClassVar = dict.fromkeys(("alignment", "text", "diversity", "style", "reasoning"), pa.float32())

    def __init__(self, results: Path, run: str, prompts: Iterable[str]):
        super().__init__()
        self.results, self.run = results, run
        self._files: list[Path] = []
        self._values = {dimension: self._read(dimension) for dimension in self.columns}
        if not self._files:
            raise SpecbenchError(f"{results} holds no official results", "looked for alignment_prompt_score_EN*.csv")
        for name in sorted(set().union(*self._values.values()) - set(prompts))[:1]:
            what = f"the results are about '{name}', which the run lacks"
            raise SpecbenchError(what, "import the results of this run's export")

    def _read(self, dimension: str) -> dict[str, float]:
        """Values of a dimension by prompt; those of text are the program's number for all of them."""
        values: dict[str, float] = {}
        path, rows = self._table(f"{dimension}_prompt_score_EN*.csv")
        overall = self._table("text_score_EN*.csv")[1] if dimension == "text" and path else {}
        if path is None:
            return {}
        with blaming(path, "is not a table of OneIG-Bench's program ({})"):
            for label, cells in rows.items():
                folder, _, number = label.rpartition("_")
                name = f"{ONEIG_CATEGORIES[folder or _ONEIG_FOLDERS[dimension]]}-{number}"
                cell = cells[self._model(path, cells)]
                if cell and overall:
                    cell = overall[self._model(path, overall)]["text score"]
                if cell:
                    values[name] = float(cell)
                    if not math.isfinite(values[name]):
                        raise ValueError(f"the value of {label} is {cell}")
        return values

    def _table(self, pattern: str) -> tuple[Path | None, dict[str, dict[str, str]]]:
        """Path and cells of a table, by row and column; none if there is no such file."""
        files = sorted(self.results.glob(pattern))
        if len(files) > 1:
            what = f"{self.results} has {len(files)} files {pattern}"
            raise SpecbenchError(what, "leave the tables of one evaluation there")
        if not files:
            if pattern.startswith("text_score"):
                raise SpecbenchError(f"{self.results} has no file {pattern}", "the program writes it next to the other")
            return None, {}
        self._files += files
        with blaming(files[0], "is not a table of OneIG-Bench's program ({})"):
            (_, *heads), *rows = csv.reader(read_results(files[0]).splitlines())
            table = {row[0]: dict(zip(heads, row[1:], strict=True)) for row in rows}
            if not table or len(table) < len(rows):
                raise ValueError("no rows, or two of a name")
        return files[0], table

    def _model(self, path: Path, models: Mapping[str, object]) -> str:
        if self.run not in models and len(models) != 1:
            what = f"{path} has the models {', '.join(models):.200}, not '{self.run}'"
            raise SpecbenchError(what, "specbench export oneig names the folder of images by the run")
        return self.run if self.run in models else next(iter(models))

    def identity(self) -> Mapping[str, str]:
        return imported("OneIG-Bench's program", self.results, self._files)

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return category in ONEIG_CATEGORIES.values()

    def features_of(self, sample: Sample) -> dict[str, object]:
        return {dimension: values.get(sample.prompt_id) for dimension, values in self._values.items()}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        prompts = statistics.drop_duplicates("prompt_id")  # a value of a prompt is about all of its images
        results = []
        for dimension in self.columns:
            rows = prompts.dropna(subset=dimension)
            if len(rows):
                score = mean_score(f"{self.name}:{dimension}", rows, dimension)
                if dimension == "text":
                    score = Score(score.name, Estimate(score.estimate.value, None, None), score.n, None, score.prompts)
                results.append(score)
        return results


class OfficialLongText(Metric):
    """LongText-Bench's scores from its network's answers: the fraction of the words to write that are in the answer, of
    all images. `longtext-bench`: without the phrases that its program means to remove; `longtext-bench[released]`: as
    its program prints, which removes one of them alone. `results`: `results.jsonl`, of either of its scripts."""

    name = "longtext-bench"
    columns: ClassVar = dict.fromkeys(("words", "found", "released"), pa.int32())

    def __init__(self, results: Path):
        super().__init__()
        self.results = results
        self._answers: dict[tuple[str, int], tuple[str, str]] = {}
        with blaming(results, "is not a result of LongText-Bench's program ({})"):
            for row in json_rows(results):
                image, prompt, answer = (row.get(name) for name in ("image", "prompt", "ocr_results"))
                place = _LONGTEXT_PLACE.search(image) if isinstance(image, str) else None
                if place is None or not isinstance(prompt, str) or not isinstance(answer, str):
                    raise ValueError(
                        "every line has a prompt, ocr_results, and an image <prompt>_<number from 1 on>.png"
                    )
                key = f"{int(place[1]):03d}", int(place[2]) - 1
                first = self._answers.setdefault(key, (prompt, answer))
                refuse_contradiction(results, f"the answer about {place[0]}", answer, first[1])

    def identity(self) -> Mapping[str, str]:
        return {"program": "LongText-Bench's program", RESULTS_FILE: digest_of(self.results)}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return is_longtext(category, meta)

    def features_of(self, sample: Sample) -> dict[str, object]:
        prompt, answer = self._answers.get((sample.prompt_id, sample.sample), (None, ""))
        if prompt != sample.prompt:
            name = longtext_name(sample.prompt_id, sample.sample)
            what = f"about '{prompt:.60}', not '{sample.prompt:.60}'" if prompt else "missing"
            raise SpecbenchError(f"{self.results}: the answer about {name} is {what}", "import this run's results")
        wanted = Counter(longtext_words(" ".join(map(str, sample.meta["text"]))))
        meant = re.sub("addcriterion|no text recognized", "", answer, flags=re.IGNORECASE)
        found = {"found": meant, "released": answer}
        return {"words": wanted.total()} | {
            name: (wanted & Counter(longtext_words(text))).total() for name, text in found.items()
        }

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        words, prompts = statistics["words"], statistics["prompt_id"]
        results = []
        for column, name in {"found": self.name, "released": f"{self.name}[released]"}.items():
            value = float(statistics[column].sum() / words.sum())
            estimate = with_influence(value, (statistics[column] - value * words) / words.mean(), prompts)
            results.append(Score(name, estimate, len(words), prompts=prompts.nunique()))
        return results


def is_longtext(category: str | None, meta: Mapping[str, object]) -> bool:
    """True for prompts of LongText-Bench, which have texts to write."""
    return (
        isinstance(meta.get("text"), list)
        and bool(longtext_words(" ".join(map(str, meta["text"]))))
        and "length" in meta
    )


def longtext_name(prompt_id: str, sample: int) -> str:
    """Name of an image for LongText-Bench's program."""
    return f"{prompt_id:0>4}_{sample + 1}.png"


def longtext_words(text: str) -> list[str]:
    """Words that LongText-Bench counts in an English text: without case, and without characters other than letters of
    English, French and Chinese, and digits."""
    return re.sub(rf"[^\u4e00-\u9fa5a-zA-Z0-9\s{_FRENCH}{_FRENCH.upper()}]", "", text).lower().split()


def json_rows(path: Path) -> Iterator[dict]:
    """Objects of a file with one JSON object a line."""
    for row in (parse_json(line) for line in read_results(path).split("\n") if line.strip()):
        if not isinstance(row, dict):
            raise ValueError("a line is no object")
        yield row


def imported(program: str, results: Path, files: Iterable[Path]) -> dict[str, str]:
    """The identity of scores from a program's folder of results."""
    lines = "\n".join(f"{path.relative_to(results)} {digest_of(path)}" for path in files)
    return {"program": program, RESULTS_FILE: sha256(lines.encode()).hexdigest()}


def official_line(prompt_id: str, meta: Mapping) -> int:
    """Number of a prompt in the official file, from its metadata."""
    line = meta["line"]
    if isinstance(line, bool) or not isinstance(line, int) or not 0 <= line < MAX_LINES:
        what = f"prompt '{prompt_id}' has the line {str(line)[:40]!r}, not a whole number from 0 on"
        raise SpecbenchError(what, "'line' is the prompt's number in the official file, as `specbench fetch` brings it")
    return line


def refuse_contradiction(path: Path, what: str, value: float | str, before: float | str) -> None:
    if value != before:
        what = f"{path} contradicts itself: {what} is {before} in one line and {value} in another"
        raise SpecbenchError(what, "import the results of one evaluation")


def read_results(path: Path) -> str:
    return text_of(read_regular(path, _MAX_RESULTS_BYTES))
