"""Commands on stored runs: `status`, `merge`, `show`, `export`, `import`, `pack` and `verify`."""

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from specbench.cli.commands import command
from specbench.cli.options import (
    Json,
    Out,
    Quiet,
    Run,
    Runs,
    argument,
    flags,
    option,
    require_ending,
    served_option,
    switch,
)
from specbench.cli.output import print_json, print_table, print_written
from specbench.errors import GATE, PARTIAL, SpecbenchError, read_name
from specbench.metrics.catalog import BENCHMARKS
from specbench.runs.settings import run_settings
from specbench.specs.options import Use
from specbench.system import console
from specbench.system.torch_device import AUTO, chosen_device

_PLAIN_WIDTH = 120  # Line width of a card if stdout is no terminal
_LAYOUTS = (*BENCHMARKS, "cvtg-2k", "dataset")
_TOKENS = "tokens"
_SETTINGS = tuple(replace(setting, panel="Tokens") for setting in run_settings(use=Use.ENGINES))


@command(
    "status",
    "Another terminal, workers, a cluster or shards may still be decoding the runs; nothing is written. A run is "
    "silent if it stored nothing for a minute, and for ten times its time per image; its process may have been killed.",
    epilog="To repeat it: watch specbench status",
)
def status(runs: list[str] | None = Runs, out: str = Out, quiet: bool = Quiet, json: bool = Json) -> None:
    from specbench.reporting import status as progress

    rows = progress.status(out, runs or ())
    if json:
        return print_json(rows)
    if console.is_terminal():
        screen = console.stdout()
        return screen.print(progress.status_table(rows, screen.width))
    print_table([progress.status_line(row) for row in rows], progress.STATUS_COLUMNS)


@command(
    "merge",
    "Rows and images are copied into --out; the shards are not changed. Merging again copies only new images. To "
    "convert files of older versions, merge a results folder into itself (specbench merge results).",
    epilog="Then: specbench score, specbench report",
)
def merge(
    folders: list[Path] | None = argument(
        "DIR", "Results folders; shards in them are also merged.", None, show_default="every shard-*-of-* in --out"
    ),
    out: str = Out,
    quiet: bool = Quiet,
    json: bool = Json,
) -> None:
    from specbench.store.merge_shards import incomplete_shards, merge_runs, with_shards
    from specbench.store.run_folders import same_but_for_threads, shards_in
    from specbench.store.run_info import read_info

    merged = merge_runs(folders or (), out)
    for text in same_but_for_threads({run.folder.name: read_info(run.folder).spec.identity() for run in merged}):
        console.warn(text)
    if not quiet:
        for run in merged:
            console.say(f"{run.folder.name}: images copied: {run.copied}, in all: {run.rows}")
    if json:
        print_json(
            [{"run_id": m.folder.name, "folder": m.folder, "copied": m.copied, "images": m.rows} for m in merged]
        )
    for run in () if json else merged:
        print(run.folder)
    if missing := incomplete_shards(with_shards(folders or ()) or shards_in(out)):
        advice = "all available images are merged; run these shards again, then merge again"
        raise SpecbenchError("; ".join(missing), advice, PARTIAL)


@command("show")
def show(
    run: str = Run,
    prompt: str | None = argument(
        "PROMPT", "Prompt id, prefix of an id, or words of the prompt.", None, show_default="the run"
    ),
    sample: int = option("--sample", "N", "Sample index of the image.", 0, min=0),
    out: str = Out,
    quiet: bool = Quiet,
    json: bool = Json,
) -> None:
    from specbench import api
    from specbench.reporting.terminal import image_view, run_view
    from specbench.store.run_folders import find_runs

    if json:
        return print_json(api.show(run, prompt, sample, out))
    views = (
        map(run_view, find_runs(out, run)) if prompt is None else map(image_view, api.show(run, prompt, sample, out))
    )
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    for view in views:
        with screen.capture() as text:
            screen.print(view)
        print("\n".join(line.rstrip() for line in text.get().splitlines()))


@command("export")
def export(
    benchmark: str = argument("LAYOUT", f"One of {', '.join(_LAYOUTS)} (a folder for Hugging Face's datasets)."),
    run: str = Run,
    to: Path = option("--to", "DIR", "New or empty folder.", ...),
    out: str = Out,
) -> None:
    from specbench import api

    benchmark = read_name("benchmark", benchmark, _LAYOUTS)
    count = api.export(benchmark, run, to, out)
    console.say(f"{console.counted(count, 'image')}, in the layout of {benchmark}")
    print(to)


@command(
    "import",
    "With `tokens`, image tokens of another program are stored as a run: specbench import tokens --model NAME "
    "--program 'vLLM-Omni 0.12' --from FILE. The file needs the columns prompt and tokens; optional are prompt_id, "
    "seed, logp, seconds and batch (images per call). Give the sampling settings that the program claims; audit --run "
    "tests this claim. If --from is the address of vLLM or SGLang, it generates images of the first --limit prompts, "
    "--batch at a time; after an interruption, run the same command again. Repeat an import of scores that was killed.",
    epilog="Then: specbench audit --run RUN",
)
@flags(_SETTINGS)
def import_results(
    flags: dict[str, object],
    benchmark: str = argument("BENCHMARK", f"One of {', '.join(BENCHMARKS)}, or tokens."),
    results: str = option(
        "--from",
        "PATH|ADDRESS",
        "Results of GenEval or LongText-Bench, exported folder of T2I-CompBench++ or WISE, _detail.txt of DPG-Bench, "
        "results folder of TIIF-Bench or OneIG-Bench, tokens (jsonl, parquet, npz), "
        "or the address of a serving engine, such as http://127.0.0.1:8000.",
        ...,
    ),
    run: str | None = argument("RUN", "Run whose images were evaluated.", None, show_default="none for tokens"),
    program: str | None = option(
        "--program",
        "TEXT",
        "Name and version of the program that generated the tokens.",
        show_default="for an engine, as it reports",
        rich_help_panel="Tokens",
    ),
    ids: str | None = option(
        "--ids",
        "KIND",
        "Kind of the token ids: of the codebook (codes) or of the model's vocabulary (model).",
        show_default="the kind that fits",
        rich_help_panel="Tokens",
    ),
    served: str | None = served_option(rich_help_panel="Tokens"),
    out: str = Out,
    json: bool = Json,
) -> None:
    from specbench import api

    benchmark = read_name("benchmark", benchmark, (*BENCHMARKS, _TOKENS))
    values = {name: value for name, value in flags.items() if value is not None}
    if benchmark == _TOKENS:
        if run:
            raise SpecbenchError(f"import tokens takes no RUN ('{run}')", "use --program 'NAME VERSION'")
        folder = api.import_tokens(results, program, out, ids, served, **values)
        return print_json([{"run_id": folder.name, "folder": str(folder)}]) if json else print(folder)
    if not run or program or ids or served or values:
        raise SpecbenchError(f"import {benchmark} needs the run of the images", "name RUN, and omit token options")
    rows = api.import_results(benchmark, run, Path(results), out)
    print_json(rows) if json else print_table(rows, ("run_id", "metric", "value", "low", "high", "n"))


@command("pack", epilog="Commands that read a run also read FILE.zip.")
def pack(
    runs: list[str] | None = Runs,
    to: Path = option("--to", "FILE.zip", "File to write.", Path("runs.zip")),
    without_pictures: bool = switch("--without-pictures", "Omit the image files."),
    out: str = Out,
) -> None:
    from specbench.store import packed
    from specbench.store.run_folders import find_runs

    require_ending("--to", to, ".zip")
    folders = find_runs(out, runs or ())
    parts = packed.pack(folders, to, pictures=not without_pictures)
    console.say(f"{len(folders)} run{'s' if len(folders) > 1 else ''}, {parts} parts, {to.stat().st_size / 1e6:.1f} MB")
    print_written(to)


@command("verify")
def verify(
    path: Path = argument("PATH", "File of specbench pack, results folder, or a run."),
    recompute: bool = switch("--recompute", "Recompute p with the model instead of using the recorded values."),
    device: str = option("--device", "DEVICE", "With --recompute or tokens of another program: torch device.", AUTO),
    model: str | None = option("--model", "MODULE:NAME", "With --recompute: plug-in of the runs' model."),
    json: bool = Json,
) -> None:
    from specbench.checks import verify as checks

    if model and not recompute:
        raise SpecbenchError("--model requires --recompute", "add --recompute, or omit --model")
    rows = checks.verify(path, recompute, chosen_device(device), model)
    print_json(rows) if json else print_table(rows, ("run", "check", "status", "detail"))
    if wrong := [row for row in rows if row["status"] == checks.WRONG]:
        raise SpecbenchError(f"{len(wrong)} of {len(rows)} checks failed: {wrong[0]['detail']}", exit_code=GATE)
