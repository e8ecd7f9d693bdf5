"""A dry run reports every setting, the cost of a run and all obstacles at once."""

import json
import pkgutil
from dataclasses import replace

import checkpoints
import numpy as np
import synthetic
from refusals import refused

from specbench import api
from specbench.prompts import loading
from specbench.runs import dry_run
from specbench.runs.dry_run import ROW, Costs, distinct_outlooks, outlooks
from specbench.runs.plan import make_plan
from specbench.runs.settings import merge, run_settings
from specbench.runs.sweep import check_effects, sweep_plans, sweep_values
from specbench.specs.presets import PRESETS, resolve
from specbench.system.device_peaks import Peak


def test_all_obstacles_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.runs.plan.free_memory", lambda device: 2**30)
    asked = {"model": "lumina", "prompts": "coco", "limit": 5, "out": tmp_path, "top_k": 7}
    ar, vertical = api.dry_run(decoder=["ar", "vertical"], **asked)
    assert ar.keys() == set(ROW)
    assert (ar["images"], ar["done"], ar["top_k"], ar["guidance"], ar["run_id"]) == (5, 0, 7, 3.0, None)
    assert ar["weights"].startswith("specbench fetch Alpha-VLLM/") and 14 < ar["memory_gib"] < 20
    text = " ".join(vertical["obstacles"])
    assert "fetch coco" not in text, "a run would download it"
    assert "no draft head" in text and "1 GiB free" in text
    assert vertical["options"]["window"] and "--head FOLDER" in vertical["head"]
    assert not any("no draft head" in text for text in ar["obstacles"]), "an obstacle of another decoder"


def test_other_weights_that_the_run_would_refuse_are_an_obstacle(tmp_path):
    checkpoints.write("lumina", tmp_path / "weights")
    asked = {"decoder": "ar", "model": "lumina", "weights": tmp_path / "weights", "prompts": "shapes", "limit": 1}
    asked |= {"out": tmp_path}
    (whole,) = api.dry_run(**asked)
    assert [text for text in whole["obstacles"] if "has 24 image tokens, lumina has 8192" in text] == whole["obstacles"]
    (tiny,) = api.dry_run(**asked, scale="tiny")
    assert tiny["obstacles"] == [] and tiny["run_id"].startswith("lumina+tiny-")


def test_a_decoder_that_needs_a_codebook_is_refused_in_the_plan(tmp_path):
    asked = {"model": "x-omni", "prompts": "shapes", "limit": 1, "out": tmp_path, "scale": "tiny"}
    asked["decoder"] = ["gsd", "sjd", "gsd:d=inf", "gsd:d=inf,cluster=embedding", "gsd-released"]
    lines = [row["obstacles"] for row in api.dry_run(**asked, random_weights=True)]
    needs = "decoder 'gsd': --{} needs a codebook, which 'x-omni+random+tiny' lacks"
    expected = needs.format("d 0.5"), None, None, needs.format("cluster embedding"), None
    assert [line[0].partition(" (")[0] if line else None for line in lines] == list(expected)
    assert "use --d inf" in lines[0][0] and "use --cluster target or --cluster draft" in lines[3][0]
    checkpoints.write("x-omni", tmp_path / "weights")
    assert not any(row["obstacles"] for row in api.dry_run(**asked, weights=tmp_path / "weights"))


def test_a_file_in_the_place_of_results_and_a_batch_that_does_not_fit_are_one_obstacle_each(tmp_path, monkeypatch):
    out = tmp_path / "file"
    out.write_text("mine")
    (row,) = api.dry_run(decoder="ar", prompts="nope", out=out)
    first, second = row["obstacles"]
    assert "unknown prompt set" in first and f"{out} is a file" in second
    for place in ("plan", "memory_estimate"):
        monkeypatch.setattr(f"specbench.runs.{place}.free_memory", lambda device: 2**28)
    (row,) = api.dry_run(decoder="ar", batch=4096, limit=1, out=tmp_path)
    assert [text.partition(":")[0] for text in row["obstacles"]] == ["--batch 4096"]


def test_every_decoder_finds_the_draft_head_that_comes_with_the_model(tmp_path):
    with_head = [name for name in PRESETS if "head" in resolve(name).options]
    rows = api.dry_run(decoder=with_head, limit=1, out=tmp_path)
    assert {"eagle", "eagle-gbv", "vertical"} <= {row["decoder"] for row in rows}
    assert {row["decoder"]: row["obstacles"] for row in rows if row["head"] != "on disk" or row["obstacles"]} == {}


def test_the_table_lists_obstacles_once_and_the_exit_code_says_what_is_missing(tmp_path, cli, monkeypatch):
    monkeypatch.setattr("specbench.runs.plan.free_memory", lambda *_: 2**40)  # a smaller machine is an obstacle
    line = ("run", "--model", "lumina", "--decoder", "ar,vertical", "--prompts", "coco", "--dry-run", "--out", tmp_path)
    outcome = cli(*line)
    assert outcome.code == 5 and "no draft head" in outcome.err
    assert "Will be downloaded first; to fetch now: specbench fetch lumina" in outcome.out
    assert cli("run", "--model", "lumina", "--decoder", "ar", "--dry-run", "--out", tmp_path).code == 0
    published = cli("run", "--model", "anole", "--decoder", "eagle", "--dry-run", "--out", tmp_path)
    assert "draft head of anole: specbench fetch jadohu/anole_drafter" in published.out and published.code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = cli(*line)
    assert outcome.code == 5 and "obstacles (they are listed above)" in outcome.err
    assert outcome.out.count("(specbench fetch coco)") == 1 and "a. the prompts of 'coco'" in outcome.out
    rows = json.loads(cli("bench", "cool-sd-1", "--dry-run", "--json", "--out", tmp_path).out)
    assert all(len(row["obstacles"]) >= 1 and row["options"] is not None and row["images"] == 5000 for row in rows)


def test_a_prompt_file_is_read_once_for_all_runs_of_a_command(tmp_path, cli, monkeypatch):
    """A file of a million prompts takes seconds to read."""
    (tmp_path / "mine.txt").write_text("red circle\nblue square\n")
    read, honest = [], loading.read_file
    monkeypatch.setattr(loading, "read_file", lambda *arguments: read.append(arguments) or honest(*arguments))
    command = ("run", "--decoder", "ar,sjd", "--prompts", tmp_path / "mine.txt", "--out", tmp_path, "--dry-run")
    assert cli(*command).code == 0 and len(read) == 1
    values = merge(run_settings(), {"prompts": str(tmp_path / "mine.txt"), "out": str(tmp_path)}, env={})
    assert len(sweep_plans(values, {"seed": ["1", "2", "3"]})) == 3 and len(read) == 2
    assert len(api.dry_run(prompts=tmp_path / "mine.txt", out=tmp_path, sweep={"seed": [1, 2, 3]})) == 6
    assert len(read) == 3


def test_many_runs_are_planned_at_once_with_their_progress(tmp_path, cli, monkeypatch):
    """Facts that all runs share are computed once: a sweep of 1,000 seeds took 27 s, one of 20,000 was silent for
    minutes."""
    calls = []
    for name in ("models.shapes.captions.encode", "runs.plan.free_memory", "runs.plan.free_threads"):
        honest = pkgutil.resolve_name(f"specbench.{name}")
        spy = lambda *arguments, honest=honest: calls.append(honest) or honest(*arguments)  # noqa: E731
        monkeypatch.setattr(f"specbench.{name}", spy)
    values = merge(run_settings(), {"decoder": ["ar"], "limit": 4, "out": str(tmp_path)}, env={})
    check_effects(values, {"seed": range(3)}, shared := Costs())
    assert len(distinct_outlooks(sweep_values(values, {"seed": range(3)}), shared)) == 3 and len(calls) == 4 + 1 + 1
    (tmp_path / outlooks(replace(values, seed=1), shared)[0].row["run_id"]).mkdir()
    slow = [outlook.row for each in sweep_values(values, {"seed": range(3)}) for outlook in outlooks(each, shared)]
    assert [outlook.row for outlook in distinct_outlooks(sweep_values(values, {"seed": range(3)}), shared)] == slow
    monkeypatch.setattr("specbench.runs.sweep._MANY", 2)
    outcome = cli("run", "--decoder", "ar", "--dry-run", "--out", tmp_path, *("--sweep", "seed=0,1,2,3,4"))
    assert outcome.err.split("\n")[:3] == [f"planned {number} of 5 runs" for number in (0, 2, 4)]


def test_a_sweep_in_python_is_a_text_a_value_or_any_iterable_with_values():
    def swept(values):
        rows = api.dry_run(decoder="gsd", limit=1, baseline=0, sweep={"G": values})
        return [row["options"]["G"] for row in rows]

    assert swept("35") == swept(35) == swept(iter([35])) == [35]
    assert swept("3,10") == swept(np.array([3, 10])) == [3, 10]
    for call in (api.dry_run, api.run):
        refused("--sweep G: no values", call, decoder="gsd", sweep={"G": []})
        refused("sweep='G=3,10': not a dict", call, decoder="gsd", sweep="G=3,10")


def test_the_forecast_of_seven_billion_weights_is_the_time_to_read_them(monkeypatch, tmp_path):
    monkeypatch.setattr(dry_run, "find_peak", lambda *_: Peak("Slow CPU", {0: 1e10}, 1e15, "data sheet"))
    settings = {"model": "lumina", "prompts": "shapes", "limit": 1, "out": str(tmp_path), "cfg": 1.0, "device": "cpu"}
    note = dry_run.cost_note(make_plan(merge(run_settings(), settings, env={})))
    assert note.startswith("forecast: 54 min per image with ar (2,352 steps) on Slow CPU (data sheet)")
    monkeypatch.setattr(dry_run, "find_peak", lambda *_: None)
    busy_cpu = Peak("Busy CPU", {0: 1e9}, 1e15, "measured briefly")
    monkeypatch.setattr(dry_run, "glimpse_peak", lambda *_: (busy_cpu, False))
    busy = dry_run.cost_note(make_plan(merge(run_settings(), settings, env={})))
    assert "8.9 hours per image" in busy and "faster: a GPU" in busy, "also on a busy machine"
    assert "needs 1/k of the steps" in note and "a GPU, --model janus" in dry_run.cost_text(2352, 3601, "CPU", "now")


def test_a_stored_run_without_images_does_not_hide_the_pace_of_others(tmp_path):
    decoded = {0: [None], 1: synthetic.sjd(), 2: []}
    for seed, images in decoded.items():
        synthetic.folder(tmp_path, replace(synthetic.SJD, seed=seed), images)
    spec = synthetic.SJD
    pace = dry_run.seconds_per_image(tmp_path, spec.model, spec.decoder.name, spec.device)
    folder = tmp_path / replace(spec, seed=1).run_id
    assert pace == dry_run.seconds_per_image(tmp_path, spec.model, spec.decoder.name, spec.device, folder.name) > 0
