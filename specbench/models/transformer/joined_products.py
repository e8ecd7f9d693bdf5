"""Linear layers with the same input as one product: queries, keys and values, and the inner matrices of a gated MLP.

On a GPU a matrix of 4,096 rows is too small to occupy it with one or two hidden states. The layers of every family call
these matrices by name, so each is replaced by a module that returns its part of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specbench.system.matrix_products import product

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Latest:
    """The product computed last in a network, until its last part is taken. No module, which torch would be slow to
    change after each compiled call."""

    by: nn.Module | None = None
    hidden: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class _Joined(nn.Module):
    """Weights and biases of several linear layers, one below the other."""

    def __init__(self, layers: list[nn.Linear], latest: _Latest):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
        self.sizes, self.latest = [layer.out_features for layer in layers], latest

    def output(self, hidden: Tensor, number: int) -> Tensor:
        """Output of layer `number` for hidden states [R, T, d]."""
        latest = self.latest
        if latest.by is not self or latest.hidden is not hidden:
            latest.by, latest.hidden = self, hidden
            latest.parts = product(hidden, self.weight, self.bias).split(self.sizes, -1)
        part = latest.parts[number]
        if number == len(self.sizes) - 1:
            latest.by, latest.hidden, latest.parts = None, None, ()
        return part


class _Part(nn.Module):
    """One of the joined layers."""

    def __init__(self, joined: _Joined, number: int):
        super().__init__()
        self.joined, self.number = joined, number

    @property
    def weight(self) -> Tensor:
        return self.joined.weight.split(self.joined.sizes)[self.number]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.joined.output(hidden, self.number)


def join_products(network: nn.Module) -> None:
    """Join what can be in every layer of a network, one layer after the other: no device has to hold all twice."""
    latest = _Latest()
    for names in _TOGETHER:
        for module in [module for module in network.modules() if hasattr(module, names[0])]:
            layers = [getattr(module, name, None) for name in names]
            if all(_is_plain(layer) for layer in layers) and len({layer.bias is None for layer in layers}) == 1:
                joined = _Joined(layers, latest)
                for number, name in enumerate(names):
                    setattr(module, name, _Part(joined, number))


def _is_plain(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
