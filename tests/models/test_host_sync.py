"""Host syncs: none within a step, and a small, counted number per image."""

import pytest
import torch
from tiny_llama import Tiny
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding import draft_tree, progress_bounds
from specbench.decoding.build import build
from specbench.decoding.drafters import eagle
from specbench.decoding.loop import Loop, decode
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.decoding.verification import lantern
from specbench.models.catalog import load_model
from specbench.models.transformer import host_sync
from specbench.models.transformer import model as transformer
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling

SAMPLING = Sampling(guidance=2.0, top_k=5, top_p=0.9)
TABLES = (draft_tree.routes, transformer._tree_tables, eagle._tree_levels)
"""What is made once per device and then kept; it must not outlive a device that is not there."""


@pytest.fixture
def no_numbers(monkeypatch):
    """A device whose tensors have shapes but no numbers: whoever reads one fails."""
    for table in TABLES:
        table.cache_clear()
    # What a run may wait for once per batch, before its first step.
    monkeypatch.setattr(eagle, "to_host", lambda numbers: [0] * len(numbers))
    monkeypatch.setattr(host_sync.AsyncHostCopy, "latest", lambda self, numbers, when: ([4] * len(numbers), when))
    monkeypatch.setattr(eagle, "head_for", lambda model, path: model.own_head())
    monkeypatch.setattr(lantern, "neighbour_table", lambda codebook, raw: torch.zeros(len(codebook), 8, device="meta"))
    with torch.device("meta"), torch.inference_mode():
        yield
    for table in TABLES:
        table.cache_clear()


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(("zipar", "pjd"))])
def test_a_step_reads_no_number_and_sends_none(name, no_numbers, monkeypatch):
    model = Tiny()
    assert model.device.type == "meta"
    method = build(resolve(name), model)
    session = model.begin(model.encode(["four", "five!"]), SAMPLING.guidance, method.drafter.columns)
    target = Target(model.layout, SAMPLING, model.device)
    loop = Loop(method, session, target, Noise([1, 2], model.layout.vocab, model.device), 2, Spans(torch.device("cpu")))
    for _ in range(2):
        loop.step(0)

    def refuse(*args, **kwargs):
        raise AssertionError("a step makes a tensor from numbers of the host, for which a GPU waits")

    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "as_tensor", lambda x, *a, **k: x if isinstance(x, torch.Tensor) else refuse())
    for _ in range(2):
        loop.step(0)


def test_the_device_without_numbers_would_tell(no_numbers):
    with pytest.raises(Exception, match="meta"):
        int(torch.zeros(3).max())


def test_host_syncs_per_image_are_few(monkeypatch):
    """AR is never looked at, the others in the steps of their last window and now and then before."""
    counted = []
    monkeypatch.setattr(progress_bounds, "to_host", lambda numbers: counted.append(1) or host_sync.to_host(numbers))
    model = load_model("shapes")
    for name in ("ar", "sjd", "eagle"):
        counted.clear()
        (image,) = decode(model, [Request("a red circle", "p")], resolve(name), Sampling(), 0, render=False)
        assert len(counted) <= (0 if name == "ar" else 0.2 * image.nfe)


class Calls(TorchDispatchMode):
    """Counts what torch is called for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_steps_call_torch_hardly_more_often_than_they_used_to():
    """As shares of AR's step, forwards included; a step's host time is its calls."""
    model, per_step = load_model("shapes"), {}
    for name in ("ar", "sjd", "gsd", "eagle"):
        with Calls() as calls:
            (image,) = decode(model, [Request("a red circle", "p")], resolve(name), Sampling(3.0), 0, render=False)
        per_step[name] = calls.count / image.nfe
    assert per_step["sjd"] < 1.75 * per_step["ar"]
    assert per_step["gsd"] < 1.9 * per_step["ar"]
    assert per_step["eagle"] < 3.95 * per_step["ar"]
