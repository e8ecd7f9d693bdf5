"""Import image tokens of another program as a run; values that are unknown are null. The tokens come from a file or
from a serving engine at an address. A file has the columns `prompt` and `tokens`. Optional columns: `prompt_id`,
`seed`, `logp` (log p of each token), `seconds` (duration of the call that generated the image), `batch` (images per
call), `prompt_token_ids` (ids of the prompt that the program has read)."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from specbench.decoding.loop import drawn
from specbench.errors import SpecbenchError
from specbench.models.catalog import model_code
from specbench.models.facts import ModelFacts
from specbench.models.interface import ImageModel, TokenLayout
from specbench.prompts import Prompt, PromptSet, Request, build_prompt_set, load_prompts, requests_for, select, text_id
from specbench.runs import compiler
from specbench.runs.engine import EngineModel, find_engine, reads_prompt_ids, refuse_other_prompt
from specbench.runs.plan import plan_model, plan_sampling
from specbench.runs.preparation import load_for_run
from specbench.runs.settings import MAX_SEED, RunSettings, merge, names_with, run_settings
from specbench.runs.token_files import MAX_BYTES, read_columns, whole_ids
from specbench.specs.options import Use, plain
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Compute, RunSpec
from specbench.stats.tokens import copies_among
from specbench.store.run_folders import run_folder
from specbench.store.run_store import RunStore
from specbench.store.schema import Key, base_row, image_name
from specbench.system import console
from specbench.system.environment import now
from specbench.system.files import blaming, read_regular
from specbench.system.torch_state import PinnedTorch

_Item = TypeVar("_Item")
ID_KINDS = ("codes", "model")
_TOGETHER = 8


@dataclass(frozen=True)
class _Image:
    """An imported image; `seconds` and `batch` are None if unknown."""

    request: Request
    tokens: np.ndarray
    logp: np.ndarray
    seconds: float | None  # duration of the call that generated the image
    batch: int | None  # number of images of this call
    seed: int = 0

    @property
    def latency_ms(self) -> float | None:
        return 1e3 * self.seconds if self.seconds and self.batch == 1 else None


def import_run(
    source: str, program: str | None, flags: Mapping[str, object], out: Path, ids: str | None, served: str | None
) -> Path:
    """Make a run from tokens in a file, or from tokens that an engine at an address generates; see
    `specbench.import_tokens`."""
    by_address = source.startswith(("http://", "https://"))
    accepted = run_settings(use=Use.ENGINES if by_address else Use.TOKENS)
    if others := sorted({*names_with(Use.ENGINES)} & flags.keys() - {setting.name for setting in accepted}):
        raise SpecbenchError(f"--{others[0]} requires the address of an engine", f"omit it; {source} is a file")
    settings = merge(accepted, flags, env={})
    if by_address:
        if ids:
            raise SpecbenchError(f"--ids {ids}: an engine always returns ids of the model's vocabulary", "omit --ids")
        return run_of_engine(source, program, settings, out, served)
    if not program or served:
        raise SpecbenchError(
            "tokens of a file need the name of their program", "add --program 'NAME VERSION', and omit --served"
        )
    return run_of_tokens(Path(source), program, settings, out, ids)


@PinnedTorch(False)
def run_of_tokens(path: Path, program: str, settings: RunSettings, out: Path, ids: str | None = None) -> Path:
    """Make a run of the tokens of a file, and return its folder; images that are already stored are skipped.
    `program`: label of the run; `settings`: settings with `Use.TOKENS`; `ids`: one of `ID_KINDS`; None: the kind that
    fits."""
    model, columns = plan_model(settings), read_columns(path)
    prompts, requests = _requests(path, columns, settings)
    for row, request in enumerate(requests):
        try:
            model.check_prompts([Prompt(request.prompt_id, request.text)])
        except SpecbenchError as error:
            raise SpecbenchError(f"{path}: image {row + 1}: {error.what}", error.try_this) from None
    loaded = _loaded(model, settings)
    if (read := columns.get("prompt_token_ids", [])) and not reads_prompt_ids(loaded):
        console.warn(f"{path.name}: prompt_token_ids are not compared with the prompts of '{model.name}'")
    for row, prompt_ids in enumerate(read):
        refuse_other_prompt(loaded, requests[row].text, prompt_ids, f"{path}: image {row + 1}")
    streams = [whole_ids(path, row, image) for row, image in enumerate(columns["tokens"])]
    tokens = read_stream(streams, loaded, path, ids)
    _tell_copies(tokens)
    digest = hashlib.sha256(read_regular(path, MAX_BYTES)).hexdigest()
    images = []
    for row, image in enumerate(tokens):
        with blaming(path, f"image {row + 1}: invalid {{}}"):
            images.append(_image(columns, row, requests[row], image, loaded.layout))
    images, stated = _alone(images), [image.batch for image in images]
    usual = sorted(image.batch or 1 for image in images)[len(images) // 2]
    spec = _claimed(model, loaded, settings, program, prompts, digest, usual)
    store = RunStore(run_folder(out, spec))
    with store.lock(spec):
        missing = _begin(store, spec, model, {image.request.key: image for image in images})
        _say_times(images, stated)
        for start in range(0, len(missing), _TOGETHER):
            _store(missing[start : start + _TOGETHER], loaded, spec, store)
            console.say(f"{store.folder.name}: {min(start + _TOGETHER, len(missing))} of {len(missing)} images")
    return store.folder


@PinnedTorch(False)
def run_of_engine(
    address: str, program: str | None, settings: RunSettings, out: Path, served: str | None = None
) -> Path:
    """Generate the images of a prompt set with a serving engine, `batch` at a time, and return the run's folder. Images
    are stored as they arrive; stored images are not generated again.

    Args:
        address: for example http://127.0.0.1:8000; see `specbench.runs.engine`.
        program: label of the run; if None, the name and version that the engine returns.
        settings: settings with `Use.ENGINES`.
        served: the engine's name for the model, if it differs from the checkpoint's name.
    """
    model, batch = plan_model(settings), settings.batch
    if batch == "auto":
        raise SpecbenchError("--batch auto: the engine's memory is unknown", "give a number")
    prompts = load_prompts(str(settings.prompts))
    chosen = select(prompts, settings.limit)
    model.check_prompts(chosen)
    source = getattr(model, "source", None)
    names = [settings.weights or (source.repo if source else model.name), model.name.partition("+")[0]]
    engine = find_engine(address, names, served)
    try:
        loaded = _loaded(model, settings)
    except SpecbenchError as error:
        hint = "the engine's own checkpoint: --weights DIR" if not settings.weights else error.try_this
        raise SpecbenchError(error.what, hint, error.exit_code) from None
    drawer = EngineModel(engine, loaded, plan_sampling(model, settings))
    engine = replace(engine, fingerprint=drawer.probe(chosen[0].text) or engine.fingerprint)
    told = {name: value for name, value in asdict(engine).items() if value}
    what = {name: value for name, value in told.items() if name != "address"}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    label = (program or engine.label) + (f" batch={batch}" if batch > 1 else "")
    spec = _claimed(model, loaded, settings, label, prompts, digest, batch)
    console.say(f"{address}: {', '.join(what.values())}")
    store, said = RunStore(run_folder(out, spec)), time.monotonic()
    with store.lock(spec):
        wanted = {request.key: request for request in requests_for(chosen)}
        missing = _begin(store, spec, model, wanted, engine=told)
        for start in range(0, len(missing), batch):
            requests = missing[start : start + batch]
            answer = drawer.draw([request.text for request in requests])
            streams = read_stream([np.array(ids) for ids in answer.tokens], loaded, address, [*_tables(loaded)][-1])
            parts = zip(requests, streams, np.array(answer.logp, np.float32), strict=True)
            images = [_Image(*part, drawer.seconds, len(requests)) for part in parts]
            _store(images, loaded, spec, store)
            pace = len(requests) * loaded.layout.length / drawer.seconds
            text = f"{start + len(requests)} of {len(missing)} images, {console.duration(drawer.seconds)}"
            last = start + batch >= len(missing)
            if console.progress_shown() and (last or time.monotonic() - said > console.LINE_EVERY_S):
                said = time.monotonic()
                console.say(f"{store.folder.name}: {text}, {pace:,.0f} tokens a second")
    return store.folder


def _loaded(model: ModelFacts, settings: RunSettings) -> ImageModel:
    dtype, _, _ = compiler.settle_precision(settings.dtype, model.dtype, "off", settings.device)
    return load_for_run(model, Compute(1, dtype, settings.device, threads=0))


def _claimed(
    model: ModelFacts,
    loaded: ImageModel,
    settings: RunSettings,
    program: str,
    prompts: PromptSet,
    tokens_sha256: str,
    batch: int,
) -> RunSpec:
    """Return the spec of a run of another program's tokens, with the sampling that the user claims for the program."""
    if not program.strip() or not program.isprintable():
        raise SpecbenchError(f"--program {program!r}: not a name", "give name and version of the program")
    dtype, _, _ = compiler.settle_precision(settings.dtype, model.dtype, "off", settings.device)
    return RunSpec(
        model=model.name,
        weights_sha256=loaded.weights_sha256,
        decoder=replace(resolve("ar"), name=program.strip()[:80], lossless=False),
        sampling=plan_sampling(model, settings),
        prompts=prompts.name,
        prompts_sha256=prompts.sha256,
        seed=0,
        batch=batch,
        dtype=dtype,
        device="unknown",
        threads=0,
        model_code=getattr(model_code(model), "digest", None),
        tokens_sha256=tokens_sha256,
    )


def _begin(
    store: RunStore, spec: RunSpec, model: ModelFacts, images: Mapping[Key, _Item], **facts: object
) -> list[_Item]:
    """Open a locked run, and return the images that are not stored yet. `facts`: further fields of `run.json`."""
    claim = ", ".join(f"{name} {plain(value)}" for name, value in spec.content()["sampling"].items())
    console.say(f"claimed: {claim}, {spec.dtype} (--cfg, --temperature, --top-k, --top-p, --dtype)")
    where = {
        "versions": {},
        "git": {},
        "hardware": {"cpu": f"unknown machine of {spec.decoder.name.partition(' batch=')[0]}"},
    }
    known = {"origins": {}, **model.file_facts(spec.weights_sha256), **facts}
    known |= {"code": {"model": code.to_json()}} if (code := model_code(model)) else {}
    store.begin(spec, where | {"started_at": now(), "load": None, "wanted": len(images)}, known)
    done = store.completed() & images.keys()
    if done:
        there = "all" if len(done) == len(images) else f"{len(done)} of"
        console.say(f"{store.folder.name}: {there} {console.counted(len(images), 'image')} already stored")
    return [image for key, image in images.items() if key not in done]


def _tell_copies(images: Sequence[np.ndarray]) -> None:
    """Warn of images that are exact copies, for example because a second call has appended to the file."""
    if copies := copies_among(images):
        shown = [f"image {number + 1} of {first + 1}" for number, first in list(copies.items())[:3]]
        more = ", ..." * (len(copies) > len(shown))
        are = "images are exact copies of others" if len(copies) > 1 else "image is an exact copy of another"
        console.warn(f"{len(copies)} {are} ({', '.join(shown)}{more})")


def _tables(model: ImageModel) -> dict[str, np.ndarray]:
    """Return {kind of ids: id of each stream token}, for one or both of `ID_KINDS`."""
    codes = np.arange(model.layout.vocab)
    ids = getattr(model, "table_ids", lambda tokens: tokens)(torch.from_numpy(codes).to(model.device)).cpu().numpy()
    return {"codes": codes} if np.array_equal(ids, codes) else {"codes": codes, "model": ids}


def read_stream(images: Sequence[np.ndarray], model: ImageModel, path: Path | str, ids: str | None) -> list[np.ndarray]:
    """Return the stream tokens [N] of images, from ids of either kind, which may lack the forced tokens."""
    layout, tables = model.layout, _tables(model)
    if ids not in (None, *tables):
        raise SpecbenchError(f"--ids {ids}: this model has only codebook indices", "omit --ids")
    tables = tables if ids is None else {ids: tables[ids]}
    streams: dict[str, list[np.ndarray]] = {}
    problems: list[tuple[float, str]] = []
    for kind, ids_in_order in tables.items():
        read = [_stream(item, layout, ids_in_order, kind) for item in images]
        wrong = [(item[0], f"image {row + 1}: {item[1]}") for row, item in enumerate(read) if isinstance(item, tuple)]
        problems += wrong[:1]
        if not wrong:
            streams[kind] = read  # type: ignore[assignment]
    if len(streams) > 1:
        raise SpecbenchError(
            f"{path}: all ids fit both the codebook and the model's vocabulary", "choose --ids codes or --ids model"
        )
    if streams:
        return next(iter(streams.values()))
    raise SpecbenchError(f"{path}: {max(problems)[1]}")  # report the kind that fits most ids


def _stream(image: np.ndarray, layout: TokenLayout, table: np.ndarray, kind: str) -> np.ndarray | tuple[float, str]:
    """Return the stream tokens of an image, or (share of its ids that fit, problem)."""
    forced, free = np.array(layout.forced), layout.free_slots()
    if len(image) not in (layout.length, len(free)):
        whole = f", or {layout.length:,} with row ends" if layout.length != len(free) else ""
        return 0.0, f"{len(image):,} tokens, but an image of this model has {len(free):,}{whole}"
    slots = np.arange(layout.length) if len(image) == layout.length else np.array(free)
    order = np.argsort(table, kind="stable")
    place = np.searchsorted(table[order], image).clip(max=len(table) - 1)
    code = np.where(table[order][place] == image, order[place], -1)
    low, high = np.array(layout.bounds[:-1]).T[:, slots]
    fits = np.where(forced[slots] < 0, (code >= low) & (code < high), code == forced[slots])
    if not fits.all():
        index = int(fits.argmin())
        slot, token = slots[index], f"slot {slots[index]:,} holds {image[index]}"
        if forced[slot] >= 0:
            why = f"but the grammar has {table[forced[slot]]} (the end of a row)"
        elif kind == "model":
            why = "a token of text or grammar, not of the image"
        else:
            why = f"not an image id ({low[index]:,} to {high[index] - 1:,})"
        return float(fits.mean()), f"{token}, {why}"
    tokens = np.where(forced >= 0, forced, 0)
    tokens[slots] = code
    return tokens.astype(np.int32)


def _requests(path: Path, columns: Mapping[str, list[Any]], settings: RunSettings) -> tuple[PromptSet, list[Request]]:
    """Find the images' prompts in the requested set, or make a set of the prompts. Samples are numbered per prompt."""
    texts, named = columns["prompt"], columns.get("prompt_id") or [None] * len(columns["prompt"])
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise SpecbenchError(f"{path}: image {row + 1}: its prompt is not text")
    if settings.is_given("prompts"):
        prompts = load_prompts(str(settings.prompts))
    else:
        first: dict[str, int] = {}
        for row, (text, name) in enumerate(zip(texts, named, strict=True)):
            before = first.setdefault(text_id(text) if name is None else str(name), row)
            if texts[before].strip() != text.strip():
                places = f"image {before + 1} and {row + 1}"
                raise SpecbenchError(f"{path}: prompt_id '{name}' has two different prompts, in {places}")
        prompts = build_prompt_set(path.stem, [Prompt(name, texts[row]) for name, row in first.items()])
    by_id = {prompt.id: prompt for prompt in prompts.prompts}
    by_text = {prompt.text.strip(): prompt for prompt in prompts.prompts}
    requests, samples = [], Counter[str]()
    for row, (text, name) in enumerate(zip(texts, named, strict=True)):
        prompt = by_text.get(text.strip()) if name is None else by_id.get(str(name))
        if prompt is None or prompt.text.strip() != text.strip():
            of = f"prompt {name} of '{prompts.name}', which is '{prompt.text:.60}'" if prompt else None
            of = of or f"a prompt of '{prompts.name}'"
            raise SpecbenchError(f"{path}: image {row + 1}: '{text:.60}' is not {of}")
        requests.append(Request.of(prompt, samples[prompt.id]))
        samples[prompt.id] += 1
    return prompts, requests


def _image(
    columns: Mapping[str, list[Any]], row: int, request: Request, tokens: np.ndarray, layout: TokenLayout
) -> _Image:
    names = ("seed", "logp", "seconds", "batch")
    seed, logp, seconds, batch = (columns[name][row] if name in columns else None for name in names)
    whole: np.ndarray = np.full(len(tokens), np.nan, np.float32)
    if logp is not None:
        if not isinstance(logp, list) or any(type(x) not in (int, float, type(None)) for x in logp):
            raise ValueError("logp, which must be a list of numbers")
        slots = np.arange(len(tokens)) if len(logp) == len(tokens) else np.array(layout.free_slots())
        if len(logp) != len(slots):
            raise ValueError(f"logp: {len(logp)} values of {len(slots)} tokens")
        whole[slots] = logp
    if (whole > 0).any():
        raise ValueError("logp: a value above 0")
    if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < 1e9):
        raise ValueError(f"seconds {seconds}, which must be a number above 0")
    if batch is not None and (type(batch) not in (int, float) or batch % 1 or not 1 <= batch < 1e9):
        raise ValueError(f"batch {batch}, which must be a whole number from 1")
    seed = 0 if seed is None else seed
    if type(seed) not in (int, float) or seed % 1 or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed {seed}, which must be a whole number from 0 to {MAX_SEED}")
    return _Image(request, tokens, whole, seconds and float(seconds), batch and int(batch), int(seed))


def _alone(images: Sequence[_Image]) -> list[_Image]:
    """Set `batch` of images. Without a stated value: 1, or None if other images have the same `seconds` and so probably
    shared a call. A stated value becomes None if the number of images with the same `seconds` contradicts it."""
    alike = Counter(image.seconds for image in images)

    def known(image: _Image) -> int | None:
        count = alike[image.seconds] if image.seconds else 0
        if image.batch is None:
            return None if count > 1 else 1
        return None if count % image.batch else image.batch

    return [replace(image, batch=known(image)) for image in images]


def _say_times(images: Sequence[_Image], stated: Sequence[int | None]) -> None:
    """Report the latency, and the number of images without a latency. `stated`: `batch` of each image in the file."""
    if times := [image.latency_ms for image in images if image.latency_ms]:
        console.say(f"'seconds': {console.duration(float(np.median(times)) / 1e3)} per image (median)")
    if known := [image.seconds / image.batch for image in images if image.seconds and image.batch and image.batch > 1]:
        pace = console.duration(float(np.median(known)))
        console.say(f"'seconds': {pace} per image (median), no latency: {len(known)} images shared a call")
    unknown = [batch is None for image, batch in zip(images, stated, strict=True) if image.batch is None]
    if count := unknown.count(True):
        what = f"'seconds': {console.counted(count, 'image')} of calls with an unknown number of images: no latency"
        console.say(f"{what} (add a column 'batch': images per call)")
    if count := unknown.count(False):
        what = "does not divide the number of images with equal 'seconds': no latency (import whole calls)"
        console.say(f"'batch' of {console.counted(count, 'image')} {what}")


def _store(images: Sequence[_Image], model: ImageModel, spec: RunSpec, store: RunStore) -> None:
    """Render images and store them together; values that were not measured are null."""
    tokens = torch.from_numpy(np.stack([image.tokens for image in images])).long().to(model.device)
    with PinnedTorch():
        pictures = drawn(model, tokens, [image.request for image in images], spec.decoder, spec.seed)
    rows, files = [], dict[str, np.ndarray]()
    for image, (pixels, _) in zip(images, pictures, strict=True):
        place = None
        if pixels is not None:
            place = f"images/{image_name(*image.request.key)}"
            files[place] = pixels
        unknown: np.ndarray = np.full(len(image.tokens), np.nan, np.float32)
        whole_ms = image.seconds and image.batch and 1e3 * image.seconds  # not divided into spans
        rows.append(
            base_row(image.request, image.seed, now())
            | {"status": "ok", "image": place, "batch": image.batch or 1, "target_ms": whole_ms}
            | {"latency_ms": image.latency_ms if spec.batch == 1 else None}
            | {"tokens": image.tokens, "forced": np.array(model.layout.forced) >= 0}
            | {"logp": image.logp, "entropy": unknown, "top1": unknown}
        )
    store.append(rows, files)
