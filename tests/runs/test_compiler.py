"""What keeps a step from being compiled, told before it is tried."""

from importlib.machinery import ModuleSpec

import pytest
from synthetic import folder, generation

from specbench.runs import compiler
from specbench.runs.plan import make_plan
from specbench.runs.settings import merge, run_settings


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine that can compile on a CPU."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name if name == "g++" else None)
    monkeypatch.setattr(compiler, "find_spec", lambda name: ModuleSpec(name, None, origin="/lib/torch/__init__.py"))
    monkeypatch.setattr(compiler.metadata, "version", lambda name: "2.13.0+cpu")


def test_a_complete_machine_lacks_nothing(complete):
    assert compiler.missing("cpu") is None
    assert compiler.should_compile("on", "cpu") == (True, None)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("metadata.version", lambda name: "2.12.1", "torch before 2.13 cannot compile the steps on cpu"),
        ("shutil.which", lambda name: None, "no compiler (g++, clang++) is installed"),
        ("sysconfig.get_path", lambda name: "/nowhere", "header files are not installed"),
        (
            "find_spec",
            lambda name: ModuleSpec(name, None, origin="/my lib/torch"),
            "from a path with spaces: /my lib/torch",
        ),
    ],
)
def test_what_is_missing_is_named_and_the_run_goes_on_eagerly(complete, monkeypatch, attribute, value, reason):
    monkeypatch.setattr(f"specbench.runs.compiler.{attribute}", value)
    compiled, note = compiler.should_compile("on", "cpu")
    assert not compiled and reason in note and note.endswith("running eagerly")
    assert compiler.should_compile("off", "cpu") == (False, None)


def test_torch_2_11_compiles_on_cuda_as_was_measured_there(complete, monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiler.metadata, "version", lambda name: "2.11.0+cu130")
    assert compiler.should_compile("auto", "cuda:0") == (True, None)
    monkeypatch.setattr(compiler.metadata, "version", lambda name: "2.10.1")
    assert compiler.missing("cuda") == "torch before 2.11 cannot compile the steps on cuda"


def test_a_path_with_spaces_does_not_matter_on_cuda_or_to_a_newer_torch(complete, monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiler, "find_spec", lambda name: ModuleSpec(name, None, origin="/my lib/torch"))
    assert compiler.missing("cuda") is None
    monkeypatch.setattr(compiler.metadata, "version", lambda name: "2.14.1")
    assert compiler.missing("cpu") is None


@pytest.fixture
def plan(tmp_path):
    def make(**flags):
        return make_plan(merge(run_settings(), flags | {"out": str(tmp_path), "threads": 1, "baseline": 0}, env={}))

    return make


def test_auto_compiles_on_a_cpu_where_it_pays_and_as_the_stored_runs_did(complete, plan, tmp_path):
    few, many = plan(decoder=["ar,sjd"], limit=8), plan(decoder=["ar,sjd"], limit=200)
    assert not few.compute.compiled and not [note for note in few.notes if "compil" in note]
    assert many.compute.compiled
    assert "compiling, which saves about" in many.notes[-1] and "--compile off" in many.notes[-1]
    assert not plan(decoder=["ar,sjd"], limit=200, compile="off").compute.compiled
    folder(tmp_path, few.spec(few.decoders[0].spec, few.model.weights_sha256()), [generation(4, 10.0)])
    assert not plan(decoder=["ar,sjd"], limit=200).compute.compiled, "it goes on with the images of before"
