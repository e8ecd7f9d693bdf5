"""Scenes and captions in reading order: which object comes next follows from the caption."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from dev.shapes.data import owners
from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import (
    Item,
    Scene,
    SceneRequest,
    describe,
    in_reading_order,
    realize,
    realize_in_order,
    sample_request,
    worded_in_reading_order,
)

PROMPTS = Path(__file__).parents[2] / "prompts"
LEFT, RIGHT = Item("circle", "red", 16, 24, 6), Item("cross", "blue", 48, 16, 6)


def ordered_scenes(count: int) -> list[Scene]:
    rng = np.random.default_rng(1)
    scenes = (in_reading_order(realize(sample_request(rng), rng)) for _ in range(count))
    return [scene for scene in scenes if scene]


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


def test_scenes_of_a_caption_stand_in_its_order_and_satisfy_it():
    """For every prompt of both sets: the first scene drawn is in order and the detector finds what was asked for."""
    for line in [line for name in ("shapes", "shapes-hard") for line in (PROMPTS / f"{name}.jsonl").open()]:
        request = SceneRequest.from_json(json.loads(line)["scene"])
        scene = realize_in_order(request, np.random.default_rng(4))
        assert in_reading_order(scene) == scene
        assert judge(request, detect(render(scene))).correct
        if not request.relations:
            shapes = [clause.shape for clause in request.clauses for _ in range(clause.count)]
            assert [item.shape for item in scene.items] == shapes
