"""The shipped draft head yields more than one token per round for every decoder with a head; runs with different heads
are kept apart. It concerns several modules: draft_head, draft_head_files, and the head of the shapes model."""

import json
import shutil

import pytest
from one_of_each import presets

from specbench.decoding.loop import decode
from specbench.models.catalog import find_model, load_model
from specbench.models.draft_head import load_head, save_head
from specbench.models.draft_head_files import head_in
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, resolve

TEXTS = ("three red circles on a grainy background", "a blue square on a cloudy background")


@pytest.fixture(scope="module")
def model():
    return load_model("shapes")


OF_EAGLE = [name for name, preset in PRESETS.items() if preset.choices["drafter"] == "eagle"]


@pytest.mark.parametrize("name", presets("verifier", OF_EAGLE))
def test_the_shipped_head_is_worth_its_rounds(model, name):
    requests = [Request(text, text) for text in TEXTS]
    rows = decode(model, requests, resolve(name), find_model("shapes").sampling(), 0, render=False)
    for row in rows:
        assert (model.layout.length - 1) / (row.nfe - 1) > 2
        if name == "eagle-block":  # it does not test drafts one by one
            continue
        assert row.facts["draft_tv_1"] < 0.8  # single images lie between 0.3 and 0.65
        assert (row.facts["theorem2_bound"] == 0) == resolve(name).lossless


def test_two_heads_are_two_runs_even_under_one_path(cli, tmp_path, monkeypatch):
    bundled, copied = find_model("shapes").heads["eagle"], tmp_path / "head"

    def run_id(*arguments):
        outcome = cli("run", "--decoder", "eagle", *arguments, "--limit", "1", "--out", tmp_path, "--dry-run", "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)[0]["run_id"]

    shutil.copytree(bundled, copied)
    first = run_id("--head", copied)
    assert first != run_id()
    head = load_head(head_in(bundled))
    head.fc.bias.data += 0.01
    save_head(head, copied, {})
    assert run_id("--head", copied) != first
    named = ("run", "--decoder", "eagle", "--limit", "1", "--out", tmp_path, "--head")
    cli(*named, tmp_path / "none").refused("no draft head in", code=5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads").mkdir()
    cli(*named, "heads/mine").refused("no draft head in heads/mine", code=5)  # no repository of a hub


@pytest.mark.parametrize(("taps", "problem"), [
    ([1, 3, 6], "the head reads layer 6; 'shapes' has layers 0 to 5"), ([1, 3, -1], "the head reads layer -1;"),
    ([1, 3, 2.5], "the layer numbers `taps`"), (None, "the layer numbers `taps`"),
    ([1, 3], "not an EAGLE-3 head, see its tensor fuse.weight"),
])  # fmt: skip
def test_layers_that_the_model_lacks_are_refused_in_a_line(taps, problem, cli, tmp_path):
    shutil.copytree(find_model("shapes").heads["eagle3"], tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"taps": taps}))
    line = "run --decoder eagle3 --baseline 0 --limit 1 --device cpu --compile off"
    cli(*line.split(), "--head", tmp_path / "head", "--out", tmp_path / "out").refused(problem)


def test_a_finished_run_with_a_head_is_resumed_and_reported_with_ar(cli, tmp_path):
    call = ("run", "--decoder", "ar,eagle", "--tree", "0 1 00", "--limit", "1", "--out", tmp_path, "--json", "--quiet")
    first, again = (json.loads(cli(*call).out) for _ in range(2))
    assert [run["run_id"] for run in first] == [run["run_id"] for run in again]
    info = json.loads((tmp_path / first[1]["run_id"] / "run.json").read_text())
    assert len(info["spec"]["head_sha256"]) == 64 and len(info["invocations"]) == 1
    table = cli("report", "--out", tmp_path)
    assert table.out.count("### shapes") == 1
