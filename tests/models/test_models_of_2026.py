"""Lumina-mGPT 2.0 and GLM-Image: surprising behaviour of the authors' code. It concerns several modules: the two
families, their layouts, sizes and sampling. Numbers of Lumina-mGPT 2.0 are from its authors' code
(Alpha-VLLM/Lumina-mGPT-2.0, f44a4d7), run on the shapes named here; GLM-Image is compared with transformers' own
network and processor."""

import json
import sys
from types import SimpleNamespace

import checkpoints.glm
import numpy as np
import pandas as pd
import pytest
import torch
from checkpoints import INFO, chameleon, configured, loaded, write
from refusals import refused
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from specbench.decoding.loop import Decoding, decode_tokens
from specbench.models.catalog import load_model, recorded_model
from specbench.models.facts import ModelChoice
from specbench.models.families import glm as families_glm
from specbench.models.families.chameleon import released_scales
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling


@pytest.mark.parametrize(
    ("scale", "first", "back_at"),
    [(3.0, (4, 4, 4), 0), (4.0, (4, 4, 4), 0), (5.0, (4.99566, 4.989155, 4.980493), 30),
     (8.0, (7.993055, 7.982648, 7.968789), 54), (16.0, (15.986111, 15.965296, 15.937578), 77)],
)  # fmt: skip
def test_the_released_guidance_falls_back_to_four_within_the_first_row(scale, first, back_at):
    """`LLMImageStartTriggeredUnbatchedClassifierFreeGuidanceLogitsProcessor` at 768 px, slot by slot."""
    scales = released_scales(scale, 96 * 96, 9312)
    assert scales[:3] == pytest.approx(first, abs=1e-5)
    assert scales.index(4.0) == back_at and set(scales[back_at:]) == {4.0}


@torch.inference_mode()
def test_the_released_guidance_matches_the_slot(tmp_path):
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
    refused("--guidance-schedule released", INFO["lumina"].configured, ModelChoice(guidance_schedule="released"))


def test_a_size_is_part_of_the_name_and_reaches_prompt_and_grid(tmp_path):
    info = INFO["lumina2"].configured(ModelChoice(random=True, size="1024x512"))
    assert (info.name, info.grid, info.resolution) == ("lumina2+1024x512+random", (64, 128), (512, 1024))
    assert recorded_model(info.name) == info and info.stream == 64 * 129
    for name, size in (("lumina2", "768x768"), ("janus", "384x384")):  # one of several sizes, and the only one
        assert INFO[name].configured(ModelChoice(size=size)) == INFO[name]
    write("lumina2", tmp_path)
    model = loaded("lumina2", tmp_path)
    model.layout = type(model.layout).with_row_ends(64, 128, 24)
    conditional, unconditional = model.prompt_ids("a cat")
    names = chameleon.SPECIALS_2
    sizes = [names[f"<reserved{8800 + side // 32:05d}>"] for side in (512, 1024)]
    assert unconditional == [names["<racm3:break>"], *sizes] == conditional[-3:], "height first"
    assert model.tokenizer.decode(conditional).startswith("Generate an image of 1024x512 "), "width first"


@pytest.mark.parametrize(("model", "size", "problem"), [
    ("lumina2", "760x768", "was not trained for this size"), ("lumina2", "1024x1024", "was not trained for this size"),
    ("lumina2", "1600x320", "was not trained for this size"), ("lumina2", "0x32", "not WIDTHxHEIGHT"),
    ("janus", "512x512", "'janus' has only the size 384x384"),
    ("lumina2 --random-weights --scale tiny", "512x512", "a tiny network has only one size"),
    ("shapes", "128x128", "one set of weights and one size"),
])  # fmt: skip
def test_a_size_that_a_model_was_not_trained_for_is_refused(model, size, problem, cli, tmp_path):
    cli("run", "--model", *model.split(), "--size", size, "--dry-run", "--out", tmp_path / "results").refused(problem)


@pytest.mark.skipif(
    not hasattr(GlmImageProcessor, "_get_target_shape"), reason="computed elsewhere in transformers 5.1"
)
@pytest.mark.parametrize("size", [(36, 24), (49, 33), (64, 64), (16, 16), (32, 32)])
def test_the_preview_of_glm_image_has_the_processors_grid(size):
    *_, height, width = GlmImageProcessor._get_target_shape(None, 32 * size[0], 32 * size[1])
    assert INFO["glm-image"].before(*size) == ((height, width),)


def test_the_stream_of_glm_image_is_the_preview_then_the_large_grid():
    info = INFO["glm-image"].configured(ModelChoice(size="768x1152"))
    assert (info.grid, info.grids_before) == ((36, 24), ((19, 13),))
    assert info.stream == info.tokens == 36 * 24 + 19 * 13 and INFO["glm-image"].tokens == 1024 + 256


@torch.inference_mode()
def test_glm_image_draws_the_tokens_of_its_own_generate(tmp_path):
    """Greedy: `generate` of transformers, with the grids that the processor gives, stops at an end; ours goes on."""
    write("glm-image", tmp_path)
    network = GlmImageForConditionalGeneration.from_pretrained(tmp_path / "vision_language_encoder").eval()
    model = loaded("glm-image", tmp_path)
    for text in ("a red cat", "two dogs", "a house"):
        ids = torch.tensor([model.prompt_ids(text)[0]])
        grids = {"image_grid_thw": checkpoints.glm.GRIDS, "images_per_sample": torch.tensor([2])}
        drawn = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=22, do_sample=False, top_p=None,
            temperature=None, **grids,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        network.model.rope_deltas = None
        how = Decoding(model, resolve("sjd", {"window": 4}), Sampling(1.0, top_k=1), 0)
        ours = decode_tokens(how, [Request(text, "a")])
        assert len(drawn) == 22 or checkpoints.glm.END in drawn
        assert ours[0].tolist()[: len(drawn)] == drawn


def test_sampling_of_glm_image_matches_its_generation_settings(tmp_path):
    """top-k is 50 if the file has none, as transformers has it."""
    write("glm-image", tmp_path)
    assert configured("glm-image", tmp_path).sampling() == Sampling(1.0, 0.9, 50, 0.75)
    settings = tmp_path / "vision_language_encoder" / "generation_config.json"
    settings.write_text(json.dumps({"do_sample": True, "top_k": 16384}))
    assert configured("glm-image", tmp_path).sampling() == Sampling(1.0, 1.0, 16384, 1.0)
    settings.write_text(json.dumps({"top_k": 0, "top_p": None}))
    assert configured("glm-image", tmp_path).sampling() == Sampling(1.0, 1.0, 0, 1.0)
    assert INFO["glm-image"].configured(ModelChoice(random=True)).sampling() == INFO["glm-image"].defaults


@pytest.mark.parametrize("entry", [{"top_k": "many"}, {"top_k": 2.5}, {"top_p": 2}, {"temperature": -1}], ids=str)
def test_wrong_generation_settings_of_glm_image_are_a_damaged_file_and_others_refused(entry, tmp_path):
    write("glm-image", tmp_path)
    settings = tmp_path / "vision_language_encoder" / "generation_config.json"
    settings.write_text(json.dumps(entry))
    assert refused(r"generation_config\.json is damaged", configured("glm-image", tmp_path).sampling).exit_code == 5
    for name in ("repetition_penalty", "min_p"):
        settings.write_text(json.dumps({name: 0.5}))
        refused(f"{name} = .* is not supported", loaded, "glm-image", tmp_path)


def test_an_image_on_which_the_pipeline_fails_is_a_failed_row(written, tmp_path, run_tiny):
    """An end anywhere, or an id that is no code in the large grid; one in the preview is only seen."""
    folder, tokens, codes = written("glm-image"), np.zeros(22, dtype=int), checkpoints.glm.CODES
    model = loaded("glm-image", folder)
    assert model.problem(tokens) is None and not model.draws
    assert model.problem(np.where(np.arange(22) == 3, codes, tokens)) is None
    assert "token 9 is" in model.problem(np.where(np.arange(22) == 9, codes + 2, tokens))
    assert "token 3 is the end-of-image token" in model.problem(np.where(np.arange(22) == 3, codes + 1, tokens))
    fixed = ("glm-image", "--weights", folder, "--samples", "20")
    outcome = run_tiny(*fixed, "--decoder", "preview", "--json")
    assert "cannot render pictures" in outcome.err and "Traceback" not in outcome.err
    [run] = [path.parent for path in tmp_path.glob("results/*/samples")]
    rows = pd.read_parquet(run / "samples")
    failed = rows[rows["status"] != "ok"]
    assert 0 < len(failed) < 20 and failed["error"].str.contains("GLM-Image's pipeline").all()
    assert rows["image"].isna().all() and not list(run.glob("images/*"))
    run_tiny(*fixed, "--cfg", "3").refused("has no unconditional prompt")


def test_the_diffusion_model_gets_every_code_four_times_the_prompt_and_the_images_seed(tmp_path, monkeypatch):
    class Pipeline:
        """Stands in for diffusers' pipeline; it was run itself with tiny parts, too (diffusers 0.42.1)."""

        def from_pretrained(self, folder, **without):
            assert folder == str(tmp_path) and without["vision_language_encoder"] is None
            return self

        def to(self, device):
            return self

        def set_progress_bar_config(self, disable): ...

        def __call__(self, prompt, height, width, prior_token_ids, generator, output_type):
            grey = prior_token_ids.view(8, 8).repeat_interleave(16, 0).repeat_interleave(16, 1) / 23
            asked.append((prompt, height, width, generator.initial_seed()))
            return SimpleNamespace(images=grey.expand(1, 3, -1, -1))

    write("glm-image", tmp_path)
    asked = []
    assert not loaded("glm-image", tmp_path).draws
    for part in families_glm.PIPELINE_PARTS:
        (tmp_path / part).mkdir()
    assert not loaded("glm-image", tmp_path).draws, "diffusers is not installed"
    monkeypatch.setattr(families_glm, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(GlmImagePipeline=Pipeline()))
    model = loaded("glm-image", tmp_path)
    tokens = torch.randint(24, (2, 22))
    pixels = model.render(tokens, ["a", "b"], [-5, 7])
    assert asked == [("a", 128, 128, 2**63 - 5), ("b", 128, 128, 7)] and pixels.shape == (2, 3, 128, 128)
    assert torch.equal(pixels[:, 0, ::32, ::32], (tokens[:, 6:] / 23 * 255).round().to(torch.uint8).view(2, 4, 4))


def test_x_omni_reads_the_prompt_and_the_settings_of_its_repository(tmp_path):
    """`generate` takes the repository's temperature, top-k and top-p, since the script asks for its defaults."""
    write("x-omni", tmp_path)
    assert configured("x-omni", tmp_path).sampling() == Sampling(1.0, 1.0, 50, 1.0, min_p=0.03)
    model = loaded("x-omni", tmp_path)
    conditional, unconditional = model.prompt_ids("a cat")
    assert model.tokenizer.decode(conditional, skip_special_tokens=False) == "a cat<SOM>4 4<IMAGE>"
    assert conditional[-len(unconditional) :] == unconditional and conditional[0] < 256
    assert not model.draws and model.codebook.shape == (24, 16)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 20, "repetition_penalty": 1.5, "min_p": 0.1}))
    assert configured("x-omni", tmp_path).sampling() == Sampling(1.0, 1.0, 20, 1.0, min_p=0.03)
    model = loaded("x-omni", tmp_path)
    assert model.repetition_penalty == 1.5
    problem = r"--cfg 2: .* cannot combine guidance with its repetition penalty"
    refused(problem, model.begin, model.encode(["a cat"]), 2.0, 1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": {"dtype": "nn", "decoder": {}}}))
    refused(r"config.json is damaged: no 'nn' in it", loaded, "x-omni", tmp_path)


def test_x_omni_draws_with_the_flux_model_of_the_repository(tmp_path, capsys):
    diffusers = pytest.importorskip("diffusers", reason="an extra")
    from specbench.models.families.x_omni_decoder import CodeFlux

    write("x-omni", tmp_path)
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    sizes |= {"joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 6, 6), "siglip_channels": 32}
    flux = CodeFlux(in_channels=16, **sizes)
    for parameter in flux.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape)
    flux.save_pretrained(tmp_path / "decoder")
    assert not loaded("x-omni", tmp_path).draws
    assert "FLUX.1-dev/vae does not exist" in capsys.readouterr().err
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = {"block_out_channels": [8] * 4, "norm_num_groups": 4, "latent_channels": 4, "shift_factor": 0.1}
    diffusers.AutoencoderKL(**blocks, **vae).save_pretrained(tmp_path / "FLUX.1-dev" / "vae")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    scheduler.save_pretrained(tmp_path / "FLUX.1-dev" / "scheduler")
    model = loaded("x-omni", tmp_path)
    first, again = torch.randint(24, (2, 1, 16), generator=torch.Generator().manual_seed(1))
    drawn = model.render(torch.cat([first, first, first, again]), ["a"] * 4, [1, 1, 2, 1])
    assert model.draws and drawn.shape == (4, 3, 64, 64) and torch.equal(drawn[0], drawn[1])
    assert all((drawn[0].int() - other.int()).abs().max() > 0 for other in drawn[2:])
