"""Contact sheet as PNG: one row per prompt, one column per run, same sample; steps below each image."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from specbench.errors import SpecbenchError
from specbench.reporting.charts import mark_of
from specbench.reporting.report_rows import label
from specbench.store.run_store import RunStore, read_image
from specbench.system.console import printable
from specbench.system.files import write_output

TILE = 128
TEXT_WIDTH = 190
_GAP = 10
FONT_SIZE = 13
LINE = 17
_INK, _PALE, _PAPER = "#1a1a1a", "#6a6a6a", "#ffffff"


def contact_sheet(folders: Sequence[Path], path: Path, limit: int = 8, sample: int = 0) -> Path:
    """Draw the images of several runs side by side into a PNG file.

    Args:
        folders: run folders, one per column.
        limit: maximum number of prompts, in the order of the first run.
        sample: sample index of the images.

    Raises:
        SpecbenchError: no images, a damaged image, or a file that cannot be written.
    """
    columns = [_column(Path(folder), sample) for folder in folders]
    prompts = list(dict.fromkeys(key for *_, rows in columns for key in rows))[:limit]
    if not prompts:
        raise SpecbenchError("these runs have no images to show", "decode some with `specbench run`")
    head = LINE * max(len(lines) for lines, _, _ in columns) + 2 * _GAP
    size = (TEXT_WIDTH + len(columns) * (TILE + _GAP) + _GAP, head + len(prompts) * (TILE + LINE + _GAP) + _GAP)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (lines, colour, rows) in enumerate(columns):
        left = TEXT_WIDTH + number * (TILE + _GAP)
        draw.rectangle((left, head - _GAP, left + TILE - 1, head - _GAP // 2), fill=colour)
        _write(draw, (left, _GAP // 2), lines, _INK)
        for place, prompt in enumerate(prompts):
            _tile(sheet, draw, (left, head + place * (TILE + LINE + _GAP)), rows.get(prompt))
    for place, (_, text) in enumerate(prompts):
        lines = textwrap.wrap(printable(text), 24)[: TILE // LINE]
        _write(draw, (_GAP, head + place * (TILE + LINE + _GAP)), lines, _INK)
    png = io.BytesIO()
    sheet.save(png, format="png", optimize=True)
    write_output(Path(path), png.getvalue())
    return Path(path)


def _column(folder: Path, sample: int) -> tuple[list[str], str, dict[tuple[str, str], dict]]:
    """Read the heading lines of a run, the colour of its decoder, and its rows by (prompt id, prompt)."""
    store = RunStore(folder)
    info = store.info()
    window = dict(info.spec.decoder.options).get("window")
    heading = label(info.spec.decoder, info.origins, info.spec.model) + (f" W={window}" if window else "")
    rows = store.samples(["prompt", "status", "nfe", "image", "image_sha256"])
    rows = rows[rows["sample"] == sample]
    found = {(row.prompt_id, row.prompt): {**row._asdict(), "folder": folder} for row in rows.itertuples(index=False)}
    return textwrap.wrap(printable(heading), 17), mark_of(info.spec.decoder.name).colour, found


def _tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, corner: tuple[int, int], row: dict | None) -> None:
    left, top = corner
    if row is None or row["status"] != "ok" or not isinstance(row["image"], str):
        draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), outline=_PALE)
        _write(draw, (left + _GAP, top + TILE // 2), ["not decoded" if row is None else "failed"], _PALE)
        return
    image = Image.fromarray(read_image(row["folder"], row["image"], row["image_sha256"]))
    scale = TILE / max(image.size)
    size = tuple(max(1, round(side * scale)) for side in image.size)
    sheet.paste(image.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS), corner)
    _write(draw, (left, top + TILE), [f"{int(row['nfe'])} steps"], _PALE)


def _write(draw: ImageDraw.ImageDraw, corner: tuple[int, int], lines: Sequence[str], colour: str) -> None:
    font = ImageFont.load_default(FONT_SIZE)
    for number, line in enumerate(lines):
        draw.text((corner[0], corner[1] + number * LINE), line, fill=colour, font=font)
