"""Drafts that are refined over several steps, in images longer than the window, keep the exact joint."""

import pytest

from specbench.checks.divergence import chi_square, chi_square_tail
from specbench.checks.losslessness import Case, observe
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve

IMAGES = 60_000
LONG = (
    Case("4 tokens of 3, window 2", TokenLayout.plain(1, 4, 3), window=2),
    Case("6 tokens of 3, window 3", TokenLayout.plain(2, 3, 3), window=3),
    Case("8 tokens of 2, window 4", TokenLayout.plain(2, 4, 2), window=4),
    Case("8 tokens of 2, window 3", TokenLayout.plain(2, 4, 2), window=3),
)


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
@pytest.mark.parametrize("decoder", ["scd-mc", "sjd-pac", "sjd", "sjd-isp", "scd-gs", "predictive", "jacobi"])
def test_images_longer_than_the_window_follow_the_exact_joint(decoder, case):
    (counts,) = observe(case, resolve(decoder), IMAGES, seed=0)
    assert chi_square_tail(*chi_square(counts)) > 1e-4
