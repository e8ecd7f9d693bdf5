"""Captions of the `shapes` model are parsed, or rejected by naming the unknown part."""

import numpy as np
import pytest

from specbench.errors import SpecbenchError
from specbench.models.shapes import captions
from specbench.models.shapes.scene import Clause, SceneRequest, describe, realize, sample_request


def test_every_caption_reads_back_as_the_request_it_words():
    rng = np.random.default_rng(0)
    for _ in range(500):
        request = describe(realize(sample_request(rng), rng), rng)
        assert captions.parse(captions.caption(request)) == request


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("Three red circles.", SceneRequest((Clause("circle", "red", 3),))),
        ("the cross", SceneRequest((Clause("cross"),))),
        (
            "a square to the left of a blue cross",
            SceneRequest((Clause("square"), Clause("cross", "blue")), (("left", 0, 1),)),
        ),
        (
            "a circle under a square on a grainy background",
            SceneRequest((Clause("circle"), Clause("square")), (("below", 0, 1),), "grainy"),
        ),
        (
            "a red circle, a blue square and a green cross",
            SceneRequest((Clause("circle", "red"), Clause("square", "blue"), Clause("cross", "green"))),
        ),
        ("2 squares on a striped background", SceneRequest((Clause("square", None, 2),), (), "striped")),
    ],
)
def test_free_wordings_are_read(text, request_):
    assert captions.parse(text) == request_


def test_captions_of_one_normal_form_have_one_meaning_and_relations_one_wording():
    rng = np.random.default_rng(1)
    meanings, turned, chained = {}, 0, 0
    for _ in range(3000):
        request = describe(realize(sample_request(rng), rng), rng)
        words = captions.words(captions.caption(request))
        normal = captions.in_normal_form(words)
        joining = {"and", *captions.RELATIONS}
        assert sorted(set(normal) - joining) == sorted(set(words) - joining)
        assert not {"right", "below"} & set(normal)
        assert meanings.setdefault(tuple(normal), request.key()) == request.key()
        turned += normal != words
        chained += len(request.relations) == 2
    assert turned > 300
    assert chained > 50


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("a red circle right of a cross on a grainy background", "cross left red circle on grainy"),
        ("a circle under a square", "square above circle"),
        ("a circle left of a square and below a cross", "cross above circle left square"),
        ("a circle right of a square and below a cross", "cross above and square left circle"),
        ("a circle above a square and left of a cross", "circle left cross and above square"),
        ("a circle left of a square and a cross", "circle left square and cross"),
        ("a circle right of a square and a cross", "circle right square and cross"),
        ("two circles and a square", "two circle and square"),
    ],
)
def test_objects_of_the_normal_form_are_in_raster_order(text, normal):
    assert " ".join(captions.in_normal_form(captions.words(text))) == normal


def test_the_network_reads_the_normal_form():
    assert captions.encode("a square right of a red circle") == captions.encode("a red circle left of a square")


@pytest.mark.parametrize("understand", [captions.encode, captions.parse])
@pytest.mark.parametrize(("text", "named"), [("a red dog", "dog"), ("a pink circle", "pink"), ("", "''")])
def test_what_is_not_understood_is_named(understand, text, named):
    with pytest.raises(SpecbenchError, match=named) as caught:
        understand(text)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", ["red", "a circle a square", "four circles and a square", "a circle and", "striped"])
def test_a_caption_without_a_meaning_is_refused(text):
    with pytest.raises(SpecbenchError, match=text):
        captions.parse(text)


def test_a_caption_that_does_not_fit_is_refused():
    with pytest.raises(SpecbenchError, match="at most 15 fit"):
        captions.encode("a circle and " * 8)


def test_the_second_object_stands_in_the_same_slots_whatever_joins_it():
    joined = [captions.encode(f"a red circle {word} a blue square") for word in ("and", "left of", "above")]
    assert {tuple(ids[3:]) for ids in joined} == {tuple(joined[0][3:])}
    assert all(len(ids) == captions.PREFIX for ids in [*joined, captions.null_caption()])
