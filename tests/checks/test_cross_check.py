"""Comparison with the metrics' authors' packages: the exchange with a stand-in program, and the packages themselves
where AUTHORS_PYTHON names the Python of an environment that has them (`specbench doctor --cross-check` says how)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import calibrated
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from specbench.checks import cross_check
from specbench.errors import SpecbenchError
from specbench.metrics.catalog import METRICS
from specbench.metrics.frechet import Gaussian, frechet_distance
from specbench.metrics.inception import load_inception
from specbench.metrics.inception_preprocessing import CROPS, FRONT_ENDS
from specbench.metrics.per_image import PerImageMetric
from specbench.metrics.scoring import Images, run_images, score_with
from specbench.system.images import read_picture

AUTHORS_PYTHON = os.environ.get("AUTHORS_PYTHON")
needs_packages = pytest.mark.skipif(not AUTHORS_PYTHON, reason="AUTHORS_PYTHON names no environment with the packages")


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
    rows = []
    for number, pixels in enumerate(calibrated.images(3)):
        path = tmp_path / f"p{number}-0.png"
        Image.fromarray(pixels).save(path)
        rows.append({"prompt_id": f"p{number}", "sample": 0, "prompt": "a cat", "category": None, "meta": "{}",
                     "started_at": "now", "path": path})  # fmt: skip
    images = Images("mine", tmp_path / "run", pd.DataFrame(rows), lambda row: read_picture(row.path))
    score_with(images, Brightness())
    monkeypatch.setattr(cross_check, "_request", lambda package, *_: {"package": package})
    return images


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "agrees"), (0.01, "differs")])
def test_both_values_and_their_largest_difference_are_told(scored, tmp_path, monkeypatch, shift, verdict):
    program = tmp_path / "program.py"
    program.write_text(ANSWERS.format(shift=shift))
    monkeypatch.setattr(cross_check, "PROGRAM", program)
    row = cross_check.cross_check(scored, Brightness(), Path(sys.executable))
    assert tuple(row) == cross_check.COLUMNS and row["verdict"] == verdict
    assert (row["package"], row["n"], row["run_id"]) == ("hpsv2 9", 3, "mine")
    assert row["theirs"] - row["ours"] == pytest.approx(shift, abs=1e-6) and row["ours"] > 0.3
    assert row["largest_difference"] == pytest.approx(shift, abs=1e-6)


def test_the_images_of_a_run_are_the_stored_files_and_no_others(tmp_path, cli, monkeypatch):
    assert cli("run", "--decoder", "ar", "--limit", "1", "--threads", "1", "--out", tmp_path / "out", "-q").code == 0
    (folder,) = (tmp_path / "out").iterdir()
    images = run_images(folder)
    score_with(images, Brightness())
    monkeypatch.setattr(cross_check, "_request", lambda package, *_: {"package": package})
    monkeypatch.setattr(cross_check, "PROGRAM", tmp_path / "program.py")
    cross_check.PROGRAM.write_text(ANSWERS.format(shift=0.0))
    row = cross_check.cross_check(images, Brightness(), Path(sys.executable))
    assert (row["verdict"], row["n"]) == ("agrees", 1)
    Image.new("RGB", (8, 8)).save(folder / images.rows["image"].iloc[0])
    with pytest.raises(SpecbenchError, match="replaced"):
        cross_check.cross_check(images, Brightness(), Path(sys.executable))


@pytest.mark.parametrize(("program", "why"), [
    ("import sys; sys.exit('no such library')", "ended with code 1: no such library"),
    ("print('{\"error\": \"ValueError: x\"}')", "ValueError: x"),
])  # fmt: skip
def test_a_program_that_fails_is_told_and_not_raised(scored, tmp_path, monkeypatch, program, why):
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(cross_check, "PROGRAM", tmp_path / "program.py")
    row = cross_check.cross_check(scored, Brightness(), Path(sys.executable))
    assert why in row["verdict"] and row["verdict"].startswith("not run") and row["theirs"] is None


def test_a_package_that_is_not_there_comes_with_the_commands_that_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    rows = {row["name"]: row for row in cross_check.readiness()}
    row = rows["cross-check by image-reward"]
    assert row["status"] == "warning" and "-m venv" in row["fix"] and "transformers==4.36.2" in row["fix"]
    named = {row["name"]: row for row in cross_check.readiness(Path(sys.executable))}
    assert "clean-fid is not installed" in named["cross-check by clean-fid"]["detail"]
    with pytest.raises(SpecbenchError, match="--python"):
        cross_check.require_python(tmp_path / "python")


def test_every_metric_of_an_authors_package_names_it():
    found = {name: cross_check.package_of(name) for name in METRICS}
    assert set(found.values()) == {None, *cross_check.PACKAGES}
    assert found["fid[clean+center256]"] == "clean-fid" and found["fid[pytorch-fid+center256]"] is None


@needs_packages
@pytest.mark.parametrize("metric", ["fid[pytorch-fid]", "fid[tm-aa]", "fid[tf1]", "fid[clean]", "fid[clean+center256]"])
def test_the_packages_compute_the_same_features_and_fid(tmp_path, metric):
    torch.set_num_threads(1)
    weights = calibrated.save_inception(tmp_path / "inception.pth")
    pictures = {"images": calibrated.images(3, 60, 93, seed=1), "reference": calibrated.images(4, 97, 50, seed=2)}
    request = {"package": cross_check.package_of(metric), "weights": str(weights), "features": str(tmp_path / "f.npy")}
    request |= {"crop": "center256" if "center" in metric else "none", "antialias": "aa" in metric}
    for name, shown in pictures.items():
        request[name] = [str(tmp_path / f"{name}{number}.png") for number in range(len(shown))]
        for path, pixels in zip(request[name], shown, strict=True):
            Image.fromarray(pixels).save(path)
    done = subprocess.run([AUTHORS_PYTHON, "-I", cross_check.PROGRAM], input=json.dumps(request), capture_output=True)
    answer = json.loads(done.stdout)
    assert "value" in answer, answer
    prepare, crop = FRONT_ENDS[metric[4:-1].partition("+")[0]], CROPS[request["crop"]]
    network = load_inception(weights)
    with torch.no_grad():
        ours, real = (network(torch.stack([prepare(crop(x)) for x in shown])).numpy() for shown in pictures.values())
    theirs = np.load(tmp_path / "f.npy")
    assert np.abs(ours - theirs).max() < 1e-4 < np.abs(ours - theirs[::-1]).max()
    assert answer["value"] == pytest.approx(frechet_distance(Gaussian(ours), Gaussian(real)), rel=1e-3)
