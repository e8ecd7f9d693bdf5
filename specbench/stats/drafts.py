"""What became of the drafts, and how far their laws were from the target distribution."""

from __future__ import annotations

from itertools import count, takewhile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench.stats.ratios import mean, ratio
from specbench.store.schema import read_facts


def acceptance(rows: pd.DataFrame) -> float | None:
    """Acceptance: draft tokens accepted over draft tokens the left-to-right scan reached, summed over all
    images, free slots only."""
    return ratio(_offset_totals(rows["accepted"]).sum(), _offset_totals(rows["tested"]).sum())


def acceptance_by_offset(rows: pd.DataFrame) -> list[float | None]:
    """Acceptance by offset: the same for each place of the window, counted from its first draft."""
    accepted, tested = _offset_totals(rows["accepted"]), _offset_totals(rows["tested"])
    return [ratio(yes, all_) for yes, all_ in zip(accepted, tested, strict=True)]


def with_facts(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` with a column for each number that decoders noted by the way, see `Generation.facts`; NaN where an image
    has none."""
    noted = read_facts(pa.array(rows["facts"], pa.string())).to_pandas().set_axis(rows.index)
    return rows.join(noted.drop(columns=rows.columns, errors="ignore"))


def rounds(rows: pd.DataFrame) -> float | None:
    """Rounds: target forwards per image that had drafts to verify, mean over images."""
    return mean(rows["rounds"]) if "rounds" in rows else None


def acceptance_length(rows: pd.DataFrame) -> float | None:
    """Acceptance length: stream tokens per round, both summed over all images. Besides the accepted drafts a round
    commits a replacement or bonus token, which counts; the first forward of a draft head has no drafts, so that it is
    no round and its token does not count; 1 for AR."""
    tokens, each = round_totals(rows)
    return ratio(tokens.sum(skipna=False), each.sum(skipna=False))


def round_totals(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Per image the stream tokens that its rounds committed, and the rounds; NaN where they are unknown."""
    forwards, tokens = rows["nfe"], rows["stream_tokens"]
    each = rows["rounds"] if "rounds" in rows else pd.Series(np.nan, rows.index)
    each = each.fillna(forwards.where(forwards == tokens))
    return tokens - (forwards - each), each


def draft_ms(rows: pd.DataFrame) -> float | None:
    """Drafting: milliseconds per image, mean over images decoded one at a time; a part of the latency."""
    return mean(rows["draft_ms"].where(rows["ar_ms"].notna()))


def acceptance_by_sibling(rows: pd.DataFrame) -> list[float | None]:
    """Acceptance by sibling: accepted over tested drafts of each rank among the children of a node, in the order they
    were drawn."""
    ranks = takewhile(lambda rank: f"sibling_{rank}_tested" in rows, count())
    tested = [(rows[f"sibling_{rank}_tested"], rows.get(f"sibling_{rank}_accepted")) for rank in ranks]
    return [None if share is None else ratio((share * number).sum(), number.sum()) for number, share in tested]


def draft_tv_by_depth(rows: pd.DataFrame) -> list[float | None]:
    """TV(P, Q) by depth: total variation between the target distribution and the law of the eldest draft at each
    depth of a round, estimated from the drafts tested there, mean over images."""
    depths = takewhile(lambda depth: f"draft_tv_{depth}" in rows, count(1))
    return [mean(rows[f"draft_tv_{depth}"]) for depth in depths]


def theorem2_bound(rows: pd.DataFrame) -> float | None:
    """Theorem 2 bound: what Cool-SD's theorem 2 leaves of the total variation between the images and the model's, had
    every residual been the optimal one, estimated from the drafts tested; summed over an image, so that it says nothing
    above 1; mean over images."""
    return mean(rows["theorem2_bound"]) if "theorem2_bound" in rows else None


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


def _offset_totals(counts: pd.Series) -> np.ndarray:
    """Sums by window offset of Arrow lists that may be of different lengths, or missing."""
    lists = pa.array(counts.array)
    lengths = pc.list_value_length(lists).drop_null().to_numpy()
    offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return np.bincount(offsets, pc.list_flatten(lists).to_numpy()).astype(np.int64)
