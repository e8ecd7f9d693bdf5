"""Steps on a device without numbers: no tensor is made or mixed on another device, and none is read. A meta tensor has
a shape and no numbers. Models and decoders take the branches of a GPU for it, as they do for every device but a CPU. It
concerns several modules: the decode step with every model and decoder."""

import pytest
import torch
from one_device import NoKernel, OneDevice, OtherDevice, give_host_reads, refuse_host_numbers, step
from tiny_llama import Tiny

from specbench.decoding.drafters import eagle, vertical
from specbench.decoding.loop import Decoding, begin, noise_keys
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.decoding.verification import lantern
from specbench.models.catalog import find_model, models
from specbench.models.facts import ModelChoice
from specbench.models.families.base import load
from specbench.models.hub_model import HubModel
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling
from specbench.training.head import untrained_eagle3

META = "meta"
SAMPLING = Sampling(guidance=2.0, temperature=0.9, top_k=5, top_p=0.9)
REQUESTS = [Request("four", "a"), Request("five!", "b")]
LABELS = [Request("4", "a"), Request("5", "b")]
FAMILIES = list({model.target: name for name, model in models().items() if isinstance(model, HubModel)}.values())
OF_EACH_KIND = ("sjd", "gsd", "zipar")


class Dealt(Tiny):
    """Its prompts are encoded on the device of its weights."""

    def encode(self, prompts):
        with torch.device(self.device):
            return super().encode(prompts)


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch):
    monkeypatch.setattr(eagle, "head_for", lambda model, path: model.own_head())
    monkeypatch.setattr(eagle, "eagle3_head_for", lambda model, path: model.own_eagle3_head())
    monkeypatch.setattr(vertical, "vertical_head_for", lambda model, path: model.own_vertical_head())
    monkeypatch.setattr(lantern, "neighbour_table", lambda codebook, raw: torch.zeros(len(codebook), 8))
    give_host_reads(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def tiny():
    with torch.device(META):
        model = Dealt()
        head, other, third = model.own_head(), model.own_vertical_head(), untrained_eagle3(model, 0).eval()
    model.own_head, model.own_vertical_head, model.own_eagle3_head = lambda: head, lambda: other, lambda: third
    return model


def started(model, name, trace=False, requests=REQUESTS):
    """A loop of two images after two steps, which create all persistent tensors."""
    loop = begin(Decoding(model, resolve(name), SAMPLING, 0, trace), requests, Spans(torch.device("cpu")))
    for _ in range(2):
        step(loop)
    return loop


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_stays_on_its_device_reads_nothing_and_sends_nothing(name, tiny, monkeypatch):
    loop = started(tiny, name)
    if hasattr(loop, "step"):  # the others read and send the active rows once per step
        refuse_host_numbers(monkeypatch)
    with OneDevice(META):
        for _ in range(2):
            step(loop)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_on_one_device(family):
    model = load(find_model(family).configured(ModelChoice(random=True, tiny=True)), META, "bfloat16", ())
    for name in OF_EACH_KIND if model.codebook is not None else ("sjd",):
        loop = started(model, name, requests=LABELS if "c2i" in family else REQUESTS)
        with OneDevice(META):
            step(loop)
    tokens = torch.zeros(1, model.layout.length, dtype=torch.long, device=META)
    if getattr(model, "draws", True):  # GLM-Image, X-Omni and Tar draw with other models
        assert model.render(model.layout.image_tokens(tokens), ["a cat"], [0]).device.type == META


@pytest.mark.parametrize("name", ["ar", "sjd", "scd-gs", "sjd-pac"])
def test_a_row_is_refilled_on_one_device(name, tiny):
    loop = started(tiny, name)
    rows, prefix = torch.tensor([1], device=META), tiny.encode(["a longer prompt than the others"])
    with OneDevice(META):
        loop.session.refill(rows, prefix)
        loop.restart(rows, noise_keys([Request("a longer prompt than the others", "c")], 0))
        loop.step(0)


@pytest.mark.parametrize("name", ["sjd", "eagle"])
def test_a_trace_stays_on_its_device(name, tiny):
    loop = started(tiny, name, trace=True)
    with OneDevice(META):
        loop.step(0)


def integers(logits):
    return torch.ones_like(logits, dtype=torch.long) @ torch.ones_like(logits[0, 0], dtype=torch.long)


@pytest.mark.parametrize(
    ("added", "error"),
    [
        (lambda logits: torch.zeros(logits.shape[-1]), OtherDevice),
        (lambda logits: logits.max().item(), RuntimeError),
        (lambda logits: torch.tensor([1.0], device=logits.device), AssertionError),
        (lambda logits: integers(logits)[..., None], NoKernel),
    ],
    ids=["cpu tensor", "host read", "numbers sent", "product of integers"],
)
def test_a_planted_bug_is_caught(added, error, tiny, monkeypatch):
    loop, plain = started(tiny, "sjd"), Target.__call__
    monkeypatch.setattr(Target, "__call__", lambda self, logits, *rest: plain(self, logits + added(logits), *rest))
    refuse_host_numbers(monkeypatch)
    with OneDevice(META), pytest.raises(error):
        loop.step(0)
