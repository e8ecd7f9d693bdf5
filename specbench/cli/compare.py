"""`specbench compare`: two runs side by side, with a gate for scripts."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.runs.settings import JSON, OUT, merge

_SETTINGS = (OUT, JSON)
_HELP = "Compare two runs over the images both have: speed, scores, and which differences are real."


def add_to(app: typer.Typer) -> None:
    app.command(name="compare", help=_HELP, epilog='In a script: --fail-if "speedup<0.98" exits with 4')(compare)


@flags(_SETTINGS)
def compare(
    flags: dict,
    run_a: str = typer.Argument(metavar="RUN_A", help="The baseline: a run id, or the start of one, or a folder."),
    run_b: str = typer.Argument(metavar="RUN_B", help="What is compared with it."),
    fail_if: list[str] = typer.Option(
        None, "--fail-if", metavar="CONDITION", help="Exit with 4 if this holds, as in 'speedup<0.98'; may be repeated."
    ),
    reference: Path = typer.Option(
        None, "--reference", metavar="DIR", help="Images that FID compares with.", show_default="those of COCO"
    ),
) -> None:
    values = merge(_SETTINGS, flags)
    from specbench import api
    from specbench.metrics.base import Settings
    from specbench.reporting.compare import FIELDS, Gate

    gates = [Gate.parse(text) for text in fail_if or ()]
    rows = api.compare(run_a, run_b, str(values["out"].value), Settings(reference=reference, offline=True))
    if values["json"].value:
        print_json(rows)
    else:
        print_table([{name: _rounded(value) for name, value in row.items()} for row in rows], FIELDS)
    for gate in gates:
        gate.check(rows)


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
