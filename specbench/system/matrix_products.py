"""Fast products of weight matrices with few hidden states, as in AR: the fastest method on a CPU, and a joined product
for linear layers with the same input (queries, keys and values; the inner matrices of a gated MLP).

With one or two hidden states, a matrix of 4,096 rows is too small to occupy a GPU. The model families call the layers
by name, so each layer is replaced by a module that returns its part of the joined product.
"""

from typing import Any

import torch
from torch import Tensor, nn

FEW_STATES = 4
"""For 2 up to this number of hidden states x, the product W x' with the weights W is faster than x W'."""

LARGE = 2**18  # Minimum number of elements of W for W x': smaller matrices stay in a CPU's cache

SUMMED_STATES = (1, 2)
"""Numbers of hidden states for which products are compiled to sums: AR without and with guidance."""

SUMMED_ON = {"cpu"}  # Kinds of devices that compile sums; `make gpu` also tries a GPU

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_READ_AS_FLOAT = (torch.float32, torch.bfloat16)


def linear_output(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Output [R, T, o] of a linear layer for hidden states [R, T, d]."""
    # Not for eight-bit weights. While compiling, tensors have another type.
    plain = type(layer) is nn.Linear and (type(layer.weight) in (Tensor, nn.Parameter) or torch.compiler.is_exporting())
    return product(hidden, layer.weight, layer.bias) if plain else layer(hidden)


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Hidden states [R, T, d] times the transpose of a weight matrix [o, d], plus a bias [o]: [R, T, o].

    With one state, compiled sums take 1.2 times as long as reading the weights; with two, 1.3 times (0.8 and 0.4 times
    MKL's time for x W'). With two or three states and a matrix larger than the caches, eager W x' takes 0.4 times MKL's
    time; with four states, 0.8 times. With eight states, or in bfloat16, x W' is at least as fast.
    """
    rows, columns, _ = hidden.shape
    kind, dtype = hidden.device.type, hidden.dtype
    summed = torch.compiler.is_compiling() and columns == 1 and rows in SUMMED_STATES
    if summed and kind in SUMMED_ON and dtype in _READ_AS_FLOAT:
        return _plus(sums_by_state(hidden, weight), bias)
    if kind == "cpu" and dtype == torch.float32 and weight.numel() >= LARGE and _are_few(rows, columns):
        return _plus(weights_times_states(hidden, weight), bias)
    return nn.functional.linear(hidden, weight, bias)


def _plus(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias


def weights_times_states(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute `product` without a bias as (W x')'."""
    return (weight @ hidden.flatten(0, 1).T).T.contiguous().view(*hidden.shape[:2], -1)


def _are_few(rows: int, columns: int) -> bool:
    # Compiled code only tests for a single column, which has its own compiled form anyway. With a test of rows times
    # columns, narrow windows would also get a separate form.
    if columns == 1:
        return 1 < rows <= FEW_STATES
    return not torch.compiler.is_compiling() and 1 < rows * columns <= FEW_STATES


def sums_by_state(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute `product` of one column as a sum per state and matrix row. The compiled code reads the matrix once."""
    import torch._inductor.inductor_prims  # registers the operation below

    # Stores the states; otherwise Inductor recomputes them for every row of the matrix. `as_strided` would also store
    # them, but reads wrong elements of a view. Expanded rows share memory and must be copied first.
    hidden = hidden.contiguous()
    stored = torch.ops.prims.inductor_force_stride_order(hidden, hidden.stride())
    read = weight.float()
    return torch.stack([(state.float() * read).sum(-1) for state in stored[:, 0]])[:, None].to(hidden.dtype)


class _Latest:
    """The last joined product of a network. Not a module, because setting a module's attributes is slow in torch."""

    by: nn.Module | None = None
    hidden: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class _Joined(nn.Module):
    """Several linear layers with the same input as one layer with concatenated weights and biases."""

    def __init__(self, layers: list[nn.Linear], latest: _Latest):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
        self.sizes, self.latest = [layer.out_features for layer in layers], latest

    def output(self, hidden: Tensor, number: int) -> Tensor:
        """Return the output of layer `number` for hidden states [R, T, d]."""
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
    """Join all joinable matrices of a network, layer by layer, so that a device never holds all weights twice."""
    latest = _Latest()
    for names in _TOGETHER:
        for module in [module for module in network.modules() if hasattr(module, names[0])]:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            plain = all(type(layer) is nn.Linear and type(layer.weight) is nn.Parameter for layer in layers)
            if plain and len({layer.bias is None for layer in layers}) == 1:
                joined = _Joined(layers, latest)
                for number, name in enumerate(names):
                    setattr(module, name, _Part(joined, number))
