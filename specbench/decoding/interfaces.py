"""Types that drafters, verification and the decode loops exchange, and the `Context` that components are built from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Target
from specbench.models.interface import Call, Session, TokenLayout, Tree
from specbench.models.transformer.compilation import call_eager


class Batch(NamedTuple):
    """One batch of images, as a drafter sees it."""

    # the target's session, for draft heads a `FeatureSession`; its latest forward verified this drafter's last proposal
    session: Any
    target: Target  # turns guided logits into distributions
    noise: Noise  # random numbers of the rows
    tokens: Tensor  # [B, L] committed tokens, then drafts; the loop keeps it up to date
    call: Call = call_eager  # `call(fn, *args)` runs fn eagerly or as a compiled function


class Earlier(NamedTuple):
    """Distributions of the D drafts of the previous step. B rows."""

    q: Tensor  # [B, D, V]
    start: Tensor  # [B] index in `q` of this step's first slot
    drafts: Tensor  # [B] number of this step's slots, from the first on, that had a draft in the previous step


class Proposal(NamedTuple):
    """A target forward of C tokens (columns) per row: column 0, the root, is the last committed token."""

    tokens: Tensor  # [B, C] token each column consumes
    positions: Tensor  # [B, C] stream slot each column predicts
    # [B, C', V] distribution that the draft after each column was drawn from; later siblings are drawn from it without
    # replacement. C' is C for a tree and C - 1 for a chain, whose last column has no draft after it. Undefined for
    # leaves of a tree.
    q: Tensor
    tree: Tree  # parents of the columns
    max_columns: int  # maximum C of this drafter's proposals
    # if drafts are kept between steps: their distributions in the previous step, only for the recorder
    earlier: Earlier | None = None

    @property
    def branches(self) -> Tree | None:
        """The tree for `Session.forward`: None for a chain."""
        return None if self.tree.is_chain else self.tree


class Verification(NamedTuple):
    """Outcome of one step of C tokens (columns). The verified path has T slots, from the first uncommitted slot on."""

    first: Tensor  # [B] slot of the replacement or bonus token; slots before it hold accepted drafts
    columns: Tensor  # [B, T] columns that predict the path's slots; beyond `first`, the refined tail is drawn from them
    tokens: Tensor  # [B, T] accepted drafts, then the replacement or bonus token at `first`, then refined drafts
    # [B, T, V] target distribution of each slot. Beyond `first` it may come from a rejected branch, which is a valid
    # distribution to draft from, because it depends on earlier slots only.
    p: Tensor
    # tested, accepted: [B, C - 1] bool, by draft: entry d is the draft that column d + 1 consumes
    tested: Tensor
    accepted: Tensor
    facts: dict[str, Tensor]  # [B, C - 1] the verifier's numbers about each tested draft, by name
    refined_from: Tensor | None = None  # [B, T, V] distributions of the refined drafts; None means p


class Drafter(Protocol):
    """Proposes the tokens of each target forward."""

    window: int  # maximum number of slots that one step commits
    columns: int  # maximum number of columns of a forward

    def begin(self, batch: Batch) -> None:
        """Start a new batch of images, with nothing committed yet."""
        ...

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        """Propose a forward that commits at most `width` slots after `committed` [B] tokens. `step` [B, 1]: number of
        the forward."""
        ...

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        """Update after verification: the first `shift` [B] of the slots `positions` [B, T] are committed."""
        ...


@runtime_checkable
class RestartableDrafter(Drafter, Protocol):
    """A drafter that can give rows to other images while the other rows continue (continuous batching)."""

    def restart(self, rows: Tensor) -> None:
        """Reset `rows` [K] to their state after `begin`."""
        ...


@runtime_checkable
class OwnSessionDrafter(Drafter, Protocol):
    """A drafter that needs a special KV cache of the target."""

    def open(self, prefix: Any, guidance: float) -> Session:
        """Prefill the KV cache for a batch, as `ImageModel.begin` does."""
        ...


class DecodeLoop(Protocol):
    """State of a batch while it is decoded; `specbench.decoding.loop.begin` lists the constructor's arguments."""

    tokens: Tensor  # [B, L] stream tokens; the first N are the image when `run` returns
    recorder: Any  # a `StepRecorder`, or a `NoRecorder`

    def run(self, slot: int = 0) -> Iterator[Tensor]:
        """Decode every row to its end, and yield the committed tokens, [B] or [B, image rows], after each step.

        Args:
            slot: stream slot to begin at, as if all earlier slots were committed; used by warm-ups.
        """
        ...

    def warm_up_slots(self) -> list[int]:
        """Return stream slots, including the first: a few steps from each of them use all input shapes of an image."""
        ...


Acceptance = Callable[[Tensor, Tensor, Tensor], Tensor]  # a(x; p, q) [..., n] of p, q [..., V] and tokens x [..., n]
Residual = Callable[[Tensor, Tensor, Any], Tensor]
"""Residual distribution of p, q and the `Acceptance`, see `specbench.decoding.verification.ratio_tests`."""


@dataclass(frozen=True)
class Context:
    """Arguments of a component: facts of the model, and the decoder's residual distribution."""

    layout: TokenLayout  # grammar of the token stream
    # [v_image, d] float32 embedding of each image token for distance rules; None if the model has none, and then no
    # option needs it (`Option.without_codebook`)
    codebook: Any
    device: torch.device  # device of the target
    residual: Residual  # residual distribution after a rejection
    drafts: int = 0  # maximum draft depth of a step, set by the drafter; 0 while the drafter is built
    model: Any = None  # the target, an `ImageModel`; draft heads need further methods, see `specbench.models.interface`
