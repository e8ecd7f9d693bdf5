"""T2I-CompBench++: BLIP-VQA against an independent forward, and exchange with the official scripts."""

import json
import math
from pathlib import Path

import authors_formats as formats
import calibrated
import numpy as np
import pandas as pd
import published
import pytest
import synthetic
import torch
from refusals import refused

from specbench.errors import MISSING_PREREQUISITE
from specbench.metrics import compbench, official_exchange
from specbench.metrics.base import Sample, Settings
from specbench.metrics.blip import part_of
from specbench.metrics.compbench import NO, YES, BlipVqa, questions
from specbench.metrics.openclip import normalised
from specbench.prompts import Prompt
from specbench.prompts.public_files import counts, read_t2i_compbench


def sample(prompt: str, pixels: np.ndarray, number: int = 0, category: str = "color") -> Sample:
    return Sample(f"p{number}", 0, prompt, category, {"line": number}, pixels)


@pytest.fixture
def metric(tmp_path, monkeypatch):
    formats.stand_in(monkeypatch, "blip-vqa", formats.save_vqa(tmp_path / "vqa.pth"))
    formats.stand_in(monkeypatch, "bert-vocabulary", formats.save_vocabulary(tmp_path / "vocab.txt"))
    made = BlipVqa(Settings(offline=True))
    made.phrases = lambda prompt: prompt.split(" and ")
    return made


def written_out(weights: dict, pixels: np.ndarray, ids: list[int]) -> float:
    seen = formats.vision_forward(part_of(weights, "visual_encoder."), normalised(compbench.squashed(pixels, 32)))
    states = formats.text_forward(part_of(weights, "text_encoder."), ids, seen)
    decoder = part_of(weights, "text_decoder.")
    out = formats.text_forward(part_of(decoder, "bert."), [30522], states)
    return formats.head_forward(decoder, out)[0][[YES, NO]].softmax(0)[0].item()


def test_an_answer_is_the_product_over_phrases_of_a_forward_written_out(metric, tmp_path):
    weights = torch.load(tmp_path / "vqa.pth", weights_only=True)["model"]
    pixels = calibrated.images(1, 60, 90)[0]
    (row,) = metric.features([sample("a red cat and a blue dog photo", pixels)])
    answers = []
    for phrase in ("a red cat", "a blue dog photo"):
        ids = metric.tokenizer.ids(phrase + "?")
        assert ids[0] == 3, "[CLS], which [ENC] replaces"
        answers.append(written_out(weights, pixels, [30523, *ids[1:]]))
    assert row["value"] == pytest.approx(math.prod(answers), abs=1.1e-4)
    assert abs(answers[0] - answers[1]) > 0.01 and 0 < row["value"] < 1


def test_answers_do_not_depend_on_other_questions_and_no_phrases_score_one(metric):
    texts = ("a cat", "a red cat and a dog", "a blue blue photo dogs and cat and dog")
    asked = [sample(text, pixels, n) for n, (text, pixels) in enumerate(zip(texts, calibrated.images(3), strict=True))]
    together = [row["value"] for row in metric.features(asked)]
    alone = [metric.features([sample])[0]["value"] for sample in asked]
    assert together == pytest.approx(alone, abs=1.1e-4) and len(set(alone)) == 3
    metric.phrases = lambda prompt: []
    assert metric.features([sample("running", calibrated.images(1)[0])]) == [{"value": 1}]


def test_questions_are_the_official_ones_and_counts_are_read_from_the_prompt():
    assert questions(["A red cup", "the left", "the top", "top", 'a "big" dog.']) == [
        "a red cup?", "the top?", "a big dog?",
    ]  # fmt: skip
    assert len(questions(["a cup"] * 12)) == 8
    names = {"cup": "cup", "cups": "cup", "mice": "mouse", "mouse": "mouse", "cell phones": "cell phone"}
    text = "Two cups, a mouse, five mice and ten cell phones decorated a room"
    assert counts(text, names) == {"cup": 2, "mouse": 6, "cell phone": 10}


def test_categories_have_separate_scores_and_are_not_averaged():
    rows = pd.DataFrame({"category": ["color", "color", "shape"], "prompt_id": list("abc"), "value": [0.2, 0.4, 0.9]})
    scores = BlipVqa().scores(rows)
    assert {score.name: score.estimate.value for score in scores} == pytest.approx(
        {"compbench[blip-vqa]:color": 0.3, "compbench[blip-vqa]:shape": 0.9}
    )
    assert BlipVqa().accepts("texture", {"line": 0}) and not BlipVqa().accepts("complex", {"line": 0})


def test_without_spacy_the_metric_says_so_before_anything_is_downloaded(monkeypatch):
    monkeypatch.setattr(BlipVqa, "packages", {"no_such_model": "python -m spacy download no_such_model"})
    assert any("is not installed" in what for what, _ in BlipVqa().missing())
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was used"))
    assert refused("no_such_model", BlipVqa().prepare).exit_code == MISSING_PREREQUISITE


def prompts(tmp_path: Path, *categories: str) -> list[Prompt]:
    listed = read_t2i_compbench(published.write("t2i-compbench", tmp_path / "set"))
    return [prompt for prompt in listed if prompt.category in categories]


def test_export_numbers_images_contiguously_by_prompt_and_sample_and_refuses_gaps(tmp_path):
    run = synthetic.pictured(tmp_path, prompts(tmp_path, "color", "3d_spatial"), 2)
    assert official_exchange.export_images("t2i-compbench", run, tmp_path / "out") == 8
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.png"))
    assert files == [
        f"{category}/samples/{name}.png"
        for category in ("3d_spatial", "color")
        for name in (f"a {category} cup_000000", f"a {category} cup_000001", "two cups_000002", "two cups_000003")
    ]
    gap = synthetic.pictured(tmp_path / "gap", prompts(tmp_path / "gap", "color")[1:], 1)
    refused("1 images instead of 2 x 1", official_exchange.export_images, "t2i-compbench", gap, tmp_path / "none")


def answered(path: Path, answers: dict[int, object]) -> None:
    """Write answers to questions as the official programs write them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"question_id": number, "answer": answer} for number, answer in answers.items()]))


def test_official_answers_come_back_to_their_images(tmp_path):
    for category, file in official_exchange.RESULTS.items():
        of = {"color": lambda n: str(0.1 * n), "non_spatial": lambda n: -0.5}.get(category, lambda n: 0.5)
        answered(tmp_path / "out" / category / file, {number: of(number) for number in (3, 2, 1, 0)})
    metric = official_exchange.OfficialCompBench(tmp_path / "out", samples=2)
    refused("no official results", official_exchange.OfficialCompBench, tmp_path, samples=1)
    asked = [
        Sample(prompt.id, index, prompt.text, prompt.category, prompt.meta, np.zeros((2, 2, 3), np.uint8))
        for prompt in prompts(tmp_path, "color", "complex")
        for index in (0, 1)
    ]
    assert [row["value"] for row in metric.features(asked)] == pytest.approx([0, 0.1, 0.2, 0.3] + [0.5] * 4)
    assert metric.accepts("numeracy", {"line": 0})
    more = official_exchange.OfficialCompBench(tmp_path / "out", samples=4)
    refused("no answer to question 4", more.features, asked[2:])
    answered(tmp_path / "out" / "non_spatial" / official_exchange.RESULTS["non_spatial"], {0: -1.1})
    refused("question 0 is", official_exchange.OfficialCompBench, tmp_path / "out", samples=2)


def test_three_in_one_is_combined_from_official_answers_if_the_official_program_cannot(tmp_path):
    answers = {"blip": [0.6, 0.2, 0.8], "clip": [0.3, 0.25, 0.35], "spatial": [0.9, 0.0, 0.5]}
    for part, file in official_exchange.COMPLEX_PARTS.items():
        answered(tmp_path / "complex" / file, dict(enumerate(map(str, answers[part]))))
    metric = official_exchange.OfficialCompBench(tmp_path, samples=1)
    pixels = np.zeros((2, 2, 3), np.uint8)
    asked = [
        Sample(f"p{line}", 0, "", "complex", {"line": line, "kind": kind}, pixels)
        for line, kind in enumerate(("spatial", "action", "spatialaction"))
    ]
    assert [row["value"] for row in metric.features(asked)] == pytest.approx([0.75, 0.225, 0.55])
    assert metric.accepts("complex", asked[0].meta) and not metric.accepts("complex", {"line": 0})
    answered(tmp_path / "complex" / official_exchange.RESULTS["complex"], dict.fromkeys(range(3), 0.1))
    again = official_exchange.OfficialCompBench(tmp_path, samples=1)
    assert [row["value"] for row in again.features(asked)] == [0.1] * 3 and again.identity() != metric.identity()
