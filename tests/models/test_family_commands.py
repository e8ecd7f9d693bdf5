"""Commands with model families: `run` decodes from a checkpoint folder, `list` and `doctor` report the state, and
random weights are labelled and never scored. It concerns several modules: every model family, and the commands run,
list and doctor."""

import json

import pandas as pd
import pytest
from checkpoints import INFO, WRITERS, write

# GLM-Image and X-Omni draw no pictures here, and Tar's second stage reads no texts.
NAMES = [name for name in reversed(WRITERS) if not name.startswith(("glm-image", "x-omni", "tar-dtok"))]


@pytest.mark.parametrize("name", {INFO[name].family: name for name in NAMES}.values())
def test_every_model_decodes_from_its_checkpoint(name, run_tiny, cli, written, tmp_path):
    folder, texts = written(name), ("7", "12") if INFO[name].classes else ("a red circle", "a blue square")
    outcome = run_tiny(name, "--weights", folder, "--decoder", "gsd", "--G", "3", "--json", texts=texts)
    assert outcome.code == 0, outcome.err
    run = tmp_path / "results" / json.loads(outcome.out)[0]["run_id"]
    assert pd.read_parquet(run / "samples")["status"].tolist() == ["ok", "ok"]
    assert len(list((run / "images").glob("*.png"))) == 2
    spec, source = (json.loads((run / "run.json").read_text())[part] for part in ("spec", "source"))
    assert spec["model"] == f"{name}+tiny" and spec["decoder"]["name"] == "gsd"
    assert source["weights"] == str(folder) and name.startswith(source["layout"]) and not source["revision"]
    assert source["sha256"] == spec["weights_sha256"]
    if name != "janus":  # what commands print of a source is the same for all
        return
    text = f"{folder} (layout {source['layout']}, sha256 {source['sha256'][:12]})"
    where = ("--out", run.parent)
    assert f"### {name}+tiny from {text}: prompts " in cli("report", *where).out
    assert f"| {text} |" in cli("list", "runs", *where).out
    (card,) = json.loads(cli("show", run.name, *where, "--json").out)
    assert card["source"] == text


def test_random_weights_are_labelled_and_not_scored(run_tiny, cli, tmp_path):
    outcome = run_tiny("janus", "--random-weights", "--decoder", "ar", "--json")
    assert outcome.code == 0, outcome.err
    run_id = json.loads(outcome.out)[0]["run_id"]
    assert run_id.startswith("janus+random+tiny-")
    info = json.loads((tmp_path / "results" / run_id / "run.json").read_text())
    assert info["spec"]["model"] == "janus+random+tiny" and "source" not in info
    cli("score", run_id, "--out", tmp_path / "results").refused("random weights")


@pytest.mark.parametrize(("arguments", "problem"), [
    (("--model", "janus", "--weights", "absent"), "--weights absent: no such folder"),
    (("--model", "janus", "--weights", "a/b", "--random-weights"), "--random-weights cannot be combined with"),
    (("--model", "shapes", "--random-weights"), "'shapes' has only one set of weights and one size"),
    (("--model", "shapes", "--scale", "tiny"), "'shapes' has only one set of weights and one size"),
    (("--model", "janus", "--scale", "huge"), "--scale huge"),
    (("--model", "janus", "--weights", ".", "--revision", "v1"), "--revision v1: --weights . is a folder"),
    (("--model", "lumena"), "did you mean 'lumina'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments, problem, cli, tmp_path):
    cli("run", *arguments, "--out", tmp_path / "results").refused(problem)
    assert not (tmp_path / "results").exists()


def test_a_missing_checkpoint_is_one_line_with_what_to_type(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = cli("run", "--model", "lumina", "--prompts", "shapes", "--out", tmp_path / "results")
    outcome.refused("image decoder (Chameleon", "specbench fetch lumina", code=5)
    assert len(outcome.err) < 230


def test_doctor_accounts_for_every_tensor_without_loading(tmp_path):
    from specbench.checks.doctor import doctor

    write("simplear", tmp_path)
    rows = {row["name"]: row for row in doctor("simplear", tmp_path, str(tmp_path), scale="tiny")}
    row = rows["model simplear+tiny"]
    assert row["status"] == "ok" and "names and shapes of all tensors correct" in row["detail"]
    assert "memory" not in rows, "nobody has counted a checkpoint of any size"
    config = json.loads((tmp_path / "config.json").read_text())
    changed = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    broken = {row["name"]: row for row in doctor("simplear", tmp_path, str(tmp_path), scale="tiny")}[
        "model simplear+tiny"
    ]
    assert broken["status"] == "missing" and "lacks 'model.layers.2" in broken["detail"]


def test_doctor_takes_what_run_takes(cli, tmp_path):
    write("janus", tmp_path)
    tiny = ("doctor", "--model", "janus", "--scale", "tiny", "--weights", tmp_path, "--json")
    assert "model janus+tiny" in {row["name"] for row in json.loads(cli(*tiny).out)}
    rows = {row["name"]: row for row in json.loads(cli("doctor", "--model", "janus", "--random-weights", "--json").out)}
    assert rows["model janus+random"]["status"] == "ok" and "GiB in bfloat16" in rows["memory"]["detail"]
    assert cli("doctor", "--scale", "tiny").code == 2
    assert "size of a model 'huge'" in cli("doctor", "--model", "janus", "--scale", "huge").err


def test_doctor_says_what_is_missing_and_that_it_would_not_fit(cli, monkeypatch):
    monkeypatch.setattr("specbench.checks.doctor.free_memory", lambda device: 12 * 2**30)
    outcome = cli("doctor", "--model", "lumina", "--json")
    rows = {row["name"]: row for row in json.loads(outcome.out)}
    assert outcome.code == 5 and rows["model lumina"]["status"] == "missing"
    assert "specbench fetch" in rows["model lumina"]["fix"]
    assert rows["memory"]["status"] == "warning" and "of 12.0 GiB of main memory free" in rows["memory"]["detail"]
    assert cli("doctor", "--weights", "a/b").code == 2


def test_the_list_shows_what_each_model_takes(cli):
    rows = {row["name"]: row for row in json.loads(cli("list", "models", "--json").out)}
    assert set(WRITERS) < set(rows)
    lumina = rows["lumina"]
    assert (lumina["height"], lumina["width"], lumina["tokens"]) == (768, 768, 2304)
    assert lumina["hub_id"] == "Alpha-VLLM/Lumina-mGPT-7B-768" and "Chameleon" in lumina["licence"]
    assert lumina["step_bytes"] == 13_020_700_672 and lumina["kv_bytes_per_token"] == 512 * 1024
    assert rows["shapes"]["parameters_b"] == 0.0024 and rows["shapes"]["memory_gib"] > 0
    assert lumina["parameters_b"] == 7.01 and 14 < lumina["memory_gib"] < 18
