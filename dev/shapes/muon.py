"""Muon: momentum, orthogonalized by a Newton-Schulz iteration, for the matrices of a transformer's blocks.

After Keller Jordan's https://github.com/KellerJordan/Muon (MIT), in bfloat16 and batched over matrices of equal shape.
"""

from collections import defaultdict

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Matrices [N, rows, columns] with their singular values moved to about 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum followed by `orthogonalize`; `lr` is the spectral size of a step on a square matrix."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                steps = []
                for p in params:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    steps.append(p.grad.lerp(momentum, group["momentum"]))
                scale = max(1, shape[0] / shape[1]) ** 0.5
                moves = orthogonalize(torch.stack(steps)).unbind()
                torch._foreach_add_(params, list(moves), alpha=-group["lr"] * scale)
