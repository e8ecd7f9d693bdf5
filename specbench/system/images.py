"""Read image files as 8-bit RGB."""

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from specbench.errors import SpecbenchError
from specbench.system.console import counted
from specbench.system.files import files_named, read_error, read_regular

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_DEEPEST = 100  # Maximum depth of folders that are searched for images
_LEFT_BEHIND = (".*", "__MACOSX", "@eaDir", "[Tt]humbs.db", "THUMBS.DB", "[Dd]esktop.ini", "Icon\r", "$RECYCLE.BIN")
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Accepted image formats, detected by content. Pillow's readers of other formats may start external programs."""
MAX_PIXELS = 2**26  # Maximum number of pixels (8192 x 8192) in an image's header, checked before decoding
_MAX_BYTES = 2**28


def read_picture(path: Path, try_this: str = "", sha256: str | None = None, inside: Path | None = None) -> np.ndarray:
    """Read an image as uint8 [H, W, 3]. Greyscale is repeated to 3 channels, palettes are resolved, and 16-bit values
    keep their 8 high bits. `try_this`: hint for a missing or damaged file. `sha256`, `inside`: see `picture_bytes`."""
    data = picture_bytes(path, try_this, sha256, inside)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `MAX_PIXELS` is stricter
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise _too_large(path, f"{width:,} x {height:,}")
        if image.format in ("PNG", "WEBP") and (frames := getattr(image, "n_frames", 1)) > 1:
            raise SpecbenchError(f"{path} is an animation of {frames} frames", "save only the frame to score")
        pixels = _rgb(image)
    except Image.DecompressionBombError:
        raise _too_large(path, "far too many") from None
    except SpecbenchError:
        raise
    except Exception as error:  # decoders raise many types of errors for damaged data
        raise read_error(path, error, "is damaged: not a PNG, JPEG, WebP or BMP image", try_this) from error
    if pixels is None:
        raise SpecbenchError(f"{path} has transparent pixels", "save it without an alpha channel")
    return pixels


def picture_bytes(path: Path, try_this: str = "", sha256: str | None = None, inside: Path | None = None) -> bytes:
    """The bytes of an image file, not decoded. `sha256`: hexadecimal digest that the file must have; None if
    unknown. `inside`: folder that symbolic links must not leave, for untrusted folders."""
    try:
        data = read_regular(path, _MAX_BYTES, inside)
    except FileNotFoundError:
        raise SpecbenchError(f"{path} is missing", try_this) from None
    except (OSError, ValueError, MemoryError) as error:
        raise read_error(path, error, "cannot be a file name") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise SpecbenchError(f"{path} is damaged or replaced: its SHA-256 differs from the stored one", try_this)
    return data


def png_bytes(pixels: np.ndarray) -> bytes:
    """Encode uint8 [H, W, 3] as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="png")
    return buffer.getvalue()


def members(folder: Path, beside: Sequence[str] = ()) -> list[Path]:
    """List files and folders directly inside a folder, sorted, without hidden files and files that operating systems
    and archivers create. `beside`: patterns of further names to exclude."""
    return [path for path in files_named(folder, "*") if not any(map(path.match, (*_LEFT_BEHIND, *beside)))]


def pictures_in(folder: Path, beside: Sequence[str] = (), use: str = "images to score") -> list[Path]:
    """List the image files of a folder, sorted: `members` directly inside, or else in subfolders at any depth. Raise an
    error if both places have images, because one may hold thumbnails or another set. `use`: for the hint."""
    if not folder.is_dir():
        raise SpecbenchError(f"image folder {folder} does not exist")
    if not (pictures := _pictures(folder, beside, use, ())):
        raise SpecbenchError(f"image folder {folder} contains no images")
    return pictures


def _pictures(folder: Path, beside: Sequence[str], use: str, above: tuple[str, ...]) -> list[Path]:
    if (place := os.path.realpath(folder)) in above:
        raise SpecbenchError(f"{folder} is a link to one of its parent folders", "remove the link")
    if len(above) > _DEEPEST:
        raise SpecbenchError(f"{above[0]} has more than {_DEEPEST} folders inside each other", "name a folder below")
    paths = members(folder, beside)
    below = {path: _pictures(path, beside, use, (*above, place)) for path in paths if path.is_dir()}
    pictures = [path for path in paths if path not in below]
    for path in pictures:
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            raise SpecbenchError(f"{path} is not an image", f"keep only {', '.join(SUFFIXES)} files in {folder}")
    inside = [picture for more in below.values() for picture in more]
    if pictures and inside:
        places = ", ".join(path.name for path, more in below.items() if more)
        what = f"{folder} has {counted(len(pictures), 'image')}, and {len(inside)} more in folders below it"
        raise SpecbenchError(f"{what} ({places:.80})", f"name a folder that contains only the {use}")
    return pictures + inside


def _too_large(path: Path, size: str) -> SpecbenchError:
    return SpecbenchError(f"{path} has {size} pixels, more than {MAX_PIXELS:,}", "scale it down")


def _rgb(image: Image.Image) -> np.ndarray | None:
    """Convert to uint8 [H, W, 3]; None if a pixel is not opaque."""
    if image.mode.startswith("I"):
        return np.repeat((np.asarray(image, dtype=np.uint32) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        pixels = np.asarray(image.convert("RGBA"))
        return pixels[..., :3].copy() if pixels[..., 3].min() == 255 else None
    return np.asarray(image.convert("RGB"))
