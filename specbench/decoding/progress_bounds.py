"""How far a batch is, as far as the host knows: bounds grow with every step, and it looks where they stop helping."""

from __future__ import annotations

from torch import Tensor

from specbench.models.transformer.host_sync import to_host


class CommittedBounds:
    """Bounds on the tokens of the slowest row, of `length`, when a step commits from 1 to `most` tokens a row.

    AR is never looked at; a window of W about once per W / (tokens per step) steps, and every step of the last window.

    Attributes:
        behind: tokens that the slowest row has at least.
    """

    def __init__(self, length: int, most: int):
        self.behind = 0
        self._ahead = 0
        self._length, self._most = length, most

    @property
    def done(self) -> bool:
        return self.behind >= self._length

    def step(self, committed: Tensor) -> None:
        """A step was queued, after which rows have `committed` [B] tokens."""
        self.behind += 1
        self._ahead += self._most
        if self.behind < self._length <= self._ahead:
            self.behind = self._ahead = min(to_host(committed))
