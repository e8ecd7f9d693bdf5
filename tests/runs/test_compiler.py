"""What keeps a step from being compiled, told before it is tried."""

from importlib.machinery import ModuleSpec

import pytest

from specbench.runs import compiler


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
        ("metadata.version", lambda name: "2.11.0", "torch before 2.12 cannot compile the steps on cpu"),
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
