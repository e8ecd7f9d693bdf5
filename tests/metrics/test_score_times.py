"""`score` begins with what it will do: metrics, downloads with their size and licences, time by earlier scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn import drawn_run

from specbench.metrics import score_times, scoring
from specbench.metrics.base import Settings
from specbench.system.digests import cache_folder
from specbench.system.downloads import Download, fetch_what_can_be_had


class Notes(scoring.ScoreReporter):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def announced(folder: Path, *metrics: str) -> str:
    notes = Notes()
    scoring.score([folder], metrics, Settings("cpu"), notes)
    return notes.texts[0]


def test_the_time_is_told_once_every_metric_was_timed_on_this_device_and_of_missing_images_alone(tmp_path, monkeypatch):
    names = ("shapes-clip", "shapes-detector")
    first, more = drawn_run(tmp_path / "a", n=2), drawn_run(tmp_path / "b", n=4)
    assert announced(first, "shapes-clip") == "scoring 1 run on cpu: shapes-clip"
    assert "earlier" not in announced(more, *names), "one of them was never timed"
    expected = score_times.expected_seconds(dict.fromkeys(names, 2), "cpu")
    assert expected == pytest.approx(2 * score_times.expected_seconds(dict.fromkeys(names, 1), "cpu")) and expected > 0
    assert announced(more, *names) == "scoring 1 run on cpu: shapes-clip, shapes-detector", "nothing is left"
    monkeypatch.setattr(scoring, "expected_seconds", lambda left, device: 90 * left["shapes-detector"])
    assert announced(first, *names).endswith("; about 3 min by earlier scores")
    (cache_folder() / "score-times.json").write_text('{"AMD": [1]}')
    assert score_times.expected_seconds({"shapes-clip": 1}, "cpu") is None and announced(first, *names)


def test_downloads_are_counted_once_with_their_licences(tmp_path):
    one = Download("a.pt", ("a.pt",), 2_000_000, "MIT", tmp_path, lambda progress: None)
    others = [replace(one, name="b", licence="Apache-2.0"), replace(one, name="c", size=None)]
    seen = []
    fetch_what_can_be_had({"x": lambda: [one], "y": lambda: [one, *others]}, seen.append)
    assert seen == [{"x": [one], "y": [one, *others]}]
