"""Diversity of the images of a prompt: mean distance of its pairs, and the difference on the same prompts."""

import numpy as np
import pandas as pd
import pytest

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics.diversity import ClipDiversity, Lpips

RIGHT, UP, LEFT = [1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]


def features(*prompts: list) -> pd.DataFrame:
    rows = [
        {"prompt_id": f"p{number}", "sample": sample, "feature": np.array(feature, np.float32)}
        for number, images in enumerate(prompts)
        for sample, feature in enumerate(images)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def metric():
    return ClipDiversity("shapes")


def test_it_is_a_mean_over_pairs_and_then_over_prompts_and_a_difference_of_common_images(metric):
    (score,) = metric.scores(metric.statistics(features([RIGHT, UP, LEFT], [RIGHT, RIGHT], [UP])))
    assert score.estimate.value == pytest.approx(((1 + 2 + 1) / 3 + 0) / 2)
    assert score.n == 5, "the prompt with one image has no distance"
    difference, n = metric.difference(features([RIGHT, LEFT, UP], [RIGHT, UP]), features([RIGHT, UP], [RIGHT, UP]))
    assert (difference.value, n, difference.prompts) == (pytest.approx((2 - 1 + 0) / 2), 4, 2)
    assert metric.difference(features([RIGHT]), features([RIGHT])) is None
    assert metric.samples == 2 and metric.scores(metric.statistics(features([RIGHT], [UP]))) == []


def test_lpips_compares_pairs_of_pixels():
    metric = Lpips()
    metric.__dict__["network"] = lambda image, other: (image - other).abs().mean()
    black, white = np.zeros(256 * 256 * 3, np.uint8), np.full(256 * 256 * 3, 255, np.uint8)
    assert metric.distances([black, white, white]) == pytest.approx([2.0, 2.0, 0.0])


def test_lpips_downloads_nothing_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(SpecbenchError, match="is not on this disk") as refused:
        _ = Lpips().network
    assert refused.value.exit_code == MISSING_PREREQUISITE and "torchvision.models.alexnet" in refused.value.try_this
