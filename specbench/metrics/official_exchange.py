"""Export images to the official programs of benchmarks, and import their results.

Imported scores are named `geneval[official]`, `compbench[official]`, `tiif[official]`, `dpg-bench` and
`dpg-bench[released]`; see `official_results` for further programs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import SpecbenchError, read_name
from specbench.metrics import official_results
from specbench.metrics.base import RESULTS_FILE, Metric, Sample, Score, made_score, part_scores
from specbench.metrics.catalog import BENCHMARKS
from specbench.metrics.dpg_bench import OfficialDpgBench, grid_files, read_verdict
from specbench.metrics.export_folder import export_files
from specbench.metrics.geneval import JudgedMetric
from specbench.metrics.official_results import imported, json_rows, official_line, read_results, refuse_contradiction
from specbench.metrics.reference import with_influence
from specbench.metrics.score_store import forget, scores_to_show
from specbench.metrics.scoring import run_images, samples_of, score, why_unfit
from specbench.prompts.public_files import COMPBENCH_CATEGORIES, ONEIG_CATEGORIES, official_row
from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import RowStatus, image_name, read_meta
from specbench.system.digests import digest_of
from specbench.system.files import blaming
from specbench.system.images import png_bytes
from specbench.system.json_values import parse_json

Files = Iterator[tuple[bytes, *tuple[str, ...]]]
"""Exported files: (content, folder names..., file name)."""
_GENEVAL_TEXTS = ("filename", "prompt", "reason", "details")
_ANSWER = {"question_id", "answer"}
_LENGTHS = ("short", "long")
_TIIF_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("color", "shape", "texture"), "attribute"),
    **dict.fromkeys(("2d", "3d", "action", "2d_spatial_relation", "3d_spatial_relation"), "relation"),
    **dict.fromkeys(("numeracy", "negation", "differentiation", "comparison"), "reasoning"),
}
"""{part of a TIIF-Bench kind such as "action+2d": subject}. The program groups kinds by subjects into nine groups."""
_GENEVAL_PLACE = re.compile(r"([0-9]{1,9})/samples/([0-9]{1,9})\.png$")

RESULTS: Mapping[str, str] = {
    **dict.fromkeys(("color", "shape", "texture"), "annotation_blip/vqa_result.json"),
    "spatial": "labels/annotation_obj_detection_2d/vqa_result.json",
    "3d_spatial": "labels/annotation_obj_detection_3d/vqa_result.json",
    "numeracy": "annotation_num/vqa_result.json",
    "non_spatial": "annotation_clip/vqa_result.json",
    "complex": "annotation_3_in_1/vqa_result.json",
}
"""{category: path of the official program's results, relative to the exported folder}."""
COMPLEX_PARTS: Mapping[str, str] = {
    "blip": RESULTS["color"],
    "clip": RESULTS["non_spatial"],
    "spatial": RESULTS["spatial"],
}
"""{part of the score of complex prompts: path of its results}. The official program that combines the parts needs
exactly ten images per prompt. Without its result, specbench combines the parts, for any number of images."""

LOWEST: Mapping[str, float] = {"non_spatial": -1.0, "complex": -1.0, "complex/clip": -1.0}
"""{category: smallest possible answer} for cosines and means that contain a cosine; 0 for other categories."""
THREE_IN_ONE: Mapping[str, tuple[str, ...]] = {
    "spatial": ("spatial", "blip"),
    "action": ("clip", "blip"),
    "spatialaction": ("spatial", "clip", "blip"),
}
"""{kind of complex prompt: parts whose mean is the prompt's score}, if no official program computes this mean."""


def export_images(benchmark: str, run: Path, target: Path) -> int:
    """Export a run's images in the layout of a benchmark's official evaluator, or as a `dataset`. Return the number of
    images."""
    what, fits, files_of = _LAYOUTS[read_name("benchmark", benchmark, _LAYOUTS)]
    stored = RunStore(run).samples(["prompt", "category", "meta", "status", "image", "image_sha256"])
    rows = [
        _Row(run, row.prompt_id, row.prompt, int(row.sample), row.category, meta, row.image, row.image_sha256)
        for row in stored[(stored["status"] == RowStatus.OK) & stored["image"].notna()].itertuples()
        if fits(row.category, meta := read_meta(row.meta))
    ]
    if not rows:
        raise SpecbenchError(f"{run} has no images of {what} prompts")
    export_files(target, files_of(rows))
    return len(rows)


def import_scores(benchmark: str, run: Path, results: Path) -> list[dict[str, object]]:
    """Store the results of a benchmark's official evaluator as scores of a run, and return them as `score` does.
    `results`: the results file of GenEval or LongText-Bench, the exported folder for T2I-CompBench++ or WISE,
    DPG-Bench's `_detail.txt`, or the output folder of TIIF-Bench's or OneIG-Bench's program."""
    benchmark = read_name("benchmark", benchmark, BENCHMARKS)
    # Imports need no pixels, so image files may be missing.
    images = replace(run_images(run), read=lambda row: np.empty((0, 0, 3), np.uint8))
    readers: Mapping[str, Callable[[], Metric]] = {
        "geneval": lambda: OfficialGenEval(results),
        "t2i-compbench": lambda: OfficialCompBench(results, 1 + int(images.rows["sample"].max())),
        "dpg-bench": lambda: OfficialDpgBench(_read_dpg_bench(results), digest_of(results), images.rows),
        "tiif": lambda: OfficialTiif(results),
        "wise-verified": lambda: official_results.OfficialWise("verified", results),
        "wise-legacy": lambda: official_results.OfficialWise("legacy", results),
        "oneig": lambda: official_results.OfficialOneig(results, images.name, images.rows["prompt_id"]),
        "longtext-bench": lambda: official_results.OfficialLongText(results),
    }
    metric = readers[benchmark]()
    if reason := why_unfit(images, metric):
        raise SpecbenchError(f"the results cannot be scores of {images.name}: {reason}")
    metric.features(samples_of(images, metric))  # raises errors before scores are replaced
    forget(run, metric)
    score([images], metric).check()
    scores, digest = scores_to_show(run, images.rows["prompt_id"]), made_score(metric).fingerprint
    return [{"run_id": images.name, **row} for row in scores if row["fingerprint"] == digest]


def geneval_files(rows: Sequence[_Row]) -> Files:
    """Make files for the official evaluator: `<line>/metadata.jsonl` and `<line>/samples/<sample>.png`."""
    _check_lines(rows)
    for line, row in {row.line: row for row in rows}.items():
        yield json.dumps(official_row(row.category, row.prompt, row.meta)).encode(), f"{line:05d}", "metadata.jsonl"
    for row in rows:
        yield row.png(), f"{row.line:05d}", "samples", f"{row.sample:04d}.png"


def dataset_files(rows: Sequence[_Row]) -> Files:
    """Make images and a `metadata.jsonl` for `datasets.load_dataset("imagefolder", data_dir=...)`."""
    lines = []
    for row in rows:
        name = image_name(row.prompt_id, row.sample)
        yield row.png(), "train", name
        about = {"file_name": name, "prompt": row.prompt, "prompt_id": row.prompt_id, "sample": row.sample}
        lines.append(json.dumps(about | {"category": row.category, "run": row.run.name}))
    yield ("\n".join(lines) + "\n").encode(), "train", "metadata.jsonl"


def compbench_files(rows: Sequence[_Row]) -> Files:
    """Make files for the official scripts: `<category>/samples/<prompt>_<line x images per prompt + sample>.png`."""
    samples = {}
    for category in COMPBENCH_CATEGORIES:
        if mine := [row for row in rows if row.category == category]:
            _check_lines(mine)
            samples[category] = 1 + max(row.sample for row in mine)
            prompts = 1 + max(row.line for row in mine)
            if len(mine) != prompts * samples[category]:
                what = f"category '{category}' has {len(mine)} images instead of {prompts} x {samples[category]}"
                need = "the official scripts need all samples of all prompts, from the first prompt on; finish the run"
                raise SpecbenchError(what, need)
    for row in rows:
        number = row.line * samples[row.category] + row.sample
        yield row.png(), row.category, "samples", f"{row.prompt}_{number:06d}.png"


def wise_files(rows: Sequence[_Row]) -> Files:
    """Make files for WISE's evaluator, with a folder per sample: `sample-0/<number of the prompt>.png`."""
    _check_lines(rows)
    for row in rows:
        yield row.png(), f"sample-{row.sample}", f"{row.line}.png"


def dpg_bench_files(rows: Sequence[_Row]) -> Files:
    """Make files for the released program, see `dpg_bench.grid_files`."""
    _check_lines(rows)
    yield from grid_files(sorted(rows, key=lambda row: (row.line, row.sample)))


class OfficialGenEval(JudgedMetric):
    """Verdicts of the official GenEval evaluator, matched to images by folder and file name."""

    name = "geneval[official]"

    def __init__(self, results: Path):
        super().__init__()
        self.results = results
        self._verdicts = _read_geneval(results)

    def identity(self) -> Mapping[str, str]:
        return {"program": "GenEval's evaluator", RESULTS_FILE: digest_of(self.results)}

    def features_of(self, sample: Sample) -> dict[str, object]:
        key = (official_line(sample.prompt_id, sample.meta), sample.sample)
        if key not in self._verdicts:
            raise SpecbenchError(f"{self.results} has no result for {key[0]:05d}/samples/{key[1]:04d}.png")
        verdict = self._verdicts[key]
        if (verdict.get("prompt") or sample.prompt) != sample.prompt:
            raise SpecbenchError(f"{self.results}: {key[0]:05d} is about '{verdict['prompt']}', not '{sample.prompt}'")
        return {"correct": verdict["correct"], "reason": verdict.get("reason"), "details": verdict.get("details")}


class OfficialCompBench(Metric):
    """Answers of the official T2I-CompBench++ scripts by category, from the exported folder. Overall score: plain mean
    over the present categories. `samples`: number of images per prompt, from which image numbers follow."""

    name = "compbench[official]"
    columns: ClassVar = {"value": pa.float32()}

    def __init__(self, results: Path, samples: int):
        super().__init__()
        self.results, self._images_per_prompt = results, samples
        places = {category: results / category / file for category, file in RESULTS.items()}
        self._files = {category: path for category, path in places.items() if path.is_file()}
        if "complex" not in self._files:
            parts = {f"complex/{part}": results / "complex" / file for part, file in COMPLEX_PARTS.items()}
            self._files |= parts if all(file.is_file() for file in parts.values()) else {}
        self._answers = {name: _read_answers(file, LOWEST.get(name, 0.0)) for name, file in self._files.items()}
        if not self._answers:
            raise SpecbenchError(f"{results} contains no official results", "expected <category>/" + RESULTS["color"])

    def identity(self) -> Mapping[str, str]:
        return imported("T2I-CompBench++'s scripts", self.results, self._files.values())

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        # For complex prompts, combine the answers of the parts if the official result is missing.
        parts = category == "complex" and "complex/blip" in self._answers and str(meta.get("kind")) in THREE_IN_ONE
        return "line" in meta and (category in self._answers or parts)

    def features_of(self, sample: Sample) -> dict[str, object]:
        number = official_line(sample.prompt_id, sample.meta) * self._images_per_prompt + sample.sample

        def answer(name: str) -> float:
            if number not in self._answers[name]:
                raise SpecbenchError(f"{self._files[name]} has no answer to question {number}")
            return self._answers[name][number]

        if sample.category in self._answers:
            return {"value": answer(sample.category)}
        parts = [answer(f"complex/{part}") for part in THREE_IN_ONE[sample.meta["kind"]]]
        return {"value": sum(parts) / len(parts)}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        return part_scores(self.name, statistics, "category", "value")


class OfficialTiif(Metric):
    """Answers to TIIF-Bench's questions, scored as in its program, for short and for long descriptions: share of right
    answers per kind, mean over the kinds in each of nine groups, and mean over groups. `results`: the program's output
    folder, with `sample-<number>/<kind>/<length>/<line>.json`."""

    name = "tiif[official]"
    columns: ClassVar = {"right": pa.int32(), "questions": pa.int32(), "long": pa.bool_()}

    def __init__(self, results: Path):
        super().__init__()
        self.results, self._files = results, sorted(results.glob("sample-*/*/*/*.json"))
        if not self._files:
            raise SpecbenchError(f"{results} contains no official results", "expected sample-0/<kind>/short/0.json")

    def identity(self) -> Mapping[str, str]:
        return imported("TIIF-Bench's program", self.results, self._files)

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return _of_tiif(category, meta)

    def features_of(self, sample: Sample) -> dict[str, object]:
        length, line = str(sample.meta["length"]), official_line(sample.prompt_id, sample.meta)
        path = self.results / f"sample-{sample.sample}" / str(sample.category) / length / f"{line}.json"
        if not path.is_file():
            raise SpecbenchError(f"{path} is missing", "run the program on all images of the export")
        with blaming(path, "is not a result of TIIF-Bench's program ({})"):
            content = parse_json(read_results(path))
            if not isinstance(content, dict):
                raise ValueError("no object")
            keys = ("gt_answers", "model_pred")
            correct, answers = ([str(answer).strip().lower() for answer in content[key]] for key in keys)
            if not correct or len(correct) != len(answers) or {*correct, *answers} - {"yes", "no"}:
                raise ValueError("gt_answers and model_pred must be lists of yes and no with the same length")
        right = sum(answer == other for answer, other in zip(correct, answers, strict=True))
        return {"right": right, "questions": len(correct), "long": length == "long"}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        results = []
        subjects = lambda kind: "+".join(sorted({_TIIF_PARTS.get(part, part) for part in kind.split("+")}))  # noqa: E731
        for long, rows in statistics.groupby("long"):
            name, group = f"{self.name}:{'long' if long else 'short'}", rows["category"].map(subjects)
            results.append(self._score(name, rows, group))
            for subject, part in rows.groupby(group, sort=False):
                results.append(self._score(f"{name} {subject}", part, group[part.index]))
        return results

    @staticmethod
    def _score(name: str, rows: pd.DataFrame, group: pd.Series) -> Score:
        """Average over kinds within groups, then over groups; the interval uses the influence of each image."""
        kinds = rows.groupby("category")
        right, questions = (kinds[column].transform("sum") for column in ("right", "questions"))
        weight = 1 / (group.nunique() * rows["category"].groupby(group).transform("nunique") * questions)
        influence = len(rows) * weight * (rows["right"] - right / questions * rows["questions"])
        estimate = with_influence(float((weight * rows["right"]).sum()), influence, rows["prompt_id"])
        return Score(name, estimate, len(rows), prompts=rows["prompt_id"].nunique())


class _Row(NamedTuple):
    """An image of a run."""

    run: Path
    prompt_id: str
    prompt: str
    sample: int
    category: str
    meta: dict[str, Any]
    image: str
    sha256: object

    def pixels(self) -> np.ndarray:
        return read_image(self.run, self.image, self.sha256)

    def png(self) -> bytes:
        return png_bytes(self.pixels())

    @property
    def line(self) -> int:
        """Line number of the prompt in the official file."""
        return official_line(self.prompt_id, self.meta)


def _of_tiif(kind: str | None, meta: Mapping[str, Any]) -> bool:
    return bool(kind) and "line" in meta and meta.get("length") in _LENGTHS


def _files(place: Callable[[_Row], tuple[str, ...]]) -> Callable[[Sequence[_Row]], Files]:
    """Return an export function that writes each image to the path (folder names..., file name) given by `place`."""
    return lambda rows: ((row.png(), *place(row)) for row in rows)


_LAYOUTS: Mapping[str, tuple[str, Callable[[str, dict[str, Any]], bool], Callable[[Sequence[_Row]], Files]]] = {
    "geneval": ("GenEval", lambda tag, meta: bool(tag) and {"include", "line"} <= meta.keys(), geneval_files),
    "t2i-compbench":
        ("T2I-CompBench", lambda tag, meta: tag in COMPBENCH_CATEGORIES and "line" in meta, compbench_files),
    "dpg-bench": ("DPG-Bench", lambda _, meta: {"questions", "line"} <= meta.keys(), dpg_bench_files),
    "tiif": ("TIIF-Bench", _of_tiif, _files(lambda row: (  # for the program, each sample is a model
        row.category, f"sample-{row.sample}", f"{row.meta['length']}_description", f"{row.line}.png"))),
    "wise-verified": ("WISE (verified)", lambda _, meta: meta.get("wise") == "verified" and "line" in meta, wise_files),
    "wise-legacy": ("WISE (legacy)", lambda _, meta: meta.get("wise") == "legacy" and "line" in meta, wise_files),
    "oneig": ("OneIG-Bench", lambda tag, _: tag in ONEIG_CATEGORIES.values(), official_results.oneig_files),
    "longtext-bench": ("LongText-Bench", official_results.is_longtext,
                       _files(lambda row: (f"{row.prompt_id:0>4}_{row.sample + 1}.png",))),
    "cvtg-2k": ("CVTG-2K", lambda kind, meta: str(kind).startswith("CVTG-") and "line" in meta,
                _files(lambda row: (f"sample-{row.sample}", *row.category.rsplit("-", 1), f"{row.line}.png"))),
    "dataset": ("any", lambda *_: True, dataset_files),
}  # fmt: skip
"""{benchmark: (name, function that accepts a prompt by category and metadata, function that makes the files)}.
`dataset` is the format of Hugging Face's `datasets`."""


def _check_lines(rows: Sequence[_Row]) -> None:
    """Reject two prompts with the same line number, because official programs could not distinguish them."""
    owners: dict[int, str] = {}
    for row in rows:
        if (owner := owners.setdefault(row.line, row.prompt_id)) != row.prompt_id:
            what = f"prompts '{owner}' and '{row.prompt_id}' have the same line {row.line}"
            raise SpecbenchError(what, "each prompt needs a separate line")


def _read_geneval(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    verdicts: dict[tuple[int, int], dict[str, Any]] = {}
    with blaming(path, "is not a result of the official GenEval evaluator ({})"):
        for row in json_rows(path):
            valid = isinstance(row.get("filename"), str) and "correct" in row
            if not valid or not all(isinstance(row.get(name, ""), str | None) for name in _GENEVAL_TEXTS):
                raise ValueError(f"every line needs 'correct' and the texts {', '.join(_GENEVAL_TEXTS)}")
            "".join(row.get(name) or "" for name in _GENEVAL_TEXTS).encode()  # raises an error for lone surrogates
            place = _GENEVAL_PLACE.search(row["filename"])
            if place is None:
                raise ValueError(f"'{row['filename'][-40:]}' does not end in <line>/samples/<sample>.png")
            if not isinstance(row["correct"], bool):
                what = f"{path}: the verdict on {row['filename']} is {row['correct']!r:.40}"
                raise SpecbenchError(what, "the official evaluator writes true or false")
            first = verdicts.setdefault((int(place[1]), int(place[2])), row)
            refuse_contradiction(path, row["filename"], row["correct"], first["correct"])
    return verdicts


def _read_dpg_bench(path: Path) -> dict[tuple[str, int], dict[str, str]]:
    """Read the answers as {(item, number of the image): {question: answer}}."""
    verdicts: dict[tuple[str, int], dict[str, str]] = {}
    with blaming(path, "is not a `_detail.txt` of DPG-Bench's program ({})"):
        for line in filter(str.strip, read_results(path).split("\n")):
            item, sample, question, answer = read_verdict(line)
            answers = verdicts.setdefault((item, sample), {})
            refuse_contradiction(path, f"'{question:.80}'", answer, answers.setdefault(question, answer))
        if verdicts and not any({"yes", "no"} & {*answers.values()} for answers in verdicts.values()):
            raise ValueError("no answer in it is yes or no")
    return verdicts


def _read_answers(path: Path, lowest: float) -> dict[int, float]:
    """Read {question: answer}, with answers between `lowest` and 1."""
    answers: dict[int, float] = {}
    with blaming(path, "is not a result of the official scripts ({})"):
        rows = parse_json(read_results(path))
        if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _ANSWER for row in rows):
            raise ValueError("not a list of objects with 'question_id' and 'answer'")
        for row in rows:
            number = int(str(row["question_id"]))  # some scripts write numbers as text
            answer = math.nan if isinstance(row["answer"], bool) else float(row["answer"])
            if not lowest <= answer <= 1:
                what = f"{path}: the answer to question {number} is {row['answer']!r:.40}"
                raise SpecbenchError(what, f"the official scripts write numbers from {lowest:g} to 1")
            refuse_contradiction(path, f"question {number}", answer, answers.setdefault(number, answer))
    return answers
