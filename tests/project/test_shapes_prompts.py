"""Prompt sets of the `shapes` model contain only combinations held out from training."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dev.shapes.data import wordings
from specbench.models.shapes import captions
from specbench.models.shapes.scene import CATEGORIES, SceneRequest, realize, sample_request

FOLDER = Path(__file__).parents[2] / "prompts"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["shapes", "shapes-hard"])
def test_every_prompt_is_held_out_and_means_its_scene(name):
    for line in lines(name):
        request = SceneRequest.from_json(line["scene"])
        assert captions.parse(line["prompt"]) == request and request.held_out() and request.category == line["category"]
        assert line["id"] == f"{line['category']}-{hashlib.sha256(line['prompt'].encode()).hexdigest()[:8]}"


def test_the_standard_set_has_300_prompts_in_6_categories():
    counts = Counter(line["category"] for line in lines("shapes"))
    assert set(counts) == set(CATEGORIES) and sum(counts.values()) >= 300
    assert {line["category"] for line in lines("shapes")[:6]} == set(CATEGORIES)
    assert all(len(line["scene"]["relations"]) == 2 for line in lines("shapes-hard"))
    ids = [line["id"] for name in ("shapes", "shapes-hard") for line in lines(name)]
    assert len(ids) == len(set(ids))


def test_training_never_words_a_held_out_meaning():
    asked = {tuple(captions.encode(line["prompt"])) for name in ("shapes", "shapes-hard") for line in lines(name)}
    rng = np.random.default_rng(3)
    seen = 0
    for _ in range(1000):
        for ids in wordings(realize(sample_request(rng), rng), rng) or []:
            seen += 1
            assert tuple(ids) not in asked
    assert seen > 3000
