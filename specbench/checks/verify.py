"""Checks of runs, packed or in a folder (`specbench verify`): digests, rows, pictures, scores, tokens and latencies."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from specbench import stats
from specbench.checks.run_audit import audit_run
from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import MEAN_OF_IMAGES, Settings, fingerprint
from specbench.metrics.score_store import feature_folders, image_features, read_scores, stored_values
from specbench.reporting.report_rows import Run
from specbench.store.packed import changed_members, extract
from specbench.store.run_folders import find_runs, runs_in
from specbench.store.run_info import RUN_JSON
from specbench.store.run_store import RunStore, image_bytes
from specbench.system.console import counted
from specbench.system.device_peaks import KNOWN

OK, WRONG, OPEN = "ok", "WRONG", "not checked"
_CLOSE = 1e-5
_ROUNDED = 0.99
_COLUMNS = ("run", "check", "status", "detail")


def verify(path: Path | str, recompute: bool = False, device: str = "cpu") -> list[dict[str, str]]:
    """Check a packed file of runs, or a results folder (`specbench verify`).

    Args:
        path: file of `specbench pack`, results folder, or folder of one run.
        recompute: take p from the model, which must be on this disk, instead of the recorded values.
        device: where it is recomputed.

    Returns:
        One dict a check: `run, check, status, detail`; `status` is "ok", "WRONG" or "not checked".

    Raises:
        SpecbenchError: no packed file, one with members that are refused, or a folder without runs.
    """
    path = Path(path)
    if path.is_dir():
        runs = [path.resolve()] if (path / RUN_JSON).is_file() else find_runs(path)
        none = _row("-", "digests", OPEN, "a folder has none; specbench pack writes them")
        return [none, *_verified(runs, recompute, device)]
    if changed := list(changed_members(path)):
        return [_row("-", "digests", WRONG, text) for text in changed]
    rows = [_row("-", "digests", OK, "every part is as it was packed")]
    with tempfile.TemporaryDirectory() as folder:  # not the unpacked copy, which other commands may have added to
        extract(path, Path(folder))
        return rows + _verified(runs_in(Path(folder)), recompute, device)


def _verified(runs: Sequence[Path], recompute: bool, device: str) -> list[dict[str, str]]:
    """The checks of unpacked runs."""
    rows = []
    for run in runs:
        for check in (_identity, _pictures, _scores, _latencies):
            try:
                rows += [_row(run.name, *found) for found in check(run)]
            except SpecbenchError as error:
                said = str(error).replace(f"{run.parent}/", "")
                rows.append(_row(run.name, check.__name__.strip("_"), WRONG, said))
        rows.append(_row(run.name, "tokens", *_tokens(run, recompute, device)))
    return rows


def _row(*values: str) -> dict[str, str]:
    return dict(zip(_COLUMNS, values, strict=True))


def _identity(run: Path) -> Iterator[tuple[str, str, str]]:
    """The id follows from the settings, and the rows are of the kind that specbench writes."""
    store = RunStore(run)
    info, rows = store.info(), store.samples()
    same = info.run_id in (info.spec.run_id, *info.spec.earlier_ids) and run.name == info.run_id
    yield "settings", OK if same else WRONG, "the run id is that of the settings" if same else "another id than theirs"
    yield "rows", OK, f"{len(rows)} image{'s' * (len(rows) != 1)}"


def _pictures(run: Path) -> Iterator[tuple[str, str, str]]:
    rows = RunStore(run).samples(["image", "image_sha256"]).dropna(subset=["image"])
    if not (run / "images").is_dir():
        yield "pictures", OPEN, "none are here"
        return
    for row in rows.itertuples():
        image_bytes(run, row.image, row.image_sha256)
    yield "pictures", OK, f"as the rows name them: {len(rows)}"


def _scores(run: Path) -> Iterator[tuple[str, str, str]]:
    """Scores are computed anew from the stored features. Classes of others are not imported."""
    for score in read_scores(run):
        name = str(score["metric"])
        if ":" in name:
            continue
        found = _score_again(run, name, score)
        if found is None:
            yield "score", OPEN, f"{name}: its class or the versions that it needs are not here"
        else:
            same = math.isclose(found, float(score["value"]), rel_tol=_CLOSE, abs_tol=_CLOSE)
            yield "score", OK if same else WRONG, f"{name} {score['value']:.6g}, from its features {found:.6g}"


def _score_again(run: Path, name: str, score: dict) -> float | None:
    if name not in metric_catalog.METRICS:
        if json.loads(score["identity"]).get("score") != MEAN_OF_IMAGES:
            return None
        values = [stored_values(path, "value") for path in feature_folders(run, name)]
        means = [float(one["value"].mean()) for one in values if one is not None and len(one)]
        return min(means, key=lambda mean: abs(mean - score["value"]), default=None)
    try:
        metric = metric_catalog.metric(name)(Settings(offline=True))
        if fingerprint(metric) != score["fingerprint"]:
            return None
        again = metric.scores(metric.statistics(image_features(run, metric)))
    except SpecbenchError:
        return None
    return next((one.estimate.value for one in again if one.name == name), None)


def _latencies(run: Path) -> Iterator[tuple[str, str, str]]:
    """No image took less time than its forwards, and none less than the data sheet of the named device allows."""
    one = Run(run)
    if (one.rows["ar_ms"] < _ROUNDED * one.rows["target_ms"]).any():
        yield "latency", WRONG, "images took less time than their target forwards"
        return
    floor, gpus = one.info.roofline, {gpu for call in one.info.invocations for gpu in call.gpus}
    if not floor or not one.info.spec.timed:
        yield "latency", OPEN, "no roofline is known of this model and device"
        return
    known = [KNOWN[gpu] for gpu in gpus if gpu in KNOWN]
    if known:
        bandwidth, half, single, source = max(known)
        flops = single if floor["itemsize"] == 4 else half
        floor = {**floor, "bytes_per_s": bandwidth * 1e9, "flops": flops * 1e12, "source": source}
    ratio = stats.roofline_ratio(one.rows, floor)
    if ratio is None or pd.isna(ratio):
        yield "latency", OPEN, "no times"
        return
    said = f"{ratio:.2f} times the roofline of {', '.join(sorted(gpus)) or floor['device']} ({floor['source']})"
    yield "latency", OK if ratio >= 1 else WRONG, said


def _tokens(run: Path, recompute: bool, device: str) -> tuple[str, str]:
    try:
        found = audit_run(run, recompute, device=device, keep=False)
    except SpecbenchError as error:
        return OPEN, str(error)
    how = "compared with the model" if recompute else "by the recorded values; --recompute asks the model"
    said = f"{found['verdict']} over {counted(found['images'], 'image')} ({how})"
    return (WRONG if found["failed"] else OK), said
