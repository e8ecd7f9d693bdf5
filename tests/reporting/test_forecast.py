"""`specbench forecast`: arithmetic of a forecast, its ranges, its marks, and its refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
import synthetic
from refusals import refused

import specbench
from specbench.models.catalog import find_model
from specbench.papers.forecasts import BANDWIDTH, FLOPS, WINDOW, printed_elsewhere
from specbench.reporting.forecast import Accepted, ForecastSetting, Printed, forecast_rows
from specbench.specs.presets import PRESETS, resolve
from specbench.system.device_peaks import peak_of

RESULTS = Path(__file__).parents[2] / "results"
SJD = Accepted("a paper", "lumina", resolve("sjd"), "sjd", 2.0)
AR = Accepted("a paper", "lumina", resolve("ar"), "ar", 1.0)
EAGLE = Accepted("a paper", "lumina", resolve("eagle"), "eagle", 2.0)
VERTICAL = Accepted("a run", "shapes", resolve("vertical", {"window": 8}), "vertical", 5.0)


def setting(**changes):
    lumina, peak = find_model("lumina"), peak_of("A100", "bfloat16")
    stated = {"batch": 1, "bandwidth": (0.5, 0.5), "flops": (0.5, 0.5), "overhead_ms": (1.0, 1.0)} | changes
    return ForecastSetting(lumina, peak, "bfloat16", 3.0, **stated)


@pytest.mark.parametrize("typed", ["rtx-4090", "4090", "RTX4090", "GeForce RTX 4090", "nvidia_geforce_rtx_4090"])
def test_a_device_is_known_as_people_write_it(typed):
    assert peak_of(typed, "bfloat16") == peak_of("NVIDIA GeForce RTX 4090", "bfloat16")
    assert peak_of("a100-80gb", "bfloat16").name == "NVIDIA A100-SXM4-80GB"


def test_a_forecast_sums_its_parts_and_its_range_covers_shares_and_overheads():
    ar, sjd = forecast_rows([AR, SJD], setting())
    assert sjd["kind"] == "forecast" and sjd["nfe"] == 2352 / 2
    assert sum(sjd["parts_ms"].values()) == pytest.approx(sjd["forward_ms"])
    assert sjd["step_ms"] == pytest.approx(sjd["forward_ms"] + 1)
    assert sjd["parts_ms"]["weights"] == pytest.approx(1e3 * 13_020_700_672 / (0.5 * 2039e9))
    assert sjd["seconds"] == pytest.approx(sjd["nfe"] * sjd["step_ms"] / 1e3, rel=0.01)  # and the prefill
    assert sjd["speed_up"] == pytest.approx(ar["seconds"] / sjd["seconds"]) and ar["speed_up"] == 1
    assert sjd["seconds"] == sjd["seconds_low"] == sjd["seconds_high"]
    (row,) = forecast_rows([SJD], setting(bandwidth=(0.5, 1.0), overhead_ms=(1.0, 3.0)))
    assert row["step_ms_low"] < row["step_ms"] < row["step_ms_high"]
    low, high = (forecast_rows([SJD], setting(bandwidth=(share, share), overhead_ms=(ms, ms))) for share, ms in
                 ((1.0, 1.0), (0.5, 3.0)))  # fmt: skip
    assert (row["step_ms_low"], row["step_ms_high"]) == (low[0]["step_ms"], high[0]["step_ms"])
    assert row["speed_up_low"] < low[0]["speed_up"], "a decoder's overhead may be high where AR's is low"


def test_a_batch_shares_the_weights_and_a_draft_head_costs_its_levels_or_its_first_layer_once():
    single, many = (forecast_rows([SJD], setting(batch=batch))[0] for batch in (1, 8))
    assert single["step_ms"] < many["step_ms"] < 8 * single["step_ms"]
    assert many["images_per_hour"] > 2 * single["images_per_hour"]
    (eagle,) = forecast_rows([EAGLE], setting())
    layers = 1e3 * 5 * 2 * 270e6 / (0.5 * 2039e9)
    assert eagle["step_ms"] - eagle["forward_ms"] - 1 == pytest.approx(layers, rel=0.15)
    skips = Accepted("a run", "shapes", resolve("vvs", {"interval": 3, "tree": "mc_sim_7b_63"}), "vvs", 2.0)
    same_tree = Accepted("a run", "shapes", resolve("eagle", {"tree": "mc_sim_7b_63"}), "eagle", 2.0)
    skips, same_tree = (row["step_ms"] - row["forward_ms"] - 1 for row in forecast_rows([skips, same_tree], setting()))
    assert skips == pytest.approx(1.5 * same_tree), "three rounds draft, of which two have a forward"
    (row,) = forecast_rows([VERTICAL], setting())
    width, hidden = 4096, 1024
    first, each = 6 * width * hidden, 2 * width * hidden + hidden**2 + 8192 * width
    drafting = 1e3 * 2 * (first + 7 * each) / (0.5 * 2039e9)
    assert row["step_ms"] - row["forward_ms"] - 1 == pytest.approx(drafting, rel=0.05)  # and activations


@pytest.mark.parametrize("name", PRESETS)
def test_every_decoder_can_be_forecast_and_a_head_takes_time(name):
    (row,) = forecast_rows([Accepted("a run", "shapes", resolve(name), name, 2.0)], setting())
    assert (row["step_ms"] - row["forward_ms"] > 1.01) == ("head" in resolve(name).options)


def test_a_forecast_from_another_model_reaches_to_what_papers_print_for_its_kind(cli, tmp_path):
    printed = (Printed(1.25, "janus", "a paper"), Printed(2.5, "lumina", "another paper"))
    (row,) = forecast_rows([dataclasses.replace(VERTICAL, printed=printed)], setting())
    both = [dataclasses.replace(VERTICAL, tokens_per_step=tokens) for tokens in (1.25, 5)]
    ends = [forecast_rows([each], setting())[0] for each in both]
    assert (row["tokens_per_step_low"], row["tokens_per_step"], row["tokens_per_step_high"]) == (1.25, 5, 5)
    for name in ("seconds", "speed_up"):
        values = [end[name] for end in ends]
        assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx((min(values), max(values))), name
    assert any("1.25 on janus (a paper) to 2.5 on lumina" in line for line in row["assumptions"])

    vertical = dataclasses.replace(synthetic.AR, model="shapes", decoder=resolve("vertical"))
    synthetic.folder(tmp_path, vertical, synthetic.ar())
    (far,) = json.loads(cli("forecast", "--on", "A100", "--model", "lumina", "--out", tmp_path, "--json").out)
    assert far["tokens_per_step_high"] == 1.14 and any("SSD (arXiv 2606.20543)" in line for line in far["assumptions"])
    (near,) = json.loads(cli("forecast", "--on", "A100", "--model", "shapes", "--out", tmp_path, "--json").out)
    assert near["tokens_per_step_low"] == near["tokens_per_step_high"] == 1

    of_16, of_96 = (Accepted("a run", "shapes", resolve("sjd++", {"window": w}), "sjd++", 2.0) for w in (16, 96))
    assert 2 < max(printed_elsewhere(of_16)).tokens_per_step < 3, "not 7.5, of a window of 96"
    assert max(printed_elsewhere(of_96)).tokens_per_step == 7.51
    assert "anole" in (models := {entry.model for entry in printed_elsewhere(SJD)}) and "lumina" not in models


def test_decoders_of_the_same_label_are_told_apart_by_their_window():
    narrow, wide = (dataclasses.replace(SJD, model="shapes", decoder=resolve("sjd", {"window": w})) for w in (8, 16))
    wide = dataclasses.replace(wide, printed=(Printed(2.5, "anole", "a paper"),))
    rows = forecast_rows([narrow, wide, AR], setting())
    assert [row["label"] for row in rows] == ["sjd window=8", "sjd window=16", "ar"]
    (unknown,) = [line for line in rows[0]["assumptions"] if line.startswith("Without a range: sjd window=8;")]
    assert unknown not in rows[1]["assumptions"]
    assert any(line.startswith("sjd window=16: papers print 2.5") for line in rows[1]["assumptions"])
    assert forecast_rows([narrow], setting())[0]["label"] == "sjd"


def test_the_assumptions_say_that_measured_products_replace_the_factor_of_a_window():
    peak = dataclasses.replace(peak_of("A100", "bfloat16"), products={1: 1e12, 64: 6e13})
    rows = [forecast_rows([SJD], dataclasses.replace(setting(window=pair), peak=peak)) for pair in ((1, 1), (5, 10))]
    assert rows[0] == rows[1] and "--window-factor is not applied." in " ".join(rows[0][0]["assumptions"])


def measured_windows():
    """Yield (device, window, how much longer its forward took than AR's) of all measurements at Lumina's size."""
    for path in sorted(RESULTS.glob("gpu/*/raw.json")):
        raw = json.loads(path.read_text())
        parts = {part["part"]: part["rows"] for part in raw["parts"]}
        forwards = {row["window"]: row["ms"] for row in parts.get("forwards", ())}
        steps = {row["name"]: row["spans_ms"]["target"] / row["nfe"] for row in parts.get("decisive", ())}
        forwards |= {int(name.rpartition(" ")[2]): ms for name, ms in steps.items() if name != "ar"}
        single = steps.get("ar") or forwards[1]
        yield from ((raw["device"], window, ms / single) for window, ms in forwards.items() if window > 1)


def test_the_assumed_factor_of_a_window_includes_what_gpus_took():
    measured, factors = list(measured_windows()), []
    assert len({device for device, _, _ in measured}) >= 2
    for device, window, cost in measured:
        reached = {"bandwidth": BANDWIDTH, "flops": FLOPS, "window": WINDOW, "peak": peak_of(device, "bfloat16")}
        sjd = dataclasses.replace(SJD, decoder=resolve("sjd", {"window": window}))
        (row,) = forecast_rows([sjd], dataclasses.replace(setting(), **reached))
        assert row["window_cost_low"] <= cost <= row["window_cost_high"], (device, window, cost)
        (row,) = forecast_rows([sjd], dataclasses.replace(setting(), **reached | {"window": (1.0, 1.0)}))
        if window <= 64:  # above, arithmetic may take longer than memory
            assert cost > 1.05 * row["window_cost_high"], "without the factor, every measurement is outside"
            factors.append(cost / row["window_cost_high"])
    (row,) = forecast_rows([SJD], dataclasses.replace(setting(), window=WINDOW))
    assert f"took {min(factors):.2f} to {max(factors):.2f} times" in " ".join(row["assumptions"])


def test_a_decoder_of_image_rows_feeds_as_many_rows_as_are_active_at_equal_rates():
    pjd = Accepted("a paper", "lumina", resolve("pjd", {"rows-window": 16}), "pjd", 5.0)
    zipar = Accepted("a paper", "lumina", resolve("zipar", {"rows-window": 11}), "zipar", 4.0)
    siblings = Accepted("a run", "shapes", resolve("best-lossless"), "best-lossless", 8.0)
    pjd, zipar, siblings = forecast_rows([pjd, zipar, siblings], setting())
    assert (pjd["columns"], zipar["columns"], siblings["columns"]) == (3 * 8, 5, 72)
    assert (pjd["window"], siblings["window"]) == (None, 64), "as in reports"
    assert any("image rows" in line for line in pjd["assumptions"])


def test_every_assumption_is_printed_and_the_table_says_that_it_is_none_of_measurements(cli, tmp_path):
    synthetic.folder(tmp_path, synthetic.AR, synthetic.ar())
    synthetic.folder(tmp_path, synthetic.SJD, synthetic.sjd())
    shown = cli("forecast", "--on", "RTX 4090", "--model", "lumina", "--out", tmp_path).out
    assert shown.startswith("A forecast, not a measurement: lumina on NVIDIA GeForce RTX 4090, bfloat16, batch 1.")
    for text in (
        "1,008 GB/s and 165.2 TFLOP/s",
        "60 to 90 %",
        "40 to 75 %",
        "0.1 to 5 ms per step",
        "1 to 1.25 times as long",
        "2 rows",
        "of 128",
    ):
        assert text in shown
    assert "Tokens per step were measured on" in shown and "none of its numbers was measured" in shown
    assert not [path for path in tmp_path.rglob("*") if "forecast" in path.name]


def test_a_run_brings_its_own_overhead_if_asked(cli, tmp_path):
    folder = synthetic.folder(tmp_path, synthetic.AR, synthetic.ar())
    asked = ("forecast", folder.name, "--on", "A100", "--model", "lumina", "--out", tmp_path, "--json")
    (measured,) = json.loads(cli(*asked, "--overhead-ms", "run").out)
    assert measured["step_ms"] > measured["forward_ms"] and measured["tokens_per_step"] == 1
    (row,) = specbench.forecast("A100", folder.name, "lumina", tmp_path, overhead_ms=(0.0, 0.0))
    assert row["step_ms"] == pytest.approx(row["forward_ms"])
    synthetic.folder(tmp_path, synthetic.SJD, synthetic.sjd())  # a run that is not asked for
    for named in (folder, [folder], iter([folder.name]), specbench.report(folder)["run_id"]):
        assert [row["decoder"] for row in specbench.forecast("A100", named, "lumina", tmp_path)] == ["ar"]
    refused("the list is empty", specbench.forecast, "A100", [], "lumina", tmp_path)
    refused("--overhead-ms run needs runs", specbench.forecast, "A100", "gsd-1", "lumina", overhead_ms=None)


@pytest.mark.parametrize("name", ["bandwidth", "flops", "overhead_ms", "window"])
@pytest.mark.parametrize("value", [(1.0,), (1, 1, 1), "1,1", 1.0, ()], ids=repr)
def test_a_range_that_is_not_two_numbers_is_refused(name, value):
    refused("not a range", specbench.forecast, "A100", "gsd-1", **{name: value})


def test_printed_steps_and_a_device_given_by_its_rates(cli):
    (first, *_), (same, *_) = (
        json.loads(cli("forecast", "gsd-1", "--on", on, "--model", "lumina", "--json").out)
        for on in ("2.039 TB/s, 0.312 PFLOP/s", "NVIDIA A100-SXM4-80GB")
    )
    assert first["device"] == "2039 GB/s, 312 TFLOP/s" and first["seconds"] == pytest.approx(same["seconds"])
    rows = json.loads(cli("forecast", "gsd-1", "--on", "H200", "--json").out)
    (sjd, _) = [row for row in rows if row["source"].endswith("B SJD")]
    assert sjd["tokens_per_step"] == pytest.approx(2352 / 1035.3)


def test_a_table_may_be_spelled_freely_or_be_your_own_file(tmp_path):
    text = (Path(specbench.__file__).parents[1] / "benchmarks" / "gsd-1.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('name = "gsd-1"', 'name = "mine"'))
    exact, free, own = (specbench.forecast("A100", name) for name in ("gsd-1", "GSD1", str(tmp_path / "mine.toml")))
    assert exact == free and [row["seconds"] for row in own] == [row["seconds"] for row in exact]


def test_steps_of_random_weights_are_no_ground_for_a_forecast(cli, tmp_path):
    synthetic.folder(tmp_path, dataclasses.replace(synthetic.AR, model="lumina+random+tiny"), synthetic.ar())
    answer = cli("forecast", "--on", "A100", "--model", "lumina", "--out", tmp_path)
    answer.refused("random weights, so its numbers of steps are meaningless")


def test_a_decoder_of_a_plug_in_that_is_gone_is_refused_in_one_line(cli, tmp_path):
    gone = dataclasses.replace(synthetic.SJD.decoder, name="row-above", drafter="row-above")
    synthetic.folder(tmp_path, dataclasses.replace(synthetic.SJD, decoder=gone), synthetic.sjd())
    answer = cli("forecast", "--on", "A100", "--model", "lumina", "--out", tmp_path)
    answer.refused("'row-above' has a component of a plug-in that is not installed")


def test_the_table_names_the_seconds_of_a_batch_as_such(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    line = ("forecast", "sjd-1", "--on", "A100", "--model", "lumina", "--batch")
    alone, batched = (cli(*line, size).out for size in ("1", "8"))
    assert "s per image" in alone and "images per hour" not in alone
    assert "s per batch" in batched and "images per hour" in batched and "s per image" not in batched


def test_a_run_of_a_plug_in_names_what_the_forecast_needs(cli, tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(OWN)
    (tmp_path / "own.json").write_text('{"network": {"codes": 16, "layers": 2}, "sampling": {}}')
    monkeypatch.syspath_prepend(tmp_path)
    synthetic.folder(tmp_path / "out", synthetic.changed(synthetic.SJD, model="own-model"), synthetic.sjd())
    command = ("forecast", "--on", "A100", "--out", tmp_path / "out")
    assert "--model MODULE:NAME" in cli(*command).err
    assert "add width, inner and heads to its configuration" in cli(*command, "--model", "own_model:MODEL").err


OWN = """
from pathlib import Path
from specbench.models.catalog import ModelInfo

MODEL = ModelInfo("own-model", "", "own_model:load", (8, 8), 64, "MIT", Path(__file__).with_name("own.json"))
"""
