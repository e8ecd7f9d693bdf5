"""Means and ratios that are None instead of undefined."""

from __future__ import annotations

import pandas as pd


def mean(values: pd.Series) -> float | None:
    """Mean of the non-missing values; None if there are none."""
    found = values.mean()
    return None if pd.isna(found) else float(found)


def ratio_or_none(top: float, bottom: float) -> float | None:
    """Quotient; None if a value is missing or `bottom` is 0."""
    return None if pd.isna(top) or pd.isna(bottom) or not bottom else float(top / bottom)
