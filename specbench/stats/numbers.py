"""Numbers of a run in reports: the function and the rows that define each number, and whether it has an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

IMAGES, TOKENS, TRACES, SECOND_STAGE = "images", "tokens", "traces", "second stage"
ACCEPTANCE_BIAS = "bias of the acceptance alone"


@dataclass(frozen=True)
class Number:
    """A number of a run, named after the function that defines it; its unit is in `store/schema.toml`."""

    compute: Callable[[pd.DataFrame], object]  # function of `specbench.stats`
    # A mean has an interval, and exactly one of these: values per image, a ratio of two columns, or two other totals.
    per_image: Callable[[pd.DataFrame], pd.Series] | None = None
    ratio: tuple[str, str] | None = None
    totals: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]] | None = None
    bounded: bool = False  # whether `compute` returns an Estimate
    # rows that the number needs: all, with measured tokens, with traces, with a second stage, or of a decoder whose
    # only bias is its acceptance
    of: str = IMAGES

    @property
    def name(self) -> str:
        """The key in reports."""
        return self.compute.__name__

    def sides(self, rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
        """Return numerator and denominator of a mean, per image."""
        if self.per_image:
            return self.per_image(rows), pd.Series(1.0, rows.index)
        if self.totals:
            return self.totals(rows)
        top, bottom = self.ratio or ("", "")
        return rows[top], rows[bottom]
