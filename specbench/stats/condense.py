"""Stored rows as statistics see them: a frame with sums per image in the place of per-token lists."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from specbench.store.token_sums import LISTS, token_sums


def condense(rows: pa.Table) -> pd.DataFrame:
    """Replace the per-token lists of stored rows by sums per image, see `specbench.store.token_sums.token_sums`."""
    others, sums = rows.drop_columns(list(LISTS)), token_sums(rows)
    return as_frame(pa.table([*others.columns, *sums.columns], names=[*others.column_names, *sums.column_names]))


def as_frame(rows: pa.Table) -> pd.DataFrame:
    """Convert rows that hold their sums; lists stay Arrow lists. What `rows` alone holds is freed on the way."""
    return rows.to_pandas(types_mapper=_keep_lists, split_blocks=True, self_destruct=True)


def _keep_lists(kind: pa.DataType) -> pd.ArrowDtype | None:
    return pd.ArrowDtype(kind) if pa.types.is_list(kind) else None
