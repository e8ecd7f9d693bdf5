"""Each planted bug is caught by the audit; without it, the same decoder passes on the same setting. It concerns
several modules: the modules of specbench.decoding and specbench.models in which a bug is planted, and the audit
that catches it."""

import pytest
from planted_bugs import BUGS, plant

from specbench.checks.audit_settings import AUDIT_SETTINGS
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.losslessness import AUDIT_SAMPLES, observe
from specbench.specs.presets import resolve

IMAGES = AUDIT_SAMPLES / sum(setting.share for setting in AUDIT_SETTINGS)


def setting_of(bug):
    (setting,) = [setting for setting in AUDIT_SETTINGS if setting.name.startswith(bug.setting)]
    return setting


def measured(bug, part: int = 1) -> float:
    """P-value of the bug's decoder on its setting, at the number of images of a whole audit or a multiple of it, or at
    a `part`-th of them."""
    setting = setting_of(bug)
    images = round(bug.times * IMAGES * setting.share / setting.tables / part)
    return p_value(observe(setting, resolve(bug.decoder, bug.options), images, seed=0))


def title(bug) -> str:
    return f"{bug.part}: {bug.what}"


def case(bug):
    """A bug that takes more images than a whole audit's, or the whole number in a setting with a transformer, is
    slow."""
    slow = bug.times > 1 or bug.what == "only the first token of an accepted branch is kept"
    return pytest.param(bug, marks=pytest.mark.slow) if slow else bug


@pytest.mark.parametrize("bug", [*map(case, BUGS)], ids=title)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    plant(monkeypatch, bug.seam, bug.fault)
    # Far below the audit's level, whatever its other settings show; with as few images as show it.
    assert any(measured(bug, part) < AUDIT_LEVEL / 100 for part in (16, 4, 1))


SOUND = {(bug.setting, bug.decoder, tuple(bug.options.items())): bug for bug in BUGS}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SOUND.values(), ids=lambda bug: f"{bug.decoder} {bug.setting}")
def test_the_same_decoder_passes_without_the_bug(bug):
    assert measured(bug) > AUDIT_LEVEL
