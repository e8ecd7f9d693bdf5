"""`specbench doctor` and `specbench audit`."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.runs.settings import JSON, OUT, QUIET, merge
from specbench.specs import plugin_decoders
from specbench.specs.presets import PRESETS
from specbench.system import console

_DOCTOR = (OUT, JSON)
_AUDIT = (QUIET, JSON)
AUDIT_SAMPLES = 200_000


def add_to(app: typer.Typer) -> None:
    app.command(name="doctor", help="Say whether this machine is ready to run, and what to do if not.")(doctor)
    app.command(name="audit", help=_AUDIT_HELP)(audit)


@flags(_DOCTOR)
def doctor(
    flags: dict,
    model: str = typer.Option(None, "--model", metavar="NAME", help="Require this model to be ready."),
    weights: str = typer.Option(None, "--weights", metavar="DIR|OWNER/NAME", help="Its checkpoint, if not official."),
    revision: str = typer.Option(None, "--revision", metavar="REF", help="Revision of its hub repository."),
    random_weights: bool = typer.Option(False, "--random-weights", metavar="", help="It will have random weights."),
    scale: str = typer.Option("full", "--scale", metavar="SIZE", help="full or tiny, as for run."),
    measure: bool = typer.Option(
        False, "--measure", metavar="", help="Time memory and matrix products here, for the floor that reports show."
    ),
    metric: list[str] = typer.Option(None, "--metric", metavar="NAME", help="Require this metric to be ready, too."),
) -> None:
    from specbench.checks.doctor import MISSING, check

    values = merge(_DOCTOR, flags)
    if scale not in ("full", "tiny"):
        raise SpecbenchError(f"--scale {scale}: unknown", "valid: full, tiny")
    tiny = scale == "tiny"
    if (weights or revision or random_weights or tiny) and not model:
        raise SpecbenchError(
            "--weights, --revision, --random-weights, --scale: of which model?", "name it with --model"
        )
    rows = check(model, Path(str(values["out"].value)), weights, revision, random_weights, tiny, metric or (), measure)
    print_json(rows) if values["json"].value else print_table(rows, ("name", "status", "detail", "fix"))
    missing = dict.fromkeys(row["name"] for row in rows if row["status"] == MISSING)
    if missing:
        raise SpecbenchError(f"not ready: {', '.join(missing)}", "see the fixes above", MISSING_PREREQUISITE)


_AUDIT_HELP = "\n\n".join(
    (
        "Measure whether a decoder is lossless.",
        "Images of models small enough to enumerate are counted and compared with the exact joint distribution. The "
        "verdict is lossless or lossy; tv is the measured total variation distance with its 95 % interval.",
        "Decoders are names with inline options if wanted (gsd:G=50), or your own as package.module:Name. Without any, "
        "every decoder is audited.",
    )
)


@flags(_AUDIT)
def audit(
    flags: dict,
    decoders: list[str] = typer.Argument(None, metavar="DECODER", help="Which decoders.", show_default="all"),
    samples: int = typer.Option(AUDIT_SAMPLES, "--samples", metavar="N", help="Images per decoder."),
    seed: int = typer.Option(0, "--seed", metavar="N", help="Of the models and the noise."),
) -> None:
    values = merge(_AUDIT, flags)
    requests = auditable(decoders or list(PRESETS))
    if samples < 1000:
        raise SpecbenchError(f"--samples {samples}: must be at least 1000")
    if seed < 0:
        raise SpecbenchError(f"--seed {seed}: must be at least 0")
    from specbench.checks.losslessness import audit as measure

    rows = []
    for label, decoder in requests:
        if not values["quiet"].value:
            console.say(f"auditing {label}")
        rows += [row | {"decoder": label} for row in measure([decoder], samples=samples, seed=seed)]
    columns = ("decoder", "verdict", "tv", "tv_low", "tv_high", "samples", "p_value", "declared")
    print_json(rows) if values["json"].value else print_table(rows, columns)


def auditable(names: list[str]) -> list[tuple[str, object]]:
    """(label, decoder) with names and inline options checked; a user's own decoder is imported."""
    from specbench.runs.decoder_args import parse_decoders
    from specbench.runs.settings import split_list
    from specbench.specs.presets import Preset, resolve
    from specbench.system import plugins

    found = []
    for name, inline in parse_decoders([piece for given in names for piece in split_list(given)]):
        label = ",".join([name, *(f"{key}={value}" for key, value in inline.items())]).replace(",", ":", 1)
        target = plugins.load_user_object(name, "decoder") if ":" in name else None
        if target is not None and not isinstance(target, Preset):
            found.append((label, name))
        else:
            found.append((label, resolve(plugin_decoders.decoder_name(name), inline)))
    return found
