"""Every combination of components that calls itself lossless is lossless, not the presets alone. `make audit-menu`
audits all of them; the default suite takes every SHARE-th. It concerns several modules: every component of
specbench.specs.components, through the audit."""

import pytest
from menu import described, lossless_decoders
from menu_audit import IMAGES, audit_combination

from specbench.checks.audit_settings import COMPILED_SETTINGS
from specbench.checks.losslessness import audit_one
from specbench.decoding.drafters import jacobi
from specbench.decoding.sampling import rows_at
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.presets import PRESETS, resolve

SHARE = 293
DECODERS = list(lossless_decoders())


@pytest.mark.parametrize("spec", DECODERS[::SHARE], ids=described)
def test_a_sample_of_the_combinations_is_lossless(spec):
    row = audit_combination(spec)
    assert row["verdict"] == row["declared"] == "lossless", row
    assert row["samples"] >= IMAGES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if resolve(name).lossless])
def test_every_lossless_preset_is_lossless_compiled(name):
    audit = audit_one(name, resolve(name), 20_000, 0, COMPILED_SETTINGS)
    assert audit["verdict"] == "lossless", audit


@pytest.mark.slow
def test_a_bug_in_compiled_steps_is_caught(monkeypatch):
    monkeypatch.setattr(jacobi, "rows_at", lambda rows, slots: rows_at(rows, slots).roll(1, dims=1))
    assert audit_one("sjd", resolve("sjd"), 20_000, 1, COMPILED_SETTINGS)["verdict"] == "lossy"


def test_all_lossless_components_and_extremes_are_in_the_menu():
    for kind, components in CHOICES.items():
        used = {getattr(spec, kind) for spec in DECODERS if kind not in DRAFTERS[spec.drafter].ignores}
        # LANTERN's residuals need LANTERN's verifiers, which are lossy.
        assert used == {name for name, part in components.items() if part.lossless and not part.only_with}
    options = {option for spec in DECODERS for option in spec.options.items()}
    assert options >= {("siblings", 1), ("siblings", 16), ("depth", 1), ("fresh-q", "onehot"), ("tree", "chain")}
    assert len(DECODERS) == len(set(DECODERS)) > 300
