"""Steps on a device without numbers: no tensor is made or mixed on another device, and none is read. A meta tensor has
a shape and no numbers. Models and decoders take the branches of a GPU for it, as they do for every device but a CPU. It
concerns several modules: the decode step with every model and decoder."""

import pytest
import torch
from tiny_llama import Tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.decoding import row_jacobi, zipar
from specbench.decoding.drafters import eagle, vertical
from specbench.decoding.loop import Decoding, begin, noise_keys
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.decoding.verification import lantern
from specbench.models.catalog import find_model, models
from specbench.models.facts import ModelChoice
from specbench.models.families.base import load
from specbench.models.hub_model import HubModel
from specbench.models.transformer import host_sync
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


class OtherDevice(AssertionError):
    """A tensor on another device than the model's."""


class NoKernel(Exception):
    """An operation that CUDA does not have."""


_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "dot")
}


class OneDevice(TorchDispatchMode):
    """Refuses operations that take or make a tensor on another device than `device`, and matrix products of integers,
    for which CUDA has no kernel."""

    def __init__(self, device: str):
        super().__init__()
        self._kind = torch.device(device).type

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _PRODUCTS and not result.is_floating_point():
            raise NoKernel(f"{function} of integers")
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type != self._kind:
                raise OtherDevice(f"{function} has a tensor of shape {list(value.shape)} on {value.device}")
        return result


class RowsAtWork:
    """Answer loops that ask once a step which rows are at work: all of them, so many times."""

    def __init__(self) -> None:
        self.left = 0

    def __call__(self, numbers: torch.Tensor) -> list[bool]:
        self.left -= 1
        return [self.left >= 0] * len(numbers)


_ROWS_AT_WORK = RowsAtWork()


def step(loop) -> None:
    """One step of any decode loop."""
    if hasattr(loop, "step"):
        loop.step(0)
    else:
        _ROWS_AT_WORK.left = 1
        for _ in loop.run():
            pass


def refuse_host_numbers(monkeypatch) -> None:
    """Fail if a tensor is made from numbers of the host, for which a GPU waits."""

    def refuse(*args, **kwargs):
        raise AssertionError("a step makes a tensor from numbers of the host, for which a GPU waits")

    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "as_tensor", lambda x, *a, **k: x if isinstance(x, torch.Tensor) else refuse())


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
    # What a run may ask a device once per batch or image, and loops over image rows once a step.
    monkeypatch.setattr(eagle, "to_host", lambda numbers: [4] * len(numbers))
    monkeypatch.setattr(zipar, "to_host", _ROWS_AT_WORK)
    monkeypatch.setattr(row_jacobi, "to_host", _ROWS_AT_WORK)
    monkeypatch.setattr(host_sync.AsyncHostCopy, "latest", lambda self, numbers, when: ([4] * len(numbers), when))
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


@pytest.mark.parametrize(
    ("added", "error"),
    [
        (lambda logits: torch.zeros(logits.shape[-1]), OtherDevice),
        (lambda logits: logits.max().item(), RuntimeError),
        (lambda logits: torch.tensor([1.0], device=logits.device), AssertionError),
        (lambda logits: (torch.ones_like(logits).long() @ torch.ones_like(logits[0, 0]).long())[..., None], NoKernel),
    ],
    ids=["cpu tensor", "host read", "numbers sent", "product of integers"],
)
def test_a_planted_bug_is_caught(added, error, tiny, monkeypatch):
    loop, plain = started(tiny, "sjd"), Target.__call__
    monkeypatch.setattr(Target, "__call__", lambda self, logits, *rest: plain(self, logits + added(logits), *rest))
    refuse_host_numbers(monkeypatch)
    with OneDevice(META), pytest.raises(error):
        loop.step(0)
