"""Comparison with the metrics' authors' packages (dev/authors/), with random weights in the published formats, if an
environment has them: `python dev/authors/compare.py` explains how to make it, or AUTHORS_PYTHON names Pythons as in
PATH."""

import functools
import importlib.util
import json
import os
from pathlib import Path

import authors_formats as formats
import calibrated
import pandas as pd
import pytest
from PIL import Image

from specbench.metrics import packages
from specbench.metrics.base import Settings
from specbench.metrics.catalog import METRICS
from specbench.metrics.catalog import metric as make_metric
from specbench.metrics.preference import load_hpsv2
from specbench.metrics.scoring import Images, score
from specbench.system.images import read_picture

_SPEC = importlib.util.spec_from_file_location("compare", Path(__file__).parents[2] / "dev" / "authors" / "compare.py")
cross_check = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cross_check)

PYTHONS = [Path(path) for path in os.environ.get("AUTHORS_PYTHON", "").split(os.pathsep) if path]
PYTHONS += sorted({cross_check.python_of(package) for package in cross_check.AUTHORS_PACKAGES})


@functools.cache
def python_with(package: str) -> Path:
    """The Python of an environment that has a package; the test is skipped without such an environment."""
    for python in PYTHONS:
        if "versions" in packages.ask(python, {"package": package, "versions_only": True}, cross_check.PROGRAM):
            return python
    pytest.skip(f"no environment has {package}: python dev/authors/compare.py says how to make one")


def saved_rows(folder: Path, pictures: list, captions: list[str]) -> pd.DataFrame:
    """Rows of `Images` for pictures, which are saved in a folder."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number, (pixels, caption) in enumerate(zip(pictures, captions, strict=True)):
        path = folder / f"p{number}-0.png"
        Image.fromarray(pixels).save(path)
        rows.append({"prompt_id": f"p{number}", "sample": 0, "prompt": caption, "category": None, "meta": "{}",
                     "started_at": "now", "path": path})  # fmt: skip
    return pd.DataFrame(rows)


def test_every_metric_of_an_authors_package_names_it():
    packages = {name: cross_check.package_of(name) for name in METRICS}
    assert set(packages.values()) == {None, *cross_check.AUTHORS_PACKAGES}
    assert packages["fid[clean+center256]"] == "clean-fid" and packages["fid[pytorch-fid+center256]"] is None


CAPTIONS = ["a red cat", "blue dogs " * 40, "a photo"]


def check(monkeypatch, images: Images, metric, least: float, most: float, **extra: object) -> None:
    """Compare a metric with its package on three images: at least the value `least`, up to the difference `most` in
    each; `extra`: the arguments for a small network."""
    python = python_with(cross_check.package_of(metric.name))
    score([images], metric)
    plain = cross_check._request
    monkeypatch.setattr(cross_check, "_request", lambda *arguments: plain(*arguments) | extra)
    row = cross_check.check_by_package(images, metric, python)
    assert row["verdict"] == "agrees" and row["n"] == 3
    assert row["theirs"] == pytest.approx(row["ours"], rel=1e-3, abs=most)
    assert abs(row["ours"]) > least and row["largest_difference"] < most


@pytest.fixture
def images(tmp_path, monkeypatch):
    shapes = ((60, 93), (101, 60), (224, 224))
    pictures = [calibrated.images(1, *shape, seed=number)[0] for number, shape in enumerate(shapes)]
    rows = saved_rows(tmp_path / "images", pictures, CAPTIONS)
    return Images("mine", tmp_path / "run", rows, lambda row: read_picture(row.path))


@pytest.mark.parametrize("metric", ["fid[pytorch-fid]", "fid[tm-aa]", "fid[tf1]", "fid[clean]", "fid[clean+center256]"])
def test_the_packages_compute_the_same_features_and_fid(tmp_path, monkeypatch, images, metric):
    formats.stand_in(monkeypatch, "inception", calibrated.save_inception(tmp_path / "inception.pth"))
    saved_rows(tmp_path / "reference", calibrated.images(4, 97, 50, seed=9), ["a cat"] * 4)
    settings = Settings(reference=tmp_path / "reference", offline=True)
    check(monkeypatch, images, make_metric(metric)(settings), 1, 1e-4)


def test_hpsv2_scores_the_same(tmp_path, monkeypatch, images):
    weights = formats.save_hpsv2(tmp_path)
    entry = formats.stand_in(monkeypatch, "hpsv2-v2.1", weights)
    metric = make_metric("hpsv2[v2.1]")(Settings(offline=True))
    metric.network = load_hpsv2(entry.path, "cpu", "tiny-hps")
    small = {"architecture": "tiny-hps", "architecture_file": str(weights.with_name("tiny-hps.json"))}
    check(monkeypatch, images, metric, 1e-3, 1e-5, **small)


def test_image_reward_scores_the_same(tmp_path, monkeypatch, images):
    formats.stand_in(monkeypatch, "imagereward", formats.save_imagereward(tmp_path / "ImageReward.pt"))
    formats.stand_in(monkeypatch, "bert-vocabulary", formats.save_vocabulary(tmp_path / "vocab.txt"))
    text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1, "num_hidden_layers": 2}
    (tmp_path / "text.json").write_text(json.dumps(cross_check.TEXT_CONFIG | text | {"encoder_width": 128}))
    sizes = {"image": 32, "width": 128, "inner": 256, "depth": 2, "heads": 2, "head": [64, 20, 12, 8, 4, 1]}
    metric = make_metric("imagereward")(Settings(offline=True))
    check(monkeypatch, images, metric, 1e-3, 1e-4, text_config=str(tmp_path / "text.json"), sizes=sizes)
