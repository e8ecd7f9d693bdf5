"""A model is planned with the size of the checkpoint that it loads, whatever layout that is in. The roofline model of a
forward: hand-computed parts, and what binds each. It concerns several modules: network_sizes, forward_time and
family_sizes."""

import json

import pytest
from checkpoints import INFO, WRITERS
from refusals import refused

from specbench.models.facts import ModelChoice
from specbench.models.family_sizes import stored_size
from specbench.models.forward_time import Forward, Reached, forward_ms, forward_work, product_rate
from specbench.models.network_sizes import Size
from specbench.system.device_peaks import Peak


def test_official_configurations_give_the_official_sizes(tmp_path):
    llama = {"num_hidden_layers": 30, "vocab_size": 102_400}
    published = {
        "janus-7b": {"language_config": llama}, "simplear-1.5b": INFO["simplear-1.5b"].network.config(),
        "emu3": {"model_type": "Emu3"}, "anole": {},
    }  # fmt: skip
    for name, config in published.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert stored_size(INFO[name].family, INFO[name].network, tmp_path) == INFO[name].network
    params = {"model": {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "config.json").unlink()
    assert stored_size("anole", INFO["anole"].network, tmp_path) == INFO["anole"].network


def test_a_hub_repository_is_planned_and_recorded_as_what_it_holds(hub_cache):
    WRITERS["janus"](hub_cache("me/small"))
    info = INFO["janus"].configured(ModelChoice(weights="me/small"))
    assert info.layers == 2 and info.size.weights < INFO["janus"].size.weights
    facts = info.file_facts("5678")
    assert facts["commits"] == {"me/small": 40 * "c"} and "me/small/config.json" in facts["file_digests"]
    assert facts["source"] == {"weights": "me/small", "revision": 40 * "c", "layout": "janus", "sha256": "5678"}
    at_commit = INFO["janus"].configured(ModelChoice(weights="me/small", revision=40 * "c"))
    assert at_commit.file_facts("5678") == facts and at_commit.network == info.network
    WRITERS["janus"](hub_cache("deepseek-community/Janus-Pro-1B", 40 * "d"))
    official = INFO["janus"].configured(ModelChoice(weights="deepseek-community/Janus-Pro-1B"))
    assert official.file_facts("5678")["source"] is None
    assert INFO["janus"].configured(ModelChoice(revision=40 * "d")).layers == 2


def test_a_hub_repository_without_a_size_is_reported_as_of_unknown_size(hub_cache, monkeypatch):
    monkeypatch.setattr("specbench.models.checkpoint_files.WantedFiles.folder", lambda *_: None)
    info = INFO["llamagen"].configured(ModelChoice(weights="me/llamagen-3b"), download=True)
    assert info.network == INFO["llamagen"].network and "size of me/llamagen-3b is unknown" in info.size_note
    folder = hub_cache("me/llamagen-3b")
    monkeypatch.setattr("specbench.models.checkpoint_files.WantedFiles.folder", lambda *_: folder)
    assert "unknown" in info.as_stored().size_note, "an empty snapshot has no size"
    WRITERS["llamagen"](folder)
    stored = info.as_stored()
    assert stored.size_note is None and stored.layers == 2 != info.layers
    assert INFO["llamagen"].size_note is INFO["llamagen"].configured(ModelChoice(random=True)).size_note is None


def test_a_published_size_under_another_name_says_which_model_it_is(tmp_path):
    config = {"language_config": {"num_hidden_layers": 30, "vocab_size": 102_400}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused("has the size of 'janus-7b'", INFO["janus"].configured, ModelChoice(weights=str(tmp_path)))
    assert error.exit_code == 2 and "--model janus-7b" in error.try_this


@pytest.mark.parametrize(
    "text", ["", "[]", '{"text_config": 3}', '{"hidden_size": "wide"}', '{"num_attention_heads": 0}']
)
@pytest.mark.parametrize("name", ["lumina", "janus", "simplear", "emu3", "llamagen"])
def test_files_without_a_size_leave_the_official_size(text, name, tmp_path):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "t2i_XL_stage1_256.pt").write_text(text)
    assert INFO[name].configured(ModelChoice(weights=str(tmp_path))).network == INFO[name].network


SIZE = Size(weights=4 * 16 * 16 + 3 * 16 * 8 + 10 * 16, kv=2 * 16, attention=16)
"""One layer of width 16 and inner width 8, with 10 outputs."""
PEAK = Peak("a device", {0: 1e6}, 1e9, "its data sheet")


def forward(columns=1, images=1, guided=True, context=100.0):
    return Forward(SIZE, 40 * 16 + 5 * 8, 10, 2, columns, images, guided, context)


def test_every_part_is_what_a_hand_counts():
    """Two rows of 3 columns after 100 tokens, 2 bytes a number."""
    work = forward_work(forward(columns=3))
    weights = 1024 + 384 + 160
    assert work["weights"] == (2 * weights, 2 * 2 * 3 * weights)
    assert work["attention"] == (2 * (2 * 103 * 32 + 2 * 3 * 32), 2 * 4 * 3 * 103 * 16)
    assert work["between"] == (2 * 2 * 3 * (40 * 16 + 5 * 8), 0)
    assert work["logits"] == (2 * 3 * 10 * (2 + 2 + 4 + 4 + 2), 0)


def test_weights_are_read_once_for_all_columns_rows_and_images():
    alone, many = (forward_work(forward(columns, images))["weights"] for columns, images in ((1, 1), (16, 8)))
    assert many.bytes == alone.bytes and many.flops == 128 * alone.flops


def test_a_window_costs_nothing_until_arithmetic_binds():
    """Memory takes 2 x weights / 1e6 s, arithmetic 4 x columns x weights / 1e9: they meet at 500 columns."""
    narrow, below, above = (forward_ms(forward(columns), PEAK, Reached())["weights"] for columns in (1, 499, 1000))
    assert narrow == below == pytest.approx(1e3 * 2 * 1568 / 1e6) and above == pytest.approx(2 * narrow)
    assert forward_ms(forward(), PEAK, Reached(bandwidth=0.5))["weights"] == pytest.approx(2 * narrow)


def test_measured_products_take_the_place_of_both_peaks():
    peak = Peak("here", {0: 1e6}, 1e9, "measured", {1: 1e6, 4: 4e6})
    assert product_rate(peak.products, 2) == pytest.approx(2e6)
    assert product_rate(peak.products, 0.5) == 1e6 and product_rate(peak.products, 9) == 4e6
    assert forward_ms(forward(), peak, Reached())["weights"] == pytest.approx(1e3 * 4 * 1568 / 2e6)
