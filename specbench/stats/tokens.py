"""Stored rows as statistics see them, with sums per image in the place of per-token lists, and log-probability
statistics of the committed tokens under the target distribution, in nats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.stats.speed import ratio_or_none
from specbench.store.token_sums import LISTS, token_sums


def condense(rows: pa.Table) -> pd.DataFrame:
    """Replace the per-token lists of stored rows by sums per image, see `specbench.store.token_sums.token_sums`."""
    others, sums = rows.drop_columns(list(LISTS)), token_sums(rows)
    return as_frame(pa.table([*others.columns, *sums.columns], names=[*others.column_names, *sums.column_names]))


def as_frame(rows: pa.Table) -> pd.DataFrame:
    """Convert rows that hold their sums; lists stay Arrow lists. What `rows` alone holds is freed on the way."""

    def keep_lists(kind: pa.DataType) -> pd.ArrowDtype | None:
        return pd.ArrowDtype(kind) if pa.types.is_list(kind) else None

    return rows.to_pandas(types_mapper=keep_lists, split_blocks=True, self_destruct=True)


@dataclass(frozen=True)
class TokenStats:
    """Log-probability statistics of the free tokens under the target distribution, in nats."""

    # logp_mean, logp_std, entropy_mean, perplexity, image_perplexity, nll_gap: see the functions of these names
    logp_mean: float
    logp_std: float | None
    entropy_mean: float
    perplexity: float
    image_perplexity: float
    nll_gap: float
    nll_gap_se: float | None  # standard error of the gap over independent images; None for one image
    zero_probability: int  # number of tokens with target probability 0; if any, the means are infinite


def token_stats(rows: pd.DataFrame) -> TokenStats | None:
    """Compute all token statistics; None without free tokens, or where nobody measured their p."""
    if not rows["free_tokens"].sum() or rows[["logp_sum", "entropy_sum"]].isna().any(axis=None):
        return None
    gap, standard_error = nll_gap(rows)
    pooled, per_image = perplexity(rows), image_perplexity(rows)
    return TokenStats(
        logp_mean(rows), logp_std(rows), entropy_mean(rows), pooled, per_image, gap, standard_error,
        int(rows["impossible"].sum()),
    )  # fmt: skip


def logp_mean(rows: pd.DataFrame) -> float | None:
    """Log p: mean natural log of the committed tokens' probability under the target distribution, over all
    free tokens."""
    return ratio_or_none(rows["logp_sum"].sum(), rows["free_tokens"].sum())


def logp_std(rows: pd.DataFrame) -> float | None:
    """Std of log p: standard deviation over all free tokens."""
    n, mean = rows["free_tokens"].sum(), logp_mean(rows)
    if n < 2 or not math.isfinite(mean):
        return None
    of_image = rows["logp_sum"] / rows["free_tokens"].clip(lower=1)
    between = (rows["free_tokens"] * (of_image - mean) ** 2).sum()
    return math.sqrt((rows["logp_spread"].sum() + between) / (n - 1))


def entropy_mean(rows: pd.DataFrame) -> float | None:
    """Entropy: mean entropy of the target distributions of all free tokens, in nats."""
    return ratio_or_none(rows["entropy_sum"].sum(), rows["free_tokens"].sum())


def image_perplexities(rows: pd.DataFrame) -> pd.Series:
    """Perplexity of each image: exp of minus its mean log p; missing without free tokens."""
    return np.exp(-rows["logp_sum"] / rows["free_tokens"].where(rows["free_tokens"] > 0))


def image_perplexity(rows: pd.DataFrame) -> float | None:
    """Perplexity per image: exp of minus the mean log p of an image's free tokens, mean over images; never below the
    pooled perplexity of images of one length."""
    mean = image_perplexities(rows).mean()
    return None if pd.isna(mean) else float(mean)


def perplexity(rows: pd.DataFrame) -> float | None:
    """Perplexity: exp of minus the mean log p of all free tokens (pooled)."""
    mean = logp_mean(rows)
    return None if mean is None else float(np.exp(-mean))


def nll_gap(rows: pd.DataFrame) -> tuple[float, float | None]:
    """NLL - H gap: mean of -log p minus mean entropy of the target distributions, in nats per token, with its standard
    error over images; 0 within its error for an exact sampler (a non-zero gap proves bias, a zero gap proves
    nothing)."""
    rows = rows[rows["free_tokens"] > 0]
    n, tokens = len(rows), rows["free_tokens"].sum()
    excess = -rows["logp_sum"] - rows["entropy_sum"]
    mean = float(excess.sum() / tokens)
    if not math.isfinite(mean):
        return math.inf, None
    if n < 2:
        return mean, None
    squares = np.square(excess - mean * rows["free_tokens"]).sum()
    return mean, float(math.sqrt(n / (n - 1) * squares) / tokens)


def top1(rows: pd.DataFrame) -> float | None:
    """Top-1 of p: largest probability of the target distribution, mean over free tokens."""
    return ratio_or_none(rows["top1_sum"].sum(), rows["free_tokens"].sum())
