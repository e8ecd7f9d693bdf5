"""Report tables: golden files from fixed rows, reasons for empty cells, escaped text."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from synthetic import AR, SJD, ar, changed, folder, generation, sjd, stored_rows

from specbench.reporting import render, report_rows
from specbench.reporting.answer import answer
from specbench.reporting.comparability import Run
from specbench.reporting.compare import compare_runs
from specbench.reporting.forecast import accepted_lengths
from specbench.reporting.marks import label, window_of
from specbench.reporting.plot_data import speed_by_prompt, step_data
from specbench.reporting.report_schema import REPORT
from specbench.reporting.row import record
from specbench.reporting.status import status_of
from specbench.reporting.terminal import card
from specbench.specs.components import columns_fed
from specbench.specs.presets import resolve
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore

GOLDEN = Path(__file__).parents[1] / "golden"


def rows_of(out: Path, decoder: str | None = None) -> list[dict]:
    """Report rows as writers of data print them."""
    return [record(row) for row in report_rows(find_runs(out)) if decoder in (None, row.decoder)]


@pytest.fixture
def results(tmp_path) -> Path:
    """AR, SJD with a failed image, and a lossy decoder that committed an impossible token."""
    folder(tmp_path, AR, ar(4))
    folder(tmp_path, SJD, [*sjd(3), None])
    broken = [generation(2, 50.0, 30.0, logp=(-1.0, float("-inf"), 0.0, -3.0)) for _ in range(4)]
    folder(tmp_path, tiny.spec("gsd", G=50), broken)
    return tmp_path


@pytest.mark.parametrize(("decoder", "options", "bounded"), [
    ("sjd", {}, True), ("gsd", {"G": 50}, True), ("sjd++", {}, False), ("vvs", {}, False),
    ("sjd-block", {"refine": "reuse", "any-tail": True}, False),
])  # fmt: skip
def test_theorem_2_bounds_only_what_its_acceptance_alone_makes_lossy(tmp_path, decoder, options, bounded):
    images = [replace(image, facts={"theorem2_bound": 0.25}) for image in sjd(2)]
    folder(tmp_path, replace(SJD, decoder=resolve(decoder, options)), images)
    assert rows_of(tmp_path)[0]["theorem2_bound"] == (0.25 if bounded else None)


@pytest.mark.parametrize("fmt", ["markdown", "csv", "json"])
def test_tables_are_the_golden_ones(results, fmt):
    """To accept a change: run with UPDATE_GOLDEN=1 in the environment, and read the difference."""
    text = render(report_rows(find_runs(results)), fmt, everything=True, explain=True).replace(str(results), "OUT")
    golden = GOLDEN / f"report.{ {'markdown': 'md'}.get(fmt, fmt) }"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_window_is_the_number_of_tokens_per_forward_and_siblings_and_paths_are_fed_too():
    fed = {"ar": 1, "sjd": 16, "eagle": 26, "cool-sd": 26, "zipar": None}
    assert {name: window_of(resolve(name).options) for name in fed} == fed
    assert [window_of(resolve("eagle", {"tree": tree}).options) for tree in ("chain", "0 1 00")] == [6, 4]
    fed = {"ar": 1, "sjd": 16, "eagle": 26, "scd-mc": 64, "sjd-pac": 72, "eagle-gbv": 25, "adt-tree": 49}
    assert {name: columns_fed(resolve(name).options) for name in fed} == fed


def test_a_speed_up_between_calls_says_so(tmp_path):
    folder(tmp_path, AR, ar(8))
    place = folder(tmp_path, SJD, sjd(8))
    row = report_rows(find_runs(tmp_path))[1]
    assert row.over_ar.speedup.value > 1 and not row.over_ar.decoded_apart
    with RunStore(place).lock(SJD) as store:  # most of its images are decoded again, later
        info = store.info()
        later = replace(info.invocations[0], started_at="2126-11-01T00:00:00.000+00:00", stored={})
        store._write_info(replace(info, invocations=[*info.invocations, later]))
        store.append([row | {"started_at": "2126-11-01T00:00:01.000+00:00"} for row in stored_rows(sjd(5))])
    row = report_rows(find_runs(tmp_path))[1]
    assert row.over_ar.decoded_apart and row.n == 8
    assert "sjd (window 3): not decoded in the same call as AR" in render([row])
    [total, *_] = compare_runs(*find_runs(tmp_path, [AR.run_id, SJD.run_id]))
    assert "decoded in different calls" in total.note
    older = Path(__file__).parents[2] / "results" / "older"  # one command, which stored a start for each run
    assert not any(row.over_ar.decoded_apart for row in report_rows(find_runs(older)))


def test_a_speed_up_needs_ar_on_the_same_machine_whatever_its_memory(tmp_path):
    folder(same := tmp_path / "same", SJD, sjd(), memory_gib=3.9)
    [row] = rows_of(same)
    assert row["speedup"] is None and row["speedup_note"] == "no AR run" and row.keys() <= set(REPORT.names)
    for out in (same, tmp_path):
        folder(out, AR, ar())
    [row] = report_rows(find_runs(same, [SJD.run_id]))
    assert row.over_ar.baseline == AR.run_id and row.over_ar.speedup.value == pytest.approx(3 * 45 / 122)
    folder(tmp_path, SJD, sjd(), cpu="Another CPU")
    row = rows_of(tmp_path, "sjd")[0]
    assert row["speedup"] is None and "hardware" in row["speedup_note"] and "Another CPU" in row["speedup_note"]
    assert row["speedup_fastest"] is None


@pytest.mark.parametrize(("shared", "how"), [({"batch": 2}, "batch 2"), ({"mode": "throughput"}, "throughput mode")])
def test_runs_whose_images_share_the_device_report_no_latency(tmp_path, shared, how):
    folder(tmp_path, changed(AR, **shared), ar())
    folder(tmp_path, changed(SJD, **shared), sjd())
    row = rows_of(tmp_path, "sjd")[0]
    assert row["speedup"] is None and row["latency_ms"] is None
    assert row["speedup_note"] == f"{how}: latency is not measured"
    assert "batch" not in shared or row["throughput"] > 0
    assert "To add AR" not in render(report_rows(find_runs(tmp_path))), "AR is there, and has no latency either"
    text = render(report_rows(find_runs(tmp_path, [changed(SJD, **shared).run_id])))
    assert "batch" not in shared or ("images per hour" in text and "latency ms" not in text)


def test_the_fastest_ar_configuration_is_found(tmp_path):
    fast = [generation(4, 10.0, 1.0) for _ in range(3)]
    folder(tmp_path, AR, ar())
    folder(tmp_path, changed(AR, dtype="bfloat16", threads=2), fast)
    folder(tmp_path, SJD, sjd())
    row = rows_of(tmp_path, "sjd")[0]
    assert row["speedup"] == pytest.approx(3 * 45 / 122) and row["speedup_fastest"] == pytest.approx(3 * 12 / 122)
    assert row["fastest_ar"] == "bfloat16, 2 threads"
    assert row["quoted"]["ar_run"] == AR.run_id, "a sentence keeps to the number format"
    folder(tmp_path, compiled := changed(AR, compiled=True, threads=2), fast)
    quoted = rows_of(tmp_path, "sjd")[0]["quoted"]
    assert quoted["ar_run"] == compiled.run_id and quoted["speedup"] == pytest.approx(3 * 12 / 122)
    assert quoted["ar"] == "float32, 2 threads, compiled" and quoted["eager_ar"] is None
    folder(tmp_path, changed(AR, dtype="bfloat16", threads=4), [generation(4, 5.0, 1.0)])
    assert rows_of(tmp_path, "sjd")[0]["fastest_ar"] == "bfloat16, 4 threads, 1 image of 3"


@pytest.mark.parametrize(("ratio", "text"), [(5.31, "takes 5.3 times"), (1.9, None), (None, "AR is not compiled: ")])
def test_an_eager_ar_far_above_its_roofline_is_reported_with_every_speed_up(tmp_path, monkeypatch, ratio, text):
    monkeypatch.setattr("specbench.stats.roofline_ratio", lambda *_: ratio)
    folder(tmp_path, AR, ar())
    folder(tmp_path, SJD, sjd())
    note = rows_of(tmp_path, "sjd")[0]["eager_ar"]
    assert note is None if text is None else text in note and "--compile on" in note
    [state] = [row for row in status_of(find_runs(tmp_path)) if row["decoder"] == "sjd"]
    [total, *_] = compare_runs(*find_runs(tmp_path, [AR.run_id, SJD.run_id]))
    assert state["eager_ar"] == note and ("not compiled" in total.note) is bool(note)


@pytest.mark.parametrize(
    ("changes", "advised", "or_else"),
    [({}, True, False), ({"model_code": "1" * 64}, True, True), ({"device": "mps"}, False, True)],
)
def test_advice_on_an_eager_ar_follows_what_the_model_can_do(tmp_path, changes, advised, or_else):
    folder(tmp_path, changed(AR, **changes), ar())
    folder(tmp_path, changed(SJD, **changes), sjd())
    note = rows_of(tmp_path, "sjd")[0]["eager_ar"]
    assert ("--compile on" in note) is advised and ("cannot be compiled" in note) is or_else


def test_partly_shared_images_are_compared_and_counted(tmp_path):
    folder(tmp_path, AR, ar(2))
    folder(tmp_path, SJD, sjd(3))
    row = rows_of(tmp_path, "sjd")[0]
    assert row["pairs"] == 2 and row["speedup"] == pytest.approx(90 / 70)
    assert row["speedup_note"] == "over the 2 images in common with AR"
    folder(tmp_path / "one", AR, ar(1))
    folder(tmp_path / "one", SJD, sjd(2))
    assert rows_of(tmp_path / "one", "sjd")[0]["speedup_note"] == "over the one image in common with AR"
    assert "The speed-up is over the one image in common with AR." in render(report_rows(find_runs(tmp_path / "one")))


def test_settings_that_differ_are_different_tables_and_a_sweep_is_in_order(tmp_path):
    folder(tmp_path, AR, ar())
    folder(tmp_path, changed(AR, temperature=0.5), ar())
    assert render(report_rows(find_runs(tmp_path))).count("### ") == 2
    for value in (25, 3, 100):
        folder(tmp_path, tiny.spec("gsd", G=value), sjd())
    assert [row["options"]["G"] for row in rows_of(tmp_path, "gsd")] == [3, 25, 100]


def test_stored_intervals_are_a_lower_and_an_upper_bound(tmp_path):
    folder(tmp_path, SJD, sjd(9))
    [row] = rows_of(tmp_path, "sjd")
    for name in ("nfe", "latency_ms"):
        low, high = row["intervals"][name]
        assert low < row[name] < high, name


def test_labels_show_what_differs_from_the_preset():
    decoder = tiny.spec("gsd", G=50, window=8).decoder
    assert label(decoder) == "gsd G=50"
    assert label(tiny.spec("sjd", init="above-repeat").decoder) == "sjd init=above-repeat"
    mine = replace(decoder, name="mine")
    assert label(mine).startswith("mine drafter=jacobi")
    supplied = {key: "default of mine" for key, _ in mine.options.items()}
    assert label(mine, supplied) == "mine"
    origins = {"G": "flag --G", "window": "flag --window", "verifier": "flag --verifier"}
    assert label(mine, supplied | origins) == "mine verifier=grouped G=50"


def test_a_run_without_any_decoded_image_is_a_row_of_missing_numbers(tmp_path):
    folder(tmp_path, SJD, [None, None])
    row = rows_of(tmp_path)[0]
    assert (row["n"], row["failed"], row["nfe"], row["perplexity"], row["latency_ms"]) == (0, 2, None, None, None)
    assert "| 0 (+2 failed) |" in render(report_rows(find_runs(tmp_path)))
    folder(tmp_path, AR, ar(2))
    assert rows_of(tmp_path, "sjd")[0]["speedup_note"] == "no image was decoded"


def test_a_card_identifies_a_run(tmp_path):
    noted = sjd(2)
    noted[0].facts, noted[1].facts = {"cluster_size": np.float32(3.0)}, {"cluster_size": 5.0, "odd": np.nan}
    shown = card(folder(tmp_path, SJD, [*noted, None, None]))
    assert (shown["images"], shown["failed"], shown["errors"]) == (2, 2, {"no luck": 2})
    assert shown["facts"] == {"cluster_size": 4.0, "odd": None}
    assert shown["decoder"]["options"]["window"] == 3 and shown["numbers"]["nfe"] == 2.0
    assert shown["invocations"][0]["environment"].startswith("Test CPU, 2 cores")
    assert json.dumps(shown) and card(folder(tmp_path, AR, ar(1)))["facts"] == {}


def test_no_speed_up_across_versions_that_time_the_forward(tmp_path):
    folder(tmp_path, AR, ar(8))
    place = folder(tmp_path, SJD, sjd(8))
    info = json.loads((place / "run.json").read_text())
    info["invocations"][0]["versions"]["torch"] = "2.10.0"
    (place / "run.json").write_text(json.dumps(info))
    [row] = rows_of(tmp_path, "sjd")
    assert row["speedup"] is None
    assert row["speedup_note"] == "differs from AR in versions (torch 2.10.0, AR torch 2.9.0)"
    del info["invocations"][0]["versions"]["torch"]
    (place / "run.json").write_text(json.dumps(info))
    assert rows_of(tmp_path, "sjd")[0]["speedup"] > 1, "not known to differ"


def test_images_of_calls_of_several_versions_at_once_have_no_times(tmp_path):
    """Shards run side by side, and the workers of a call begin with it: nothing says which of them decoded an image."""
    place = folder(tmp_path, SJD, [])
    with RunStore(place).lock(SJD) as store:
        info = store.info()
        first, second, third = (replace(info.invocations[0], stored={}) for _ in range(3))
        first.started_at, first.finished_at = "2026-02-01T00", "2026-02-01T20"
        second.started_at, second.finished_at = "2026-02-01T10", "2026-02-01T23"
        third.started_at, third.finished_at = "2026-02-02T00", None
        second.versions = {**first.versions, "torch": "2.10.0"}
        store._write_info(replace(info, invocations=[first, second, third]))
        rows = zip(stored_rows(sjd(6)), ("01T05", "01T06", "01T15", "01T22", "01T23:30", "02T01"), strict=True)
        store.append([row | {"started_at": f"2026-02-{at}"} for row, at in rows])
    old, new = (f"python 3.11, torch {version}" for version in ("2.9.0", "2.10.0"))
    run = Run(place)
    assert run.info.stack == old and run.untimed == {f"{old} or {new}": 1, new: 2}
    assert run.rows["latency_ms"].notna().tolist() == [True, True, False, False, False, True]
    at_once = replace(info, invocations=[replace(call, started_at=first.started_at) for call in (second, first)])
    with RunStore(place).lock(SJD) as store:
        store._write_info(at_once)
    [row] = report_rows([place])
    assert row.number("latency_ms") is None and sum(row.machine.untimed.values()) == 6
    folder(tmp_path, AR, ar(6))
    text = render(report_rows(find_runs(tmp_path)), everything=True)
    assert "No speed-up can be given: its images were decoded under different versions." in text
    assert "To add AR" not in text and f"6 of 6 images were decoded under {new} or {old}; their times" in text


def test_times_under_other_versions_than_most_are_left_out_and_said(tmp_path):
    folder(tmp_path, AR, ar(8))
    place, alone = folder(tmp_path, SJD, sjd(8)), folder(tmp_path / "alone", SJD, sjd(8))
    slow = stored_rows([None] * 8 + [generation(2, 3000.0)] * 2)[8:]
    with RunStore(place).lock(SJD) as store:
        info = store.info()
        info.invocations[0].finished_at = "2026-01-30T00:00:00.000+00:00"
        later = replace(info.invocations[0], started_at="2026-01-31T00:00:00.000+00:00", stored={})
        later.versions = {**later.versions, "torch": "2.10.0"}
        store._write_info(replace(info, invocations=[*info.invocations, later]))
        store.append([row | {"started_at": "2026-02-01T00:00:00.000+00:00"} for row in slow])
    [row], [expected] = rows_of(tmp_path, "sjd"), rows_of(alone.parent, "sjd")
    assert row["n"] == 10 and row["untimed"] == {"python 3.11, torch 2.10.0": 2}
    for name in ("latency_ms", "latency_p50_ms", "latency_e2e_ms", "step_ms", "over_floor"):
        assert row[name] == expected[name], name
    assert row["pairs"] == 8 and row["speedup"] > 1 and step_data(place).step_ms == step_data(alone).step_ms
    assert len(speed_by_prompt(place, tmp_path / AR.run_id, 99)) == 8
    [here], [there] = accepted_lengths([place]), accepted_lengths([alone])
    assert here.overhead_ms == there.overhead_ms
    note = "sjd (window 3): 2 of 10 images were decoded under python 3.11, torch 2.10.0, not python 3.11, torch 2.9.0"
    assert any(note in sentence for sentence in answer(report_rows(find_runs(tmp_path))))
