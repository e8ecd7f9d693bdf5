"""Lumina-mGPT 2.0: what its authors' code does where a reader goes wrong.

The numbers are those of their own code (Alpha-VLLM/Lumina-mGPT-2.0, f44a4d7), run on the shapes named here.
"""

import pytest
import torch
from checkpoints import chameleon, write

from specbench.errors import SpecbenchError
from specbench.models.catalog import load_model, recorded_model
from specbench.models.facts import ModelChoice
from specbench.models.families import lumina2
from specbench.models.families.model_specs import MODELS

INFO = {info.name: info for info in MODELS}


@pytest.mark.parametrize(
    ("scale", "first", "back_at"),
    [(3.0, (4, 4, 4), 0), (4.0, (4, 4, 4), 0), (5.0, (4.99566, 4.989155, 4.980493), 30),
     (8.0, (7.993055, 7.982648, 7.968789), 54), (16.0, (15.986111, 15.965296, 15.937578), 77)],
)  # fmt: skip
def test_the_released_guidance_falls_back_to_four_within_the_first_row(scale, first, back_at):
    """`LLMImageStartTriggeredUnbatchedClassifierFreeGuidanceLogitsProcessor` at 768 px, slot by slot."""
    scales = lumina2.released_scales(scale, 96 * 96, 9312)
    assert scales[:3] == pytest.approx(first, abs=1e-5)
    assert scales.index(4.0) == back_at and set(scales[back_at:]) == {4.0}


@torch.inference_mode()
def test_the_released_guidance_is_that_of_the_slot(tmp_path):
    tiny = write("lumina2", tmp_path)
    choice = {"weights": str(tmp_path), "tiny": True}
    info = INFO["lumina2"].configured(ModelChoice(**choice, guidance_schedule="released"))
    assert info.name == "lumina2+tiny+released-guidance"
    assert recorded_model(info.name, str(tmp_path)) == info
    model = load_model(info, "cpu", "float32")
    stream = [1, 2, 3]
    logits = model.begin(model.encode(["a cat"]), 9.0, 4).forward(torch.tensor([[0, *stream]]), torch.arange(4)[None])
    ids, scale = slice(tiny.image_ids.start, tiny.image_ids.stop), 9.0
    for slot, (c, u) in enumerate(zip(*(tiny.logits("a cat", stream, half) for half in (True, False)), strict=True)):
        scale = max(4.0, scale * (1 - (slot + 2) / 4))  # 2 x 2 patches of the size that the code takes the image for
        torch.testing.assert_close(logits[0, slot], (u + scale * (c - u))[ids], atol=1e-4, rtol=1e-4)
    with pytest.raises(SpecbenchError, match="--guidance-schedule released"):
        INFO["lumina"].configured(ModelChoice(guidance_schedule="released"))


def test_a_size_is_part_of_the_name_and_reaches_prompt_and_grid(tmp_path):
    info = INFO["lumina2"].configured(ModelChoice(random=True, size="1024x512"))
    assert (info.name, info.grid, info.resolution) == ("lumina2+1024x512+random", (64, 128), (512, 1024))
    assert recorded_model(info.name) == info and info.stream == 64 * 129
    assert INFO["lumina2"].configured(ModelChoice(size="768x768")) == INFO["lumina2"]
    write("lumina2", tmp_path)
    model = load_model(INFO["lumina2"].configured(ModelChoice(str(tmp_path), tiny=True)), "cpu", "float32")
    model.layout = type(model.layout).with_row_ends(64, 128, 24)
    conditional, unconditional = model.prompt_ids("a cat")
    names = chameleon.SPECIALS_2
    sizes = [names[f"<reserved{8800 + side // 32:05d}>"] for side in (512, 1024)]
    assert unconditional == [names["<racm3:break>"], *sizes] == conditional[-3:], "height first"
    assert model.tokenizer.decode(conditional).startswith("Generate an image of 1024x512 "), "width first"


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ("lumina2", "760x768", "was not trained for it"),
        ("lumina2", "1024x1024", "was not trained for it"),
        ("lumina2", "1600x320", "was not trained for it"),
        ("lumina2", "0x32", "not WIDTHxHEIGHT"),
        ("janus", "512x512", "'janus' has one size, 384x384"),
        ("shapes", "128x128", "one set of weights and one size"),
    ],
)
def test_a_size_that_a_model_was_not_trained_for_is_refused(model, size, said, cli, tmp_path):
    outcome = cli("run", "--model", model, "--size", size, "--dry-run", "--out", tmp_path / "results")
    assert outcome.code == 2 and said in outcome.err and "Traceback" not in outcome.err
