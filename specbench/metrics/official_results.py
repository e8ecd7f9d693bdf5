"""Read results of official programs that write tables or answers per image: WISE, OneIG-Bench and LongText-Bench.

LongText-Bench's network, Qwen2.5-VL-7B, is not run: answers that its program stored are scored."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import SpecbenchError
from specbench.metrics.base import MEAN_OF_IMAGES, RESULTS_FILE, Metric, Sample, Score, mean_score, part_scores
from specbench.metrics.reference import with_influence
from specbench.prompts.public_files import ONEIG_CATEGORIES
from specbench.stats import Estimate
from specbench.system.digests import digest_of
from specbench.system.files import blaming, read_regular, text_of
from specbench.system.images import png_bytes
from specbench.system.json_values import parse_json

MAX_LINES = 10**5  # No benchmark has more prompts; file names have a number of five digits
_MAX_RESULTS_BYTES = 2**30
_WISE_PROMPTS = 1000
_WISE_MARKS: Mapping[str, Mapping[str, float]] = {
    "verified": {"score": 1.0},
    "legacy": {"consistency": 0.35, "realism": 0.1, "aesthetic_quality": 0.05},
}
"""{release of WISE: {mark of an image: weight in its score}}. The highest marks give a score of 1."""
_ONEIG_FOLDERS = {"style": "anime", "text": "text", "reasoning": "reasoning"}
"""{dimension: image folder}, for dimensions whose tables do not name the folder."""
_LONGTEXT_IMAGE = re.compile(r"([0-9]{1,4})_([1-9][0-9]{0,4})\.png$")
_LONGTEXT_REMOVED = re.compile(r"[^\u4e00-\u9fa5a-zA-Z0-9\sàâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ]")


class OfficialWise(Metric):
    """Scores of WISE's evaluator by field, and, only if the run has all prompts, their mean over prompts. In this mean,
    as in the program, a field's weight is its share of the prompts. `release`: "verified" (0 or 1) or "legacy" (WiScore
    of three marks). `results`: the exported folder, with `*_results.jsonl` in each `sample-<number>`."""

    columns: ClassVar = {"value": pa.float32()}

    def __init__(self, release: Literal["verified", "legacy"], results: Path):
        super().__init__()
        self.name, self.release, self.results = f"wise[{release}]", release, results
        self._files, self._scores = sorted(results.glob("sample-*/**/*_results.jsonl")), dict[tuple[str, int], float]()
        if not self._files:
            raise SpecbenchError(f"{results} contains no official results", "expected sample-0/.../*_results.jsonl")
        weights, folders = _WISE_MARKS[release], [path.relative_to(results).parts[0] for path in self._files]
        allowed = range(1 + round(1 / sum(weights.values())))
        for folder, path in zip(folders, self._files, strict=True):
            with blaming(path, f"is not a result of WISE's {release} evaluator ({{}})"):
                for row in json_rows(path):
                    number, marks = row.get("prompt_id"), list[Any](map(row.get, weights))
                    if type(number) is not int or any(type(x) not in (int, float) or x not in allowed for x in marks):
                        raise ValueError(
                            f"every line needs prompt_id, and {', '.join(weights)} from 0 to {allowed[-1]}"
                        )
                    value = sum(weight * mark for weight, mark in zip(weights.values(), marks, strict=True))
                    first = self._scores.setdefault((folder, number), value)
                    refuse_contradiction(path, f"the score of prompt {number}", value, first)

    def identity(self) -> Mapping[str, str]:
        return imported(f"WISE's {self.release} evaluator", self.results, self._files) | {"score": MEAN_OF_IMAGES}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return meta.get("wise") == self.release and "line" in meta

    def features_of(self, sample: Sample) -> dict[str, object]:
        place = f"sample-{sample.sample}", official_line(sample.prompt_id, sample.meta)
        if place not in self._scores:
            what = f"{self.results} has no score of {place[0]}/{place[1]}.png"
            raise SpecbenchError(what, "run the evaluator again: it only evaluates images without a score")
        return {"value": self._scores[place]}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        whole = statistics["prompt_id"].nunique() == _WISE_PROMPTS  # the program only prints the mean over all prompts
        overall = [mean_score(self.name, statistics, "value")] if whole else []
        return overall + part_scores(self.name, statistics, "category", "value")


def oneig_files(rows: Sequence[Any]) -> Iterator[tuple[bytes, *tuple[str, ...]]]:
    """Make files for OneIG-Bench's program: `<folder>/<run>/<number>.png`, with a prompt's samples side by side, as for
    `--image_grid <samples>,1`. `rows`, grouped by prompt: `run`, `prompt_id`, `sample`, `category`, `pixels()`."""
    folders = {category: folder for folder, category in ONEIG_CATEGORIES.items()}
    samples = 1 + max(row.sample for row in rows)
    rows = sorted(rows, key=lambda row: (row.prompt_id, row.sample))
    for (name, category, run), mine in groupby(rows, key=lambda row: (row.prompt_id, row.category, row.run.name)):
        images = [row.pixels() for row in mine]
        if len(images) != samples or len({pixels.shape for pixels in images}) > 1:
            what = f"prompt '{name}' has {len(images)} of {samples} images, or images of several sizes"
            raise SpecbenchError(what, "a grid needs the same number of samples of each prompt; finish the run")
        yield png_bytes(np.concatenate(images, axis=1)), folders[category], run, f"{name.rpartition('-')[2]}.png"


class OfficialOneig(Metric):
    """Scores of OneIG-Bench's program: means over prompts by dimension. For text the score is the number that the
    program prints, because it cannot be computed from values per prompt. `results`: folder of the program's tables;
    `run`: name of the model in the tables; `prompts`: ids of the run's prompts."""

    name = "oneig[official]"
    columns: ClassVar = dict.fromkeys(("alignment", "text", "diversity", "style", "reasoning"), pa.float32())

    def __init__(self, results: Path, run: str, prompts: Iterable[str]):
        super().__init__()
        self.results, self.run, self._files = results, run, list[Path]()
        self._values = {dimension: self._read(dimension) for dimension in self.columns}
        if not self._files:
            raise SpecbenchError(f"{results} contains no official results", "expected alignment_prompt_score_EN*.csv")
        for name in sorted(set().union(*self._values.values()) - set(prompts))[:1]:
            what = f"the results contain '{name}', which the run does not have"
            raise SpecbenchError(what, "import results that were computed from an export of this run")

    def _read(self, dimension: str) -> dict[str, float]:
        """Read {prompt: value} of a dimension; for text, every prompt has the program's single number."""
        file = f"{dimension}_prompt_score_EN*.csv"
        try:
            table = {label: cell for label, cell in self._table(file).items() if cell}
            if table and dimension == "text":
                models = self._table(file := "text_score_EN*.csv")
                if self.run not in models:
                    raise ValueError(f"about {', '.join(models) or 'no model':.200}, not about '{self.run}'")
                table = dict.fromkeys(table, models[self.run])
            places = [((x := label.rpartition("_"))[0] or _ONEIG_FOLDERS[dimension], x[2]) for label in table]
            values = [float(cell) for cell in table.values()]
            if wrong := [value for value in values if not -1 <= value <= 1]:
                raise ValueError(f"{wrong[0]:g} is not a number from -1 to 1")
            return {f"{ONEIG_CATEGORIES[x]}-{n}": value for (x, n), value in zip(places, values, strict=True)}
        except (LookupError, ValueError, csv.Error) as error:
            raise SpecbenchError(f"{self.results}/{file} is not a file of OneIG-Bench's program: {error}") from None

    def _table(self, pattern: str) -> dict[str, str]:
        """Read {row: cell} from a table's column named after the run, or else "text score"; empty without a file."""
        files = sorted(self.results.glob(pattern))
        if len(files) > 1:
            raise ValueError(f"there are {len(files)} such files; keep only one")
        self._files += files
        if not files:
            return {}
        head, *rows = [*csv.reader(read_results(files[0]).splitlines())] or [[]]
        column = next((head.index(name) for name in (self.run, "text score") if name in head), None)
        if column is None:
            raise ValueError(f"about {', '.join(head[1:]) or 'no model':.200}, not about '{self.run}'")
        table = {row[0]: row[column] for row in rows}
        if len(table) < len(rows) or any(len(row) != len(head) for row in rows):
            raise ValueError("two rows have the same name, or their columns differ from the first row's")
        return table

    def identity(self) -> Mapping[str, str]:
        return imported("OneIG-Bench's program", self.results, self._files)

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return category in ONEIG_CATEGORIES.values()

    def features_of(self, sample: Sample) -> dict[str, object]:
        return {dimension: values.get(sample.prompt_id) for dimension, values in self._values.items()}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        rows = statistics.drop_duplicates("prompt_id")  # a prompt's value covers all its images
        filled = [dimension for dimension in self.columns if rows[dimension].notna().any()]
        scores = [mean_score(f"{self.name}:{name}", rows.dropna(subset=name), name) for name in filled]
        return [
            replace(score, estimate=Estimate(score.estimate.value, None, None)) if name == "text" else score
            for name, score in zip(filled, scores, strict=True)
        ]


class OfficialLongText(Metric):
    """LongText-Bench's scores from its network's answers: share of the requested words that the answers contain, over
    all images. `longtext-bench`: without the stock phrases that the program intends to remove from the answers.
    `longtext-bench[released]`: as in the program, which removes fewer phrases. `results`: its `results.jsonl`."""

    name = "longtext-bench"
    columns: ClassVar = dict.fromkeys(("words", "found", "released"), pa.int32())

    def __init__(self, results: Path):
        super().__init__()
        self.results, self._answers = results, dict[tuple[str, int], tuple[str, str]]()
        with blaming(results, "is not a result of LongText-Bench's program ({})"):
            for row in json_rows(results):
                image, prompt, answer = texts = list[Any](map(row.get, ("image", "prompt", "ocr_results")))
                place = _LONGTEXT_IMAGE.search(str(image))
                if place is None or not all(isinstance(text, str) for text in texts):
                    raise ValueError("every line needs prompt, ocr_results, and an image <prompt>_<number>.png")
                key = str(int(place[1])), int(place[2]) - 1
                _, first = self._answers.setdefault(key, (prompt, answer))
                refuse_contradiction(results, f"the answer about {place[0]}", answer, first)

    def identity(self) -> Mapping[str, str]:
        return {"program": "LongText-Bench's program", RESULTS_FILE: digest_of(self.results)}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return is_longtext(category, meta)

    def features_of(self, sample: Sample) -> dict[str, object]:
        place = sample.prompt_id.lstrip("0") or "0", sample.sample  # users' file names may lack leading zeros
        prompt, answer = self._answers.get(place, ("no prompt", ""))
        if prompt != sample.prompt:
            what = f"{self.results}: the answer about image {sample.sample} of '{sample.prompt_id}' is about "
            raise SpecbenchError(f"{what}'{prompt:.60}', not '{sample.prompt:.60}'", "import the results of this run")
        meant = re.sub("addcriterion|no text recognized", "", answer, flags=re.IGNORECASE)
        wanted, found, released = map(_words, (" ".join(map(str, sample.meta["text"])), meant, answer))
        counts = {"found": (wanted & found).total(), "released": (wanted & released).total()}
        return {"words": wanted.total(), **counts}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        words, prompts, results = statistics["words"], statistics["prompt_id"], []
        for column, name in {"found": self.name, "released": f"{self.name}[released]"}.items():
            value = float(statistics[column].sum() / max(words.sum(), 1))
            influence = (statistics[column] - value * words) / max(words.mean(), 1)
            estimate = with_influence(value, influence, prompts)
            results.append(Score(name, estimate, len(words), prompts=prompts.nunique()))
        return results


def is_longtext(category: str | None, meta: Mapping[str, Any]) -> bool:
    """Return whether a prompt is a prompt of LongText-Bench: it lists the texts that the image must show."""
    return isinstance(meta.get("text"), list) and "length" in meta


def _words(text: str) -> Counter[str]:
    """Count the words of an English text as in LongText-Bench: lower case, no punctuation."""
    return Counter(_LONGTEXT_REMOVED.sub("", text).lower().split())


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object per line."""
    for row in (parse_json(line) for line in read_results(path).split("\n") if line.strip()):
        if not isinstance(row, dict):
            raise ValueError("a line is not an object")
        yield row


def imported(program: str, results: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the identity of scores from a program's folder of results."""
    lines = "\n".join(f"{path.relative_to(results)} {digest_of(path)}" for path in files)
    return {"program": program, RESULTS_FILE: sha256(lines.encode()).hexdigest()}


def official_line(prompt_id: str, meta: Mapping[str, Any]) -> int:
    """Return the line number of a prompt in the official file, from its metadata."""
    line = meta["line"]
    if isinstance(line, bool) or not isinstance(line, int) or not 0 <= line < MAX_LINES:
        what = f"prompt '{prompt_id}' has the line {str(line)[:40]!r}, not a whole number from 0 on"
        raise SpecbenchError(what, "'line' is the prompt's number in the official file; `specbench fetch` adds it")
    return line


def refuse_contradiction(path: Path, what: str, value: float | str, before: float | str) -> None:
    if value != before:
        what = f"{path} contradicts itself: {what} is {before} in one line and {value} in another"
        raise SpecbenchError(what, "import the results of one evaluation")


def read_results(path: Path) -> str:
    return text_of(read_regular(path, _MAX_RESULTS_BYTES))
