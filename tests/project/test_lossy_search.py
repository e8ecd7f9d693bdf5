"""The comparison of lossy decoders with AR: equivalence tests beside scipy's, verdicts, and runs that do not fit."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from specbench.specs.presets import resolve

LOSSY = runpy.run_path(str(Path(__file__).parents[2] / "dev" / "frontier" / "lossy.py"))
PROMPTS, SAMPLES = 200, 4
SETTINGS = dict.fromkeys(LOSSY["SHARED"], "same") | {"model": "shapes"}


def run(decoder, forwards, detector, clip, **changed):
    """A run whose scores are the given differences to random ones that all runs share."""
    draw = np.random.default_rng(0)
    images = pd.DataFrame({"prompt_id": np.repeat([f"p{n}" for n in range(PROMPTS)], SAMPLES)})
    images["sample"] = np.tile(range(SAMPLES), PROMPTS)
    images["nfe"] = forwards
    images["shapes-detector"] = (draw.random(len(images)) < 0.8) + detector
    images["shapes-clip"] = draw.normal(0.5, 0.1, len(images)) + clip
    name, _, option = decoder.partition(" ")
    spec = resolve(name, dict([option.split("=")]) if option else {})
    return LOSSY["Decoded"](f"run-{decoder}", decoder, spec, SETTINGS | changed, images)


def noise(seed, size):
    return np.random.default_rng(seed).normal(0, size, PROMPTS * SAMPLES)


def test_equivalence_is_two_one_sided_t_tests_over_prompts():
    gaps, prompts = noise(1, 0.2) + 0.004, np.repeat(range(PROMPTS), SAMPLES)
    result = LOSSY["equivalence"](gaps, prompts, 0.03)
    means = gaps.reshape(PROMPTS, SAMPLES).mean(1)
    below = stats.ttest_1samp(means, -0.03, alternative="greater").pvalue
    above = stats.ttest_1samp(means, 0.03, alternative="less").pvalue
    assert result["p"] == pytest.approx(max(below, above))
    low, high = stats.ttest_1samp(means, 0).confidence_interval(0.90)
    assert (result["low"], result["high"]) == pytest.approx((low, high))


def test_verdicts_and_front():
    runs = [
        run("ar", 256, 0, 0),
        run("sjd", 128, noise(1, 0.1), noise(2, 0.02)),
        run("gsd", 100, noise(3, 0.1) - 0.05, noise(4, 0.02)),
        run("amplify k=4", 90, noise(5, 0.1), noise(6, 0.02) - 0.02),
        run("sjd++", 130, noise(7, 0.1) - 0.1, noise(8, 0.02)),
    ]
    rows = {row["decoder"]: row for row in LOSSY["compare"](runs)}
    assert {name for name, row in rows.items() if row.get("equivalent")} == {"sjd"}
    assert not rows["sjd++"]["front"] and rows["amplify k=4"]["front"]
    assert rows["sjd"]["tokens"][0] == 2
    text = LOSSY["table"](list(rows.values()))
    assert len(text.splitlines()) == 7 and "nan" not in text
    json.dumps(LOSSY["raw"](runs, list(rows.values())), allow_nan=False)
