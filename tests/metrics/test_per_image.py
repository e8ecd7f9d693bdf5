"""CLIP, HPSv2 and ImageReward on small checkpoints in the authors' formats, against independent forwards. It
concerns several modules: clip, preference and what they share in base."""

import dataclasses
import gzip
import sys
import types
from importlib.util import find_spec

import authors_formats as formats
import calibrated
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from specbench.metrics import clip, compbench, preference
from specbench.metrics.base import Sample, Settings, made_score
from specbench.metrics.blip import part_of
from specbench.metrics.openclip import MEAN as CLIP_MEAN
from specbench.metrics.openclip import STD as CLIP_STD
from specbench.metrics.openclip import (
    import_open_clip,
    normalised,
    short_side_centre,
    torchvision_if_it_loads,
    torchvision_loads,
)
from specbench.metrics.preference import REWARD_MEAN, REWARD_STD, ImageReward

try:
    open_clip = import_open_clip()
except ImportError as error:
    pytest.skip(f"{error.name} is not installed", allow_module_level=True)

needs_torchvision = pytest.mark.skipif(
    not torchvision_loads(), reason="no torchvision that loads with this torch; make test-hpsv2 installs one"
)
needs_hpsv2 = pytest.mark.skipif(
    find_spec("hpsv2") is None or not torchvision_loads(),
    reason="the hpsv2 package needs a separate environment: make test-hpsv2",
)

LONG = "a red cat and " * 40
SHAPES = {"square": (80, 80), "landscape": (60, 100), "portrait": (101, 60), "large": (500, 333)}


def sample(pixels: np.ndarray, prompt: str = "a red cat", number: int = 0) -> Sample:
    return Sample(f"p{number}", 0, prompt, None, {}, pixels)


def pictures() -> dict[str, np.ndarray]:
    return {name: calibrated.images(1, *shape, seed=7)[0] for name, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def openai_file(tmp_path_factory):
    return formats.save_openai_clip(tmp_path_factory.mktemp("clip") / "ViT-B-16.pt")


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory):
    return formats.save_imagereward(tmp_path_factory.mktemp("reward") / "ImageReward.pt")


@pytest.fixture
def clip_metric(openai_file, monkeypatch):
    formats.stand_in(monkeypatch, "clip-b16", openai_file)
    return clip.Clip("b16", Settings(offline=True))


@pytest.fixture
def reward_metric(reward_file, monkeypatch, tmp_path):
    formats.stand_in(monkeypatch, "imagereward", reward_file)
    formats.stand_in(monkeypatch, "bert-vocabulary", formats.save_vocabulary(tmp_path / "vocab.txt"))
    return ImageReward(Settings(offline=True))


def huggingface_twin(state: dict):
    """transformers' own CLIP with the weights of an OpenAI file."""
    from transformers import CLIPConfig, CLIPModel

    width = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = CLIPConfig(
        projection_dim=32,
        text_config={**width, "projection_dim": 32, "hidden_act": "quick_gelu", "eos_token_id": 2},
        vision_config={**width, "projection_dim": 32, "hidden_act": "quick_gelu", "image_size": 64, "patch_size": 32},
    )
    renamed = {"logit_scale": state["logit_scale"]}
    for name, value in state.items():
        if ".resblocks." in name:
            side, _, rest = name.rpartition("transformer.resblocks.")
            number, _, rest = rest.partition(".")
            target = f"{'vision_model' if side else 'text_model'}.encoder.layers.{number}."
            if "in_proj" in rest:
                for part, piece in zip("qkv", value.chunk(3), strict=True):
                    renamed[f"{target}self_attn.{part}_proj.{rest.rpartition('_')[2]}"] = piece
                continue
            for old, new in (("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"), ("attn.out", "self_attn.out"),
                             ("c_fc", "fc1"), ("c_proj", "fc2")):  # fmt: skip
                rest = rest.replace(old, new)
            renamed[target + rest] = value
    vision, text = "vision_model.embeddings.", "text_model.embeddings."
    renamed |= {
        f"{vision}class_embedding": state["visual.class_embedding"],
        f"{vision}patch_embedding.weight": state["visual.conv1.weight"],
        f"{vision}position_embedding.weight": state["visual.positional_embedding"],
        f"{text}token_embedding.weight": state["token_embedding.weight"],
        f"{text}position_embedding.weight": state["positional_embedding"],
        "visual_projection.weight": state["visual.proj"].T, "text_projection.weight": state["text_projection"].T,
    }  # fmt: skip
    for old, new in (("visual.ln_pre", "vision_model.pre_layrnorm"), ("visual.ln_post", "vision_model.post_layernorm"),
                     ("ln_final", "text_model.final_layer_norm")):  # fmt: skip
        renamed |= {f"{new}.{part}": state[f"{old}.{part}"] for part in ("weight", "bias")}
    twin = CLIPModel(config)
    missing, unexpected = twin.load_state_dict({k: v.float() for k, v in renamed.items()}, strict=False)
    assert not unexpected and all("position_ids" in name for name in missing)
    return twin.eval()


def test_clip_equals_torchmetrics_over_transformers(clip_metric, openai_file):
    with torchvision_if_it_loads():
        clip_score = pytest.importorskip("torchmetrics.functional.multimodal").clip_score
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    twin = huggingface_twin(torch.jit.load(str(openai_file)).state_dict())

    class Wrapped(torch.nn.Module):
        config = twin.config

        def get_image_features(self, x):
            return twin.get_image_features(x).pooler_output

        def get_text_features(self, ids, mask):
            return twin.get_text_features(ids, mask).pooler_output

        def parameters(self, recurse=True):
            return twin.parameters(recurse)

    pil = CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})

    def processor(text=None, images=None, **_):
        inputs = {}
        if images is not None:
            pictures = [Image.fromarray(np.asarray(image).transpose(1, 2, 0)) for image in images]
            inputs["pixel_values"] = pil(pictures, return_tensors="pt").pixel_values
        if text is not None:
            inputs["input_ids"] = open_clip.tokenize(text)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs

    for name, pixels in pictures().items():
        if name == "portrait":  # an odd margin, which transformers' crop halves down and everybody else's to even
            continue
        mine = clip_metric.features([sample(pixels)])[0]["value"]
        mine_as_theirs = torch.from_numpy(pixels).permute(2, 0, 1)
        theirs = clip_score(mine_as_theirs, "a red cat", lambda: (Wrapped(), processor)).item()
        assert theirs == pytest.approx(max(100 * mine, 0), abs=2e-4), name
    values = [clip_metric.features([sample(pixels)])[0]["value"] for pixels in pictures().values()]
    assert max(values) > 0.02, "the comparison is not between zeros"


@needs_torchvision
def test_clip_goes_in_as_open_clips_own_transform(clip_metric):
    theirs = open_clip.image_transform(64, is_train=False, mean=CLIP_MEAN, std=CLIP_STD)
    for name, pixels in pictures().items():
        mine = normalised(short_side_centre(pixels, 64))
        assert torch.allclose(mine, theirs(Image.fromarray(pixels)), atol=1e-6), name


def test_clip_variants_differ_in_prefix_and_picture(openai_file, monkeypatch):
    entry = formats.stand_in(monkeypatch, "clip-b16", openai_file)
    monkeypatch.setitem(clip.checkpoints.CHECKPOINTS, "clip-b32", entry)
    shown = sample(pictures()["landscape"])
    metrics = [clip.Clip(name, Settings(offline=True)) for name in clip.VARIANTS if name != "l14"]
    values = [metric.features([shown])[0]["value"] for metric in metrics]
    assert values[0] == values[list(clip.VARIANTS).index("b32")], "the same by design"
    assert len({round(value, 6) for value in values}) == len(values) - 1
    assert len({made_score(metric).fingerprint for metric in metrics}) == len(metrics)


def test_compbench_takes_the_cosine_of_the_bare_prompt_of_non_spatial_images(openai_file, monkeypatch):
    formats.stand_in(monkeypatch, "clip-b32", openai_file)
    metric = compbench.CompBenchClip(Settings(offline=True))
    twin = huggingface_twin(torch.jit.load(str(openai_file)).state_dict())
    asked, truth = [], []
    for number, (name, prompt) in enumerate((("square", "a red cat"), ("landscape", "two dogs"))):
        asked.append(dataclasses.replace(sample(pictures()[name], prompt, number), category="non_spatial"))
        with torch.no_grad():
            seen = twin.get_image_features(normalised(short_side_centre(pictures()[name], 64))[None]).pooler_output
            read = twin.get_text_features(open_clip.tokenize([prompt])).pooler_output
        truth.append(torch.cosine_similarity(seen, read).item())
    rows = metric.features(asked)
    assert [row["value"] for row in rows] == pytest.approx(truth, abs=1e-5)
    (score,) = metric.scores(pd.DataFrame(rows).assign(category="non_spatial", prompt_id=["p0", "p1"]))
    assert score.name == "compbench[clip-b32]:non_spatial" and score.estimate.value == pytest.approx(np.mean(truth))
    assert [metric.accepts(category, {"line": 0}) for category in ("non_spatial", "spatial", None)] == [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("fixture", "tokens"), [("clip_metric", 77), ("hps_metric", 77), ("reward_metric", 35)])
def test_captions_longer_than_the_metric_reads_are_counted_and_values_do_not_depend_on_the_batch(
    fixture, tokens, request
):
    metric = request.getfixturevalue(fixture)
    fitting = "a " * (tokens - 2)  # two ids mark begin and end
    assert metric.captions_cut([fitting, fitting + "a", "a cat", LONG * 3]) == (2, tokens)
    assert metric.captions_cut(["a cat"]) == (0, tokens)
    asked = [sample(pixels, prompt, i) for i, (pixels, prompt) in
             enumerate(zip(pictures().values(), ("a cat", LONG, "red dogs", "a"), strict=True))]  # fmt: skip
    together = [row["value"] for row in metric.features(asked)]
    alone = [metric.features([item])[0]["value"] for item in asked]
    assert together == pytest.approx(alone, abs=1e-5) and len({round(value, 4) for value in alone}) == 4


def test_imagereward_equals_a_forward_written_out(reward_metric, reward_file):
    weights = torch.load(reward_file, weights_only=True)
    vision, text = part_of(weights, "blip.visual_encoder."), part_of(weights, "blip.text_encoder.")
    values = []
    for name, pixels in pictures().items():
        prompt = "a blue cat photo" if name != "square" else LONG
        value = reward_metric.features([sample(pixels, prompt)])[0]["value"]
        x = formats.vision_forward(vision, normalised(short_side_centre(pixels, 32)))
        y = formats.text_forward(text, reward_metric.tokenizer.ids(prompt), x)[0]
        for number in (0, 2, 4, 6, 7):
            y = y @ weights[f"mlp.layers.{number}.weight"].T + weights[f"mlp.layers.{number}.bias"]
        assert value == pytest.approx((y.item() - REWARD_MEAN) / REWARD_STD, abs=2e-5), name
        values.append(value)
    assert np.std(values) > 0.01


@needs_torchvision
@pytest.mark.parametrize("shape", [*SHAPES.values(), (224, 224), (300, 300), (100, 224)])
def test_hps_goes_in_as_the_authors_transform(shape):
    from torchvision.transforms import functional as T

    pixels = calibrated.images(1, *shape, seed=3)[0]
    x = T.to_tensor(Image.fromarray(pixels))
    scale = 224 / max(shape)
    size = [round(side * scale) for side in shape]
    x = T.resize(x, size, T.InterpolationMode.BICUBIC, antialias=True)
    down, across = 224 - size[0], 224 - size[1]
    x = T.pad(x, [across // 2, down // 2, across - across // 2, down - down // 2])
    assert torch.allclose(preference.hps_input(pixels), T.normalize(x, CLIP_MEAN, CLIP_STD), atol=1e-5)


@pytest.fixture(scope="session")
def hps_file(tmp_path_factory):
    return formats.save_hpsv2(tmp_path_factory.mktemp("hps"))


@pytest.fixture
def hps_metric(hps_file, monkeypatch):
    entry = formats.stand_in(monkeypatch, "hpsv2-v2.1", hps_file)
    metric = preference.Hpsv2("v2.1", Settings(offline=True))
    metric.network = preference.load_hpsv2(entry.path, "cpu", "tiny-hps")
    return metric


def test_hpsv2_loads_every_tensor_of_the_file(hps_file):
    model = preference.load_hpsv2(hps_file, "cpu", "tiny-hps")
    content = torch.load(hps_file, weights_only=True)["state_dict"]
    assert {name: value.float().sum().item() for name, value in content.items()} == {
        name: value.sum().item() for name, value in model.state_dict().items()
    }
    damaged = {name: value for name, value in content.items() if name != "ln_final.bias"}
    torch.save({"state_dict": damaged}, hps_file.with_name("damaged.pt"))
    with pytest.raises(RuntimeError, match=r"ln_final\.bias"):
        preference.load_hpsv2(hps_file.with_name("damaged.pt"), "cpu", "tiny-hps")


@needs_hpsv2
def test_hpsv2_equals_the_authors_package(hps_metric, hps_file, monkeypatch, tmp_path):
    bundled = gzip.open
    vocabulary = tmp_path / "bpe.txt.gz"
    vocabulary.write_bytes(gzip.compress(formats.bpe_vocabulary()))
    monkeypatch.setattr(
        gzip, "open", lambda path, *rest: bundled(vocabulary if "bpe_simple" in str(path) else path, *rest)
    )
    monkeypatch.setitem(sys.modules, "turtle", types.SimpleNamespace(forward=None))
    from hpsv2 import img_score
    from preference.src.open_clip import factory

    factory.add_model_config(hps_file.with_name("tiny-hps.json"))
    model, _, preprocess = factory.create_model_and_transforms(
        "tiny-hps", pretrained=None, light_augmentation=True, output_dict=True
    )
    monkeypatch.setitem(img_score.model_dict, "model", model)
    monkeypatch.setitem(img_score.model_dict, "preprocess_val", preprocess)
    monkeypatch.setattr(img_score, "root_path", str(tmp_path))
    shown = pictures() | {"as large as the network": calibrated.images(1, 224, 224)[0]}
    for name, pixels in shown.items():
        for prompt in ("a red cat", LONG):
            theirs = float(img_score.score(Image.fromarray(pixels), prompt, cp=str(hps_file))[0])
            mine = hps_metric.features([sample(pixels, prompt)])[0]["value"]
            assert mine == pytest.approx(theirs, abs=1e-6), name
