"""The table of docs/same-run.md: each input is changed once, and has the effect that the table states. Of several
modules: specs, store, system, metrics, reporting."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from synthetic import AR, INVOCATION, SJD, ar, folder, sjd

from specbench.metrics.base import Settings, made_score
from specbench.metrics.catalog import metric
from specbench.prompts import Prompt
from specbench.prompts.prompt_set import build_prompt_set
from specbench.reporting import render, report_rows
from specbench.specs.run_spec import RunSpec
from specbench.store.run_folders import find_runs
from specbench.system import environment
from specbench.system.foreign_code import code_of

TABLE = (Path(__file__).parents[2] / "docs" / "same-run.md").read_text()
PARTS = [part.partition("\n") for part in TABLE.split("\n## ")[1:]]
STATED = {
    name.strip("`"): effect.lower() for effect, _, part in PARTS for name in re.findall(r"^- (.+?): ", part, re.M)
}
SPECS = {
    "model": "other", "weights_sha256": "9" * 64, "model_code": "8" * 64, "decoder": tiny.spec("sjd", window=2).decoder,
    "decoder_code": "7" * 64, "head_sha256": "6" * 64, "sampling": replace(SJD.sampling, top_k=7), "prompts": "other",
    "prompts_sha256": "5" * 64, "seed": 1, "batch": 4, "dtype": "bfloat16", "device": "cuda", "threads": 9,
    "mode": "throughput", "compiled": True, "tokens_sha256": "5" * 64,
}  # fmt: skip
CALLS = {
    "versions.torch": "3.0", "versions.transformers": "9.0", "versions.torchao": "9.0", "versions.pandas": "9.0",
    "versions.pyarrow": "99.0", "versions.safetensors": "9.0", "hardware.platform": "Other", "hardware.cores": 3,
    "hardware.memory_gib": 9.0, "hardware.tf32": False, "versions.python": "3.13.1", "versions.numpy": "3.0",
    "versions.specbench": "9.9", "hardware.cpu": "Another", "hardware.gpus": ["NVIDIA B200"], "hardware.cuda": "14.0",
    "hardware.driver": "999.1", "threads": 3, "git": {"revision": "f" * 40, "dirty": True}, "load": 7.5,
    "drawn": "2 of 4: first 2", "workers": 3,
}  # fmt: skip
ON_GPU = ("hardware.gpus", "hardware.cuda", "hardware.driver", "threads")


def report(out: Path) -> tuple[list[dict], str]:
    rows = report_rows(find_runs(out))
    return rows, render(rows, "markdown", everything=True, explain=True)


def observed(monkeypatch, out: Path, spec: RunSpec, change) -> str:
    """The effect of changing the description of a run of SJD, with a run of AR."""
    hardware = {"gpus": ["NVIDIA H100"], "cuda": "12.8", "driver": "570.1"} if spec.device == "cuda" else {}
    for name in ("transformers", "torchao"):
        monkeypatch.setitem(INVOCATION["versions"], name, "5.0")
    folder(out, replace(AR, device=spec.device, dtype=spec.dtype), ar(8), **hardware)
    place = folder(out, spec, sjd(8), **hardware)
    _, before = report(out)
    info = json.loads((place / "run.json").read_text())
    change(info)
    (place / "run.json").write_text(json.dumps(info))
    rows, after = report(out)
    over = rows[1].over_ar
    if over.speedup is None:
        assert over.speedup_note.startswith("differs from AR in "), over.speedup_note
        return "no speed-up"
    return "ignored" if after == before else "reported"


def set_in(info: dict, name: str, value: object) -> None:
    *path, last = name.split(".")
    place = info["invocations"][0]
    for part in path:
        place = place[part]
    place[last] = value


def test_the_table_lists_every_field_of_a_run_once():
    assert {f"spec.{name}" for name in RunSpec.__dataclass_fields__} <= STATED.keys()
    facts = {"versions": environment.versions(), "hardware": environment.hardware()}
    assert {f"invocations[].{kind}.{name}" for kind, names in facts.items() for name in names} <= STATED.keys()
    tried = {f"spec.{name}" for name in SPECS} | {f"invocations[].{name}" for name in CALLS}
    assert STATED.keys() - tried == {
        "commits", "comments of a plug-in", "order of the prompts", "code of a metric", "a copy of a run's folder"
    }  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_a_changed_setting_has_the_stated_effect(name):
    other = replace(SJD, **{name: SPECS[name]})
    assert {True: "another run", False: "ignored"}[other.run_id != SJD.run_id] == STATED[f"spec.{name}"]
    on_gpu = replace(SJD, device="cuda")
    assert replace(on_gpu, device="cuda:3", threads=9).run_id == on_gpu.run_id


@pytest.mark.parametrize("name", CALLS)
def test_a_changed_fact_of_an_invocation_has_the_stated_effect(tmp_path, name, monkeypatch):
    spec = replace(SJD, device="cuda") if name in ON_GPU else SJD
    spec = replace(spec, dtype="int8wo") if name == "versions.torchao" else spec
    effect = observed(monkeypatch, tmp_path, spec, lambda info: set_in(info, name, CALLS[name]))
    assert effect == STATED[f"invocations[].{name}"]


def test_the_other_inputs_have_the_stated_effects(tmp_path, monkeypatch):
    change = lambda info: info.update(commits={"me/mine": "f" * 40})  # noqa: E731
    effects = {"commits": observed(monkeypatch, tmp_path / "a", SJD, change)}
    place = tmp_path / "a" / SJD.run_id
    shutil.copytree(place, place.parent / "copy")
    effects["a copy of a run's folder"] = "reported" if report(tmp_path / "a")[0][1].copies else "ignored"

    mine = [Prompt("1", "a cat"), Prompt("2", "a dog")]
    same = build_prompt_set("mine", mine).sha256 == build_prompt_set("mine", mine[::-1]).sha256
    effects["order of the prompts"] = "ignored" if same else "another run"

    monkeypatch.syspath_prepend(tmp_path)
    text = (Path(__file__).parents[2] / "docs/examples/plugin/toy_plugin/contrast.py").read_text()
    digests, scores = [], []
    for version in (text, f"# a comment\n{text}", text.replace("0.114", "0.115")):
        (tmp_path / "contrast.py").write_text(version)
        sys.modules.pop("contrast", None)
        digests.append(code_of(["contrast:Contrast"]).digest)
        scores.append(made_score(metric("contrast:Contrast")(Settings())).fingerprint)
    sys.modules.pop("contrast", None)
    effects["comments of a plug-in"] = "ignored" if digests[0] == digests[1] else "another run"
    effects["code of a metric"] = "another score" if scores[0] == scores[1] != scores[2] else "ignored"
    assert effects == {name: STATED[name] for name in effects}
