"""`specbench report` (tables of runs and of papers), `figure`, `methods` and `compare`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from specbench.cli import options as opt
from specbench.cli.commands import command
from specbench.cli.output import write_or_print
from specbench.errors import SpecbenchError, enumerated, unknown_name
from specbench.names import guess
from specbench.specs.options import split_list
from specbench.system import console
from specbench.system.table_formats import FORMATS, formats_with, writer
from specbench.system.text_tables import plain_table, terminal_table

_TableModel = opt.option("--model", "NAME", "Model to report instead of the table's model.", show_default="the table's")
_TablePrompts = opt.option(
    "--prompts", "SET|FILE", "Prompts to report instead of the table's prompts.", show_default="the table's"
)
_FIGURE_FORMATS, _WIDTHS = ("pdf", "svg", "png"), ("column", "page")


@command(
    "report",
    "With the name of a paper's table (see specbench list tables) instead of runs: print that table, with the "
    "paper's values next to the values of the runs in the results folder.",
)
def report(
    runs: list[str] | None = opt.Runs,
    fmt: str | None = opt.format_option(formats_with("report")),
    html: Path | None = opt.option("--html", "FILE", "Write an HTML page with tables, plots and images to this file."),
    everything: bool = opt.switch("--all", "Also print the tables after the first, with every number of the runs."),
    explain: bool = opt.switch("--explain", "Print the definition of every column."),
    long: bool = opt.switch(
        "--long", f"Write one row per run and number, with interval and unit: {enumerated(formats_with('long'), 'or')}."
    ),
    to: Path | None = opt.To,
    columns: str | None = opt.Columns,
    notes: bool = opt.Notes,
    model: str | None = _TableModel,
    prompts: str | None = _TablePrompts,
    added: list[str] | None = opt.OwnRows,
    over: str | None = opt.option(
        "--over", "seed", "Print a row per group of runs that differ only in the seed, and a column per varied option."
    ),
    baseline: str | None = opt.Baseline,
    caption: str | None = opt.Caption,
    out: str = opt.Out,
    quiet: bool = opt.Quiet,
    json: bool = opt.Json,
) -> None:
    from specbench.papers.table_files import is_table, refuse_mistyped
    from specbench.store.merge_shards import incomplete_shards
    from specbench.store.run_folders import shards_in

    shown = {
        "--html": html, "--columns": columns, "--notes": notes, "--with": added, "--baseline": baseline,
        "--caption": caption,
    }  # fmt: skip
    of_runs = {"--over": over, "--all": everything, "--explain": explain, "--long": long}
    given = [flag for flag, value in (of_runs | shown).items() if value]
    _check_outputs(html, given)
    of_tables = next(filter(is_table, runs or ()), None)
    for text in incomplete_shards(shards_in(out)):
        console.warn(f"{text}: the tables lack their images")
    output = "tables" if of_tables else "report"
    fmt = opt.chosen_format(output, fmt, to, json)
    opt.check_latex(output, fmt, caption, notes, html is not None and to is None)
    if long and not FORMATS[fmt].long:
        what = f"--long cannot be written as {fmt}, only as {enumerated(formats_with('long'), 'or')}"
        raise SpecbenchError(what, "choose a format, for example: --long --to t.csv")
    if of_tables and given and given[0] in of_runs:
        raise SpecbenchError(f"{given[0]} takes runs, and {of_tables} is a table")
    layout: dict[str, Any] = {"columns": split_list(columns or ""), "notes": notes, "caption": caption}
    if of_tables:
        from specbench.cli.bench import report_tables

        return report_tables(runs or (), model, prompts, out, fmt, to, html, added or (), baseline, **layout)
    refuse_mistyped(runs or (), out)
    if model or prompts or added:
        raise SpecbenchError("--model, --prompts and --with require a table", "name a table of: specbench list tables")
    if over:
        return _report_over(over, runs or (), out, fmt, to)
    layout |= {"everything": everything, "explain": explain, "long": long, "label": to and to.stem}
    _print_report(runs or (), out, fmt, to, html, baseline, layout)


def _check_outputs(html: Path | None, given: Sequence[str]) -> None:
    """Reject an HTML page without a file name, and flags that cannot be combined with --over."""
    if html and str(html).startswith("--"):
        raise SpecbenchError("--html: the file name is missing", "write for example --html page.html")
    if html:
        opt.require_ending("--html", html, ".html", ".htm")
    if given[1:] and given[0] == "--over":
        raise SpecbenchError(f"--over cannot be combined with {given[1]}", "use two commands")


def _print_report(
    runs: Sequence[str],
    out: str,
    fmt: str,
    to: Path | None,
    html: Path | None,
    baseline: str | None,
    layout: dict[str, Any],
) -> None:
    """Print or write the tables of runs; on a terminal they are fitted to its width."""
    from specbench.papers.forecasts import printed_beside
    from specbench.reporting.compare import compare_rows
    from specbench.reporting.report_rows import report_rows
    from specbench.reporting.terminal import report_view
    from specbench.reporting.text_formats import render
    from specbench.store.run_folders import find_runs

    rows = report_rows(find_runs(out, runs))
    if html:
        write_or_print(render(rows, "html"), html)
        if to is None:
            return
    rows = compare_rows(rows, baseline) if baseline else rows
    printed = printed_beside(rows) if fmt == "markdown" and not layout["columns"] else []
    if fmt == "markdown" and to is None and console.is_terminal():
        screen = console.stdout()
        shown = {name: layout[name] for name in ("explain", "everything", "columns")}
        return screen.print(report_view(rows, screen.width, printed=printed, **shown))
    text = render(rows, fmt, **layout)
    write_or_print("\n".join([str(text), *(f"- {line}\n" for line in printed)]) if printed else text, to)


@command(
    "figure",
    "NAME is a chart of the HTML page, a map of tokens, pictures[:WORDS,...] of prompts with these words, or field "
    "(printed speeds of papers' tables, and named runs). With the table of a paper's figure instead of runs (figure "
    "NAME sjd-fig8), NAME is one of its charts. Any other name lists all figures. Numbers are saved as csv.",
)
def figure(
    name: str = opt.argument("NAME", "Chart, map of tokens, or pictures."),
    runs: list[str] | None = opt.argument(
        "RUN|TABLE",
        "Run ids, prefixes of run ids, decoders of runs, run folders, or tables.",
        None,
        show_default="all runs",
    ),
    fmt: str | None = opt.format_option(_FIGURE_FORMATS, "pdf"),
    to: Path | None = opt.To,
    width: str = opt.option("--width", "KIND", "Width of the figure: a column or a page of a paper.", "column"),
    model: str | None = _TableModel,
    prompts: str | None = _TablePrompts,
    out: str = opt.Out,
) -> None:
    from specbench.papers.field import FIGURE, chart_of_field
    from specbench.papers.html_page import figure_charts
    from specbench.papers.reproduce import measured_table
    from specbench.papers.table_files import is_table, load_table, refuse_mistyped, refuse_tables
    from specbench.reporting import figures, picture_figures
    from specbench.reporting.html import page_charts
    from specbench.reporting.report_rows import report_rows
    from specbench.reporting.row import unique_names
    from specbench.store.run_folders import find_runs

    fmt = fmt or (to and to.suffix[1:]) or "pdf"
    if fmt not in _FIGURE_FORMATS:
        raise SpecbenchError(
            f"a figure cannot be written as '{fmt}'", "use --format pdf, svg or png, or --to FILE with this ending"
        )
    if width not in _WIDTHS:
        raise SpecbenchError(f"--width {width}: unknown", "valid: column, page")
    opt.warn_of_ending(to, fmt, {*_FIGURE_FORMATS} - {fmt})
    if name == FIGURE:
        refuse_tables("figure field (all tables, and runs)", runs or ())
    elif guess(name, [FIGURE]):
        raise unknown_name("figure", name, [FIGURE])
    elif is_table(name):
        hint = f"name one of its charts first: specbench figure CHART {name}; an unknown CHART lists all"
        raise SpecbenchError(f"'{name}' is a table, not a chart", hint)
    refuse_mistyped([run for run in runs or () if not is_table(run)], out)
    tables = [measured_table(load_table(run, out), model, prompts, out) for run in runs or () if is_table(run)]
    rows = [] if tables or (name == FIGURE and not runs) else report_rows(find_runs(out, runs or ()))
    folders = {name: row.folder for name, row in unique_names(rows).items()}
    folders |= {line.label: folder for table in tables for line in table.lines for folder in line.folders}
    kind = name.partition(":")[0]
    if kind in picture_figures.PICTURE_FIGURES:
        grid = picture_figures.find_grid(folders, name)
        drawn, numbers = picture_figures.grid_figure(grid, width), grid.csv
    else:
        if name == FIGURE:
            charts = {FIGURE: chart_of_field(rows)}
        else:
            shown = [chart for table in tables for chart in figure_charts(table)] if tables else page_charts(rows)
            charts = figures.figure_names(shown)
        if tables and not charts:
            what = f"no chart of {', '.join(runs or ())}: neither the paper nor a run here has its numbers"
            hint = "run the table with specbench bench, or name another model with --model"
            if not any(table.table.axes for table in tables):
                what, hint = f"{', '.join(runs or ())} has no axes, so it has no chart", "name runs instead"
            raise SpecbenchError(what, hint)
        if name not in charts:
            raise unknown_name("figure", name, [*charts, FIGURE, *picture_figures.PICTURE_FIGURES], most=99)
        drawn, numbers = figures.chart_figure(charts[name], width), figures.figure_csv(charts[name])
    to = to or Path(f"{kind}.{fmt}")
    write_or_print(figures.saved(drawn, fmt), to)
    write_or_print(numbers, to.with_suffix(".csv"))


@command("methods")
def methods(runs: list[str] | None = opt.Runs, to: Path | None = opt.To, out: str = opt.Out) -> None:
    from specbench import api
    from specbench.papers.table_files import refuse_tables

    refuse_tables("methods", runs or ())
    paragraph, entries = api.methods_paragraph(runs or (), out)
    write_or_print(paragraph if to else f"{paragraph}\n{entries}", to)
    if to:
        write_or_print(entries, to.with_suffix(".bib"))


def _report_over(over: str, runs: Sequence[str], out: str, fmt: str, to: Path | None) -> None:
    """Print runs pooled over their seeds."""
    if over != "seed" or fmt not in formats_with("over"):
        raise SpecbenchError(f"--over {over}: use --over seed, with --format {enumerated(formats_with('over'), 'or')}")
    from specbench.reporting.over import over_seeds, over_table
    from specbench.store.run_folders import find_runs

    rows = over_seeds(find_runs(out, runs))
    table, records = over_table(rows), [row.record for row in rows]
    if fmt == "markdown" and to is None and console.is_terminal():
        screen = console.stdout()
        return screen.print(terminal_table(replace(table, title="", notes=[table.title, *table.notes]), screen.width))
    write_or_print(writer("over", fmt)(table, records, to and to.stem), to)


@command("compare", epilog='In a script: --fail-if "speedup<0.98" exits with code 4')
def compare(
    run_a: str = opt.argument("RUN_A", "Baseline run: run id, prefix of a run id, decoder, or run folder."),
    run_b: str = opt.argument("RUN_B", "Run to compare with the baseline."),
    fail_if: list[str] | None = opt.option(
        "--fail-if",
        "CONDITION",
        "Exit with code 4 if this holds, e.g. 'speedup<0.98', or 'nfe>100' for the NFE of RUN_B; may be repeated.",
    ),
    reference: Path | None = opt.Reference,
    fmt: str | None = opt.format_option(formats_with("comparison")),
    to: Path | None = opt.To,
    out: str = opt.Out,
    quiet: bool = opt.Quiet,
    json: bool = opt.Json,
) -> None:
    from specbench.metrics.base import Settings
    from specbench.papers.table_files import refuse_tables
    from specbench.reporting.compare import HEADINGS, Gate, compare_runs, comparison_lines, directions, reasons, verdict
    from specbench.store.run_folders import find_run

    gates = [Gate.parse(text) for text in fail_if or ()]
    fmt = opt.chosen_format("comparison", fmt, to, json)
    refuse_tables("compare", (run_a, run_b))
    a, b = find_run(out, run_a), find_run(out, run_b)
    rows = compare_runs(a, b, Settings(reference=reference, offline=True))
    named = [_described(folder) for folder in (a, b)]
    if to or fmt != "markdown" or not console.is_terminal():
        write_or_print(writer("comparison", fmt)(rows, *named, to and to.stem), to)
    else:
        screen, (*which, signs) = console.stdout(), directions(*named)
        table = plain_table(HEADINGS, comparison_lines(rows))
        screen.print(*map(Text, which), Text(verdict(rows), style="bold"), Text(), sep="\n")
        screen.print(terminal_table(table, screen.width))
        screen.print(*(Text(line, style="dim") for line in (signs, *reasons(rows))), sep="\n")
    for gate in gates:
        gate.check(rows, b)
    if all(row.value is None for row in rows if not row.name.endswith("_ms")):
        what = "nothing of these runs could be compared"
        advice = "the runs must have the same model, seed and prompts; to compare scores, first: specbench score"
        raise SpecbenchError(what, advice)


def _described(folder: Path) -> str:
    """Return the name of a run, with its selection of prompts if it decodes only a part of the set."""
    from specbench.store.run_store import RunStore

    drawn = "; ".join(RunStore(folder).info().drawn)
    return folder.name + (f" (prompts: {drawn})" if drawn else "")
