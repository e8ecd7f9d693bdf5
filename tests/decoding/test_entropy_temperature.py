"""A temperature by entropy is part of the target distribution: AR uses it, and lossless decoders keep it.

It concerns several modules: sampling, and the decoders that keep its distribution.
"""

import math

import numpy as np
import pytest
import torch

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel, joint
from specbench.checks.losslessness import observe
from specbench.decoding.sampling import truncate
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

SETTING = AuditSetting("2x4 of 3 by entropy", TokenLayout.plain(2, 4, 3), Sampling(2.0, 0.8, 2, 1.0, 1.5), window=3)


def test_the_temperature_is_the_formula_of_the_released_code():
    logits = np.random.default_rng(0).normal(0, 2, (40, 9))
    truncated = truncate(torch.from_numpy(logits).float(), Sampling(1.0, 0.7, 5, 1.0, 3.0)).softmax(-1).numpy()
    for row, p in zip(logits, truncated, strict=True):
        kept = sorted(range(9), key=lambda token, row=row: -row[token])[:5]
        plain = {token: math.exp(row[token]) for token in kept}
        total = sum(plain.values())
        entropy = -sum(w / total * math.log(w / total) for w in plain.values())
        temperature = 0.7 * (2.5 * math.exp(-entropy / 3) + 0.6)
        warm = {token: math.exp(row[token] / temperature) for token in kept}
        np.testing.assert_allclose(p, [warm.get(token, 0) / sum(warm.values()) for token in range(9)], atol=1e-6)


@pytest.mark.parametrize("name", ["ar", "sjd-block", "scd-mc"])
def test_lossless_decoders_are_lossless_for_that_target(name):
    assert p_value(observe(SETTING, resolve(name), 20_000, seed=0)) > AUDIT_LEVEL


def test_it_is_another_target():
    model = EnumerableModel(SETTING.layout)
    assert np.abs(joint(model, SETTING.sampling) - joint(model, Sampling(2.0, 0.8, 2))).sum() > 0.1


def test_a_run_without_it_keeps_its_name():
    from tiny import spec  # brings transformers

    assert "entropy_scale" not in spec().content()["sampling"]
    assert spec().digest != spec().__class__(**vars(spec()) | {"sampling": SETTING.sampling}).digest
