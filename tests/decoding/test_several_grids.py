"""A stream of several grids: geometry follows the layout of each, an image's ids stay in the ranges of their grids, and
decoders stay exact. It concerns several modules: the token layout, the target, initialisations, ZipAR and PJD."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.losslessness import observe
from specbench.decoding.drafters.token_init import Preview, Slots
from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Target
from specbench.decoding.verification.ratio_tests import standard
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

PREVIEWED = TokenLayout.plain(2, 3, 3, before=((1, 2),))
OWN_IDS = TokenLayout(2, 2, 4, (-1, -1, 4, -1, -1, 5, -1, -1, 5), before=((1, 2),), ranges=((0, 2), (1, 4)))
"""Two grids with separate ids and row ends."""


def test_neighbours_stay_in_their_grid():
    assert PREVIEWED.rows == [[[0, 1]], [[2, 3, 4], [5, 6, 7]]]
    assert PREVIEWED.neighbour(1, 0) == [-1, -1, -1, -1, -1, 2, 3, 4]
    assert PREVIEWED.neighbour(0, 1) == [-1, 0, -1, 2, 3, -1, 5, 6]
    assert PREVIEWED.neighbour(1, 1) == [-1, -1, -1, -1, -1, -1, 2, 3]
    assert OWN_IDS.neighbour(1, 0) == [-1] * 6 + [3, 4, -1]


def test_the_nearest_preview_token_is_the_one_below_the_middle_of_the_cell():
    assert PREVIEWED.nearest_before() == [-1, -1, 0, 1, 1, 0, 1, 1]
    layout = TokenLayout.plain(36, 24, 5, before=((19, 13),))
    previews = np.array(layout.nearest_before()[19 * 13 :]).reshape(36, 24)
    for row, column in ((0, 0), (17, 11), (35, 23), (20, 5)):
        above, left = int((row + 0.5) / 36 * 19), int((column + 0.5) / 24 * 13)
        assert previews[row, column] == above * 13 + left


@pytest.mark.parametrize(
    "changed", [{"before": ((1, 2), (1, 1))}, {"ranges": ((0, 3),)}, {"height": 3}], ids=["grids", "ranges", "height"]
)
def test_a_layout_whose_parts_do_not_fit_is_refused(changed):
    with pytest.raises(ValueError, match="need"):
        replace(PREVIEWED, **changed)


def test_ids_outside_the_range_of_a_grid_have_no_probability():
    p = Target(OWN_IDS, Sampling(1.0), torch.device("cpu"))(torch.zeros(1, 9, 4), torch.arange(9)[None])[0]
    assert p[0].tolist() == [0.5, 0.5, 0, 0, 0, 0] and p[2].argmax() == 4
    assert p[3].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0, 0])


EXACT = {
    "ar": {}, "sjd": {"window": 4}, "sjd-isp": {"window": 5}, "scd-mc": {"window": 5}, "best-lossless": {"window": 5},
    "preview": {"window": 4, "preview-weight": 0.7}, "vertical": {"window": 4}, "zipar": {"rows-window": 9},
    "pjd": {"rows-window": 9, "lower-rows": "commit"},
}  # fmt: skip


@pytest.mark.parametrize("layout", [PREVIEWED, OWN_IDS], ids=["preview", "own ids"])
@pytest.mark.parametrize("name", EXACT)
def test_decoders_keep_the_distribution_of_several_grids(name, layout):
    setting = AuditSetting("two grids", layout, Sampling(2.0, 0.9))
    assert p_value(observe(setting, resolve(name, EXACT[name]), 4_000, seed=0)) > AUDIT_LEVEL


def test_a_zipar_row_may_not_start_before_the_preview_is_complete():
    setting = AuditSetting("two grids", PREVIEWED, Sampling(1.0))
    assert p_value(observe(setting, resolve("zipar", {"rows-window": 1}), 8_000, seed=0)) < AUDIT_LEVEL
    one_row = AuditSetting("rows of a token", TokenLayout.plain(1, 3, 3, before=((1, 2), (1, 1))), Sampling(1.0))
    assert p_value(observe(one_row, resolve("zipar", {"rows-window": 1}), 8_000, seed=0)) > AUDIT_LEVEL


def test_drafts_come_from_the_preview_with_the_q_that_is_recorded():
    """Over many images, fresh drafts are the preview's token with probability w + (1 - w) / V, others with the rest."""
    init = Preview(Context(PREVIEWED, None, torch.device("cpu"), standard), preview_weight=0.6)
    images = 20_000
    tokens = torch.randint(3, (images, 8), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(1, 6).expand(images, -1)
    start, fresh = torch.full((images,), 2), torch.ones(images, 5, dtype=torch.bool)
    slots = Slots(start, positions, fresh, tokens, None, torch.ones(images, 1, dtype=torch.long))
    drawn, q = init.fill(slots, Noise(range(images), 3))
    seen = tokens[:, [0, 0, 1, 1, 0]]
    assert torch.equal(q[:, 0], torch.full((images, 3), 1 / 3)), "the preview itself has none"
    assert torch.allclose(q.gather(2, seen[..., None])[:, 1:], torch.tensor(0.6 + 0.4 / 3))
    assert torch.allclose(q.sum(-1), torch.ones(images, 5))
    assert ((drawn == seen).float().mean(0)[1:] - (0.6 + 0.4 / 3)).abs().max() < 0.015
    assert ((drawn == (seen + 1) % 3).float().mean(0)[1:] - 0.4 / 3).abs().max() < 0.015
