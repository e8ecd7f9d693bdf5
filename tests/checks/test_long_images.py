"""Drafts that are refined over several steps, in images longer than the window, keep the exact joint distribution.

It concerns several modules: the drafters, verification and residuals of specbench.decoding, through the audit.
"""

import pytest
from scipy.stats import chi2

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import chi_square
from specbench.checks.losslessness import observe
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve

IMAGES = 60_000
LONG = (
    AuditSetting("4 tokens of 3, window 2", TokenLayout.plain(1, 4, 3), window=2),
    AuditSetting("6 tokens of 3, window 3", TokenLayout.plain(2, 3, 3), window=3),
    AuditSetting("8 tokens of 2, window 4", TokenLayout.plain(2, 4, 2), window=4),
    AuditSetting("8 tokens of 2, window 3", TokenLayout.plain(2, 4, 2), window=3),
)


@pytest.mark.slow  # four of the audit's settings are of this kind
@pytest.mark.parametrize("setting", LONG, ids=lambda setting: setting.name)
@pytest.mark.parametrize(
    "decoder", ["scd-mc", "sjd-pac", "sjd", "sjd-isp", "scd-gs", "predictive", "jacobi", "best-lossless"]
)
def test_images_longer_than_the_window_follow_the_exact_joint(decoder, setting):
    (counts,) = observe(setting, resolve(decoder), IMAGES, seed=0)
    assert chi2.sf(*chi_square(counts)) > 1e-4
