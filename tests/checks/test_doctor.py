"""`specbench doctor`: what is installed is compared with what is declared."""

import pytest

from specbench.checks import doctor


@pytest.mark.parametrize(("here", "requirement", "older"), [
    ("5.1.0", "transformers>=5.1", False), ("4.57.6", "transformers>=5.1", True), ("2.13.0+cpu", "torch>=2.8", False),
    ("2.7.1", "torch>=2.8", True), ("13.9", "rich>=13.8", False), ("1", "anything", False),
    ("0.22.1", "tokenizers>=0.22.1", False),
])  # fmt: skip
def test_a_package_below_its_declared_bound_is_missing(here, requirement, older, monkeypatch):
    monkeypatch.setattr(doctor, "requirements", lambda: [requirement])
    monkeypatch.setattr(doctor.metadata, "version", lambda name: here)
    rows = {row["name"]: row for row in doctor._packages()}
    name = requirement.partition(">")[0]
    assert (rows.get(name, {"status": "ok"})["status"] == "missing") == older
    if older:
        assert here in rows[name]["detail"] and rows[name]["fix"] == f"pip install --upgrade '{requirement}'"


def test_what_a_gpu_needs_has_a_row_each(monkeypatch):
    monkeypatch.setattr(doctor, "has_gpu_driver", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    rows = {row["name"]: row for row in [*doctor._acceleration(), doctor._limits()]}
    assert set(rows) == {"GPU", "compilation", "nvidia-ml-py", "TF32", "limits"}
    assert {row["status"] for row in rows.values()} == {"ok"} and "CPU cores" in rows["limits"]["detail"]
    monkeypatch.setattr(doctor, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(doctor.compiler, "missing", lambda device: "the package triton is not installed")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    rows = {row["name"]: row for row in doctor._acceleration()}
    assert "torch finds no GPU" in rows["GPU"]["detail"] and rows["GPU"]["fix"] and rows["TF32"]["status"] == "warning"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    rows = {row["name"]: row for row in doctor._acceleration()}
    assert "GPU" not in rows and rows["nvidia-ml-py"]["fix"] == "pip install 'nvidia-ml-py>=12'"
    assert "triton" in rows["compilation"]["detail"] and "--compile off" in rows["compilation"]["fix"]


def test_the_first_screen_is_short_and_the_rest_is_a_flag_away(cli, tmp_path):
    short, everything = (cli("doctor", "--out", tmp_path, *flags) for flags in ((), ("--all",)))
    assert short.code == 0 and len(short.out.splitlines()) <= 16
    assert "| other models " in short.out and "| transformers " not in short.out
    assert "| transformers " in everything.out and "| model emu3 " in everything.out
    assert short.err.count("\n") == 1 and "specbench doctor --all" in short.err
