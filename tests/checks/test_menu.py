"""Every combination of components that calls itself lossless is lossless, not the presets alone.

`make audit-menu` audits all of them; the default suite takes every SHARE-th.

It concerns several modules: every component of specbench.specs.components, through the audit.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
from menu import described, extremes, lossless_decoders
from menu_audit import IMAGES, audit_combination, widest_first

from specbench.checks.audit_settings import COMPILED_SETTINGS
from specbench.checks.losslessness import audit_one
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.options import Option
from specbench.specs.presets import PRESETS, resolve

MENU_SCRIPT = Path(__file__).parents[2] / "dev" / "audit" / "menu.py"
SHARE = 293
DECODERS = list(lossless_decoders())


@pytest.mark.parametrize("spec", DECODERS[::SHARE], ids=described)
def test_a_sample_of_the_combinations_is_lossless(spec):
    row = audit_combination(spec)
    assert row["verdict"] == row["declared"] == "lossless", row
    assert row["samples"] >= IMAGES


def test_an_audit_of_the_menu_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    menu = runpy.run_path(str(MENU_SCRIPT))
    verdicts = iter(["lossless", "lossless", "lossy"])
    found = {"declared": "lossless", "p_value": 0.5, "worst_setting": "-"}
    monkeypatch.setitem(
        menu["menu_row"].__globals__,
        "audit_combination",
        lambda spec: (
            dict.fromkeys([*menu["KEPT"], "refused"]) | found | {"decoder": described(spec), "verdict": next(verdicts)}
        ),
    )
    out = tmp_path / "menu.jsonl"
    codes = []
    for _ in range(3):
        monkeypatch.setattr(sys, "argv", ["menu.py", "--out", str(out), "--limit", "1"])
        codes.append(menu["main"]())
    audited = [json.loads(line)["decoder"] for line in out.read_text().splitlines()]
    assert audited == [described(spec) for spec in widest_first(DECODERS)[:3]]
    assert codes == [0, 0, 4]
    assert f"not lossless: {audited[-1]}" in capsys.readouterr().out


def test_a_line_that_a_kill_cut_off_is_audited_anew(tmp_path):
    read_rows = runpy.run_path(str(MENU_SCRIPT))["read_rows"]
    out = tmp_path / "menu.jsonl"
    out.write_text('{"decoder": "one"}\n{"decoder": "tw')
    assert read_rows(out) == [{"decoder": "one"}] and out.read_text() == '{"decoder": "one"}\n'
    assert read_rows(tmp_path / "nothing.jsonl") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "zipar" and resolve(name).lossless])
def test_every_lossless_preset_is_lossless_compiled(name):
    found = audit_one(name, resolve(name), 20_000, 0, COMPILED_SETTINGS)
    assert found["verdict"] == "lossless", found


@pytest.mark.slow
def test_a_bug_in_compiled_steps_is_caught(monkeypatch):
    plain = Jacobi._fill
    monkeypatch.setattr(Jacobi, "_fill", lambda self, *given: plain(self, *given).roll(1, dims=1))
    assert audit_one("sjd", resolve("sjd"), 20_000, 1, COMPILED_SETTINGS)["verdict"] == "lossy"


def test_all_lossless_components_and_extremes_are_in_the_menu():
    for kind, components in CHOICES.items():
        found = {getattr(spec, kind) for spec in DECODERS if kind not in DRAFTERS[spec.drafter].ignores}
        # LANTERN's residuals need LANTERN's verifiers, which are lossy.
        assert found == {name for name, part in components.items() if part.lossless and not part.only_with}
    options = {option for spec in DECODERS for option in spec.options}
    assert options >= {("siblings", 1), ("siblings", 16), ("depth", 1), ("fresh-q", "onehot"), ("tree", "chain")}
    assert len(DECODERS) == len(set(DECODERS)) > 300


def test_every_choice_and_both_bounds_of_an_option_are_extremes():
    assert extremes(Option("x", 3, "", minimum=1, maximum=9)) == [1, 9]
    assert extremes(Option("x", 3, "", minimum=1)) == [1, 16]
    assert extremes(Option("x", "a", "", choices=("a", "b"))) == ["b"]
