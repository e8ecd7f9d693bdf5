"""AR sampling with a KV cache of a few image rows; `specbench.models.transformer.line_session` says which."""

from __future__ import annotations

from typing import Any

from specbench.decoding.drafters.jacobi import NoDraft
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Context
from specbench.errors import SpecbenchError
from specbench.models.interface import Session
from specbench.models.transformer.line_session import Lines, LineSession, line_width


class LineCache(NoDraft):
    """No drafts; tokens attend to what the cache has kept, so that p is another one than AR's."""

    restart = None
    """All rows are at the same slot, so that none can start another image alone."""

    def __init__(self, context: Context, init: Init, anchor_rows: int, middle_rows: int, recent_rows: int):
        super().__init__(context, init)
        width = line_width(context.model)
        if width is None:
            raise SpecbenchError(
                f"a cache by image rows does not fit '{getattr(context.model, 'name', 'this model')}'",
                "it needs Llama's layers and one grid of equal rows, as shapes and llamagen have",
            )
        self._lines = Lines(width, anchor_rows, middle_rows, recent_rows)
        self._model = context.model

    def open(self, prefix: Any, guidance: float) -> Session:
        """Prefill a session with such a cache."""
        return LineSession(self._model, prefix, guidance, self._lines)
