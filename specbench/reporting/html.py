"""HTML report (`specbench report --html`): one self-contained file for small and large screens, light and dark.

The template escapes all text. The page runs two scripts of its own, named by their digests in its content security
policy, which forbids any other script and loading anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from specbench.reporting import charts, maps
from specbench.reporting.columns import MISSING, number, with_interval
from specbench.reporting.compare import corrected, quality_rows
from specbench.reporting.image_tiles import Tile, category_means, first_prompts, tiles, values_per_image
from specbench.reporting.plot_data import lower_is_better, pareto, speed_by_prompt, step_data, sweeps
from specbench.reporting.report_rows import report_rows
from specbench.reporting.sections import Section, circumstances, definitions, sections
from specbench.stats import Estimate
from specbench.system.environment import now
from specbench.system.files import write_output
from specbench.system.json_values import nonfinite_as_null
from specbench.system.version import __version__

PROMPTS = 12
"""Number of prompts in the image gallery."""
MOST_POINTS = 300
"""Images of a run in the chart of each prompt's speed-up."""
LONGEST_SIDE = 256
_LONGEST_NAME = 34
"""Characters of a run's name beside a bar or over a column of images."""
_LONG_WORD = 16
_EXACT_SIDE = 128
"""Images up to this size are embedded losslessly; larger ones as small JPEGs."""


def write_page(folders: Sequence[Path], path: Path, limit: int = PROMPTS) -> Path:
    """Write the report page of these runs.

    Args:
        limit: number of prompts in each image gallery.

    Raises:
        SpecbenchError: a damaged run, or a file that cannot be written.
    """
    write_output(Path(path), page(report_rows(folders), limit).encode("utf-8", "backslashreplace"))
    return Path(path)


def page(rows: Sequence[Mapping], limit: int = PROMPTS) -> str:
    """Render the page of report rows; images and plot data are read from their run folders."""
    found = sections(rows)
    shown = [_section(section, limit) for section in found]
    return template("page.html.jinja").render(
        sections=shown,
        **scripts([chart for section in shown for chart in section["charts"]], "gallery.js"),
        definitions=[text.partition(": ")[::2] for text in definitions(found)],
        circumstances=circumstances(rows),
        made=f"specbench {__version__}, {now()[:10]}",
        runs=len(rows),
    )


def page_charts(rows: Sequence[Mapping]) -> list[charts.Chart]:
    """The charts of the page of these report rows, in its order."""
    found = [_section(section, 0) for section in sections(rows)]
    return [chart for one in found for name in ("charts", "folded_charts") for chart in one.get(name, ())]


def template(name: str) -> jinja2.Template:
    """Load a template of this package, with autoescaping."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specbench.reporting"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["numbers"] = charts.numbers
    environment.filters["breakable"] = breakable
    return environment.get_template(name)


def breakable(text: str) -> Markup:
    """Escape a name so that its long words, such as `package.module:NAME`, are broken after punctuation alone."""
    words = (re.split(r"(?<=[.:,;/_=])(?=\w)", word) if len(word) > _LONG_WORD else [word] for word in text.split(" "))
    return Markup(" ").join(Markup("<wbr>").join(map(escape, parts)) for parts in words)


def scripts(shown: Sequence[charts.Chart], *others: str) -> dict[str, object]:
    """What the base template needs to draw these charts and to run other scripts: `scripts`, their `digests` for its
    policy, and `charts` as JSON.

    A page without charts has no plotting library. Each chart gets its `place` in that list.
    """
    for place, chart in enumerate(shown):
        chart["place"] = place
    texts = [*([_script("observable-plot.min.js"), _script("charts.js")] if shown else []), *map(_script, others)]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    data = json.dumps(nonfinite_as_null(list(shown)), allow_nan=False).replace("<", "\\u003c")
    return {"scripts": [Markup(text) for text in texts], "digests": digests, "charts": Markup(data)}


@functools.cache
def _script(name: str) -> str:
    return (files("specbench.reporting") / "scripts" / name).read_text(encoding="utf-8")


def _section(section: Section, limit: int) -> dict:
    names = _names(section.runs)
    accepted = {name: maps.mean_map(Path(row["folder"]), "accepted") for name, row in names.items()}
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
        "charts": [*_quality_charts(names), *_speed_charts(names), *_step_charts(names)],
        "maps": [
            {"name": name, "picture": data_url(maps.share_picture(shares))}
            for name, shares in accepted.items()
            if shares is not None
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
        digest = row["run_id"].rpartition("-")[2]
        short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        names[short if short not in names else f"{short[: _LONGEST_NAME - 9]}… {digest[:8]}"] = row
    return names


def _quality_charts(names: Mapping[str, Mapping]) -> list[charts.Chart]:
    """Each score against speed, and by category where there are several."""
    runs, order = [{**row, "label": name} for name, row in names.items()], list(names)
    metrics = {(s["metric"], s["fingerprint"]): None for row in runs for s in row["scores"] if ":" not in s["metric"]}
    fronts = {metric: pareto(runs, metric, fingerprint) for metric, fingerprint in metrics}
    found = [charts.pareto_chart(points, metric, order) for metric, points in fronts.items() if len(points) > 1]
    values = {name: values_per_image(Path(row["folder"])) for name, row in names.items()}
    for metric in dict.fromkeys(metric for metric, _ in metrics):
        means = category_means(values, metric)
        found += [charts.categories_chart(metric, means, order)] if len(means) > 1 else []
    return found


def _speed_charts(names: Mapping[str, Mapping]) -> list[charts.Chart]:
    """The parts of the speed-up, the speed-up of each prompt, and sweeps."""
    timed = {name: row for name, row in names.items() if row["speedup"] is not None and row["decoder"] != "ar"}
    if not timed:
        return []
    ratios = {
        name: speed_by_prompt(Path(row["folder"]), Path(row["folder"]).parent / row["baseline"], MOST_POINTS)
        for name, row in timed.items()
    }
    total = {name: Estimate(row["speedup"], row["speedup_low"], row["speedup_high"]) for name, row in timed.items()}
    found = [charts.parts_chart(timed), charts.prompts_chart(ratios, total)]
    for option, curves in sweeps(list(timed.values())).items():
        found.append(charts.sweep_chart(option, curves, list(curves)))
    return found


def _step_charts(names: Mapping[str, Mapping]) -> list[charts.Chart]:
    """Acceptance, time and log-probabilities of the steps."""
    order, data = list(names), {name: step_data(Path(row["folder"])) for name, row in names.items()}
    rates = {name: row["acceptance_by_offset"] for name, row in names.items() if row["acceptance"] is not None}
    times = {name: found.step_ms for name, found in data.items() if found.step_ms}
    logp = {name: found.logp for name, found in data.items() if found.logp is not None}
    found = [charts.offsets_chart(rates, order)] if rates else []
    found += [charts.time_chart(times)] if times else []
    return found + ([charts.logp_chart(logp, order)] if logp else [])


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
            with_interval(row["value"], row["low"], row["high"], 3, too_few=True)
            if row["value"] is not None
            else row["note"],
            number(row["p_holm"], 3),
            f"{row['prompts_needed']:,}" if row["prompts_needed"] else MISSING,
        ]
        for row in corrected(found)
    ]


def _gallery(names: Mapping[str, Mapping], limit: int) -> dict:
    folders = {name: Path(row["folder"]) for name, row in names.items()}
    prompts = first_prompts(next(iter(folders.values())), limit)
    columns = {name: tiles(folder, list(prompts)) for name, folder in folders.items()}
    rows = [
        {
            "prompt": shown.text,
            "category": shown.category,
            "tiles": [_shown(name, column.get(prompt)) for name, column in columns.items()],
        }
        for prompt, shown in prompts.items()
    ]
    most = max(row["n"] + row["failed"] for row in names.values())
    categories = list(dict.fromkeys(shown.category for shown in prompts.values() if shown.category))
    return {
        "rows": rows,
        "left_out": max(0, most - len(rows)),
        "columns": list(columns),
        "categories": categories if len(categories) > 1 else [],
    }


def _shown(name: str, tile: Tile | None) -> dict:
    if tile is None or tile.problem:
        return {"name": name, "problem": tile.problem if tile else "not decoded"}
    facts = [f"{tile.nfe} steps"]
    facts += [f"{tile.latency_ms / 1e3:.2f} s"] if tile.latency_ms is not None else []
    facts += [f"{metric} {number(value, 0 if value in (0, 1) else 3)}" for metric, value in tile.scores.items()]
    return {
        "name": name,
        "problem": None,
        "picture": _picture(tile.pixels),
        "steps": tile.steps is not None and data_url(maps.step_picture(tile.steps)),
        "origins": tile.origins is not None and data_url(maps.origin_picture(tile.origins)),
        "facts": facts,
    }


def _picture(pixels: np.ndarray) -> str:
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    if max(image.size) <= _EXACT_SIDE:
        image.save(buffer, format="png")
        return data_url(buffer.getvalue())
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    image.save(buffer, format="jpeg", quality=88)
    return data_url(buffer.getvalue(), "jpeg")


def data_url(picture: bytes, kind: str = "png") -> str:
    """A picture as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
