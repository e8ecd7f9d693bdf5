"""The verdict of `specbench audit --run`, kept in `audit.json` of the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from specbench.errors import SpecbenchError
from specbench.store.schema import KEY
from specbench.system.files import blaming, read_regular, write_atomically
from specbench.system.json_values import nonfinite_as_null, parse_json

AUDIT_JSON = "audit.json"
_MAX_BYTES = 2**26


def images_fingerprint(rows: pd.DataFrame) -> str:
    """Digest of the images an audit is about: the key and `started_at` of each of `rows`."""
    stamps = sorted(zip(*(rows[name].astype(str) for name in (*KEY, "started_at")), strict=True))
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:16]


def write_audit(folder: Path, result: Mapping[str, object]) -> None:
    """Keep the result of one audit beside the run's images, in the place of an earlier one."""
    try:
        text = json.dumps(nonfinite_as_null(dict(result)), indent=2, allow_nan=False)
        write_atomically(Path(folder) / AUDIT_JSON, text.encode())
    except OSError as error:
        raise SpecbenchError(f"cannot write {Path(folder) / AUDIT_JSON}: {error.strerror}") from error


def read_audit(folder: Path) -> dict | None:
    """The stored result; None where the run was not audited."""
    path = Path(folder) / AUDIT_JSON
    if not path.is_file():
        return None
    with blaming(path, "is damaged: not readable as an audit", "delete it and audit again"):
        result = parse_json(read_regular(path, _MAX_BYTES))
        if not isinstance(result["deviates"], bool) or not isinstance(result["fingerprint"], str):
            raise TypeError("deviates or fingerprint")
        float(result["tv"]), int(result["images"])
    return result
