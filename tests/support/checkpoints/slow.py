"""Forwards to compare with: of whole networks of transformers, and layers written out."""

from collections.abc import Callable, Mapping, Sequence

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


def meta_shapes(words: int, width: int, inner: int, layers: int, attention: Mapping[str, tuple]) -> dict[str, tuple]:
    """Shapes of a Llama's tensors under Meta's names; `attention`: those of its attention, but for the output."""
    layer = {f"attention.{name}": shape for name, shape in attention.items()} | {"attention.wo.weight": (width, width)}
    layer |= {f"feed_forward.{name}.weight": (inner, width) for name in ("w1", "w3")}
    layer |= {"feed_forward.w2.weight": (width, inner), "attention_norm.weight": (width,), "ffn_norm.weight": (width,)}
    shapes = {"tok_embeddings.weight": (words, width), "output.weight": (words, width), "norm.weight": (width,)}
    return shapes | {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}


def meta_layers(tensors: Mapping[str, Tensor], x: Tensor, attention: Callable) -> Tensor:
    """Last hidden states of inputs [T, d] by layers under Meta's names; `attention(weights, x)`: with its weights."""
    for number in range(1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))):
        start = f"layers.{number}."
        layer = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        weights = {
            name.split(".", 1)[1].removesuffix(".weight"): tensor for name, tensor in layer.items() if "." in name
        }
        x = x + attention(weights, rms(x, layer["attention_norm.weight"]))
        x = x + gated(rms(x, layer["ffn_norm.weight"]), *(weights[f"w{part}"] for part in (1, 3, 2)))
    return rms(x, tensors["norm.weight"])
