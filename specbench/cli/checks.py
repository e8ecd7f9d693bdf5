"""`specbench doctor`, `specbench audit` and `specbench check`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from specbench.cli import completion
from specbench.cli.options import flags, print_json, print_table
from specbench.errors import GATE, MISSING_PREREQUISITE, SpecbenchError
from specbench.runs.settings import JSON, OUT, QUIET, merge
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_DOCTOR = (OUT, JSON)
_AUDIT = (OUT, QUIET, JSON)
_CHECK = (QUIET, JSON)
AUDIT_SAMPLES = 220_000


def add_to(app: typer.Typer) -> None:
    app.command(name="doctor", help="Check whether this machine is ready to run, and print how to fix problems.")(
        doctor
    )
    app.command(name="audit", help=_AUDIT_HELP)(audit)
    app.command(name="check", help=_CHECK_HELP)(check)


@flags(_DOCTOR)
def doctor(
    flags: dict,
    model: str = typer.Option(
        None, "--model", metavar="NAME", help="Require this model to be ready.", autocompletion=completion.models
    ),
    weights: str = typer.Option(
        None, "--weights", metavar="DIR|OWNER/NAME", help="Its checkpoint instead of the official one."
    ),
    revision: str = typer.Option(None, "--revision", metavar="REF", help="Revision of its hub repository."),
    random_weights: bool = typer.Option(
        False, "--random-weights", metavar="", help="Do not require its checkpoint, as run --random-weights does not."
    ),
    scale: str = typer.Option("full", "--scale", metavar="SIZE", help="full or tiny, as for run."),
    measure: bool = typer.Option(
        False,
        "--measure",
        metavar="",
        help="Measure memory bandwidth and peak FLOP/s, for the roofline in reports; on an idle machine only.",
    ),
    metric: list[str] = typer.Option(
        None,
        "--metric",
        metavar="NAME",
        help="Also require this metric to be ready; may be repeated.",
        autocompletion=completion.metrics,
    ),
    cross_check: bool = typer.Option(
        False,
        "--cross-check",
        metavar="",
        help="Look for the packages of score --cross-check, and say how to get them.",
    ),
    python: Path = typer.Option(None, "--python", metavar="PATH", help="Python that should have these packages."),
) -> None:
    from specbench.checks.cross_check import readiness, require_python
    from specbench.checks.doctor import MISSING, check_machine

    values = merge(_DOCTOR, flags)
    if scale not in ("full", "tiny"):
        raise SpecbenchError(f"--scale {scale}: unknown", "valid: full, tiny")
    tiny = scale == "tiny"
    if (weights or revision or random_weights or tiny) and not model:
        raise SpecbenchError("--weights, --revision, --random-weights and --scale require --model")
    rows = check_machine(
        model, Path(str(values["out"].value)), weights, revision, random_weights, tiny, metric or (), measure
    )
    require_python(python)
    rows += readiness(python) if cross_check or python else []
    print_json(rows) if values["json"].value else _print_readiness(rows)
    missing = dict.fromkeys(row["name"] for row in rows if row["status"] == MISSING)
    if missing:
        raise SpecbenchError(f"not ready: {', '.join(missing)}", "see the fixes above", MISSING_PREREQUISITE)


def _print_readiness(rows: Sequence[Mapping]) -> None:
    """Print the rows of the doctor; on a terminal the fixes stand below, unbroken so that they can be copied."""
    if not console.is_terminal():
        return print_table(rows, ("name", "status", "detail", "fix"))
    print_table(rows, ("name", "status", "detail"))
    for row in rows:
        if row["fix"]:
            print(f"\n{row['name']}:\n  {row['fix']}")


_AUDIT_HELP = "\n\n".join(
    (
        "Measure whether a decoder is lossless.",
        "Decodes models small enough to enumerate and compares the images with the exact joint distribution: images "
        "several windows long, row ends and other grammar tokens, guidance, temperature, top-k with ties, top-p, "
        "continuous batching, a transformer with a KV cache. The settings replace the decoder's window. The verdict is "
        'lossy, or lossless, or "no deviation seen" where the images are too few (detectable_tv above 0.05) or the '
        "decoder is declared lossy; tv is the measured total variation distance with its 95 % interval, detectable_tv "
        "the distance that would have been found with probability 0.95.",
        "A decoder is a name with optional inline options (gsd:G=50), or a plug-in as package.module:Name. Without "
        "one, every decoder is audited.",
        "With --run, the stored images of a run of any model are tested instead: are its tokens exact samples of the "
        "model's distribution (Rosenblatt transform)? tv is then a lower bound on the mean total variation per token. "
        "The exit code is 4 if a decoder that is declared lossless deviates.",
    )
)


@flags(_AUDIT)
def audit(
    flags: dict,
    decoders: list[str] = typer.Argument(
        None,
        metavar="DECODER",
        help="Decoder names, or plug-ins as package.module:Name.",
        show_default="all",
        autocompletion=completion.decoders,
    ),
    samples: int = typer.Option(AUDIT_SAMPLES, "--samples", metavar="N", min=1000, help="Images per decoder."),
    seed: int = typer.Option(
        0, "--seed", metavar="N", min=0, help="Random seed of the models and of the decoding noise."
    ),
    compiled: bool = typer.Option(
        False, "--compile", metavar="", help="Also audit compiled steps (a minute or more per decoder)."
    ),
    run: list[str] = typer.Option(
        None,
        "--run",
        metavar="RUN",
        help="Audit stored runs instead: run ids, prefixes of run ids, or run folders.",
        autocompletion=completion.runs,
    ),
    recompute: bool = typer.Option(
        False, "--recompute", metavar="", help="With --run: recompute p, teacher-forced in float32."
    ),
    weights: str = typer.Option(
        None, "--weights", metavar="DIR|OWNER/NAME", help="With --recompute: the run's checkpoint, if not official."
    ),
    revision: str = typer.Option(
        None, "--revision", metavar="REF", help="With --recompute: revision of its hub repository."
    ),
    device: str = typer.Option("cpu", "--device", metavar="DEVICE", help="With --recompute: torch device."),
) -> None:
    values = merge(_AUDIT, flags)
    if run:
        if decoders:
            raise SpecbenchError(f"{decoders[0]}: DECODER and --run exclude each other")
        if compiled:
            raise SpecbenchError("--compile and --run exclude each other")
        from specbench.cli.run_audit import audit_runs

        out, as_json, quiet = (values[name].value for name in ("out", "json", "quiet"))
        return audit_runs(run, str(out), recompute, weights, revision, device, bool(as_json), bool(quiet))
    if recompute or weights or revision:
        raise SpecbenchError("--recompute, --weights and --revision require --run")
    if device != "cpu":
        raise SpecbenchError(f"--device {device} requires --run", "models to enumerate run on the CPU")
    from specbench.checks.losslessness import LOSSLESS, LOSSY, audit_named, verdict_line

    rows = []
    for row in audit_named(decoders or (), samples, seed, os.cpu_count() or 1, compiled):
        rows.append(row)
        if not values["quiet"].value:
            console.say(f"audited {row['decoder']}: {verdict_line(row)}")
        if row["refused"]:
            console.say(f"{row['decoder']} does not accept these settings: {'; '.join(row['refused'])}")
    print_json(rows) if values["json"].value else _print_audit(rows)
    if failed := [str(row["decoder"]) for row in rows if row["declared"] == LOSSLESS and row["verdict"] == LOSSY]:
        raise SpecbenchError(f"declared lossless, but measured lossy: {', '.join(failed)}", exit_code=GATE)


def _print_audit(rows: Sequence[dict]) -> None:
    """Print the verdicts: on a terminal with the interval beside its value."""
    if not console.is_terminal():
        columns = ("decoder", "verdict", "tv", "tv_low", "tv_high", "samples", "p_value", "detectable_tv", "declared")
        return print_table(rows, columns)
    from specbench.reporting.columns import number, with_interval

    lines = [
        row
        | {
            "tv [95 %]": with_interval(row["tv"], row["tv_low"], row["tv_high"], 3),
            "p value": number(row["p_value"], 3),
            "detectable tv": number(row["detectable_tv"], 3),
        }
        for row in rows
    ]
    kept = ("verdict", "declared")
    print_table(lines, ("decoder", *kept, "tv [95 %]", "p value", "detectable tv", "samples"), kept)


_CHECK_HELP = "\n\n".join(
    (
        "Run the conformance tests on a decoder, a model, a metric or a prompt set.",
        "The tests cover: losslessness as declared (on the settings of audit); counters; log-probabilities; forced "
        "grammar tokens; that an image depends only on seed, prompt and sample, not on interruptions, batches, "
        "continuous batching or traces; and the time per step outside the target forwards. A decoder is a name "
        "with optional inline options (gsd:G=50), or a plug-in as package.module:NAME. The exit code is 4 "
        "if a test fails.",
        "--model tests that logits do not depend on how forwards are cut up: windows, rejected drafts, batches, "
        "refilled rows. --metric tests that features depend on their image alone, --prompts that no caption stands "
        "twice. All of them take names or package.module:NAME.",
    )
)


@flags(_CHECK)
def check(
    flags: dict,
    decoders: list[str] = typer.Argument(
        None,
        metavar="DECODER",
        help="Decoder names, or plug-ins as package.module:Name.",
        show_default="none",
        autocompletion=completion.decoders,
    ),
    model: str = typer.Option(
        None, "--model", metavar="NAME", help="Test this model.", autocompletion=completion.models
    ),
    metric: str = typer.Option(
        None, "--metric", metavar="NAME", help="Test this metric.", autocompletion=completion.metrics
    ),
    prompts: str = typer.Option(
        None,
        "--prompts",
        metavar="SET|FILE",
        help="Test this prompt set, and use its prompts for the model and the metric.",
        autocompletion=completion.prompt_sets,
    ),
    samples: int = typer.Option(AUDIT_SAMPLES, "--samples", metavar="N", min=10_000, help="Images for losslessness."),
) -> None:
    values = merge(_CHECK, flags)
    if not (decoders or model or metric or prompts):
        raise SpecbenchError("nothing to check", "name decoders, or --model, --metric or --prompts")
    from specbench.checks.findings import FAILED
    from specbench.checks.plugin_contracts import check_all

    quiet = values["quiet"].value
    announce = None if quiet else lambda name: console.say(f"checking {name}")
    rows = list(check_all(decoders or (), model, metric, prompts, samples, announce))
    several = len({row["name"] for row in rows}) > 1
    columns = ("name", "check", "status", "detail") if several else ("check", "status", "detail")
    print_json(rows) if values["json"].value else print_table(rows, columns, ("status",))
    failed = [f"{row['check']} of {row['name']}" for row in rows if row["status"] == FAILED]
    if failed:
        raise SpecbenchError(f"failed: {', '.join(failed)}", "the table has the details", GATE)
