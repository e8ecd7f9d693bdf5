"""Schema of stored images: the columns of a sample row, and the conversion of a Generation or a failure to a row. Raw
facts only."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from specbench.decoding.generation import ORDERS, SPANS, Generation
from specbench.prompts import Request
from specbench.store.run_info import SCHEMA_VERSION
from specbench.system.json_values import Word, parse_json

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, int]
KEY = ("prompt_id", "sample")
AR_SPANS = ("prefill", "target", "draft", "verify", "host")  # Spans in `ar_ms`; `e2e_ms` includes all spans

_FACT = r'"(?:[^"\\]|\\.)*": (?:null|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)'
_FACTS = rf"^\{{(?:{_FACT}(?:, {_FACT})*)?\}}$"

_ARRAYS = ("tokens", "forced", "logp", "entropy", "top1", "committed_step", "drafted", "tested", "accepted")

LENGTHS = (
    ("tokens", "forced", "logp", "entropy", "top1", "committed_step", *ORDERS),
    ("drafted", "tested", "accepted"),
)
"""Two groups of lists: values per stream slot, and per window offset. A row's lists of a group are equally long."""

OWNER = ("run_id", "model", "decoder")  # Columns of every file that identify the run of a row


class RowStatus(Word):
    """Whether the image of a row was decoded."""

    OK = "ok"
    FAILED = "failed"


def column_facts(schema: pa.Schema) -> dict[str, dict[str, str]]:
    """`unit` and `meaning` of each declared column."""
    return json.loads(schema.metadata[b"specbench.columns"])


def with_units(frame: pd.DataFrame, *schemas: pa.Schema) -> pd.DataFrame:
    """The frame, with the units of its declared columns in `attrs["units"]`."""
    facts = {name: fact for schema in schemas for name, fact in column_facts(schema).items()}
    frame.attrs["units"] = {name: facts[name]["unit"] for name in frame if facts.get(name, {}).get("unit")}
    return frame


def declared(kind: str, columns: str) -> pa.Schema:
    """Make the schema of a kind of file from a table `name | type | unit | meaning`, which is kept as its metadata."""
    text = columns.replace("OWNER\n", _OWNER)
    cells = (map(str.strip, line.split("|")) for line in text.splitlines() if line)
    lines = [dict(zip(("name", "type", "unit", "meaning"), row, strict=True)) for row in cells]
    about = {line["name"]: {key: line[key] for key in ("unit", "meaning")} for line in lines}
    metadata = {"specbench.kind": kind, "specbench.columns": json.dumps(about, ensure_ascii=False)}
    return pa.schema([(line["name"], _arrow_type(line["type"])) for line in lines], metadata)


def _arrow_type(name: str) -> pa.DataType:
    if name.startswith("list<"):
        return pa.list_(_arrow_type(name[5:-1]))
    return pa.struct(_SCORE) if name == "score" else pa.type_for_alias(name)


_SCORE = [("metric", pa.string()), *((name, pa.float64()) for name in ("value", "low", "high")), ("n", pa.int64())]
_SCORE += [("fingerprint", pa.string())]
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_OWNER = _TABLES.pop("OWNER")

IMAGE_TABLE = declared(**_TABLES.pop("samples"))
FILE_KINDS = {place: declared(**table) for place, table in _TABLES.items()}
"""{glob of the paths: schema} of every kind of parquet file. A glob matches files of one kind only."""
TABLES = {kind.metadata[b"specbench.kind"].decode(): kind for kind in FILE_KINDS.values()}
SAMPLES, TRACES, IMAGE_SCORES = (TABLES[name] for name in ("images", "traces", "image scores"))
RUN_SCORES = TABLES["run scores"]
"""In `SAMPLES` all columns may be null, except `schema`, the key, `prompt`, `seed`, `status`, `started_at` and `OWNER`,
which the store adds. `run_info.SCHEMA_VERSION` lists the columns that older versions lack. `run --trace` writes
`TRACES`; an image's trace has the `started_at` of its sample row."""


def sample_row(base: Mapping[str, Any], generation: Generation, timed: bool) -> dict[str, Any]:
    """Make the row of a decoded image. `timed`: whether its spans are latencies, because the run's batch is 1."""
    spans = generation.spans_ms
    arrays = {name: np.asarray(getattr(generation, name)).tolist() for name in _ARRAYS}
    return {
        **base,
        "status": RowStatus.OK,
        "image": f"images/{image_name(base['prompt_id'], base['sample'])}" if generation.image is not None else None,
        "nfe": generation.nfe,
        "prefills": generation.prefills,
        "batch": generation.batch,
        **{f"{span}_ms": spans.get(span) for span in SPANS},
        "latency_ms": sum(spans.get(span, 0.0) for span in AR_SPANS) if timed else None,
        "latency_e2e_ms": sum(spans.values()) if timed else None,
        "facts": json.dumps(
            {name: float(value) if math.isfinite(value) else None for name, value in generation.facts.items()}
        ),
        **arrays,
        **{name: u.tolist() for name, u in generation.uniforms.items()},
    }


def trace_row(base: Mapping[str, object], generation: Generation) -> dict[str, Any]:
    """Trace columns of an image."""
    arrays = {name: getattr(generation, name).tolist() for name in ("draft_tv", "draft_top1")}
    return {name: base[name] for name in (*KEY, "started_at")} | arrays


def failed_row(base: Mapping[str, object], error: str) -> dict[str, Any]:
    """The row of an image that could not be decoded: its error, and no numbers."""
    return {**base, "status": RowStatus.FAILED, "error": error}


def read_facts(texts: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Parse the column `facts` to a float64 column per number, null for images that lack it, or raise a ValueError."""
    if not len(texts):
        return pa.table({})
    texts = pc.fill_null(texts, "{}")
    if not pc.all(pc.match_substring_regex(texts, _FACTS)).as_py():  # Arrow's reader may crash, as on "null"
        raise ValueError("not a JSON object of numbers")
    every = (texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts).cast(pa.string())
    [lines] = pc.binary_join(pa.ListArray.from_arrays([0, len(every)], every), "\n")
    table = pa.json.read_json(pa.BufferReader(lines.as_buffer()))
    return table.cast(pa.schema([(name, pa.float64()) for name in table.column_names]))


def read_meta(text: object) -> dict[str, Any]:
    """Parse a value of the column `meta`; {} for null. Raise a ValueError if the JSON is not an object."""
    meta = parse_json(text) if isinstance(text, str) else {}
    if not isinstance(meta, dict):
        raise ValueError("not a JSON object")
    return meta


def read_machines(texts: pa.ChunkedArray) -> list[dict[str, Any]]:
    """Parse the non-null values of the column `machine`. A reading has numbers, nulls and two
    texts: the host, and the cause of a slow GPU. Raise a ValueError for other content."""
    readings = [parse_json(text) for text in pc.drop_null(texts).to_pylist()]
    for reading in readings:
        if not isinstance(reading, dict):
            raise ValueError("not a JSON object")
        named: dict[str, Any] = {"host": str, "gpu_slowed": str | list}
        for name, value in reading.items():
            if value is not None and not isinstance(value, named.get(name, int | float)):
                raise ValueError(name)
            if name.endswith(("cores", "others")) and value is not None and not 0 <= value < math.inf:
                raise ValueError(name)
    return readings


def with_facts(rows: pa.Table) -> pa.Table:
    """Replace the column `facts` by a column per number; leave out numbers that have the name of another column."""
    noted, rows = read_facts(rows["facts"]), rows.drop_columns("facts")
    for name in noted.column_names:
        if name not in rows.column_names:
            rows = rows.append_column(name, noted[name])
    return rows


def base_row(
    request: Request, seed: int, started_at: str, machine: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The columns that do not depend on the result of decoding."""
    return {
        "schema": SCHEMA_VERSION,
        "prompt_id": request.prompt_id,
        "sample": request.sample,
        "prompt": request.text,
        "category": request.category,
        "meta": json.dumps(request.meta),
        "seed": seed,
        "started_at": started_at,
        "attempts": 1,
        "machine": None if machine is None else json.dumps(machine),
    }


def image_name(prompt_id: str, sample: int) -> str:
    """Make the file name of an image: its prompt id if short and plain, else a slug and a hash of the id."""
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,59}", prompt_id):
        return f"{prompt_id}-{sample}.png"
    slug = re.sub(r"[^a-z0-9]+", "-", prompt_id.lower())[:40].strip("-")
    digest = hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{slug}~{digest}-{sample}.png"
