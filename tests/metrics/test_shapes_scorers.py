"""Scorers of the embedded model: known captions score high, each scorer detects damaged images, and of scenes, which
are anybody's JSON, only those that a picture can satisfy are scored. It concerns several modules: metrics.shapes and
the networks that dev/shapes trains."""

import hashlib
import json

import numpy as np
import pytest
from drawn import drawn_run

from dev.shapes import sensitivity
from dev.shapes.train_clip import word_tokenizer
from specbench.metrics import scoring, shapes
from specbench.metrics.base import made_score
from specbench.metrics.openclip import folder_tokenizer
from specbench.metrics.score_store import read_scores
from specbench.metrics.shapes import CLIP_FOLDER, ShapesClip, ShapesDetector, ShapesFrechet
from specbench.models.shapes import captions
from specbench.models.shapes.network import load_tokenizer
from specbench.models.shapes.scene import SceneRequest
from specbench.prompts import load_prompts
from specbench.reporting import render as render_tables
from specbench.reporting import report_rows
from specbench.runs.progress_bar import ScoreProgress

CIRCLE = {"shape": "circle", "color": "red", "count": 1}
MALFORMED = [
    None, 3, {}, {"objects": 3}, {"objects": []}, {"objects": [3]}, {"objects": [{"shape": "dragon"}]},
    {"objects": [CIRCLE | {"color": ["red"]}]}, {"objects": [CIRCLE | {"count": 0}]},
    {"objects": [CIRCLE | {"count": 10**9}]}, {"objects": [CIRCLE | {"count": "two"}]},
    {"objects": [CIRCLE], "relations": [["left", 0, 1]]},
    {"objects": [CIRCLE], "relations": [["left", float("inf"), 0]]}, {"objects": [CIRCLE], "relations": ["left"]},
    {"objects": [CIRCLE], "texture": {"a": 1}},
]  # fmt: skip


@pytest.mark.parametrize("scene", MALFORMED, ids=str)
def test_a_malformed_scene_is_no_request(scene):
    assert shapes.read_request({"scene": scene}) is None


def test_every_shipped_prompt_has_a_request_and_images_of_malformed_scenes_are_left_out(tmp_path):
    folder = drawn_run(tmp_path, n=2, meta=lambda number: {"scene": MALFORMED[7]})
    assert not [*scoring.score([folder], (), where_they_fit=["shapes-detector"])]
    assert all(shapes.read_request(prompt.meta) for prompt in load_prompts("shapes").prompts)


@pytest.fixture
def few_renders(monkeypatch):
    monkeypatch.setattr(shapes, "RENDERS", 512)


def test_every_scorer_falls_with_every_step_of_damage(few_renders):
    tokenizer = load_tokenizer()
    prompts = load_prompts("shapes").prompts[:80]
    tokens = sensitivity.rendered_tokens(prompts, tokenizer, seed=3)
    levels = sensitivity.damage_levels(prompts, [0] * len(prompts), tokens, tokenizer, seed=3)
    rows = sensitivity.measure([ShapesDetector(), ShapesClip(), ShapesFrechet()], levels)
    assert len(rows) == 3 * len(sensitivity.SHARES)
    assert {row["level"]: row["seen"] for row in rows if "seen" in row} == dict.fromkeys(("10%", "20%", "40%"), True)
    assert all(row["seen"] for row in rows if "seen" in row), sensitivity.table(rows)


def test_its_words_are_the_words_of_the_captions():
    texts = [prompt.text for name in ("shapes", "shapes-hard") for prompt in load_prompts(name).prompts]
    texts += ["3 Red squares, and a blue cross over the circle.", "an image of one triangle,two crosses"]
    tokenizer = folder_tokenizer(CLIP_FOLDER)
    names = {index: word for word, index in tokenizer.tokenizer.get_vocab().items()}
    for text, ids in zip(texts, tokenizer(texts).tolist(), strict=True):
        written = [names[index] for index in ids if names[index] != captions.PAD]
        assert written == ["<start>", *captions.words(text), "<end>"]
        assert ids[: len(written)] == word_tokenizer().encode(text).ids
    assert max(names) == tokenizer.tokenizer.convert_tokens_to_ids("<end>")  # where open_clip reads
    assert [names[index] for index in tokenizer(["a photorealistic dog"])[0, 1:3].tolist()] == ["<unknown>"] * 2


def test_a_run_is_scored_by_all_three_unasked_and_few_images_and_a_missing_package_are_reported(
    few_renders, tmp_path, monkeypatch, capsys
):
    folder = drawn_run(tmp_path)
    outcomes = scoring.score([folder], bundled_only=True)
    bundled = ("shapes-clip", "shapes-detector", "shapes-frechet")
    assert tuple(outcome.metric for outcome in outcomes) == bundled
    scores = {row["metric"]: row for row in read_scores(folder)}
    assert scores["shapes-frechet"]["low"] is None and "6 images are too few" in scores["shapes-frechet"]["note"]
    assert scores["shapes-clip"]["low"] is not None and scores["shapes-clip"]["note"] is None
    text = render_tables(report_rows([folder]), everything=True, explain=True)
    assert all(f"| {name} " in text and f"- {name}: " in text for name in bundled)
    assert "shapes-frechet: 6 images are too few for 64 features" in text
    assert "shapes-detector by part:" in text and "| colors ↑ |" in text
    monkeypatch.setattr(ShapesClip, "packages", {"no-such-package": "pip install it"})
    scoring.score([folder], reporter=ScoreProgress(), bundled_only=True)
    told = capsys.readouterr().err
    assert ": shapes-detector, shapes-frechet\nshapes-clip is not computed" in told and "needs no-such-package" in told


def test_the_reference_depends_on_captions_alone_and_scores_name_their_weights_and_renderer(monkeypatch):
    requests = [json.dumps(prompt.meta["scene"], sort_keys=True) for prompt in load_prompts("shapes").prompts[:2]]
    first = list(shapes.true_pictures(requests[:1], 3))
    both = list(shapes.true_pictures(requests, 3))
    assert all(np.array_equal(a, b) for a, b in zip(first, both, strict=False)) and len(both) == 6
    assert not np.array_equal(both[0], both[1])
    for metric, fact in ((ShapesClip, "weights"), (ShapesFrechet, "weights"), (ShapesFrechet, "renderer")):
        assert metric().identity()[fact]
    before = made_score(ShapesFrechet()).fingerprint
    monkeypatch.setattr(shapes, "_SEED", 1)
    assert made_score(ShapesFrechet()).fingerprint != before


def test_the_names_of_renderer_and_detector_change_with_what_they_draw_and_find():
    """Another digest means other scores: give a new `_RENDERER` or `_DETECTOR`."""
    drawn, judged = hashlib.sha256(), hashlib.sha256()
    for prompt in load_prompts("shapes").prompts[:64]:
        request = SceneRequest.from_json(prompt.meta["scene"])
        image = next(iter(shapes.true_pictures([json.dumps(prompt.meta["scene"], sort_keys=True)], 1)))
        drawn.update(image.tobytes())
        for seen in (image, image // 2 + np.roll(image, 1, 0) // 2):
            objects = shapes.detector.detect(seen)
            judged.update(repr((objects, shapes.detector.judge(request, objects))).encode())
    assert (drawn.hexdigest()[:16], judged.hexdigest()[:16]) == ("1406cc7e8bc874cd", "a1b393e8b23c9d6b")
    assert ShapesFrechet().identity()["renderer"] == "a6f67b6da33bc51a"
    assert ShapesDetector().identity()["detector"] == "e2aadacd455f76e5"
