"""Published metrics on a stored run, from the command line to the report: one row per image, one column per
fingerprint. It concerns several modules: scoring, the metrics of published weights, and the report."""

import json
from pathlib import Path

import authors_formats as formats
import calibrated
import numpy as np
import pandas as pd
import pytest
import synthetic
import torch
from PIL import Image
from refusals import refused

from specbench import api
from specbench.metrics import scoring
from specbench.metrics.base import Settings
from specbench.metrics.fid import Fid
from specbench.metrics.preference import ImageReward
from specbench.metrics.score_store import image_features, read_scores
from specbench.prompts import Prompt
from specbench.reporting import render, report_rows


def stored_run(out: Path, prompts: list[Prompt], samples: int = 2, spec=synthetic.SJD, seed: int = 0) -> Path:
    pictures = calibrated.images(len(prompts) * samples, 40, 56, seed)
    return synthetic.pictured(out, prompts, samples, spec, lambda number: np.moveaxis(pictures[number], -1, 0))


PROMPTS = [Prompt(f"p{number}", text, None, {}) for number, text in enumerate(("a red cat", "a blue dog", "a photo"))]
EIGHT = [Prompt(f"p{number}", "a photo", None, {}) for number in range(8)]


def pair_of_runs(out: Path, prompts: list[Prompt], samples: int = 1) -> list[Path]:
    return [stored_run(out, prompts, samples, *each) for each in ((synthetic.SJD, 0), (synthetic.AR, 1))]


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    formats.stand_in(monkeypatch, "imagereward", formats.save_imagereward(tmp_path / "ImageReward.pt"))
    formats.stand_in(monkeypatch, "bert-vocabulary", formats.save_vocabulary(tmp_path / "vocab.txt"))


def test_a_named_metric_reaches_the_table_and_is_computed_once_whatever_the_batch(
    checkpoints, tmp_path, cli, monkeypatch
):
    folder = stored_run(tmp_path / "out", PROMPTS)
    command = ("score", "--metric", "imagereward", "--offline", "--out", tmp_path / "out", "--json", "--batch")
    scored = cli(*command, "4")
    (row,) = json.loads(scored.out)
    assert scored.code == 0 and row["n"] == row["images"] == 6
    assert row["too_few"] and row["low"] is row["high"] is None, "three prompts are too few for an interval"
    assert json.loads(row["identity"])["weights"].startswith("sha256:")
    values = image_features(folder, ImageReward())["value"]
    assert len(set(values)) == 6 and row["value"] == pytest.approx(values.astype(float).mean())
    report = cli("report", "--all", "--explain", "--out", tmp_path / "out")
    assert "| imagereward ↑ |" in report.out and "- imagereward: learned human preference" in report.out
    monkeypatch.setattr(ImageReward, "features", lambda *_: pytest.fail("computed again"))
    assert cli(*command, "2").out == scored.out


def test_nothing_scored_is_no_success(tmp_path, cli, monkeypatch):
    monkeypatch.setattr("specbench.system.downloads._open_url", lambda *_: pytest.fail("the network was used"))
    stored_run(tmp_path / "out", PROMPTS)
    bundled = cli("score", "--bundled-only", "--out", tmp_path / "out", "--json")
    assert bundled.code == 2 and json.loads(bundled.out) == [] and "--reference FOLDER" in bundled.err
    away = cli("score", "--offline", "--out", tmp_path / "out")
    assert away.code == 5 and "clip[b16+299] is not computed: ViT-B-16.pt is not on this disk" in away.err
    assert away.err.count("is not computed") == 2 and "specbench fetch HPS_v2.1_compressed.pt" in away.err


def test_against_a_run_the_difference_is_paired(checkpoints, tmp_path, cli):
    runs = pair_of_runs(tmp_path / "out", EIGHT)
    call = ("score", "--metric", "imagereward", "--offline", "--out", tmp_path / "out", "--json")
    (row,) = json.loads(cli(*call, "--against", runs[1].name).out)
    values = [image_features(run, ImageReward()).set_index(["prompt_id", "sample"])["value"] for run in runs]
    gaps = values[0].astype(float) - values[1].astype(float)
    assert row["difference"] == pytest.approx(gaps.mean()) and row["low"] < gaps.mean() < row["high"] and row["n"] == 8
    assert (row["run_id"], row["baseline"]) == (runs[0].name, runs[1].name)
    assert "requires --metric or --protocol" in cli("score", "--against", runs[1].name, "--out", tmp_path / "out").err


def test_scores_of_unlike_fingerprints_are_never_subtracted(checkpoints, tmp_path, monkeypatch):
    """One run is scored by an older library, the other by today's."""
    runs = pair_of_runs(tmp_path / "out", PROMPTS, 2)
    settings, today = Settings(offline=True), ImageReward.identity
    scoring.score(runs[:1], ["imagereward"], settings)
    with monkeypatch.context() as older:
        older.setattr(ImageReward, "identity", lambda metric: {**today(metric), "torch": "1.13"})
        scoring.score(runs[1:], ["imagereward"], settings)
    digests = [row["fingerprint"] for run in runs for row in read_scores(run)]
    assert digests[0] != digests[1]
    asked = runs[1].name, [runs[0].name], ["imagereward"], tmp_path / "out", settings
    refused(f"{runs[1].name} has no score of 'imagereward' with fingerprint", api.differences, *asked)
    compared = api.compare(runs[1].name, runs[0].name, tmp_path / "out", settings).set_index("name").T
    refused("both names refer to the run", api.compare, runs[0].name, runs[0].name, tmp_path / "out", settings)
    assert pd.isna(compared["imagereward"]["value"]) and "different torch" in compared["imagereward"]["note"]
    api.score(metrics=["imagereward"], out=tmp_path / "out", settings=settings)
    gap = api.differences(runs[1].name, [runs[0].name], "imagereward", tmp_path / "out", settings).squeeze()
    assert gap["fingerprint"] == digests[0] and gap["n"] == 6


def test_fid_of_two_runs_against_one_reference(tmp_path, monkeypatch):
    (tmp_path / "inception.pth").write_bytes(b"weights")
    formats.stand_in(monkeypatch, "inception", tmp_path / "inception.pth")
    few = torch.nn.AdaptiveAvgPool2d((32, 64))
    monkeypatch.setattr(Fid, "embed", lambda _, inputs: few(torch.stack(list(inputs)))[:, 0].flatten(1).numpy())
    runs = pair_of_runs(tmp_path / "out", PROMPTS)
    (tmp_path / "real").mkdir()
    for number, pixels in enumerate(calibrated.images(3, seed=9)):
        Image.fromarray(pixels).save(tmp_path / "real" / f"{number}.png")
    settings = Settings(reference=tmp_path / "real", offline=True)
    rows = api.score(metrics="fid[clean]", out=tmp_path / "out", settings=settings, long=True).to_dict("records")
    assert {row["metric"] for row in rows} == {"fid[clean]", "kid[clean]"} and len(rows) == 4
    assert len({row["value"] for row in rows}) == 4 and len({row["fingerprint"] for row in rows}) == 1
    assert all(pd.isna(row["low"]) for row in rows if row["metric"] == "fid[clean]"), "n < d has no interval"
    gap = api.differences(runs[1].name, metrics=["fid[clean]"], out=tmp_path / "out", settings=settings).squeeze()
    values = {row["run_id"]: row["value"] for row in rows if row["metric"] == "fid[clean]"}
    assert gap["difference"] == pytest.approx(values[runs[0].name] - values[runs[1].name]) and gap["n"] == 3
    (tmp_path / "real" / "2.png").unlink()
    api.score([runs[0].name], ["fid[clean]"], tmp_path / "out", settings=settings)
    assert render(report_rows(runs)).count("fid[clean] (") >= 2, "another reference is another column"


def test_a_protocol_leaves_out_what_does_not_fit(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.metrics.catalog.find_protocol", lambda name: ("fid[clean]", "imagereward"))
    stored_run(tmp_path / "out", PROMPTS)
    rows = api.score(out=tmp_path / "out", protocol="sjd", settings=Settings(offline=True))
    assert [*rows.columns][2:] == ["decoder", *(f"imagereward{end}" for end in ("", "_low", "_high", "_n"))]
    offline = Settings(offline=True)
    refused(r"'fid\[clean\]' cannot score", api.score, metrics=["fid[clean]"], out=tmp_path / "out", settings=offline)
