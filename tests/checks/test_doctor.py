"""`specbench doctor`: what is installed is compared with what is declared."""

import pytest

from specbench.checks import doctor


@pytest.mark.parametrize(
    ("here", "requirement", "older"),
    [
        ("5.0.0", "transformers>=5.0", False),
        ("4.57.6", "transformers>=5.0", True),
        ("2.13.0+cpu", "torch>=2.8", False),
        ("2.7.1", "torch>=2.8", True),
        ("13.9", "rich>=13.8", False),
        ("1", "anything", False),
    ],
)
def test_a_package_below_its_declared_bound_is_missing(here, requirement, older, monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: [requirement])
    monkeypatch.setattr(doctor.metadata, "version", lambda name: here)
    rows = {row["name"]: row for row in doctor._packages()}
    name = requirement.partition(">")[0]
    assert (rows.get(name, {"status": "ok"})["status"] == "missing") == older
    if older:
        assert here in rows[name]["detail"] and rows[name]["fix"] == f"pip install --upgrade '{requirement}'"
