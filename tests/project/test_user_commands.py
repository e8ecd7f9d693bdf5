"""The user's commands as typed, by the real client from an empty machine. A hub on the loopback has small checkpoints
under the official names, with the official vocabularies and grids, and the networks of the metrics in their publishers'
formats."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import official_hub
import pandas as pd
import pytest
from forked import forked
from loopback_hub import Hub, loopback_hub

from specbench.models.hub_model import MODELS

pytestmark = pytest.mark.slow
QUICK = ("llamagen", "lumina-512")
LEFT_OUT = (*QUICK, "llamagen-c2i-3b", "glm-image", *(f"tar-dtok-{side}" for side in (256, 512, 1024)))
_LONGEST_S = 3000
"""Seconds of a command: an image of 9,216 tokens takes minutes on a busy machine."""
SLOW = tuple(model.name for model in MODELS if model.name not in LEFT_OUT)
"""LlamaGen 3B has heads of 100, with which tests/models/test_llamagen_class.py writes it; GLM-Image draws pictures
with diffusers and its whole repository alone; Tar's second stage reads no texts."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    with loopback_hub() as served:
        folder = tmp_path_factory.mktemp("hub")
        official_hub.serve(served, folder / "repositories", QUICK)
        official_hub.serve_files(served, folder / "files")
        yield served


@pytest.fixture
def no_baseline():
    """Users have one, unlike other tests."""


def typed(hub: Hub, home: Path, line: str, **variables: str) -> subprocess.CompletedProcess:
    """Type a command in an empty folder of a user with an empty home folder."""
    (home / "work").mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **hub.env(home), "HOME": str(home), **variables}
    env.pop("SPECBENCH_PROMPTS_MIRROR", None)
    type_it = functools.partial(official_hub.type_as_user, hub, *line.split()[1:])
    return forked(type_it, cwd=home / "work", env=env, timeout_s=_LONGEST_S)


def test_run_score_and_report_as_typed(hub, tmp_path):
    ran = typed(hub, tmp_path, "specbench run --model llamagen --decoder gsd --G 50 --limit 2")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    assert "downloading prompts of parti" in lines[0]
    assert lines[1].startswith("llamagen (bfloat16, cpu): 2 prompts of parti, 2 images with gsd")
    assert lines[2].startswith("baseline for the speed-up: ar on the first 2 prompts")
    assert [line.split(",")[0] for line in lines[3:5]] == [
        "downloading peizesun/llamagen_t2i", "downloading google/flan-t5-xl"
    ]  # fmt: skip
    scored = typed(hub, tmp_path, "specbench score")
    assert scored.returncode == 0, scored.stderr
    assert scored.stderr.startswith("scoring 2 runs on cpu: clip[b16+299], hpsv2[v2.1]\n"), scored.stderr
    assert "downloading ViT-B-16.pt" in scored.stderr and "downloading HPS.pt" in scored.stderr
    report = typed(hub, tmp_path, "specbench report")
    assert report.returncode == 0, report.stderr
    [folder] = (tmp_path / "work" / "results").glob("*-gsd-*")
    samples = pd.concat(map(pd.read_parquet, (folder / "samples").glob("*.parquet")))
    assert len(samples) == 2 and samples[["nfe", "latency_ms"]].gt(0).all(axis=None)
    assert all(len(logprobs) == 256 for logprobs in samples["logp"]), "log-probabilities of every token"
    scores = pd.concat(map(pd.read_parquet, (folder / "scores").glob("*.parquet")))
    assert {"clip[b16+299]", "hpsv2[v2.1]"} <= set(scores["metric"])
    row = next(line for line in report.stdout.splitlines() if line.startswith("| gsd"))
    assert "clip[b16+299]" in report.stdout and row.count("|") > 5 and "No speed-up can be given" not in report.stdout


def test_after_a_score_the_same_process_loads_a_model():
    """open_clip is imported with stubs of torchvision, which transformers must not take for the package."""
    order = "from specbench.metrics.openclip import import_open_clip as c; c(); import transformers as t"
    done = subprocess.run([sys.executable, "-c", f"{order}; t.JanusForConditionalGeneration"], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_protocols_and_beforehand_downloads_as_typed(hub, tmp_path):
    fetched = typed(hub, tmp_path, "specbench fetch llamagen parti --protocol cool-sd")
    assert fetched.returncode == 0 and fetched.stderr.count("downloading ") == 9, fetched.stderr
    assert "complete on this disk" in typed(hub, tmp_path, "specbench fetch llamagen", SPECBENCH_OFFLINE="1").stderr
    ran = typed(hub, tmp_path, "specbench run --model llamagen --decoder ar --limit 2 --scale tiny", HF_HUB_OFFLINE="1")
    assert ran.returncode == 0, ran.stderr
    scored = typed(hub, tmp_path, "specbench score --protocol cool-sd --json", HF_HUB_OFFLINE="1")
    assert scored.returncode == 0, scored.stderr
    metrics = {row["metric"] for row in json.loads(scored.stdout)}
    assert metrics >= {"clip[b32+prefix+center256]", "hpsv2[v2.1]", "imagereward"}
    assert "fid[clean+center256]" not in metrics, "PartiPrompts have no reference images"


def test_a_table_from_an_empty_cache_in_one_command(hub, tmp_path):
    official_hub.serve(hub, tmp_path / "repositories", ["lumina"])
    bench = typed(hub, tmp_path, "specbench bench gsd-1 --limit 1 --samples 1")
    assert bench.returncode == 0, bench.stderr
    lines = bench.stderr.splitlines()
    loaded = next(number for number, line in enumerate(lines) if line.startswith("loading"))
    assert not any(line.startswith("downloading") for line in lines[loaded:]), "all of it before the first image"
    assert sum(line.startswith("downloading") for line in lines) == 7, bench.stderr
    rows = [line for line in bench.stdout.splitlines() if line.startswith("| C GSD") or "GSD" in line.split("|")[1:2]]
    assert rows or "GSD" in bench.stdout


def test_the_published_head_is_used_if_none_is_named(hub, tmp_path):
    ran = typed(hub, tmp_path, "specbench run --model llamagen --decoder eagle --tree 0 --limit 1 --baseline 0")
    assert ran.returncode == 0 and "downloading jadohu/llamagen_drafter" in ran.stderr, ran.stderr
    assert len(list((tmp_path / "work" / "results").glob("llamagen-eagle-*/run.json"))) == 1


OF_EACH_FAMILY = ("llamagen-c2i-b-256", "lumina-512", "anole", "janus", "simplear", "tar-1.5b", "liquid", "glm-image")
OF_EACH_FAMILY += ("lumina2", "emu3")
WHOLE_PATH = ["score", "report", "audit --run RUN --recompute", "pack", "verify runs.zip", "bench", "status"]


@pytest.mark.parametrize("model", dict.fromkeys([*OF_EACH_FAMILY, *SLOW]))
def test_the_commands_of_every_model_and_the_whole_path_with_one_of_each_family(model, hub, tmp_path):
    """One command brings everything; then there is a picture without the network."""
    if model not in QUICK:
        official_hub.serve(hub, tmp_path / "repositories", [model])
    codes = {"verify runs.zip": [0, 4], "bench": [0, 5]}
    # 4: a small substitute is faster than the roofline of its official size allows; 5: that does not fit this machine.
    if "c2i" in model or model == "glm-image":
        codes["score"] = [2]  # FID of classes needs a folder of real images, GLM-Image's pictures its diffusion model
    results = tmp_path / "work" / "results"
    for line in (f"fetch {model} --scores", "run", *(WHOLE_PATH if model in OF_EACH_FAMILY else ())):
        run = next((folder.name for folder in results.glob("*-sjd-*")), "")
        named = {"run": f"run --model {model} --decoder ar,sjd --limit 1"}
        named["bench"] = f"bench gsd-1 --model {model} --limit 1 --dry-run"
        offline = {} if line.startswith("fetch") else {"SPECBENCH_OFFLINE": "1"}
        done = typed(hub, tmp_path, f"specbench {named.get(line, line).replace('RUN', run)}", **offline)
        assert done.returncode in codes.get(line, [0]) and "Traceback" not in done.stderr, (line, done.stderr)
        assert done.returncode != 4 or "times the roofline of" in done.stderr, done.stderr
    assert len(list(results.rglob("*.png"))) == (0 if model == "glm-image" else 2)
