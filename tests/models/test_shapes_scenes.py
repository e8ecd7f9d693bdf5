"""Captions of the `shapes` model are parsed, or rejected by naming the unknown part; scenes and captions are in reading
order; the detector finds each rendered object, compares the objects with the caption, and is as right on
reconstructions; prompt sets contain only combinations held out from training. It concerns several modules: captions,
scene, render, detector and tokenizer."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused

from dev.shapes.data import owners, wordings
from specbench.models.shapes import captions
from specbench.models.shapes.captions import caption, parse
from specbench.models.shapes.detector import Detection, detect, judge
from specbench.models.shapes.network import load_tokenizer
from specbench.models.shapes.render import background, render
from specbench.models.shapes.scene import (
    CATEGORIES,
    TEXTURES,
    Clause,
    Item,
    Scene,
    SceneError,
    SceneRequest,
    describe,
    holds,
    in_reading_order,
    realize,
    realize_in_order,
    sample_request,
    worded_in_reading_order,
)


def drawn(count: int, seed: int) -> Iterator[tuple[Scene, SceneRequest]]:
    """Scenes and what a caption may ask of them."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        scene = realize(sample_request(rng), rng)
        yield scene, describe(scene, rng)


def test_every_caption_reads_back_as_the_request_it_words():
    for _, request in drawn(500, seed=0):
        assert captions.parse(captions.caption(request)) == request


@pytest.mark.parametrize(("text", "request_"), [
    ("Three red circles.", SceneRequest((Clause("circle", "red", 3),))),
    ("the cross", SceneRequest((Clause("cross"),))),
    ("a square to the left of a blue cross", SceneRequest((Clause("square"), Clause("cross", "blue")), (("left", 0,
     1),))),
    ("a circle under a square on a grainy background", SceneRequest((Clause("circle"), Clause("square")), (("below",
     0, 1),), "grainy")),
    ("a red circle, a blue square and a green cross", SceneRequest((Clause("circle", "red"), Clause("square", "blue"),
     Clause("cross", "green")))),
    ("2 squares on a striped background", SceneRequest((Clause("square", None, 2),), (), "striped")),
])  # fmt: skip
def test_free_wordings_are_read(text, request_):
    assert captions.parse(text) == request_


def test_captions_of_one_normal_form_have_one_meaning_and_relations_one_wording():
    meanings, turned, chained = {}, 0, 0
    for _, request in drawn(3000, seed=1):
        words = captions.words(captions.caption(request))
        normal = captions.in_normal_form(words)
        joining = {"and", *captions.RELATIONS}
        assert sorted(set(normal) - joining) == sorted(set(words) - joining)
        assert not {"right", "below"} & set(normal)
        assert meanings.setdefault(tuple(normal), request.key()) == request.key()
        turned += normal != words
        chained += len(request.relations) == 2
    assert turned > 300 and chained > 50


@pytest.mark.parametrize(("text", "normal"), [
    ("a red circle right of a cross on a grainy background", "cross left red circle on grainy"),
    ("a circle under a square", "square above circle"),
    ("a circle left of a square and below a cross", "cross above circle left square"),
    ("a circle right of a square and below a cross", "cross above and square left circle"),
    ("a circle above a square and left of a cross", "circle left cross and above square"),
    ("a circle left of a square and a cross", "circle left square and cross"),
    ("a circle right of a square and a cross", "circle right square and cross"),
    ("two circles and a square", "two circle and square"),
])  # fmt: skip
def test_objects_of_the_normal_form_are_in_raster_order(text, normal):
    assert " ".join(captions.in_normal_form(captions.words(text))) == normal


def test_the_network_reads_the_normal_form():
    assert captions.encode("a square right of a red circle") == captions.encode("a red circle left of a square")


@pytest.mark.parametrize("understand", [captions.encode, captions.parse])
@pytest.mark.parametrize(("text", "named"), [("a red dog", "dog"), ("a pink circle", "pink"), ("", "''")])
def test_what_is_not_understood_is_named(understand, text, named):
    assert isinstance(refused(named, understand, text), ValueError)


@pytest.mark.parametrize("text", ["red", "a circle a square", "four circles and a square", "a circle and", "striped"])
def test_a_caption_without_a_meaning_is_refused(text):
    refused(text, captions.parse, text)


def test_a_caption_that_does_not_fit_is_refused():
    refused("at most 15 fit", captions.encode, "a circle and " * 8)


def test_the_second_object_has_the_same_slots_whatever_joins_it():
    joined = [captions.encode(f"a red circle {word} a blue square") for word in ("and", "left of", "above")]
    assert {tuple(ids[3:]) for ids in joined} == {tuple(joined[0][3:])}
    assert all(len(ids) == captions.PREFIX for ids in [*joined, captions.null_caption()])


PROMPTS = Path(__file__).parents[2] / "prompts"
LEFT, RIGHT = Item("circle", "red", 16, 24, 6), Item("cross", "blue", 48, 16, 6)


def ordered_scenes(count: int) -> list[Scene]:
    return [ordered for scene, _ in drawn(count, seed=1) if (ordered := in_reading_order(scene))]


def test_objects_are_numbered_as_a_row_by_row_drawing_meets_them():
    scenes = ordered_scenes(300)
    assert len(scenes) > 150
    for scene in scenes:
        seen = owners(scene)
        assert list(dict.fromkeys(seen[seen > 0])) == list(range(1, len(scene.items) + 1))


def test_a_left_object_that_begins_below_the_right_one_is_refused():
    assert in_reading_order(Scene((LEFT, RIGHT), "smooth")) is None
    above = replace(LEFT, y=16)
    assert in_reading_order(Scene((RIGHT, above), "smooth")).items == (above, RIGHT)


def test_captions_with_relations_keep_their_meaning_and_their_subject():
    rng = np.random.default_rng(5)
    moved = 0
    for scene in (s for s in ordered_scenes(300) if len(s.items) == 3):
        request = describe(scene, rng)
        if request.relations:
            worded = worded_in_reading_order(request, scene)
            assert worded.key() == request.key()
            assert worded.clauses[0] == request.clauses[0]
            moved += worded.clauses != request.clauses
    assert moved > 3


def test_scenes_of_a_caption_are_in_its_order_and_satisfy_it():
    """For every prompt of both sets: the first scene drawn is in order and the detector finds what was asked for."""
    for line in lines("shapes") + lines("shapes-hard"):
        request = SceneRequest.from_json(line["scene"])
        scene = realize_in_order(request, np.random.default_rng(4))
        assert in_reading_order(scene) == scene
        assert judge(request, detect(render(scene))).correct
        if not request.relations:
            shapes = [clause.shape for clause in request.clauses for _ in range(clause.count)]
            assert [item.shape for item in scene.items] == shapes


def test_held_out_renders_are_judged_correct_in_every_category():
    correct, exact = defaultdict(list), []
    for scene, request in drawn(600, seed=20260):
        detections = detect(render(scene))
        exact.append(sorted((d.shape, d.color) for d in detections) == sorted((i.shape, i.color) for i in scene.items))
        correct[request.category].append(judge(request, detections).correct)
    assert {*CATEGORIES, "hard"} == set(correct)
    assert {name: np.mean(values) for name, values in correct.items() if np.mean(values) < 0.98} == {}
    assert np.mean(exact) >= 0.98


def test_boxes_and_centres_are_where_the_objects_are():
    for scene, _ in drawn(100, seed=1):
        for item in scene.items:
            nearest = min(detect(render(scene)), key=lambda d: abs(d.x - item.x) + abs(d.y - item.y))
            assert abs(nearest.x - item.x) <= 1.5 and abs(nearest.y - item.y) <= 1.5
            assert abs(nearest.box[2] - nearest.box[0] - 2 * item.radius) <= 3


@pytest.mark.parametrize("texture", TEXTURES)
def test_an_empty_background_holds_nothing(texture):
    for seed in range(20):
        pixels = background(texture, np.random.default_rng(seed))
        assert detect((np.clip(pixels, 0, 1) * 255).astype(np.uint8)) == []


def test_a_wrong_picture_is_judged_wrong():
    def verdict(asked: str, shown: str):
        return judge(parse(asked), detect(render(realize(parse(shown), np.random.default_rng(3)))))

    assert not verdict("three red circles", "four red circles").correct
    assert not verdict("three red circles", "two red circles").correct
    assert verdict("a red circle", "two red circles").correct
    swapped = verdict("a red circle and a blue square", "a blue circle and a red square")
    assert swapped.shape and swapped.color and not swapped.bound and not swapped.correct
    turned = verdict("a red circle left of a blue square", "a red circle right of a blue square")
    assert turned.bound and turned.position is False and not turned.correct


def test_a_scene_satisfies_the_request_it_was_drawn_for():
    rng = np.random.default_rng(3)
    for _, request in drawn(200, seed=2):
        scene = realize(request, rng)
        detections = [Detection(i.shape, i.color, i.x, i.y, (0, 0, 0, 0), 1.0) for i in scene.items]
        assert judge(request, detections).correct, caption(request)


def test_what_no_scene_holds_is_refused():
    clauses = parse("four red circles").clauses * 2
    with pytest.raises(SceneError, match="at most 4 objects"):
        realize(SceneRequest(clauses), np.random.default_rng(0))


def test_only_uint8_images_of_the_right_size_are_judged():
    with pytest.raises(ValueError, match="float64"):
        detect(np.zeros((64, 64, 3)))
    assert holds("left", 10, 0, 30, 0) and not holds("left", 30, 0, 10, 0) and not holds("left", 10, 0, 14, 0)


def test_the_detector_is_nearly_as_right_on_reconstructions_which_are_like_the_originals():
    torch.set_num_threads(1)
    scenes, requests = zip(*drawn(240, seed=99), strict=True)
    images = torch.from_numpy(np.stack([render(s) for s in scenes])).permute(0, 3, 1, 2)
    tokenizer = load_tokenizer()
    tokens = torch.cat([tokenizer.encode(part) for part in images.split(40)])
    again = torch.cat([tokenizer.decode(part) for part in tokens.split(40)])
    verdicts = [judge(r, detect(i.permute(1, 2, 0).numpy())).correct for r, i in zip(requests, again, strict=True)]
    assert np.mean(verdicts) >= 0.97
    error = (images.float() - again.float()).square().mean() / 255**2
    assert again.dtype == torch.uint8 and -10 * torch.log10(error) > 28
    assert len(tokens.unique()) >= 0.98 * tokenizer.codebook.shape[0]


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines()]


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
    ids = [line["id"] for line in lines("shapes") + lines("shapes-hard")]
    assert len(ids) == len(set(ids))


def test_training_never_words_a_held_out_meaning():
    asked = {tuple(captions.encode(line["prompt"])) for line in lines("shapes") + lines("shapes-hard")}
    rng, seen = np.random.default_rng(3), 0
    for _ in range(1000):
        for ids in wordings(realize(sample_request(rng), rng), rng) or []:
            seen += 1
            assert tuple(ids) not in asked
    assert seen > 3000
