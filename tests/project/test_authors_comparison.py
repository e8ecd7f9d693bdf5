"""Comparison with the metrics' authors' packages (dev/authors/): the exchange with a stand-in program, and the packages
themselves, with random weights in the published formats, where an environment has them: those that
`python dev/authors/compare.py` tells how to make, or the Pythons in AUTHORS_PYTHON, separated as in PATH."""

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import authors_formats as formats
import calibrated
import pandas as pd
import pytest
import torch
from PIL import Image

from specbench.errors import SpecbenchError
from specbench.metrics import packages
from specbench.metrics.base import PerImageMetric, Settings
from specbench.metrics.catalog import METRICS
from specbench.metrics.catalog import metric as make_metric
from specbench.metrics.preference import load_hpsv2
from specbench.metrics.scoring import Images, run_images, score
from specbench.system.images import read_picture

_SPEC = importlib.util.spec_from_file_location("compare", Path(__file__).parents[2] / "dev" / "authors" / "compare.py")
cross_check = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cross_check)

PYTHONS = [Path(path) for path in os.environ.get("AUTHORS_PYTHON", "").split(os.pathsep) if path]
PYTHONS += sorted({cross_check.python_of(package) for package in cross_check.AUTHORS_PACKAGES})


@functools.cache
def python_with(package: str) -> Path:
    """The Python of an environment that has a package; the test is skipped where none has."""
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


class Brightness(PerImageMetric):
    """Stands in for a metric whose authors have a package."""

    name, summary, checkpoints = "hpsv2[v2.1]", "", ()

    def identity(self):
        return {"variant": "mean"}

    def prepare(self):
        pass

    def features(self, samples):
        return [{"value": float(sample.pixels.mean()) / 256} for sample in samples]


ANSWERS = """
import json, sys
import numpy as np
from PIL import Image
request = json.load(sys.stdin)
values = [np.asarray(Image.open(path)).mean() / 256 + {shift} for path in request["images"]]
json.dump({{"versions": {{"hpsv2": "9"}}, "values": values}}, sys.stdout)
"""


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Images scored by the stand-in metric."""
    rows = saved_rows(tmp_path, calibrated.images(3), ["a cat"] * 3)
    images = Images("mine", tmp_path / "run", rows, lambda row: read_picture(row.path))
    score([images], Brightness())
    monkeypatch.setattr(cross_check, "_request", lambda package, *_: {"package": package})
    return images


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (ANSWERS.format(shift=0.0), "agrees"),
        (ANSWERS.format(shift=0.01), "differs"),
        ("import sys; sys.exit('no such library')", "ended with code 1: no such library"),
        ('print(\'{"error": "ValueError: x"}\')', "ValueError: x"),
    ],
)
def test_both_values_are_told_or_why_there_is_one(scored, tmp_path, monkeypatch, program, verdict):
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(cross_check, "PROGRAM", tmp_path / "program.py")
    row = cross_check.check_by_package(scored, Brightness(), Path(sys.executable))
    assert tuple(row) == cross_check.COLUMNS and verdict in row["verdict"]
    if verdict not in ("agrees", "differs"):
        assert row["verdict"].startswith("not run") and row["theirs"] is None
        return
    shift = 0.01 * (verdict == "differs")
    assert (row["package"], row["n"], row["run_id"]) == ("hpsv2 9", 3, "mine") and row["ours"] > 0.3
    assert [row["theirs"] - row["ours"], row["largest_difference"]] == pytest.approx([shift] * 2, abs=1e-6)


def test_an_image_that_was_replaced_is_refused(tmp_path, cli, monkeypatch):
    assert cli("run", "--decoder", "ar", "--limit", "1", "--threads", "1", "--out", tmp_path / "out", "-q").code == 0
    (folder,) = (tmp_path / "out").iterdir()
    score([images := run_images(folder)], Brightness())
    monkeypatch.setattr(cross_check, "_request", lambda package, *_: {"package": package})
    Image.new("RGB", (8, 8)).save(folder / images.rows["image"].iloc[0])
    with pytest.raises(SpecbenchError, match="replaced"):
        cross_check.check_by_package(images, Brightness(), Path(sys.executable))


def test_a_package_that_is_not_there_comes_with_the_commands_that_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    rows = {row["name"]: row for row in cross_check.readiness()}
    row = rows["cross-check by image-reward"]
    assert row["status"] == "warning" and "-m venv" in row["fix"] and "transformers==4.36.2" in row["fix"]
    named = {row["name"]: row for row in cross_check.readiness(Path(sys.executable))}
    assert "clean-fid is not installed" in named["cross-check by clean-fid"]["detail"]


def test_every_metric_of_an_authors_package_names_it():
    packages = {name: cross_check.package_of(name) for name in METRICS}
    assert set(packages.values()) == {None, *cross_check.AUTHORS_PACKAGES}
    assert packages["fid[clean+center256]"] == "clean-fid" and packages["fid[pytorch-fid+center256]"] is None


CAPTIONS = ["a red cat", "blue dogs " * 40, "a photo"]


def checked(monkeypatch, images: Images, metric, **extra: object) -> dict:
    """The verdict on a metric by its package; `extra` tells the package that the network is a small one."""
    torch.set_num_threads(1)
    python = python_with(cross_check.package_of(metric.name))
    score([images], metric)
    plain = cross_check._request
    monkeypatch.setattr(cross_check, "_request", lambda *arguments: plain(*arguments) | extra)
    return cross_check.check_by_package(images, metric, python)


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    shapes = ((60, 93), (101, 60), (224, 224))
    pictures = [calibrated.images(1, *shape, seed=number)[0] for number, shape in enumerate(shapes)]
    rows = saved_rows(tmp_path / "images", pictures, CAPTIONS)
    return Images("mine", tmp_path / "run", rows, lambda row: read_picture(row.path))


@pytest.mark.parametrize("metric", ["fid[pytorch-fid]", "fid[tm-aa]", "fid[tf1]", "fid[clean]", "fid[clean+center256]"])
def test_the_packages_compute_the_same_features_and_fid(tmp_path, monkeypatch, images, metric):
    formats.stand_in(monkeypatch, "inception", calibrated.save_inception(tmp_path / "inception.pth"))
    saved_rows(tmp_path / "reference", calibrated.images(4, 97, 50, seed=9), ["a cat"] * 4)
    settings = Settings(reference=tmp_path / "reference", offline=True)
    row = checked(monkeypatch, images, make_metric(metric)(settings))
    assert row["verdict"] == "agrees" and row["n"] == 3
    assert row["theirs"] == pytest.approx(row["ours"], rel=1e-3) and row["ours"] > 1
    assert row["largest_difference"] < 1e-4


def test_hpsv2_scores_the_same(tmp_path, monkeypatch, images):
    weights = formats.save_hpsv2(tmp_path)
    entry = formats.stand_in(monkeypatch, "hpsv2-v2.1", weights)
    metric = make_metric("hpsv2[v2.1]")(Settings(offline=True))
    metric.network = load_hpsv2(entry.path, "cpu", "tiny-hps")
    small = {"architecture": "tiny-hps", "architecture_file": str(weights.with_name("tiny-hps.json"))}
    row = checked(monkeypatch, images, metric, **small)
    assert row["verdict"] == "agrees" and row["n"] == 3 and abs(row["ours"]) > 1e-3
    assert row["largest_difference"] < 1e-5


def test_image_reward_scores_the_same(tmp_path, monkeypatch, images):
    formats.stand_in(monkeypatch, "imagereward", formats.save_imagereward(tmp_path / "ImageReward.pt"))
    formats.stand_in(monkeypatch, "bert-vocabulary", formats.save_vocabulary(tmp_path / "vocab.txt"))
    text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1, "num_hidden_layers": 2}
    (tmp_path / "text.json").write_text(json.dumps(cross_check.TEXT_CONFIG | text | {"encoder_width": 128}))
    sizes = {"image": 32, "width": 128, "inner": 256, "depth": 2, "heads": 2, "head": [64, 20, 12, 8, 4, 1]}
    metric = make_metric("imagereward")(Settings(offline=True))
    row = checked(monkeypatch, images, metric, text_config=str(tmp_path / "text.json"), sizes=sizes)
    assert row["verdict"] == "agrees" and row["n"] == 3 and abs(row["ours"]) > 1e-3
    assert row["largest_difference"] < 1e-4
