"""Obstacles to compiling a step are reported before compilation, and a run takes the cores that others leave."""

from importlib.machinery import ModuleSpec

import pytest
from synthetic import folder, generation

from specbench.runs import compiler
from specbench.runs.plan import make_plan
from specbench.runs.settings import merge, run_settings
from specbench.system import limits


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine that can compile on a CPU."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name if name == "g++" else None)
    monkeypatch.setattr(compiler, "find_spec", lambda name: ModuleSpec(name, None, origin="/lib/torch/__init__.py"))
    monkeypatch.setattr(compiler.metadata, "version", lambda name: "2.13.0+cpu")


SPACES = ModuleSpec("torch", None, origin="/my lib/torch")
OLD = "torch before 2.11 cannot compile the steps on cuda"


@pytest.mark.parametrize(("device", "version", "origin", "lacking"), [
    ("cpu", "2.13.0+cpu", None, None), ("cuda", "2.11.0+cu130", None, None), ("cuda", "2.10.1", None, OLD),
    ("cuda", "2.13.0", SPACES, None), ("cpu", "2.14.1", SPACES, None),
])  # fmt: skip
def test_a_complete_machine_lacks_nothing_and_what_each_version_of_torch_needs(
    complete, monkeypatch, device, version, origin, lacking
):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiler.metadata, "version", lambda name: version)
    if origin is not None:
        monkeypatch.setattr(compiler, "find_spec", lambda name: origin)
    assert compiler.missing(device) == lacking
    assert lacking or compiler.should_compile("on", device) == (True, None)
    assert device == "cpu" or lacking or compiler.should_compile("auto", "cuda:0") == (True, None)


@pytest.mark.parametrize(("attribute", "value", "reason"), [
    ("metadata.version", lambda name: "2.12.1", "torch before 2.13 cannot compile the steps on cpu"),
    ("shutil.which", lambda name: None, "no compiler (g++, clang++) is installed"),
    ("sysconfig.get_path", lambda name: "/nowhere", "header files are not installed"),
    ("find_spec", lambda name: SPACES, "if its path has spaces: /my lib/torch"),
])  # fmt: skip
def test_what_is_missing_is_named_and_the_run_goes_on_eagerly(complete, monkeypatch, attribute, value, reason):
    monkeypatch.setattr(f"specbench.runs.compiler.{attribute}", value)
    compiled, note = compiler.should_compile("on", "cpu")
    assert not compiled and reason in note and note.endswith("running eagerly")
    assert compiler.should_compile("off", "cpu") == (False, None)


@pytest.fixture
def plan(tmp_path):
    def make(**flags):
        return make_plan(merge(run_settings(), {"threads": 1} | flags | {"out": str(tmp_path), "baseline": 0}, env={}))

    return make


def test_more_threads_than_cores_are_noted(plan, monkeypatch):
    monkeypatch.setattr("specbench.runs.plan.available_cores", lambda: 2)
    asked = {"decoder": ["ar"], "limit": 1, "compile": "off"}
    assert not plan(**asked, threads=2).notes
    assert plan(**asked, threads=3).notes == (
        "--threads 3: this process has 2 CPU cores, so threads wait for each other",
    )


def test_auto_compiles_on_a_cpu_if_it_pays_and_as_the_stored_runs_did(complete, plan, tmp_path):
    few, many = plan(decoder=["ar,sjd"], limit=8), plan(decoder=["ar,sjd"], limit=200)
    assert not few.compute.compiled and not [note for note in few.notes if "compil" in note]
    assert many.compute.compiled
    assert "compiling the steps saves about" in many.notes[-1] and "--compile off" in many.notes[-1]
    assert not plan(decoder=["ar,sjd"], limit=200, compile="off").compute.compiled
    folder(tmp_path, few.spec(few.decoders[0].spec, few.model.weights_sha256()), [generation(4, 10.0)])
    assert not plan(decoder=["ar,sjd"], limit=200).compute.compiled, "it resumes the earlier images"


@pytest.mark.parametrize(("used", "expected"), [(0.2, 4), (1.6, 2), (9.0, 1)])
def test_a_run_takes_the_cores_that_others_leave_and_says_so(used, expected, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(limits, "available_cores", lambda: 4)
    monkeypatch.setattr(compiler, "cores_in_use", lambda: used)
    count, notes = compiler.free_threads(tmp_path, "shapes", "cpu")
    assert count == expected and bool(notes) == (expected < 4)
    assert not notes or notes[0].endswith(f"because other processes use {used} of 4 cores; --threads 4: all")
