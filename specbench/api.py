"""The whole library in one short file: plan, decode, store, score, report. The command line calls nothing
else.

    prompts -> model.encode -> decoding.loop.decode -> Generation -> store -> scoring -> reporting

Settings have the names of the command line's flags, with underscores: `top_k=100`, `G=50`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.protocols import find_protocol
from specbench.prompts import Prompt, load_prompts, text_id
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.execute import execute, load_for_run
from specbench.runs.plan import plan_model, plan_sampling
from specbench.runs.settings import merge, run_settings
from specbench.runs.sweep import sweep_plans
from specbench.store.run_folders import find_runs
from specbench.system import compiler

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.generation import Generation
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import Reporter as ScoreReporter
    from specbench.runs.runner import Reporter, RunSummary


def generate(
    prompt: str | Sequence[str], model: str = "shapes", decoder: str = "sjd", **settings: object
) -> Generation | list[Generation]:
    """Decode images without storing anything.

    Args:
        prompt: one caption, or several to decode as one batch.
        settings: `seed`, `cfg`, `temperature`, `top_k`, `top_p`, `dtype`, `device`, `threads`, `compile`, `weights`,
            `revision`, `random_weights`, `scale`, `trace`, and every option of the decoder, for example `G=50`.

    Returns:
        A `Generation` for one caption, a list for several. Pixels are in `.image`, uint8 [3, H, W].

    Raises:
        SpecbenchError: anything unknown, out of range or unreadable.
    """
    from specbench.decoding.loop import Request, decode

    values = merge(run_settings(), _flags(settings | {"model": model, "decoder": decoder}), env={})
    info = plan_model(values)
    planned, *others = plan_decoders(values["decoder"].value, values)
    if others or planned.auto_window:
        raise SpecbenchError("generate takes one decoder and a window that is a number", "specbench.run takes more")
    sampling = plan_sampling(info, values)
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not texts:
        raise SpecbenchError("generate: no prompt given", "pass a caption, or a list of some")
    info.check_prompts(Prompt(text_id(text), text) for text in texts)
    device = values["device"].value
    compiled, refusal = compiler.should_compile(values["compile"].value, device)
    if refusal:
        raise SpecbenchError(refusal, "leave compile away", MISSING_PREREQUISITE)
    loaded = load_for_run(info, device, values["dtype"].value, values["threads"].value, compiled)
    requests = [Request(text, text_id(text)) for text in texts]
    images = decode(loaded, requests, planned.spec, sampling, values["seed"].value, trace=values["trace"].value)
    for image in images:
        if isinstance(image, SpecbenchError):
            raise image
    return images[0] if isinstance(prompt, str) else images


def run(
    reporter: Reporter | None = None, sweep: Mapping[str, Sequence[object]] | None = None, **settings: object
) -> RunSummary:
    """Decode a prompt set with one or several decoders into the results folder, continuing what is there.

    Args:
        sweep: settings to run with each of several values, for example `{"G": [3, 10], "window": [8, 16]}`; several
            make every combination.
        settings: those of `specbench run`, for example `decoder=["ar", "gsd:G=50"], prompts="shapes",
            limit=8`.

    Raises:
        SpecbenchError: see `specbench.runs.sweep.sweep_plans` and `specbench.runs.runner.run`.
    """
    return execute(sweep_plans(merge(run_settings(), _flags(settings), env={}), _flags(sweep or {})), reporter)


def score(
    runs: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    out: str | Path = "results",
    protocol: str | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
) -> list[dict[str, object]]:
    """Compute what is missing of the metrics for the named runs, or for all in `out`.

    Args:
        metrics: names; if there are none and no protocol, every metric that needs nothing from outside and fits the
            prompts.
        protocol: "sjd" or "cool-sd" adds that protocol's metrics where they fit the prompts.
        settings: device, batch, reference images, offline.

    Returns:
        One dict per score: `run_id, metric, value, low, high, n, fingerprint, identity, images`.
    """
    from specbench.metrics import score_store, scoring

    folders = find_runs(out, runs)
    if metrics or not protocol:
        scoring.score(folders, metrics or None, settings, reporter)
    if protocol:
        scoring.score(folders, find_protocol(protocol), settings, reporter, where_they_fit=True)
    return [{"run_id": folder.name, **row} for folder in folders for row in score_store.read_scores(folder)]


def differences(
    baseline: str,
    runs: Sequence[str] = (),
    metrics: Sequence[str] = (),
    out: str | Path = "results",
    settings: Settings | None = None,
) -> list[dict[str, object]]:
    """Scored runs minus a scored baseline over the images both have, with paired 95 % intervals.

    Returns:
        One dict per run and metric: `run_id, baseline, metric, difference, low, high, p, spread, n, fingerprint`.
    """
    from specbench.metrics import score_store

    (reference,) = find_runs(out, [baseline])
    folders = [folder for folder in find_runs(out, runs) if folder.resolve() != reference.resolve()]
    made = [metric_catalog.metric(name)(settings) for name in metrics]
    rows = [score_store.difference(folder, reference, metric) for folder in folders for metric in made]
    return [row for row in rows if row is not None]


def score_folder(
    images: str | Path,
    prompts: str | Path,
    metrics: Sequence[str] | None = None,
    out: str | Path = "results",
    protocol: str | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
) -> list[dict[str, object]]:
    """The same for pictures made elsewhere, called `<prompt id>.png` or `<prompt id>-<sample>.png`.

    Raises:
        SpecbenchError: a picture without a prompt or a prompt without a picture, besides what `score` raises.
    """
    from specbench.metrics import score_store, scoring
    from specbench.metrics.external_images import foreign_images

    found = foreign_images(Path(images), load_prompts(prompts), Path(out))
    if metrics or not protocol:
        scoring.score_images(found, metrics or None, settings, reporter)
    if protocol:
        scoring.score_images(found, find_protocol(protocol), settings, reporter, where_they_fit=True)
    return [{"run_id": found.name, **row} for row in score_store.read_scores(found.folder)]


def compare(
    run_a: str, run_b: str, out: str | Path = "results", settings: Settings | None = None
) -> list[dict[str, object]]:
    """Two runs over the images both have, A being the baseline; see `specbench.reporting.compare.compare_runs`."""
    from specbench.reporting.compare import compare_runs

    (a,), (b,) = find_runs(out, [run_a]), find_runs(out, [run_b])
    return compare_runs(a, b, settings)


def report(runs: Sequence[str] = (), out: str | Path = "results") -> list[dict[str, object]]:
    """One row per run, with its numbers; see `specbench.reporting` for the keys."""
    from specbench import reporting

    return reporting.report_rows(find_runs(out, runs))


def load(run: str, out: str | Path = "results") -> pd.DataFrame:
    """The stored sample rows of one run, one per image, with the columns of `specbench.store.schema.SAMPLES`; of `TRACES`
    too where `run --trace` kept them."""
    from specbench.store.run_store import RunStore
    from specbench.store.schema import KEY

    store = RunStore(find_runs(out, [run])[0])
    traces = store.traces()
    return store.samples() if traces.empty else store.samples().merge(traces, on=KEY, how="left")


def _flags(settings: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in settings.items()}
