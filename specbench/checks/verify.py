"""Check runs in a packed file or a folder (`specbench verify`): digests, rows, images, scores, tokens, latencies."""

import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from specbench import stats
from specbench.checks.findings import Declared
from specbench.checks.run_audit import audit_run, checkpoint_of, model_of
from specbench.decoding.generation import ORDERS, SPANS
from specbench.decoding.noise import row_key
from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import MEAN_OF_IMAGES, Settings, made_score
from specbench.metrics.score_store import image_features, read_scores
from specbench.models.catalog import find_model, load_model
from specbench.models.interface import StagedModel
from specbench.prompts.loading import load_prompts, prompt_set_names
from specbench.reporting.comparability import Run
from specbench.reporting.report_rows import report_rows
from specbench.reporting.terminal import card
from specbench.store.image_scores import feature_place, stored_values
from specbench.store.packed import changed_members, extract
from specbench.store.run_folders import find_runs, runs_in
from specbench.store.run_info import RUN_JSON
from specbench.store.run_store import RunStore, image_bytes, read_image
from specbench.store.schema import AR_SPANS, SAMPLES, RowStatus
from specbench.store.token_sums import LISTS, SUMS, token_sums
from specbench.system.console import counted, one_line
from specbench.system.device_peaks import KNOWN
from specbench.system.json_values import Word
from specbench.system.plugins import plugins
from specbench.system.torch_state import PinnedTorch


class VerifyStatus(Word):
    """Outcome of a check."""

    OK, WRONG, OPEN = "ok", "WRONG", "not checked"


OK, WRONG, OPEN = VerifyStatus
_CLOSE = 1e-5
_ROUNDED = 0.99
_SLACK = 1e-2
"""Tolerance, larger than rounding, for log p and entropy (nats), probabilities, and times (relative to their sum)."""
_MOST_WORDS = 2**20  # More tokens than any vocabulary has
_LEVELS = 6.0  # Mean distance in grey levels that JPEG and other arithmetic may cause


def verify(
    path: Path | str, recompute: bool = False, device: str = "cpu", model: str | None = None
) -> list[dict[str, str]]:
    """Check a packed file of runs, or a results folder (`specbench verify`).

    Args:
        path: file of `specbench pack`, results folder, or folder of one run.
        recompute: recompute p by the model, which must be on this disk, and render the images again.
        device: device of the recomputation.
        model: plug-in of the runs' model, as "MODULE:NAME"; None: the model is not a plug-in.

    Returns:
        One dict per check: `run, check, status, detail`; `status` is "ok", "WRONG" or "not checked".

    Raises:
        SpecbenchError: no packed file, a packed file with invalid members, or a folder without runs.
    """
    path = Path(path)
    if model is not None:
        find_model(model)  # registers the name that run.json contains
    if path.is_dir():
        runs = [path.resolve()] if (path / RUN_JSON).is_file() else find_runs(path)
        none = _row("-", "digests", OPEN, "a folder has no digests; specbench pack writes them")
        return [none, *_verified(runs, recompute, device)]
    if not path.exists():
        raise SpecbenchError(f"{path} does not exist", "name a packed file, a results folder or the folder of a run")
    if changed := list(changed_members(path)):
        return [_row("-", "digests", WRONG, text) for text in changed]
    rows = [_row("-", "digests", OK, "every part is as it was packed")]
    with tempfile.TemporaryDirectory() as folder:  # other commands may have added files to an earlier unpacked copy
        extract(path, Path(folder))
        return rows + _verified(runs_in(Path(folder)), recompute, device)


def _verified(runs: Sequence[Path], recompute: bool, device: str) -> list[dict[str, str]]:
    """Check unpacked runs."""
    checks: dict[str, Callable[[Path], Iterable[tuple[str, VerifyStatus, str]]]] = {
        "identity": _identity, "prompts": _prompts, "facts": _facts, "pictures": _pictures, "scores": _scores,
        "latencies": _latencies, "report": _report,
        "tokens": lambda run: [("tokens", *_tokens(run, recompute, device))],
    }  # fmt: skip
    if recompute:
        checks["drawing"] = lambda run: [("drawing", *_drawing(run, device))]
    rows = []
    for run, (name, check) in itertools.product(runs, checks.items()):
        try:
            rows += [_row(run.name, *result) for result in check(run)]
            continue
        except SpecbenchError as error:
            problem = str(error).replace(f"{run.parent}/", "")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # from foreign values
            problem = one_line(f"its stored values are invalid: {type(error).__name__}: {error}", 200)
        rows.append(_row(run.name, name, WRONG, problem))
    return rows


def _row(run: str, check: str, status: VerifyStatus, detail: str) -> dict[str, str]:
    return {"run": run, "check": check, "status": status, "detail": detail}


def _identity(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    """The id is the digest of the settings, and the rows have the form that specbench writes."""
    store = RunStore(run)
    info, rows = store.info(), store.samples()
    same = info.run_id in (info.spec.run_id, *info.spec.earlier_ids) and run.name == info.run_id
    yield (
        "settings",
        OK if same else WRONG,
        "the run id is the digest of the settings" if same else "the run id is not the digest of the settings",
    )
    yield "rows", OK, f"{len(rows)} image{'s' * (len(rows) != 1)}"


def _prompts(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    """Seeds equal the run's seed. If the prompt set is on this disk, captions equal its captions."""
    spec, rows = RunStore(run).info().spec, RunStore(run).samples(["prompt", "seed"])
    if spec.tokens_sha256 is None and (rows["seed"] != spec.seed).any():  # another program may use other seeds
        yield "prompts", WRONG, f"rows with a seed other than {spec.seed}"
    if spec.prompts not in prompt_set_names() or spec.prompts in plugins("prompts"):
        yield "prompts", OPEN, "the prompts are not a set of specbench, so the captions cannot be compared"
        return
    try:
        prompt_set = load_prompts(spec.prompts)
    except SpecbenchError as error:
        yield "prompts", OPEN, str(error)
        return
    if prompt_set.sha256 != spec.prompts_sha256:
        yield "prompts", OPEN, f"the set {spec.prompts} on this disk has other content"
        return
    captions = {prompt.id: prompt.text for prompt in prompt_set.prompts}
    other = int((rows["prompt_id"].map(captions) != rows["prompt"]).sum())
    detail = f"{counted(other, 'caption')} not as in the set" if other else f"as in the set {spec.prompts}"
    yield "prompts", WRONG if other else OK, detail


def _facts(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    """The facts of a row are consistent: steps, log p and entropy, drafts, and times."""
    wrong: Counter[str] = Counter()
    decoder = RunStore(run).info().spec.decoder
    for piece in RunStore(run).batches([*SAMPLES.names, *SUMS.names]):
        rows, again = piece.to_pandas(), token_sums(piece.select(LISTS)).to_pandas()
        summed = np.isclose(rows[SUMS.names], again, equal_nan=True).all(axis=1)
        for row in rows.assign(summed=summed)[rows["status"] == RowStatus.OK].to_dict("records"):
            wrong.update(_contradictions(row, bool(decoder.lossless)))
            if not decoder.drafts and np.any(row["drafted"]):
                wrong["it has drafts, although the decoder makes none"] += 1
    if not wrong:
        yield "facts", OK, "steps, log p, entropy, drafts and times agree with each other"
    for text, count in wrong.items():
        yield "facts", WRONG, f"{counted(count, 'image')}: {text}"


def _contradictions(row: Mapping[str, Any], lossless: bool) -> Iterator[str]:
    if pd.isna(row["nfe"]):  # another program reports no steps
        return
    last = int(np.max(row["committed_step"]))
    if not last <= row["nfe"] <= last + 1:  # a GPU may run one step too many
        yield "the number of steps disagrees with the steps of its tokens"
    forced, logp, entropy = (np.asarray(row[name]) for name in ("forced", "logp", "entropy"))
    if logp[forced].any() or entropy[forced].any():
        yield "a token forced by the grammar does not have probability 1"
    p = np.exp(logp.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        least = -np.nan_to_num(p * np.log(p)) - np.nan_to_num((1 - p) * np.log(1 - p))
    # Given an event of probability p, entropy is smallest if there is only one other event, and largest if the rest
    # is uniform.
    finite = np.isfinite(logp) & np.isfinite(entropy)
    most = least + (1 - p) * math.log(_MOST_WORDS)
    if (finite & ((logp > _SLACK) | (entropy < least - _SLACK) | (entropy > most + _SLACK))).any():
        yield "no distribution has this log p and entropy"
    if row["top1"] is not None and (finite & (np.asarray(row["top1"]) < p - _SLACK)).any():
        yield "a token has a higher probability than the most probable token"
    if not row["summed"]:
        yield "the stored sums, which reports read, are not the sums over its tokens"
    if any((np.abs(np.asarray(row[name]) - 0.5) > 0.5).any() for name in ORDERS if row[name] is not None):
        yield "recorded values for the audit are not between 0 and 1"
    drafted, tested, accepted = (np.asarray(row[name]) for name in ("drafted", "tested", "accepted"))
    if (accepted > tested).any() or (tested > drafted).any():
        yield "more drafts are accepted than tested, or tested than drafted"
    taken, free = int(accepted.sum()), int((~forced).sum())
    most_tokens = taken + row["nfe"] if lossless and tested.any() else free  # a step draws one more token
    if not taken <= free <= most_tokens:
        yield "the numbers of steps and accepted drafts do not match the number of tokens"
    if len(np.unique(row["committed_step"])) < last:
        yield "a step committed no token"
    for total, spans in (("latency_ms", AR_SPANS), ("latency_e2e_ms", SPANS)):
        parts = sum(row[f"{span}_ms"] for span in spans if not pd.isna(row[f"{span}_ms"]))
        if not pd.isna(row[total]) and not math.isclose(row[total], parts, rel_tol=_SLACK, abs_tol=_SLACK):
            yield f"{total} is not the sum of its spans"


@PinnedTorch()
def _drawing(run: Path, device: str) -> tuple[VerifyStatus, str]:
    """The images are decoded from the tokens."""
    info, store = RunStore(run).info(), RunStore(run)
    if not (run / "images").is_dir():
        return OPEN, "packed without images"
    try:
        model = load_model(model_of(info.spec, *checkpoint_of(info, None, None)), device, info.spec.dtype)
        if isinstance(model, StagedModel) or not getattr(model, "draws", True):
            return OPEN, "images of a second-stage model cannot be rendered again"
        worst, checked = 0.0, 0
        for piece in store.batches(["status", "tokens", "prompt", "image", "image_sha256"], size=16):
            rows = piece.to_pandas()
            rows = rows[(rows["status"] == RowStatus.OK) & rows["image"].notna()]
            if rows.empty:
                continue
            tokens = torch.tensor(np.stack(rows["tokens"]), dtype=torch.long, device=model.device)
            keys = [row_key(info.spec.seed, row.prompt_id, row.sample) for row in rows.itertuples()]
            drawn = model.render(model.layout.image_tokens(tokens), rows["prompt"].tolist(), keys).cpu().numpy()
            for row, pixels in zip(rows.itertuples(), np.moveaxis(drawn, 1, -1).astype(int), strict=True):
                stored = read_image(run, row.image, row.image_sha256)
                worst = max(worst, np.abs(stored - pixels).mean() if stored.shape == pixels.shape else 255.0)
                checked += 1
    except SpecbenchError as error:
        return OPEN, str(error)
    text = f"{counted(checked, 'picture')}: rendered again, they differ by at most {worst:.2g} grey levels on average"
    return (OK if worst <= _LEVELS else WRONG), text


def _pictures(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    rows = RunStore(run).samples(["image", "image_sha256"]).dropna(subset=["image"])
    if not (run / "images").is_dir():
        yield "pictures", OPEN, "no images are stored here"
        return
    for row in rows.itertuples():
        image_bytes(run, row.image, row.image_sha256)
    yield "pictures", OK, f"all {len(rows)} match the digests in their rows"


def _scores(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    """Scores are recomputed from the stored features. Metrics of plug-ins are not imported."""
    scores: list[Mapping[str, Any]] = [score for score in read_scores(run) if ":" not in score["metric"]]
    count = Counter(score["metric"] for score in scores)
    for score in scores:
        name = score["metric"]
        again = _score_again(run, name, score)
        text = f"{name} ({score['fingerprint']})" if count[name] > 1 else name
        if again is None:
            reason = "the class of a plug-in is not imported"
            if name in metric_catalog.IMPORTED:
                reason = "its value was imported"
            elif name in metric_catalog.METRICS:
                reason = "files are missing, or its reference or versions differ"
            yield "score", OPEN, f"{text}: cannot be computed here again ({reason})"
        elif score["value"] is None:
            yield "score", OK if math.isnan(again) else WRONG, f"{text} has no stored value; from features: {again:.6g}"
        else:
            same = math.isclose(again, score["value"], rel_tol=_CLOSE, abs_tol=_CLOSE)
            yield "score", OK if same else WRONG, f"{text} {score['value']:.6g}; from the stored features: {again:.6g}"


def _score_again(run: Path, name: str, score: Mapping[str, Any]) -> float | None:
    if name not in metric_catalog.METRICS:
        if json.loads(score["identity"]).get("score") != MEAN_OF_IMAGES:
            return None
        values = stored_values(feature_place(run, f"{name}-{score['fingerprint']}"))
        return None if values is None or values.empty else float(values["value"].mean())
    try:
        metric = metric_catalog.metric(name)(Settings(offline=True))
        if made_score(metric).fingerprint != score["fingerprint"]:
            return None
        again = metric.scores(metric.statistics(image_features(run, metric)))
    except SpecbenchError:
        return None
    return next((part.estimate.value for part in again if part.name == name), None)


def _latencies(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    """No image took less time than its forwards, or less than the data sheet of the device allows."""
    read = Run(run)
    if (read.rows["latency_ms"] < _ROUNDED * read.rows["target_ms"]).any():
        yield "latency", WRONG, "an image took less time than its target forwards"
        return
    floor, gpus = read.info.roofline, {gpu for call in read.info.invocations for gpu in call.gpus}
    if not floor or not read.info.spec.timed:
        yield "latency", OPEN, "the roofline of this model and device is unknown"
        return
    peaks = [KNOWN[gpu] for gpu in gpus if gpu in KNOWN]
    if peaks:
        bandwidth, half, single, source = max(peaks)
        flops = single if floor["itemsize"] == 4 else half
        floor = {**floor, "bytes_per_s": bandwidth * 1e9, "flops": flops * 1e12, "source": source}
    ratio = stats.roofline_ratio(read.rows, floor)
    if ratio is None or pd.isna(ratio):
        yield "latency", OPEN, "no times"
        return
    detail = f"{ratio:.2f} times the roofline of {', '.join(sorted(gpus)) or floor['device']} ({floor['source']})"
    if ratio < 1 and not peaks:
        detail += "; the measured peak is too low to check times"
    yield "latency", OK if ratio >= 1 else WRONG if peaks else OPEN, detail


def _report(run: Path) -> Iterator[tuple[str, VerifyStatus, str]]:
    """Check the other facts that `report` and `show` read."""
    report_rows([run])
    card(run)
    yield "report", OK, "can be reported"


def _tokens(run: Path, recompute: bool, device: str) -> tuple[VerifyStatus, str]:
    try:
        audit = audit_run(run, recompute, device=device, keep=False, explain=False)
    except SpecbenchError as error:
        return OPEN, str(error)
    how = "p recomputed with the model" if audit["recomputed"] else "p as recorded; --recompute computes p"
    how += "; audit --run also searches for likely causes" if audit["declared"] == Declared.CLAIMED else ""
    detail = f"{audit['verdict']} over {counted(audit['images'], 'image')} ({how})"
    return (WRONG if audit["failed"] else OK), detail
