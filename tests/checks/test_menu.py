"""Every combination of components that calls itself lossless is lossless, not the presets alone.

`make audit-menu` audits all of them; the default suite takes every SHARE-th.
"""

import pytest
from menu import described, extremes, lossless_decoders

from specbench.checks.audit_settings import COMPILED_SETTINGS, AuditSetting
from specbench.checks.losslessness import audit_one
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.models.interface import TokenLayout
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.options import Option
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling

IMAGES = 20_000
SHARE = 47
SETTINGS = (
    AuditSetting("2x4 of 2, window wider than the image", TokenLayout.plain(2, 4, 2), window=12),
    AuditSetting("2x6 of 2 with row ends, window 3", TokenLayout.with_row_ends(2, 6, 2), Sampling(2.0), window=3),
    AuditSetting("4x4 of 2, window 4", TokenLayout.plain(4, 4, 2), window=4),
    AuditSetting("8x1 of 3, one-token rows, window 2", TokenLayout.with_row_ends(8, 1, 3), window=2),
    AuditSetting("2x2 of 4, window 1", TokenLayout.plain(2, 2, 4), Sampling(1.0, 0.8, 3), window=1),
)
DECODERS = list(lossless_decoders())
SAMPLE = DECODERS[::SHARE]


def check(spec) -> None:
    row = audit_one(described(spec), spec, IMAGES, seed=1, settings=SETTINGS)
    assert row["verdict"] == row["declared"] == "lossless", row
    assert row["samples"] >= IMAGES


@pytest.mark.parametrize("spec", SAMPLE, ids=described)
def test_a_sample_of_the_combinations_is_lossless(spec):
    check(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec in DECODERS if spec not in SAMPLE], ids=described)
def test_every_combination_is_lossless(spec):
    check(spec)


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
