"""Acceptance statistics, and total variation between draft and target distributions."""

from itertools import count, takewhile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench.stats.numbers import define
from specbench.stats.speed import mean, ratio_or_none


@define("Acceptance: accepted over verified draft tokens, summed over all images; tokens forced by the grammar are "
        "excluded.", better="higher", totals=lambda rows: (_sums(rows["accepted"]), _sums(rows["tested"])))  # fmt: skip
def acceptance(rows: pd.DataFrame) -> float | None:
    accepted, tested = (_offset_totals(rows[name]).sum() for name in ("accepted", "tested"))
    return ratio_or_none(accepted, tested)


@define("Acceptance by depth: acceptance at each draft depth, counted from 1; in a draft tree a depth counts as "
        "accepted if one of the siblings verified there is accepted.", type="list<double>")  # fmt: skip
def acceptance_by_offset(rows: pd.DataFrame) -> list[float | None]:
    accepted, tested = _offset_totals(rows["accepted"]), _offset_totals(rows["tested"])
    return [ratio_or_none(yes, all_) for yes, all_ in zip(accepted, tested, strict=True)]


@define("Rounds: target forwards per image that verify drafts, mean over images.", "forwards")
def rounds(rows: pd.DataFrame) -> float | None:
    return mean(rows["rounds"]) if "rounds" in rows else None


def round_totals(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return per image the tokens committed in rounds, and the number of rounds; NaN if unknown."""
    forwards, tokens = rows["nfe"], rows["stream_tokens"]
    each = rows["rounds"] if "rounds" in rows else pd.Series(np.nan, rows.index)
    each = each.fillna(forwards.where(forwards == tokens))
    return tokens - (forwards - each), each


@define("Acceptance length: committed tokens per round, both summed over all images; 1 for AR. The residual or bonus "
        "token of a round counts. The first forward with an EAGLE head has no drafts: it is not a round, and its token "
        "does not count.", "tokens", "higher", totals=round_totals)  # fmt: skip
def acceptance_length(rows: pd.DataFrame) -> float | None:
    tokens, each = round_totals(rows)
    return ratio_or_none(tokens.sum(skipna=False), each.sum(skipna=False))


@define("Drafting: milliseconds per image spent on drafting (part of the latency), mean over images decoded one at a "
        "time.", "ms")  # fmt: skip
def draft_ms(rows: pd.DataFrame) -> float | None:
    return mean(rows["draft_ms"].where(rows["latency_ms"].notna()))


@define("Steps of stage 2: target forwards per image of the second stage after its prefill, mean over images.",
        "forwards", "lower", of="second stage")  # fmt: skip
def stage2_nfe(rows: pd.DataFrame) -> float | None:
    return mean(rows["stage2_nfe"])


@define("Acceptance of stage 2: accepted over verified draft tokens of the second stage, summed over all images.",
        of="second stage")  # fmt: skip
def stage2_acceptance(rows: pd.DataFrame) -> float | None:
    return ratio_or_none(rows["stage2_accepted"].sum(), rows["stage2_tested"].sum())


@define("Stage 2 ms: milliseconds per image from the start of the second stage's prefill to its last token, mean over "
        "images decoded one at a time.", "ms", "lower", of="second stage")  # fmt: skip
def stage2_ms(rows: pd.DataFrame) -> float | None:
    return mean(rows["stage2_ms"].where(rows["latency_ms"].notna()))


@define("Both stages ms: latency plus the latency of the second stage, without rendering of pixels, mean over images "
        "decoded one at a time.", "ms", "lower", of="second stage")  # fmt: skip
def both_stages_ms(rows: pd.DataFrame) -> float | None:
    return mean(rows["latency_ms"] + rows["stage2_ms"])


@define("Acceptance by sibling: accepted over verified draft tokens by child index (the order in which the children of "
        "a node were drawn).", type="list<double>")  # fmt: skip
def acceptance_by_sibling(rows: pd.DataFrame) -> list[float | None]:
    ranks = takewhile(lambda rank: f"sibling_{rank}_tested" in rows, count())
    tested = [(rows[f"sibling_{rank}_tested"], rows.get(f"sibling_{rank}_accepted")) for rank in ranks]
    return [None if share is None else ratio_or_none((share * number).sum(), number.sum()) for number, share in tested]


@define("TV(P, Q) by depth: total variation between the target distribution and the proposal distribution of the first "
        "child at each draft depth, estimated from the verified drafts, mean over images.",
        type="list<double>")  # fmt: skip
def draft_tv_by_depth(rows: pd.DataFrame) -> list[float | None]:
    depths = takewhile(lambda depth: f"draft_tv_{depth}" in rows, count(1))
    return [mean(rows[f"draft_tv_{depth}"]) for depth in depths]


@define("Theorem 2 bound: upper bound on the total variation between the image distribution and exact sampling "
        "(Cool-SD, Theorem 2), assuming the optimal residual and estimated from the verified drafts; vacuous above 1; "
        "mean over images. Missing for decoders with a bias from other sources than the acceptance.",
        of="bias of acceptance alone")  # fmt: skip
def theorem2_bound(rows: pd.DataFrame) -> float | None:
    return mean(rows["theorem2_bound"]) if "theorem2_bound" in rows else None


@define("TV(p, q): total variation between the target distribution p and the draft distribution q of a verified draft "
        "token, mean over verified draft tokens of images decoded with --trace.", of="traces")  # fmt: skip
def draft_tv(rows: pd.DataFrame) -> float | None:
    return mean(_slots(rows["draft_tv"]))


@define("Top-1 of q: largest probability of the draft distribution of a verified draft token, mean over the same "
        "tokens as TV(p, q).", of="traces")  # fmt: skip
def draft_top1(rows: pd.DataFrame) -> float | None:
    return mean(_slots(rows["draft_top1"]))


@define("TV(p, q) by offset: TV(p, q) at each position of the window, counted from the first draft token.",
        of="traces", type="list<double>")  # fmt: skip
def draft_tv_by_offset(rows: pd.DataFrame) -> list[float | None]:
    by_offset = _slots(rows["draft_tv"]).groupby(_slots(rows["committed_step"].map(_offsets)))
    return [mean(values) for _, values in by_offset]


def _slots(column: pd.Series) -> pd.Series:
    """Flatten one list per image to one value per token."""
    return column.explode(ignore_index=True).infer_objects()


def _offsets(step: np.ndarray) -> np.ndarray:
    """Return the window offset of each token [N]. `step`: number of the step that committed it."""
    starts = np.flatnonzero(np.diff(step, prepend=0))
    offsets: np.ndarray = np.arange(len(step)) - np.repeat(starts, np.diff(starts, append=len(step)))
    return offsets


def _offset_totals(counts: pd.Series) -> np.ndarray:
    """Sum Arrow lists by window offset; lists may differ in length or be missing."""
    totals_of_chunks = []
    arrow = pa.array(counts.array)
    for lists in arrow.chunks if isinstance(arrow, pa.ChunkedArray) else [arrow]:  # one chunk at a time
        lengths = pc.list_value_length(lists).drop_null().to_numpy()
        offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        totals_of_chunks.append(np.bincount(offsets, pc.list_flatten(lists).to_numpy()).astype(np.int64))
    totals: np.ndarray = np.zeros(max(map(len, totals_of_chunks), default=0), np.int64)
    for chunk in totals_of_chunks:
        totals[: len(chunk)] += chunk
    return totals


def _sums(lists: pd.Series) -> pd.Series:
    """Sum each list of a column; a missing list gives a missing sum."""
    column = pa.array(lists.array)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    sums = np.bincount(pc.list_parent_indices(column), pc.list_flatten(column), len(column))
    return pd.Series(np.where(column.is_null(), np.nan, sums), lists.index)
