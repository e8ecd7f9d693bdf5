"""T2I-CompBench++ on detected objects: rules, detector and depth adapters, and the 3-in-1 score."""

import itertools
import os
from pathlib import Path

import calibrated
import numpy as np
import pandas as pd
import pytest
import torch

from specbench.metrics import compbench_detected, openclip
from specbench.metrics.base import Sample, Settings
from specbench.metrics.compbench_detected import (
    Depth,
    Numeracy,
    Owl,
    Spatial2d,
    Spatial3d,
    SpatialOfComplex,
    ThreeInOne,
    mean_in,
)
from specbench.metrics.compbench_rules import (
    DEPTH_SIGNS,
    SPATIAL_RELATIONS,
    around_preposition,
    contained,
    numeracy,
    overlap,
    placed,
    relation,
    spatial,
    spatial_3d,
    three_in_one,
)
from specbench.metrics.geneval_rules import Found
from specbench.metrics.openclip import import_open_clip
from specbench.prompts.public_files import counts


def box(x: float, y: float, width: float = 10, height: float = 10) -> tuple[float, float, float, float]:
    return (x, y, x + width, y + height)


def test_overlap_and_containment_of_boxes_follow_the_official_rules():
    assert overlap(box(0, 0), box(5, 0)) == pytest.approx(50 / 150)
    assert contained(box(0, 0), box(2, 2, 4, 4)) == 1 and overlap(box(0, 0), box(2, 2, 4, 4)) == 0.16
    assert overlap(box(0, 0), box(10, 0)) == 0 and overlap((1, 1, 1, 1), (1, 1, 1, 1)) == 0


@pytest.mark.parametrize(("dx", "dy"), list(itertools.product((-40, -3, 0, 3, 40), repeat=2)))
def test_a_side_needs_the_sign_the_axis_and_no_overlap(dx, dy):
    a, b = box(100 + dx, 100 + dy), box(100, 100)
    right = {
        "on the left of": dx < 0 and abs(dx) > abs(dy),
        "on the right of": dx > 0 and abs(dx) > abs(dy),
        "on the top of": dy < 0 and abs(dy) > abs(dx),
        "on the bottom of": dy > 0 and abs(dy) > abs(dx),
    }
    common = overlap(a, b)
    for asked, holds in right.items():
        expected = 0 if not holds else 1 if common < 0.1 else 0.1 / common
        assert placed(a, b, asked, 479) == pytest.approx(expected)


def test_beside_is_within_150_of_479_on_one_axis():
    for asked in ("on side of", "next to", "near"):
        assert placed(box(0, 0), box(149, 300), asked, 479) == 1
        assert placed(box(0, 0), box(160, 300), asked, 479) == pytest.approx(150 / 300)
        assert placed(box(0, 0), box(298, 600), asked, 958) == 1, "the reach grows with the picture"


def test_the_2d_score_is_scores_and_place_and_nothing_below_a_half():
    left, right = Found(box(0, 0), 0.6), Found(box(50, 0), 0.8)
    assert spatial(left, right, "on the left of", 100) == pytest.approx(0.25 * 1.4 + 0.5)
    assert spatial(right, left, "on the left of", 100) == 0, "0.35 is below a half"
    assert spatial(left, None, "on the left of", 100) == spatial(None, None, None, 100) == 0
    assert spatial(Found(box(0, 0), 1.0), Found(box(50, 0), 1.0), "on top of", 100) == 0.5, "no rule for it"


@pytest.mark.parametrize("asked", DEPTH_SIGNS)
@pytest.mark.parametrize("shift", [0, 2, 4, 20])
@pytest.mark.parametrize("nearer", [1, -1])
def test_the_3d_score_is_order_and_overlap(asked, shift, nearer):
    first, second = Found(box(0, 0), 0.5), Found(box(shift, 0), 0.7)
    depth = {first.box: 0.5 + 0.1 * nearer, second.box: 0.5} if shift else {first.box: 0.5}
    common = overlap(first.box, second.box)
    right = shift and (nearer == 1) == (asked == "in front of")
    place = 0 if not right else 1 if common > 0.5 else common / 0.5
    assert spatial_3d(first, second, asked, depth.__getitem__) == pytest.approx(0.3 + 0.5 * place)
    assert spatial_3d(first, None, asked, depth.__getitem__) == 0.125


def test_relations_are_found_in_their_order():
    assert relation("A girl on the top of a frog", SPATIAL_RELATIONS) == "on the top of"
    assert relation("the hat was on top of the rack", SPATIAL_RELATIONS) == "on top of"
    assert relation("a chair hidden by a mouse", DEPTH_SIGNS) == "hidden" and relation("a chair", DEPTH_SIGNS) is None


@pytest.mark.parametrize(("sentence", "objects"), [
    ("The/DET red/ADJ hat/NOUN was/AUX on/ADP top/NOUN of/ADP the/DET brown/ADJ rack/NOUN ./PUNCT", ("hat", "rack")),
    ("a/DET cat/NOUN near/ADP a/DET dog/NOUN with/ADP a/DET ball/NOUN", ("cat", "dog")),
    ("a/DET cat/NOUN with/ADP a/DET ball/NOUN next/ADV to/ADP a/DET dog/NOUN", ("ball", "dog")),
    ("Rex/PROPN near/ADP the/DET Eiffel/PROPN Tower/PROPN ./PUNCT", ("Rex", "Tower")),
    ("a/DET cat/NOUN near/ADP Rex/PROPN", None),
    ("a/DET cat/NOUN near/ADP a/DET dog/NOUN near/ADP a/DET cup/NOUN", None),
    ("a/DET cat/NOUN and/CCONJ a/DET dog/NOUN", None),
    ("on/ADP the/DET left/NOUN", None),
])  # fmt: skip
def test_objects_of_complex_prompts_stand_around_the_preposition(sentence, objects):
    words = [tuple(word.split("/")) for word in sentence.split()]
    assert around_preposition(words) == objects


def test_counting_merges_what_is_one_object():
    cups = [Found(box(0, 0), 0.9), Found(box(0.2, 0), 0.8), Found(box(2, 2, 3, 3), 0.7), Found(box(30, 0), 0.6)]
    assert numeracy({"cup": 2}, {"cup": cups}) == 1
    assert numeracy({"cup": 3}, {"cup": cups}) == 0.5 and numeracy({"cup": 1}, {}) == 0
    assert numeracy({"cup": 2, "dog": 1, "cat": 1}, {"cup": cups, "dog": cups}) == pytest.approx((1 + 0.5 + 0) / 3)


def test_counts_are_read_from_the_prompt():
    names = {"cup": "cup", "cups": "cup", "mice": "mouse", "mouse": "mouse", "cell phones": "cell phone"}
    text = "Two cups, a mouse, five mice and ten cell phones decorated a room"
    assert counts(text, names) == {"cup": 2, "mouse": 6, "cell phone": 10}


def test_every_published_numeracy_prompt_asks_for_something():
    folder = os.environ.get("PROMPT_DATA_FOLDER")
    if not folder:
        pytest.skip("PROMPT_DATA_FOLDER names no folder of the published prompts")
    from specbench.prompts.public_files import read_t2i_compbench

    prompts = [prompt for prompt in read_t2i_compbench(Path(folder) / "t2i-compbench") if prompt.category == "numeracy"]
    assert len(prompts) == 300 and all(prompt.meta["counts"] for prompt in prompts)
    asked = {prompt.text: prompt.meta["counts"] for prompt in prompts}
    assert asked["two boys"] == {"boy": 2}
    assert asked["two sheep, four dogs, three candles, and three bees created a warm atmosphere"] == {
        "sheep": 2, "dog": 4, "candle": 3, "bee": 3
    }  # fmt: skip


def test_three_in_one_by_a_worked_example():
    parts = {"blip": 0.64, "clip": 0.31, "spatial": 0.85}
    assert three_in_one("spatial", parts) == pytest.approx((0.85 + 0.64) / 2)
    assert three_in_one("action", parts) == pytest.approx((0.31 + 0.64) / 2)
    assert three_in_one("spatialaction", parts) == pytest.approx((0.85 + 0.31 + 0.64) / 3)


def sample(prompt: str, category: str, meta: dict, pixels: np.ndarray, number: int = 0) -> Sample:
    return Sample(f"p{number}", 0, prompt, category, {"line": number} | meta, pixels)


class Words:
    """A grammar for sentences like "a red cat near a dog"."""

    def nouns(self, text):
        return [word for word in text.split() if word in ("cat", "dog")]

    def words(self, text):
        return [(word, "NOUN" if word in ("cat", "dog", "ball") else "X") for word in text.split()]

    def without_adjectives(self, text):
        return " ".join(word for word in text.split() if word != "red")


class Constant:
    """A part of 3-in-1 that answers the same and remembers what it was asked."""

    def __init__(self, value):
        self.value, self.asked = value, []

    def features(self, samples):
        self.asked += [shown.prompt for shown in samples]
        return [{"value": self.value} for _ in samples]


def test_three_in_one_asks_each_part_for_what_it_needs_alone():
    metric = ThreeInOne(Settings(offline=True))
    metric.parts = {"blip": Constant(0.6), "clip": Constant(0.3), "spatial": Constant(0.9)}
    metric.grammar = Words()
    pixels = calibrated.images(1)[0]
    kinds = ("action", "spatial", "spatialaction")
    rows = metric.features([sample(f"a red cat {kind}", "complex", {"kind": kind}, pixels) for kind in kinds])
    assert [row["value"] for row in rows] == pytest.approx([0.45, 0.75, 0.6])
    assert rows[0]["spatial"] is None and rows[1]["clip"] is None
    assert metric.parts["clip"].asked == ["a cat action", "a cat spatialaction"]
    assert metric.parts["spatial"].asked == ["a red cat spatial", "a red cat spatialaction"]
    frame = pd.DataFrame(rows).assign(category="complex", prompt_id=list("abc"))
    (score,) = metric.scores(frame)
    assert score.name == "compbench[3-in-1-owlv2]:complex" and score.estimate.value == pytest.approx(0.6)
    assert not metric.accepts("complex", {"line": 0}) and metric.accepts("complex", {"line": 0, "kind": "action"})


def test_three_in_one_names_once_whatever_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metric = ThreeInOne(Settings(offline=True))
    metric.packages = {"no-such-package": "pip install it"}
    lacking = [what for what, _ in metric.missing()]
    assert len(set(lacking)) == len(lacking) >= 4
    for name in ("no-such-package", "model_base_vqa", "bert-base-uncased", "ViT-B-32", "google/owlv2"):
        assert sum(name in what for what in lacking) == 1, name


@pytest.fixture(scope="module")
def tiny_owl(tmp_path_factory):
    try:
        import_open_clip()
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    from transformers import Owlv2Config, Owlv2ForObjectDetection, Owlv2TextConfig, Owlv2VisionConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Owlv2Config(
        text_config=Owlv2TextConfig(**sizes, vocab_size=49408, max_position_embeddings=16).to_dict(),
        vision_config=Owlv2VisionConfig(**sizes, image_size=64, patch_size=16).to_dict(),
        projection_dim=16,
    )
    network = Owlv2ForObjectDetection(config)
    head = network.class_head
    for part, bias in ((head.logit_shift, 0.0), (head.logit_scale, 3.0)):
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.constant_(part.bias, bias)
    folder = tmp_path_factory.mktemp("owl")
    network.save_pretrained(folder)
    return folder


def test_the_detector_sees_each_image_as_if_alone(tiny_owl, monkeypatch):
    monkeypatch.setattr(compbench_detected, "THRESHOLD", 0.0)
    detector = Owl(tiny_owl, "cpu")
    images = [*calibrated.images(1, 60, 90), *calibrated.images(2, 80, 50, seed=3)]
    names = [["cat", "dog"], ["giraffe"], []]
    together = detector(images, names)
    assert [list(objects) for objects in together] == names
    scores = []
    for pixels, asked, beside in zip(images, names, together, strict=True):
        (alone,) = detector([pixels], [asked])
        height, width = pixels.shape[:2]
        for name in asked:
            assert [box.score for box in beside[name]] == pytest.approx([box.score for box in alone[name]], abs=1e-6)
            assert np.allclose([box.box for box in beside[name]], [box.box for box in alone[name]], atol=1e-3)
            assert all(0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height for x1, y1, x2, y2 in
                       (box.box for box in beside[name]))  # fmt: skip
            scores.append(round(beside[name][0].score, 5))
    assert len(set(scores)) == 3, "queries and images make a difference"


def test_the_detector_goes_in_as_transformers_does(tiny_owl):
    image = calibrated.images(1, 64, 64)[0]
    detector = Owl(tiny_owl, "cpu")
    (boxes,) = detector([image], [["cat"]])
    ids = torch.tensor([[49406, 320, 1125, 539, 320, 2368, 49407] + [0] * 9])
    pixels = (torch.from_numpy(image).permute(2, 0, 1)[None] / 255 - torch.tensor(openclip.MEAN)[:, None, None]) / (
        torch.tensor(openclip.STD)[:, None, None]
    )
    with torch.no_grad():
        output = detector.network(pixel_values=pixels, input_ids=ids, attention_mask=(ids > 0).long())
    best = output.logits.sigmoid().amax().item()
    assert (
        boxes["cat"][0].score == pytest.approx(best, abs=1e-5)
        if best > compbench_detected.THRESHOLD
        else not boxes["cat"]
    )
    assert best > compbench_detected.THRESHOLD, "the comparison is not between nothings"


@pytest.fixture(scope="module")
def tiny_depth(tmp_path_factory):
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    torch.manual_seed(0)
    backbone = Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=28, patch_size=14,
        out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False,
    )  # fmt: skip
    config = DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=16, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        head_hidden_size=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("depth")
    DepthAnythingForDepthEstimation(config).save_pretrained(folder)
    return folder


def test_depth_runs_from_zero_to_one_over_the_pictures_own_pixels(tiny_depth, monkeypatch):
    monkeypatch.setattr("specbench.metrics.compbench_detected.SHORT", 42)
    near = Depth(tiny_depth, "cpu")(calibrated.images(1, 50, 83)[0])
    assert near.shape == (50, 83) and near.min() == 0 and near.max() == 1
    assert mean_in(np.arange(12.0).reshape(3, 4), (1, 0, 3, 2)) == pytest.approx((1 + 2 + 5 + 6) / 4)
    assert mean_in(near, (82.9, 49.9, 83, 50)) == pytest.approx(near[-1, -1])


def test_metrics_join_prompt_detector_and_rules():
    pixels = calibrated.images(1, 100, 200)[0]
    seen = {"cat": [Found(box(0, 0), 0.9), Found(box(99, 0), 0.3)], "dog": [Found(box(60, 0), 0.5)]}
    flat, deep, many = (kind(Settings(offline=True)) for kind in (Spatial2d, Spatial3d, Numeracy))
    for metric in (flat, deep, many):
        metric.grammar = Words()
        metric.detector = lambda images, names: [{name: seen.get(name, []) for name in asked} for asked in names]
    value = flat.features([sample("a cat on the left of a dog", "spatial", {}, pixels)])[0]["value"]
    assert value == pytest.approx(0.25 * 1.4 + 0.5)
    assert flat.features([sample("running", "spatial", {}, pixels)])[0]["value"] == 0
    assert SpatialOfComplex().objects != flat.objects, "features of the two are kept apart"
    turned = sample("a cat with a ball next to a dog", "complex", {}, pixels)
    assert SpatialOfComplex.names(flat, turned) == ["ball", "dog"] and flat.names(turned) == ["cat", "dog"]
    seen["dog"] = [Found(box(2, 0), 0.5)]
    deep.depth = lambda pixels: np.tile(np.linspace(1, 0, pixels.shape[1]), (len(pixels), 1))
    (row,) = deep.features([sample("a cat in front of a dog", "3d_spatial", {}, pixels)])
    assert row["value"] == pytest.approx(0.25 * 1.4 + 0.5) and '"dog"' in row["details"]
    asked = {"counts": {"cat": 2, "dog": 2}}
    assert many.features([sample("two cats and two dogs", "numeracy", asked, pixels)])[0]["value"] == 0.75
    assert many.accepts("numeracy", {"line": 0} | asked) and not many.accepts("numeracy", {"line": 0, "counts": {}})
