"""A drafter: every draft is a copy of the token one row above it in the image grid."""

import torch

from specbench.decoding.draft_tree import chain
from specbench.decoding.interfaces import Proposal
from specbench.decoding.sampling import one_hot
from specbench.specs.components import DRAFTERS, Component
from specbench.specs.options import Option
from specbench.specs.presets import Preset


class RowAbove:
    def __init__(self, context, init, window):
        self.window = self.columns = window  # the most tokens one step can commit, the most columns of one forward
        above = context.layout.neighbour(rows=1, columns=0)  # per slot of the stream the slot above it, or -1
        self._above = torch.tensor(above, device=context.device)

    def begin(self, batch):
        """A new batch of images, with nothing committed yet."""
        self._batch = batch

    def propose(self, committed, width, step):
        """The next forward. committed: [B] tokens so far; at most `width` tokens can be committed by this step."""
        tokens, target = self._batch.tokens, self._batch.target
        positions = committed[:, None] + torch.arange(width, device=committed.device)  # [B, width] slots predicted
        slots = positions[:, :-1]  # [B, width - 1] slots that get a draft
        source = self._above[slots.clamp(max=len(self._above) - 1)]
        source = torch.where((source >= 0) & (source < committed[:, None]), source, committed[:, None] - 1)
        draft = tokens.gather(1, source.clamp(min=0))
        if target.has_grammar:  # some models force certain slots, for example row ends
            forced = target.forced_at(slots)
            draft = torch.where(forced >= 0, forced, draft)
        tokens.scatter_(1, slots, draft)
        q = one_hot(draft, target.vocab)  # [B, width - 1, V]; a copy is drawn from a one-hot q
        consumed = tokens.gather(1, (positions - 1).clamp(min=0))
        return Proposal(consumed, positions, q, chain(width), self.columns)

    def observe(self, verification, positions, shift, keep_tail):
        """The outcome of the proposal; this drafter learns nothing from it."""

    def restart(self, rows):
        """Rows of the batch go on with other images; nothing is remembered about the old ones."""


WINDOW = Option("window", 8, "tokens fed per target forward", minimum=1, maximum=65536)
DRAFTERS["row-above"] = Component(
    "toy_plugin.row_above:RowAbove", "copies of the row above", (WINDOW,), ignores=("init",)
)
DECODER = Preset(
    "row-above",
    "speculative decoding that drafts the row above",
    paper="-",
    equation="-",
    choices={
        "drafter": "row-above",
        "init": "uniform",
        "verifier": "exact",
        "residual": "standard",
        "refine": "restart",
    },
)
