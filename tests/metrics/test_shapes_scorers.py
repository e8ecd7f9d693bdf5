"""Scorers of the embedded model: known captions score high, and each scorer detects damaged images.

It concerns several modules: metrics.shapes and the networks that dev/shapes trains.
"""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from drawn import drawn_run
from torch.nn import functional as F

from dev.shapes import sensitivity, train_features
from dev.shapes.negatives import is_true, near_misses
from dev.shapes.retrieval import retrieval
from dev.shapes.train_clip import contrastive_loss, word_tokenizer
from specbench.errors import SpecbenchError
from specbench.metrics import scoring, shapes
from specbench.metrics.base import fingerprint
from specbench.metrics.openclip import folder_tokenizer
from specbench.metrics.score_store import read_scores
from specbench.metrics.shapes import CLIP_FOLDER, ShapesClip, ShapesDetector, ShapesFrechet
from specbench.models.shapes import captions
from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.network import load_tokenizer
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import describe, realize, sample_request
from specbench.prompts import load_prompts
from specbench.reporting import render as render_tables
from specbench.reporting import report_rows


@pytest.fixture
def few_renders(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
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


def test_damage_hits_the_share_it_says_and_more_of_it_hits_the_same_tokens():
    tokens = torch.full((200, 256), 1000)
    some, more = (sensitivity.damaged(tokens, share, 512, seed=1) for share in (0.1, 0.4))
    assert (some != tokens).float().mean() == pytest.approx(0.1, abs=0.01)
    assert (more != tokens).float().mean() == pytest.approx(0.4, abs=0.01)
    assert torch.equal(more[some != tokens], some[some != tokens])


def test_images_of_several_runs_are_damaged_together_and_kept_apart(monkeypatch, tmp_path):
    folders = [drawn_run(tmp_path / name, samples=2) for name in "ab"]
    with pytest.raises(SpecbenchError, match="only runs of shapes"):
        sensitivity.stored_tokens(folders)
    monkeypatch.setattr(sensitivity, "GRID", 2)  # what is drawn has four tokens
    prompts, numbers, tokens = sensitivity.stored_tokens(folders)
    assert len({(p.id, n) for p, n in zip(prompts, numbers, strict=True)}) == len(tokens) == 2 * 6 * 2


def test_the_small_clip_retrieves_held_out_captions():
    found = retrieval(batches=2, seed=7)
    assert found["caption_of_64"] > 0.6 and found["image_of_64"] > 0.6  # a guess: 1 / 64
    assert found["near_misses"]["all"] > 0.85  # a guess: 1 / 2


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


def test_near_misses_are_false_of_the_picture_and_almost_true():
    rng = np.random.default_rng(5)
    for _ in range(40):
        scene = realize(sample_request(rng), rng)
        request, found = describe(scene, rng), detect(render(scene))
        assert is_true(request, scene)
        for other in near_misses(request, scene, 3, rng):
            wrong_ground = other.texture not in (None, scene.texture)
            assert wrong_ground or not judge(other, found).correct
            assert len(other.clauses) == len(request.clauses) and not other.held_out()
            same = [a == b for a, b in zip(request.clauses, other.clauses, strict=True)]
            assert same.count(False) <= 2


def test_the_contrastive_loss_leaves_out_what_is_true_by_chance():
    generator = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(3, 8, generator=generator), dim=1) for _ in range(2))
    misses = F.normalize(torch.randn(3, 2, 8, generator=generator), dim=2)
    misses[1, 1] = 0
    true = torch.eye(3, dtype=torch.bool)
    true[0, 2] = True
    wanted = 0.0
    for row in range(3):
        own = math.exp(5 * float(images[row] @ texts[row]))
        rivals = [float(images[row] @ texts[k]) for k in range(3) if k != row and not true[row, k]]
        rivals += [float(images[row] @ misses[row, k]) for k in range(2) if misses[row, k].any()]
        wanted -= math.log(own / (own + sum(math.exp(5 * x) for x in rivals))) / 6
        rivals = [float(images[k] @ texts[row]) for k in range(3) if k != row and not true[k, row]]
        wanted -= math.log(own / (own + sum(math.exp(5 * x) for x in rivals))) / 6
    scale = torch.tensor(5.0, requires_grad=True)
    loss = contrastive_loss(images, texts, misses, true, scale)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-5) and torch.isfinite(scale.grad)


def test_training_a_scorer_ends_alike_interrupted_or_not(monkeypatch, tmp_path):
    monkeypatch.setattr(train_features, "_IMAGES", 24)
    monkeypatch.setattr(train_features, "_BATCH", 8)
    monkeypatch.setattr(train_features, "accuracies", lambda *_, **__: {"done": 1})
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    assert train_features.train_features(tmp_path / "whole", whole, steps=4) == {"done": 1}
    step = train_features.FeatureTrainer.step

    def interrupted(self, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number)

    monkeypatch.setattr(train_features.FeatureTrainer, "step", interrupted)
    assert train_features.train_features(tmp_path / "parts", parts, steps=4) is None and not parts.exists()
    monkeypatch.setattr(train_features.FeatureTrainer, "step", step)
    assert train_features.train_features(tmp_path / "parts", parts, steps=4) == {"done": 1}
    assert whole.read_bytes() == parts.read_bytes()


def test_a_run_is_scored_by_all_three_unasked_and_few_images_are_warned_about(few_renders, tmp_path):
    folder = drawn_run(tmp_path)
    outcomes = scoring.score([folder], bundled_only=True)
    bundled = ("shapes-clip", "shapes-detector", "shapes-frechet")
    assert tuple(outcome.metric for outcome in outcomes) == bundled
    scores = {row["metric"]: row for row in read_scores(folder)}
    assert scores["shapes-frechet"]["low"] is None and "6 images are few" in scores["shapes-frechet"]["note"]
    assert scores["shapes-clip"]["low"] is not None and scores["shapes-clip"]["note"] is None
    text = render_tables(report_rows([folder]))
    assert all(f"| {name} |" in text and f"- {name}: " in text for name in bundled)
    assert "shapes-frechet: 6 images are few for 64 features" in text


def test_a_missing_package_leaves_the_metric_out_and_says_so(few_renders, tmp_path, monkeypatch):
    monkeypatch.setattr(ShapesClip, "packages", {"no-such-package": "pip install it"})
    told = []
    reporter = scoring.ScoreReporter()
    reporter.left_out = lambda name, metric, why: told.append((metric, why))
    folder = drawn_run(tmp_path)
    scoring.score([folder], reporter=reporter, bundled_only=True)
    assert "shapes-clip" not in {row["metric"] for row in read_scores(folder)}
    assert [metric for metric, _ in told] == ["shapes-clip"] and "no-such-package" in told[0][1]


def test_the_reference_depends_on_captions_and_nothing_else():
    requests = [json.dumps(prompt.meta["scene"], sort_keys=True) for prompt in load_prompts("shapes").prompts[:2]]
    one = list(shapes.true_pictures(requests[:1], 3))
    both = list(shapes.true_pictures(requests, 3))
    assert all(np.array_equal(a, b) for a, b in zip(one, both, strict=False)) and len(both) == 6
    assert not np.array_equal(both[0], both[1])


def test_scores_name_their_weights_and_renderer(monkeypatch):
    for metric, fact in ((ShapesClip, "weights"), (ShapesFrechet, "weights"), (ShapesFrechet, "renderer")):
        assert metric().identity()[fact]
    before = fingerprint(ShapesFrechet())
    monkeypatch.setattr(shapes, "_SEED", 1)
    assert fingerprint(ShapesFrechet()) != before
