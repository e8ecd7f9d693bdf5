"""Make and validate the plan of a `run` from its settings. All user errors are found here, before a model is loaded.
Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models.catalog import check_model, find_model, model_code
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.draft_head_files import HeadFiles, published_head
from specbench.models.facts import EIGHT_BITS, ModelChoice, ModelFacts
from specbench.models.hub_model import HubModel
from specbench.prompts import Prompt, PromptSet, Request, load_prompts, requests_for
from specbench.prompts.prompt_set import Drawing
from specbench.prompts.public import missing_set
from specbench.runs import compiler
from specbench.runs.compiler import free_threads
from specbench.runs.decoder_args import PlannedDecoder, plan_decoders, with_ar
from specbench.runs.executors.ray_cluster import Workers, plan_workers, require_ray, run_mode
from specbench.runs.memory_estimate import fitting_windows, free_memory, settle_batch
from specbench.runs.needs import naming_all
from specbench.runs.problems import Problem, Problems, check_disk, check_memory, check_writable
from specbench.runs.settings import RunSettings, names_with
from specbench.runs.shards import plan_shard, shard_folder
from specbench.specs.options import SettingSource, Use
from specbench.specs.presets import DecoderSpec, decoder_code
from specbench.specs.run_spec import OFF_IF_NONE, Compute, RunSpec, Sampling
from specbench.store.run_folders import find_runs_like, read_infos, without_options
from specbench.system.downloads import Download, offline
from specbench.system.foreign_code import refuse_edited
from specbench.system.limits import available_cores
from specbench.system.torch_device import check_decoding_device, require_device

MAX_IMAGES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Plan without prompts and memory estimate, with all problems that block the run."""

    settings: RunSettings
    model: ModelFacts
    decoders: tuple[PlannedDecoder, ...]
    sampling: Sampling
    compute: Compute  # in a draft, batch and threads are not final
    out: Path  # folder of this shard's runs
    workers: Workers
    shard: tuple[int, int]
    problems: tuple[Problem, ...] = ()

    def obstacles(
        self, planned: PlannedDecoder, memory: int | None, megabytes: float | None, shared: Shared
    ) -> tuple[SpecbenchError, ...]:
        """Return the problems of one decoder's run. `memory`: needed bytes; `megabytes`: on disk; None: unknown."""
        problems = Problems(each for each in self.problems if each.of is planned or isinstance(each.of, str))
        if memory is not None and "memory" not in [each.of for each in problems]:
            free = shared.free_memory(self.settings.device)
            problems.check(planned, check_memory, memory, free, self.settings.device)
        if megabytes is not None:
            problems.check(planned, check_disk, megabytes, Path(self.settings.out))
        return tuple(error for _, error in problems)


@dataclass(frozen=True, kw_only=True)
class Plan(Draft):
    """Complete input of `specbench.runs.runner.run_plans`."""

    prompts: PromptSet
    chosen: tuple[Prompt, ...]  # the selected prompts
    drawn: str | None  # description of the selection; None for the whole set
    notes: tuple[str, ...]  # notes on unsupported requests, one sentence each
    # the memory estimate behind the batch size, see `specbench.runs.memory_estimate.settle_batch`
    memory: Mapping[str, object] | None = None

    @property
    def work(self) -> tuple[object, ...]:
        """Key shared by plans whose decoders can alternate on one loaded model."""
        images = (self.chosen, self.settings.samples, self.shard, self.settings.trace, self.out)
        workers = self.workers if self.workers.elsewhere else None  # `references` matter only if workers import them
        return self.model, replace(self.compute, batch=1, mode=None), workers, images

    def asked_of(self, decoder: PlannedDecoder) -> dict[str, object]:
        """Return the user's settings without decoder options; for an added baseline, with the baseline's limits."""
        kept = names_with(Use.REPEAT)
        flags = {name: value for name, value in self.settings.given.items() if name in kept}
        return flags if decoder.first is None else flags | {"samples": 1, "limit": min(decoder.first, len(self.chosen))}

    def drawn_of(self, decoder: PlannedDecoder) -> str | None:
        if decoder.first is None or decoder.first >= len(self.chosen):
            return self.drawn
        return f"first {decoder.first}" + (f" of {self.drawn}" if self.drawn else "")

    @property
    def images(self) -> int:
        number, shards = self.shard
        return len(range(number - 1, len(self.chosen) * self.settings.samples, shards))

    @property
    def requests(self) -> list[Request]:
        """Images to decode; for shard I of N, every N-th image."""
        number, shards = self.shard
        return requests_for(self.chosen, self.settings.samples)[number - 1 :: shards]

    def requests_of(self, decoder: PlannedDecoder) -> list[Request]:
        """Return the requests of a decoder: all `requests`, or for an added baseline only some of them."""
        if decoder.first is None:
            return self.requests
        first = {prompt.id for prompt in self.chosen[: decoder.first]}
        return [request for request in self.requests if request.prompt_id in first and request.sample == 0]

    def images_of(self, decoder: PlannedDecoder) -> int:
        return self.images if decoder.first is None else len(self.requests_of(decoder))

    def origins(self, decoder: PlannedDecoder) -> dict[str, str]:
        """Return {setting: origin of its value} for one decoder's run."""
        kept = names_with(Use.RUN)
        shared = {name: str(origin) for name, origin in self.settings.origins.items() if name in kept}
        options = {name: f"default of {decoder.spec.name}" for name, _ in decoder.spec.options.items()}
        return shared | options | {name: str(origin) for name, origin in decoder.origins.items()}

    def spec(self, decoder: DecoderSpec, weights_sha256: str) -> RunSpec:
        """Return the run spec of one decoder. A draft head must be on this disk."""
        head = self.head(decoder)
        return RunSpec(
            model=self.model.name,
            weights_sha256=weights_sha256,
            decoder=decoder,
            sampling=self.sampling,
            prompts=self.prompts.name,
            prompts_sha256=self.prompts.sha256,
            seed=self.settings.seed,
            **vars(self.compute),
            head_sha256=head.sha256() if head else None,
            decoder_code=getattr(decoder_code(decoder), "digest", None),
            model_code=getattr(model_code(self.model), "digest", None),
        )

    def downloads(self) -> list[Download]:
        """Files of the model and the draft heads that are not on this disk."""
        return self.model.downloads() + self.missing_heads()

    def missing_heads(self) -> list[Download]:
        """Return the `downloads` that are draft heads."""
        heads = [head_files(self.model, planned.spec) for planned in self.decoders]
        return [need for head in dict.fromkeys(heads) if head and (need := head.missing())]

    def head(self, decoder: DecoderSpec, download: bool = False) -> CheckpointFiles | None:
        """Return the files of the decoder's draft head; None if it has no head."""
        head = head_files(self.model, decoder)
        return head.find(download) if head else None


def head_files(model: ModelFacts, decoder: DecoderSpec) -> HeadFiles | None:
    """Return the files of the draft head that is given, bundled with the model, or published; None if not used."""
    if not decoder.head_kind:
        return None
    head, bundled = decoder.options.get("head"), model.heads.get(decoder.head_kind)
    place = head or ("" if bundled else published_head(model.name, decoder.head_kind))
    sizes = None if isinstance(model, HubModel) and not (model.size_known and not model.choice.tiny) else model.network
    return HeadFiles(place, model.name, bundled, sizes.width if sizes else None, decoder.head_kind)


class Shared:
    """Cached facts that the plans of one command share. `load`: function that loads prompts."""

    def __init__(self, load: Callable[[str, str | None], PromptSet] = load_prompts):
        self.load = cache(load)
        self.chosen = cache(lambda named, drawing: tuple(drawing.of(self.load(*named))))
        self.check_prompts = cache(lambda model, *selection: model.check_prompts(self.chosen(*selection)))
        self.check_writable = cache(check_writable)
        self.free_memory = cache(free_memory)
        self.free_threads = cache(free_threads)
        self.runs_on_cpu = cache(lambda out, model: find_runs_like(out, model=model, device="cpu"))


def make_plan(settings: RunSettings, shared: Shared | None = None) -> Plan:
    """Make the plan of a `run` from its settings; raise the first problem, if any."""
    draft = draft_plan(settings, shared)
    if isinstance(draft, Plan):
        return draft
    of, error = draft.problems[0]
    raise naming_all(error, draft.model, str(settings.prompts)) if of in ("prompts", "weights") else error


def draft_plan(settings: RunSettings, shared: Shared | None = None, ahead: bool = False) -> Draft:
    """Return the plan, or a draft if the prompts are not downloaded or a problem blocks all runs. `ahead`: also look
    for problems that would only occur at run time. Only wrong settings raise an error."""
    (draft, unmet, alone), shared, problems = _draft(settings), shared or Shared(), Problems()
    model, drawing = draft.model, plan_drawing(settings)
    named = str(settings.prompts), settings.prompt_column
    chosen = problems.check("prompts", _draw, draft, named, drawing, shared) or ()
    problems.check("weights", model.require_weights)
    for planned in draft.decoders:
        if head := head_files(model, planned.spec):
            problems.check(planned, head.require)
        if not model.has_codebook:
            problems.check(planned, planned.spec.refuse_without_codebook, model.name)
    if chosen:
        problems.check("captions", shared.check_prompts, model, named, drawing)
    problems.check("out", shared.check_writable, draft.out)
    if not problems:
        threads, busy = _threads(draft, shared)
        draft = replace(draft, compute=replace(draft.compute, threads=threads))
        prompts, notes = shared.load(*named), filter(None, [model.size_note, _rows_note(model, settings), alone])
        drawn = drawing.text(prompts)
        plan = Plan(**vars(draft), prompts=prompts, chosen=chosen, drawn=drawn, notes=(*unmet, *busy, *notes))
        if not draft.workers.elsewhere:
            # Compilation, windows and batch depend on the plan's size and on this machine.
            settled = problems.check("memory", lambda: _settle_batch(_settle_windows(_settle_steps(plan, shared))))
            draft = settled or draft
        else:
            draft = plan
    if ahead:
        _look_ahead(draft, problems)
    return replace(draft, problems=tuple(problems))


def _draft(settings: RunSettings) -> tuple[Draft, tuple[str, ...], str]:
    """Read the settings; also return notes on number format and compilation, and a note on the shard."""
    model, decoders = plan_model(settings), with_ar(plan_decoders(settings), settings)
    for code in (model_code(model), *(decoder_code(planned.spec) for planned in decoders)):
        refuse_edited(code)
    workers, (shard, alone) = plan_workers(settings), plan_shard(settings.shard, os.environ)
    sampling, device = plan_sampling(model, settings), settings.device
    check_decoding_device(device)
    dtype, compiled, unmet = compiler.settle_precision(settings.dtype, model.dtype, settings.compile, device)
    batch = 1 if settings.batch == "auto" else settings.batch
    shared = run_mode(settings.mode, settings.batch, workers, device) == "throughput" and batch == 1
    draft = Draft(
        settings=settings,
        model=model,
        decoders=tuple(decoders),
        sampling=sampling,
        compute=Compute(batch, dtype, device, settings.threads, "throughput" if shared else None, compiled or None),
        out=Path(settings.out) / shard_folder(*shard),
        workers=workers,
        shard=shard,
    )
    return draft, unmet, alone


def _threads(draft: Draft, shared: Shared) -> tuple[int, list[str]]:
    """Return the CPU threads of each worker, and a note if other processes or stored runs reduce their number, or if
    more threads are requested than this process has cores."""
    if asked := draft.settings.threads:
        cores, on_cpu = available_cores(), draft.settings.device == "cpu" and not draft.workers.elsewhere
        slow = f"--threads {asked}: this process has {cores} CPU cores, so threads wait for each other"
        return asked, [slow] if on_cpu and asked > cores else []
    threads, busy = shared.free_threads(draft.out, draft.model.name, draft.settings.device)
    return threads // (draft.workers.count or 1) or 1, busy


def _draw(draft: Draft, named: tuple[str, str | None], drawing: Drawing, shared: Shared) -> tuple[Prompt, ...]:
    """Return the selected prompts; raise an error if there are too many images for a run."""
    chosen = shared.chosen(named, drawing)
    samples, shards = draft.settings.samples, draft.shard[1]
    if (images := -(-len(chosen) * samples // shards)) > MAX_IMAGES:
        what = f"--samples {samples}: {images:,} images of {len(chosen):,} prompts; a run has at most {MAX_IMAGES:,}"
        raise SpecbenchError(what, "use --limit, or --shard I/N with another --out for each part")
    return chosen


def _look_ahead(draft: Draft, problems: Problems) -> None:
    """Add problems that occur only at run time; remove the problem of missing prompts if the run will download them."""
    if not offline() and missing_set(str(draft.settings.prompts)):
        problems[:] = [problem for problem in problems if problem.of != "prompts"]
    problems.check("device", require_device, draft.settings.device)
    if draft.workers.elsewhere:
        problems.check("workers", require_ray, draft.workers.address)
    if draft.settings.weights and draft.model.ready:  # unlike official weights, a user's files are unchecked
        problems.check("weights", check_model, draft.model)


def _rows_note(model: ModelFacts, settings: RunSettings) -> str | None:
    """Return a note on the form of the unconditional prompt if the user chose none and `run` and `bench` differ."""
    source = settings.origins["guidance-rows"].source
    forms = model.released_forms if isinstance(model, HubModel) else ()
    if "guidance_rows" not in forms or source in (SettingSource.FLAG, SettingSource.ENVIRONMENT):
        return None
    if settings.guidance_rows == "released":
        return "unconditional rows are those of the released code; run's default is --guidance-rows official"
    return "unconditional rows are official; bench gsd-1 uses --guidance-rows released"


def plan_drawing(asked: RunSettings) -> Drawing:
    """Return the selection of prompts that the settings ask for."""
    return Drawing(asked.ids, asked.category, asked.offset, asked.per_category, asked.sample, asked.limit)


def _settle_windows(plan: Plan) -> Plan:
    """Set the windows that `--window auto` measures."""
    facts = plan.sampling, plan.compute.dtype, plan.compute.device
    return replace(
        plan,
        decoders=tuple(
            replace(planned, windows=fitting_windows(plan.model, planned.spec, *facts))
            if planned.auto_window and planned.spec.options.get("window") is not None
            else planned
            for planned in plan.decoders
        ),
    )


def _settle_steps(plan: Plan, shared: Shared) -> Plan:
    """With `--compile auto` on a CPU, compile if the number of images is large enough to save time."""
    if plan.settings.compile != "auto" or plan.settings.device != "cpu" or model_code(plan.model):
        return plan
    steps = plan.model.stream * sum(len(plan.requests_of(planned)) for planned in plan.decoders)
    stored = [info.compiled for info in shared.runs_on_cpu(plan.out, plan.model.name).values()]
    compute = plan.compute
    facts = plan.model.name, compute.dtype, compute.threads, compute.batch, plan.sampling.guidance
    keys = [compiler.code_key(*facts, planned.spec) for planned in plan.decoders]
    compiled, note = compiler.worth_compiling(stored, plan.model.layers, steps, keys)
    compute = replace(compute, compiled=compiled or None)
    return replace(plan, compute=compute, notes=(*plan.notes, *([note] if note else ())))


def _settle_batch(plan: Plan) -> Plan:
    """Set a batch size that fits into memory; "auto" reuses the batch size of a stored run."""
    specs, asked, compute = [planned.widest for planned in plan.decoders], plan.settings.batch, plan.compute
    earlier = _earlier_batch(plan) if asked == "auto" else None
    batch, estimate = settle_batch(earlier or asked, plan.model, specs, plan.sampling, compute.dtype, compute.device)
    if asked == "auto" and not earlier:
        images = max(1, plan.images)
        batch = min(batch, images)
        estimate = dict(estimate or {}) | {"batch": batch, "images": images}
    compute = replace(compute, batch=batch, mode=compute.mode if batch == 1 else None)
    return replace(plan, compute=compute, memory=estimate)


def _earlier_batch(plan: Plan) -> int | None:
    """Return the batch size that `--batch auto` chose for a stored run of the plan, to resume that run."""
    if not plan.model.ready:
        return None
    weights, runs = plan.model.weights_sha256(), read_infos(plan.out)
    for planned in plan.decoders if runs else ():
        fields = vars(plan.spec(planned.spec, weights))
        fields = {name: value for name, value in fields.items() if name not in ("batch", "mode")}
        for info in find_runs_like(runs, **fields).values():
            if "images" in (info.memory or {}):  # only written by --batch auto
                return info.spec.batch
    return None


def earlier_window(plan: Plan, decoder: DecoderSpec, weights_sha256: str) -> int | None:
    """Return the window that `--window auto` chose for the same stored run, to resume that run."""
    fields = vars(plan.spec(decoder, weights_sha256)) | {"decoder": without_options(decoder, "window")}
    for info in find_runs_like(plan.out, **fields).values():
        if info.window_curve is not None:
            return info.spec.decoder.options.get("window")
    return None


def together(plans: Iterable[Plan]) -> list[list[Plan]]:
    """Group the plans by `work`, in order of first appearance."""
    groups: list[list[Plan]] = []
    for plan in plans:
        if (group := next((group for group in groups if group[0].work == plan.work), None)) is None:
            groups.append([plan])
        else:
            group.append(plan)
    return groups


def plan_model(settings: RunSettings) -> ModelFacts:
    """Return the model that the settings name, with their weights and image size."""
    choice = ModelChoice(
        weights=settings.weights,
        revision=settings.revision,
        random=settings.random_weights,
        tiny=settings.scale == "tiny",
        guidance_rows=settings.guidance_rows,
        prompt_form=settings.prompt_form,
        guidance_schedule=settings.guidance_schedule,
        size=settings.size,
        eight_bits=settings.dtype == EIGHT_BITS,
    )
    return find_model(settings.model).configured(choice, download=True)


def plan_sampling(model: ModelFacts, settings: RunSettings) -> Sampling:
    """Return the model's sampling with the settings applied; reject a top-k above the image vocabulary."""
    values = vars(model.sampling()) | dict(settings.sampling)
    off = {name: None for name in OFF_IF_NONE if not values[name]}
    sampling = Sampling(**values | off)
    if sampling.guidance != 1 and not model.guided:
        raise SpecbenchError(f"--cfg {sampling.guidance:g}: {model.name} has no unconditional prompt", "omit --cfg")
    if sampling.top_k > model.v_image:
        what = f"--top-k {sampling.top_k}: {model.name} has only {model.v_image} image tokens"
        raise SpecbenchError(what, "use --top-k 0, which disables the filter")
    return sampling
