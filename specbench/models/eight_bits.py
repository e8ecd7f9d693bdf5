"""`--dtype int8wo`: the matrices of the language model's layers in eight bits, by torchao, all else as it was.

Another target: its logits are not those of the same weights in sixteen bits, which is why the model's name says so.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError

if TYPE_CHECKING:
    from torch import nn

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


def require_torchao() -> None:
    """Raise a SpecbenchError with exit code 5 where torchao is not installed."""
    if find_spec("torchao") is None:
        what = "--dtype int8wo needs torchao, which is not installed"
        raise SpecbenchError(what, "pip install 'torchao>=0.18'", MISSING_PREREQUISITE)


def quantise(module: nn.Module, name: str) -> None:
    """Store the weight of one module in eight bits, with a scale per row, if it is a matrix of a layer by its `name`.

    One at a time, so that no device has to hold all of them in sixteen bits.
    """
    import torch  # `require_torchao` is asked where torch is not loaded

    if type(module) is not torch.nn.Linear or not _IN_LAYER.search(name):
        return
    require_torchao()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # an extra

    quantize_(module, Int8WeightOnlyConfig())


def quantise_network(network: nn.Module) -> nn.Module:
    """`quantise` every module of a network that is on its device."""
    for name, module in network.named_modules():
        quantise(module, name)
    return network
