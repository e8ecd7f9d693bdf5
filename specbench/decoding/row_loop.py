"""What the decode loops of several image rows in parallel (`zipar`, `row_jacobi`) have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbench.decoding.noise import Noise
from specbench.decoding.recorder import StepRecorder
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.models.interface import ScatteredSession

if TYPE_CHECKING:
    from specbench.decoding.build import Method


class ImageRowLoop:
    """State and steps of such a loop. B images, H rows of W tokens, N stream slots.

    Subclasses choose the columns of each forward (`_columns`) and commit their tokens (`_commit`).

    Attributes:
        tokens: [B, N + 1] by stream slot.
        count: [B, H] committed tokens of each image row.
        recorder: measurements of the batch.
    """

    def __init__(
        self,
        method: Method,
        session: ScatteredSession,
        target: Target,
        noise: Noise,
        rows: int,
        spans: Spans,
        call: Callable,
    ):
        """`method.drafter` has the `slots` [H, W] of the image tokens. `call` is not used: steps run eagerly, because
        the width of a forward depends on drawn tokens."""
        self._plan: Any = method.drafter
        self._session, self._target, self._noise, self._spans = session, target, noise, spans
        device = target.forced.device
        self._length = len(target.forced) - 1
        height, self._width = self._plan.slots.shape
        self.tokens = target.forced.clamp(min=0).expand(rows, -1).clone()
        self.count = torch.zeros(rows, height, dtype=torch.long, device=device)
        self._fed = torch.zeros(rows, self._length + 1, dtype=torch.bool, device=device)
        """Slots whose columns consumed tokens that later columns attend to."""
        self._closed = torch.zeros(rows, height, dtype=torch.bool, device=device)
        """Image rows whose last token has been fed."""
        self.recorder = StepRecorder(rows, self._length, 1, target.forced)

    def run(self) -> None:
        """Decode all images."""
        step = self.count.new_zeros(len(self.count), 1)
        while True:
            with self._spans("draft"):
                columns = self._columns(step + 1)
            if columns is None:
                return
            step = step + 1
            positions = columns.positions.flatten(1)
            with self._spans("target"):
                aside = columns.aside.flatten(1)
                logits = self._session.forward_scattered(
                    columns.tokens.flatten(1), positions, self._visible(columns), aside
                )
            with self._spans("verify"):
                self.recorder.count_forward((self.count < self._width).any(1))
                self._commit(self._target(logits, positions), columns, step)

    def _columns(self, step: Tensor) -> Any:
        """Columns of the `step`-th [B, 1] forward, with `tokens`, `positions` and `aside` as
        `ScatteredSession.forward_scattered` takes them but for their shape [B, ...]; None if all images are complete.
        """
        raise NotImplementedError

    def _visible(self, columns: Any) -> Tensor:
        """Slots that the columns attend to, as `ScatteredSession.forward_scattered` takes them."""
        return self._fed

    def _commit(self, p: Tensor, columns: Any, step: Tensor) -> None:
        """Choose tokens, given p [B, T, V] of the columns in one row, record and commit them."""
        raise NotImplementedError
