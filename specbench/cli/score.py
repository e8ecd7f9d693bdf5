"""Command `specbench score`: score the images of runs or of a folder."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench.cli import options as opt
from specbench.cli.commands import command
from specbench.cli.output import print_json, print_table
from specbench.errors import SpecbenchError
from specbench.runs.progress_bar import ScoreProgress
from specbench.system import console

_LAYOUTS = ("ids", "lines", "annotations", "captions", "starts", "geneval", "dataset", "grids")


@command("score", epilog="Then: specbench report")
def score(
    runs: list[str] | None = opt.Runs,
    metric: list[str] | None = opt.option("--metric", "NAME", "Compute only this metric; may be repeated."),
    protocol: str | None = opt.protocol_option("Metrics and settings"),
    bundled_only: bool = opt.switch("--bundled-only", "Compute only the metrics that need no download."),
    device: str | None = opt.option(
        "--device", "DEVICE", "Torch device of the metrics' networks.", show_default="the best here"
    ),
    batch: int | None = opt.option(
        "--batch", "N", "Images per forward of a network.", min=1, max=4096, show_default="the metric's"
    ),
    reference: Path | None = opt.Reference,
    offline: bool = opt.switch("--offline", "Disable downloads (also HF_HUB_OFFLINE=1)."),
    images: Path | None = opt.option(
        "--images",
        "DIR",
        "Score external images. Their prompts follow from file names (prompt ids, or the scheme of a paper's program) "
        "or metadata.",
    ),
    prompts: str | None = opt.option("--prompts", "SET|FILE", "Prompts of --images, if they have no metadata file."),
    layout: str | None = opt.option(
        "--layout",
        "NAME",
        f"Naming of the files of --images: {', '.join(_LAYOUTS)}.",
        show_default="the layout that fits",
    ),
    prompt_column: str | None = opt.option("--prompt-column", "NAME", "Column of --prompts that holds the texts."),
    against: str | None = opt.option("--against", "RUN", "Print paired score differences from this run instead."),
    python: Path | None = opt.option(
        "--python",
        "FILE",
        "Python of the environment with the package of VQAScore or HPSv3.",
        show_default="as 'specbench doctor --metric' says",
    ),
    out: str = opt.Out,
    quiet: bool = opt.Quiet,
    json: bool = opt.Json,
) -> None:
    if bundled_only and (metric or protocol):
        raise SpecbenchError("--bundled-only cannot be combined with --metric or --protocol")
    from specbench.metrics.catalog import with_protocol
    from specbench.metrics.score_store import difference_rows, named_metric
    from specbench.store.run_folders import find_run, find_runs, runs_in

    metric = [named_metric(name, runs_in(Path(out))) for name in metric or ()]
    names = with_protocol(metric, protocol)
    _check_score(images, prompts, bool(runs), bool(names), against)
    named = (*(runs or ()), *filter(None, [against]))
    stored = _find_scored(named, out) if named and images is None else []  # before torch is loaded
    if python and not python.is_file():
        raise SpecbenchError(f"--python {python} does not exist", "name the Python executable of an environment")
    from specbench.metrics.base import Settings
    from specbench.metrics.external_images import external_images, prompts_of_images
    from specbench.metrics.scoring import score as score_images
    from specbench.system.torch_device import AUTO, chosen_device

    settings = Settings(chosen_device(device or AUTO, float64=False), batch, reference, offline, python)
    settings.check()
    progress = None if quiet else ScoreProgress()
    if layout and images is None:
        raise SpecbenchError("--layout requires --images", "add --images DIR: --layout describes the file names in it")
    if images is None and not runs:
        stored = find_runs(out)
    scored: Sequence[Any] = stored
    if images is not None:
        listed = prompts_of_images(images, prompts, prompt_column)
        scored = [external_images(images, listed, Path(out), layout, progress)]
    scoring = score_images(scored, metric or None, settings, progress, bundled_only=bundled_only, protocol=protocol)
    scoring.check(partly=images is None)
    if against:
        rows = difference_rows(find_run(out, against), find_runs(out, runs or ()), names, settings)
    else:
        rows = scoring.rows()
    if not quiet:
        _say_drawn(stored)
    _print_scores(rows, bool(against), json)
    scoring.check()
    if not rows and not against:
        raise _no_score(stored)


def _no_score(folders: Sequence[Path]) -> SpecbenchError:
    """Make the error for runs without any score. `folders`: run folders; empty for a folder of external images."""
    import pandas as pd

    from specbench.store.run_store import RunStore
    from specbench.store.schema import RowStatus

    columns = ["status", "error", "image"]
    rows = pd.concat([pd.DataFrame(columns=columns), *(RunStore(folder).samples(columns) for folder in folders)])
    if len(rows) and rows["status"].ne(RowStatus.OK).all():
        return SpecbenchError(f"no score: no image was decoded; the first failed: {rows['error'].iloc[0]}")
    if len(rows) and rows["image"].isna().all():
        return SpecbenchError("no score: these runs have no image files", "see the reason that `specbench run` printed")
    return SpecbenchError(
        "no score: these metrics need reference images for these prompts",
        "give real images with --reference FOLDER, or choose other metrics: specbench list metrics",
    )


def _find_scored(names: Sequence[str], out: str) -> list[Path]:
    """Find the runs to score. If a name is a metric, the error recommends `--metric`."""
    from specbench.metrics.catalog import metric_names
    from specbench.store.run_folders import find_runs

    try:
        return find_runs(out, names)
    except SpecbenchError as error:
        metric = next((name for name in names if name in {text.partition("[")[0] for text in metric_names()}), None)
        if metric is None:
            raise
        flag = f"to choose a metric: specbench score --metric {metric}"
        raise SpecbenchError(error.what, flag) from None


def _check_score(images: Path | None, prompts: str | None, runs: bool, metrics: bool, against: str | None) -> None:
    """Reject flags of `score` that conflict or lack a required flag; `runs`, `metrics`: whether any are named."""
    if images is None and prompts is not None:
        raise SpecbenchError("--prompts requires --images", "omit --prompts: a run stores its prompts")
    if images is not None and runs:
        raise SpecbenchError("--images and RUN cannot be combined", "omit RUN: --images scores other images than runs")
    if against and (images is not None or not metrics):
        raise SpecbenchError("--against requires --metric or --protocol, and no --images")


def _say_drawn(scored: Sequence[Path]) -> None:
    """Report which prompts the scored runs decoded, for runs that decoded only a part of their set."""
    from specbench.store.run_store import RunStore

    runs: dict[str, list[str]] = {}
    for folder in scored:
        if drawn := RunStore(folder).info().drawn:
            runs.setdefault("; ".join(drawn), []).append(folder.name)
    for selection, folders in runs.items():
        console.say(f"prompts selected: {selection} ({', '.join(folders)})")


def _print_scores(rows: Sequence[dict[str, Any]], differences: bool, as_json: bool) -> None:
    if not rows and differences:
        console.say("nothing to compare: the runs have no images in common, or the metric has no paired differences")
    count = Counter(name for name, _ in {(row["metric"], row["fingerprint"]) for row in rows})
    repeated = (row["fingerprint"] for row in rows if count[row["metric"]] > 1)
    several = {made: f" ({made})" for made in repeated}  # for example, with other reference images
    named = [row | {"metric": row["metric"] + several.get(row["fingerprint"], "")} for row in rows]
    noted = dict.fromkeys((row["note"], row["metric"]) for row in named if row.get("note"))
    for note in dict.fromkeys(note for note, _ in noted):
        console.say(f"{', '.join(metric for other, metric in noted if other == note)}: {note}")
    if as_json:
        print_json(rows)
    elif rows:
        value, last = ("difference", []) if differences else ("value", ["prompts_needed"])
        if console.is_terminal():
            return print_table(_score_lines(named, value), ("run_id", "metric", value, "95_%", "n", *last))
        print_table(named, ("run_id", "metric", value, "low", "high", "n", *last))


def _score_lines(rows: Sequence[dict[str, Any]], value: str) -> list[dict[str, Any]]:
    """Format scores as texts. Only the first line of a run has its name; parts of a metric follow the metric."""
    from specbench.reporting.columns import TOO_FEW, between, number

    lines, last = [], None
    for row in rows:
        metric, _, part = row["metric"].partition(":")
        few = row.get("too_few", "p" in row)  # differences lack an interval only for too few prompts
        bounds = between(row["low"], row["high"], 3) if row["low"] is not None else TOO_FEW if few else None
        lines.append(
            {
                "run_id": "" if row["run_id"] == last else row["run_id"],
                "metric": f"· {part}" if part else metric,
                value: number(row[value], 3),
                "95_%": bounds,
                "n": row["n"],
                "prompts_needed": row.get("prompts_needed"),
            }
        )
        last = row["run_id"]
    return lines
