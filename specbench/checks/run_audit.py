"""Audit a stored run of any model: the Rosenblatt transform of its tokens, recorded while decoding or recomputed.

Recomputation is a teacher-forced pass of the model over the finished tokens, in the run's number format. It compares
recorded with recomputed values and counts tokens that the target cannot draw. In float32 the audit tests the recomputed
values, and the recorded values of draft distributions, which cannot be recomputed. With fewer bits, p depends on the
shapes of the forwards, so the recorded values are tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from specbench.checks.findings import Declared
from specbench.checks.logp_kinds import LOGP_KINDS, SAMPLED, kinds_of, log_p_of, typical_distance
from specbench.checks.teacher_forced import (
    COMPARED,
    EDGES,
    Rounding,
    Values,
    compare_recorded,
    rounding_explains,
    teacher_forced_values,
)
from specbench.decoding.generation import Order
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model, load_model, model_code, recorded_model
from specbench.models.facts import BYTES, EIGHT_BITS, ModelChoice, ModelFacts
from specbench.models.interface import ImageModel
from specbench.specs.run_spec import SAMPLING, RunSpec
from specbench.stats.rosenblatt import LEVEL, RosenblattResult, Tokens, audit_tokens
from specbench.store.run_folders import find_runs
from specbench.store.run_info import RunInfo
from specbench.store.run_store import AuditVerdict, RunStore, images_fingerprint, write_audit
from specbench.store.schema import KEY, RowStatus
from specbench.system import console

_Name = TypeVar("_Name", bound=str)
FormatLoader = Callable[[str], ImageModel]
"""Loads a run's model in a number format."""
PRINTED_ORDERS: dict[Order, str] = {
    "u_id": "token id",
    "u_p": "p descending",
    "u_pq": "p/q descending",
    "u_qq": "q/q of the step before, descending",
}
"""Printed names of the orders of the vocabulary; see `specbench.decoding.generation.ORDERS`."""
CONSISTENT, DEVIATES, UNLIKELY, IMPOSSIBLE, OTHERS = AuditVerdict
_CONTROL = 16  # Images of a run with fewer bits that are recomputed in float32, to measure the effect of rounding
_KINDS = ("logp_kind", "logp_fits", "logp_nearest")
_COLUMNS = (
    *KEY,
    *("prompt", "status", "started_at", "seed", "tokens", "forced", "committed_step", "logp", "entropy"),
    *PRINTED_ORDERS,
)


def audit_runs(
    runs: str | Path | Sequence[str | Path] = (),
    out: str | Path = "results",
    recompute: bool = False,
    weights: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    logp: str | None = None,
    model: str | None = None,
) -> list[dict[str, Any]]:
    """Test whether the tokens of runs are exact samples of their model, and store the verdicts for reports.

    Args:
        runs: a run id or its unique beginning, a folder, or a list of these; by default all runs in `out`.
        recompute, weights, revision, device, dtype, logp: as for `audit_run`.
        model: plug-in of the runs' model, as "MODULE:NAME"; None: the model is not a plug-in.

    Returns:
        One dict per run, as from `audit_run`.

    Raises:
        SpecbenchError: an unknown or damaged run, or a run that cannot be audited.
    """
    folders = find_runs(out, runs)
    if model is not None:
        find_model(model)  # registers the name that run.json contains
    return [audit_run(folder, recompute, weights, revision, device, dtype=dtype, logp=logp) for folder in folders]


def audit_run(
    folder: Path | str,
    recompute: bool = False,
    weights: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    keep: bool = True,
    dtype: str | None = None,
    explain: bool = True,
    logp: str | None = None,
) -> dict[str, Any]:
    """Test whether the tokens of a run are exact samples of its model.

    Args:
        recompute: compute p with the model instead of using the recorded values.
        weights, revision: the checkpoint for the recomputation, if its location has changed since the run.
        keep: store the result with the run, for reports; a result for another target is never stored.
        dtype: for a run in eight bits, recompute p with the same weights in this number format ("float32", "bfloat16"
            or "float16"), to measure the distance between the two targets.
        explain: also compare tokens of another program with the likely causes, which takes minutes.
        logp: kind of another program's log p, one of `specbench.checks.logp_kinds.LOGP_KINDS`; None: detected.

    Returns:
        A flat dict: the keys of `_described`, `recomputed`, `target` (`dtype`, or None for the run's own),
        `unavailable` (orders without values), `fingerprint` (of the rows), the keys of `_recomputed` if p was
        recomputed, and the keys of `_explained` for tokens of another program.

    Raises:
        SpecbenchError: no decoded images, no recorded values, other weights than the run's, or no model on this disk.
    """
    folder = Path(folder)
    info, rows = RunStore(folder).info(), RunStore(folder).samples(_COLUMNS)
    rows = rows[rows["status"] == RowStatus.OK].sort_values(list(KEY), ignore_index=True)
    if rows.empty:
        raise SpecbenchError(f"run '{folder.name}' has no decoded images to audit")
    checkpoint, foreign = checkpoint_of(info, weights, revision), info.spec.tokens_sha256 is not None
    if logp and (logp not in LOGP_KINDS or not foreign):
        what = f"--logp {logp}: {'unknown' if foreign else f'run {folder.name} was decoded here'}"
        raise SpecbenchError(what, f"valid: {', '.join(LOGP_KINDS)}" if foreign else "omit --logp: the kind is known")
    facts: dict[str, Any] = {}
    if dtype:
        values, facts = _under_other_target(info, rows, *checkpoint, device, dtype)
    elif recompute or foreign:
        model = model_of(info.spec, *checkpoint)
        load = partial(load_model, model, device)
        values, facts = _recomputed(info.spec, rows, load, logp)
    else:
        rows = _with_values(rows, folder)
        values = Values(_stacked(rows, PRINTED_ORDERS), np.stack(rows["entropy"]))
    try:
        result = audit_tokens(_tokens(rows, values), LEVEL)
    except ValueError as error:
        raise SpecbenchError(f"run '{folder.name}': {error} to test", "decode more images") from None
    audit = _described(info, result) | {
        "recomputed": recompute or dtype is not None or foreign,
        "target": dtype,
        "unavailable": [PRINTED_ORDERS[name] for name in PRINTED_ORDERS if name not in values.u],
        "fingerprint": images_fingerprint(rows),
        **facts,
    }
    if dtype:
        return audit | {"failed": False}  # the run claims exact samples only of its own target
    audit |= _harder_verdict(audit)
    if foreign and explain:
        audit |= _explained(info.spec, rows, values, audit, load, model.guided)
    if keep:
        try:
            write_audit(folder, audit)
        except SpecbenchError as error:  # the verdict, after minutes of computation, is still returned
            console.warn(f"the verdict is not stored: {str(error).partition(' (')[0]}")
    return audit


def _harder_verdict(audit: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict of the recomputed values, which overrides the verdict of the tests; empty if there is none."""
    harder: dict[str, Any] = {}
    if audit.get("impossible_tokens", 0) > audit.get("impossible_by_rounding", 0):
        harder = {"verdict": IMPOSSIBLE, "deviates": True, "failed": audit["declared"] != Declared.LOSSY}
    if any(column["differs"] for column in audit.get("agreement", {}).values()):
        harder |= {"verdict": OTHERS, "failed": True}
    return harder


def _explained(
    spec: RunSpec, rows: pd.DataFrame, values: Values, audit: Mapping[str, Any], load: FormatLoader, guided: bool
) -> dict[str, Any]:
    """The verdict in a sentence: smallest detectable deviation, or place and likely cause of the deviation."""
    # These modules import torch.
    from specbench.checks.image_likelihood import concentrated
    from specbench.checks.likely_causes import SINGLE_TOKENS, likely_causes, named, studied
    from specbench.models.checkpoint_loading import round_to_eight_bits

    def load_or_round(dtype: str) -> ImageModel:
        model = load(spec.dtype if dtype == EIGHT_BITS else dtype)
        if dtype == EIGHT_BITS:
            round_to_eight_bits(model)
        return model

    causes, seen = likely_causes(load_or_round, rows, spec.sampling, spec.dtype, guided, audit["logp_nearest"])
    sampling = [f"guidance {spec.sampling.guidance:g}", f"temperature {spec.sampling.temperature:g}"]
    sampling += [f"{SAMPLING[name].name} {getattr(spec.sampling, name):g}" for name in spec.sampling.filters]
    claim = f"samples of {spec.model} at {', '.join(sampling)} ({audit['images']} images, {audit['tokens']:,} tokens)"
    gap, wrong = audit["agreement"].get("log p"), ""
    if gap and not audit["logp_fits"] and gap["rounding"] is None and 0 < gap["beyond"] < 0.5:
        wrong = f"of {gap['beyond']:.1%} of the tokens is not the model's; of the other tokens it is"
    if not causes and not audit["deviates"] and not audit["failed"]:
        unseen = f"a deviation of {audit['detectable']:.3f} per token would have been detected"
        return {"causes": [], "cause": None, "sentence": f"consistent with {claim}: {'; '.join([unseen, *seen])}"}
    if not causes and not audit["deviates"]:
        found = audit["logp_fits"]
        of_what = f"is {LOGP_KINDS[found].text}: --logp {found}" if found else wrong or "is of an unknown kind"
        return {"causes": [], "cause": None, "sentence": f"the tokens fit {claim}; the recorded log p {of_what}"}
    place = concentrated(load(spec.dtype).layout, values, _free(rows))
    where = f", most in {place}" if place else f", most at entropy {audit['entropy']}" if audit["entropy"] else ""
    why = named(causes, studied(rows)) if causes else "none of the causes that were tried"
    explains = causes[0].explains if causes else None
    if causes and causes[0].setting:
        cause, unknown = causes[0], rows if audit["logp_kind"] is None else rows.assign(logp=None)
        # Also try round values, which people type: an estimate from tokens is not precise enough to match log p.
        for value in dict.fromkeys((cause.exactly, *cause.round_values())):
            changed: dict[str, Any] = {str(cause.setting): value}
            if p := _fits(replace(spec, sampling=replace(spec.sampling, **changed)), unknown, load):
                label = cause.label if value == cause.exactly else f"{cause.setting} {value:g}"
                why += f"; with {label} the tokens are consistent (p = {p:.2g})"
                break
        explains = p is not None
    elif causes and causes[0].kind in SINGLE_TOKENS and audit["logp_kind"] is None and "log p" in audit["agreement"]:
        explains = False  # such causes do not change log p, but the recorded log p differs
    if wrong and (explains is False or not causes):
        why = f"some tokens were replaced, or are not samples of p: the recorded log p {wrong}"
    elif explains is False:
        why = f"none of the causes that were tried; the best of them does not explain all tokens: {why}"
    verdict = {"verdict": UNLIKELY} if audit["verdict"] == CONSISTENT else {}
    sentence = f"not {claim}{where}; likely cause: {why}"
    listed = [vars(cause) for cause in causes]
    return verdict | {"deviates": True, "failed": True, "causes": listed, "cause": why, "sentence": sentence}


def _fits(spec: RunSpec, rows: pd.DataFrame, load: FormatLoader) -> float | None:
    """The p-value if the tokens are samples under `spec` and the recorded log p, if any, is the model's; else None."""
    values, facts = _recomputed(spec, rows, load)
    result = audit_tokens(_tokens(rows, values), LEVEL)
    beyond = max(facts["impossible_by_rounding"], EDGES * result.tokens)
    fits = not result.deviates and facts["impossible_tokens"] <= beyond
    fits &= not any(column["differs"] for column in facts["agreement"].values())
    return result.tests[0].corrected if fits else None


def checkpoint_of(info: RunInfo, weights: str | None, revision: str | None) -> tuple[str | None, str | None]:
    """Return weights and revision for the recomputation: the arguments if given, else the values of the run."""
    source: Mapping[str, Any] = info.source if info.source and not weights else {}
    return weights or source.get("weights"), revision or source.get("revision")


def _with_values(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Rows with recorded values; a SpecbenchError if there are none."""
    recorded = rows["u_id"].notna()
    if not recorded.any():
        what = f"run '{folder.name}' lacks the recorded values that the audit tests"
        raise SpecbenchError(what, f"recompute them with the model: specbench audit --run {folder} --recompute")
    return rows[recorded].reset_index(drop=True)


def _tokens(rows: pd.DataFrame, values: Values) -> Tokens:
    """Input of the test: the values of the free slots, with their place in the window."""
    free = _free(rows)[0]
    place = _place(np.stack(rows["committed_step"]))
    u: dict[Order, np.ndarray] = {name: numbers[:, free].astype(float) for name, numbers in values.u.items()}
    return Tokens(u, None if place is None else place[:, free], values.entropy[:, free].astype(float))


def _described(info: RunInfo, result: RosenblattResult) -> dict[str, Any]:
    """The result as a flat dict.

    `verdict`: the last of CONSISTENT, UNLIKELY, DEVIATES, IMPOSSIBLE, OTHERS that applies; `deviates`: also True if
    tokens have p = 0; `failed`: the run is declared lossless but deviates, or its recorded values are not the model's;
    `tv, tv_low, tv_high`: lower bound on the mean total variation per token; `p_value`: the smallest corrected p-value;
    `order, kind, group`: of the test with this p-value; `place, entropy`: place in the window and range of entropy that
    deviate most, None if nothing deviates; `detectable`: see `specbench.stats.rosenblatt.detectable`."""
    decoder, worst = info.spec.decoder, result.tests[0]
    declared = Declared.LOSSLESS if decoder.lossless else Declared.LOSSY
    return {
        "run_id": info.run_id,
        "decoder": decoder.name,
        "declared": Declared.CLAIMED if info.spec.tokens_sha256 else declared,
        "verdict": DEVIATES if result.deviates else CONSISTENT,
        "deviates": result.deviates,
        "failed": result.deviates and bool(decoder.lossless or info.spec.tokens_sha256),
        "tv": result.deviation.value,
        "tv_low": result.deviation.low,
        "tv_high": result.deviation.high,
        "tv_order": PRINTED_ORDERS[result.deviation.order],
        "p_value": worst.corrected,
        "level": result.level,
        "order": PRINTED_ORDERS[worst.order],
        "kind": worst.kind,
        "group": worst.group,
        "place": _worst_group(result, "place"),
        "entropy": _worst_group(result, "entropy"),
        "detectable": result.detectable,
        "images": result.images,
        "tokens": result.tokens,
        "by_order": {
            PRINTED_ORDERS[name]: {"tv": bound.value, "tv_low": bound.low, "tv_high": bound.high}
            for name, bound in result.by_order.items()
        },
        "tests": [vars(test) | {"order": PRINTED_ORDERS[test.order]} for test in result.tests],
    }


def _worst_group(result: RosenblattResult, kind: str) -> str | None:
    """Group whose test of uniformity rejects with the smallest p-value."""
    failed = [test for test in result.tests if test.kind == kind and test.corrected < result.level]
    return failed[0].group if failed else None


def _stacked(rows: pd.DataFrame, names: Iterable[_Name]) -> dict[_Name, np.ndarray]:
    """Arrays [K, N] by column, NaN for images without values. A column without any values is omitted."""
    length, stacked = len(rows["tokens"].iloc[0]), dict[_Name, np.ndarray]()
    for name in names:
        if rows[name].notna().any():
            missing: np.ndarray = np.full(length, np.nan, np.float32)
            stacked[name] = np.stack([missing if values is None else values for values in rows[name]])
    return {name: column for name, column in stacked.items() if not np.isnan(column).all()}


def _place(steps: np.ndarray) -> np.ndarray | None:
    """[K, N] place of each slot in the window of its step; None if steps do not commit from the left."""
    if steps.ndim == 1 or (np.diff(steps, axis=1) < 0).any():
        return None
    return np.arange(steps.shape[1]) - np.stack([np.searchsorted(row, row) for row in steps])


def _recomputed(
    spec: RunSpec, rows: pd.DataFrame, load: FormatLoader, logp: str | None = None
) -> tuple[Values, dict[str, Any]]:
    """Values of a teacher-forced pass in the run's dtype, and the findings about the run.

    `impossible_tokens, impossible_images`: number of tokens with probability 0 given all earlier tokens, and of images
    with such tokens; `impossible_by_rounding`: how many of these tokens rounding explains (in a run with fewer bits all
    or none); `nll_gap, nll_gap_se`: see `_gap_of`, for the possible tokens; `agreement`: of recorded and recomputed
    values, as from `compare_recorded`, empty if the loop records none; `dtype`: number format of the
    recomputation; `logp_kind`: kind of another program's log p, one of `LOGP_KINDS`, None if unknown or not the forced
    kind; `logp_fits`: the kind that agrees; `logp_nearest`: the nearest kind for most tokens.

    Orders that need q are tested as recorded. Rounding changes p, and guidance multiplies the change. Exact samples of
    a run with fewer bits are therefore not samples of p recomputed with other shapes or in float32: their uniformity is
    tested with the recorded values, or by token id only."""
    recorded, free, model = rows["u_id"].notna(), _free(rows), load(spec.dtype)
    values, rounding = teacher_forced_values(model, rows, spec.sampling), None
    if spec.dtype != "float32":
        part = np.flatnonzero(recorded if recorded.any() else ~recorded)
        part = part[np.linspace(0, len(part) - 1, min(len(part), _CONTROL)).astype(int)]
        drawn = teacher_forced_values(model, rows.iloc[part], spec.sampling, draw=True)
        del model  # only one model at a time is in memory
        model = load("float32")
        exact = teacher_forced_values(model, rows.iloc[part], spec.sampling, drawn.tokens)
        rounding = Rounding(free[part], drawn, exact)
    impossible, stored = ~values.possible & free, _stacked(rows, COMPARED)
    explained = rounding is not None and rounding_explains(impossible, free, rounding)
    # A token at the edge of a filter counts as possible, but its log p here is -inf.
    gap, error = _gap_of(values.logp, values.entropy, free & np.isfinite(values.logp))
    compared: dict[str, Any] = {
        "impossible_tokens": int(impossible.sum()),
        "impossible_images": int(impossible.any(1).sum()),
        "impossible_by_rounding": int(impossible.sum()) if explained else 0,
        "nll_gap": gap,
        "nll_gap_se": error,
        "agreement": compare_recorded(stored, values, free, rounding),
        "dtype": spec.dtype,
        **dict.fromkeys(_KINDS),
    }
    if spec.tokens_sha256 and "logp" in stored:
        compared |= dict.fromkeys(_KINDS, SAMPLED)
        if logp or compared["agreement"]["log p"]["differs"]:
            control = None if rounding is None else (rows.iloc[part], rounding)
            compared |= _logp_kind(load, spec, rows, values, control, logp)
    orders = _stacked(rows, PRINTED_ORDERS)
    if rounding is None:
        return values._replace(u=orders | values.u), compared
    return values._replace(u=orders or {"u_id": values.u["u_id"]}), compared


def _logp_kind(
    load: FormatLoader,
    spec: RunSpec,
    rows: pd.DataFrame,
    values: Values,
    control: tuple[pd.DataFrame, Rounding] | None,
    forced: str | None,
) -> dict[str, Any]:
    """Return the entries of `_recomputed` about the kind of recorded log p. `forced`: the kind, if the user gave it;
    `control`: the images whose rounding was measured, and the rounding."""
    model = load(spec.dtype)
    if forced and LOGP_KINDS[forced].words and getattr(model, "vocabulary", None) is None:
        what = f"--logp {forced}: '{model.name}' has no logits of text tokens, which this kind of log p needs"
        raise SpecbenchError(what, "valid: raw, tempered")
    kinds = [*dict.fromkeys([forced or SAMPLED, *kinds_of(model, spec.sampling)])]
    found, rounded = log_p_of(model, rows, spec.sampling, kinds), {}
    if control:
        part, rounding = control
        drawn = log_p_of(model, part, spec.sampling, kinds, rounding.drawn.tokens)
        model = load("float32")
        exact = log_p_of(model, part, spec.sampling, kinds, rounding.drawn.tokens)
        for kind in kinds:
            pair = rounding.drawn._replace(logp=drawn[kind]), rounding.exact._replace(logp=exact[kind])
            rounded[kind] = Rounding(rounding.free, *pair)
    compared, away, (stored, free) = {}, {}, (_stacked(rows, ["logp"]), _free(rows))
    for kind, logp in found.items():
        compared[kind] = compare_recorded(stored, values._replace(logp=logp), free, rounded.get(kind))
        distance = typical_distance(stored["logp"], logp, free)
        away[kind] = (compared[kind]["log p"]["differs"], kind != forced, distance)
    nearest = min(kinds, key=lambda kind: away[kind])
    fits = None if away[nearest][0] else nearest
    kinds_found = {"logp_kind": fits if forced in (None, fits) else None, "logp_fits": fits, "logp_nearest": nearest}
    return {"agreement": compared[forced or nearest], **kinds_found}


def _under_other_target(
    info: RunInfo, rows: pd.DataFrame, weights: str | None, revision: str | None, device: str, dtype: str
) -> tuple[Values, dict[str, Any]]:
    """Like `_recomputed`, but with the weights before their rounding to eight bits."""
    spec = info.spec
    if dtype not in BYTES:
        raise SpecbenchError(f"--dtype {dtype}: unknown", f"valid: {', '.join(BYTES)}")
    if not ModelChoice.of_name(spec.model)[1].eight_bits:
        what = f"--dtype {dtype}: run '{info.run_id}' was not decoded with --dtype {EIGHT_BITS}"
        raise SpecbenchError(what, "omit --dtype: p is recomputed in the run's number format")
    model_of(spec, weights, revision)
    plain = recorded_model(spec.model.replace(f"+{EIGHT_BITS}", ""), weights, revision)
    values = teacher_forced_values(load_model(plain, device, dtype), rows, spec.sampling)
    impossible = (np.isneginf(values.logp) & _free(rows)).sum(1)
    counts = {"impossible_tokens": int(impossible.sum()), "impossible_images": int((impossible > 0).sum())}
    return values, {**counts, "impossible_by_rounding": 0, "agreement": {}}


def _free(rows: pd.DataFrame) -> np.ndarray:
    """[K, N] bool, slots that the grammar leaves free."""
    return ~np.stack(rows["forced"])


def _gap_of(logp: np.ndarray, entropy: np.ndarray, counted: np.ndarray) -> tuple[float, float | None]:
    """Mean of -log p minus mean entropy of the `counted` tokens [K, N], with its standard error over images."""
    excess = np.where(counted, -np.where(counted, logp, 0.0) - entropy, 0.0).sum(1)
    mean = float(excess.sum() / counted.sum())
    off = np.square(excess - mean * counted.sum(1)).sum()
    k = len(excess)
    return mean, float(math.sqrt(k / (k - 1) * off) / counted.sum()) if k > 1 else None


def model_of(spec: RunSpec, weights: str | None, revision: str | None) -> ModelFacts:
    """Load the run's model, whose files must be on this disk."""
    model = recorded_model(spec.model, weights, revision, plugin=spec.model_code is not None)
    model.files()  # raises an error if files are missing; large files are downloaded only on request
    if model.weights_sha256() != spec.weights_sha256:
        raise SpecbenchError(
            f"the weights of model '{model.name}' differ from the run's weights "
            f"({model.weights_sha256()[:12]}, not {spec.weights_sha256[:12]})",
            "name the run's checkpoint with --weights" if not weights else "",
        )
    if spec.model_code != ((code := model_code(model)) and code.digest):
        raise SpecbenchError(f"the code of model '{model.name}' differs from the run's code", "restore the run's code")
    return model
