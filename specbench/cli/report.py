"""`specbench report` (tables of runs and of papers, figures, the methods paragraph) and `specbench compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import (
    TABLE_FORMATS,
    Baseline,
    Caption,
    Columns,
    Json,
    Notes,
    Out,
    OwnRows,
    Quiet,
    Reference,
    To,
    chosen_format,
    format_option,
    model_option,
    option,
    prompts_option,
    require_ending,
    run_argument,
    runs_argument,
    switch,
)
from specbench.cli.output import as_json, markdown_table, print_written, write_or_print
from specbench.errors import SpecbenchError, unknown_name
from specbench.runs.settings import split_list
from specbench.system import console
from specbench.system.console import fitted

_REPORT = help_of(
    "report",
    "With the name of a paper's table (see specbench list tables) instead of runs: print that table, with the "
    "paper's values beside the values of the runs in the results folder.",
)


def add_to(app: typer.Typer) -> None:
    app.command(name="report", help=_REPORT)(report)
    epilog = 'In a script: --fail-if "speedup<0.98" exits with code 4'
    app.command(name="compare", help=help_of("compare"), epilog=epilog)(compare)


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
    caption: Caption = None,
    out: Out = "results",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    from specbench.papers.table_files import is_table, refuse_mistyped
    from specbench.store.merge_shards import incomplete_shards
    from specbench.store.run_folders import find_runs, shards_in

    if html and str(html).startswith("--"):
        raise SpecbenchError("--html: no file is named", "for example: specbench report --html page.html")
    if html:
        require_ending("--html", html, ".html", ".htm")
    _refuse_without_effect(
        {"--figure": figure, "--over": over, "--ruler": ruler, "--methods": methods},
        {
            "--html": html, "--all": everything, "--explain": explain, "--long": long, "--columns": columns,
            "--notes": notes, "--with": own, "--baseline": baseline, "--caption": caption,
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
    if long and (fmt not in ("csv", "json", "parquet") or any(map(is_table, runs or ()))):
        raise SpecbenchError(
            "--long takes runs and the formats csv, json and parquet", "for example: --long --to t.csv"
        )
    if any(map(is_table, runs or ())):
        from specbench.cli.bench import report_tables

        return report_tables(runs, model, prompts, out, fmt, to, html, chosen, notes, own or (), baseline, caption)
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
        _print_report(runs or (), out, fmt, to, everything, explain, long, chosen, notes, baseline, caption)


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
    from specbench.reporting import over as several
    from specbench.reporting.text_formats import latex_label, latex_table, markdown_lines
    from specbench.store.run_folders import find_runs

    rows = (several.over_seeds if over else several.ruler_rows)(find_runs(out, runs))
    if fmt == "json":
        return write_or_print(as_json(rows), to)
    head, lines = (several.over_table if over else several.ruler_table)(rows)
    note = several.NOTE if over else several.RULER_NOTE
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
    baseline: str | None,
    caption: str | None,
) -> None:
    """Print or write the tables of runs; on a terminal they are fitted to its width."""
    from specbench import reporting
    from specbench.papers.printed import printed_beside
    from specbench.reporting.compare import compare_rows
    from specbench.reporting.report_rows import report_rows
    from specbench.reporting.text_formats import csv_text, json_text, long_rows, report_arrow
    from specbench.store.image_scores import parquet_bytes
    from specbench.store.run_folders import find_runs

    rows = report_rows(find_runs(out, runs))
    if baseline:
        compare_rows(rows, baseline)
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


_COMPARE_FORMATS = ("markdown", "latex", "json")

_FailIf = Annotated[
    list[str] | None,
    option(
        "--fail-if",
        "CONDITION",
        "Exit with code 4 if this condition holds, for example 'speedup<0.98'; may be repeated.",
    ),
]


def compare(
    run_a: Annotated[str, run_argument("RUN_A", "Baseline run: run id, prefix of a run id, or run folder.")],
    run_b: Annotated[str, run_argument("RUN_B", "Run to compare with the baseline.")],
    fail_if: _FailIf = None,
    reference: Reference = None,
    fmt: Annotated[str | None, format_option(_COMPARE_FORMATS)] = None,
    to: To = None,
    out: Out = "results",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    from specbench.metrics.base import Settings
    from specbench.reporting.compare import (
        HEADINGS,
        Gate,
        compare_runs,
        comparison_lines,
        directions,
        reasons,
        verdict,
    )
    from specbench.reporting.text_formats import comparison_latex
    from specbench.store.run_folders import find_run

    gates = [Gate.parse(text) for text in fail_if or ()]
    fmt = chosen_format(fmt, to, json, _COMPARE_FORMATS)
    a, b = find_run(out, run_a), find_run(out, run_b)
    rows = compare_runs(a, b, Settings(reference=reference, offline=True))
    named = [_described(folder) for folder in (a, b)]
    if fmt == "json":
        write_or_print(as_json(rows), to)
    elif fmt == "latex":
        write_or_print(comparison_latex(rows, *named, to and to.stem), to)
    elif to or not console.is_terminal():
        said = "\n".join(f"- {line}" for line in (*directions(*named), verdict(rows), *reasons(rows)))
        table = [dict(zip(HEADINGS, line, strict=True)) for line in comparison_lines(rows)]
        write_or_print(f"{said}\n\n{markdown_table(table, HEADINGS)}\n", to)
    else:
        screen, (*which, signs) = console.stdout(), directions(*named)
        screen.print(*map(Text, which), Text(verdict(rows), style="bold"), Text(), sep="\n")
        screen.print(fitted(HEADINGS, comparison_lines(rows), screen.width, right=range(1, len(HEADINGS))))
        screen.print(*(Text(line, style="dim") for line in (signs, *reasons(rows))), sep="\n")
    for gate in gates:
        gate.check(rows)
    if all(row["value"] is None for row in rows if not row["name"].endswith("_ms")):
        raise SpecbenchError(
            "nothing of these runs could be compared", "compare runs of one model, prompt set and seed"
        )


def _described(folder: Path) -> str:
    """Name of a run and which prompts of its set were drawn, where it is a part."""
    from specbench.store.run_store import RunStore

    drawn = "; ".join(RunStore(folder).info().drawn)
    return folder.name + (f" (prompts: {drawn})" if drawn else "")
