"""Reports, run cards and image cards on a terminal: the report as its answer in sentences, then one short table per
section, fitted to the width; an image card with the image and its acceptance map.

Images are printed as half blocks (two pixels per character) on terminals with colours. Without colours, the acceptance
map is printed as letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from PIL import Image
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specbench.metrics.catalog import unjudged
from specbench.reporting.answer import disturbances
from specbench.reporting.columns import (
    AUDIT,
    FAILED_AUDIT,
    MISSING,
    QUALITY,
    SPEED,
    THROUGHPUT,
    ReportColumn,
    failed_audit,
    first_columns,
    number,
    part_columns,
    score_columns,
)
from specbench.reporting.image_tiles import Tile
from specbench.reporting.maps import ACCEPTED, ACCEPTED_COLOUR, DRAWN_COLOUR
from specbench.reporting.sections import circumstances, definitions, sections
from specbench.store.run_info import describe_point
from specbench.system.console import fitted_distinct, one_line, panel_count

_MORE = "specbench report --all: every number; --explain: what the columns mean"
_LEFT = ("decoder", "lossless", "audit")
KEPT = ("decoder", "NFE", "speed-up [95 %]", "lossless")
"""Columns that are shown even if all rows agree."""
_ESSENTIAL = ("decoder", "NFE", "latency s", "speed-up [95 %]", "lossless")
"""Columns of the demonstration, and as many scores as stand beside them."""
_CHOICES = ("drafter", "init", "verifier", "residual", "refine")
_MOST_COLUMNS = 64
"""Width of an image, in characters, at most."""


def report_view(
    rows: Sequence[Mapping], width: int, explain: bool = False, everything: bool = False, printed: Sequence[str] = ()
) -> Group:
    """Lay out the rows of `report_rows`.

    Args:
        width: of the terminal, in characters.
        explain: add the definition of each column.
        everything: add the tables behind the first one, and all notes.
        printed: lines of what papers print for the same cells.
    """
    parts: list[RenderableType] = []
    found = sections(rows)
    for section in found:
        heading = "; ".join(filter(None, (section.heading, section.machines)))
        parts += [*([Text()] if parts else []), Text(one_line(heading), style="bold")]
        parts += [*(Text(one_line(sentence)) for sentence in section.answer), Text()] if section.answer else []
        for table in section.shown(everything):
            parts += [Text(f"{one_line(table.title)}:")] if table.title else []
            parts += [_table(table.columns, section.runs, width)]
            parts += [Text(one_line(table.remark), style="dim")] if table.remark else []
            parts += [Text()] if everything else []
        parts += [] if everything else [Text(one_line(note), style="dim") for note in section.notes]
    below = [*(definitions(found, everything) if explain else ()), *(circumstances(rows) if everything else ())]
    texts = [*(Text(one_line(text)) for text in printed), *(Text(one_line(text), style="dim") for text in below)]
    return Group(*parts, *texts, *([] if below else [Text(_MORE, style="dim")]))


def first_table(runs: Sequence[Mapping], width: int) -> Group:
    """The first table of a report: one line per run; what all runs share stands in one line below."""
    return _table(first_columns(runs), runs, width)


def narrow_table(runs: Sequence[Mapping], width: int) -> Group:
    """The essential columns of `first_table`, with the scores that stand beside them."""
    every, shown = first_columns(runs), [*_ESSENTIAL]
    for column in score_columns(runs):
        cells = [[one.cell(row) for one in every if one.heading in (*shown, column.heading)] for row in runs]
        headings = [one.title for one in every if one.heading in (*shown, column.heading)]
        shown += [column.heading] if panel_count(headings, cells, width) == 1 else []
    return _table([column for column in every if column.heading in shown], runs, width)


def _table(columns: Sequence[ReportColumn], runs: Sequence[Mapping], width: int) -> Group:
    cells = [[column.cell(row) for column in columns] for row in runs]
    kept = [place for place, column in enumerate(columns) if column.heading in KEPT]
    right = [place for place, column in enumerate(columns) if column.heading not in _LEFT]
    return fitted_distinct([column.title for column in columns], cells, width, kept, right)


def run_view(card: Mapping) -> RenderableType:
    """Lay out what `specbench.reporting.cards.card` returns."""
    decoder, row = card["decoder"], card["numbers"]
    audited = AUDIT if row.get("audit") else ()
    columns = (
        *(THROUGHPUT if row["setting"]["batch"] > 1 else SPEED)[3:],
        *QUALITY[3:],
        *audited,
        *score_columns([row]),
    )
    numbers = [(column.heading, column.cell(row)) for column in columns]
    for metric, parts in part_columns([row]).items():
        numbers += [(f"{metric} {part.heading}", part.cell(row)) for part in parts]
    numbers += [("remark", sentence) for sentence in disturbances([row])]
    numbers += [("roofline", row["roofline_note"])] if row["roofline_note"] else []
    exactness = "lossless" if decoder["lossless"] else "another program" if row.get("imported") else "not lossless"
    exactness = f"declared lossless, {FAILED_AUDIT}" if failed_audit(row) else exactness
    origins = card["origins"]
    return Group(
        _title(
            card["run_id"],
            f"{card['images']} image{'s' * (card['images'] != 1)}"
            + (f", {card['failed']} failed" if card["failed"] else ""),
        ),
        _block(
            "decoder",
            [
                (decoder["name"], exactness),
                *((kind, decoder[kind]) for kind in _CHOICES),
                *([("follows", card["method"])] if card["method"] else []),
            ],
        ),
        _block(
            "options", [(name, _with_origin(value, origins.get(name))) for name, value in decoder["options"].items()]
        ),
        _block("setting", _setting(card)),
        _block("numbers", numbers),
        _block("decoder statistics, mean over images", _numbers(card["facts"])),
        _block(
            "windows tried", [(f"{point['window']}", describe_point(point)) for point in card["window_curve"] or ()]
        ),
        _block("failures", [(f"{times} times", error) for error, times in card["errors"].items()]),
        _block("invocations", [(call["started_at"], call["environment"]) for call in card["invocations"]]),
    )


def _setting(card: Mapping) -> Iterator[tuple[str, str]]:
    origins = card["origins"]
    yield "model", card["model"]
    if card["source"]:
        yield "source", card["source"]
    if card["processors"]:
        yield "processors", card["processors"]
    yield "steps", card["numbers"]["steps"]
    for name, value in card["setting"].items():
        items = value.items() if isinstance(value, Mapping) else [(name, value)]
        for key, item in items:
            yield key, _with_origin(item, origins.get(key.replace("_", "-")))
        if name == "prompts":
            yield from (("prompts drawn", text) for text in card["numbers"].get("drawn", ()))


def _with_origin(value: object, origin: str | None) -> str:
    return str(value) if origin in (None, "default") else f"{value}  ({origin})"


def image_view(card: Mapping, tile: Tile, console: Console) -> RenderableType:
    """Lay out what `specbench.reporting.cards.image_card` returns, with images as wide as the console allows."""
    spans = [(f"{span} ms", number(value)) for span, value in card["spans_ms"].items()]
    in_title = ("sample", "seed")
    shown = {name: value for name, value in card.items() if isinstance(value, int | float) and name not in in_title}
    rates = [value for value in card.get("acceptance_by_offset") or () if value is not None]
    by_offset = [("acceptance by offset", " ".join(number(value) for value in rates))] if rates else []
    return Group(
        _title(card["prompt"], f"{card['run_id']}, {card['prompt_id']}, sample {card['sample']}, seed {card['seed']}"),
        _block("failed", [("error", card["error"])] if card["error"] else []),
        _block("numbers", [*_numbers(shown), *by_offset]),
        _block("time", spans),
        _block("decoder statistics", _numbers(card["facts"])),
        _block("scores", [*_numbers(card["scores"]), *(("remark", text) for text in unjudged(card["scores"]))]),
        *_pictures(tile, console),
        Text(card["image"] or "no image file"),
    )


def _pictures(tile: Tile, console: Console) -> Iterator[RenderableType]:
    if tile.problem or tile.pixels is None:
        return
    if console.color_system is None or console.no_color:
        yield from _letters(tile)
        return
    width = min(_MOST_COLUMNS, console.width // 2 - 2)
    shown = [half_blocks(tile.pixels, width)]
    if tile.origins is not None:
        accepted = (tile.origins == ACCEPTED)[..., None]
        shown.append(half_blocks(np.where(accepted, ACCEPTED_COLOUR, DRAWN_COLOUR).astype(np.uint8), width))
    yield Padding(Columns(shown, padding=(0, 2)), (1, 0, 0, 0))
    if tile.origins is not None:
        keys = (
            ("■", _rgb(ACCEPTED_COLOUR)),
            " accepted draft  ",
            ("■", _rgb(DRAWN_COLOUR)),
            " sampled from p or the residual",
        )
        yield Text.assemble(*keys)


def half_blocks(pixels: np.ndarray, columns: int) -> Text:
    """Render an image, uint8 [H, W, 3], as lines of `columns` half-block characters."""
    height = max(2, 2 * round(columns * pixels.shape[0] / pixels.shape[1] / 2))
    method = Image.Resampling.LANCZOS if columns < pixels.shape[1] else Image.Resampling.NEAREST
    small = np.asarray(Image.fromarray(pixels).resize((columns, height), method))
    text = Text(no_wrap=True)
    for top, bottom in zip(small[0::2], small[1::2], strict=True):
        for upper, lower in zip(top, bottom, strict=True):
            text.append("▀", Style(color=_rgb(upper), bgcolor=_rgb(lower)))
        text.append("\n")
    return text


def _letters(tile: Tile) -> Iterator[RenderableType]:
    if tile.origins is not None:
        lines = ("".join("#" if place == ACCEPTED else "." for place in row) for row in tile.origins)
        yield Padding(Text("\n".join(lines)), (1, 0, 0, 0))
        yield Text("# accepted draft, . sampled from p or the residual")


def _rgb(colour) -> str:
    return "rgb({},{},{})".format(*(int(part) for part in colour))


def _title(text: str, under: str) -> RenderableType:
    return Group(Text(one_line(text), style="bold"), Text(one_line(under), style="dim"))


def _block(title: str, lines) -> RenderableType:
    """Names and values under a title; empty without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(Text(one_line(str(name))), Text(one_line(str(value))))
    if not table.rows:
        return Group()
    return Padding(Group(Text(title, style="bold dim"), table), (1, 0, 0, 0))


def _numbers(values: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [(name, MISSING if value is None else f"{value:,.4g}") for name, value in values.items()]
