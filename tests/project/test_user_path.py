"""The whole path of a user with a checkpoint, at tiny scale: prompts, readiness, run, score, report. Checkpoint,
networks of the metrics and prompt files are in their publishers' formats. With PROMPT_DATA_FOLDER, the prompt files are
the published ones, of which each set then decodes its first two prompts."""

import functools
import json
import os
import re
from pathlib import Path

import authors_formats as formats
import calibrated
import checkpoints
import published
import pytest
from PIL import Image

from specbench.metrics import preference
from specbench.prompts import public

REAL = os.environ.get("PROMPT_DATA_FOLDER")
SETS = {"coco": "coco", "parti": "parti", "geneval": "geneval", "t2i-compbench": "t2i-compbench/numeracy"}
PROTOCOL = {"fid[pytorch-fid]", "clip[b16+299]", "hpsv2[v2.1]"}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Checkpoint, metrics' weights and reference images in one folder."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "TINY").mkdir()
    checkpoints.write("lumina", folder / "TINY")
    calibrated.save_inception(folder / "inception.pth")
    formats.save_openai_clip(folder / "ViT-B-16.pt")
    formats.save_hpsv2(folder)
    (folder / "reference").mkdir()
    for number, pixels in enumerate(calibrated.images(3, 80, 80)):
        Image.fromarray(pixels).save(folder / "reference" / f"{number:012d}.png")
    return folder


@pytest.fixture
def machine(files, tmp_path, monkeypatch) -> Path:
    """A folder to work in, on a machine where these files are the published ones."""
    monkeypatch.chdir(tmp_path)
    for name, file in (("inception", "inception.pth"), ("clip-b16", "ViT-B-16.pt"), ("hpsv2-v2.1", "HPS.pt")):
        formats.stand_in(monkeypatch, name, files / file)
    tiny_hps = functools.partial(preference.load_hpsv2, architecture="tiny-hps")
    monkeypatch.setattr(preference, "load_hpsv2", tiny_hps)
    if not REAL:
        small = {name: published.public_set(name) for name in SETS}
        monkeypatch.setattr(public, "public_sets", lambda: small)
    (tmp_path / "TINY").symlink_to(files / "TINY")
    return tmp_path


@pytest.mark.parametrize("name", SETS)
def test_from_a_checkpoint_and_published_prompts_to_a_scored_report(name, machine, files, cli):
    copies = Path(REAL) / name if REAL else published.write(name, machine / "copies")
    assert cli("fetch", name, "--from", copies).code == 0
    model = ("--model", "lumina", "--weights", "TINY", "--scale", "tiny")
    ready = cli("doctor", *model, "--protocol", "sjd", "--json")
    checks = {row["name"]: (row["status"], row["fix"]) for row in json.loads(ready.out)}
    status, fix = checks.pop("metric fid[pytorch-fid]")
    assert status == "missing" and "--reference" in fix, "the weights are there, COCO's images are not"
    for prerequisite in ("model lumina+tiny", "metric clip[b16+299]", "metric hpsv2[v2.1]"):
        assert checks[prerequisite] == ("ok", "")

    ran = cli("run", *model, "--decoder", "ar,gsd", "--G", "50", "--prompts", SETS[name], "--limit", "2")
    assert ran.code == 0 and len(ran.out.split()) == 2, ran.err
    scored = cli("score", "--protocol", "sjd", "--reference", files / "reference", "--json")
    assert scored.code == 0 and "randomly" not in scored.err, scored.err
    rows = json.loads(scored.out)
    for run in ran.out.split():
        assert {row["metric"] for row in rows if row["run_id"] == Path(run).name} >= PROTOCOL

    report = cli("report", "--all", "--explain").out
    heading, *_ = report.splitlines()
    assert heading.startswith("### lumina+tiny from TINY (layout lumina, sha256 ")
    assert re.search(rf"prompts {SETS[name]}( \(2 of [\d,]+: first 2\))?, seed 0", heading), heading
    ar, gsd, *_ = re.findall(r"^\| (ar|gsd G=50[^|]*?) \| (\d) \| ([\d.]+) \|", report, re.MULTILINE)
    assert ar[0] == "ar" and gsd[0].startswith("gsd G=50") and ar[1] == gsd[1] == "2"
    assert float(gsd[2]) < float(ar[2]), "fewer target forwards"
    table = next(line for line in report.splitlines() if line.startswith("| decoder") and "lossless" in line)
    assert {heading.rstrip(" ↑↓") for heading in table.strip("| ").split(" | ")} >= PROTOCOL
    definitions = {line.partition(":")[0][2:]: line for line in report.splitlines() if line.startswith("- ")}
    assert definitions.keys() >= PROTOCOL and "interval" not in "".join(definitions[metric] for metric in PROTOCOL)
    assert cli("report", "--all", "--explain", "--format", "markdown", "--to", "report.md").code == 0
    assert (machine / "report.md").read_text().strip() == report.strip()
