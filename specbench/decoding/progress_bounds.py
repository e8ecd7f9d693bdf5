"""Host-side bounds on committed tokens: the host synchronises with the device only when they cannot decide."""

from __future__ import annotations

from torch import Tensor

from specbench.models.transformer.host_sync import to_host


class CommittedBounds:
    """Bounds on the committed tokens of the slowest row, when a step commits 1 to `most` of `length` tokens per row.

    AR needs no host sync; a window of W one per W / (tokens per step) steps, and one per step in the last window.

    Attributes:
        behind: lower bound on the tokens that the slowest row has committed.
    """

    def __init__(self, length: int, most: int):
        self.behind = 0
        self._ahead = 0
        self._length, self._most = length, most

    @property
    def done(self) -> bool:
        """Whether every row is complete."""
        return self.behind >= self._length

    def step(self, committed: Tensor) -> None:
        """Update the bounds for a queued step; `committed` [B]: tokens per row after it."""
        self.behind += 1
        self._ahead += self._most
        if self.behind < self._length <= self._ahead:
            self.behind = self._ahead = min(to_host(committed))
