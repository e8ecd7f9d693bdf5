"""The head of a causal language model of transformers for its image tokens, as its own forward applies it.

The forward itself runs all operations after the last hidden states (biases, scalings, soft caps, further layers), in a
copy of the network whose base model returns given hidden states.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class OwnHead(NamedTuple):
    module: nn.Module  # gives logits [R, T, V] of hidden states [R, T, d]
    selected: bool  # whether `module` gives the logits of the image tokens only
    matrix: Tensor | None  # [v_image, d] if the head is only the product with this matrix, else None
    masked: bool  # whether the network's own forward hides the image tokens


def own_head(network: Any, image_ids: Tensor, hidden: Tensor) -> OwnHead:
    """Build the head for image tokens only, if this gives the same logits. `hidden`: [1, T, d] last hidden states."""
    scales = 10.0 ** torch.arange(hidden.shape[1], device=hidden.device)[None, :, None]  # large logits show soft caps
    draw = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    sample = draw.to(hidden.device) * scales
    after = AfterBase(network)
    expected = after(sample.to(hidden.dtype))[..., image_ids]
    output = network.get_output_embeddings()
    if bool((expected <= torch.finfo(expected.dtype).min / 2).all()):
        return OwnHead(output, False, None, True)
    weight: Any = getattr(output, "weight", None)
    bias: Any = getattr(output, "bias", None)
    if type(output) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta:
        matrix, some = weight[image_ids], None if bias is None else bias[image_ids]
        few = AfterBase(network, {output: _linear(matrix, some)})
        with suppress(Exception):  # the forward may depend on the size of the vocabulary
            if _agree(few(sample.to(hidden.dtype)), expected, 4 * torch.finfo(expected.dtype).eps):
                plain = hidden.dtype == matrix.dtype and _is_product(network, output, matrix, some, sample)
                return OwnHead(few, True, matrix if plain else None, False)
    return OwnHead(after, False, None, False)


def _is_product(network: Any, output: nn.Module, matrix: Tensor, bias: Tensor | None, sample: Tensor) -> bool:
    """Return whether the head is only the product with its matrix, by a test of the network's forward in float32."""
    exact = _linear(matrix.float(), None if bias is None else bias.float())
    with suppress(Exception):  # layers before the matrix may refuse float32
        return _agree(AfterBase(network, {output: exact})(sample), sample @ matrix.float().T, 1e-5)
    return False


def _agree(found: Tensor, expected: Tensor, rounding: float) -> bool:
    """Return whether logits [1, T, V] are equal up to `rounding` times the largest logit of each column."""
    scale = expected.abs().amax(-1, keepdim=True)
    return found.shape == expected.shape and bool(((found - expected).abs() <= rounding * scale).all())


def _linear(matrix: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(matrix.shape[1], len(matrix), bias is not None, device="meta")
    made.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


class _Hidden(nn.Module):
    """A base model that returns given hidden states."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.__dict__.update(base=base, hidden=None)  # so `base` is no submodule

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["base"], name)
        # Some networks call `model.decoder(...)` instead of `model(...)`.
        return self if isinstance(value, nn.Module) and not isinstance(value, nn.Embedding) else value

    def forward(self, *arguments: Any, **options: Any) -> _Outputs:
        return _Outputs([vars(self)["hidden"]])


class _Outputs(tuple[Any, ...]):
    """Hidden states as a base model returns them; every other field is None."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


def base_of(network: Any) -> nn.Module:
    for base in (network.base_model, getattr(network, "model", network)):
        if base is not network:
            return base
    raise TypeError("the network has no base model below its head")


class AfterBase(nn.Module):
    """The network's forward from hidden states [R, T, d] to logits. `replaced`: substitutes for its modules."""

    def __init__(self, network: Any, replaced: dict[nn.Module, nn.Module] | None = None):
        super().__init__()
        base = base_of(network)
        self.given = _Hidden(base)
        self.twin = _with_modules(network, {**(replaced or {}), base: self.given})

    def forward(self, hidden: Tensor) -> Tensor:
        self.given.__dict__["hidden"] = hidden
        return own_logits(self.twin, torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device))


def own_logits(network: nn.Module, ids: Tensor) -> Tensor:
    """Compute logits [R, T, words] by the network's forward of ids [R, T], without cache."""
    output = network(input_ids=ids, **accepted(network, use_cache=False))
    return output.logits if hasattr(output, "logits") else output[0]


def accepted(network: nn.Module, **options: Any) -> dict[str, Any]:
    """Select the `options` that a network's forward takes."""
    parameters = inspect.signature(network.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if anything or name in parameters}


def _with_modules(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module, sharing parameters and submodules except `replaced` modules and modules that contain them."""
    if module in replaced:
        return replaced[module]
    children = {name: child and _with_modules(child, replaced) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__ = dict(vars(module), _modules=children, _compiled_call_impl=None)
    if "forward" in vars(twin):  # a library that patches or places networks has set it on the instance
        patched = vars(twin).pop("forward")
        if isinstance(patched, MethodType):
            twin.forward = MethodType(patched.__func__, twin)
    return twin
