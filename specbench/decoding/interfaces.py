"""What drafters, verification and the loop hand each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from specbench.decoding.draft_tree import routes
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Target
from specbench.models.interface import Session, Tree
from specbench.models.transformer.compilation import call_eager


class Batch(NamedTuple):
    """What a drafter works on.

    Attributes:
        session: of the target, whose last forward verified this drafter's last proposal.
        target: turns guided logits into distributions.
        noise: of the rows.
        tokens: [B, L] stream tokens: committed ones, then drafts; the loop keeps it up to date.
        call: `call(fn, *args)` runs fn eagerly or as a compiled function.
    """

    session: Session
    target: Target
    noise: Noise
    tokens: Tensor
    call: Callable = call_eager


class Proposal(NamedTuple):
    """One target forward: C columns per row, column 0 being the root, which consumes the last committed token.

    Attributes:
        tokens: [B, C] token each column consumes.
        positions: [B, C] stream slot each column predicts.
        q: [B, C, V] proposal distribution of each column's first child; later siblings are drawn from it without
            replacement. Undefined in columns without a draft after them.
        tree: the columns' shape.
        max_columns: the most columns a forward of this drafter has.
    """

    tokens: Tensor
    positions: Tensor
    q: Tensor
    tree: Tree
    max_columns: int

    @property
    def branches(self) -> Tree | None:
        """The tree as a session takes it: None for a chain."""
        return None if routes(self.tree, self.tokens.device).is_chain else self.tree


class Drafter(Protocol):
    """Attributes: window, the most slots one step can commit; columns, the most a forward can have.

    One that can also give rows to other images while their neighbours go on has `restart(rows [K])`, which makes them
    what they were after `begin`; see `specbench.decoding.continuous_batching`.
    """

    window: int
    columns: int

    def begin(self, batch: Batch) -> None:
        """A new batch of images, with nothing committed yet."""
        ...

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        """The forward of one step that can commit at most `width` slots after the `committed` [B] ones; it is the
        `step`-th [B, 1] of each row."""
        ...

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        """What became of the proposal: `shift` [B] of its slots `positions` [B, T] are committed now."""
        ...


class Verification(NamedTuple):
    """What one step's verification decided. T slots of a path, slot j of a row being stream slot n + j; C columns.

    Attributes:
        first: [B] slot whose token no draft gave: slots before it hold accepted drafts.
        columns: [B, T] the columns that predict the path's slots; beyond `first` those a tail is refined from.
        tokens: [B, T] accepted drafts, then the replacement or bonus at `first`, then refined drafts.
        p: [B, T, V] target distribution of each slot; beyond `first` possibly of an abandoned branch (still a legal
            law to draft from: it looks at earlier slots only).
        tested, accepted: [B, C] bool, drafts by the column that consumes them.
        facts: [B, C] the verifier's numbers about each tested draft.
    """

    first: Tensor
    columns: Tensor
    tokens: Tensor
    p: Tensor
    tested: Tensor
    accepted: Tensor
    facts: dict[str, Tensor]
