"""HTML report (`specbench report --html`): one self-contained file for all screen sizes, dark mode and printing.

The template escapes all text. The content security policy lists the digests of the page's scripts; it forbids all
other scripts and any loading.
"""

import base64
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from specbench.metrics.catalog import unjudged
from specbench.reporting import charts, image_tiles
from specbench.reporting.columns import FASTEST, TOO_FEW, failed_audit, number, score_versions, value_of, with_interval
from specbench.reporting.compare import corrected, scores_beside, with_fingerprints
from specbench.reporting.marks import Mark, Marks, distinct, marks_of
from specbench.reporting.plot_data import pareto, speed_by_prompt, step_data, sweeps
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import ARROWS, ReportRow, ShownScore, unique_names
from specbench.reporting.sections import (
    BOLD_RULE,
    ReportTable,
    Section,
    circumstances,
    definitions,
    lacks_interval,
    sections,
)
from specbench.specs.options import plain
from specbench.stats import RULE, Estimate
from specbench.store.run_info import read_info
from specbench.system.console import counted
from specbench.system.environment import now
from specbench.system.files import write_output
from specbench.system.json_values import nonfinite_as_null
from specbench.system.text_tables import TextTable, distinct_columns, plain_table
from specbench.system.version import __version__

PROMPTS = 12  # Number of prompts in the image gallery
MOST_POINTS = 300  # Maximum number of images per run in the chart of the prompts' speed-ups
LONGEST_SIDE = 256
_LONGEST_NAME = 34  # Maximum length of a run's name next to a bar or above images
_LONG_WORD = 16
_EXACT_SIDE = 128  # Images up to this side are embedded losslessly, larger images as small JPEGs
_NAMED = 4  # Maximum number of decoders in the title


def write_page(folders: Sequence[Path], path: Path) -> Path:
    """Write the report page of these runs."""
    write_output(path, page(report_rows(folders)).encode("utf-8", "backslashreplace"))
    return path


def page(rows: Sequence[ReportRow]) -> str:
    """Render the page of report rows; images and plot data are read from their run folders."""
    grouped = sections(rows)
    shown = [_section(section) for section in grouped]
    drawn = [chart for section in shown for chart in (*section["charts"], *section["folded_charts"])]
    return template("page.html.jinja").render(
        title=_title(rows),
        sections=shown,
        **scripts(drawn, "page.js"),
        definitions=[text.partition(": ")[::2] for text in definitions(grouped)],
        circumstances=circumstances(rows),
        repeat=_repeat(rows),
        made=f"specbench {__version__}, {now()[:10]}",
        runs=len(rows),
    )


def _repeat(rows: Sequence[ReportRow]) -> TextTable:
    """Make the table for repeating the runs: command, options, hardware, versions and folder."""
    lines = []
    for row in rows:
        folder = row.folder
        options = [f"{name}={plain(value)}" for name, value in row.options.items()]
        inline = f"{row.decoder}:{','.join(options)}" if options else row.decoder
        command = read_info(folder).command(inline, folder.parent)
        lines.append((row.label, command, ", ".join(options) or "-", "; ".join(row.machine.environment), str(folder)))
    return plain_table(("decoder", "command", "options", "hardware and versions", "folder"), lines)


def _title(rows: Sequence[ReportRow]) -> str:
    """Make the title of the page from the decoders, AR last, and the models."""
    decoders, models = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("decoder", "model"))
    others = [name for name in decoders if name != "ar"]
    some = others[:_NAMED] if len(others) > _NAMED + 1 else others
    more = f" and {len(others) - len(some)} more" if len(others) > len(some) else ""
    against = " compared with ar" if others and "ar" in decoders else "" if others else "ar"
    return f"{', '.join(some)}{more}{against} on {', '.join(models)}"


def page_charts(rows: Sequence[ReportRow]) -> list[charts.Chart]:
    """Make the charts of these report rows in the order of the page. Each run has a mark of its own."""
    shown = [_names(section.runs) for section in sections(rows)]
    return [
        chart for names in shown for of in (_main_charts, _step_charts) for chart in of(names, distinct(_marks(names)))
    ]


def template(name: str) -> jinja2.Template:
    """Load a template of this package, with autoescaping."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specbench.reporting"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"numbers": charts.numbers, "bold_rule": BOLD_RULE}
    environment.filters["breakable"] = breakable
    return environment.get_template(name)


def breakable(text: str) -> Markup:
    """Escape a name, and allow line breaks in long words, such as `package.module:NAME`, only after punctuation."""
    words = (re.split(r"(?<=[.:,;/_=])(?=\w)", word) if len(word) > _LONG_WORD else [word] for word in text.split(" "))
    return Markup(" ").join(Markup("<wbr>").join(map(escape, parts)) for parts in words)


def scripts(shown: Sequence[charts.Chart], *others: str) -> dict[str, object]:
    """Return variables of the base template: `scripts`, their `digests` for the content security policy, `charts` as
    JSON.

    Without charts, the plotting library is not included. Each chart gets its index in the list as `place`.
    """
    for place, chart in enumerate(shown):
        chart["place"] = place
    # The library's licences must be included in every copy of the library.
    library = f"/*\n{_script('observable-plot.licences.txt')}*/\n{_script('observable-plot.min.js')}"
    texts = [*([library, _script("charts.js")] if shown else []), *map(_script, others)]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    data = json.dumps(nonfinite_as_null(list(shown)), allow_nan=False).replace("<", "\\u003c")
    return {"scripts": [Markup(text) for text in texts], "digests": digests, "charts": Markup(data)}


@functools.cache
def _script(name: str) -> str:
    return (files("specbench.reporting") / "scripts" / name).read_text(encoding="utf-8")


def _marks(names: Mapping[str, ReportRow]) -> dict[str, Mark]:
    by_decoder = marks_of(row.decoder for row in names.values())
    return {name: by_decoder[row.decoder] for name, row in names.items()}


def _section(section: Section) -> dict[str, Any]:
    names = _names(section.runs)
    marks = _marks(names)
    accepted = {name: image_tiles.mean_map(row.folder, "accepted") for name, row in names.items()}
    folded = [
        page_table(table, section.runs)
        for table in section.tables
        # Show a table of a metric's parts only if a part has enough images for an interval.
        if not table.title
        or any("[" in text and TOO_FEW not in text for row in table.texts(section.runs).rows for text, _ in row)
    ]
    return {
        "heading": section.heading,
        "answer": section.answer,
        "headline": _headline(names, marks),
        "table": page_table(section.first, section.runs, best=True),
        "has_intervals": not lacks_interval(section.runs, parts=False),
        "marks": [*marks.values()],
        "legend": {row.decoder: marks[name] for name, row in names.items()},
        "folded": folded + _differences(names),
        "charts": _main_charts(names, marks),
        "folded_charts": _step_charts(names, marks),
        "maps": [
            {"name": name, "picture": data_url(image_tiles.share_picture(shares))}
            for name, shares in accepted.items()
            if shares is not None
        ],
        "gallery": _gallery(names, marks),
    }


def page_table(table: ReportTable, runs: Sequence[ReportRow], best: bool = False) -> TextTable:
    """Remove empty columns, and move values that all rows share below the table. `best`: see `ReportTable.texts`."""
    columns = table.columns
    if all(value_of(row.over_fastest.speedup_fastest) in (None, value_of(row.over_ar.speedup)) for row in runs):
        columns = [column for column in columns if column is not FASTEST]  # it would repeat the speed-up
    texts = replace(table, columns=columns, title=table.title or table.topic).texts(runs, best)
    kept = [column.heading for column in columns if column.kept]
    texts = distinct_columns(replace(texts, headings=[column.heading for column in columns]), kept)
    titles = {column.heading: column.title.replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓") for column in columns}
    notes = [f"{text.rstrip('.')}." for text in texts.notes]
    return replace(texts, headings=[titles[heading] for heading in texts.headings], notes=notes)


class _Measure(NamedTuple):
    """One number of each run, drawn on lines at the top of a section."""

    heading: str
    digits: int
    values: Mapping[str, Estimate]  # by name of the run
    ar: float | None
    too_few: Set[str]  # names of runs with too few prompts for an interval

    def cell(self, name: str) -> list[Any]:
        """Return value, bounds and AR's value as positions on a line in percent, and the text; empty if missing."""
        if (shown := self.values.get(name)) is None:
            return []
        every = [end for estimate in self.values.values() for end in (estimate.value, estimate.low, estimate.high)]
        known = [end for end in (*every, self.ar) if end is not None and math.isfinite(end)]
        low, high = min(known, default=0.0), max(known, default=0.0)

        def percent(value: float | None) -> float | None:
            share = min(max(((value or 0.0) - low) / (high - low), 0.0), 1.0) if high > low else 0.5
            return None if value is None else round(2 + 96 * share, 1)

        text = with_interval(shown, self.digits, too_few=name in self.too_few)
        return [*map(percent, (shown.value, shown.low, shown.high, self.ar)), text]


def _headline(names: Mapping[str, ReportRow], marks: Marks) -> dict[str, Any]:
    """Collect speed and up to two scores of each run, grouped as lossless, not lossless, and other programs. In a
    group, the fastest run is first."""
    measures = [_speed(names), *_two_scores(names)]
    speeds = measures[0].values
    groups: dict[str, list[Any]] = {"lossless": [], "not lossless": [], "other programs": []}
    for name in sorted(names, key=lambda name: -speeds[name].value if name in speeds else math.inf):
        row = names[name]
        exactness = "lossless" if row.lossless and not failed_audit(row) else "not lossless"
        shown = name, marks[name], [measure.cell(name) for measure in measures]
        groups["other programs" if row.imported else exactness].append(shown)
    shown_groups = {kind: group for kind, group in groups.items() if group}
    return {"headings": [measure.heading for measure in measures], "groups": shown_groups}


def _speed(names: Mapping[str, ReportRow]) -> _Measure:
    """Return the first available measure of speed: speed-up, images per hour, or tokens per step."""
    speeds = {name: speed for name, row in names.items() if (speed := row.over_ar.speedup) and speed.value}
    baselines = {name for name in speeds if names[name].over_ar.baseline == names[name].run_id}
    speeds |= {name: Estimate(1.0) for name in baselines}  # 1 by definition
    if speeds:
        few = {name for name in speeds if speeds[name].low is None} - baselines
        return _Measure("speed-up ↑ [95 %]", 2, speeds, 1.0, few)
    key = "images_per_hour" if any(row.number("images_per_hour") for row in names.values()) else "tokens_per_step"
    rates = {name: Estimate(rate.value) for name, row in names.items() if (rate := row.number(key))}
    ar = next((rate.value for name, rate in rates.items() if names[name].is_ar), None)
    return _Measure(f"{key.replace('_', ' ')} ↑", 2, rates, ar, set())


def _two_scores(names: Mapping[str, ReportRow]) -> list[_Measure]:
    """Return the two scores that most runs have; on a tie, first the scores with a test (intervals, no distances)."""
    by_version: dict[tuple[str, str], dict[str, ShownScore]] = {}
    for name, row in names.items():
        for score in row.scores:
            if score.whole:
                by_version.setdefault((score.metric, score.fingerprint), {})[name] = score

    def order(version: tuple[Any, dict[str, ShownScore]]) -> tuple[int, bool]:
        scores = version[1].values()
        return -len(scores), any(score.kind == "distance" or score.estimate.low is None for score in scores)

    ar = next((name for name, row in names.items() if row.is_ar), None)
    measures = []
    for (metric, digest), scores in sorted(by_version.items(), key=order)[:2]:
        version = score_versions(metric, [*names.values()])[digest]
        heading = f"{metric}{version} {ARROWS[next(iter(scores.values())).better]}"
        values = {name: score.estimate for name, score in scores.items()}
        few = {name for name, score in scores.items() if score.too_few}
        measures.append(_Measure(heading, 3, values, scores[ar].estimate.value if ar in scores else None, few))
    return measures


def _names(runs: Sequence[ReportRow]) -> dict[str, ReportRow]:
    """Return {unique name that is short enough for a page: run}."""
    names: dict[str, ReportRow] = {}
    for name, row in unique_names(runs).items():
        digest = row.run_id.rpartition("-")[2]
        short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        names[short if short not in names else f"{short[: _LONGEST_NAME - 9]}… {digest[:8]}"] = row
    return names


def _main_charts(names: Mapping[str, ReportRow], marks: Marks) -> list[charts.Chart]:
    """Chart each score against speed, the factors of the speed-up, the speed-up of each prompt, and sweeps."""
    runs = [replace(row, label=name) for name, row in names.items()]
    metrics = dict.fromkeys(score.metric for row in runs for score in row.scores if score.whole)
    versions = [(metric, *version_of) for metric in metrics for version_of in score_versions(metric, runs).items()]
    fronts = {metric + version: pareto(runs, metric, digest) for metric, digest, version in versions}
    drawn = [charts.pareto_chart(points, metric, marks) for metric, points in fronts.items() if len(points) > 1]
    timed = {name: row for name, row in names.items() if row.over_ar.speedup is not None and not row.is_ar}
    if not timed:
        return drawn
    total = {name: speed for name, row in timed.items() if (speed := row.over_ar.speedup)}
    folders = {name: (row.folder, ar) for name, row in timed.items() if (ar := row.over_ar.ar_folder)}
    ratios = {name: speed_by_prompt(*pair, MOST_POINTS) for name, pair in folders.items()}
    drawn += [charts.parts_chart(timed), charts.prompts_chart(ratios, total, marks)]
    by_decoder = {row.decoder: marks[name] for name, row in names.items()}
    for option, curves in sweeps(list(timed.values())).items():
        drawn.append(charts.sweep_chart(option, curves, {name: by_decoder[name.split()[0]] for name in curves}))
    return drawn


def _step_charts(names: Mapping[str, ReportRow], marks: Marks) -> list[charts.Chart]:
    """Chart acceptance, time and log-probabilities of the steps."""
    data = {name: step_data(row.folder) for name, row in names.items()}
    rates = {name: row.series("acceptance_by_offset") for name, row in names.items() if row.number("acceptance")}
    times = {name: drawn.step_ms for name, drawn in data.items() if drawn.step_ms}
    logp = {name: drawn.logp for name, drawn in data.items() if drawn.logp is not None}
    drawn = [charts.offsets_chart(rates, marks)] if rates else []
    drawn += [charts.time_chart(times)] if times else []
    return drawn + ([charts.logp_chart(logp, marks)] if logp else [])


def _differences(names: Mapping[str, ReportRow]) -> list[TextTable]:
    """Compare each run's scores with AR's (paired, corrected per run): a table of the real differences, and a sentence
    about the other scores. Distances to reference images are excluded, see `specbench score --against`."""
    baselines = {row.over_ar.baseline for row in names.values()} - {None}
    baseline = next((row for row in names.values() if row.run_id in baselines), None)
    tested = [
        (name, score, score.p_holm)
        for name, row in names.items()
        if baseline is not None and row is not baseline
        for score in with_fingerprints(corrected(scores_beside(baseline.folder, row.folder)))
        if score.p_holm is not None
    ]
    if not tested:
        return []
    real = [(name, score.name, with_interval(score.estimate, 3), f"{p:.4f}") for name, score, p in tested if score.real]
    least = min((p for _, score, p in tested if not score.real), default=None)
    headings = ("decoder", "score", "difference [95 %]", "p, corrected")
    sentence = f"{RULE} Of {counted(len(tested), 'score difference')}, {len(real) or 'none'} "
    sentence += "is real" if len(real) < 2 else "are real"
    sentence += "." if least is None else f"; the smallest p of the other differences is {number(least, 3)}."
    return [plain_table(headings if real else (), real, "Score differences from AR", [sentence])]


def _gallery(names: Mapping[str, ReportRow], marks: Marks) -> dict[str, Any]:
    folders = {name: row.folder for name, row in names.items()}
    prompts = image_tiles.first_prompts(next(iter(folders.values())), PROMPTS)
    columns = {name: image_tiles.tiles(folder, list(prompts)) for name, folder in folders.items()}
    rows = [
        {
            "prompt": shown.text,
            "category": shown.category,
            "tiles": [_shown(name, marks[name], column.get(prompt)) for name, column in columns.items()],
        }
        for prompt, shown in prompts.items()
    ]
    most = max(row.n + row.failed for row in names.values())
    categories = list(dict.fromkeys(shown.category for shown in prompts.values() if shown.category))
    return {
        "rows": rows,
        "left_out": max(0, most - len(rows)),
        "columns": len(columns),
        "unjudged": unjudged(score.stored for row in names.values() for score in row.scores),
        "categories": categories if len(categories) > 1 else [],
    }


def _shown(name: str, mark: Mark, tile: image_tiles.Tile | None) -> dict[str, Any]:
    if tile is None or tile.pixels is None:
        return {"name": name, "mark": mark, "problem": tile.problem if tile else "not decoded", "facts": []}
    facts = [f"NFE {tile.nfe}"] if tile.nfe is not None else []
    facts += [f"{tile.latency_ms / 1e3:.2f} s"] if tile.latency_ms is not None else []
    facts += [f"{metric} {number(value, 0 if value in (0, 1) else 3)}" for metric, value in tile.scores.items()]
    return {
        "name": name,
        "mark": mark,
        "problem": None,
        "picture": _picture(tile.pixels),
        "steps": tile.steps is not None and data_url(image_tiles.step_picture(tile.steps)),
        "origins": tile.origins is not None and data_url(image_tiles.origin_picture(tile.origins)),
        "facts": facts,
    }


def _picture(pixels: np.ndarray) -> str:
    if max(pixels.shape[:2]) <= _EXACT_SIDE:
        return data_url(image_tiles.png(pixels))
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    image.save(buffer, format="jpeg", quality=88)
    return data_url(buffer.getvalue(), "jpeg")


def data_url(picture: bytes, kind: str = "png") -> str:
    """Encode a picture as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
