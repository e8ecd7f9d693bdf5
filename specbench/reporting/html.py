"""HTML report (`specbench report --html`): one self-contained file for small and large screens, light and dark.

The template escapes all text; only the SVG of `plots` is inserted unescaped. The page has no script, and its content
security policy forbids loading anything.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup
from PIL import Image

from specbench.reporting import plots
from specbench.reporting.columns import MISSING, number, with_interval
from specbench.reporting.compare import corrected, quality_rows
from specbench.reporting.image_tiles import Tile, first_prompts, tiles
from specbench.reporting.pareto import Point, lower_is_better, pareto
from specbench.reporting.plot_data import PlotData, gather
from specbench.reporting.report_rows import report_rows
from specbench.reporting.sections import Section, circumstances, definitions, sections
from specbench.system.environment import now
from specbench.system.files import write_atomically
from specbench.system.version import __version__

PROMPTS = 12
"""Number of prompts in the image gallery."""
LONGEST_SIDE = 256
_EXACT_SIDE = 128
"""Images up to this size are embedded losslessly; larger ones as small JPEGs."""


def write_page(folders: Sequence[Path], path: Path, limit: int = PROMPTS) -> Path:
    """Write the report page of these runs.

    Args:
        limit: number of prompts in each image gallery.

    Raises:
        SpecbenchError: a damaged run, or a file that cannot be written.
    """
    write_atomically(Path(path), page(report_rows(folders), limit).encode("utf-8", "backslashreplace"))
    return Path(path)


def page(rows: Sequence[Mapping], limit: int = PROMPTS) -> str:
    """Render the page of report rows; images and plot data are read from their run folders."""
    found = sections(rows)
    return template("page.html.jinja").render(
        sections=[_section(section, limit) for section in found],
        definitions=[text.partition(": ")[::2] for text in definitions(found)],
        circumstances=circumstances(rows),
        made=f"specbench {__version__}, {now()[:10]}",
        runs=len(rows),
    )


def template(name: str) -> jinja2.Template:
    """Load a template of this package, with autoescaping."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specbench.reporting"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(name)


def _section(section: Section, limit: int) -> dict:
    names = _names(section.runs)
    data = {name: gather(Path(row["folder"])) for name, row in names.items()}
    return {
        "heading": section.heading,
        "answer": section.answer,
        "tables": [
            {
                "title": table.title,
                "remark": table.remark,
                "headings": [column.heading for column in table.columns],
                "rows": [[column.cell(row) for column in table.columns] for row in section.runs],
            }
            for table in section.tables
        ],
        "differences": _differences(names),
        "figures": [*_pareto_figures(names), *_figures(names, data)],
        "maps": [
            {"name": name, "picture": _data(plots.share_picture(found.accepted))}
            for name, found in data.items()
            if found.accepted is not None
        ],
        "gallery": _gallery(names, limit),
    }


def _names(runs: Sequence[Mapping]) -> dict[str, Mapping]:
    """Name the runs uniquely: the label, with window and run id where needed."""
    names: dict[str, Mapping] = {}
    labels = [row["label"] for row in runs]
    for row in runs:
        name = row["label"]
        if labels.count(name) > 1:
            name = f"{name} W={row['options'].get('window', 1)}"
        names[name if name not in names else f"{name} {row['run_id'].rpartition('-')[2]}"] = row
    return names


def _pareto_figures(names: Mapping[str, Mapping]) -> list[dict]:
    runs = [{**row, "label": name} for name, row in names.items()]
    metrics = {(s["metric"], s["fingerprint"]): None for row in runs for s in row["scores"] if ":" not in s["metric"]}
    figures = []
    for metric, fingerprint in metrics:
        points = pareto(runs, metric, fingerprint)
        if len(points) > 1:
            drawing = plots.pareto_plot(points, metric, [row["run_id"] for row in runs])
            figures.append(_figure(f"{metric} against speed", drawing, _pareto_caption(points)))
    return figures


def _pareto_caption(points: Sequence[Point]) -> str:
    dominated = [f"{point.label} (by {point.dominated_by})" for point in points if point.dominated_by]
    listed = f"Dominated: {', '.join(dominated)}." if dominated else "No run dominates another."
    return f"Bars: 95 % confidence intervals. Hollow: Pareto-dominated. {listed}"


def _figures(names: Mapping[str, Mapping], data: Mapping[str, PlotData]) -> list[dict]:
    order = list(names)
    rates = {name: row["acceptance_by_offset"] for name, row in names.items() if row["acceptance"] is not None}
    times = {name: found.step_ms for name, found in data.items() if found.step_ms}
    logp = {name: found.logp for name, found in data.items() if found.logp is not None}
    figures = []
    if rates:
        caption = "Fraction of the verified draft tokens that were accepted, by position in the window."
        figures.append(_figure("Acceptance by window offset", plots.offsets_plot(rates, order), caption))
    if times:
        caption = "Total time of each span over the number of target forwards, without prefill and rendering."
        figures.append(_figure("Time per step", plots.time_plot(times), caption))
    if logp:
        caption = "Natural log of the target probability of each free token."
        figures.append(_figure("Log-probability of the tokens", plots.logp_plot(logp, order), caption))
    return figures


def _figure(title: str, drawing: str, caption: str) -> dict:
    return {"title": title, "drawing": Markup(drawing), "caption": caption}


def _differences(names: Mapping[str, Mapping]) -> list[list[str]]:
    """Paired score differences of every run from AR, Holm-corrected together. Distances to reference images need those
    images and are left to `specbench score --against`."""
    baselines = {row["baseline"] for row in names.values()} - {None}
    baseline = next((row for row in names.values() if row["run_id"] in baselines), None)
    if baseline is None:
        return []
    found = [
        {**difference, "run": name}
        for name, row in names.items()
        if row is not baseline
        for difference in quality_rows(
            Path(baseline["folder"]), Path(row["folder"]), wanted=lambda metric: not lower_is_better(metric)
        )
    ]
    return [
        [
            row["run"],
            row["name"],
            with_interval(row["value"], row["low"], row["high"], 3) if row["note"] is None else row["note"],
            number(row["p_holm"], 3),
            str(row["prompts_needed"] or MISSING),
        ]
        for row in corrected(found)
    ]


def _gallery(names: Mapping[str, Mapping], limit: int) -> dict:
    folders = {name: Path(row["folder"]) for name, row in names.items()}
    texts = first_prompts(next(iter(folders.values())), limit)
    columns = {name: tiles(folder, list(texts)) for name, folder in folders.items()}
    rows = [
        {"prompt": text, "tiles": [_shown(name, column.get(prompt)) for name, column in columns.items()]}
        for prompt, text in texts.items()
    ]
    most = max(row["n"] + row["failed"] for row in names.values())
    return {"rows": rows, "left_out": max(0, most - len(rows)), "columns": len(columns)}


def _shown(name: str, tile: Tile | None) -> dict:
    if tile is None or tile.problem:
        return {"name": name, "problem": tile.problem if tile else "not decoded"}
    facts = [f"{tile.nfe} steps", f"{number(tile.step_compression)} tokens per step"]
    facts += [f"{tile.latency_ms / 1e3:.2f} s"] if tile.latency_ms is not None else []
    facts += [f"{metric} {number(value, 0 if value in (0, 1) else 3)}" for metric, value in tile.scores.items()]
    return {
        "name": name,
        "problem": None,
        "picture": _picture(tile.pixels),
        "maps": []
        if tile.steps is None
        else [
            ("step that committed each token", _data(plots.step_picture(tile.steps))),
            ("accepted drafts and sampled tokens", _data(plots.origin_picture(tile.origins))),
        ],
        "facts": facts,
    }


def _picture(pixels: np.ndarray) -> str:
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    if max(image.size) <= _EXACT_SIDE:
        image.save(buffer, format="png")
        return _data(buffer.getvalue())
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    image.save(buffer, format="jpeg", quality=88)
    return _data(buffer.getvalue(), "jpeg")


def _data(picture: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
