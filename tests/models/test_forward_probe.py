"""Checkpoints other than the official ones: the distribution of their own configuration, or one line."""

from __future__ import annotations

import json

import checkpoints
import pytest
import torch

from specbench.errors import SpecbenchError
from specbench.models import forward_probe
from specbench.models.catalog import load_model
from specbench.models.families.base import FamilyModel

ALL = [name for name in checkpoints.WRITERS if name not in checkpoints.ALIKE]


def changed(name, folder, **settings):
    """A checkpoint whose language model's configuration has other settings."""
    checkpoints.write(name, folder)
    for path in folder.rglob("config.json"):
        content = json.loads(path.read_text())
        for part in (content, content.get("text_config"), content.get("language_config")):
            if isinstance(part, dict) and "num_hidden_layers" in part:
                part.update(settings)
        path.write_text(json.dumps(content))
    return checkpoints.loaded(name, folder)


@pytest.mark.parametrize("name", ALL)
def test_a_family_decodes_by_the_forward_of_its_network(name, tmp_path, monkeypatch):
    compared = []
    true = forward_probe.probe
    monkeypatch.setattr(forward_probe, "probe", lambda *given: compared.append(true(*given)) or compared[-1])
    checkpoints.write(name, tmp_path)
    model = checkpoints.loaded(name, tmp_path)
    [result] = compared
    assert result.gap < 1e-3 and result.slots == model.layout.length and result.no_trees is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("simplear", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("anole", {"rms_norm_eps": 0.3}),
        ("liquid", {"rms_norm_eps": 0.3}),
    ],
)
def test_what_a_configuration_switches_on_is_in_the_distribution(name, settings, tmp_path):
    official, other = (changed(name, tmp_path / part, **more) for part, more in (("a", {}), ("b", settings)))
    tokens = torch.arange(official.layout.length) % official.layout.v_image
    logits = [model.own_logits(model.encode(["a cup"]).take([0]), tokens) for model in (official, other)]
    assert (logits[0] - logits[1]).abs().max() > 0.05  # loading compared each with its own forward


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("simplear", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("lumina", {"attn_implementation": "eager"}),
        ("anole", {"head_dim": 32}),
        ("emu3", {"attention_bias": True}),
    ],
)
def test_what_a_family_does_not_apply_is_one_line(name, settings, tmp_path):
    with pytest.raises(SpecbenchError) as refused:
        changed(name, tmp_path, **settings)
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2


def test_a_family_that_forgets_something_after_its_layers_is_refused(tmp_path, monkeypatch):
    checkpoints.write("janus", tmp_path)
    true = FamilyModel.own_logits
    monkeypatch.setattr(FamilyModel, "own_logits", lambda *given: 0.5 * true(*given))
    with pytest.raises(SpecbenchError, match="of single tokens differs from the model's own forward by"):
        checkpoints.loaded("janus", tmp_path)


def test_weights_of_a_narrower_format_are_no_rounding_of_a_wider_one():
    model = load_model("shapes")  # float32 values of float16 files
    reference = forward_probe.own_forward(model, model.encode(["a red circle"]))
    assert reference.rounding.largest < 0.005 and forward_probe.probe(model, reference).gap < 0.005
