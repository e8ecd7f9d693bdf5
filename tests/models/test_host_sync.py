"""Host syncs: a small, counted number per image; `tests/decoding/test_one_device.py` has none within a step."""

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding.loop import decode
from specbench.models.catalog import load_model
from specbench.models.transformer import host_sync
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling


class Calls(TorchDispatchMode):
    """Counts what torch is called for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_host_syncs_per_image_are_few_and_steps_call_torch_hardly_more_often_than_they_used_to(monkeypatch):
    """AR is never looked at, the others in the steps of their last window and now and then before. Calls are shares of
    AR's step, forwards included; a step's host time is its calls."""
    synced, take = [], host_sync.LaggingHostCopy.take
    monkeypatch.setattr(host_sync.LaggingHostCopy, "take", lambda *arguments: synced.append(1) or take(*arguments))
    model, per_step = load_model("shapes"), {}
    for name in ("ar", "sjd", "gsd", "eagle"):
        synced.clear()
        with Calls() as calls:
            (image,) = decode(model, [Request("a red circle", "p")], resolve(name), Sampling(3.0), 0, render=False)
        assert len(synced) <= (0 if name == "ar" else 0.2 * image.nfe)
        per_step[name] = calls.count / image.nfe
    assert per_step["sjd"] < 1.75 * per_step["ar"]
    assert per_step["gsd"] < 1.9 * per_step["ar"]
    assert per_step["eagle"] < 3.95 * per_step["ar"]


@pytest.mark.parametrize("name", ["sjd", "eagle", "vertical"])
def test_a_host_that_knows_only_the_step_before_queues_one_step_in_vain(name, monkeypatch):
    """As on a GPU, whose work goes on while the host reads an earlier copy."""
    model, requests = load_model("shapes"), [Request("a red circle", "p"), Request("a blue square", "q")]

    def images():
        steps.clear()
        return decode(model, requests, resolve(name), Sampling(3.0), 0, render=False, watch=steps.append)

    steps, copies = [], []
    before, queued = images(), len(steps)

    def take(self, numbers, when):
        copies.append((numbers.tolist(), when))
        return copies[-2] if len(copies) > 1 else None

    monkeypatch.setattr(host_sync.LaggingHostCopy, "take", take)
    for image, other in zip(before, images(), strict=True):
        assert (image.tokens == other.tokens).all() and image.nfe == other.nfe
        np.testing.assert_allclose(image.logp, other.logp, atol=1e-4)  # of windows of another width
        assert (image.accepted == other.accepted).all()
    assert len(steps) <= queued + 1
