"""Reading picture files as eight-bit RGB, exactly or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from specbench.errors import SpecbenchError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_picture(path: Path, try_this: str = "") -> np.ndarray:
    """Pixels of a picture, uint8 [H, W, 3]. Grey becomes equal channels, palettes their colours, and sixteen bits
    the eight highest.

    Raises:
        SpecbenchError: missing, damaged, or transparent somewhere; the message names the file.
    """
    try:
        with Image.open(path) as image:
            image.load()
            pixels = _rgb(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SpecbenchError(f"{path} is missing or damaged", try_this) from error
    if pixels is None:
        raise SpecbenchError(f"{path} has transparent pixels, which have no one colour",
                             "save it without an alpha channel")  # fmt: skip
    return pixels


def pictures_in(folder: Path) -> list[Path]:
    """The picture files directly inside a folder, by name.

    Raises:
        SpecbenchError: no folder, a file that is not a picture, or none at all.
    """
    if not folder.is_dir():
        raise SpecbenchError(f"image folder {folder} does not exist")
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in found:
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            raise SpecbenchError(f"{path} is not a picture", f"keep only {', '.join(SUFFIXES)} files in {folder}")
    if not found:
        raise SpecbenchError(f"image folder {folder} holds no pictures")
    return found


def _rgb(image: Image.Image) -> np.ndarray | None:
    """None where a pixel is not opaque."""
    if image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.uint32)
        return np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        pixels = np.asarray(image.convert("RGBA"))
        return pixels[..., :3].copy() if pixels[..., 3].min() == 255 else None
    return np.asarray(image.convert("RGB"))
