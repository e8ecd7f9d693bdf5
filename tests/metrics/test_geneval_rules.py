"""GenEval: exhaustive tests of the rules on boxes, the detector adapter, and exchange with the official evaluator."""

import itertools
import json

import authors_formats as formats
import calibrated
import numpy as np
import pandas as pd
import published
import pytest
import synthetic
import torch
from PIL import Image
from refusals import refused

from specbench.metrics import geneval, official_exchange
from specbench.metrics.base import Sample, Settings
from specbench.metrics.geneval import GenEval, Instance, Mask2Former, instances, mask2former_input
from specbench.metrics.geneval_rules import Found, confident, judge_image, relations
from specbench.prompts.public_files import read_geneval


def at(x: float, y: float, width: float = 10, height: float = 10, score: float = 1.0, color: str = "red") -> Found:
    """A box around a centre."""
    return Found((x - width / 2, y - height / 2, x + width / 2, y + height / 2), score, lambda: color)


@pytest.mark.parametrize(("tag", "threshold"), [("counting", 0.9), ("colors", 0.3), ("single_object", 0.3)])
def test_a_score_counts_only_above_its_threshold(tag, threshold):
    boxes = {"cow": [at(0, 0, score=threshold), at(1, 0, score=threshold + 1e-6)], "dog": [at(0, 0, score=0.1)]}
    assert {name: len(kept) for name, kept in confident(boxes, tag).items()} == {"cow": 1}


@pytest.mark.parametrize("count", range(1, 6))
def test_counting_is_exact(count):
    meta = {"include": [{"class": "cow", "count": count}], "exclude": [{"class": "cow", "count": count + 1}]}
    for there in range(8):
        assert judge_image(meta, {"cow": [at(i, 0) for i in range(there)]}).correct == (count == there)


def test_relations_are_the_rule_written_out():
    """Boxes of 10 x 10: two units beyond the centres' distance do not count, then half of the distance is needed."""
    for dx, dy in itertools.product(range(-30, 31, 3), repeat=2):
        distance = (dx**2 + dy**2) ** 0.5
        across, down = (max(abs(d) - 2, 0) * np.sign(d) / distance if distance else 0 for d in (dx, dy))
        expected = {"left of"} if across < -0.5 else {"right of"} if across > 0.5 else set()
        expected |= {"above"} if down < -0.5 else {"below"} if down > 0.5 else set()
        assert relations(at(dx, dy), at(0, 0)) == expected, (dx, dy)


@pytest.mark.parametrize(
    ("relation", "dx", "dy"), [("left of", -1, 0), ("right of", 1, 0), ("above", 0, -1), ("below", 0, 1)]
)
def test_position_looks_from_the_target(relation, dx, dy):
    meta = {"include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": [relation, 0]}]}
    assert judge_image(meta, {"cat": [at(0, 0)], "dog": [at(40 * dx, 40 * dy)]}).correct
    wrong = judge_image(meta, {"cat": [at(0, 0)], "dog": [at(-40 * dx, -40 * dy)]})
    assert not wrong.correct and wrong.reasons == (f"expected dog {relation} target",)
    assert "no target" in judge_image(meta, {"dog": [at(40 * dx, 40 * dy)]}).reasons[1]


def test_at_most_sixteen_objects_count_and_for_position_the_best_alone():
    meta = {"include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]}
    assert judge_image(meta, {"cat": [at(0, 0)], "dog": [at(-40, 0, score=0.9), at(40, 0, score=0.8)]}).correct
    assert not judge_image(meta, {"cat": [at(0, 0)], "dog": [at(40, 0, score=0.9), at(-40, 0, score=0.8)]}).correct
    kept = confident({"cow": [at(i, 0, score=0.5 + i / 100) for i in range(30)]}, "colors")["cow"]
    assert len(kept) == 16 and kept[0].score == pytest.approx(0.79) and kept[-1].score == pytest.approx(0.64)


@pytest.mark.parametrize("colors", list(itertools.product(("red", "blue"), repeat=2)))
def test_colour_must_hold_for_every_counted_object(colors):
    meta = {"include": [{"class": "cup", "count": 2, "color": "red"}]}
    cups = [at(i, 0, color=color) for i, color in enumerate(colors)]
    assert judge_image(meta, {"cup": cups}).correct == (colors == ("red", "red"))


def test_every_clause_must_hold_and_colours_are_not_asked_for_in_vain():
    meta = {"include": [{"class": "cup", "count": 1}, {"class": "dog", "count": 1}]}
    plain = Found((0, 0, 1, 1), 1.0, lambda: pytest.fail("a colour was classified that no clause asks for"))
    assert judge_image(meta, {"cup": [plain], "dog": [plain]}).correct
    assert judge_image(meta, {"cup": [plain]}).reasons == ("expected dog>=1, found 0",)


def judged(tags: list[str], correct: list[bool]) -> pd.DataFrame:
    ids = [f"p{i}" for i in range(len(tags))]
    return pd.DataFrame({"category": tags, "prompt_id": ids, "sample": 0, "correct": correct})


def test_overall_is_the_plain_mean_of_the_six_tags():
    rows = judged([*geneval.TAGS, "colors", "colors", "colors"], [True] * 6 + [False] * 3)
    overall, *parts = GenEval().scores(rows)
    assert (overall.name, overall.n, overall.estimate.value) == ("geneval[hf-m2f]", 9, pytest.approx(5.25 / 6))
    values = {part.name: part.estimate.value for part in parts}
    assert len(parts) == 6 and values["geneval[hf-m2f]:colors"] == 0.25 and values["geneval[hf-m2f]:counting"] == 1
    gap, n = GenEval().difference(rows, rows.assign(correct=True))
    assert n == 9 and gap.value == pytest.approx(-0.75 / 6)


@pytest.mark.parametrize("tags", [["colors"], ["colors", "counting"], [*geneval.TAGS, "own"]])
def test_the_mean_over_other_tags_is_not_called_geneval(tags):
    rows = judged(tags, [tag == "colors" for tag in tags])
    overall, *parts = GenEval().scores(rows)
    assert overall.name == f"geneval[hf-m2f]:overall of {len(tags)} tag{'s' if len(tags) > 1 else ''}"
    assert overall.estimate.value == pytest.approx(1 / len(tags)) and len(parts) == len(tags)
    assert "geneval[hf-m2f]" not in {score.name for score in (overall, *parts)}
    assert GenEval().difference(rows, rows) is None


@pytest.mark.parametrize(("shape", "size", "padded"), [
    ((100, 100), (800, 800), (800, 800)), ((480, 640), (800, 1067), (800, 1088)),
    ((100, 400), (333, 1333), (352, 1344)),
])  # fmt: skip
def test_pictures_go_in_with_their_shape_kept(shape, size, padded):
    x_CHW, inner = mask2former_input(calibrated.images(1, *shape)[0])
    assert inner == size and tuple(x_CHW.shape[1:]) == padded
    assert (x_CHW[:, size[0] :] == 0).all() and (x_CHW[:, :, size[1] :] == 0).all() and x_CHW.std() > 0.1


def test_instances_have_the_extent_and_the_score_of_their_mask():
    masks = torch.full((2, 20, 24), -8.0)
    masks[0, 4:12, 6:16] = 8.0
    classes = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 12.0]])
    segments = instances(classes, masks, {0: "cat", 1: "dog"}, (80, 96), (72, 80), (72, 80))
    best = segments[0]
    assert best.label == "dog" and np.allclose(best.box, (24, 16, 64, 48), atol=1)
    inside = torch.nn.functional.interpolate(masks[None, :1], (80, 96), mode="bilinear")[0, 0, :72, :80]
    expected = classes[0].softmax(0)[1] * inside.sigmoid()[inside > 0].mean()
    assert best.score == pytest.approx(expected.item(), rel=1e-4)
    assert len(segments) == 2, "each query has a score for every class; a query without a mask for none"


@pytest.fixture
def tiny_detector(tmp_path):
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    torch.manual_seed(0)
    swin = SwinConfig(image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
                      out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=swin, num_queries=7, hidden_dim=32, feature_size=32, mask_feature_size=32, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=16, encoder_feedforward_dim=16, num_labels=80,
    )  # fmt: skip
    Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path / "detector")
    return tmp_path / "detector"


def test_detector_runs_from_a_checkpoint_folder_and_what_it_finds_does_not_depend_on_the_batch(
    tiny_detector, monkeypatch
):
    monkeypatch.setattr("specbench.metrics.geneval.SHORT", 96)
    detector = Mask2Former(tiny_detector, "cpu", {number: f"class {number}" for number in range(80)} | geneval.RENAMED)
    images = [*calibrated.images(2, 60, 90), *calibrated.images(1, 90, 60), *calibrated.images(1, 60, 90, seed=5)]
    segments, *_ = together = detector(images)
    assert 0 < len(segments) <= 100 and all(segment.mask.shape == (60, 90) for segment in segments)
    for segment in segments:
        x1, y1, x2, y2 = segment.box
        assert segment.mask[y1:y2, x1:x2].sum() == segment.mask.sum() > 0 and 0 < segment.score < 1
    for pixels, beside in zip(images, together, strict=True):
        (alone,) = detector([pixels])
        assert [segment.label for segment in beside] == [segment.label for segment in alone]
        assert [segment.score for segment in beside] == pytest.approx([segment.score for segment in alone], rel=1e-5)
        boxes = (np.array([segment.box for segment in found]) for found in (beside, alone))
        assert np.abs(np.subtract(*boxes)).max() <= 1
    assert len({round(found[0].score, 6) for found in together}) == 4


def test_metric_joins_detector_colours_and_rules(monkeypatch, tmp_path):
    metric = GenEval(Settings(offline=True))
    mask = np.zeros((40, 60), dtype=bool)
    mask[10:30, 5:25] = True
    instances = [Instance("cup", 0.8, (5, 10, 25, 30), mask), Instance("cup", 0.04, (0, 0, 9, 9), mask)]
    metric.detector = lambda images: [instances for _ in images]
    monkeypatch.setattr(GenEval, "color", lambda self, pixels, instance: "green")
    asked = {"include": [{"class": "cup", "count": 1, "color": "green"}]}
    (row,) = metric.features([Sample("p", 0, "", "colors", asked, calibrated.images(1, 40, 60)[0])])
    assert row["correct"] and json.loads(row["details"]) == {"cup": [[5, 10, 25, 30, 0.8]]}


def test_colours_see_the_object_alone_on_grey(monkeypatch, tmp_path):
    try:
        formats.stand_in(monkeypatch, "clip-l14", formats.save_openai_clip(tmp_path / "ViT-L-14.pt"))
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    seen = []
    honest = geneval.short_side_centre
    monkeypatch.setattr(geneval, "short_side_centre", lambda pixels, size: seen.append(pixels) or honest(pixels, size))
    pixels = np.full((40, 60, 3), 255, dtype=np.uint8)
    mask = np.zeros((40, 60), dtype=bool)
    mask[10:30, 5:15] = True
    color = GenEval(Settings(offline=True)).color(pixels, Instance("cup", 1.0, (5, 10, 25, 30), mask))
    assert color in geneval.GENEVAL_COLORS
    assert seen[0].shape == (20, 20, 3) and (seen[0][:, :10] == 255).all() and (seen[0][:, 10:] == 0x99).all()


def test_the_detector_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problems = dict(GenEval().missing())
    assert any(geneval.GENEVAL_REPOSITORY in what and "specbench fetch" in hint for what, hint in problems.items())


def test_geneval_export_is_the_official_layout_file_by_file(tmp_path):
    run = synthetic.pictured(tmp_path, read_geneval(published.write("geneval", tmp_path / "set")), 2)
    assert official_exchange.export_images("geneval", run, tmp_path / "out") == 4
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    names = ("metadata.jsonl", "samples/0000.png", "samples/0001.png")
    assert files == [f"0000{n}/{name}" for n in (0, 1) for name in names]
    for line, metadata in enumerate(published.GENEVAL):
        assert json.loads((tmp_path / f"out/0000{line}/metadata.jsonl").read_text()) == metadata
    assert np.asarray(Image.open(tmp_path / "out/00001/samples/0000.png")).max() == 2
    refused("not an empty folder", official_exchange.export_images, "geneval", run, tmp_path / "out")
