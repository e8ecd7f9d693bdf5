"""The audit's test has the level that it states: its summed statistic accounts for dependent blocks of an image."""

import numpy as np
import pytest

from specbench.checks import divergence
from specbench.checks.divergence import Counts

TOKENS, HALF, COPIED = 12, 6, 0.99
ROUNDS = 1000


def copied_joint() -> np.ndarray:
    """Exact joint [4096] of 12 tokens of 2, each of the second half equal to its partner with probability COPIED."""
    bits = np.arange(2**TOKENS)[:, None] >> np.arange(TOKENS - 1, -1, -1) & 1
    same = (bits[:, HALF:] == bits[:, :HALF]).sum(1)
    return 0.5**HALF * COPIED**same * (1 - COPIED) ** (HALF - same)


@pytest.fixture(scope="module")
def standardised() -> dict[str, np.ndarray]:
    """Standardised summed statistics of exact samples, with the correction and without."""
    rng, exact = np.random.default_rng(5), np.append(copied_joint(), 0.0)
    sums = {"corrected": [], "plain": []}
    for _ in range(ROUNDS):
        tables = [Counts(rng.multinomial(10_000, exact, size=2), exact, 2)]
        scaled, dof = divergence._summed(tables)
        sums["corrected"].append((scaled - dof) / np.sqrt(2 * dof))
        scale = divergence._scale(tables)
        sums["plain"].append((scaled - dof) * scale / np.sqrt(2 * dof * scale))
    return {name: np.array(values) for name, values in sums.items()}


def test_the_summed_statistic_of_exact_samples_has_its_variance_and_would_be_wider_without_the_correction(standardised):
    assert standardised["corrected"].std() == pytest.approx(1.0, abs=0.08)
    assert abs(standardised["corrected"].mean()) < 0.15 and standardised["plain"].std() > 1.1
