"""Read image files as 8-bit RGB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from specbench.errors import SpecbenchError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_picture(path: Path, try_this: str = "") -> np.ndarray:
    """Read an image as uint8 [H, W, 3]. Greyscale is repeated to 3 channels, palettes are resolved, and 16-bit values
    keep their 8 high bits.

    Raises:
        SpecbenchError: missing, damaged, or with transparent pixels; the message names the file.
    """
    try:
        with Image.open(path) as image:
            image.load()
            pixels = _rgb(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SpecbenchError(f"{path} is missing or damaged", try_this) from error
    if pixels is None:
        raise SpecbenchError(f"{path} has transparent pixels",
                             "save it without an alpha channel")  # fmt: skip
    return pixels


def pictures_in(folder: Path) -> list[Path]:
    """List the image files directly inside a folder, sorted by name.

    Raises:
        SpecbenchError: no such folder, a file that is not an image, or no image.
    """
    if not folder.is_dir():
        raise SpecbenchError(f"image folder {folder} does not exist")
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in found:
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            raise SpecbenchError(f"{path} is not an image", f"keep only {', '.join(SUFFIXES)} files in {folder}")
    if not found:
        raise SpecbenchError(f"image folder {folder} contains no images")
    return found


def _rgb(image: Image.Image) -> np.ndarray | None:
    """Convert to uint8 [H, W, 3]; None if a pixel is not opaque."""
    if image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.uint32)
        return np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        pixels = np.asarray(image.convert("RGBA"))
        return pixels[..., :3].copy() if pixels[..., 3].min() == 255 else None
    return np.asarray(image.convert("RGB"))
