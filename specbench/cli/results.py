"""Commands `specbench score` and `specbench report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import (
    TABLE_FORMATS,
    Baseline,
    Caption,
    Columns,
    Digits,
    Gates,
    Json,
    Notes,
    Offline,
    Out,
    OwnRows,
    Quiet,
    Reference,
    Runs,
    To,
    chosen_format,
    format_option,
    metric_option,
    model_option,
    option,
    prompts_option,
    protocol_option,
    runs_argument,
    switch,
)
from specbench.cli.output import print_json, print_table, print_written, write_or_print
from specbench.cli.progress import ScoreProgress
from specbench.errors import SpecbenchError, unknown_name
from specbench.runs.settings import split_list
from specbench.system import console

if TYPE_CHECKING:
    from specbench.reporting.compare import Gate

_REPORT = help_of(
    "report",
    "With the name of a paper's table (see specbench list tables) instead of runs: print that table, with the "
    "paper's values beside the values of the runs in the results folder.",
)


def add_to(app: typer.Typer) -> None:
    app.command(
        name="score",
        help=help_of("score"),
        epilog="Then: specbench report",
    )(score)
    app.command(name="report", help=_REPORT)(report)


_Metrics = Annotated[list[str] | None, metric_option("Compute only this metric; may be repeated.")]
_PromptColumn = Annotated[str | None, option("--prompt-column", "NAME", "Column of --prompts that holds the texts.")]
_Bundled = Annotated[bool, switch("--bundled-only", "Compute only the metrics that need no download.")]
_Protocol = Annotated[str | None, protocol_option("Metrics and settings")]
_Device = Annotated[
    str | None, option("--device", "DEVICE", "Torch device of the metrics' networks.", show_default="the best here")
]
_Batch = Annotated[
    int | None,
    option("--batch", "N", "Images per forward of a metric's network.", min=1, max=4096, show_default="the metric's"),
]
_LAYOUTS = ("ids", "lines", "annotations", "captions", "geneval", "dataset", "grids")
_Images = Annotated[
    Path | None,
    option(
        "--images",
        "DIR",
        "Score external images, named by prompt id, as the papers' programs do, or by metadata.jsonl or .csv.",
    ),
]
_Layout = Annotated[
    str | None,
    option(
        "--layout",
        "NAME",
        f"Names of the files of --images: {', '.join(_LAYOUTS)}.",
        show_default="the one that fits",
        autocompletion=completion.of(*_LAYOUTS),
    ),
]
_Against = Annotated[
    str | None,
    option("--against", "RUN", "Print paired score differences from this run instead.", autocompletion=completion.runs),
]
_CrossCheck = Annotated[
    bool, switch("--cross-check", "Compare the scores with the metrics' authors' packages instead.")
]
_Python = Annotated[
    Path | None,
    option(
        "--python",
        "FILE",
        "Python of the environment with the package of --cross-check, VQAScore or HPSv3.",
        show_default="as 'specbench doctor --cross-check' says",
    ),
]


def score(
    runs: Runs = None,
    metric: _Metrics = None,
    protocol: _Protocol = None,
    bundled_only: _Bundled = False,
    device: _Device = None,
    batch: _Batch = None,
    reference: Reference = None,
    offline: Offline = False,
    images: _Images = None,
    prompts: Annotated[str | None, prompts_option("Prompts of --images, if not those of its metadata.")] = None,
    layout: _Layout = None,
    prompt_column: _PromptColumn = None,
    against: _Against = None,
    cross_check: _CrossCheck = False,
    python: _Python = None,
    out: Out = "results",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    if bundled_only and (metric or protocol):
        raise SpecbenchError("--bundled-only excludes --metric and --protocol")
    if quiet:
        console.show_progress(False)
    from specbench.metrics.catalog import require_metric, with_protocol

    metric = [require_metric(name) for name in metric or ()]
    names = with_protocol(metric, protocol)
    _check_score(images, prompts, bool(runs), bool(names), against, cross_check)
    named = [*(runs or ()), *([against] if against else [])]
    if images is None and named:
        _find_scored(named, out)  # before torch is loaded
    if cross_check:
        from specbench.checks import cross_check as by_packages
    if python:
        from specbench.metrics.packages import require_python

        require_python(python)
    from specbench import api
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import joint_problem
    from specbench.system.torch_device import AUTO, chosen_device

    settings = Settings(chosen_device(device or AUTO, float64=False), batch, reference, offline, python)
    settings.check()
    options = {"protocol": protocol, "settings": settings, "reporter": None if quiet else ScoreProgress()}
    options["bundled_only"] = bundled_only
    if layout and images is None:
        raise SpecbenchError("--layout requires --images", "it says how the files of a folder are named")
    problems: list[SpecbenchError] = []
    if images is not None:
        rows = api.score_folder(images, prompts, metric or None, out, layout=layout, column=prompt_column, **options)
    else:
        rows = api.score(named if runs else (), metric or None, out, problems=problems, **options)
    if cross_check:
        rows = by_packages.cross_check(names, runs or (), out, images, prompts, settings, python, layout)
        return print_json(rows) if json else print_table(rows, list(rows[0]) if rows else ())
    if against:
        rows = api.differences(against, runs or (), names, out, settings)
    if not quiet and images is None:
        _say_drawn(out, named if runs else ())
    _print_scores(rows, bool(against), json)
    if problems:
        raise joint_problem(problems, others=bool(rows))
    if not rows and not against:
        raise _no_score(out, named)


def _no_score(out: str, names: Sequence[str]) -> SpecbenchError:
    """Why nothing was scored."""
    import pandas as pd

    from specbench.store.run_folders import find_runs
    from specbench.store.run_store import RunStore

    rows = pd.concat([RunStore(folder).samples(["status", "error", "image"]) for folder in find_runs(out, names)])
    if len(rows) and rows["status"].ne("ok").all():
        return SpecbenchError(f"no score: no image was decoded; the first failed: {rows['error'].iloc[0]}")
    if len(rows) and rows["image"].isna().all():
        return SpecbenchError("no score: these runs have no pictures", "their `specbench run` warned why")
    return SpecbenchError(
        "no score: none of these metrics scores these prompts without reference images",
        "--reference FOLDER of real images, or --metric; see: specbench list metrics",
    )


def _find_scored(names: Sequence[str], out: str) -> None:
    """Refuse names of no run; that of a metric is told its flag."""
    from specbench.metrics.catalog import metric_names
    from specbench.store.run_folders import find_runs

    try:
        find_runs(out, names)
    except SpecbenchError as error:
        metric = next((name for name in names if name in {known.partition("[")[0] for known in metric_names()}), None)
        if metric is None:
            raise
        raise SpecbenchError(
            error.what, f"a metric is named with its flag: specbench score --metric {metric}"
        ) from None


def _check_score(
    images: Path | None,
    prompts: str | None,
    runs: bool,
    metrics: bool,
    against: str | None,
    cross_check: bool,
) -> None:
    """Refuse flags of `score` that contradict or need each other; `runs`, `metrics`: whether any is named."""
    if images is None and prompts is not None:
        raise SpecbenchError("--prompts requires --images", "a run knows its own prompts")
    if images is not None and runs:
        raise SpecbenchError("--images and RUN exclude each other", "--images scores a folder of external images")
    if against and (images is not None or not metrics):
        raise SpecbenchError("--against compares runs by metric", "name the metrics with --metric or --protocol")
    if cross_check and (against or not metrics):
        raise SpecbenchError("--cross-check compares by metric", "name the metrics with --metric or --protocol")


def _say_drawn(out: str, names: Sequence[str]) -> None:
    """Say which prompts the scored runs decoded, where these are a part of their set."""
    from specbench.store.run_folders import find_runs
    from specbench.store.run_store import RunStore

    runs: dict[str, list[str]] = {}
    for folder in find_runs(out, names):
        if drawn := RunStore(folder).info().drawn:
            runs.setdefault("; ".join(drawn), []).append(folder.name)
    for drawn, folders in runs.items():
        console.say(f"prompts drawn: {drawn} ({', '.join(folders)})")


def _print_scores(rows: Sequence[dict], differences: bool, as_json: bool) -> None:
    if not rows and differences:
        console.say("nothing to compare: no images in common, or a metric without paired differences")
    noted = dict.fromkeys((row["note"], row["metric"]) for row in rows if row.get("note"))
    for note in dict.fromkeys(note for note, _ in noted):
        console.say(f"{', '.join(metric for other, metric in noted if other == note)}: {note}")
    if as_json:
        print_json(rows)
    elif rows:
        value, last = ("difference", ()) if differences else ("value", ("prompts_needed",))
        count = Counter((row["run_id"], row["metric"]) for row in rows)
        versions = [f" ({row['fingerprint']})" * (count[row["run_id"], row["metric"]] > 1) for row in rows]
        rows = [row | {"metric": row["metric"] + version} for row, version in zip(rows, versions, strict=True)]
        if console.is_terminal():
            return print_table(_score_lines(rows, value), ("run_id", "metric", value, "95_%", "n", *last))
        print_table(rows, ("run_id", "metric", value, "low", "high", "n", *last))


def _score_lines(rows: Sequence[dict], value: str) -> list[dict]:
    """Scores as texts: a run is named in its first line only, and parts stand below their metric."""
    from specbench.reporting.columns import TOO_FEW, between, number

    lines, last = [], None
    for row in rows:
        metric, _, part = row["metric"].partition(":")
        few = row.get("too_few", "p" in row)  # a difference always has an interval, unless it is of too few prompts
        bounds = between(row["low"], row["high"], 3) if row["low"] is not None else TOO_FEW if few else None
        lines.append(
            {
                "run_id": "" if row["run_id"] == last else row["run_id"],
                "metric": f"· {part}" if part else metric,
                value: number(row[value], 3),
                "95_%": bounds,
                "n": row["n"],
                "prompts_needed": row.get("prompts_needed"),
            }
        )
        last = row["run_id"]
    return lines


_Page = Annotated[
    Path | None, option("--html", "FILE", "Write an HTML page with tables, plots and images to this file.")
]
_Explain = Annotated[bool, switch("--explain", "Print the definition of every column.")]
_Long = Annotated[
    bool, switch("--long", "Write one row per run and number, with interval and unit: csv, json or parquet.")
]
_All = Annotated[bool, switch("--all", "Print every number of a run, in the tables behind the first one.")]
_TableModel = Annotated[
    str | None, model_option("Model to report instead of the table's model.", show_default="the table's")
]
_TablePrompts = Annotated[
    str | None, prompts_option("Prompts to report instead of the table's prompts.", show_default="the table's")
]


_Definitions = Annotated[
    Path | None, option("--definitions", "FILE.tex", "Write what the tables mean, in LaTeX, to a file of its own.")
]
_Figure = Annotated[
    str | None,
    option(
        "--figure",
        "NAME",
        "Write a chart of the HTML page, a map of tokens or pictures[:WORDS,...] of chosen prompts as pdf, svg or png "
        "(--to, --format), the numbers as csv beside it; a wrong name lists all.",
    ),
]
_Width = Annotated[str, option("--width", "KIND", "With --figure: column or page.")]
_Over = Annotated[
    str | None,
    option(
        "--over",
        "seed",
        "One row for runs that differ in the seed alone, with swept options as columns.",
        autocompletion=completion.of("seed"),
    ),
]
_Ruler = Annotated[
    bool,
    switch("--ruler", "Score losses as the share of tokens replaced at random that loses as much, by runs of replace."),
]
_Methods = Annotated[
    bool, switch("--methods", "Print a methods paragraph in LaTeX and its BibTeX; --to m.tex writes m.bib beside it.")
]


def report(
    runs: Annotated[list[str] | None, runs_argument(with_tables=True)] = None,
    fmt: Annotated[str | None, format_option(TABLE_FORMATS)] = None,
    html: _Page = None,
    everything: _All = False,
    explain: _Explain = False,
    long: _Long = False,
    to: To = None,
    columns: Columns = None,
    notes: Notes = False,
    model: _TableModel = None,
    prompts: _TablePrompts = None,
    own: OwnRows = None,
    methods: _Methods = False,
    over: _Over = None,
    ruler: _Ruler = False,
    figure: _Figure = None,
    width: _Width = "column",
    baseline: Baseline = None,
    gate: Gates = None,
    digits: Digits = None,
    caption: Caption = None,
    definitions: _Definitions = None,
    out: Out = "results",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    if quiet:
        console.show_progress(False)
    from specbench.papers.table_files import is_table, refuse_mistyped
    from specbench.reporting.columns import decimals
    from specbench.reporting.compare import Gate
    from specbench.store.merge_shards import incomplete_shards
    from specbench.store.run_folders import find_runs, shards_in

    if html and str(html).startswith("--"):
        raise SpecbenchError("--html: no file is named", "for example: specbench report --html page.html")
    _refuse_without_effect(
        {"--figure": figure, "--over": over, "--ruler": ruler, "--methods": methods},
        {
            "--html": html, "--all": everything, "--explain": explain, "--long": long, "--columns": columns,
            "--notes": notes, "--with": own, "--baseline": baseline, "--gate": gate, "--digits": digits is not None,
            "--caption": caption, "--definitions": definitions,
        },
    )  # fmt: skip
    if methods and any(map(is_table, runs or ())):
        raise SpecbenchError("--methods describes runs, not a paper's table", "name the runs: specbench list runs")
    if figure:
        return _report_figure(runs or (), out, figure, fmt, to, width, model, prompts)
    for text in incomplete_shards(shards_in(out)):
        console.warn(f"{text}: the tables lack their images")
    fmt = chosen_format(fmt, to, json, TABLE_FORMATS)
    chosen = split_list(columns or "")
    gates = [Gate.parse(text) for text in gate or ()]
    if long and (fmt not in ("csv", "json", "parquet") or any(map(is_table, runs or ()))):
        raise SpecbenchError(
            "--long takes runs and the formats csv, json and parquet", "for example: --long --to t.csv"
        )
    if any(map(is_table, runs or ())):
        from specbench.cli.bench import report_tables

        return report_tables(
            runs, model, prompts, out, fmt, to, html, chosen, notes, own or (), baseline, gates, digits, caption,
        )  # fmt: skip
    refuse_mistyped(runs or (), out)
    if model or prompts or own:
        raise SpecbenchError("--model, --prompts and --with require the name of a table", "see: specbench list tables")
    if over or ruler:
        return _report_over(over, runs or (), out, fmt, to)
    if methods:
        from specbench.reporting.methods import methods as written

        paragraph, entries = written(find_runs(out, runs or ()))
        write_or_print(paragraph if to else f"{paragraph}\n{entries}", to)
        return write_or_print(entries, to.with_suffix(".bib")) if to else None
    for page in filter(None, (html, to if fmt == "html" else None)):
        from specbench.reporting.html import write_page

        print_written(write_page(find_runs(out, runs or ()), page))
    if fmt != "html" and (to or not html):
        with decimals(digits):
            problem = _print_report(
                runs or (), out, fmt, to, everything, explain, long, chosen, notes, caption, definitions, baseline,
                gates,
            )  # fmt: skip
        if problem:
            raise problem


def _refuse_without_effect(instead: Mapping[str, object], of_tables: Mapping[str, object]) -> None:
    """Refuse options that say what to print instead of tables together, or with options of tables."""
    chosen = [name for name, given in instead.items() if given]
    others = [name for name, given in of_tables.items() if given]
    if chosen and len(chosen + others) > 1:
        raise SpecbenchError(f"{chosen[0]} excludes {(chosen + others)[1]}", "two commands write both")


def _report_figure(
    runs: Sequence[str],
    out: str,
    name: str,
    fmt: str | None,
    to: Path | None,
    width: str,
    model: str | None,
    prompts: str | None,
) -> None:
    from specbench.papers.html_page import figure_charts
    from specbench.papers.reproduce import measured_table
    from specbench.papers.table_files import is_table, load_table
    from specbench.reporting import figures, picture_figures
    from specbench.reporting.html import page_charts
    from specbench.reporting.report_rows import report_rows
    from specbench.store.run_folders import find_runs

    fmt = fmt or (to and to.suffix[1:]) or "pdf"
    if fmt not in figures.FIGURE_FORMATS or width not in figures.WIDTHS:
        raise SpecbenchError("--figure takes --format pdf, svg or png, and --width column or page")
    tables = [measured_table(load_table(one), model, prompts, out) for one in runs if is_table(one)]
    rows = [] if tables else report_rows(find_runs(out, runs))
    folders = {row["label"]: Path(row["folder"]) for row in rows}
    folders |= {line.label: folder for one in tables for line in one.lines for folder in line.folders}
    kind = name.partition(":")[0]
    if kind in picture_figures.PICTURE_FIGURES:
        grid = picture_figures.find_grid(folders, name)
        drawn, numbers = picture_figures.draw_grid(grid, fmt, width), grid.csv
    else:
        shown = [chart for one in tables for chart in figure_charts(one)] if tables else page_charts(rows)
        charts = figures.figure_names(shown)
        if tables and not charts:
            raise SpecbenchError(
                f"no chart of {', '.join(runs)}: neither the paper nor a run here has its numbers",
                "run it with specbench bench, or name another model with --model",
            )
        if name not in charts:
            raise unknown_name("figure", name, [*charts, *picture_figures.PICTURE_FIGURES], most=99)
        drawn, numbers = figures.draw_chart(charts[name], fmt, width), figures.figure_csv(charts[name])
    to = to or Path(f"{kind}.{fmt}")
    write_or_print(drawn, to)
    write_or_print(numbers, to.with_suffix(".csv"))


def _report_over(over: str | None, runs: Sequence[str], out: str, fmt: str, to: Path | None) -> None:
    """Print runs over their seeds, or without these the damage that their losses are like."""
    if over not in (None, "seed") or fmt not in ("markdown", "latex", "json"):
        raise SpecbenchError("--over takes seed; it and --ruler take the formats markdown, latex and json")
    from specbench.cli.output import as_json
    from specbench.reporting import over as seeds
    from specbench.reporting import ruler
    from specbench.reporting.text_formats import latex_label, latex_table, markdown_lines
    from specbench.store.run_folders import find_runs

    rows = (seeds.over_seeds if over else ruler.ruler_rows)(find_runs(out, runs))
    if fmt == "json":
        return write_or_print(as_json(rows), to)
    head, lines = (seeds.over_table if over else ruler.ruler_table)(rows)
    note = seeds.NOTE if over else ruler.RULER_NOTE
    if fmt == "latex":
        return write_or_print(latex_table(head, lines, note, latex_label(to and to.stem, str(lines))), to)
    copied = "".join(f" {copy} is a copy and left out." for row in rows for copy in row.get("copies", ()))
    write_or_print(f"{markdown_lines(head, lines)}\n\n{note}{copied}\n", to)


def _print_report(
    runs: Sequence[str],
    out: str,
    fmt: str,
    to: Path | None,
    everything: bool,
    explain: bool,
    long: bool,
    columns: Sequence[str],
    notes: bool,
    caption: str | None,
    definitions: Path | None,
    baseline: str | None,
    gates: Sequence[Gate],
) -> SpecbenchError | None:
    """Print or write the tables of runs; on a terminal they are fitted to its width. Returns a failed gate's error."""
    from specbench import reporting
    from specbench.papers.printed import printed_beside
    from specbench.reporting.compare import compare_rows
    from specbench.reporting.report_rows import report_rows
    from specbench.reporting.sections import sections, with_columns
    from specbench.reporting.text_formats import csv_text, json_text, latex_definitions, long_rows, report_arrow
    from specbench.store.image_scores import parquet_bytes
    from specbench.store.run_folders import find_runs

    rows = report_rows(find_runs(out, runs))
    problem = compare_rows(rows, baseline or "ar", gates) if baseline or gates else None
    if definitions:
        found = with_columns(sections(rows), columns) if columns else sections(rows)
        write_or_print(latex_definitions(rows, found), definitions)
    printed = printed_beside(rows) if fmt == "markdown" and not columns else []
    if fmt == "markdown" and to is None and not columns and console.is_terminal():
        from specbench.reporting.terminal import report_view

        screen = console.stdout()
        screen.print(report_view(rows, screen.width, explain, everything, printed))
    elif fmt == "parquet":
        write_or_print(parquet_bytes(report_arrow(rows, long)), to)
    elif long:
        write_or_print((csv_text if fmt == "csv" else json_text)(long_rows(rows)), to)
    else:
        text = reporting.render(rows, fmt, columns, notes, caption, everything, explain, to and to.stem)
        write_or_print("\n".join([text, *(f"- {line}\n" for line in printed)]), to)
    return problem
