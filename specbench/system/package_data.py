"""Location of data files: outside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def data_folder(name: str) -> Path:
    """Path of the data folder `name` ("prompts", ...) of the checkout or of the installed package."""
    installed = PACKAGE / "_data" / name
    return installed if installed.is_dir() else PACKAGE.parent / name
