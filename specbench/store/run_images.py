"""Image files of a run folder, which may come from others: read only as the row that names one describes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specbench.system.images import picture_bytes, read_picture

_REDO = "delete the file if it is there, and run again to redo it"


def read_image(folder: Path, image: str, sha256: object) -> np.ndarray:
    """Pixels of a stored image, uint8 [H, W, 3].

    Args:
        image, sha256: columns `image` and `image_sha256` of its row; rows of schema version 3 and older have no digest.

    Raises:
        SpecbenchError: missing, damaged, refused, outside the folder, or not what was stored; the message names the
            file.
    """
    return read_picture(folder / image, _REDO, _digest(sha256), folder)


def image_bytes(folder: Path, image: str, sha256: object) -> bytes:
    """Bytes of a stored image, not decoded; raises what `read_image` raises, except for damage."""
    return picture_bytes(folder / image, _REDO, _digest(sha256), folder)


def _digest(value: object) -> str | None:
    return value if isinstance(value, str) else None
