"""Read files of image tokens: JSON lines, parquet or npz with one entry per image in each column."""

import zipfile
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from specbench.errors import SpecbenchError
from specbench.system import console
from specbench.system.files import blaming, check_regular, read_regular, text_of
from specbench.system.json_values import parse_json

_COLUMNS = ("prompt", "tokens", "prompt_id", "seed", "logp", "seconds", "batch", "prompt_token_ids")
MAX_BYTES = 2**31


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Read the columns of a file, as lists with one entry per image."""
    readers = {".parquet": _parquet, ".npz": _npz, ".jsonl": _json_lines, ".ndjson": _json_lines}
    if (read := readers.get(path.suffix.lower())) is None:
        raise SpecbenchError(f"{path}: unknown suffix '{path.suffix}'", f"valid: {', '.join(readers)}")
    with blaming(path, "is not a valid file of image tokens ({})"):
        check_regular(path)
        columns = read(path)
        if others := [name for name in columns if name not in _COLUMNS]:
            near = {name: get_close_matches(name.lower(), _COLUMNS, 1) for name in others}
            meant = (name + "".join(f" (did you mean '{known}'?)" for known in near[name]) for name in others)
            unread = console.one_line(", ".join(meant), 200)
            console.say(f"{path.name}: ignored columns: {unread} (known columns: {', '.join(_COLUMNS)})")
        columns = {name: columns[name] for name in _COLUMNS if name in columns}
        if scalars := [name for name, values in columns.items() if not isinstance(values, list)]:
            raise ValueError(f"'{scalars[0]}' is a single value, not one value per image")
    lengths = set(map(len, columns.values()))
    if missing := [name for name in _COLUMNS[:2] if name not in columns]:
        what = f"has no column '{missing[0]}'" if any(lengths) else f"has none of the columns {', '.join(_COLUMNS)}"
        raise SpecbenchError(f"{path} {what}", "'prompt' and 'tokens' are required, with one entry per image")
    if len(lengths) != 1 or not any(lengths):
        raise SpecbenchError(f"{path} holds no images, or columns of different lengths")
    return columns


def _parquet(path: Path) -> dict[str, list[Any]]:
    facts = pyarrow.parquet.read_metadata(path)
    groups = map(facts.row_group, range(facts.num_row_groups))
    values = sum(group.column(number).num_values for group in groups for number in range(facts.num_columns))
    if max(path.stat().st_size, 8 * values) > MAX_BYTES:
        raise ValueError("its columns are too large")
    table = pyarrow.parquet.read_table(path)
    return {name: table[name].to_pylist() if name in _COLUMNS else [] for name in table.column_names}


def _npz(path: Path) -> dict[str, list[Any]]:
    with zipfile.ZipFile(path) as packed:
        if sum(member.file_size for member in packed.infolist()) > MAX_BYTES:
            raise ValueError("its arrays are too large")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name].tolist() if name in _COLUMNS else [] for name in file}


def _json_lines(path: Path) -> dict[str, list[Any]]:
    rows = []
    for number, line in enumerate(text_of(read_regular(path, MAX_BYTES)).encode().splitlines(), 1):
        with blaming(path, f"cannot be read: line {number} is not JSON ({{}})"):
            rows += [parse_json(line)] if line.strip() else []
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("each line must be one object")
    names = dict.fromkeys(chain.from_iterable(rows))
    return {name: [row.get(name) for row in rows] if name in _COLUMNS else [] for name in names}


def whole_ids(path: Path, row: int, tokens: object) -> np.ndarray:
    array = np.asarray(tokens if isinstance(tokens, list) else [])
    if array.size and array.dtype.kind == "f" and not (array % 1).any() and (np.abs(array) < 2**53).all():
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SpecbenchError(f"{path}: image {row + 1}: tokens are not a list of whole numbers")
    return array if array.dtype == np.uint64 else array.astype(np.int64)  # errors then report ids above 2**63 correctly
