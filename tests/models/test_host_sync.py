"""Host syncs: a small, counted number per image; `tests/decoding/test_one_device.py` has none within a step."""

from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding import loop
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


def test_host_syncs_per_image_are_few_and_steps_call_torch_hardly_more_often_than_they_used_to(monkeypatch):
    """AR is never looked at, the others in the steps of their last window and now and then before.

    Calls are shares of AR's step, forwards included; a step's host time is its calls.
    """
    synced = []
    monkeypatch.setattr(loop, "to_host", lambda numbers: synced.append(1) or host_sync.to_host(numbers))
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
