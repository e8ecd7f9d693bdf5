"""PickScore and the aesthetic predictor against their authors' arithmetic on random weights in the published
formats; VQAScore and HPSv3 through an environment whose packages are stubs. It concerns several modules:
preference, packages, authors_programs and what they share with clip."""

import json
import sys
import venv
from pathlib import Path

import authors_formats as formats
import calibrated
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from refusals import refused

from specbench.metrics import packages, preference
from specbench.metrics.base import Sample, Settings, made_score
from specbench.metrics.openclip import import_open_clip, normalised, short_side_centre

try:
    open_clip = import_open_clip()
except ImportError as error:
    pytest.skip(f"{error.name} is not installed", allow_module_level=True)


def samples(n: int = 3) -> list[Sample]:
    pictures = calibrated.images(n, 70, 93, seed=3)
    return [Sample(f"p{i}", 0, f"a cat, {i} of them", None, {}, pixels) for i, pixels in enumerate(pictures)]


def values(metric, asked: list[Sample]) -> list[float]:
    return [row["value"] for row in metric.features(asked)]


@pytest.fixture
def pickscore_folder(tmp_path, monkeypatch) -> Path:
    """A tiny network as PickScore's repository holds it, in transformers' format."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(5)
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**width, "projection_dim": 16, "eos_token_id": 49407, "hidden_act": "gelu"}
    vision = {**width, "projection_dim": 16, "image_size": 64, "patch_size": 32, "hidden_act": "gelu"}
    model = CLIPModel(CLIPConfig(projection_dim=16, text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path / "pick", safe_serialization=True)
    monkeypatch.setattr(preference.checkpoints, "hub_folder", lambda *_: tmp_path / "pick")
    return tmp_path / "pick"


def test_pickscore_is_its_authors_example_on_the_same_weights(pickscore_folder):
    from transformers import CLIPModel

    model, asked = CLIPModel.from_pretrained(pickscore_folder).eval(), samples()
    truth = []
    for sample in asked:
        ids = open_clip.tokenize([sample.prompt])[0]
        ids = ids[: int((ids != 0).sum())][None]  # the authors' processor pads nothing for one text
        with torch.no_grad():
            seen = model.get_image_features(normalised(short_side_centre(sample.pixels, 64))[None]).pooler_output
            read = model.get_text_features(ids).pooler_output
        seen, read = seen / seen.norm(dim=-1, keepdim=True), read / read.norm(dim=-1, keepdim=True)
        truth.append((model.logit_scale.exp() * (read @ seen.T)[0]).item())
    metric = preference.PickScore(Settings(offline=True))
    assert values(metric, asked) == pytest.approx(truth, abs=1e-4) and np.std(truth) > 1e-3
    before = made_score(metric).fingerprint
    with torch.no_grad():
        model.logit_scale += np.log(1.01)
    model.save_pretrained(pickscore_folder, safe_serialization=True)
    planted = preference.PickScore(Settings(offline=True))
    assert values(planted, asked) == pytest.approx([1.01 * value for value in truth], rel=1e-4)
    assert made_score(planted).fingerprint != before, "other weights are another score"


def test_the_aesthetic_predictor_is_linear_in_the_unit_embedding(tmp_path, monkeypatch):
    formats.stand_in(monkeypatch, "clip-l14", formats.save_openai_clip(tmp_path / "ViT-L-14.pt"))
    torch.manual_seed(6)
    shapes = zip((0, 2, 4, 6, 7), ((32, 24), (24, 12), (12, 8), (8, 4), (4, 1)), strict=True)
    weights = {}
    for number, (into, out) in shapes:
        weights |= {f"layers.{number}.weight": torch.randn(out, into), f"layers.{number}.bias": torch.randn(out)}
    torch.save(weights, tmp_path / "head.pth")
    formats.stand_in(monkeypatch, "aesthetic", tmp_path / "head.pth")
    metric, asked = preference.Aesthetic(Settings(offline=True)), samples()
    with torch.no_grad():
        inputs = torch.stack([normalised(short_side_centre(sample.pixels, 64)) for sample in asked])
        x = metric.network.encode_image(inputs)
        x = x / x.norm(dim=1, keepdim=True)
        for number in (0, 2, 4, 6, 7):
            x = x @ weights[f"layers.{number}.weight"].T + weights[f"layers.{number}.bias"]
    assert values(metric, asked) == pytest.approx(x[:, 0].tolist(), rel=1e-4) and x.std() > 1e-3
    by_class = {"class": 3}  # prompts that are no captions
    assert metric.accepts(None, by_class) and not preference.PickScore(Settings(offline=True)).accepts(None, by_class)


VQASCORE = """
from PIL import Image
import numpy as np
class VQAScore:
    def __init__(self, model, device, cache_dir):
        print("talk of the package"); open(__file__ + ".loaded", "a").write("x")
    def __call__(self, images, texts):
        assert len(images) == len(texts) == 1
        return [[{value}]]
"""
HUB = """
def snapshot_download(repository, local_files_only):
    assert len(repository.split()) == 1 and local_files_only
    return {folder!r}
class constants: HF_HUB_CACHE = "."
"""


@pytest.fixture
def environment(tmp_path) -> Path:
    """The Python of an environment with stubs of t2v-metrics and huggingface_hub, and this one's torch."""
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env/lib").glob("python3*")) / "site-packages"
    (site / "zz.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "t2v_metrics-3.0.dist-info").mkdir()
    (site / "t2v_metrics-3.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: t2v-metrics\nVersion: 3.0\n")
    (site / "huggingface_hub").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.bin").write_text("w")
    (site / "huggingface_hub/__init__.py").write_text(HUB.format(folder=str(tmp_path / "weights")))
    (site / "huggingface_hub/errors.py").write_text("class LocalEntryNotFoundError(Exception): pass\n")
    written(site, "np.asarray(Image.open(images[0])).mean() / 255")
    return tmp_path / "env/bin/python"


def written(site: Path, value: str) -> Path:
    (site / "t2v_metrics.py").write_text(VQASCORE.format(value=value))
    return site


def test_vqascore_comes_from_the_package_of_the_named_python_whose_network_is_loaded_once(environment, tmp_path):
    metric, asked = packages.VqaScore(Settings(python=environment)), samples(5)
    assert metric.missing_packages() == []
    truth = pytest.approx([sample.pixels.mean() / 255 for sample in asked], abs=1e-6)
    assert [*values(metric, asked[:3]), *values(metric, asked[3:])] == truth
    assert next((tmp_path / "env/lib").rglob("t2v_metrics.py.loaded")).read_text() == "x"
    identity = metric.identity()
    assert "t2v-metrics 3.0" in identity["package"] and identity["weights"].startswith("sha256:")
    (score,) = metric.scores(pd.DataFrame({"value": [0.5, 0.7], "prompt_id": ["a", "b"]}))
    assert (score.name, score.estimate.value) == ("vqascore[clip-flant5-xxl]", pytest.approx(0.6))


@pytest.mark.parametrize(("value", "problem"), [
    ("1.5", "not a number from 0 to 1"), ("float('nan')", "not a number"), ("1 / 0", "ZeroDivisionError"),
    ("__import__('os')._exit(3)", "ended with code 3"),
])  # fmt: skip
def test_a_value_outside_the_scale_and_a_program_that_dies_are_one_line(environment, value, problem):
    written(next(environment.parents[1].glob("lib/python3*")) / "site-packages", value)
    assert problem in str(refused("vqascore", packages.VqaScore(Settings(python=environment)).features, samples(2)))


def test_score_takes_the_environment_by_flag_and_says_what_is_lacking(environment, tmp_path, cli):
    (shown := tmp_path / "images").mkdir()
    Image.fromarray(samples(1)[0].pixels).save(shown / "p0.png")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "p0", "prompt": "a cat"}))
    words = ["score", "--images", shown, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out", "--json"]
    words += ["--metric", "vqascore[clip-flant5-xxl]"]
    outcome = cli(*words, "--python", environment)
    assert outcome.code == 0, outcome.err
    (row,) = json.loads(outcome.out)
    assert row["value"] == pytest.approx(samples(1)[0].pixels.mean() / 255, abs=1e-6)
    cli(*words).refused("needs t2v-metrics", "-m venv", code=5)
