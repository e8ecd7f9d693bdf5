"""Carry plans out: load the model or start workers, tune windows, and run the decoders."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.errors import SpecbenchError
from specbench.models.catalog import load_model
from specbench.models.facts import ModelFacts
from specbench.runs.decoder_args import PlannedDecoder, with_window
from specbench.runs.plan import Plan, available_threads, together
from specbench.specs import plugin_decoders
from specbench.store.find import find_runs_like, without_options

if TYPE_CHECKING:
    from specbench.models.interface import ImageModel
    from specbench.runs.executors.local import Executor
    from specbench.runs.runner import Reporter, RunSummary
    from specbench.specs.presets import DecoderSpec


def execute(plans: Plan | Sequence[Plan], reporter: Reporter | None = None) -> RunSummary:
    """Run plans; those that share their work (`specbench.runs.plan.Plan.work`) take turns on one loaded model."""
    from specbench.runs.runner import RunSummary

    summary = RunSummary([], total=0, resumed=0)
    for group in together([plans] if isinstance(plans, Plan) else plans):
        summary.add(_execute_together(group, reporter))
        if summary.interrupted:
            break
    return summary


def _execute_together(plans: Sequence[Plan], reporter: Reporter | None) -> RunSummary:
    from specbench.runs import runner

    first = plans[0]
    for note in dict.fromkeys(note for plan in plans for note in plan.notes if reporter):
        reporter.note(note)
    with _executor(first, reporter) as (executor, model):
        weights_sha256 = model.weights_sha256 if model else first.model.weights_sha256()
        # What was downloaded for the loading may tell sizes and a revision that planning could not know.
        plans = [replace(plan, model=plan.model.as_stored()) for plan in plans]
        specs, run_facts = [], {}
        for plan in plans:
            for planned in plan.decoders:
                decoder, curve = planned.spec, None
                plan.head(decoder, download=True)
                if planned.auto_window:
                    decoder, curve = _choose_window(model, plan, planned, reporter)
                spec = plan.spec(decoder, weights_sha256)
                specs.append(spec)
                run_facts[spec.run_id] = {"origins": plan.origins(planned)} | _roofline(plan)
                run_facts[spec.run_id] |= {"window_curve": curve} if curve else {}
                run_facts[spec.run_id] |= {"memory": dict(plan.memory)} if plan.memory else {}
                source = plan.model.source_facts
                run_facts[spec.run_id] |= {"source": source | {"sha256": weights_sha256}} if source else {}
        return runner.run(executor, specs, first.requests, first.out, reporter, run_facts, first.trace)


@contextmanager
def _executor(plan: Plan, reporter: Reporter | None) -> Iterator[tuple[Executor, ImageModel | None]]:
    """Who decodes the plan, until the end of the block, and the model where that is this process."""
    from specbench.runs.executors.local import LocalExecutor

    load = functools.partial(
        _load_worker, plan.model, plan.device, plan.dtype, plan.threads, plan.compiled, plan.workers.references
    )
    where = f"{plan.model.name} ({plan.dtype}, {plan.device})"
    if not plan.workers.elsewhere:
        if reporter:
            reporter.note(f"loading {where}")
        model = load()
        yield LocalExecutor(model), model
        return
    from specbench.runs.executors.ray_workers import RayWorkers
    from specbench.runs.executors.worker_pool import WorkerPool

    plan.model.require_weights()
    with closing(RayWorkers(load, plan.workers.count, plan.workers.address, plan.device == "cuda")) as crew:
        if reporter:
            reporter.note(f"{crew.size} workers load {where}")
        yield WorkerPool(crew), None


def _roofline(plan: Plan) -> dict[str, object]:
    """Roofline inputs of this machine, if this process decodes."""
    from specbench.runs.roofline_facts import roofline_facts

    if plan.workers.elsewhere:
        return {}
    return {"roofline": roofline_facts(plan.model, plan.sampling.guidance, plan.dtype, plan.device, plan.threads)}


def load_for_run(model: ModelFacts, device: str, dtype: str | None, threads: int, compiled: bool) -> ImageModel:
    import torch  # slow to import: not for `--help`

    from specbench.models.interface import CompilableModel

    torch.set_num_threads(threads or available_threads())
    loaded = load_model(model, device, dtype)
    if compiled:
        if not isinstance(loaded, CompilableModel):
            raise SpecbenchError(f"--compile: model '{model.name}' cannot be compiled", "--compile off")
        loaded.compile()
    return loaded


def _load_worker(
    model: ModelFacts, device: str, dtype: str | None, threads: int, compiled: bool, references: Sequence[str]
) -> ImageModel:
    """The model in a process that may not know the plan's own decoders yet."""
    plugin_decoders.add_plugin_decoders()
    for reference in references:
        plugin_decoders.decoder_name(reference)
    return load_for_run(model, device, dtype, threads, compiled)


def _choose_window(
    model: ImageModel | None, plan: Plan, planned: PlannedDecoder, reporter: Reporter | None
) -> tuple[DecoderSpec, list[dict] | None]:
    """The decoder with the window measured to be the fastest, or with the one chosen by an earlier call."""
    from specbench.runs.window_tuning import describe_point, tune_window

    decoder = planned.spec
    if earlier := _earlier_window(plan, decoder, model.weights_sha256 if model else plan.model.weights_sha256()):
        return with_window(decoder, earlier), None
    if model is None:
        raise SpecbenchError(
            "--window auto: measured in this process only", "leave --workers and --ray away, or give N"
        )
    window, curve = tune_window(model, plan.chosen, decoder, plan.sampling, plan.seed, planned.windows)
    if reporter:
        for point in curve:
            reporter.note(f"{decoder.name}, window {point['window']}: {describe_point(point)}")
        reporter.note(f"{decoder.name}: window {window} is the fastest here")
    return with_window(decoder, window), curve


def _earlier_window(plan: Plan, decoder: DecoderSpec, weights_sha256: str) -> int | None:
    """The window that `--window auto` chose for the same run before, so that repeating a command resumes it."""
    wanted = vars(plan.spec(decoder, weights_sha256)) | {"decoder": without_options(decoder, "window")}
    for info in find_runs_like(plan.out, **wanted).values():
        if info.window_curve is not None:
            return dict(info.spec.decoder.options)["window"]
    return None
