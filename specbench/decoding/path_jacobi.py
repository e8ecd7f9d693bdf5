"""Several Jacobi windows per image; the window with most accepted drafts is committed (PathSpec, arXiv 2606.10492).

K independent chains of drafts, the paths, start at the last committed token, in one forward as a tree. Each is verified
with separate random numbers. The path with the most accepted drafts, the first on ties, is committed with its
replacement or bonus token. Every path keeps its refined tail as the drafts of the next step.

Lossy for K > 1: the choice of the path depends on its coins. The authors call this PathExplore, "without relaxation";
the rule follows their released code. With a single path it is SJD.
"""

import torch
from torch import Tensor

from specbench.decoding.draft_tree import columns_by_path, independent_paths
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.loop import Loop
from specbench.decoding.verification.chain_verification import verify_chain


class PathJacobi:
    """K Jacobi chains per image. The row of path k of image b is b K + k; path 0 has the noise of the image. `chains`:
    the latest proposal, a chain [B K, W] per row."""

    def __init__(self, context: Context, init: Init, window: int, paths: int):
        self.window, self.paths = window, paths
        self.columns = 1 + paths * (window - 1)
        self._jacobi = Jacobi(context, init, window)

    def begin(self, batch: Batch) -> None:
        self.noise = batch.noise.branched(self.paths)
        self._tokens = batch.tokens.repeat_interleave(self.paths, 0)
        self._jacobi.begin(batch._replace(noise=self.noise, tokens=self._tokens))

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        committed, step = (x.repeat_interleave(self.paths, 0) for x in (committed, step))
        self.chains = self._jacobi.propose(committed, width, step)
        tokens, positions = (x.unflatten(0, (-1, self.paths)) for x in (self.chains.tokens, self.chains.positions))
        root, drafts = (tokens[:, 0, :1], positions[:, 0, :1]), (tokens[..., 1:], positions[..., 1:])
        pairs = zip(root, drafts, strict=True)
        tokens, positions = (torch.cat([first, later.mT.flatten(1)], 1) for first, later in pairs)
        return Proposal(tokens, positions, self.chains.q, independent_paths(self.paths, width - 1), self.columns)

    def observe_paths(
        self, verified: Verification, chosen: Verification, positions: Tensor, shift: Tensor, keep_tail: bool
    ) -> None:
        """Update all rows with their outcomes. `chosen`: outcome of each image's committed path. The first `shift` [B]
        of its slots `positions` [B, T] are committed."""
        place = positions.repeat_interleave(self.paths, 0)
        same = torch.arange(positions.shape[1], device=shift.device) <= chosen.first[:, None]
        same, tokens = (x.repeat_interleave(self.paths, 0) for x in (same, chosen.tokens))
        self._tokens.scatter_(1, place, torch.where(same, tokens, verified.tokens))
        self._jacobi.observe(verified, place, shift.repeat_interleave(self.paths), keep_tail)


def longest_path(first: Tensor) -> Tensor:
    """Return the number [B] of the path with the most accepted drafts `first` [B, K]; ties take the first."""
    paths = first.shape[1]
    return (first * paths - torch.arange(paths, device=first.device)).argmax(1)


class PathLoop(Loop):
    """The draft-and-verify loop with the drafts of a `PathJacobi`."""

    _drafter: PathJacobi

    def _commit(self, logits: Tensor, proposal: Proposal) -> None:
        drafter, chains, device = self._drafter, self._drafter.chains, logits.device
        width = chains.positions.shape[1]
        columns = columns_by_path(drafter.paths, width - 1, device)
        p = self._target(logits, proposal.positions)[:, columns].flatten(0, 1)
        steps = self.steps.repeat_interleave(drafter.paths, 0)
        verified = verify_chain(p, chains, self._verifier, self._refinement, drafter.noise, steps)
        # Drafts past the end of the image do not count: their number depends on the other rows of the batch.
        left = (self._length - self.committed)[:, None]
        path = longest_path(verified.first.unflatten(0, (-1, drafter.paths)).minimum(left))
        rows = torch.arange(len(path), device=device) * drafter.paths + path
        chosen = Verification(
            first=verified.first[rows],
            columns=verified.columns[rows],
            tokens=verified.tokens[rows],
            p=verified.p[rows],
            tested=verified.tested[rows],
            accepted=verified.accepted[rows],
            facts={name: fact[rows] for name, fact in verified.facts.items()},
        )
        positions = self.committed[:, None] + torch.arange(width, device=device)
        tested = chains._replace(tokens=chains.tokens[rows], positions=positions, q=chains.q[rows], earlier=None)
        shift = self._commit_chain(chosen, tested, columns[path] if proposal.branches else None)
        drafter.observe_paths(verified, chosen, positions, shift, self._refinement.keeps_tail)
        self.committed = self.committed + shift
