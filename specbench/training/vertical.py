"""Loss of a vertical head: cross-entropy between the target's distribution of a slot and the head's, as it drafts.

Every image is cut at random into runs of consecutive slots, as long as the drafts of a step; within a run the head
knows the features of the slots before it, and all earlier tokens. Without guidance, as the EAGLE head's loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.models.transformer.model import TransformerModel
from specbench.models.vertical_head import VerticalHead, new_vertical_head, slots_above, surroundings
from specbench.models.vertical_head_size import vertical_hidden
from specbench.training.data import Examples

LONGEST_RUN = 32


def untrained_vertical(model: TransformerModel, seed: int) -> VerticalHead:
    """New vertical head for `model`."""
    return new_vertical_head(model.feature_size, vertical_hidden(model.feature_size), seed)


def vertical_losses(
    model: TransformerModel, head: VerticalHead, batch: Examples, draw: torch.Generator
) -> dict[str, Tensor]:
    """Loss of one batch; `draw` cuts the images."""
    ids, features = (x.to(model.device) for x in stream_of(batch, model.layout.length))
    slots = torch.arange(model.layout.length, device=model.device).expand_as(ids)
    starts = run_starts(len(ids), ids.shape[1], draw).to(model.device)
    above = slots_above(model.layout).to(model.device)
    around = surroundings(features, ids, model.token_table().float(), above, starts, slots)
    guess = head(around, slots - starts).to(model.dtype)
    wanted = model.head(features.to(model.dtype)).float().softmax(-1)
    found = model.head(guess).float().log_softmax(-1)
    free = (torch.tensor(model.layout.forced, device=model.device) < 0).float()
    return {"loss": -((wanted * found).sum(-1) * free).sum() / (free.sum() * len(ids))}


def stream_of(batch: Examples, length: int) -> tuple[Tensor, Tensor]:
    """Ids [n, N] of the stream tokens, and features [n, N, d] that predict them."""
    place = batch.prompt[:, None] + torch.arange(length)
    before = (place - 1)[..., None].expand(-1, -1, batch.features.shape[-1])
    return batch.ids.gather(1, place), batch.features.gather(1, before).float()


def run_starts(images: int, length: int, draw: torch.Generator) -> Tensor:
    """[n, N] first slot of the run that each slot lies in; lengths and offsets of the runs are drawn for each image."""
    run = torch.randint(1, LONGEST_RUN + 1, (images, 1), generator=draw)
    offset = torch.randint(0, LONGEST_RUN, (images, 1), generator=draw) % run
    slots = torch.arange(length)
    return (slots - (slots - offset) % run).clamp(min=0)
