"""Dry run: the settings, cost and blocking problems of runs. Nothing is decoded or written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from specbench.decoding.generation import SPANS
from specbench.errors import SpecbenchError
from specbench.models.facts import BYTES, ModelFacts
from specbench.models.forward_time import Forward, Reached, forward_ms
from specbench.prompts import downloadable, public_names
from specbench.runs.decoder_args import PlannedDecoder
from specbench.runs.memory_estimate import footprint
from specbench.runs.plan import SAMPLING_SETTINGS, Draft, Plan, Shared, draft_plan, head_files, plan_drawing
from specbench.runs.settings import Value
from specbench.specs.run_spec import RunSpec, Sampling
from specbench.store.run_folders import find_runs_like, run_folder
from specbench.store.run_store import RunStore
from specbench.system.console import duration
from specbench.system.device_peaks import find_peak, glimpse_peak

ON_DISK, LISTED = "on disk", "they are listed above"
ROW = (
    "run_id", "model", "decoder", "options", "lossless", *SAMPLING_SETTINGS, "prompts", "samples", "seed", "batch",
    "dtype", "device", "images", "done", "seconds", "megabytes", "memory_gib", "captions", "weights", "head",
    "obstacles",
)  # fmt: skip
"""Keys of `Outlook.row`."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Expected facts of one run; None if not known yet."""

    run_id: str | None = None
    model: str
    decoder: str
    options: Mapping[str, object] | None = None
    lossless: bool | None = None
    sampling: Sampling | None = None
    prompts: str | None
    samples: int | None = None
    seed: int | None = None
    batch: int | str | None = None
    dtype: str | None = None
    device: str | None = None
    images: int | None = None
    done: int | None = None  # images that are stored
    seconds: float | None = None  # for the others: from stored rows of the run, else of its model, decoder and device
    megabytes: float | None = None  # on disk at most
    memory_gib: float | None = None  # as estimated
    captions: str | None = None  # see `caption_note`
    # weights, head: "on disk" or what brings them
    weights: str | None = None
    head: str | None = None
    # what must be installed or changed before it can run; its own downloads do not count
    obstacles: tuple[SpecbenchError, ...]
    spec: RunSpec | None = None  # None if the run id is not known; the folder of the run is in `out`
    out: Path = Path()

    @property
    def row(self) -> dict[str, object]:
        """Its values by the keys of `ROW`, obstacles as texts."""
        values = vars(self) | {name: getattr(self.sampling, name, None) for name in SAMPLING_SETTINGS}
        return {name: values[name] for name in ROW} | {"obstacles": list(map(str, self.obstacles))}

    def of_seed(self, seed: int) -> Outlook | None:
        """The same run with another seed; None if one of the two is stored."""
        spec = self.spec and replace(self.spec, seed=seed)
        folder = spec and run_folder(self.out, spec)
        if self.done or (folder and folder.is_dir()):
            return None
        return replace(self, run_id=folder and folder.name, seed=seed, spec=spec)


def outlooks(values: Mapping[str, Value], shared: Shared | None = None) -> list[Outlook]:
    """The runs of merged settings, one for each decoder. `shared`: for callers with several settings."""
    shared = shared or Shared()
    draft = draft_plan(values, shared, ahead=True)
    model, plan, cut = draft.model, draft.plan, None
    digest = shared.once(("digest", model), model.weights_sha256) if model.ready else None
    if plan:
        texts = [prompt.text for prompt in plan.chosen]
        key = ("captions", model, plan.prompts.sha256, plan_drawing(values))
        cut = shared.once(key, lambda: caption_note(model, texts))
    return [_outlook(draft, planned, digest, cut, shared) for planned in draft.decoders]


def distinct_outlooks(settings: Iterable[Mapping[str, Value]], shared: Shared | None = None) -> list[Outlook]:
    """The distinct runs of several merged settings; what seeds have in common is found out once."""
    shared, by_key, runs = shared or Shared(), {}, []
    for values in settings:
        key = tuple(str(value.value) for name, value in values.items() if name != "seed")
        alike = [outlook.of_seed(values["seed"].value) for outlook in by_key.get(key, ())]
        if not alike or None in alike or values["batch"].value == "auto":  # which an earlier run may have settled
            alike = by_key[key] = outlooks(values, shared)
        runs += alike
    return list({json.dumps(outlook.row, default=str): outlook for outlook in reversed(runs)}.values())[::-1]


def obstacle(runs: Iterable[Outlook]) -> SpecbenchError | None:
    """The problem that blocks the runs, or the number of problems; None if there is none."""
    errors = list({str(error): error for outlook in runs for error in outlook.obstacles}.values())
    if len(errors) < 2:
        return errors[0] if errors else None
    return SpecbenchError(f"{len(errors)} obstacles", LISTED, max(error.exit_code for error in errors))


def _outlook(draft: Draft, planned: PlannedDecoder, digest: str | None, cut: str | None, shared: Shared) -> Outlook:
    model, device, plan, settings = draft.model, draft.device, draft.plan, draft.settings
    options, out, spec = dict(planned.spec.options), Path(settings["out"].value), None
    with suppress(SpecbenchError):  # its draft head is not on disk
        spec = plan.spec(planned.spec, digest) if plan and digest and not planned.auto_window else None
    folder = spec and run_folder(draft.out, spec)
    requests = plan.requests_of(planned) if plan else ()
    stored = RunStore(folder).completed(draft.trace) if folder and folder.is_dir() else set()
    done = len(stored & {request.key for request in requests})
    images = len(requests) if plan else _expected_images(settings, planned.first)
    missing = None if images is None else images - done
    alike = out, model.name, planned.spec.name, device
    pace = seconds_per_image(*alike, folder.name) if done else None
    pace = pace or shared.once(alike, lambda: seconds_per_image(*alike))
    # Upper bound of an image on disk: an incompressible PNG and the lists of its row.
    image_bytes = math.prod(model.resolution) * 3 + model.tokens * 32 + 4096
    megabytes = None if missing is None else image_bytes * missing / 1e6
    batch = plan.batch if plan else settings["batch"].value
    need = footprint(model, planned.spec, draft.sampling, draft.dtype, device)
    memory = need.total(batch if isinstance(batch, int) else 1) if need else None
    head = head_files(model, planned.spec)
    return Outlook(
        run_id=folder and folder.name,
        model=model.name,
        decoder=planned.spec.name,
        options=planned.chosen | options | ({"window": "auto"} if planned.auto_window else {}),
        lossless=planned.spec.lossless,
        prompts=plan.prompts.name if plan else settings["prompts"].value,
        batch=batch,
        **{name: getattr(draft, name) for name in ("sampling", "samples", "seed", "dtype", "device", "out")},
        images=images,
        done=done,
        seconds=None if pace is None or missing is None else pace * missing,
        megabytes=megabytes,
        memory_gib=None if memory is None else float(f"{memory / 2**30:.3g}"),
        captions=cut,
        weights=_where(model.files),
        head=head and _where(head.find),
        obstacles=draft.obstacles(planned, memory, megabytes, shared),
        spec=spec,
    )


def _expected_images(values: Mapping[str, Value], first: int | None) -> int | None:
    """Images (of a baseline: of the `first` prompts) of a public set that is not downloaded; None if unknown."""
    name, drawing = str(values["prompts"].value), plan_drawing(values)
    if name not in public_names() or drawing.ids or drawing.categories or drawing.per_category:
        return None
    public = downloadable(name)
    if "/" in name:
        return None
    counts = [public.prompts - drawing.offset, *(n for n in (drawing.sample, drawing.limit) if n is not None)]
    return max(0, min(counts)) * int(values["samples"].value) if first is None else max(0, min(*counts, first))


def caption_note(model: ModelFacts, captions: Sequence[str]) -> str | None:
    """Note on the number of captions that the model truncates; None if it reads all of them whole."""
    if not (cut := model.captions_cut(captions)) or cut[0] == 0:
        return None
    how_many = "how many are cut is known once its files are here"
    if cut[0] is not None:
        how_many = f"{cut[0]:,} of {len(set(captions)):,} are cut"
    return f"{model.name} reads {cut[1]} tokens of a caption: {how_many}"


def seconds_per_image(out: Path, model: str, decoder: str, device: str, run_id: str | None = None) -> float | None:
    """Mean seconds per image from stored rows: of one run, or of all runs of this model, decoder and device."""
    if not out.is_dir():
        return None
    if run_id and (pace := _pace([out / run_id])) is not None:
        return pace
    return _pace(list(find_runs_like(out, model=model, decoder={"name": decoder}, device=device)))


def _pace(folders: Sequence[Path]) -> float | None:
    images, seconds, columns = 0, 0.0, ("status", "batch", *(f"{span}_ms" for span in SPANS))
    for folder in (folder for folder in folders if folder.is_dir()):
        from specbench import stats  # half a second of imports, only where such a run is stored

        pieces = [rows.filter(pc.equal(rows["status"], "ok")) for rows in RunStore(folder).batches(columns)]
        rows = stats.as_frame(pa.concat_tables(pieces)) if pieces else ()
        pace = stats.throughput(rows) if pieces else None
        if not pace:
            continue
        images, seconds = images + len(rows), seconds + len(rows) / pace
    return seconds / images if images else None


def _where(files: Callable[[], object]) -> str:
    """Whether files are on this disk, or else what brings them."""
    try:
        files()
    except SpecbenchError as error:
        return error.try_this or error.what
    return ON_DISK


_SHORT_S, _LONG_S = 5.0, 3600.0
"""Seconds of an image below which nothing is said, and above which something else is proposed."""


def cost_note(plan: Plan) -> str | None:
    """Roofline estimate of the time per AR image; None if it is short, unknown, or measured by earlier runs."""
    size, model = plan.model.size, plan.model
    earlier = seconds_per_image(plan.out, model.name, "ar", plan.device)
    if size is None or plan.workers.elsewhere or earlier is not None:
        return None
    machine = plan.device, plan.dtype, plan.threads
    peak = find_peak(*machine) or glimpse_peak(*machine)[0]  # a busy machine's, too: the run will be as slow
    guided, context = plan.sampling.guidance != 1, model.stream / 2
    forward = Forward(size, model.network.moved, model.v_image, BYTES[plan.dtype], 1, 1, guided, context)
    seconds = model.stream * sum(forward_ms(forward, peak, Reached()).values()) / 1e3
    return cost_text(model.stream, seconds, peak.name, peak.source) if seconds >= _SHORT_S else None


def cost_text(steps: int, seconds: float, device: str, source: str) -> str:
    """The forecast of AR's `steps` in words."""
    forecast, where = f"forecast: {duration(seconds)} an image of ar", f"on {device} ({source})"
    if seconds > _LONG_S:
        return f"{forecast} {where}; instead: a GPU, --model janus, or to try it --random-weights --scale tiny"
    return f"{forecast} ({steps:,} steps) {where}; k tokens per step divide the steps by k"
