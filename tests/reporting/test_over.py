"""Runs over their seeds."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import synthetic
from brightness import Brightness, register
from refusals import refused

from specbench.metrics import scoring
from specbench.metrics.dpg_bench import OfficialDpgBench
from specbench.metrics.shapes import ShapesDetector
from specbench.prompts import Prompt
from specbench.reporting import over, report_rows


class Detector(ShapesDetector):
    """Finds what a test drew: a white image is right."""

    def accepts(self, category, meta):
        return True

    def features_of(self, sample):
        return {"correct": bool(sample.pixels.max()), "objects": 1}


class Brightest(Brightness):
    """A score that is no mean."""

    name = "brightest"

    def scores(self, statistics):
        return [replace(super().scores(statistics)[0], estimate=over.stats.Estimate(255.0))]


QUESTIONS = [{"id": number, "question": f"{number}?", "tuple": "entity - whole", "parents": []} for number in (1, 2)]


def judged_run(out, seed: int, right: set[int], images: int = 9):
    """Up to nine images, six of a category, scored; DPG-Bench's program has not asked all about the first."""
    meta = [{"line": number, "questions": QUESTIONS} for number in range(images)]
    prompts = [Prompt(f"p{n}", f"prompt {n}", "single" if n < 6 else "counting", meta[n]) for n in range(images)]
    spec = replace(synthetic.SJD, seed=seed)
    folder = synthetic.pictured(
        out, prompts, spec=spec, picture=lambda n: np.full((3, 8, 8), 255 * (n in right), dtype=np.uint8)
    )
    answers = {(f"p{n}", 0): {"1?": "yes", "2?": "yes" if n in right else "no"} for n in range(images)}
    del answers["p0", 0]["2?"]
    rows = scoring.run_images(folder).rows
    scoring.score([folder], [Detector(), Brightest(), OfficialDpgBench(answers, "digest", rows)]).check()
    return folder


def test_scores_over_seeds_are_computed_as_in_a_single_run(tmp_path):
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
        assert alone.not_pooled["brightest"] == "it is not a mean of values per image"
    [both] = over.over_seeds([*tmp_path.iterdir()])
    table = over.over_table([both])
    assert {"NFE ↓", "shapes-detector ↑", "dpg-bench ↑"} < {*table.headings}
    assert table.notes[0] == "brightest is not pooled: it is not a mean of values per image."
    numbers = both.numbers | {"dpg-bench": replace(both.numbers["dpg-bench"], better="lower")}
    assert "dpg-bench ↓" in over.over_table([replace(both, numbers=numbers)]).headings
    assert (both.seeds, both.images) == ([0, 1], 18) and both.numbers["nfe"].value == 4
    detector, dpg = both.numbers["shapes-detector"], both.numbers["dpg-bench"]
    assert (detector.value, dpg.value) == pytest.approx(((6 / 12 + 4 / 6) / 2, 25 / 32)) and detector.low > 0
    assert detector.high < 1 and dpg.spread == pytest.approx(np.std([13 / 16, 12 / 16], ddof=1))
    [empty] = over.over_seeds([run for run in tmp_path.iterdir() if not (run / "scores").exists()])
    assert (empty.images, empty.numbers) == (0, {})


def test_scores_over_seeds_of_few_prompts_have_no_interval(tmp_path):
    [both] = over.over_seeds([judged_run(tmp_path, seed, {0, 2}, images=7) for seed in (0, 1)])
    detector, dpg = both.numbers["shapes-detector"], both.numbers["dpg-bench"]
    assert both.images == 14 and (detector.low, detector.high, dpg.low, dpg.high) == (None,) * 4


def test_ar_over_itself_has_no_interval(tmp_path):
    for spec, images in ((synthetic.AR, synthetic.ar(9)), (synthetic.SJD, synthetic.sjd(9))):
        synthetic.folder(tmp_path, spec, images)
    table = over.over_table(over.over_seeds([*tmp_path.iterdir()]))
    place = table.headings.index("speed-up ↑")
    itself, sjd = (row[place].text for row in table.rows)
    assert itself == "1.00" and "[" in sjd


def test_two_measurements_of_one_seed_are_not_pooled_as_two_seeds(tmp_path, monkeypatch):
    """Their images are the same, so the interval would be too narrow."""
    first = synthetic.folder(tmp_path / "monday", synthetic.AR, synthetic.ar(9))
    copy = synthetic.folder(tmp_path / "copy", synthetic.AR, synthetic.ar(9))
    monkeypatch.setitem(synthetic.INVOCATION, "started_at", "2026-01-03T03:04:05.000+00:00")
    again = synthetic.folder(tmp_path / "tuesday", synthetic.AR, synthetic.ar(9))
    assert over.over_seeds([first, copy])[0].copies == [str(copy)]
    refused("have the same seed 0", over.over_seeds, [first, again])


def test_scores_of_rows_with_different_fingerprints_have_separate_columns(tmp_path, monkeypatch):
    prompts = [Prompt(f"p{n}", f"prompt {n}", None, {}) for n in range(2)]
    ar, sjd = (synthetic.pictured(tmp_path, prompts, spec=spec) for spec in (synthetic.AR, synthetic.SJD))
    register(monkeypatch, "brightness", "brightness:Brightness")
    scoring.score([ar], ["brightness"]).check()
    assert "brightness" in over.over_seeds([ar, sjd])[0].numbers
    monkeypatch.setattr(Brightness, "version", "2")
    scoring.score([sjd], ["brightness"]).check()
    names = [{name for name in row.numbers if "bright" in name} for row in over.over_seeds([ar, sjd])]
    assert [len(of) for of in names] == [1, 1] and names[0] != names[1]
