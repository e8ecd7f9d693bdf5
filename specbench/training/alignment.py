"""Diagnosis of draft heads: total variation to the target by depth, and a check of the training pairs."""

import math

import torch
from torch import Tensor

from specbench.decoding.draft_tree import chain
from specbench.decoding.drafters.eagle import HeadCache, tree_levels
from specbench.decoding.sampling import Target
from specbench.models.draft_head import EagleHead
from specbench.models.transformer.model import TransformerModel
from specbench.models.vertical_head import VerticalHead, slots_above, surroundings
from specbench.specs.run_spec import Sampling
from specbench.system.torch_state import PinnedTorch
from specbench.training.data import Corpus, teacher_forced


@PinnedTorch()
def alignment(
    model: TransformerModel, head: EagleHead, images: Corpus, sampling: Sampling, depths: int = 5, starts: int = 8
) -> list[dict[str, object]]:
    """Measure the total variation between target and head after `starts` positions of each image. Both are guided and
    truncated as in decoding.

    Returns:
        For each depth: `depth`; `tv` (mean over images, positions and true continuations); `tv_low`, `tv_high` (95 %
        interval over images; None for one image); `acceptance` = 1 - tv, the acceptance rate of `exact` if all earlier
        drafts are accepted. The last row, `depth` "1, x_t", is for the pairs (f_t, x_t): if its `tv` is lower, the head
        was trained on the wrong pairs.
    """
    tokens = images.tokens.to(model.device)
    rows, length = tokens.shape
    session = model.tapped(head.taps).begin(model.encode(images.texts), sampling.guidance, length)
    features = teacher_forced(session, tokens)
    target = Target(model.layout, sampling, model.device)
    positions = torch.arange(length, device=model.device).expand(rows, -1)
    p = target(session.logits(features), positions)
    ids = model.table_ids(tokens)

    def seen_with(fed: Tensor) -> tuple[HeadCache, Tensor]:
        memory, slots = HeadCache(head, session, length, depths + 1), positions[:, :-1]
        return memory, memory.append(fed[:, :-1], features[:, :-1], slots, memory.readable(slots))

    memory, seen = seen_with(ids)
    free = torch.tensor(model.layout.forced, device=model.device) < 0

    def distance(ahead: Tensor, slots: Tensor) -> Tensor:
        """Return the mean total variation [B] over the free slots."""
        q = target(session.logits(head.read(ahead)), positions[:, slots])
        tv = (q - p[:, slots]).abs().sum(-1) / 2
        return (tv * free[slots]).sum(1) / free[slots].sum()

    chosen = torch.linspace(0, length - 1 - depths, starts, device=model.device).long()
    by_depth = [distance(seen, torch.arange(1, length, device=model.device))]
    ahead = [seen[:, start : start + 1] for start in chosen.tolist()]
    tree = tree_levels(chain(depths + 1), vocab=1, device=ids.device)
    for depth in range(2, depths + 1):
        for number, start in enumerate(chosen.tolist()):
            slots = (start + 1 + torch.arange(depths, device=ids.device)).expand(rows, -1)
            branches, fed = memory.branches(tree, slots, slots[:, :1]), ids[:, start + depth - 1 : start + depth]
            ahead[number] = memory.branch(branches, slice(depth - 1, depth), fed, ahead[number])
        by_depth.append(distance(torch.cat(ahead, 1), chosen + depth))
    table = [_row(str(depth), tv) for depth, tv in enumerate(by_depth, start=1)]
    shifted = torch.nn.functional.pad(ids[:, :-1], (1, 0))
    wrong = distance(seen_with(shifted)[1], torch.arange(1, length, device=model.device))
    return [*table, _row("1, x_t", wrong)]


@PinnedTorch()
def vertical_alignment(
    model: TransformerModel, head: VerticalHead, images: Corpus, sampling: Sampling, depths: int = 5, starts: int = 8
) -> list[dict[str, object]]:
    """Measure the total variation between target and vertical head; rows as in `alignment`, without the row of wrong
    pairs.

    Depth k is the k-th draft after the committed tokens. The tokens before it are true tokens.
    """
    tokens = images.tokens.to(model.device)
    rows, length = tokens.shape
    session = model.begin(model.encode(images.texts), sampling.guidance, length)
    features = teacher_forced(session, tokens)
    target = Target(model.layout, sampling, model.device)
    free = torch.tensor(model.layout.forced, device=model.device) < 0
    ids = model.table_ids(tokens).repeat(len(features) // rows, 1)
    chosen = torch.linspace(0, length - depths, starts, device=model.device).long()
    table = []
    for depth in range(1, depths + 1):
        slots = chosen + depth - 1
        places = slots.expand(len(features), -1)
        committed = chosen.expand(len(features), -1)
        above = slots_above(model.layout).to(model.device)
        seen = surroundings(features, ids, model.token_table(), above, committed, places)
        q = target(session.logits(head(seen, places - committed)), places[:rows])
        p = target(session.logits(features[:, slots]), places[:rows])
        tv = ((q - p).abs().sum(-1) / 2 * free[slots]).sum(1) / free[slots].sum()
        table.append(_row(str(depth), tv))
    return table


def _row(depth: str, tv: Tensor) -> dict[str, object]:
    mean, low, high = float(tv.mean()), None, None
    if len(tv) > 1:
        half = 1.96 * float(tv.std(unbiased=True)) / math.sqrt(len(tv))
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return {"depth": depth, "tv": mean, "tv_low": low, "tv_high": high, "acceptance": 1 - mean}
