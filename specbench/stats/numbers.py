"""Numbers of a run in reports: the function that defines each number, with its definition in words, unit, better
direction, interval and required rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import pandas as pd

Better = Literal["lower", "higher"]
Needs = Literal["images", "tokens", "traces", "batches", "second stage", "bias of acceptance alone", "pairs", "other"]
"""Required rows of a number, in this order: all; rows with measured tokens; with traces; of batches above 1; with a
second stage; of a decoder whose only bias is its acceptance; paired with rows of AR. `other`: the number needs other
arguments and is not in `NUMBERS`."""
Given = ParamSpec("Given")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Number(Generic[Given, Value]):
    """A number of a run, named after the function that defines it; called like this function."""

    compute: Callable[Given, Value]
    definition: str  # heading, colon and meaning; printed below tables
    unit: str = ""
    better: Better | None = None
    # A mean has an interval, and exactly one of these: values per image, a ratio of two columns, or two other totals.
    per_image: Callable[[pd.DataFrame], pd.Series] | None = None
    ratio: tuple[str, str] | None = None
    totals: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]] | None = None
    bounded: bool = False  # whether `compute` returns an Estimate, whose bounds are further columns
    type: str = "double"  # type of the number's column in parquet files
    of: Needs = "images"

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Value:
        return self.compute(*args, **kwargs)

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


def define(
    definition: str, unit: str = "", better: Better | None = None, of: Needs = "images", **facts: Any
) -> Callable[[Callable[Given, Value]], Number[Given, Value]]:
    """Turn a function into a `Number`; `facts`: its other fields."""
    return lambda compute: Number(compute, definition, unit, better, of=of, **facts)
