"""Read runs for reports, and compare the fields that must agree between two runs for a speed-up."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import compress
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench import stats
from specbench.decoding.generation import SPANS
from specbench.store.run_folders import runs_in
from specbench.store.run_info import RunInfo
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY, RowStatus
from specbench.store.token_sums import SUMS
from specbench.system.foreign_code import edited_text

_WORK = ("model", "weights_sha256", "model_code", "prompts_sha256", "seed", "batch", "device")
_CONFIGURATION = ("dtype", "threads", "compiled")
_TIME = ("threads", "compiled", "batch", "device", "mode", "hardware", "versions")
"""Fields that change the number of steps at most by rounding."""
_COLUMNS = (
    *("status", "category", "nfe", "batch", "tested", "accepted", *SUMS.names),
    *(f"{span}_ms" for span in (*SPANS, "latency", "latency_e2e")),
)


@dataclass(eq=False)
class Run:
    """A run folder, read lazily."""

    folder: Path

    @cached_property
    def info(self) -> RunInfo:
        """Description of the run, with `stack`: the library versions that decoded most images."""
        info, store = RunStore(self.folder).info(), RunStore(self.folder)
        if len(set(info.stacks)) > 1:
            started = store.samples(["started_at", "status"])
            stacks = _stacks(info, started[started["status"] == RowStatus.OK]["started_at"])
            counts = Counter(filter(set(info.stacks).__contains__, stacks))
            info.stack = max(counts, key=counts.__getitem__, default=info.stacks[-1])
        return info

    @property
    def untimed(self) -> dict[str, int]:
        """{versions other than `stack`: number of images that they decoded}; times of these images are not used."""
        return self.rows.attrs.get("untimed", {})

    @property
    def rows(self) -> pd.DataFrame:
        """Rows of the decoded images, with the numbers in `facts` as columns."""
        return self._read[0]

    @property
    def failed(self) -> int:
        """Number of failed images."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[pd.DataFrame, int]:
        """(`rows`, `failed`), read in one pass over the parts."""
        pieces, failed = [], 0
        for piece in RunStore(self.folder).batches_with_facts((*_COLUMNS, "started_at")):
            failed += pc.sum(pc.equal(piece["status"], RowStatus.FAILED)).as_py() or 0
            pieces.append(piece.filter(pc.equal(piece["status"], RowStatus.OK)))
        rows = stats.as_frame(pa.concat_tables(pieces, promote_options="default"))
        if len(set(self.info.stacks)) > 1:
            stacks = _stacks(self.info, rows["started_at"])
            other = [stack != self.info.stack for stack in stacks]
            rows.loc[other, [name for name in rows if name.endswith("_ms")]] = None
            rows.attrs["untimed"] = dict(Counter(stack for stack in stacks if stack != self.info.stack))
        return rows, failed

    @cached_property
    def speed_up(self) -> Callable[[Run], stats.SpeedUp | None]:
        """Function that computes the speed-up over another run; results are cached."""
        return cache(lambda other: stats.speed_up(self.rows, other.rows))

    @property
    def started(self) -> list[str]:
        """Start time of each image, UTC."""
        return RunStore(self.folder).samples(["started_at"])["started_at"].tolist()

    @cached_property
    def traced(self) -> pd.DataFrame:
        """Traces of the traced images, with the step that committed each token."""
        store = RunStore(self.folder)
        traces = store.traces()
        return traces.merge(store.samples(["committed_step"]), on=KEY) if len(traces) else traces


def _stacks(info: RunInfo, started: Iterable[str]) -> list[str]:
    """Return the versions that decoded each image: "A or B" if calls with different versions overlapped in time."""
    calls = [(str(call.started_at), str(call.finished_at or "")) for call in info.invocations]
    known, starts, stacks = info.stacks, sorted(start for start, _ in calls), []
    for at in (max(str(text), starts[0]) for text in started):
        last = starts[bisect_right(starts, at) - 1]
        running = [start == last or start <= at <= end for start, end in calls]
        stacks.append(" or ".join(dict.fromkeys(compress(known, running))))
    return stacks


def decoded_apart(run: Run, other: Run) -> bool:
    """Return whether most common images of two runs were decoded in calls that do not overlap in time, so that the
    machine may have changed. Older versions stored one start time per run, not per call."""
    mine, theirs = map(_calls, (run, other))
    common = mine.keys() & theirs.keys()
    apart = (max(mine[key][0], theirs[key][0]) > min(mine[key][1], theirs[key][1]) for key in common)
    return 2 * sum(apart) > len(common)


def _calls(run: Run) -> dict[tuple[str, int], tuple[str, str]]:
    """Return for each image start and end of the call that decoded it: the last call that began before the image."""
    calls = sorted((str(call.started_at), str(call.finished_at or call.started_at)) for call in run.info.invocations)
    starts = [start for start, _ in calls]
    rows = zip(*(run.rows[name] for name in (*KEY, "started_at")), strict=True)
    return {(prompt, sample): calls[max(0, bisect_right(starts, str(at)) - 1)] for prompt, sample, at in rows}


def is_ar(info: RunInfo) -> bool:
    """Return whether a run is AR sampling by specbench: without drafts, and not imported."""
    return not info.spec.decoder.drafts and info.spec.tokens_sha256 is None


def mismatched_fields(
    info: RunInfo, baseline: RunInfo, any_configuration: bool = False, other: str = "AR", steps_alone: bool = False
) -> dict[str, str]:
    """Return {field: "dtype (bfloat16, AR float32)"} of the fields that must agree for a speed-up but differ.
    `any_configuration`: ignore dtype, threads and compilation (same work on the same machine); `other`: name of the
    baseline in the output; `steps_alone`: list only fields that must agree for a step ratio."""
    free = _TIME if steps_alone else _CONFIGURATION if any_configuration else ()
    mine, theirs = _fields(info), _fields(baseline)
    mine["versions"], theirs["versions"] = _apart(info.stack, baseline.stack)
    differing = [name for name in mine if name in theirs and name not in free and mine[name] != theirs[name]]
    return {name: f"{name} ({_short(mine[name])}, {other} {_short(theirs[name])})" for name in differing}


def _apart(mine: str, theirs: str) -> tuple[str, str]:
    """Return two lists of versions, reduced to the packages that are in both lists with different versions."""
    if " or " in mine + theirs:
        return mine, theirs
    these, those = (dict(part.rsplit(" ", 1) for part in text.split(", ") if part) for text in (mine, theirs))
    names = [name for name in these if name in those and these[name] != those[name]]
    first, second = (", ".join(f"{name} {versions[name]}" for name in names) for versions in (these, those))
    return first, second


def configuration(info: RunInfo) -> str:
    """Format the settings that change only the speed of AR, for example "float32, 2 threads"."""
    spec = info.spec
    threads = [f"{count} thread{'s' * (count != 1)}"] if (count := spec.identity().get("threads")) else []
    return ", ".join([spec.dtype, *threads, *(["compiled"] if info.compiled else [])])


def _fields(info: RunInfo) -> dict[str, object]:
    spec = info.spec
    identity = spec.identity()
    fields = {name: identity.get(name) for name in (*_WORK, *_CONFIGURATION)} | {"mode": spec.mode or "latency"}
    fields["compiled"] = "yes" if info.compiled else "no"
    fields |= asdict(spec.sampling)
    if fields["threads"] is None:  # on a GPU, the identity has no threads
        del fields["threads"]
    return fields | {"hardware": " and ".join(info.machines)}


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:8]}..." if len(text) == 64 and text.isalnum() else text


def with_ar_runs(folders: Iterable[Path]) -> dict[Path, tuple[Run, list[Run]]]:
    """Map each folder to its run and the AR runs in the same results folder; each run is read once."""
    runs = {folder: Run(folder) for folder in folders}
    pools: dict[Path, list[Run]] = {}
    for place in dict.fromkeys(folder.parent for folder in runs):
        beside = (runs.get(folder) or Run(folder) for folder in runs_in(place))
        pools[place] = [run for run in beside if is_ar(run.info)]
    return {folder: (run, pools[folder.parent]) for folder, run in runs.items()}


def copies(runs: Sequence[Run]) -> dict[Path, Path]:
    """Find copies of runs: same run id, and an image with the same start. Map each copy's folder to the original's."""
    groups: dict[str, list[Run]] = {}
    copied: dict[Path, Path] = {}
    for run in sorted(runs, key=lambda run: run.folder.name != run.info.run_id):
        groups.setdefault(run.info.run_id, []).append(run)
    for first, *others in groups.values():
        keys = {tuple(key) for key in RunStore(first.folder).samples(["started_at"]).values} if others else ()
        for run in others:
            if any(tuple(key) in keys for key in RunStore(run.folder).samples(["started_at"]).values):
                copied[run.folder] = first.folder
    return copied


def nearest_ar(run: Run, ar_runs: Sequence[Run]) -> tuple[dict[str, str], Run] | None:
    """Return (mismatched fields, AR run) for the AR run of the same model with the fewest mismatched fields."""
    model = run.info.spec.model
    candidates = [(mismatched_fields(run.info, ar.info), ar) for ar in ar_runs if ar.info.spec.model == model]
    return min(candidates, key=lambda pair: (len(pair[0]), pair[1].folder.name), default=None)


def code_text(info: RunInfo, kind: Literal["decoder", "model"] = "decoder") -> str:
    """Format the edit time of the plug-in code of a run's decoder or model, in the local time zone."""
    digest = getattr(info.spec, f"{kind}_code")
    if digest is None:
        return "code not recorded"
    edited = ((info.code or {}).get(kind) or {}).get("edited")
    return edited_text(edited) if isinstance(edited, str) else f"code {digest[:6]}"
