"""Convert stored rows for statistics: sums per image replace per-token lists. Compute statistics of log-probabilities
of the committed tokens under the target distribution, in nats."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.stats.numbers import define
from specbench.stats.speed import mean, ratio_or_none
from specbench.store.token_sums import LISTS, token_sums


def condense(rows: pa.Table) -> pd.DataFrame:
    """Replace the per-token lists of stored rows by sums per image, see `specbench.store.token_sums.token_sums`."""
    others, sums = rows.drop_columns(list(LISTS)), token_sums(rows)
    return as_frame(pa.table([*others.columns, *sums.columns], names=[*others.column_names, *sums.column_names]))


def as_frame(rows: pa.Table) -> pd.DataFrame:
    """Convert rows with sums to a data frame; lists stay Arrow lists. `rows` is freed and must not be used again."""

    def keep_lists(kind: pa.DataType) -> pd.ArrowDtype | None:
        return pd.ArrowDtype(kind) if pa.types.is_list(kind) else None

    return rows.to_pandas(types_mapper=keep_lists, split_blocks=True, self_destruct=True)


def copies_among(images: Iterable[np.ndarray]) -> dict[int, int]:
    """Find exact copies of earlier images; map the index of each copy to the index of the earlier image."""
    first: dict[bytes, int] = {}
    seen = [first.setdefault(np.asarray(tokens).tobytes(), number) for number, tokens in enumerate(images)]
    return {number: before for number, before in enumerate(seen) if before != number}


def tokens_measured(rows: pd.DataFrame) -> bool:
    """Return whether there are free tokens with measured p; the functions below need them."""
    return bool(rows["free_tokens"].sum()) and not rows[["logp_sum", "entropy_sum"]].isna().any(axis=None)


@define("Log p: mean natural log of the committed tokens' probability under the target distribution, over all free "
        "tokens.", "nats", of="tokens", ratio=("logp_sum", "free_tokens"))  # fmt: skip
def logp_mean(rows: pd.DataFrame) -> float | None:
    return ratio_or_none(rows["logp_sum"].sum(), rows["free_tokens"].sum())


@define("Std of log p: standard deviation of log p over all free tokens.", "nats", of="tokens")
def logp_std(rows: pd.DataFrame) -> float | None:
    n, mean = rows["free_tokens"].sum(), logp_mean(rows)
    if n < 2 or mean is None or not math.isfinite(mean):
        return None
    of_image = rows["logp_sum"] / rows["free_tokens"].clip(lower=1)
    between = (rows["free_tokens"] * (of_image - mean) ** 2).sum()
    return math.sqrt((rows["logp_spread"].sum() + between) / (n - 1))


@define("Entropy: mean entropy of the target distributions of all free tokens, in nats.",
        "nats", of="tokens", ratio=("entropy_sum", "free_tokens"))  # fmt: skip
def entropy_mean(rows: pd.DataFrame) -> float | None:
    return ratio_or_none(rows["entropy_sum"].sum(), rows["free_tokens"].sum())


def image_perplexities(rows: pd.DataFrame) -> pd.Series:
    """Perplexity of each image: exp of minus its mean log p; missing without free tokens."""
    return np.exp(-rows["logp_sum"] / rows["free_tokens"].where(rows["free_tokens"] > 0))


@define("Perplexity per image: exp of minus the mean log p of an image's free tokens, mean over images; never below "
        "the pooled perplexity if all images have the same length.",
        of="tokens", per_image=image_perplexities)  # fmt: skip
def image_perplexity(rows: pd.DataFrame) -> float | None:
    return mean(image_perplexities(rows))


@define("Perplexity: exp of minus the mean log p of all free tokens (pooled).", of="tokens")
def perplexity(rows: pd.DataFrame) -> float | None:
    mean = logp_mean(rows)
    return None if mean is None else float(np.exp(-mean))


@define("NLL - H gap: mean of -log p minus mean entropy of the target distributions, in nats per token, with its "
        "standard error over images; 0 within its error for an exact sampler (a non-zero gap proves bias, a zero gap "
        "proves nothing).",
        "nats", of="tokens",
        totals=lambda rows: (-rows["logp_sum"] - rows["entropy_sum"], rows["free_tokens"]))  # fmt: skip
def nll_gap(rows: pd.DataFrame) -> float:
    excess, tokens = _excess(rows)
    mean = float(excess.sum() / tokens.sum())
    return mean if math.isfinite(mean) else math.inf


@define("Standard error of the NLL - H gap: standard error over independent images; missing for one image or an "
        "infinite gap.", "nats", of="tokens")  # fmt: skip
def nll_gap_se(rows: pd.DataFrame) -> float | None:
    excess, tokens = _excess(rows)
    n, mean = len(tokens), nll_gap(rows)
    if n < 2 or not math.isfinite(mean):
        return None
    squares = np.square(excess - mean * tokens).sum()
    return float(math.sqrt(n / (n - 1) * squares) / tokens.sum())


def _excess(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return, for each image with free tokens, the sum of -log p minus entropy, and the number of free tokens."""
    rows = rows[rows["free_tokens"] > 0]
    return -rows["logp_sum"] - rows["entropy_sum"], rows["free_tokens"]


@define("Zero probability: number of tokens with target probability 0; if any, the means are infinite.",
        "tokens", of="tokens", type="int64")  # fmt: skip
def zero_probability(rows: pd.DataFrame) -> int:
    return int(rows["impossible"].sum())


@define("Top-1 of p: largest probability of the target distribution, mean over free tokens.",
        ratio=("top1_sum", "free_tokens"))  # fmt: skip
def top1(rows: pd.DataFrame) -> float | None:
    return ratio_or_none(rows["top1_sum"].sum(), rows["free_tokens"].sum())
