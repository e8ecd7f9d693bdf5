"""Means and ratios that are missing where there is nothing to divide."""

from __future__ import annotations

import pandas as pd


def mean(values: pd.Series) -> float | None:
    """Mean of what is not missing; None of nothing."""
    found = values.mean()
    return None if pd.isna(found) else float(found)


def ratio(top: float, bottom: float) -> float | None:
    """None where either is missing or `bottom` is 0."""
    return None if pd.isna(top) or pd.isna(bottom) or not bottom else float(top / bottom)
