"""The examples of docs/extending.md work as printed: the plug-in is built, installed into a folder, and used."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from forked import forked_command

from specbench import load

NAMES = ("greys-ar", "greys-predictive")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
pytest.importorskip("hatchling", reason="builds the plug-in")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    """A folder with the installed plug-in, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("plugin")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(command, cwd=EXAMPLES / "plugin", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next((folder / "dist").iterdir())) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def specbench(plugin: Path, folder: Path, *arguments: str, code: int = 0) -> list[dict]:
    """The JSON that one command prints if the plug-in is installed; it must end with exit code `code`."""
    done = forked_command([*arguments, "--json"], cwd=folder, path=[plugin])
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(plugin, tmp_path_factory) -> Path:
    """Images of the plug-in's model and prompts by its decoder and by others."""
    folder = tmp_path_factory.mktemp("runs")
    run = ("run", "--model", "greys", "--prompts", "weather", "--decoder", "ar,predictive,row-above", "--samples", "4")
    specbench(plugin, folder, *run, "--threads", "1")
    return folder


def test_the_metrics_score_the_models_images(plugin, runs):
    scores = specbench(plugin, runs, "score")
    assert {score["metric"] for score in scores} == {"contrast", "variety"}
    assert all(0 < score["value"] < 127.5 and score["n"] == 12 for score in scores)


def test_the_drafter_saves_steps_and_the_model_reads_its_prompts(plugin, runs):
    rows = {row["decoder"]: row for row in specbench(plugin, runs, "report")}
    assert rows["row-above"]["tokens_per_step"] > 1.05 and rows["row-above"]["lossless"]
    ar, predictive = (load(run, out=runs / "results").set_index(["prompt_id", "sample"]) for run in NAMES)
    tokens = ar["tokens"].map(list)
    assert tokens.equals(predictive["tokens"].map(list))
    mean = tokens.map(lambda values: sum(values) / len(values)).groupby("prompt_id").mean()
    assert mean["night"] + 4 < mean["dusk"] < mean["noon"] - 2, mean


def test_the_drafter_is_lossless(plugin, tmp_path):
    (row,) = specbench(plugin, tmp_path, "audit", "row-above", "--samples", "50000")
    assert row["verdict"] == "lossless"


def test_a_wrong_q_is_found(plugin, tmp_path):
    """The guide says so: what the drafter claims about its drafts must be true."""
    source = plugin / "toy_plugin" / "row_above.py"
    right = source.read_text()
    wrong = right.replace("one_hot(draft, target.vocab)", "one_hot(draft, target.vocab) * 0.5 + 0.5 / target.vocab")
    assert wrong != right
    source.write_text(wrong)
    try:
        (row,) = specbench(plugin, tmp_path, "audit", "row-above", "--samples", "50000", code=4)
    finally:
        source.write_text(right)
    assert row["verdict"] == "lossy"
