"""The scene of a prompt is anybody's JSON: only a request that a picture can satisfy is scored."""

import pytest
from drawn import drawn_run

from specbench.metrics import scoring
from specbench.metrics.shapes import read_request
from specbench.prompts import load_prompts

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
    assert read_request({"scene": scene}) is None


def test_every_shipped_prompt_has_a_request_and_images_of_malformed_scenes_are_left_out(tmp_path):
    folder = drawn_run(tmp_path, n=2, meta=lambda number: {"scene": MALFORMED[7]})
    assert not [*scoring.score([folder], (), where_they_fit=["shapes-detector"])]
    prompts = load_prompts("shapes").prompts
    assert all(read_request(prompt.meta) for prompt in prompts)
