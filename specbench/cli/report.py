"""Command `specbench report`: tables of runs and of papers, figures, and the methods paragraph."""

from __future__ import annotations

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
    Out,
    OwnRows,
    Quiet,
    To,
    chosen_format,
    format_option,
    model_option,
    option,
    prompts_option,
    runs_argument,
    switch,
)
from specbench.cli.output import print_written, write_or_print
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
    app.command(name="report", help=_REPORT)(report)


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
        return _print_methods(find_runs(out, runs or ()), to)
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


def _print_methods(folders: Sequence[Path], to: Path | None) -> None:
    """Print the methods paragraph with its BibTeX, or write them side by side."""
    from specbench.reporting.methods import methods

    paragraph, entries = methods(folders)
    write_or_print(paragraph if to else f"{paragraph}\n{entries}", to)
    if to:
        write_or_print(entries, to.with_suffix(".bib"))


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
