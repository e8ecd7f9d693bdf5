"""Command `specbench compare`: comparison of two runs, with gates for scripts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Quiet, Reference, To, chosen_format, format_option, option, run_argument
from specbench.cli.output import as_json, markdown_table, write_or_print
from specbench.errors import SpecbenchError
from specbench.system import console
from specbench.system.console import fitted

_HELP = help_of("compare")
_FORMATS = ("markdown", "latex", "json")

_FailIf = Annotated[
    list[str] | None,
    option(
        "--fail-if",
        "CONDITION",
        "Exit with code 4 if this condition holds, for example 'speedup<0.98'; may be repeated.",
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command(name="compare", help=_HELP, epilog='In a script: --fail-if "speedup<0.98" exits with code 4')(compare)


def compare(
    run_a: Annotated[str, run_argument("RUN_A", "Baseline run: run id, prefix of a run id, or run folder.")],
    run_b: Annotated[str, run_argument("RUN_B", "Run to compare with the baseline.")],
    fail_if: _FailIf = None,
    reference: Reference = None,
    fmt: Annotated[str | None, format_option(_FORMATS)] = None,
    to: To = None,
    out: Out = "results",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    if quiet:
        console.show_progress(False)
    from specbench import api
    from specbench.metrics.base import Settings
    from specbench.reporting.compare import HEADINGS, Gate, comparison_lines, directions, reasons, verdict
    from specbench.reporting.text_formats import comparison_latex

    gates = [Gate.parse(text) for text in fail_if or ()]
    fmt = chosen_format(fmt, to, json, _FORMATS)
    rows = api.compare(run_a, run_b, out, Settings(reference=reference, offline=True))
    named = [_described(run, out) for run in (run_a, run_b)]
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


def _described(run: str, out: str) -> str:
    """Name of a run and which prompts of its set were drawn, where it is a part."""
    from specbench.store.run_folders import find_runs
    from specbench.store.run_store import RunStore

    folder = find_runs(out, [run])[0]
    drawn = "; ".join(RunStore(folder).info().drawn)
    return folder.name + (f" (prompts: {drawn})" if drawn else "")
