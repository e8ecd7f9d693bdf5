"""Drawing prompts: the same for every decoder, nested, and described in words."""

from collections import Counter

import pytest
from refusals import refused

from specbench.prompts import Prompt, build_prompt_set
from specbench.prompts.loading import load_prompts
from specbench.prompts.prompt_set import Drawing

PETS = [Prompt(f"p{number:02d}", f"pet {number}", ("cats", "dogs", "fish")[number % 3]) for number in range(30)]
SET = build_prompt_set("pets", PETS)


def drawn(**options) -> list[str]:
    return [prompt.id for prompt in Drawing(**options).of(SET)]


def test_a_sample_is_random_nested_in_file_order_and_the_same_in_any_order_of_the_file():
    small, large = drawn(sample=8), drawn(sample=20)
    assert len(small) == 8 and set(small) < set(large) and small == sorted(small)
    assert small != drawn(limit=8) and max(small) > "p15"
    turned = build_prompt_set("pets", SET.prompts[::-1])
    assert {prompt.id for prompt in Drawing(sample=8).of(turned)} == set(small)
    assert min(Counter(prompt.category for prompt in Drawing(sample=20).of(SET)).values()) >= 4


def test_the_steps_are_applied_in_their_order():
    assert drawn(offset=28) == ["p28", "p29"] and drawn(limit=2, offset=3) == ["p03", "p04"]
    assert drawn(per_category=1) == ["p00", "p01", "p02"] and drawn(categories=("dogs",), limit=2) == ["p01", "p04"]
    assert drawn(categories=("dogs", "cats"), per_category=1, offset=3) == ["p04", "p06"]
    assert drawn(ids=("p04", "p05"), limit=1) == ["p04"]


def test_what_was_drawn_is_described_in_words_and_no_categories_are_not_drawn_by():
    assert Drawing().text(SET) is None and Drawing(limit=30).text(SET) is None
    assert Drawing(sample=8).text(SET) == "8 of 30: random sample of 8 (seed 0)"
    said = Drawing(categories=("dogs",), offset=1, limit=2).text(SET)
    assert said == "2 of 30: category dogs, without the first 1, first 2"
    refused("have no categories", Drawing(per_category=1).of, build_prompt_set("plain", [Prompt("a", "b")]))


@pytest.mark.parametrize(("options", "why"), [
    ({"categories": ("dgos",)}, "unknown category of 'pets': 'dgos'"), ({"offset": 30}, "is selected"),
    ({"ids": ("p1",)}, "no id 'p1'"),
])  # fmt: skip
def test_nothing_to_draw_is_said(options, why):
    refused(why, drawn, **options)


def test_captions_under_several_ids_are_reported(tmp_path, capsys):
    (tmp_path / "twice.csv").write_text("id,prompt\na,a red circle\nb,a red circle\nc,a green cross\n")
    assert len(load_prompts(tmp_path / "twice.csv").prompts) == 3
    assert "twice.csv: 1 prompt with another prompt's caption" in capsys.readouterr().err
