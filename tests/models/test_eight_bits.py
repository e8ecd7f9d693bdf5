"""`--dtype int8wo` from the command line to the audit: names, memory, quantised modules, bad input. torchao is an
extra: a stub rounds if only the way to it is tested. It concerns several modules: facts, checkpoint_loading and
catalog."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from checkpoints import INFO, random_tiny
from refusals import refused

from specbench import api
from specbench.checks.run_audit import audit_run
from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE
from specbench.models import checkpoint_loading
from specbench.models.catalog import find_model, load_model, recorded_model
from specbench.models.facts import ModelChoice
from specbench.runs.memory_estimate import footprint
from specbench.specs.presets import resolve
from specbench.store.run_store import RunStore

LIGHT = ModelChoice(eight_bits=True)
with_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao (extra `quant`) is not installed")


@pytest.fixture
def rounding(monkeypatch):
    """A stub of torchao that rounds the weights of each layer to 255 steps and keeps their dtype."""

    def quantize_(module, config):
        scale = module.weight.abs().amax(1, keepdim=True) / 127
        module.weight.data = (module.weight / scale).round() * scale
        rounded.append(module)

    rounded = []
    stand_in = SimpleNamespace(Int8WeightOnlyConfig=object, quantize_=quantize_)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=stand_in, __spec__=None))
    monkeypatch.setitem(sys.modules, "torchao.quantization", stand_in)
    monkeypatch.setattr(checkpoint_loading, "require_torchao", lambda: None)
    monkeypatch.setattr("specbench.models.catalog.require_torchao", lambda: None)
    monkeypatch.setattr("specbench.models.hub_model.require_torchao", lambda: None)
    return rounded


def test_a_model_in_eight_bits_has_a_name_of_its_own_that_leads_back_to_it():
    light = find_model("lumina").configured(replace(LIGHT, random=True))
    assert light.name == "lumina+random+int8wo"
    assert recorded_model(light.name) == light != find_model("lumina").configured(ModelChoice(random=True))
    assert recorded_model("shapes+int8wo").eight_bits and not find_model("shapes").eight_bits


@pytest.mark.parametrize(("name", "gib"), [("janus-7b", 8), ("lumina", 11), ("lumina-34b", 46), ("emu3.5", 46)])
def test_memory_is_planned_for_one_byte_per_weight_of_a_layer(name, gib):
    """7B on cards of 8 to 12 GB, 34B on one of 48 GB."""
    full, light = find_model(name), find_model(name).configured(LIGHT)
    assert full.fixed_bytes() - light.fixed_bytes() == full.step_bytes() - light.step_bytes() == full.network.trunk
    assert light.kv_bytes() == full.kv_bytes()
    assert footprint(light, resolve("ar"), light.sampling(), light.dtype).total(1) < gib * 2**30


@pytest.mark.parametrize("name", {model.target: name for name, model in INFO.items()}.values())
def test_matrices_of_layers_are_quantised_in_every_family_and_nothing_else(name, rounding):
    plain, light = random_tiny(name), random_tiny(name, eight_bits=True)
    layers = light.backbone.layers
    assert len(rounding) == sum(type(part) is torch.nn.Linear for layer in layers for part in layer.modules()) > 0
    names = {id(part): name for name, part in light.backbone.named_modules()}
    before = dict(plain.backbone.named_parameters())
    changed = {name for name, part in light.backbone.named_parameters() if not torch.equal(part, before[name])}
    assert changed == {f"{names[id(part)]}.weight" for part in rounding}


def test_a_run_is_another_model_and_the_audit_measures_how_far_it_is_from_the_plain_one(tmp_path, rounding):
    check_run(tmp_path)


@with_torchao
def test_the_same_with_torchao(tmp_path):
    assert type(load_model(recorded_model("shapes+int8wo")).backbone.layers[0].mlp.up_proj.weight) is not torch.Tensor
    check_run(tmp_path)


@with_torchao
def test_compiled_steps_of_eight_bits_draw_the_same_tokens(tmp_path):
    settings = {"decoder": "ar", "dtype": "int8wo", "limit": 1, "threads": 1, "out": str(tmp_path), "quiet": True}
    folders = [api.run(compile=mode, **settings).folders[0] for mode in ("off", "on")]
    eager, compiled = (RunStore(folder).samples(["tokens"])["tokens"][0] for folder in folders)
    assert folders[0] != folders[1] and (eager == compiled).all()


def check_run(out):
    settings = {"limit": 4, "batch": 4, "threads": 1, "out": str(out), "quiet": True}
    light = api.run(decoder=["ar", "sjd"], dtype="int8wo", **settings)
    (plain,) = api.run(decoder=["ar"], **settings).folders
    assert [folder.name.rpartition("-")[0] for folder in light.folders] == ["shapes+int8wo-ar", "shapes+int8wo-sjd"]
    assert {*api.report(out=str(out))["model"]} == {"shapes", "shapes+int8wo"}
    audit = audit_run(light.folders[1], recompute=True)
    assert audit["verdict"] == "consistent" and audit["target"] is None
    other = audit_run(light.folders[1], dtype="float32")
    assert other["target"] == "float32" and other["recomputed"] and not other["failed"] and not other["agreement"]
    assert 0 <= other["tv_low"] <= other["tv"] <= other["tv_high"] < 0.2
    refused("was not decoded with --dtype int8wo", audit_run, plain, dtype="float32")
    refused("--dtype int4: unknown", audit_run, light.folders[0], dtype="int4")


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
@pytest.mark.parametrize(
    "model", [(), ("--model", "janus", "--random-weights", "--scale", "tiny", "--prompts", "shapes")]
)
def test_without_torchao_one_line_says_how_to_get_it(cli, tmp_path, model):
    outcome = cli("run", "--dtype", "int8wo", "--limit", "1", "--out", tmp_path, *model)
    outcome.refused("needs torchao", "pip install 'torchao>=0.18'", code=MISSING_PREREQUISITE, alone=True)


def test_bad_values(cli):
    assert cli("run", "--dtype", "int8").code == BAD_INPUT
    cli("audit", "--dtype", "float32").refused("require --run")
