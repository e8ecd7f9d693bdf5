"""Stored feature vectors and statistics of references: unusable ones are refused in one line."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawn import drawn_run
from PIL import Image
from refusals import refused

from specbench.metrics.base import Settings
from specbench.metrics.distances import Gaussian, frechet_distance
from specbench.metrics.fid import Fid, fid_difference
from specbench.metrics.reference import ReferenceImages, feature_matrix, read_statistics
from specbench.metrics.score_store import read_scores
from specbench.metrics.shapes import ShapesFrechet
from specbench.system.images import pictures_in
from specbench.system.json_values import parse_json

GOOD = [np.arange(4.0, dtype=np.float32), np.ones(4, np.float32)]
BAD = {
    "unequal": np.ones(3, np.float32), "missing": None, "nested": np.array([np.ones(2), None], object),
    "infinite": np.array([0, 1, 2, np.inf], np.float32),
}  # fmt: skip


def table(vectors: list, **more: object) -> pd.DataFrame:
    numbers = range(len(vectors))
    return pd.DataFrame({"prompt_id": [f"p/{n}" for n in numbers], "sample": 0, "feature": vectors, **more})


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_no_metric_computes_with_damaged_vectors(bad):
    rows = table([*GOOD, bad])
    scene = '{"objects": [{"shape": "circle"}]}'
    for attempt in (
        lambda: fid_difference(rows, rows, Gaussian(np.eye(4))),
        lambda: ShapesFrechet().scores(rows.assign(scene=scene)),
    ):
        refused("stored features are damaged", attempt)


@pytest.mark.parametrize("scene", [None, "{", "[]", '{"objects": []}', '{"objects": [{"shape": "dragon"}]}', "[" * 999])
def test_damaged_scenes_of_renders_are_refused(scene):
    refused("a scene is malformed", ShapesFrechet().reference_features, table(GOOD, scene=scene))


def _statistics(path: Path, vectors: np.ndarray, **more: np.ndarray) -> Path:
    """Statistics as pytorch-fid and clean-fid save them."""
    np.savez_compressed(path, mu=vectors.mean(0), sigma=np.cov(vectors, rowvar=False), **more)
    return path


def test_fid_against_statistics_is_that_against_their_images_and_the_rest_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.metrics.fid.INCEPTION_FEATURES", 8)
    draw = np.random.default_rng(0)
    theirs = draw.normal(size=(30, 8))
    others = {"arr_0": np.zeros((2, 4, 4, 3), np.uint8), "mu_s": np.zeros(3)}  # as in the reference batches of ImageNet
    path = _statistics(tmp_path / "VIRTUAL.npz", theirs, **others)
    for n in (5, 20):  # fewer images than features, and more
        ours = draw.normal(size=(n, 8)).astype(np.float32)
        fid = Fid("tf1", Settings(reference=path))
        monkeypatch.setattr(fid, "_inception_score", lambda images: [])
        [score] = fid.scores(table([*ours]))
        assert score.estimate.value == pytest.approx(frechet_distance(Gaussian(ours), Gaussian(theirs)), rel=1e-6)
        assert "KID, precision, recall" in score.note and ("few for 8 features" in score.note) == (n == 5)
        assert fid.difference(table([*ours]), table([*ours]))[0].value == 0
    assert fid.identity()["reference"].startswith("mu and sigma ")
    for reference in (path, tmp_path):  # what else is missing is downloaded
        fid = Fid("tf1", Settings(reference=reference, offline=True))
        assert refused(r"inception\S* is not on this disk", fid.prepare).try_this.startswith("specbench fetch")
    refused(r"contains statistics \(mu, sigma\), not images", ShapesFrechet(Settings(reference=path)).identity)


SETS = {
    "spread": lambda n: np.random.default_rng(n).normal(size=(n, 8)),
    "of rank 1": lambda n: np.random.default_rng(n).normal(size=(n, 1)) * np.arange(1, 9),
    "identical": lambda n: np.tile(np.arange(1.0, 9), (n, 1)), "black": lambda n: np.zeros((n, 8)),
}  # fmt: skip


@pytest.mark.parametrize("ours", SETS)
@pytest.mark.parametrize("theirs", SETS)
@pytest.mark.filterwarnings("error")
def test_no_score_of_sets_without_spread_is_nan(ours, theirs, monkeypatch):
    monkeypatch.setattr("specbench.metrics.fid.INCEPTION_FEATURES", 8)
    for n, m in ((2, 2), (20, 2), (5, 12), (20, 20)):
        features, reference = (SETS[name](size).astype(np.float32) for name, size in ((ours, n), (theirs, m)))
        fid = Fid("tf1", Settings())
        fid.__dict__["reference_features"], fid.reference.__dict__["statistics"] = reference, None
        monkeypatch.setattr(fid, "_inception_score", lambda images: [])
        scores = fid.scores(table([*features]))
        numbers = [(s.estimate.value, s.estimate.low, s.estimate.high) for s in scores]
        assert all(value is None or np.isfinite(value) for values in numbers for value in values), (n, m)
        expected = np.square(features.mean(0) - reference.mean(0)).sum() + features.var(0, ddof=1).sum()
        if theirs in ("identical", "black"):
            assert scores[0].estimate.value == pytest.approx(expected, rel=1e-5, abs=1e-5)
        said = "; ".join(score.note or "" for score in scores)
        assert ("reference images are identical" in said) == (theirs in ("identical", "black"))
        assert ("all images" in said) == (ours in ("identical", "black"))


def test_no_score_of_another_reference_is_printed_if_the_one_that_was_named_is_refused(tmp_path, cli):
    run = drawn_run(tmp_path / "out")
    for name, count in {"two": 2, "three": 3, "both/below": 2, "one": 1, "damaged": 3}.items():
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "both" / "a.png").touch()
    (tmp_path / "damaged" / "1.png").write_bytes(b"x")
    np.savez(tmp_path / "known.npz", **_EYE)
    call = ("score", "--out", tmp_path / "out", "--bundled-only", "--reference")
    for name in ("two", "three"):
        done = cli(*call, tmp_path / name)
        assert done.code == 0 and "shapes-frechet" in done.out
    problems = {
        "both": (2, "has 1 image, and 2 more"),
        "one": (2, "has fewer than two reference images (add images)"),
        "known.npz": (2, "contains statistics (mu, sigma), not images"), "damaged": (3, "1.png is damaged"),
    }  # fmt: skip
    for name, (code, why) in problems.items():
        done = cli(*call, tmp_path / name)
        assert done.code == code and why in done.err and "frechet" not in done.out, name
    scores = {row["fingerprint"]: row for row in read_scores(run) if row["metric"] == "shapes-frechet"}
    made = {parse_json(row["identity"])["reference_n"]: digest for digest, row in scores.items()}
    for number, name in (("2", "two"), ("3", "three")):
        done = cli(*call, tmp_path / name)
        assert f"reference: {number} images in {tmp_path / name} ({made[number]})" in done.err
        shown = f"shapes-frechet ({made[number]}): {number} reference images; "
        assert shown in done.err and shown in cli("report", "--all", "--out", tmp_path / "out").out


_EYE = {"mu": np.zeros(8), "sigma": np.eye(8)}


@pytest.mark.parametrize(("content", "problem"), [
    ({"feats": np.eye(8)}, "no mu and sigma in it, but feats"),
    (_EYE | {"mu": np.zeros(7)}, r"a mu of \[7\] and a sigma of \[8, 8\]"),
    (_EYE | {"sigma": np.full((8, 8), np.nan)}, "numbers that are not a valid mean"),
    (_EYE | {"sigma": -np.eye(8)}, "numbers that are not a valid mean"),
    (_EYE | {"sigma": np.eye(8) * 0.1 + 1 - np.eye(8)}, "correlations above 1"), (None, "it is no file"),
    (_EYE | {"sigma": np.triu(np.ones((8, 8)))}, "not symmetric"), (_EYE | {"mu": np.zeros(8, complex)}, "Cannot cast"),
    (_EYE | {"mu": np.array([print] * 8, object)}, "allow_pickle=False"),
    (_EYE | {"sigma": np.zeros((3000, 3000))}, "too large"), (b"no archive", "not a zip file"),
])  # fmt: skip
def test_a_file_that_holds_no_statistics_is_refused_in_one_line(tmp_path, content, problem):
    path = tmp_path / "x.npz"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content) if isinstance(content, bytes) else np.savez(path, **content)
    assert len(str(refused(f"is not a file of statistics .*: .*{problem}", read_statistics, path))) < 300


LEFT_BEHIND = (
    ".DS_Store", "THUMBS.DB", "Icon\r", "$RECYCLE.BIN/a.png", "._a.png", "Thumbs.db", "__MACOSX/._a.png",
    ".ipynb/a.png", "a/@eaDir/a.png", "e/",
)  # fmt: skip
FOLDERS = {  # files, and the images that count or why none do
    "flat": (["a.png", "b.JPG"], ["a.png", "b.JPG"]),
    "one of categories": (["plants/a.png", "logo/a.png"], ["logo/a.png", "plants/a.png"]),
    "packed": (["val/n01/a.png", "val/n02/a.png"], ["val/n01/a.png", "val/n02/a.png"]),
    "thumbnails": (["a.png", "b.png", "thumbs/a.png"], r"has 2 images, and 1 more in folders below it \(thumbs\)"),
    "thumbnails below": (["val/a.png", "val/small/a.png"], r"val has 1 image, and 1 more"),
    "a text": (["a.png", "b.txt"], r"b.txt is not an image"),
    "nothing": ([], "contains no images"),
}


@pytest.mark.parametrize(("files", "counted"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_of_images_has_one_rule_for_what_belongs_to_it(tmp_path, files, counted):
    for name in (*files, *LEFT_BEHIND):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    reference = ReferenceImages(Settings(reference=tmp_path))
    if isinstance(counted, str):
        error = refused(counted, lambda: reference.pictures)
        assert "more" not in counted or error.try_this == "name a folder that contains only the reference images"
    else:
        assert [str(path.relative_to(tmp_path)) for path in reference.pictures] == counted
        below = ", in 2 folders below it" if "/" in counted[0] else ""
        assert reference.summary.startswith(f"reference: 2 images in {tmp_path}{below}")
        (tmp_path / "e" / "back").symlink_to(tmp_path)
        refused(r"back is a link to one of its parent folders", pictures_in, tmp_path)


def test_endless_folders_and_statistics_of_another_network_are_refused(tmp_path):
    (tmp_path / "/".join(["d"] * 200)).mkdir(parents=True)
    refused("more than 100 folders inside each other", pictures_in, tmp_path)
    path = _statistics(tmp_path / "clip.npz", np.random.default_rng(0).normal(size=(9, 4)))
    rows = table([np.ones(2048, np.float32)] * 2)
    refused("is of 4 features, but Inception has 2048", Fid("tf1", Settings(reference=path)).scores, rows)
    assert feature_matrix(pd.Series(GOOD), 4).tolist() == [[0, 1, 2, 3], [1, 1, 1, 1]]
    assert feature_matrix(pd.Series([], dtype=object), 4).shape == (0, 4)
