"""What reports know of the numbers of a run: what computes each, from which rows, and which have an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

IMAGES, TOKENS, TRACES, SECOND_STAGE = "images", "tokens", "traces", "second stage"
ACCEPTANCE_BIAS = "bias of the acceptance alone"


@dataclass(frozen=True)
class Number:
    """A number of a run. It has the name of the function that defines it, and its unit in `store/schema.toml`."""

    compute: Callable[[pd.DataFrame], object]  # function of `specbench.stats`
    # Of a mean, which has an interval, one of three: a value per image, a ratio of two columns, or of other totals.
    per_image: Callable[[pd.DataFrame], pd.Series] | None = None
    ratio: tuple[str, str] | None = None
    totals: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]] | None = None
    bounded: bool = False  # whether `compute` returns an Estimate
    # of which rows it is: all, those with measured tokens, traces, those with a second stage, or those of a decoder
    # that is lossy by its acceptance alone
    of: str = IMAGES

    @property
    def name(self) -> str:
        """The key in reports."""
        return self.compute.__name__

    def sides(self, rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
        """The two totals of a mean, per image."""
        if self.per_image:
            return self.per_image(rows), pd.Series(1.0, rows.index)
        if self.totals:
            return self.totals(rows)
        top, bottom = self.ratio or ("", "")
        return rows[top], rows[bottom]
