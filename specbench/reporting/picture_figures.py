"""Figures of images (`specbench figure`): images of several runs for chosen prompts, and token maps."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import SpecbenchError
from specbench.reporting.figures import WIDTHS, Drawn, saved
from specbench.reporting.image_tiles import first_prompts, mean_map, tiles
from specbench.reporting.plotting import styled
from specbench.reporting.text_formats import csv_text
from specbench.store.schema import TRACES
from specbench.system.console import printable
from specbench.system.files import write_output

_GRID = "pictures"
TOKEN_MAPS = {
    "map-of-entropy": ("entropy", "entropy of p (nats)"),
    "map-of-top-1": ("top1", "largest probability of p"),
    "map-of-accepted-drafts": ("accepted", "share of accepted drafts"),
    "map-of-draft-top-1": ("draft_top1", "largest probability of q"),
    "map-of-draft-tv": ("draft_tv", "total variation of p and q"),
}
"""{figure: (quantity of `specbench.reporting.image_tiles.mean_map`, label of the colour bar)}."""
PICTURE_FIGURES = (_GRID, *TOKEN_MAPS)
_PROMPTS, _ANY_PROMPTS, _LABEL = 4, 100_000, 0.3


@dataclass(frozen=True)
class Grid:
    """Pictures in rows and columns: [H, W, 3] pixels, [H, W] numbers with a colour bar, or None if missing. `bar`:
    label of the colour bar; `numbers`: lines of the csv file, as dicts."""

    columns: Sequence[str]
    rows: Sequence[str]
    pictures: Sequence[Sequence[np.ndarray | None]]
    bar: str | None
    numbers: Sequence[Mapping[str, object]]

    @property
    def csv(self) -> str:
        return csv_text(self.numbers)


def find_grid(runs: Mapping[str, Path], name: str) -> Grid:
    """Make the grid of the figure `name` in `PICTURE_FIGURES`. `runs`: {label: run folder}. "pictures:WORDS,..."
    selects prompts by the start of an id or a part of the text."""
    kind, _, words = name.partition(":")
    if not runs:
        raise SpecbenchError(f"figure {kind}: no runs")
    return _images(runs, words) if kind == _GRID else _token_map(runs, kind)


def _images(runs: Mapping[str, Path], words: str) -> Grid:
    prompts = first_prompts(next(iter(runs.values())), _ANY_PROMPTS if words else _PROMPTS)
    chosen = list(prompts)
    if words:
        texts = {key: shown.text for key, shown in prompts.items()}
        chosen = list(dict.fromkeys(_prompt(texts, word.strip()) for word in words.split(",")))
    of_runs = {label: tiles(folder, chosen) for label, folder in runs.items()}
    pictures = [[tile.pixels if (tile := of.get(key)) else None for of in of_runs.values()] for key in chosen]
    if all(pixels is None for row in pictures for pixels in row):
        raise SpecbenchError(f"figure {_GRID}: these runs have no stored images of these prompts")
    numbers = [
        {"prompt_id": key, "prompt": prompts[key].text, "run": label, "steps": of[key].nfe}
        for key in chosen
        for label, of in of_runs.items()
        if key in of
    ]
    return Grid(list(runs), [prompts[key].text for key in chosen], pictures, None, numbers)


def _prompt(texts: Mapping[str, str], word: str) -> str:
    if not (near := [key for key, text in texts.items() if key.startswith(word) or word in text]):
        raise SpecbenchError(f"figure {_GRID}: no decoded prompt has '{word}' in its text or id")
    return near[0]


def _token_map(runs: Mapping[str, Path], kind: str) -> Grid:
    quantity, bar = TOKEN_MAPS[kind]
    maps = {label: shown for label, folder in runs.items() if (shown := mean_map(folder, quantity)) is not None}
    if not maps:
        needs = "use a run of a decoder with drafts" + ", made with --trace" * (quantity in TRACES.names)
        raise SpecbenchError(f"figure {kind}: no run here has this map", needs)
    numbers = [
        {"run": label, "row": row, "column": column, "value": value}
        for label, shown in maps.items()
        for (row, column), value in np.ndenumerate(shown)
    ]
    return Grid(list(maps), [""], [list(maps.values())], bar, numbers)


def write_pictures(runs: Mapping[str, Path], path: Path) -> Path:
    """Write the pictures of the first prompts as a PNG file, with a column per run. `runs`: {label: run folder}."""
    write_output(path, saved(grid_figure(_images(runs, ""), "page"), "png"))
    return path


def grid_figure(grid: Grid, width: str = "column") -> Drawn:
    """Draw a grid; arguments as in `specbench.reporting.figures.chart_figure`."""
    inches = WIDTHS[width]
    side = inches / len(grid.columns)  # side of a picture; a letter of size 6 is 1/20 inch wide
    height = side * len(grid.rows) + _LABEL + (2 * _LABEL if grid.bar else 0)
    pictures = [picture for row in grid.pictures for picture in row if picture is not None]
    top = max(map(np.nanmax, pictures), default=1) if grid.bar else 1
    with styled():
        figure = Drawn((inches, height), layout="constrained")
        panels: Any = figure.subplots(len(grid.rows), len(grid.columns), squeeze=False)
        image = None
        for place, (label, row) in enumerate(zip(grid.rows, grid.pictures, strict=True)):
            for axes, column, picture in zip(panels[place], grid.columns, row, strict=True):
                axes.set(xticks=[], yticks=[], frame_on=False)
                if place == 0:
                    axes.set_title("\n".join(textwrap.wrap(printable(column), max(6, int(20 * side)))), fontsize=6)
                if picture is not None:
                    image = axes.imshow(picture, cmap="cividis", vmin=0, vmax=top, interpolation="nearest")
            lines = textwrap.wrap(printable(label), max(6, int(22 * side)), max_lines=3, placeholder=" …")
            panels[place][0].set_ylabel("\n".join(lines), fontsize=5)
        if grid.bar and image is not None:
            figure.colorbar(image, ax=panels, label=grid.bar, location="bottom", aspect=40)
    return figure
