"""Prepare runs: load the model or start workers, choose the window of `--window auto`, collect facts for run.json. Also
decode images without a run."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from specbench.decoding.generation import Generation
from specbench.decoding.loop import decode
from specbench.errors import FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.models.catalog import load_model, model_code
from specbench.models.facts import BYTES, ModelFacts
from specbench.models.families.generation_config import GENERATION_CONFIG, logits_processors
from specbench.models.forward_probe import refusing
from specbench.models.interface import CompilableModel, ImageModel, TokenLayout
from specbench.models.loaded_model import LoadedModel, PromptIds, decoding
from specbench.models.transformer.model import TransformerModel
from specbench.prompts import Prompt, Request, text_id
from specbench.runs import compiler
from specbench.runs.decoder_args import PlannedDecoder, plan_decoders, with_window
from specbench.runs.executors.local import Executor, LocalExecutor, image_failure
from specbench.runs.plan import Plan, earlier_window, plan_model, plan_sampling
from specbench.runs.run_progress import Reporter
from specbench.runs.settings import RunSettings, decoder_settings, merge, run_settings
from specbench.specs.presets import DecoderSpec, add_plugin_decoders, decoder_code, decoder_name, resolve
from specbench.specs.run_spec import SAMPLING, Compute, RunSpec, Sampling
from specbench.store.run_folders import find_runs_like, read_infos, run_folder, same_but_for_threads
from specbench.store.run_info import describe_point
from specbench.store.schema import AR_SPANS
from specbench.system import console, plugins
from specbench.system.device_failures import memory_for, release_memory
from specbench.system.device_peaks import find_peak, glimpse_peak
from specbench.system.digests import own_code
from specbench.system.foreign_code import Code, changed_modules, require_code
from specbench.system.limits import available_threads
from specbench.system.monitor import MachineMonitor, others_at_work
from specbench.system.torch_state import PinnedTorch


@contextmanager
def open_executor(plan: Plan, reporter: Reporter) -> Iterator[tuple[Executor, ImageModel | None]]:
    """Load the plan's model here, or start workers; yield the executor, and the model if this process loaded it."""
    model, device, dtype = plan.model, plan.compute.device, plan.compute.dtype
    load = functools.partial(_load_in_worker, plan.workers.references, model_code(model), model, plan.compute)
    where = f"{model.name} ({dtype}, {device})"
    if not plan.workers.elsewhere:
        on_gpu = device.startswith("cuda") and torch.cuda.is_available()
        reporter.note(f"loading {where}{f' on {torch.cuda.get_device_name(device)}' if on_gpu else ''}")
        loaded = load()
        yield LocalExecutor(loaded, load if plan.compute.compiled else None), loaded
        return
    from specbench.runs.executors.ray_cluster import import_ray  # Ray is an extra
    from specbench.runs.executors.ray_workers import RayWorkers, WorkerPool

    import_ray()
    model.require_weights()
    with ExitStack() as running:

        def start() -> RayWorkers:
            crew = RayWorkers(load, plan.workers.count, plan.workers.address, device == "cuda")
            running.enter_context(closing(crew))
            reporter.note(f"{crew.size} worker{'s' * (crew.size > 1)} load{'s' * (crew.size == 1)} {where}")
            return crew

        yield WorkerPool(start), None


def load_for_run(model: ModelFacts, compute: Compute) -> ImageModel:
    """Load a model, set the run's number of threads, and compile the model if the run is compiled."""
    release_memory()
    torch.set_num_threads(compute.threads or available_threads())
    with memory_for(f"model '{model.name}' ({compute.dtype})", compute.device, "a smaller --dtype or model"):
        loaded = load_model(model, compute.device, compute.dtype)
    if compute.compiled:
        if not isinstance(loaded, CompilableModel):
            raise SpecbenchError(f"--compile: model '{model.name}' cannot be compiled", "use --compile off")
        loaded.compile()
        if isinstance(loaded, TransformerModel) and not model_code(model):
            versions = [metadata.version(name) for name in ("torch", "transformers")]
            loaded.made_of = " ".join([model.name, loaded.weights_sha256, str(loaded.dtype), own_code(), *versions])
    return loaded


def _load_in_worker(references: Sequence[str], code: Code | None, model: ModelFacts, compute: Compute) -> ImageModel:
    """In a worker, import the plan's user-defined decoders, check the model's code, and call `load_for_run`."""
    add_plugin_decoders()
    plugins.search_current_folder()
    for reference in references:
        decoder_name(reference)
    require_code(f"model '{model.name}'", code.digest if code else None, model_code(model))
    return load_for_run(model, compute)


def work_of(
    plans: Sequence[Plan], model: ImageModel | None, reporter: Reporter, tell: bool = True
) -> tuple[dict[RunSpec, list[Request]], dict[str, dict[str, Any]]]:
    """Resolve every decoder of the plans to its run spec. Return {spec: images} and {run id: fields of run.json}.
    `model`: the loaded model, None if workers load it. `tell`: whether to report how new runs differ from stored
    runs."""
    weights_sha256 = model.weights_sha256 if model else plans[0].model.weights_sha256()
    by_run: dict[str, tuple[RunSpec, list[Request]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    # Loading may have downloaded files that contain sizes and a revision unknown to the plan.
    for plan in (replace(plan, model=plan.model.as_stored()) for plan in plans):
        memory, processors = plan.memory and dict(plan.memory), logits_processors(plan.model)
        for name, value in processors.items():
            note = f"{name.replace('_', ' ')} {value:g} from {GENERATION_CONFIG} is part of the target distribution"
            reporter.note(f"{plan.model.name}: {note}")
        for planned in plan.decoders:
            decoder, curve = planned.spec, None
            plan.head(decoder, download=True)
            if planned.auto_window:
                decoder, curve = _choose_window(model, weights_sha256, plan, planned, reporter)
            spec = plan.spec(decoder, weights_sha256)
            requests, (_, already) = plan.requests_of(planned), by_run.get(spec.run_id, (spec, ()))
            if len(requests) <= len(already):
                continue
            by_run[spec.run_id] = spec, requests
            fields: dict[str, Any] = {"origins": plan.origins(planned), "window_curve": curve, "memory": memory}
            fields |= {"processors": processors, "drawn": plan.drawn_of(planned), "asked": plan.asked_of(planned)}
            fields |= plan.model.file_facts(weights_sha256)
            codes = {"decoder": decoder_code(decoder), "model": model_code(plan.model)}
            fields |= {"code": {kind: code.to_json() for kind, code in codes.items() if code}}
            facts[spec.run_id] = {name: value for name, value in fields.items() if value}
            if not plan.workers.elsewhere:  # this machine decodes, so use its peaks
                facts[spec.run_id]["roofline"] = roofline_facts(plan.model, plan.sampling.guidance, plan.compute)
    specs = [spec for spec, _ in by_run.values()]
    for text in (*_twins(plans[0].out, specs), *_older_code(plans[0].out, specs, facts)) if tell else ():
        reporter.note(text)
    return dict(by_run.values()), facts


def _twins(out: Path, specs: Sequence[RunSpec]) -> list[str]:
    """Return notes on stored runs that differ from new runs only in the thread count, as after a change of the node."""
    new = {spec.run_id: spec.identity() for spec in specs if not run_folder(out, spec).exists()}
    try:
        stored = {info.run_id: info.spec.identity() for info in read_infos(out).values()} if new else {}
    except SpecbenchError:  # another run is damaged
        return []
    return [text for text in same_but_for_threads(stored | new) if stored and any(name in text for name in new)]


def _older_code(out: Path, specs: Sequence[RunSpec], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return notes on stored runs that differ from new runs only in plug-in code, with the edited files."""
    lines = []
    for spec in specs:
        if not (spec.decoder_code or spec.model_code) or run_folder(out, spec).exists():
            continue
        like = {name: value for name, value in vars(spec).items() if name not in ("decoder_code", "model_code")}
        if older := list(find_runs_like(out, **like).values()):
            code, last = facts[spec.run_id]["code"], older[-1].code or {}
            names = [name for kind in code for name in changed_modules(last.get(kind) or {}, code[kind])]
            places = f" ({', '.join(names)})" if older[-1].code else ""
            lines.append(
                f"the code of {spec.decoder.name} has changed{places}, so this is a new run; the earlier images stay "
                f"in {' and '.join(info.run_id for info in older)}"
            )
    return lines


def roofline_facts(model: ModelFacts, guidance: float, compute: Compute) -> dict[str, object] | None:
    """Return the roofline inputs of a model on a device, stored as "floor" in `run.json`. None if the model's size is
    unknown, or the device's peaks are unknown and other processes prevent their measurement."""
    if (size := model.size) is None:
        return None
    machine = compute.device, compute.dtype, compute.threads
    peak, idle = find_peak(*machine), True
    if peak is None:
        peak, idle = glimpse_peak(*machine)
    if peak is None or not idle:
        return None
    return {
        "size": {name: count for name, count in asdict(size).items() if count},
        "itemsize": BYTES[compute.dtype],
        "rows_per_image": 1 if guidance == 1 else 2,
        "device": peak.name,
        "bytes_per_s": peak.bandwidth(size.read(1, 1, 0, BYTES[compute.dtype])),
        "flops": peak.flops,
        "source": peak.source,
    }


def _choose_window(
    model: ImageModel | None, weights_sha256: str, plan: Plan, planned: PlannedDecoder, reporter: Reporter
) -> tuple[DecoderSpec, list[dict[str, Any]] | None]:
    """Return the decoder with the fastest window, and the measured curve (None if a stored run gave the window)."""
    decoder = planned.spec
    if earlier := earlier_window(plan, decoder, weights_sha256):
        return with_window(decoder, earlier), None
    if model is None:
        raise SpecbenchError("--window auto cannot be measured with --workers or --ray", "omit these, or give a number")
    window, curve = _tuned_window(model, plan, decoder, planned.windows, reporter)
    return with_window(decoder, window), curve


def _tuned_window(
    model: ImageModel, plan: Plan, decoder: DecoderSpec, windows: Sequence[int], reporter: Reporter
) -> tuple[int, list[dict[str, Any]]]:
    """Call `tune_window` with the prompts of a plan and report the result."""
    monitor = MachineMonitor(plan.settings.device)
    what, most = f"windows tested with {decoder.name}", len(windows) + 1
    try:
        reporter.part(what, 0, most)
        arguments = model, plan.chosen, decoder, plan.sampling, plan.settings.seed, windows
        window, curve = tune_window(*arguments, lambda tried: reporter.part(what, tried, most))
    finally:
        reporter.finish()
    company = others_at_work(monitor.read())
    for point in curve:
        reporter.note(f"{decoder.name}, window {point['window']}: {describe_point(point)}")
    fastest = max(curve, key=lambda point: point["speed_up"])
    ahead = "" if fastest["window"] == window else "; AR is faster than every tested window"
    reporter.note(f"{decoder.name}: window {window} is the fastest here, measured with pilot images{ahead}")
    if company:
        reporter.note(f"{decoder.name}: meanwhile {company}; on an idle machine another window may be the fastest")
    return window, curve


@PinnedTorch(False)
def generate_images(captions: Sequence[str], settings: RunSettings) -> list[Generation]:
    """Decode `captions` as one batch, with the settings of a run."""
    if not captions:
        raise SpecbenchError("generate: no prompt given", "pass a caption, or a list of captions")
    info = plan_model(settings)
    decoder = _one_decoder(settings)
    sampling = plan_sampling(info, settings)
    info.check_prompts(Prompt(text_id(text), text) for text in captions)
    device, mode = settings.device, settings.compile
    dtype, compiled, unmet = compiler.settle_precision(settings.dtype, info.dtype, mode, device)
    if unmet and mode == "on" and not compiled:
        raise SpecbenchError(unmet[0], "omit compile", MISSING_PREREQUISITE)
    for note in unmet:
        console.warn(note)

    def decoded(compiled: bool) -> list[Generation]:
        compute = Compute(len(captions), dtype, device, settings.threads, compiled=compiled)
        model = load_for_run(info, compute)
        return _decoded(model, captions, decoder, sampling, settings.seed, settings.trace)

    return compiler.compiled_or_eagerly(mode, compiled, decoded, console.warn)


def decode_loaded(
    model: nn.Module | ImageModel,
    prompts: str | Sequence[str],
    decoder: str = "sjd",
    layout: TokenLayout | tuple[int, int] | None = None,
    image_ids: Sequence[int] = (),
    prompt_ids: PromptIds | None = None,
    forced_ids: Sequence[int] = (),
    codebook: Tensor | Sequence[Sequence[float]] | None = None,
    render: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
    trace: bool = False,
    probe: bool = True,
    **settings: object,
) -> Generation | list[Generation]:
    """Decode images with a loaded model object; nothing is stored.

    Args:
        model: a causal language model of transformers on any device, which is not changed; or a
            `specbench.models.interface.ImageModel`, without the arguments from `layout` to `render`.
        prompts: one text, or several to decode as one batch. A repeated text gives further samples of this prompt.
        decoder: a name of `specbench list decoders`, with inline options if wanted.
        layout: height and width of the grid of image tokens, or a `specbench.models.interface.TokenLayout`.
        image_ids: vocabulary id of each image token.
        prompt_ids: function that maps a text to two lists of vocabulary ids: of the prompt and of the unconditional
            prompt (for guidance), each up to the first image token.
        forced_ids: vocabulary ids of the tokens that the layout forces, such as row ends.
        codebook: [image tokens, d] embedding of each image token, for the distances of GSD and LANTERN.
        render: function that renders image tokens [B, height * width] as uint8 [B, 3, H, W].
        probe: whether to compare decoding steps of a network with one forward of the sequence, once per
            network before the first image (slow). `.facts["own_forward_gap"]`: largest difference of log p, NaN without
            probe; `.facts["own_forward_slots"]`: number of compared tokens, 0 without probe.
        settings: `cfg`, `temperature`, `top_k`, `top_p`, ..., by default plain sampling, and options of the
            decoder, for example `G=50`.

    Returns:
        A `Generation` for one text, a list for several. Stream tokens are in `.tokens`, target forwards in `.nfe`.

    Raises:
        SpecbenchError: an unknown or invalid setting, ids that do not fit the layout, a network whose decoding steps
            differ from a forward of the sequence, or a failed image.
    """
    if isinstance(model, nn.Module):
        if layout is None or prompt_ids is None:
            raise SpecbenchError("decode: a network needs layout, image_ids and prompt_ids", "see docs/python.md")
        model = LoadedModel(model, layout, image_ids, prompt_ids, forced_ids, codebook, render)
    elif not hasattr(model, "layout"):
        what = f"decode: {model!r:.60} is neither a network nor an ImageModel"
        raise SpecbenchError(what, "load the model first; specbench.generate takes names")
    flags = {name.replace("_", "-"): value for name, value in settings.items()} | {"decoder": decoder}
    accepted = (*run_settings({"decoder"}), *SAMPLING.values(), *decoder_settings())
    read = replace(merge(accepted, flags, env={}), model="")
    plain: Any = SimpleNamespace(
        name=model.name, guided=True, v_image=model.layout.v_image, sampling=lambda: Sampling(guidance=1.0)
    )
    texts: list[Any] = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else [prompts]
    planned = _one_decoder(read)
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise SpecbenchError(f"decode: prompt {wrong[0]!r:.60} is not a text", "pass a text, or a list of texts")
    if not texts:
        raise SpecbenchError("decode: no prompt given", "pass a text, or a list of texts")
    sampling, own, loaded = plan_sampling(plain, read), isinstance(model, LoadedModel), cast(Any, model)
    with ExitStack() as set_up:
        compared = set_up.enter_context(decoding(loaded, texts, sampling.guidance != 1.0, probe)) if own else None
        set_up.enter_context(refusing(model.name) if own else nullcontext())
        images = _decoded(loaded, texts, planned, sampling, seed, trace)
    for image in images if own else ():
        gap, slots = (compared.gap, compared.slots) if compared else (math.nan, 0)
        image.facts |= {"own_forward_gap": gap, "own_forward_slots": slots}
    return images[0] if isinstance(prompts, str) else images


def _one_decoder(settings: RunSettings) -> DecoderSpec:
    planned, *others = plan_decoders(settings)
    if others or planned.auto_window:
        what = "window='auto' needs a run" if planned.auto_window else "several decoders, but only one can be used here"
        raise SpecbenchError(what, "specbench.run takes several decoders and window='auto'")
    return planned.spec


def _decoded(
    model: ImageModel, texts: Sequence[str], decoder: DecoderSpec, sampling: Sampling, seed: int, trace: bool
) -> list[Generation]:
    if decoder.init == "preview" and not model.layout.before:
        console.warn(f"{model.name} has no preview: the fresh drafts of {decoder.name} are uniformly random")
    requests, counts = [], Counter[str]()
    for text in texts:
        requests.append(Request(text, text_id(text), counts[text]))
        counts[text] += 1
    try:
        images: list[Any] = decode(model, requests, decoder, sampling, seed, trace=trace)
    except (Exception, SystemExit) as error:
        if isinstance(error, SpecbenchError) or not plugins.foreign_place(error):
            raise
        raise image_failure(error) from error
    for image in images:
        if isinstance(image, SpecbenchError):
            raise image
    return images


_PILOTS = 2  # Number of images for choosing a window


def tune_window(
    model: ImageModel,
    prompts: Sequence[Prompt],
    decoder: DecoderSpec,
    sampling: Sampling,
    seed: int,
    windows: Sequence[int],
    tell: Callable[[int], None] = lambda tried: None,
) -> tuple[int, list[dict[str, Any]]]:
    """Choose the window with the lowest latency on `_PILOTS` images; also return the measured curve, see `_point`.
    Windows are tried in growing order until two in a row are slower than the best; `tell` gets the number of windows
    tried. For a compiled model only the forwards are compiled and timed (overhead is taken as 1), because compiling all
    functions for every window would take minutes."""
    if decoder.options.get("window") is None:
        raise SpecbenchError(f"decoder '{decoder.name}' has no window to choose", "omit --window")
    requests = [Request(prompts[number % len(prompts)].text, "(pilot)", number) for number in range(_PILOTS)]
    compiled = model if isinstance(model, CompilableModel) and model.compiles else None
    if not compiled:
        decode(model, requests[:1], with_window(decoder, 2), sampling, seed)
    with compiled.forwards_alone() if compiled else nullcontext():
        alone = compiled is not None
        ar = _measure(model, requests, resolve("ar"), sampling, seed, alone)
        curve = [_point(1, ar, ar, alone)]
        for window in sorted(windows):
            tell(len(curve))
            images = _measure(model, requests, with_window(decoder, window), sampling, seed, alone)
            curve.append(_point(window, images, ar, alone))
            best = min(curve[1:], key=lambda point: point["latency_ms"])
            if all(tried["latency_ms"] > best["latency_ms"] for tried in curve[-2:]):
                break
    return int(best["window"]), curve


def _measure(
    model: ImageModel, requests: Sequence[Request], decoder: DecoderSpec, sampling: Sampling, seed: int, compiles: bool
) -> list[Generation]:
    """Compile, then decode the images one at a time, as in latency mode."""
    if compiles:
        decode(model, requests[:1], decoder, sampling, seed, render=False)
    images: list[Any] = [decode(model, [request], decoder, sampling, seed, render=False)[0] for request in requests]
    for image in images:
        if isinstance(image, SpecbenchError):
            raise SpecbenchError(
                f"--window auto: a pilot failed: {image.what}", "set a window, for example --window 16", FAILURE
            )
    return images


def _point(window: int, images: Sequence[Generation], ar: Sequence[Generation], alone: bool) -> dict[str, Any]:
    """Make a point of the curve, in which AR is the point at window 1. A step is a target forward. Acceptance: accepted
    over tested drafts. Window cost (time per forward) and overhead (latency over forward time) are relative to AR."""
    forward_ms, overhead, latency_ms = _costs(images, alone)
    ar_forward_ms, ar_overhead, ar_latency_ms = _costs(ar, alone)
    tested = sum(int(image.tested.sum()) for image in images)
    return {
        "window": window,
        "tokens_per_step": sum(image.committed for image in images) / sum(image.nfe for image in images),
        "acceptance": sum(int(image.accepted.sum()) for image in images) / tested if tested else None,
        "window_cost": forward_ms / ar_forward_ms,
        "overhead": overhead / ar_overhead,
        "latency_ms": latency_ms,
        "speed_up": ar_latency_ms / latency_ms,
    }


def _costs(images: Sequence[Generation], alone: bool) -> tuple[float, float, float]:
    """Return milliseconds per forward, latency over forward time, milliseconds per image. `alone`: forwards only."""
    target = sum(image.spans_ms["target"] for image in images)
    latency = target if alone else sum(image.spans_ms.get(span, 0.0) for image in images for span in AR_SPANS)
    return target / sum(image.nfe for image in images), latency / target, latency / len(images)
