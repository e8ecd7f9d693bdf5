"""The cost of an image, and how many threads a run takes on a busy machine. It concerns several modules: dry_run,
compiler."""

from dataclasses import replace

import pytest
import synthetic

from specbench.runs import compiler, dry_run
from specbench.runs.plan import make_plan
from specbench.runs.settings import merge, run_settings
from specbench.system import limits
from specbench.system.device_peaks import Peak


def test_the_forecast_of_seven_billion_weights_is_the_time_to_read_them(monkeypatch, tmp_path):
    monkeypatch.setattr(dry_run, "find_peak", lambda *_: Peak("Slow CPU", {0: 1e10}, 1e15, "data sheet"))
    settings = {"model": "lumina", "prompts": "shapes", "limit": 1, "out": str(tmp_path), "cfg": 1.0, "device": "cpu"}
    note = dry_run.cost_note(make_plan(merge(run_settings(), settings, env={})))
    assert note.startswith("forecast: 54 min per image with ar (2,352 steps) on Slow CPU (data sheet)")
    monkeypatch.setattr(dry_run, "find_peak", lambda *_: None)
    busy_cpu = Peak("Busy CPU", {0: 1e9}, 1e15, "measured briefly")
    monkeypatch.setattr(dry_run, "glimpse_peak", lambda *_: (busy_cpu, False))
    busy = dry_run.cost_note(make_plan(merge(run_settings(), settings, env={})))
    assert "8.9 hours per image" in busy and "faster: a GPU" in busy, "also on a busy machine"
    assert "needs 1/k of the steps" in note and "a GPU, --model janus" in dry_run.cost_text(2352, 3601, "CPU", "now")


def test_a_stored_run_without_images_does_not_hide_the_pace_of_others(tmp_path):
    decoded = {0: [None], 1: synthetic.sjd(), 2: []}
    for seed, images in decoded.items():
        synthetic.folder(tmp_path, replace(synthetic.SJD, seed=seed), images)
    spec = synthetic.SJD
    pace = dry_run.seconds_per_image(tmp_path, spec.model, spec.decoder.name, spec.device)
    folder = tmp_path / replace(spec, seed=1).run_id
    assert pace == dry_run.seconds_per_image(tmp_path, spec.model, spec.decoder.name, spec.device, folder.name) > 0


@pytest.mark.parametrize(("used", "expected"), [(0.2, 4), (1.6, 2), (9.0, 1)])
def test_a_run_takes_the_cores_that_others_leave_and_says_so(used, expected, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(limits, "available_cores", lambda: 4)
    monkeypatch.setattr(compiler, "cores_in_use", lambda: used)
    count, notes = compiler.free_threads(tmp_path, "shapes", "cpu")
    assert count == expected and bool(notes) == (expected < 4)
    assert not notes or notes[0].endswith(f"because other processes use {used} of 4 cores; --threads 4: all")
