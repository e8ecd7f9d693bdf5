"""Runs over their seeds, and score losses as known damage."""

from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic

from specbench.metrics import scoring
from specbench.metrics.base import PerImageMetric
from specbench.metrics.dpg_bench import OfficialDpgBench
from specbench.metrics.shapes import ShapesDetector
from specbench.prompts import Prompt
from specbench.reporting import over, report_rows
from specbench.reporting.over import Damage, damage

RULER = [(0.01, 0.5, 0.4, 0.6), (0.05, 2.0, 1.8, 2.2), (0.02, 1.0, 0.8, 1.2)]


class Detector(ShapesDetector):
    """Finds what a test drew: a white image is right."""

    def accepts(self, category, meta):
        return True

    def features_of(self, sample):
        return {"correct": bool(sample.pixels.max()), "objects": 1}


class Brightest(PerImageMetric):
    """A score that is no mean."""

    name = "brightest"

    def identity(self):
        return {}

    def features_of(self, sample):
        return {"value": float(sample.pixels.mean())}

    def scores(self, statistics):
        return [replace(super().scores(statistics)[0], estimate=over.stats.Estimate(255.0))]


QUESTIONS = [{"id": number, "question": f"{number}?", "tuple": "entity - whole", "parents": []} for number in (1, 2)]


def judged_run(out, seed: int, right: set[int]):
    """Nine images in categories of six and three, scored; DPG-Bench's program has not asked all about the first."""
    meta = [{"line": number, "questions": QUESTIONS} for number in range(9)]
    prompts = [Prompt(f"p{n}", f"prompt {n}", "single" if n < 6 else "counting", meta[n]) for n in range(9)]
    spec = replace(synthetic.SJD, seed=seed)
    folder = synthetic.pictured(
        out, prompts, spec=spec, picture=lambda n: np.full((3, 8, 8), 255 * (n in right), dtype=np.uint8)
    )
    answers = {(f"p{n}", 0): {"1?": "yes", "2?": "yes" if n in right else "no"} for n in range(9)}
    del answers["p0", 0]["2?"]
    rows = scoring.run_images(folder).rows
    scoring.score([folder], [Detector(), Brightest(), OfficialDpgBench(answers, "digest", rows)]).check()
    return folder


def test_scores_over_seeds_are_computed_as_those_of_one_run(tmp_path):
    """As the mean over categories with its own interval, and without images that have no value or runs without any."""
    runs = [judged_run(tmp_path, seed, right) for seed, right in ((0, {0, 1, 2, 3, 4, 6}), (1, {2, 6, 7, 8}))]
    synthetic.folder(tmp_path, replace(synthetic.SJD, seed=2), [None] * 9)
    for run, detector, dpg in zip(runs, ((5 / 6 + 1 / 3) / 2, (1 / 6 + 1) / 2), (13 / 16, 12 / 16), strict=True):
        [alone] = over.over_seeds([run])
        shown = {score.metric: score.estimate for score in report_rows([run])[0].scores}
        assert shown["brightest"].value == 255 and "brightest" not in alone.numbers, "no mean of stored values"
        assert [shown[name].value for name in ("shapes-detector", "dpg-bench")] == pytest.approx([detector, dpg])
        for name in ("shapes-detector", "dpg-bench"):
            pooled = alone.numbers[name]
            assert (pooled.value, pooled.low, pooled.high) == astuple(shown[name])
    [both] = over.over_seeds([*tmp_path.iterdir()])
    assert (both.seeds, both.images) == ([0, 1], 18) and both.numbers["nfe"].value == 4
    detector, dpg = both.numbers["shapes-detector"], both.numbers["dpg-bench"]
    assert (detector.value, dpg.value) == pytest.approx(((6 / 12 + 4 / 6) / 2, 25 / 32)) and detector.low > 0
    assert detector.high < 1 and dpg.spread == pytest.approx(np.std([13 / 16, 12 / 16], ddof=1))
    [empty] = over.over_seeds([run for run in tmp_path.iterdir() if not (run / "scores").exists()])
    assert (empty.images, empty.numbers) == (0, {})


def test_a_loss_is_the_share_that_loses_as_much_with_both_intervals():
    measured = damage((1.5, 1.2, 1.8), RULER)
    assert measured.share == pytest.approx(0.035) and measured.note is None
    # Where the least loss meets the ruler's upper ends, and the largest its lower ones.
    assert (measured.low, measured.high) == (pytest.approx(0.02), pytest.approx(0.05))


def test_a_gain_is_no_damage():
    measured = damage((-0.3, -0.5, -0.1), RULER)
    assert (measured.share, measured.low, measured.high) == (0.0, 0.0, 0.0)


def test_a_loss_beyond_the_ruler_is_said():
    assert damage((3.0, 2.5, 3.5), RULER).note == "more than 5%"
    assert damage((1.9, 1.5, 2.5), RULER).high is None


def test_a_metric_that_does_not_see_damage_has_no_ruler():
    assert damage((0.3, 0.2, 0.4), [(0.01, 0.5, 0.4, 0.6), (0.05, 0.2, 0.1, 0.3)]) == Damage(note="does not see it")


def test_a_loss_that_is_not_shown_is_no_blindness_and_a_loss_above_all_of_the_ruler_is_said():
    points = [(0.01, 0.01, -0.1, 0.1), (0.2, 0.077, -0.013, 0.168)]
    assert damage((0.1, 0.05, 0.15), points).note == "no loss shown at 20%"
    assert damage((0.443, 0.296, 0.59), points).note == "more than 20%"


def test_losses_of_small_shares_may_fall_by_chance():
    """As shapes-detector has them on 200 prompts."""
    points = [
        (0.01, 0.006, -0.02, 0.03),
        (0.02, -0.002, -0.03, 0.03),
        (0.1, 0.03, -0.01, 0.07),
        (0.2, 0.09, 0.03, 0.14),
    ]
    loss = damage((0.06, 0.02, 0.08), points)
    assert loss.share == pytest.approx(0.15) and loss.note is None
    assert loss.low == pytest.approx(0.02 / 0.03 * 0.01) and loss.high is None


def test_one_share_is_no_ruler():
    assert "fewer than two" in damage((0.3, 0.2, 0.4), RULER[:1]).note


def test_without_replace_the_command_says_what_to_run(tmp_path, cli):
    cli("run", "--limit", "1", "--decoder", "ar", "--threads", "1", "--out", tmp_path, "--quiet")
    outcome = cli("report", "--ruler", "--out", tmp_path)
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "replace:share=0.01" in outcome.err


def test_a_loss_is_printed_as_a_share_of_random_tokens(monkeypatch):
    """Of a monotone metric and one that is none; runs of another setting have no ruler."""
    losses = {"ar": 0.0, 0.01: 0.1, 0.05: 0.5, 0.2: 2.0, "lantern": 1.0, "gsd": 5.0}
    rows = [
        SimpleNamespace(
            model="shapes", setting={}, decoder=name if isinstance(name, str) else "replace", label=name, folder=name,
            options={} if isinstance(name, str) else {"share": name},
        )
        for name in losses
    ]  # fmt: skip

    def loss(base, row):
        seen = losses[row.folder] - losses[base.folder]
        return {"clip": (seen, seen - 0.05, seen + 0.05), "blind": (0.0, -0.1, 0.1)}

    monkeypatch.setattr(over, "report_rows", lambda folders: [*rows, SimpleNamespace(**vars(rows[0]) | {"setting": 1})])
    monkeypatch.setattr(over, "_losses", loss)
    lantern, gsd = ([cell.text for cell in row] for row in over.ruler_table(over.ruler_rows([])).rows)
    assert lantern == ["shapes", "lantern", "as if 10.0 % [9.0, 11.0]", "no loss shown at 20%"]
    assert gsd[2] == "more than 20%"
