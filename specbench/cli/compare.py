"""Command `specbench compare`: comparison of two runs, with gates for scripts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Reference, option, run_argument
from specbench.cli.output import print_json, print_table
from specbench.system import console
from specbench.system.console import fitted

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_HELP = help_of("compare")

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
    out: Out = "results",
    json: Json = False,
) -> None:
    from specbench import api
    from specbench.metrics.base import Settings
    from specbench.reporting.compare import Gate

    gates = [Gate.parse(text) for text in fail_if or ()]
    rows = api.compare(run_a, run_b, out, Settings(reference=reference, offline=True))
    if json:
        print_json(rows)
    else:
        _print_comparison(rows, *(_described(run, out) for run in (run_a, run_b)))
    for gate in gates:
        gate.check(rows)


def _described(run: str, out: str) -> str:
    """Name of a run and which prompts of its set were drawn, where it is a part."""
    from specbench.store.run_folders import find_runs
    from specbench.store.run_store import RunStore

    folder = find_runs(out, [run])[0]
    drawn = "; ".join(RunStore(folder).info().drawn)
    return folder.name + (f" (prompts: {drawn})" if drawn else "")


def _print_comparison(rows: list[dict], a: str, b: str) -> None:
    from specbench.reporting.compare import FIELDS, HEADINGS, comparison_lines, directions, reasons, verdict

    if not console.is_terminal():
        print("\n".join(f"- {line}" for line in (*directions(a, b), verdict(rows))) + "\n")
        return print_table([{name: _rounded(value) for name, value in row.items()} for row in rows], FIELDS)
    screen = console.stdout()
    lines = directions(a, b)
    screen.print(*(Text(line) for line in lines[:-1]), Text(verdict(rows), style="bold"), Text(), sep="\n")
    screen.print(fitted(HEADINGS, comparison_lines(rows), screen.width, right=range(1, len(HEADINGS))))
    screen.print(*(Text(line, style="dim") for line in (lines[-1], *reasons(rows))), sep="\n")


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
