"""Run plans: decode the images missing in the results folder, and write every row as soon as it is decoded.

run_plans -> run -> Executor.decode -> specbench.decoding.loop.decode
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from specbench.prompts import Request
from specbench.runs.compiler import compiled_or_eagerly
from specbench.runs.decoder_args import PlannedDecoder, with_window
from specbench.runs.dry_run import caption_note, seconds_per_image
from specbench.runs.executors.ray_cluster import require_ray
from specbench.runs.plan import Plan, earlier_window, together
from specbench.runs.run_progress import Reporter, RunSummary, machine_warnings
from specbench.specs.run_spec import RunSpec
from specbench.store.run_folders import find_runs_like, run_folder, runs_in
from specbench.store.run_store import RunStore
from specbench.store.schema import RowStatus
from specbench.system import console, environment, signals
from specbench.system.downloads import fetch_all
from specbench.system.torch_device import require_device

# Imports inside functions: torch is needed only if images are missing; other calls, and the first line, are fast.

if TYPE_CHECKING:
    from specbench.runs.executors.local import Chunk, Executor

_Item = TypeVar("_Item")
_AT_ONCE = 100  # Maximum number of runs with open folders, of five files each
_MOST_NAMED = 3  # Maximum number of disturbances that are reported one by one


def run_plans(plans: Plan | Sequence[Plan], reporter: Reporter | None = None) -> RunSummary:
    """Run plans. Plans that share their `specbench.runs.plan.Plan.work` alternate on one loaded model."""
    reporter = reporter or Reporter()
    summary = RunSummary([], total=0, resumed=0)
    groups = together([plans] if isinstance(plans, Plan) else plans)
    for group in groups:
        if group[0].workers.elsewhere:
            require_ray(group[0].workers.address)
        else:
            require_device(group[0].settings.device)
        for line in announcement(group):
            reporter.note(line)
    unlike = {(id(plan.model), id(plan.decoders)): plan for group in groups for plan in group}.values()
    fetch_all(download for plan in unlike for download in plan.downloads())
    signals.look()
    for group in groups:
        cut = caption_note(group[0].model, [prompt.text for prompt in group[0].chosen])
        for note in dict.fromkeys([*(note for plan in group for note in plan.notes), *([cut] if cut else [])]):
            reporter.note(note)
        mode, compiled = group[0].settings.compile, bool(group[0].compute.compiled)
        summary.add(compiled_or_eagerly(mode, compiled, partial(_run_group, group, reporter), reporter.note))
        if summary.interrupted:
            break
        signals.look()
    return summary


def _complete(group: Sequence[Plan]) -> RunSummary | None:
    """If all images of the plans are stored, return the outcome; otherwise None."""
    first = group[0]
    if not (first.model.ready and runs_in(first.out)):
        return None
    weights, by_spec = first.model.weights_sha256(), dict[RunSpec, list[Request]]()
    for plan in group:
        for planned in plan.decoders:
            window = earlier_window(plan, planned.spec, weights) if planned.auto_window else None
            if planned.auto_window and not window:
                return None
            spec = plan.spec(with_window(planned.spec, window) if window else planned.spec, weights)
            if len(requests := plan.requests_of(planned)) > len(by_spec.get(spec, ())):
                by_spec[spec] = requests
    stores = {spec: RunStore(run_folder(first.out, spec)) for spec in by_spec}
    for spec, store in stores.items():
        store.check(spec)
        if _pending(store, by_spec[spec], first.settings.trace) or store.unfinished():
            return None
    total = sum(map(len, by_spec.values()))
    return RunSummary([store.folder for store in stores.values()], total, resumed=total)


def _run_group(group: Sequence[Plan], reporter: Reporter, compiled: bool) -> RunSummary:
    """Run plans on one loaded model, which is freed on return, because the next model may need its memory. Very many
    runs are divided into parts, so that the first image need not wait until all folders are open."""
    group = [replace(plan, compute=replace(plan.compute, compiled=compiled or None)) for plan in group]
    summary, first, executor, model = RunSummary([], total=0, resumed=0), group[0], None, None
    size = len(group) if first.workers.elsewhere else max(1, _AT_ONCE // len(first.decoders))
    with ExitStack() as running:
        for part in (group[start : start + size] for start in range(0, len(group), size)):
            if summary.interrupted:
                summary.total += sum(plan.images_of(planned) for plan in part for planned in plan.decoders)
                continue
            if done := _complete(part):
                reporter.start(done.total, done.resumed, done.folders)
                reporter.finish()
            else:
                from specbench.runs.dry_run import cost_note
                from specbench.runs.preparation import open_executor, work_of
                from specbench.system.torch_state import PinnedTorch

                if executor is None:
                    running.enter_context(PinnedTorch(False))
                    if note := cost_note(first):
                        reporter.note(note)
                    executor, model = running.enter_context(open_executor(first, reporter))
                by_spec, facts = work_of(part, model, reporter, not summary.folders)
                trace = first.settings.trace
                done = run(executor, list(by_spec), first.requests, first.out, reporter, facts, trace, by_spec)
            summary.add(done)
            if not done.interrupted:
                signals.look()
    return summary


def run(
    executor: Executor,
    specs: Sequence[RunSpec],
    requests: Sequence[Request],
    out: Path,
    reporter: Reporter | None = None,
    run_facts: Mapping[str, Mapping[str, object]] | None = None,
    trace: bool = False,
    fewer: Mapping[RunSpec, Sequence[Request]] = MappingProxyType({}),
) -> RunSummary:
    """Decode every image of `requests` with every spec, interleaved, except stored images.

    `executor` decodes, here or in other processes; only this function writes below `out`. `specs`: for one model.
    `run_facts`: fields of `specbench.store.run_info.RunInfo` by run id. With `trace`, images stored without a trace are
    decoded again. `fewer`: {spec: its images}, for specs that decode only some of `requests`.
    """
    reporter = reporter or Reporter()
    by_spec = {spec: fewer.get(spec, requests) for spec in {spec.run_id: spec for spec in specs}.values()}
    stores = {spec: RunStore(run_folder(out, spec)) for spec in by_spec}
    for spec, store in stores.items():
        store.check(spec)
    with ExitStack() as writing:
        work = {spec: _lock(store, spec, by_spec[spec], trace, writing) for spec, store in stores.items()}
        writing.callback(reporter.finish)
        prepared = _warm_up(executor, work, reporter)
        facts = environment.environment_facts() | prepared
        for spec in work:
            if stores[spec].locked:
                of_run = dict((run_facts or {}).get(spec.run_id, {}))
                of_call = facts | {"drawn": of_run.pop("drawn", None), "wanted": len(by_spec[spec])}
                stores[spec].begin(spec, of_call, of_run)
        todo = sum(map(len, work.values()))
        total = sum(map(len, by_spec.values()))
        summary = RunSummary([store.folder for store in stores.values()], total, resumed=total - todo)
        reporter.start(total, summary.resumed, summary.folders)
        stop = writing.enter_context(signals.finishing(reporter.stopping))
        # When `stop` is set, chunks in progress are finished and written.
        chunks = takewhile(lambda _: not stop.is_set(), _chunks(executor, work, by_spec, trace))
        for done in executor.decode(chunks, reporter) if todo else ():
            stores[done.spec].append(done.rows, done.images, done.traces)
            if done.hardware is not None:
                stores[done.spec].decoded_also_on(done.hardware)
            for row in done.rows:
                summary.count(row)
                reporter.row(done.spec.run_id, row)
        summary.interrupted = stop.number if summary.done + summary.failed < todo else 0
    disturbed = _disturbances([stores[spec] for spec in work if work[spec] and spec.timed])
    for text in disturbed[:_MOST_NAMED]:
        reporter.note(f"{text}: repeat the run on an idle machine, with another --out")
    if (more := len(disturbed) - _MOST_NAMED) > 0:
        reporter.note(f"{more} more such disturbance{'s' * (more > 1)}; specbench report prints the largest")
    return summary


def _lock(
    store: RunStore, spec: RunSpec, requests: Sequence[Request], trace: bool, writing: ExitStack
) -> list[Request]:
    """List the missing images of a run. If there are any, lock the folder; a complete run is not changed."""
    if not _pending(store, requests, trace) and not store.unfinished():
        return []
    writing.enter_context(store.lock(spec))
    return _pending(store, requests, trace)


def _pending(store: RunStore, requests: Sequence[Request], trace: bool) -> list[Request]:
    completed = store.completed(trace)
    return [request for request in requests if request.key not in completed]


def _warm_up(executor: Executor, work: Mapping[RunSpec, Sequence[Request]], reporter: Reporter) -> dict[str, Any]:
    """Prepare the executor for the runs with missing images; return facts about it for run.json."""
    specs = [*{replace(spec, seed=0): spec for spec, requests in work.items() if requests}.values()]
    if not specs:
        return {}
    texts = sorted({request.text for requests in work.values() for request in requests}, key=len)
    facts = executor.warm_up(specs, list(dict.fromkeys((texts[-1], texts[0]))), reporter.part)
    if "compile_s" in facts:
        graphs = f", {facts['graph_bytes'] / 2**20:.0f} MiB of graphs" if "graph_bytes" in facts else ""
        reporter.note(f"compiled steps in {facts['compile_s']:.0f} s ({facts['compiled_forms']} forms{graphs})")
    return facts


def _chunks(
    executor: Executor,
    work: Mapping[RunSpec, Sequence[Request]],
    by_spec: Mapping[RunSpec, Sequence[Request]],
    trace: bool,
) -> Iterator[Chunk]:
    """Split the work into chunks. At batch 1 the decoders alternate image by image, so that slow drifts of the machine
    affect all decoders equally. Larger batches do not alternate, so that rows can be refilled."""
    from specbench.runs.executors.local import Chunk

    for spec, requests in work.items():
        size = executor.portion(spec)
        for start in range(0, len(requests) if spec.batch > 1 else 0, size):
            yield Chunk(spec, tuple(requests[start : start + size]), trace)
    single = [spec for spec in work if spec.batch == 1]
    left = {spec: {request.key: request for request in work[spec]} for spec in single}
    longest = sorted(single, key=lambda spec: len(by_spec[spec]), reverse=True)
    rounds = dict.fromkeys(request.key for spec in longest for request in by_spec[spec])  # also of stored images
    for number, key in enumerate(rounds):
        missing = [spec for spec in balanced_order(single, number) if key in left[spec]]
        for turn, spec in enumerate(missing, 1):
            yield Chunk(spec, (left[spec][key],), trace, turn if len(single) > 1 else None)


def balanced_order(items: Sequence[_Item], number: int) -> list[_Item]:
    """Return the order of round `number`. In a cycle, an item is equally often at each position, and equally often
    after each other item (Williams 1949: a Latin square; for an odd number of items, also its mirror image)."""
    count = len(items)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [items[(step + number) % count] for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def _disturbances(stores: Sequence[RunStore]) -> list[str]:
    """Describe the disturbances of the latencies of these runs."""
    rows = (store.samples(["status", "machine"]) for store in stores)
    texts = [text for frame in rows for text in frame.loc[frame["status"] == RowStatus.OK, "machine"].dropna()]
    return machine_warnings([json.loads(text) for text in texts])


def announcement(plans: Sequence[Plan]) -> list[str]:
    """Return a line on the work that the plans share, and a line on AR if a plan adds AR as a baseline."""
    first = plans[0]
    runs = {
        (plan.sampling, plan.settings.seed, plan.compute.batch, planned.spec): (plan, planned, plan.images_of(planned))
        for plan in plans
        for planned in plan.decoders
    }
    asked = [run for run in runs.values() if run[1].first is None]
    decoders = list(dict.fromkeys(planned.spec.name for _, planned, _ in asked))
    images = sum(images for *_, images in asked)
    compute = first.compute
    how = ", ".join((compute.dtype, compute.device, *(["compiled"] if compute.compiled else [])))
    names = ", ".join(decoders[:_MOST_NAMED]) + (f" and {len(decoders) - 3} more" if len(decoders) > 3 else "")
    prompts, pictures = console.counted(len(first.chosen), "prompt"), console.counted(images, "image")
    line = f"{first.model.name} ({how}): {prompts} of {first.prompts.name}, {pictures} with {names}{_time(asked)}"
    added = [run for run in runs.values() if run[1].first is not None and run[2]]
    if not added:
        return [line]
    few, among = max((images, min(planned.first or 0, len(plan.chosen))) for plan, planned, images in added)
    first_few = f"{few} of the first {among} prompts"
    if few == among:
        first_few = f"the first {few} prompts" if few > 1 else "the first prompt"
    there = all(_stored(plan, planned) for plan, planned, _ in added)
    cost = ", stored already" if there else f"{_time(added)} (to omit it: --baseline 0)"
    return [line, f"baseline for the speed-up: ar on {first_few}{cost}"]


def _stored(plan: Plan, decoder: PlannedDecoder) -> bool:
    """Return whether the images of a decoder are already stored in a run of these settings."""
    alike = {name: getattr(plan.compute, name) for name in ("batch", "dtype", "device", "threads")}
    alike |= {"sampling": plan.sampling, "seed": plan.settings.seed, "prompts_sha256": plan.prompts.sha256}
    folders = find_runs_like(plan.out, model=plan.model.name, decoder={"name": decoder.spec.name}, **alike)
    return any(not _pending(RunStore(folder), plan.requests_of(decoder), plan.settings.trace) for folder in folders)


def _time(runs: Sequence[tuple[Plan, PlannedDecoder, int]]) -> str:
    """Format the expected time of (plan, decoder, number of images), estimated from stored runs."""
    alike = [(plan.out, plan.model.name, planned.spec.name, plan.settings.device) for plan, planned, _ in runs]
    paces = {key: seconds_per_image(*key) for key in dict.fromkeys(alike)}
    known = [pace * run[2] for key, run in zip(alike, runs, strict=True) if (pace := paces[key]) is not None]
    seconds = sum(known) if len(known) == len(runs) else 0
    return f"; about {console.duration(seconds)} in all, estimated from earlier runs" if seconds else ""
