"""Dry run: the settings, cost and blocking problems of runs. Nothing is decoded or written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from specbench.decoding.generation import SPANS
from specbench.errors import SpecbenchError
from specbench.models.facts import BYTES, ModelFacts
from specbench.models.forward_time import Forward, Reached, forward_ms
from specbench.prompts import PromptSet, downloadable, load_prompts, public_names
from specbench.runs.decoder_args import PlannedDecoder
from specbench.runs.memory_estimate import footprint
from specbench.runs.plan import Draft, Plan, Shared, draft_plan, head_files, plan_drawing
from specbench.runs.settings import RunSettings
from specbench.specs.run_spec import SAMPLING, RunSpec
from specbench.store.run_folders import find_runs_like, run_folder
from specbench.store.run_store import RunStore
from specbench.store.schema import RowStatus
from specbench.system.console import duration
from specbench.system.device_peaks import find_peak, glimpse_peak

ON_DISK, LISTED = "on disk", "they are listed above"
ROW = (
    *("run_id", "model", "decoder", "options", "lossless", *SAMPLING, "prompts", "samples", "seed", "batch", "dtype"),
    *("device", "images", "done", "seconds", "megabytes", "memory_gib", "captions", "weights", "head", "obstacles"),
)
"""Keys of `Outlook.row`."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Expected facts of one run; a fact that is not known yet is None."""

    draft: Draft
    planned: PlannedDecoder
    spec: RunSpec | None
    images: int | None
    done: int  # number of stored images
    seconds: float | None  # for the missing images, by the pace of this run, or else of its model, decoder and device
    megabytes: float | None  # upper bound of the images on disk
    memory_gib: float | None  # estimate
    captions: str | None  # see `caption_note`
    # weights, head: "on disk", or the command that downloads them
    weights: str
    head: str | None
    # problems to solve before the run; missing files are no problem, because the run downloads them
    obstacles: tuple[SpecbenchError, ...]

    @property
    def row(self) -> dict[str, Any]:
        """Convert to {name: value}, with obstacles as texts."""
        draft, planned, asked = self.draft, self.planned, self.draft.settings
        plan = draft if isinstance(draft, Plan) else None
        options = planned.chosen | planned.spec.options | ({"window": "auto"} if planned.auto_window else {})
        return row_of(
            run_id=self.spec and run_folder(draft.out, self.spec).name,
            model=draft.model.name,
            decoder=planned.spec.name,
            options=options,
            lossless=planned.spec.lossless,
            **vars(draft.sampling),
            prompts=plan.prompts.name if plan else asked.prompts,
            **{name: getattr(asked, name) for name in ("samples", "seed", "device")},
            batch=plan.compute.batch if plan else asked.batch,
            dtype=draft.compute.dtype,
            **{name: value for name, value in vars(self).items() if name not in ("draft", "planned", "spec")},
        )

    def of_seed(self, settings: RunSettings) -> Outlook | None:
        """Return this outlook with the seed of `settings`; None if one of the two runs is stored."""
        spec = self.spec and replace(self.spec, seed=settings.seed)
        if self.done or (spec and run_folder(self.draft.out, spec).is_dir()):
            return None
        return replace(self, draft=replace(self.draft, settings=settings), spec=spec)


def row_of(obstacles: Iterable[SpecbenchError], **known: object) -> dict[str, Any]:
    """Make a row of a dry run from the known values; other values are None."""
    return {name: known.get(name) for name in ROW} | {"obstacles": list(map(str, obstacles))}


class Costs(Shared):
    """Facts that the outlooks of one command share, in addition to facts that its plans share."""

    def __init__(self, load: Callable[[str, str | None], PromptSet] = load_prompts):
        super().__init__(load)
        self.digest = cache(lambda model: model.weights_sha256())
        self.pace = cache(seconds_per_image)
        self.caption_note = cache(
            lambda model, *selection: caption_note(model, [prompt.text for prompt in self.chosen(*selection)])
        )


def outlooks(settings: RunSettings, shared: Costs | None = None) -> list[Outlook]:
    """Return an outlook for each decoder of the settings. `shared`: facts to reuse in calls with other settings."""
    shared = shared or Costs()
    draft = draft_plan(settings, shared, ahead=True)
    cut = None
    if isinstance(draft, Plan):
        named = str(settings.prompts), settings.prompt_column
        cut = shared.caption_note(draft.model, named, plan_drawing(settings))
    return [_outlook(draft, planned, cut, shared) for planned in draft.decoders]


def distinct_outlooks(swept: Iterable[RunSettings], shared: Costs | None = None) -> list[Outlook]:
    """Return the distinct outlooks of several settings; work that does not depend on the seed is done once."""
    shared, by_key, runs = shared or Costs(), dict[str, list[Outlook]](), list[Outlook]()
    for settings in swept:
        key = repr(replace(settings, seed=0))
        first = by_key.get(key, [])
        alike = [outlook for each in first if (outlook := each.of_seed(settings))]
        if len(alike) < len(first) or not first or settings.batch == "auto":  # a stored run may have chosen the batch
            alike = by_key[key] = outlooks(settings, shared)
        runs += alike
    return list({json.dumps(outlook.row, default=str): outlook for outlook in reversed(runs)}.values())[::-1]


def obstacle(runs: Iterable[Outlook]) -> SpecbenchError | None:
    """Return the only problem that blocks the runs, or an error with the number of problems; None if there are none."""
    errors = list({str(error): error for outlook in runs for error in outlook.obstacles}.values())
    if len(errors) < 2:
        return errors[0] if errors else None
    return SpecbenchError(f"{len(errors)} obstacles", LISTED, max(error.exit_code for error in errors))


def _outlook(draft: Draft, planned: PlannedDecoder, cut: str | None, shared: Costs) -> Outlook:
    model, settings, spec = draft.model, draft.settings, None
    plan = draft if isinstance(draft, Plan) else None
    with suppress(SpecbenchError):  # the draft head may not be on this disk
        known = plan and model.ready and not planned.auto_window
        spec = plan.spec(planned.spec, shared.digest(model)) if plan and known else None
    folder = run_folder(draft.out, spec) if spec else None
    requests = plan.requests_of(planned) if plan else ()
    stored = RunStore(folder).completed(settings.trace) if folder and folder.is_dir() else set()
    done = len(stored & {request.key for request in requests})
    images = len(requests) if plan else _expected_images(settings, planned.first)
    missing = None if images is None else images - done
    alike = Path(settings.out), model.name, planned.spec.name, settings.device
    pace = seconds_per_image(*alike, folder.name) if folder and done else None
    pace = pace or shared.pace(*alike)
    # Upper bound of an image on disk: an incompressible PNG and the lists of its row.
    image_bytes = math.prod(model.resolution) * 3 + model.tokens * 32 + 4096
    megabytes = None if missing is None else image_bytes * missing / 1e6
    batch = plan.compute.batch if plan else settings.batch
    need = footprint(model, planned.spec, draft.sampling, draft.compute.dtype, settings.device)
    memory = need.total(batch if isinstance(batch, int) else 1) if need else None
    head = head_files(model, planned.spec)
    return Outlook(
        draft=draft,
        planned=planned,
        spec=spec,
        images=images,
        done=done,
        seconds=None if pace is None or missing is None else pace * missing,
        megabytes=megabytes,
        memory_gib=None if memory is None else float(f"{memory / 2**30:.3g}"),
        captions=cut,
        weights=_where(model.files),
        head=_where(head.find) if head else None,
        obstacles=draft.obstacles(planned, memory, megabytes, shared),
    )


def _expected_images(settings: RunSettings, first: int | None) -> int | None:
    """Return the number of images of a public set before download; None if unknown. `first`: as in `PlannedDecoder`."""
    name, drawing = str(settings.prompts), plan_drawing(settings)
    if name not in public_names() or drawing.ids or drawing.categories or drawing.per_category:
        return None
    public = downloadable(name)
    if "/" in name:
        return None
    counts = [public.prompts - drawing.offset, *(n for n in (drawing.sample, drawing.limit) if n is not None)]
    return max(0, min(counts)) * settings.samples if first is None else max(0, min(*counts, first))


def caption_note(model: ModelFacts, captions: Sequence[str]) -> str | None:
    """Return a note on captions that the model truncates; None if it truncates no caption."""
    if not (cut := model.captions_cut(captions)) or cut[0] == 0:
        return None
    how_many = "the number of truncated captions is unknown until the model's files are on this disk"
    if cut[0] is not None:
        how_many = f"{cut[0]:,} of {len(set(captions)):,} are cut"
    return f"{model.name} reads at most {cut[1]} tokens of a caption; {how_many}"


def seconds_per_image(out: Path, model: str, decoder: str, device: str, run_id: str | None = None) -> float | None:
    """Return the mean seconds per image of stored runs: of `run_id`, or of all runs of a model, decoder and device."""
    if not out.is_dir():
        return None
    if run_id and (pace := _pace([out / run_id])) is not None:
        return pace
    return _pace(list(find_runs_like(out, model=model, decoder={"name": decoder}, device=device)))


def _pace(folders: Sequence[Path]) -> float | None:
    images, seconds, columns = 0, 0.0, ("status", "batch", *(f"{span}_ms" for span in SPANS))
    for folder in (folder for folder in folders if folder.is_dir()):
        from specbench import stats  # takes half a second; only needed if such a run is stored

        pieces = [rows.filter(pc.equal(rows["status"], RowStatus.OK)) for rows in RunStore(folder).batches(columns)]
        rows = stats.as_frame(pa.concat_tables(pieces)) if pieces else ()
        pace = stats.throughput(rows) if pieces else None
        if not pace:
            continue
        images, seconds = images + len(rows), seconds + len(rows) / pace
    return seconds / images if images else None


def _where(files: Callable[[], object]) -> str:
    """Return "on disk", or the command that downloads the files."""
    try:
        files()
    except SpecbenchError as error:
        return error.try_this or error.what
    return ON_DISK


_SHORT_S, _LONG_S = 5.0, 3600.0
"""Thresholds in seconds per image: print a forecast above the first, and alternatives above the second."""


def cost_note(plan: Plan) -> str | None:
    """Format the roofline estimate of the time per AR image; None if short, unknown, or measured in stored runs."""
    model, network, size, compute = plan.model, plan.model.network, plan.model.size, plan.compute
    earlier = seconds_per_image(plan.out, model.name, "ar", compute.device)
    if not (size and network) or plan.workers.elsewhere or earlier is not None:
        return None
    machine = compute.device, compute.dtype, compute.threads
    peak = find_peak(*machine) or glimpse_peak(*machine)[0]  # even on a busy machine, which also slows the run
    guided, context = plan.sampling.guidance != 1, model.stream / 2
    forward = Forward(size, network.moved, model.v_image, BYTES[compute.dtype], 1, 1, guided, context)
    seconds = model.stream * sum(forward_ms(forward, peak, Reached()).values()) / 1e3
    return cost_text(model.stream, seconds, peak.name, peak.source) if seconds >= _SHORT_S else None


def cost_text(steps: int, seconds: float, device: str, source: str) -> str:
    """Format the forecast for an image of AR with this number of `steps`."""
    forecast, where = f"forecast: {duration(seconds)} per image with ar", f"on {device} ({source})"
    if seconds > _LONG_S:
        return f"{forecast} {where}; faster: a GPU, --model janus, or for a first try --random-weights --scale tiny"
    return f"{forecast} ({steps:,} steps) {where}; with k tokens per step, a decoder needs 1/k of the steps"
