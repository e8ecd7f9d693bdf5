"""Device names: invalid ones and devices that are not here are refused in one short line, by every command."""

import pytest
import torch

from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics.base import Settings
from specbench.models.catalog import load_model
from specbench.system.torch_device import check_device_name, require_device


@pytest.mark.parametrize("name", ["nope", "CPU", "cpu:0", "mps:1", "cuda:", "cuda:-1", "", "x" * 5000])
@pytest.mark.parametrize(
    "check", [check_device_name, lambda name: Settings(name).check(), lambda name: load_model("shapes", name)]
)
def test_a_name_that_is_no_device_is_refused_in_a_short_line(name, check):
    with pytest.raises(SpecbenchError, match="not a device") as refused:
        check(name)
    assert refused.value.exit_code == BAD_INPUT
    assert len(str(refused.value)) < 150


def test_a_device_that_is_not_here_is_a_missing_prerequisite(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda")
    require_device("cuda:1")
    with pytest.raises(SpecbenchError, match=r"cuda:2: torch .* finds no such device") as refused:
        require_device("cuda:2")
    assert refused.value.exit_code == MISSING_PREREQUISITE
