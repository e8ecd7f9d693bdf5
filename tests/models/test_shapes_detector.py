"""The detector finds each rendered object, and compares the objects with the caption."""

from collections import defaultdict

import numpy as np
import pytest
from PIL import Image

from specbench.models.shapes.captions import caption, parse
from specbench.models.shapes.detector import Detection, detect, judge
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import (
    CATEGORIES,
    TEXTURES,
    SceneError,
    SceneRequest,
    describe,
    holds,
    realize,
    sample_request,
)


def render_caption(text: str, seed: int) -> Image.Image:
    """Render a scene that satisfies a caption."""
    return Image.fromarray(render(realize(parse(text), np.random.default_rng(seed))))


def test_held_out_renders_are_judged_correct_in_every_category():
    rng = np.random.default_rng(20260)
    correct, exact = defaultdict(list), []
    for _ in range(600):
        scene = realize(sample_request(rng), rng)
        detections = detect(render(scene))
        exact.append(sorted((d.shape, d.color) for d in detections) == sorted((i.shape, i.color) for i in scene.items))
        request = describe(scene, rng)
        correct[request.category].append(judge(request, detections).correct)
    assert {*CATEGORIES, "hard"} == set(correct)
    assert {name: np.mean(values) for name, values in correct.items() if np.mean(values) < 0.98} == {}
    assert np.mean(exact) >= 0.98


def test_boxes_and_centres_are_where_the_objects_are():
    rng = np.random.default_rng(1)
    for _ in range(100):
        scene = realize(sample_request(rng), rng)
        for item in scene.items:
            nearest = min(detect(render(scene)), key=lambda d: abs(d.x - item.x) + abs(d.y - item.y))
            assert abs(nearest.x - item.x) <= 1.5 and abs(nearest.y - item.y) <= 1.5
            assert abs(nearest.box[2] - nearest.box[0] - 2 * item.radius) <= 3


@pytest.mark.parametrize("texture", TEXTURES)
def test_an_empty_background_holds_nothing(texture):
    from specbench.models.shapes.render import background

    for seed in range(20):
        pixels = background(texture, np.random.default_rng(seed))
        assert detect((np.clip(pixels, 0, 1) * 255).astype(np.uint8)) == []


@pytest.mark.parametrize(
    "text", ["a red circle left of a blue square", "three red circles", "a cross on a grainy background"]
)
def test_a_rendered_caption_shows_what_it_says(text):
    for seed in range(5):
        first, again = render_caption(text, seed), render_caption(text, seed)
        assert first.tobytes() == again.tobytes() and first.size == (64, 64)
        assert judge(parse(text), detect(np.asarray(first))).correct
    assert render_caption(text, 1).tobytes() != render_caption(text, 2).tobytes()


def test_a_wrong_picture_is_judged_wrong():
    def verdict(asked: str, shown: str):
        return judge(parse(asked), detect(np.asarray(render_caption(shown, 3))))

    assert not verdict("three red circles", "four red circles").correct
    assert not verdict("three red circles", "two red circles").correct
    assert verdict("a red circle", "two red circles").correct
    swapped = verdict("a red circle and a blue square", "a blue circle and a red square")
    assert swapped.shape and swapped.color and not swapped.bound and not swapped.correct
    turned = verdict("a red circle left of a blue square", "a red circle right of a blue square")
    assert turned.bound and turned.position is False and not turned.correct


def test_a_scene_satisfies_the_request_it_was_drawn_for():
    rng = np.random.default_rng(2)
    for _ in range(200):
        request = describe(realize(sample_request(rng), rng), rng)
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
