"""Forwards to compare with: of whole networks of transformers, and layers written out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Under transformers' names, of most small networks."""


def full_forward(network: nn.Module, prompt: Callable[[str, bool], list[int]], ids: Sequence[int]) -> Callable:
    """The `Tiny.logits` of a causal language model. `prompt(text, conditional)`: ids of a prompt; `ids`: ids of the
    stream tokens."""

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        start = prompt(text, conditional)
        return network(torch.tensor([start + [ids[token] for token in stream]])).logits[0, len(start) - 1 :]

    return logits


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(vector: Tensor, angles: Sequence[float]) -> Tensor:
    """Neighbouring pairs of a vector, each turned by its angle."""
    turn = torch.polar(torch.ones(len(angles)), torch.tensor(angles))
    return torch.view_as_real(torch.view_as_complex(vector.reshape(-1, 2).contiguous()) * turn).flatten()


def attended(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None = None) -> Tensor:
    """The output of an attention head for q, k, v [T, d]; `sees`: [T, T] bool, causal by default."""
    sees = torch.ones(len(q), len(q), dtype=torch.bool).tril() if sees is None else sees
    return (q @ k.T / q.shape[1] ** 0.5).masked_fill(~sees, -torch.inf).softmax(-1) @ v


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A SwiGLU layer with weights as `nn.Linear` has them."""
    return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
