"""What became of the drafts, and how far their laws were from the target distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from specbench.stats.ratios import mean, ratio


def acceptance(rows: pd.DataFrame) -> float | None:
    """Acceptance: draft tokens accepted over draft tokens the left-to-right scan reached, summed over all
    images, free slots only."""
    return ratio(_offset_totals(rows["accepted"]).sum(), _offset_totals(rows["tested"]).sum())


def acceptance_by_offset(rows: pd.DataFrame) -> list[float | None]:
    """Acceptance by offset: the same for each place of the window, counted from its first draft."""
    accepted, tested = _offset_totals(rows["accepted"]), _offset_totals(rows["tested"])
    return [ratio(yes, all_) for yes, all_ in zip(accepted, tested, strict=True)]


def draft_tv(rows: pd.DataFrame) -> float | None:
    """TV(p, q): total variation between the target distribution and the law that the draft tested against it was drawn
    from, mean over the tested drafts of images decoded with --trace."""
    return mean(_slots(rows["draft_tv"]))


def draft_top1(rows: pd.DataFrame) -> float | None:
    """Top-1 of q: largest probability of the law that a tested draft was drawn from, mean as TV(p, q)."""
    return mean(_slots(rows["draft_top1"]))


def draft_tv_by_offset(rows: pd.DataFrame) -> list[float | None]:
    """TV(p, q) by offset: the same for each place of the window, counted from its first draft."""
    by_offset = _slots(rows["draft_tv"]).groupby(_slots(rows["committed_step"].map(_offsets)))
    return [mean(values) for _, values in by_offset]


def _slots(column: pd.Series) -> pd.Series:
    """One value per token from one list per image."""
    return column.explode(ignore_index=True).infer_objects()


def _offsets(step: np.ndarray) -> np.ndarray:
    """Place of each slot [N] in the window of the `step` that committed it."""
    starts = np.flatnonzero(np.diff(step, prepend=0))
    return np.arange(len(step)) - np.repeat(starts, np.diff(starts, append=len(step)))


def _offset_totals(counts: Sequence[Sequence[int] | None]) -> np.ndarray:
    """Sums by window offset of lists that may be of different lengths, or missing."""
    lists = [row for row in counts if row is not None and len(row)]
    if not lists:
        return np.zeros(0, dtype=np.int64)
    lengths = np.fromiter(map(len, lists), dtype=np.int64)
    offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return np.bincount(offsets, np.concatenate(lists)).astype(np.int64)
