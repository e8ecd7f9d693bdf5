"""`specbench check`."""

from __future__ import annotations

import typer

from specbench.cli.checks import auditable
from specbench.cli.options import flags, print_json, print_table
from specbench.errors import GATE, SpecbenchError
from specbench.runs.settings import JSON, QUIET, merge
from specbench.system import console

_SETTINGS = (QUIET, JSON)
_HELP = "\n\n".join(
    (
        "Try a decoder on everything a decoder promises, and say in words what is wrong.",
        "Exactness as declared, counters, log-probabilities, images that depend on nothing but their address, batches, "
        "forced slots, and what its rule costs. A name, with inline options if wanted, or your own as "
        "package.module:NAME.",
    )
)


def add_to(app: typer.Typer) -> None:
    app.command(name="check", help=_HELP)(check)


@flags(_SETTINGS)
def check(
    flags: dict,
    decoders: list[str] = typer.Argument(metavar="DECODER", help="Which decoders."),
    samples: int = typer.Option(100_000, "--samples", metavar="N", min=10_000, help="Images for exactness."),
) -> None:
    values = merge(_SETTINGS, flags)
    requests = auditable(decoders)
    from specbench.checks.decoder_contract import FAILED
    from specbench.checks.decoder_contract import check as findings_of

    rows = []
    for label, decoder in requests:
        if not values["quiet"].value:
            console.say(f"checking {label}")
        rows += [
            {"decoder": label, "check": one.check, "status": one.status, "detail": one.detail}
            for one in findings_of(decoder, samples)
        ]
    columns = ("decoder", "check", "status", "detail") if len(requests) > 1 else ("check", "status", "detail")
    print_json(rows) if values["json"].value else print_table(rows, columns)
    failed = [f"{row['check']} of {row['decoder']}" for row in rows if row["status"] == FAILED]
    if failed:
        raise SpecbenchError(f"not fit for use: {', '.join(failed)}", "the table says what is wrong", GATE)
