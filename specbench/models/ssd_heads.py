"""Draft heads of SSD (arXiv 2606.20543): one for each of several distances to the right and below.

With f_s the target's hidden state that predicts slot s and e the token embeddings, a head predicts the hidden state at
its distance from that slot and its token:

    z = W0 [f_s; e(x_s)],  f^ = z + down(silu(gate n) * up n),  n = RMSNorm(z),  logits = target.head(f^)

The paper predicts hidden states before the target's last norm; here they are those after it, which sessions give and
the output matrix reads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from specbench.models.draft_head import HeadLoading
from specbench.models.interface import TokenLayout, TokenTableModel
from specbench.models.vertical_head import load_layers, save_layers

RIGHT, BELOW = 5, 2
"""Largest distances to the right, in slots of the stream, and below, in image rows."""
_HEADS = RIGHT + BELOW


class SsdHeads(nn.Module):
    """The heads above, on hidden states and embeddings of `width` numbers; head k - 1 looks k to the right, head
    RIGHT + k - 1 looks k below."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.width, self.hidden = width, hidden
        shapes = {
            "mix": (2 * width, width),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
        }
        for name, (inputs, outputs) in shapes.items():
            weights = torch.randn(_HEADS, inputs, outputs) * inputs**-0.5
            setattr(self, name, nn.Parameter(weights))
        self.norm = nn.Parameter(torch.ones(_HEADS, width))

    def forward(self, seen: Tensor) -> Tensor:
        """Hidden states [..., H, d] of all H heads, of `seen` [..., 2d], hidden state and embedding of one slot."""
        mixed = torch.einsum("...i,hio->...ho", seen, self.mix)
        normed = functional.rms_norm(mixed, (self.width,)) * self.norm
        gate, up = (torch.einsum("...hi,hio->...ho", normed, weights) for weights in (self.gate, self.up))
        return mixed + torch.einsum("...hi,hio->...ho", functional.silu(gate) * up, self.down)


def seen_from(layout: TokenLayout) -> Tensor:
    """[H, N] slot that each head looks at to predict each stream slot, -1 where there is none."""
    slots = range(layout.length)
    right = [[max(slot - distance, -1) for slot in slots] for distance in range(1, RIGHT + 1)]
    return torch.tensor(right + [layout.neighbour(rows, 0) for rows in range(1, BELOW + 1)])


def new_ssd_heads(width: int, hidden: int, seed: int) -> SsdHeads:
    """Untrained heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SsdHeads(width, hidden)


def ssd_heads_for(model: object, path: str) -> SsdHeads:
    """Load the heads in folder or hub id `path`, or the model's own ones if that is empty, for `model`.

    Raises:
        SpecbenchError: exit code 5 if there are none; the files are not of such heads of this model.
    """
    return _SSD.ready(model, path)


load_ssd_heads = partial(load_layers, SsdHeads, "ssd")
save_ssd_heads = partial(save_layers, "ssd")
_SSD = HeadLoading(
    TokenTableModel, lambda model: getattr(model, "own_ssd_heads", lambda: None)(), load_ssd_heads, lambda h: h.width
)
