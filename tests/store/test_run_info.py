"""run.json: one description, written and read without loss, and searched by the fields of its spec."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import tiny

from specbench.store.run_folders import distinctions, find_runs_like, without_options
from specbench.store.run_info import Invocation, RunInfo, read_info
from specbench.system.json_values import nonfinite_as_text

SPEC = replace(tiny.spec("sjd++", tau=float("inf")), head_sha256="2" * 64)
ROOFLINE = {
    "size": {"weights": 10, "kv": 2, "attention": 4}, "itemsize": 4, "rows_per_image": 2, "device": "a device",
    "bytes_per_s": 1e9, "flops": 1e12, "source": "measured",
}  # fmt: skip


def full() -> RunInfo:
    call = Invocation.from_json({**synthetic.INVOCATION, "compile_s": 1.5, "workers": 2, "finished_at": None})
    facts = {"origins": {"seed": "default"}, "window_curve": [{"window": 1}], "memory": {"batch": 1, "images": 2}}
    return RunInfo(SPEC, invocations=[call], roofline=ROOFLINE, **facts)


def test_only_an_edited_decoder_is_listed_with_its_code():
    infos = {name: RunInfo(replace(SPEC, decoder_code=code)) for name, code in (("ours", None), ("edited", "3" * 64))}
    assert distinctions(infos) == {"ours": "", "edited": "decoder-code=33333333"}


def test_a_description_survives_the_file_with_every_key_also_of_other_versions():
    stored = json.loads(json.dumps(nonfinite_as_text(full().to_json()), allow_nan=False))
    order = ["schema", "run_id", "spec", "invocations", "origins", "window_curve", "floor", "memory"]
    assert list(stored) == order and stored["spec"]["decoder"]["options"]["tau"] == "inf"
    read = RunInfo.from_json(stored)
    assert read == full() and read.spec == SPEC and read.spec.run_id == read.run_id
    assert nonfinite_as_text(read.to_json()) == stored
    stored = nonfinite_as_text(full().to_json()) | {"later": 1}
    stored["invocations"][0]["later"] = [2]
    again = RunInfo.from_json(stored).to_json()
    assert again["later"] == 1 and again["invocations"][0]["later"] == [2] and list(again) == list(stored)


def test_the_command_for_another_decoder_names_the_results_folder_of_today():
    info = replace(full(), asked={"prompts": "pets", "out": "/moved from here", "limit": 2})
    command = "specbench run --decoder ar --model enumerable --prompts pets --limit 2"
    assert info.command("ar", Path("results")) == command
    assert info.command("ar", Path("/now here")) == f"{command} --out '/now here'"


@pytest.mark.parametrize(("dtype", "stack"), [("float32", ""), ("int8wo", ", torchao 0.9")])
def test_the_version_of_torchao_counts_only_for_eight_bits(dtype, stack):
    info = full()
    info.spec = replace(SPEC, dtype=dtype)
    info.invocations[0].versions = {**info.invocations[0].versions, "torchao": "0.9"}
    assert info.stacks == [f"python 3.11, torch 2.9.0{stack}"]


OPTIONS = {"forward": {"triton.cudagraphs": True}, "sampling": {"realize_opcount_threshold": 8}}


@pytest.mark.parametrize(("planned", "facts", "steps"), [
    (None, {}, "eager"),
    (True, {}, "compiled"),  # earlier files, and workers that reported nothing
    (True, {"compiled_forms": 3}, "compiled"),
    (True, {"compiled_forms": 0, "compile_options": {}}, "eager"),  # the flag alone does not count
    (
        True, {"compiled_forms": 3, "compile_options": OPTIONS},
        "compiled (forward triton.cudagraphs=True; sampling realize_opcount_threshold=8)",
    ),
])  # fmt: skip
def test_how_the_steps_ran_is_read_from_what_was_compiled(planned, facts, steps):
    call = Invocation.from_json({**synthetic.INVOCATION, **facts})
    info = RunInfo(replace(SPEC, compiled=planned), invocations=[call])
    assert info.steps == steps and info.compiled == steps.startswith("compiled")


@pytest.mark.parametrize(
    "junk", [{"floor": {**ROOFLINE, "flops": 0}}, {"floor": {}}, {"window_curve": [1]}, {"origins": []}, {"memory": 1}]
)
def test_malformed_optional_keys_are_refused(junk):
    with pytest.raises((LookupError, TypeError, ValueError)):
        RunInfo.from_json(nonfinite_as_text(full().to_json()) | junk)


def test_runs_are_found_by_fields_and_by_parts_of_fields(tmp_path):
    wide, narrow = tiny.spec("gsd", G=5, window=4), tiny.spec("gsd", G=5, window=3)
    folders = [synthetic.folder(tmp_path, spec, synthetic.sjd(1)) for spec in (wide, narrow, tiny.spec("ar"))]
    assert set(find_runs_like(tmp_path, decoder=wide.decoder)) == {folders[0]}
    assert set(find_runs_like(tmp_path, decoder=without_options(wide.decoder, "window"))) == set(folders[:2])
    assert set(find_runs_like(tmp_path, decoder={"name": "ar"}, seed=0)) == {folders[2]}
    assert not find_runs_like(tmp_path, seed=1) and not find_runs_like(tmp_path / "nothing", seed=0)
    infos = {folder: read_info(folder) for folder in folders}
    assert find_runs_like(infos, **vars(narrow)) == {folders[1]: infos[folders[1]]}
