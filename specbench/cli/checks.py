"""`specbench doctor`, `specbench audit` and `specbench check`."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from specbench.cli import options as opt
from specbench.cli.commands import command
from specbench.cli.output import print_json, print_table
from specbench.errors import GATE, MISSING_PREREQUISITE, SpecbenchError, read_name
from specbench.models.facts import SCALES
from specbench.runs.settings import run_settings
from specbench.specs.options import Use
from specbench.specs.presets import PRESETS, require_decoders
from specbench.specs.run_spec import SAMPLING, UNSERVED
from specbench.system import console, plugins
from specbench.system.torch_device import AUTO, best_device, chosen_device

_DEFAULT_SAMPLES = 290_000
_UNSERVED = {*(SAMPLING[name].name for name in UNSERVED), "guidance-rows", "guidance-schedule", "random-weights"}
_OWN = {"weights", "revision", "device", "dtype"}  # Options that `audit` also uses without --engine
_OF_ENGINE = tuple(replace(s, panel="Engine") for s in run_settings(use=Use.ENGINES) if s.name not in _OWN | _UNSERVED)


@command("doctor")
def doctor(
    model: str | None = opt.option("--model", "NAME", "Require this model to be ready."),
    weights: str | None = opt.option(
        "--weights", "DIR|OWNER/NAME", "Checkpoint of the model, if it is not the official checkpoint."
    ),
    revision: str | None = opt.option("--revision", "REF", "Revision of the checkpoint's hub repository."),
    random_weights: bool = opt.switch(
        "--random-weights", "Require no checkpoint, because `specbench run --random-weights` reads none."
    ),
    scale: str = opt.option("--scale", "SIZE", "Model size: full or tiny, as in `specbench run`.", "full"),
    measure: bool = opt.switch(
        "--measure", "Measure memory bandwidth and peak FLOP/s for the roofline in reports; only on an idle machine."
    ),
    metric: list[str] | None = opt.option("--metric", "NAME", "Also require this metric to be ready; may be repeated."),
    protocol: str | None = opt.protocol_option("Also require the metrics"),
    everything: bool = opt.switch("--all", "Print every check, also passed checks of packages, models and peak rates."),
    out: str = opt.Out,
    json: bool = opt.Json,
) -> None:
    from specbench.checks import doctor as machine

    known = read_name("size of a model", scale, SCALES)
    rows = machine.doctor(model, out, weights, revision, random_weights, known, metric or (), measure, protocol)
    print_json(rows) if json else _print_readiness(rows if everything else machine.in_short(rows))
    if missing := dict.fromkeys(row["name"] for row in rows if row["status"] == machine.MISSING):
        raise SpecbenchError(f"not ready: {', '.join(missing)}", "see the fixes above", MISSING_PREREQUISITE)
    if not json:
        best = f"--model {model or 'janus'} --decoder ar,sjd,gsd --window 16 --fresh-q onehot --limit 4"
        gpu = best_device() != "cpu"
        more = "" if everything else f" (all {len(rows)} checks: specbench doctor --all)"
        console.say(f"ready{more}; type next: specbench {f'run {best}' if model or gpu else 'demo'}")


def _print_readiness(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `doctor`. On a terminal, remedies follow the table; they are not wrapped and can be copied."""
    if not console.is_terminal():
        return print_table(rows, ("name", "status", "detail", "fix"))
    print_table(rows, ("name", "status", "detail"))
    fixes: dict[str, list[str]] = {}
    for row in rows:
        fixes.setdefault(str(row["fix"] or ""), []).append(str(row["name"]))
    for fix, names in fixes.items():
        if fix:
            print(f"\n{'; '.join(names)}:\n  {fix}")


@command(
    "audit",
    "Decodes models small enough to enumerate, and compares the images with the exact joint distribution. The settings "
    "cover images several windows long, row ends and other grammar tokens, guidance, temperature, top-k with ties, "
    "top-p, continuous batching, single images, and a transformer with a KV cache; each setting has a fixed window. "
    "Images of different prompts, samples and seeds are also tested for dependence. The verdict is lossy, lossless, or "
    '"no deviation seen" (too few images to detect a total variation of 0.05, or the decoder is declared lossy). '
    "tv is the measured total variation distance with its 95 % interval; detectable tv is "
    "the distance that would have been found with probability 0.95.",
    "A decoder is a name with optional inline options (gsd:G=50), or a plug-in as package.module:Name. Without "
    "DECODER, every decoder is audited.",
    "With --run, stored images of any model are tested instead: their tokens must be exact samples of the model's "
    "distribution (Rosenblatt transform). tv is then a lower bound on the mean total variation per token. "
    "The exit code is 4 if a decoder that is declared lossless deviates. With --recompute it is also 4 if the recorded "
    "values are not the model's. Tokens of probability 0 are a separate verdict, if rounding does not explain them.",
    "With --engine ADDRESS, vLLM or SGLang generates images of the first --limit prompts, and these are audited: "
    "specbench audit --engine http://127.0.0.1:8000 --model tar-1.5b --prompts FILE --limit 16. The options of the "
    "panel Engine require --engine.",
)
@opt.flags(_OF_ENGINE)
def audit(
    flags: dict[str, object],
    decoders: list[str] | None = opt.decoders_argument("all"),
    samples: int = opt.option("--samples", "N", "Number of images per decoder.", _DEFAULT_SAMPLES, min=1000),
    seed: int = opt.option("--seed", "N", "Random seed of the models and of the decoding noise.", 0, min=0),
    compiled: bool = opt.switch("--compile", "Also audit compiled steps (a minute or more per decoder)."),
    thorough: bool = opt.switch("--thorough", "Decode ten times the images in the less sensitive half of settings."),
    run: list[str] | None = opt.option(
        "--run", "RUN", "Audit stored runs instead: run ids, prefixes of ids, decoders, or folders."
    ),
    recompute: bool = opt.switch("--recompute", "With --run: recompute p with the model, teacher-forced."),
    weights: str | None = opt.option(
        "--weights", "DIR|OWNER/NAME", "With --recompute or --engine: unofficial checkpoint."
    ),
    revision: str | None = opt.option(
        "--revision", "REF", "With --recompute or --engine: revision of its hub repository."
    ),
    device: str = opt.option("--device", "DEVICE", "With --recompute or --engine: torch device.", AUTO),
    dtype: str | None = opt.option(
        "--dtype",
        "TYPE",
        "For runs of --dtype int8wo: recompute p with the same weights in this number format (float32, bfloat16 or "
        "float16); tv is then a lower bound on the distance between the two targets. With --engine: the format "
        "that the engine claims.",
    ),
    engine: str | None = opt.option(
        "--engine", "ADDRESS", "Audit a serving engine's images.", rich_help_panel="Engine"
    ),
    served: str | None = opt.served_option(rich_help_panel="Engine"),
    logp: str | None = opt.option(
        "--logp",
        "KIND",
        "Kind of log p that another program recorded: sampled, tempered, raw, tempered-words or raw-words, each also "
        "with the prefix conditional-.",
        show_default="detected",
    ),
    out: str = opt.Out,
    quiet: bool = opt.Quiet,
    json: bool = opt.Json,
) -> None:
    asked = {name: value for name, value in flags.items() if value is not None}
    if engine:
        if decoders or run or recompute or compiled or thorough or samples != _DEFAULT_SAMPLES or seed:
            what = "--engine excludes DECODER, --run, --recompute, --compile, --thorough, --samples and --seed"
            raise SpecbenchError(what, "use two calls")
        asked |= {"weights": weights or "", "revision": revision or "", "device": chosen_device(device)}
        asked |= {"dtype": dtype} if dtype else {}
        run = [_run_of_engine(engine, out, served, asked)]
        return audit_runs(run, out, False, weights, revision, device, None, json, quiet, logp)
    if recompute and plugins.is_reference(str(asked.get("model"))):
        from specbench.models.catalog import find_model

        find_model(str(asked.pop("model")))  # registers the name that run.json contains
    if run and asked.keys() == {"model"}:
        raise SpecbenchError("--model requires --recompute and a plug-in as MODULE:NAME, or --engine")
    if asked or served:
        raise SpecbenchError(f"--{next(iter(asked), 'served')} requires --engine", "add --engine ADDRESS")
    recomputed, elsewhere = bool(recompute or dtype), bool(weights or revision)
    _check_audit(decoders or (), bool(run), compiled, thorough, recomputed, elsewhere, device)
    if run and (samples != _DEFAULT_SAMPLES or seed):
        raise SpecbenchError("--samples and --seed cannot be combined with --run", "omit them: all images are used")
    require_decoders(decoders or ())
    if run:
        return audit_runs(run, out, recompute, weights, revision, device, dtype, json, quiet, logp)
    if logp:
        raise SpecbenchError("--logp requires --run", "add the run whose log p another program stored: --run RUN")
    _audit_decoders(decoders or (), samples, seed, compiled, thorough, quiet, json)


def _run_of_engine(engine: str, out: str, served: str | None, asked: Mapping[str, Any]) -> str:
    """Generate images with a serving engine, and return their run folder."""
    if not engine.startswith(("http://", "https://")):
        raise SpecbenchError(f"--engine {engine}: not an address", f"write --engine http://{engine}")
    from specbench.api import import_tokens

    return str(import_tokens(engine, out=out, served=served, **asked))


def _check_audit(
    decoders: Sequence[str], runs: bool, compiled: bool, thorough: bool, recomputed: bool, elsewhere: bool, device: str
) -> None:
    """Reject flags of `audit` that conflict or lack a required flag; `elsewhere`: whether a checkpoint is named."""
    if runs and decoders:
        what = f"'{decoders[0]}' is taken as a decoder, and decoders and --run cannot be combined"
        raise SpecbenchError(what, f"to audit several runs, repeat the option: --run RUN --run {decoders[0]}")
    if runs and (compiled or thorough):
        raise SpecbenchError(f"{'--compile' if compiled else '--thorough'} and --run cannot be combined")
    if (recomputed or elsewhere) and not runs:
        raise SpecbenchError("--recompute, --weights, --revision and --dtype require --run")
    if runs and not recomputed and (elsewhere or device != AUTO):
        raise SpecbenchError("--weights, --revision and --device require --recompute", "add --recompute")
    if device != AUTO and not runs:
        raise SpecbenchError(f"--device {device} requires --run", "omit --device: decoders are audited on the CPU")


def _audit_decoders(
    decoders: Sequence[str], samples: int, seed: int, compiled: bool, thorough: bool, quiet: bool, as_json: bool
) -> None:
    """Audit decoders on enumerable models, report the progress, and print the verdicts."""
    started, every, done = time.monotonic(), len(decoders or PRESETS), count(1)
    if not decoders and not quiet:
        console.say(f"auditing all {every} decoders; for a single decoder: specbench audit sjd")
    from specbench.checks.losslessness import LOSSLESS, LOSSY, audit_decoders, verdict_line

    def tell(row: Mapping[str, Any]) -> None:
        number = next(done)
        left = (every - number) * (time.monotonic() - started) / number
        ahead = f"; {number} of {every}, {console.duration(left)} left" if left and not decoders else ""
        if not quiet:
            console.say(f"audited {row['decoder']}: {verdict_line(row)}{ahead}")
        if row["refused"]:
            console.say(f"{row['decoder']} does not accept these settings: {'; '.join(row['refused'])}")

    rows = audit_decoders(decoders, samples, seed, compiled, thorough, os.cpu_count() or 1, tell)
    print_json(rows) if as_json else _print_audit(rows)
    if failed := [str(row["decoder"]) for row in rows if row["declared"] == LOSSLESS and row["verdict"] == LOSSY]:
        raise SpecbenchError(f"declared lossless, but measured lossy: {', '.join(failed)}", exit_code=GATE)


def _print_audit(rows: Sequence[dict[str, Any]]) -> None:
    """Print the verdicts; on a terminal, values are followed by their intervals."""
    if not console.is_terminal():
        columns = ("decoder", "verdict", "tv", "tv_low", "tv_high", "samples", "p_value", "detectable_tv", "declared")
        return print_table(rows, columns)
    from specbench.reporting.columns import number, with_interval
    from specbench.stats import Estimate

    lines = [
        row
        | {
            "tv [95 %]": with_interval(Estimate(row["tv"], row["tv_low"], row["tv_high"]), 3),
            "p value": number(row["p_value"], 3),
            "detectable tv": number(row["detectable_tv"], 3),
        }
        for row in rows
    ]
    kept = ("verdict", "declared")
    print_table(lines, ("decoder", *kept, "tv [95 %]", "p value", "detectable tv", "samples"), kept)


def audit_runs(
    runs: Sequence[str],
    out: str,
    recompute: bool,
    weights: str | None,
    revision: str | None,
    device: str,
    dtype: str | None,
    as_json: bool,
    quiet: bool,
    logp: str | None = None,
) -> None:
    """Audit stored runs and print the table. Raise an error if a decoder declared lossless deviates, or if recorded
    values of p differ from the model's."""
    from specbench.checks import run_audit
    from specbench.store.run_folders import find_runs

    rows: list[dict[str, Any]] = []
    for folder in find_runs(out, runs):
        rows += run_audit.audit_runs(folder, out, recompute, weights, revision, chosen_device(device), dtype, logp)
        for line in [] if as_json or quiet else notes(rows[-1]):
            console.say(f"{rows[-1]['run_id']}: {line}")
    if as_json:
        print_json(rows)
    else:
        cells = [_cells(row) for row in rows]
        print_table(cells, list(cells[0]))
    causes = {row["run_id"]: f"; likely cause: {row['cause']}" for row in rows if quiet and row.get("cause")}
    failures = ((row["run_id"], f"{row['verdict']}: {decided_by(row)}") for row in rows if row["failed"])
    if failed := [f"{name} ({why}{causes.get(name, '')})" for name, why in failures]:
        what = f"tokens or recorded values do not follow the model's distribution: {', '.join(failed)}"
        raise SpecbenchError(what, "see the deviations printed above", GATE)


def _cells(row: Mapping[str, Any]) -> dict[str, object]:
    from specbench.reporting.columns import number, with_interval
    from specbench.stats import Estimate

    verdict = f"{row['verdict']} from {row['target']}" if row["target"] and row["deviates"] else row["verdict"]
    return {
        "run": row["run_id"],
        "declared": row["declared"],
        "verdict": verdict if row["recomputed"] else f"{verdict}, as recorded",
        "decided by": decided_by(row),
        "tv at least": with_interval(Estimate(row["tv"], row["tv_low"], row["tv_high"]), 4),
        "place": row["place"] or "-",
        "entropy": row["entropy"] or "-",
        "detectable": number(row["detectable"], 4),
        "images": row["images"],
    }


def decided_by(row: Mapping[str, Any]) -> str:
    """Return the number that decides a verdict, as text."""
    from specbench.checks.run_audit import IMPOSSIBLE, OTHERS

    if row["verdict"] == OTHERS:
        name, gap = next((name, gap) for name, gap in row["agreement"].items() if gap["differs"])
        off = f"{gap['beyond']:.2%} of the tokens" if gap["rounding"] is None else f"{abs(gap['mean']):.2g} a token"
        return f"{name}: {off}"
    if row["verdict"] == IMPOSSIBLE:
        return f"{row['impossible_tokens']:,} tokens of probability 0"
    if row["p_value"] < row["level"]:
        return f"p {row['p_value']:.2g} by {row['order']}"
    return f"{row['causes'][0]['nats']:,.0f} nats" if row.get("causes") else f"p {row['p_value']:.2g}"


def notes(row: Mapping[str, Any]) -> list[str]:
    """Format the results that are not in the table, one line each."""
    from specbench.checks.logp_kinds import LOGP_KINDS, SAMPLED

    lines = [row["sentence"]] if "sentence" in row else []
    if row["recomputed"]:
        target = f"{row['target']}, which is not the run's target" if row["target"] else row["dtype"]
        how = [f"p recomputed in {target}"]
        if row["agreement"] and len(row["unavailable"]) < 2:
            recorded = "orders that use q" if row["dtype"] == "float32" else "all orders"
            how.append(f"{recorded} are tested with recorded values")
        if row["unavailable"]:
            how.append(f"orders without values, which are not tested: {', '.join(row['unavailable'])}")
        lines.append("; ".join(how))
        if row.get("logp_kind") not in (None, SAMPLED):
            lines.append(f"the recorded log p is the model's log p {LOGP_KINDS[row['logp_kind']].text}")
        if row.get("logp_nearest") and not row["logp_fits"]:
            nearest = f"{row['logp_nearest']} ({LOGP_KINDS[row['logp_nearest']].text})"
            lines.append(f"no kind of log p fits all tokens; compared with {nearest}; --logp KIND sets another")
        lines += [_distance(name, gap) for name, gap in row["agreement"].items()]
        if not row["agreement"] and not row["target"]:
            lines.append("the run recorded no log p that could be compared")
        if row["impossible_tokens"]:
            lines.append(
                f"{row['impossible_tokens']:,} tokens in {row['impossible_images']:,} of {row['images']:,} images have "
                "probability 0 given all tokens before them"
                + ("; rounding explains them" if row["impossible_by_rounding"] else "")
            )
    if row["kind"] in ("serial", "images") and row["p_value"] < row["level"]:
        before = (
            f"token {console.counted(int(row['group']), 'position')} earlier"
            if row["kind"] == "serial"
            else "same token of the previous image"
        )
        lines.append(f"the values depend on the values of the {before}")
    if not row["deviates"]:
        lines.append(
            f"no deviation at level {row['level']:g}; a deviation of {row['detectable']:.3f} per token in one of these "
            "orders would have been found with probability 0.95"
            + ("" if row["recomputed"] else "; this relies on recorded values; --recompute computes them")
        )
    return lines


def _distance(name: str, gap: Mapping[str, Any]) -> str:
    """Describe in a line how much a recorded value differs from the model's."""
    mean, rounding, side = gap["mean"], gap["rounding"], "away from"
    if name == "entropy" and rounding is not None:  # the mean difference is signed
        side = "below" if mean < 0 else "above"
    line = (
        f"recorded {name}: on average {abs(mean):.2g} {side} the recomputed value; {gap['beyond']:.2%} of the tokens "
        "differ by more than 0.01"
    )
    if rounding is not None:
        line += f"; rounding explains an average of {abs(rounding):.2g}"
    if gap["images"]:
        line += f", but not the difference in {console.counted(gap['images'], 'image')}"
    return line + ("; the recorded value is not the model's" if gap["differs"] else "")


@command(
    "check",
    "The tests cover: losslessness as declared (on the settings of audit); counters; log-probabilities; forced grammar "
    "tokens; that an image depends only on seed, prompt and sample, not on interruptions, batches, continuous batching "
    "or traces; the tokens of a vocabulary of 4,160 (eleven drafts per window, refilled rows, guidance, float32 and "
    "bfloat16); and the time per step outside the target forwards. A decoder is a name with optional inline options "
    "(gsd:G=50), or a plug-in as package.module:NAME. The exit code is 4 if a test fails.",
    "--model tests that logits do not depend on how the forwards are split: windows, rejected drafts, batches, "
    "refilled rows. --metric tests that the features of an image depend only on that image. "
    "Decoders, models and metrics are names or package.module:NAME.",
)
def check(
    decoders: list[str] | None = opt.decoders_argument("none"),
    model: list[str] | None = opt.option("--model", "NAME", "Test this model; may be repeated."),
    metric: list[str] | None = opt.option("--metric", "NAME", "Test this metric; may be repeated."),
    prompts: str | None = opt.option(
        "--prompts", "SET|FILE", "Prompt set or file for the tests of models and metrics."
    ),
    samples: int = opt.option("--samples", "N", "Images for the losslessness test.", _DEFAULT_SAMPLES, min=10_000),
    quiet: bool = opt.Quiet,
    json: bool = opt.Json,
) -> None:
    if not (decoders or model or metric):
        raise SpecbenchError("nothing to check", "name decoders, or give --model or --metric")
    require_decoders(decoders or ())
    from specbench.checks.contracts import check_all
    from specbench.checks.findings import FAILED

    def announce(text: str) -> None:
        if not quiet:
            console.say(f"checking {text}")

    rows = check_all(decoders or (), samples, model, metric, prompts, announce)
    several = len({row["name"] for row in rows}) > 1
    columns = ("name", "check", "status", "detail") if several else ("check", "status", "detail")
    print_json(rows) if json else print_table(rows, columns, ("status",))
    if failed := [f"{row['check']} of {row['name']}" for row in rows if row["status"] == FAILED]:
        raise SpecbenchError(f"failed: {', '.join(failed)}", "see the details printed above", GATE)
