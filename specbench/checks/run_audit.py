"""Audit a stored run of any model: the Rosenblatt transform of its tokens, recorded while decoding or recomputed.

Recorded values rely on the decoder; recomputation feeds the finished tokens through the model once, teacher-forced in
the run's number format with the whole context, and relies on nothing but the tokens. It also compares what was recorded
with what it finds, and counts tokens that the target cannot draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from specbench.errors import SpecbenchError
from specbench.models.catalog import load_model, recorded_model
from specbench.models.facts import BYTES, EIGHT_BITS, ModelChoice, ModelFacts
from specbench.models.interface import ImageModel
from specbench.specs.run_spec import RunSpec, Sampling
from specbench.stats.rosenblatt import LEVEL, RosenblattResult, Tokens, audit_tokens
from specbench.store.run_audits import images_fingerprint, write_audit
from specbench.store.run_folders import find_runs
from specbench.store.run_info import RunInfo
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY

# Imports inside functions: torch takes seconds, and only numbers that are computed anew need it.

PRINTED_ORDERS = {
    "u_id": "token id",
    "u_p": "p descending",
    "u_pq": "p/q descending",
    "u_qq": "q/q of the step before, descending",
}
"""Printed names of the orders of the vocabulary; see `specbench.decoding.generation.ORDERS`."""
OF_TARGET = ("u_id", "u_p")
"""Orders that need the model and the tokens alone."""
_CHUNK = 2**24
"""Maximum number of probabilities in memory while recomputing."""
CONSISTENT, DEVIATES = "consistent", "deviates"
IMPOSSIBLE = "impossible tokens"
OTHERS = "recorded p is not the model's"
_TOLERANCE = 0.01
"""Difference of a float32 run's recorded value to the recomputed one, in nats or of u, that rounding never makes."""
_BEYOND = 0.001
"""Share of the tokens of a float32 run that may be beyond it: a token at the edge of top-p falls to either side."""
_CONTROL = 16
"""Images of a run of fewer bits that are also recomputed in float32: how far rounding alone moves values."""
_ROUNDING = 1.5
"""Mean distance of such a run's values to those recomputed, in its dtype or in float32, over that between these two,
that rounding never makes: of two independent roundings it is the square root of 2."""
_EDGE = 0.001
"""A token of a float32 run is possible if it is with this many nats more, and with so much more top-p."""
_COLUMNS = (
    *KEY,
    "prompt",
    "status",
    "started_at",
    "seed",
    "tokens",
    "forced",
    "committed_step",
    "logp",
    "entropy",
    *PRINTED_ORDERS,
)


def audit_runs(
    runs: Sequence[str] = (),
    out: str | Path = "results",
    recompute: bool = False,
    weights: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> list[dict[str, object]]:
    """Test whether the tokens of runs are exact samples of their model, and store the verdicts for reports.

    Args:
        runs: run ids, unique beginnings of them, or folders; all runs in `out` if empty.
        recompute, weights, revision, device, dtype: as for `audit_run`.

    Returns:
        One dict per run, as of `audit_run`.

    Raises:
        SpecbenchError: an unknown or damaged run, or one that cannot be audited.
    """
    folders = find_runs(out, runs)
    return [audit_run(folder, recompute, weights, revision, device, dtype=dtype) for folder in folders]


def audit_run(
    folder: Path | str,
    recompute: bool = False,
    weights: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    level: float = LEVEL,
    keep: bool = True,
    dtype: str | None = None,
) -> dict[str, object]:
    """Test whether the tokens of a run are exact samples of its model.

    Args:
        recompute: take p from the model instead of the recorded values.
        weights, revision: the checkpoint to recompute with, if it is no longer where the run found it.
        level: share of exact runs that are flagged.
        keep: store the result with the run, for reports; never that of another target.
        dtype: of a run in eight bits, recompute p with the same weights in this number format ("float32", "bfloat16" or
            "float16") instead: how far is its target from that one?

    Returns:
        A flat dict: `run_id, decoder, declared, verdict` (CONSISTENT, DEVIATES, IMPOSSIBLE or OTHERS, the last that
        holds), `deviates` (so do tokens of probability 0), `failed` (it claims to be lossless and deviates, or what it
        recorded is not the model's), `tv, tv_low, tv_high` (the lower bound on the mean total variation per token),
        `p_value` (smallest, corrected), `level, order, kind, group` (of the test with the smallest p-value),
        `place, entropy` (the place in the window and the range of entropy that deviate most, None where none does),
        `detectable` (see `specbench.stats.rosenblatt.detectable`), `images, tokens, tests, by_order`, `recomputed`,
        `target` (`dtype`, or None for the run's own), `unavailable` (orders without values), `fingerprint` (of the
        rows, see `specbench.store.run_audits`), and where
        p was recomputed: `impossible_tokens, impossible_images, impossible_by_rounding` (tokens of probability 0 given
        all tokens before them, the images with one, and how many of a run of fewer bits are no verdict),
        `nll_gap, nll_gap_se` (of the possible tokens, in nats), `agreement` (of recorded values with those recomputed,
        by value: mean distance `mean`, the share `beyond` 0.01, `differs`, and of a run of fewer bits the mean
        distances `from_float32` of the recorded values and `rounding` of those recomputed, else None; empty where the
        loop records none), `dtype` (in which it was).

    Raises:
        SpecbenchError: no decoded images, no recorded values, other weights than the run's; exit code 5 where the
            model is not on this disk.
    """
    folder = Path(folder)
    store = RunStore(folder)
    info, rows = store.info(), store.samples(_COLUMNS)
    rows = rows[rows["status"] == "ok"].sort_values(list(KEY), ignore_index=True)
    if rows.empty:
        raise SpecbenchError(f"run '{folder.name}' has no decoded images to audit")
    found: dict[str, object] = {}
    if dtype:
        values, found = _under_other_target(info, rows, *_checkpoint(info, weights, revision), device, dtype)
    elif recompute:
        values, found = _recomputed(info.spec, rows, *_checkpoint(info, weights, revision), device)
    else:
        rows = _with_values(rows, folder)
        values = Values(_stacked(rows, PRINTED_ORDERS), np.stack(rows["entropy"]))
    try:
        result = audit_tokens(_tokens(rows, values), level)
    except ValueError as error:
        raise SpecbenchError(f"run '{folder.name}': {error} to test", "decode more images") from None
    described = _described(info, result) | {
        "recomputed": recompute or dtype is not None,
        "target": dtype,
        "unavailable": [PRINTED_ORDERS[name] for name in PRINTED_ORDERS if name not in values.u],
        "fingerprint": images_fingerprint(rows),
        **found,
    }
    if dtype:
        return described | {"failed": False}  # it claims to be an exact sampler of its own target alone
    if found.get("impossible_tokens", 0) > found.get("impossible_by_rounding", 0):
        described |= {"verdict": IMPOSSIBLE, "deviates": True, "failed": described["declared"] == "lossless"}
    if any(held["differs"] for held in found.get("agreement", {}).values()):
        described |= {"verdict": OTHERS, "failed": True}
    if keep:
        write_audit(folder, described)
    return described


def _checkpoint(info: RunInfo, weights: str | None, revision: str | None) -> tuple[str | None, str | None]:
    """Weights and revision to recompute with: those given, else those that the run recorded."""
    source = info.source if info.source and not weights else {}
    return weights or source.get("weights"), revision or source.get("revision")


class Values(NamedTuple):
    """What the test reads of K images of N stream slots.

    Attributes:
        u: [K, N] uniforms of the Rosenblatt transform by order, NaN where an image has none.
        entropy: [K, N] of p.
        logp: [K, N] of the tokens under p.
        possible: [K, N] bool, whether the target can draw the token.
    """

    u: dict[str, np.ndarray]
    entropy: np.ndarray
    logp: np.ndarray | None = None
    possible: np.ndarray | None = None


def _with_values(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Rows with recorded values; a SpecbenchError if there are none."""
    recorded = rows["u_id"].notna()
    if not recorded.any():
        raise SpecbenchError(
            f"run '{folder.name}' was decoded without the recorded values that the audit tests",
            f"recompute them from the model: specbench audit --run {folder} --recompute",
        )
    return rows[recorded].reset_index(drop=True)


def _tokens(rows: pd.DataFrame, values: Values) -> Tokens:
    """Input of the test: the values of the free slots, with their place in the window."""
    free = _free(rows)[0]
    place = _place(np.stack(rows["committed_step"]))
    u = {name: held[:, free].astype(float) for name, held in values.u.items()}
    return Tokens(u, None if place is None else place[:, free], values.entropy[:, free].astype(float))


def _described(info: RunInfo, result: RosenblattResult) -> dict[str, object]:
    decoder, worst = info.spec.decoder, result.tests[0]
    return {
        "run_id": info.run_id,
        "decoder": decoder.name,
        "declared": "lossless" if decoder.lossless else "lossy",
        "verdict": DEVIATES if result.deviates else CONSISTENT,
        "deviates": result.deviates,
        "failed": result.deviates and bool(decoder.lossless),
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
    """The group whose test of uniformity rejects with the smallest p-value."""
    found = [test for test in result.tests if test.kind == kind and test.corrected < result.level]
    return found[0].group if found else None


def _stacked(rows: pd.DataFrame, names: Iterable[str]) -> dict[str, np.ndarray]:
    """[K, N] by order, NaN for images without it; an order that no image has is left out."""
    length, found = len(rows["tokens"].iloc[0]), {}
    for name in names:
        if rows[name].notna().any():
            missing = np.full(length, np.nan, np.float32)
            found[name] = np.stack([missing if one is None else one for one in rows[name]])
    return found


def _place(steps: np.ndarray) -> np.ndarray | None:
    """[K, N] place of each slot in the window of the step that committed it; None where steps do not commit from the
    left."""
    if (np.diff(steps, axis=1) < 0).any():
        return None
    return np.arange(steps.shape[1]) - np.stack([np.searchsorted(row, row) for row in steps])


def _recomputed(
    spec: RunSpec, rows: pd.DataFrame, weights: str | None, revision: str | None, device: str
) -> tuple[Values, dict[str, object]]:
    """Values of a teacher-forced pass in the run's dtype, and what they say of the run (see `audit_run`).

    Rounding moves p, most where guidance multiplies it, so that exact samples of a run of fewer bits are none of p
    recomputed in other shapes or in float32: their uniformity is tested by the recorded values, or by token id alone.
    """
    facts, recorded = _model_of(spec, weights, revision), rows["u_id"].notna()
    control: dict[str, np.ndarray] = {}
    apart: dict[str, np.ndarray] = {}
    part = rows[recorded] if recorded.any() else rows
    part = part.iloc[:: -(-len(part) // _CONTROL)]
    if spec.dtype != "float32":  # before the run's own model, so that one at a time is in memory
        exact = _compared(teacher_forced_values(load_model(facts, device, "float32"), part, spec.sampling))
        apart = _gaps(_stored(part), exact, _free(part)) if recorded.any() else {}
    model = load_model(facts, device, spec.dtype)
    if spec.dtype != "float32":
        control = _gaps(_compared(teacher_forced_values(model, part, spec.sampling)), exact, _free(part))
    edge = max((float(gap[np.isfinite(gap)].max()) for gap in control.values()), default=_EDGE)
    values = teacher_forced_values(model, rows, spec.sampling, edge)
    free, agreement = _free(rows), {}
    for name, gap in (_gaps(_stored(rows), _compared(values), free) if recorded.any() else {}).items():
        held = {"mean": _mean(gap), "beyond": float((gap > _TOLERANCE).mean()), "from_float32": None, "rounding": None}
        differs = held["beyond"] > _BEYOND
        if control:
            held |= {"from_float32": _mean(apart[name]), "rounding": _mean(control[name])}
            differs = max(held["mean"], held["from_float32"]) > _ROUNDING * held["rounding"]
            differs |= np.isinf(apart[name]).sum() > _lost_by_rounding(control[name], control[name].size)
            differs &= name != "u_p"  # rounding swaps ranks of p: its mean distance varies too much to judge
        agreement[_COMPARED[name]] = held | {"differs": bool(differs)}
    impossible = (~values.possible & free).sum(1)
    # A token at the edge is possible, but has no log p here.
    gap, error = _gap_of(values.logp, values.entropy, free & np.isfinite(values.logp))
    if control:
        by_id = {"u_id": values.u["u_id"]}
        values = values._replace(u=_stacked(rows, PRINTED_ORDERS) if recorded.all() else by_id)
    by_rounding = _lost_by_rounding(control["logp"], int(free.sum())) if control else 0
    return values, {
        "impossible_tokens": int(impossible.sum()),
        "impossible_images": int((impossible > 0).sum()),
        "impossible_by_rounding": by_rounding,
        "nll_gap": gap,
        "nll_gap_se": error,
        "agreement": agreement,
        "dtype": spec.dtype,
    }


def _under_other_target(
    info: RunInfo, rows: pd.DataFrame, weights: str | None, revision: str | None, device: str, dtype: str
) -> tuple[Values, dict[str, object]]:
    """Values of a teacher-forced pass with the weights of a run in eight bits as they were before, and what they say of
    the run (see `audit_run`)."""
    spec = info.spec
    if dtype not in BYTES:
        raise SpecbenchError(f"--dtype {dtype}: unknown", f"valid: {', '.join(BYTES)}")
    if not ModelChoice.of_name(spec.model)[1].eight_bits:
        what = f"--dtype {dtype}: run '{info.run_id}' was not decoded with --dtype {EIGHT_BITS}"
        raise SpecbenchError(what, "omit it: such runs are recomputed in their own number format")
    _model_of(spec, weights, revision)
    plain = recorded_model(spec.model.replace(f"+{EIGHT_BITS}", ""), weights, revision)
    values = teacher_forced_values(load_model(plain, device, dtype), rows, spec.sampling)
    impossible = (np.isneginf(values.logp) & _free(rows)).sum(1)
    counts = {"impossible_tokens": int(impossible.sum()), "impossible_images": int((impossible > 0).sum())}
    return values, {**counts, "impossible_by_rounding": 0, "agreement": {}}


_COMPARED = {"logp": "log p", "u_id": "u by token id", "u_p": "u by p descending"}
"""Printed names of the recorded values that are compared with those recomputed."""


def _compared(values: Values) -> dict[str, np.ndarray]:
    return {"logp": values.logp, **values.u}


def _stored(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    return {"logp": np.stack(rows["logp"]), **_stacked(rows, OF_TARGET)}


def _free(rows: pd.DataFrame) -> np.ndarray:
    """[K, N] bool, slots that the grammar leaves free."""
    return ~np.stack(rows["forced"])


def _gaps(some: dict[str, np.ndarray], others: dict[str, np.ndarray], free: np.ndarray) -> dict[str, np.ndarray]:
    """Distances of the values of `free` slots that both have, by name; infinite where one p of the two is 0."""
    found = {}
    for name in some:
        with np.errstate(invalid="ignore"):
            gap = np.where(some[name] == others[name], 0.0, np.abs(some[name] - others[name]))
        found[name] = gap[free & ~np.isnan(gap)]
    return found


def _lost_by_rounding(control: np.ndarray, tokens: int) -> int:
    """Most of so many tokens that rounding takes out of a target's support or brings into it; 3 more than the control
    showed are the upper limit of a count of 0."""
    return int(_ROUNDING * (np.isinf(control).sum() + 3) * tokens / control.size)


def _mean(gap: np.ndarray) -> float:
    return float(gap[np.isfinite(gap)].mean())


def _gap_of(logp: np.ndarray, entropy: np.ndarray, counted: np.ndarray) -> tuple[float, float | None]:
    """Mean of -log p minus mean entropy of the `counted` tokens [K, N], with its standard error over images."""
    excess = np.where(counted, -np.where(counted, logp, 0.0) - entropy, 0.0).sum(1)
    mean = float(excess.sum() / counted.sum())
    off = np.square(excess - mean * counted.sum(1)).sum()
    k = len(excess)
    return mean, float(math.sqrt(k / (k - 1) * off) / counted.sum()) if k > 1 else None


def teacher_forced_values(model: ImageModel, rows: pd.DataFrame, sampling: Sampling, edge: float = _EDGE) -> Values:
    """Values in the orders `OF_TARGET`, log p and possible tokens, each token given all tokens before it.

    Args:
        rows: K images: the key, `seed`, `prompt`, `tokens`.
        edge: a token is possible if it is with so many nats more, and with so much more top-p.
    """
    from specbench.decoding.noise import Noise, row_key
    from specbench.decoding.uniforms import uniforms

    length = model.layout.length
    width = max(1, min(length, _CHUNK // model.layout.vocab))
    batch = max(1, min(16, _CHUNK // (model.layout.vocab * width)))
    pieces = []
    for start in range(0, len(rows), batch):
        part = rows.iloc[start : start + batch]
        masses = [
            np.concatenate(held, 1) for held in zip(*_forced_masses(model, part, sampling, width, edge), strict=True)
        ]
        keys = [row_key(int(row.seed), row.prompt_id, int(row.sample)) for row in part.itertuples()]
        v = Noise(keys, model.layout.vocab).tie_break(_slots(len(part), 0, length)).numpy()
        pieces.append([uniforms(*masses[:2], v), uniforms(*masses[2:4], v), *masses[4:]])
    by_id, by_p, entropy, logp, possible = (np.concatenate(piece) for piece in zip(*pieces, strict=True))
    return Values({"u_id": by_id, "u_p": by_p}, entropy, logp, possible)


def _forced_masses(
    model: ImageModel, part: pd.DataFrame, sampling: Sampling, width: int, edge: float
) -> Iterator[list[np.ndarray]]:
    """For `width` slots at a time: masses before and through the tokens by id and by p, entropy, log p, and whether the
    tokens are possible, [B, width]."""
    import torch

    from specbench.decoding.sampling import Target, at, entropy
    from specbench.decoding.uniforms import mass_before, mass_before_id

    with torch.inference_mode():
        tokens = torch.from_numpy(np.stack(part["tokens"]).astype(np.int64)).to(model.device)
        consumed = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
        session = model.begin(model.encode(part["prompt"].tolist()), sampling.guidance, width)
        target = Target(model.layout, sampling, model.device)
        # At most half of what top-p leaves out, so that something is left out.
        wider = replace(sampling, top_p=sampling.top_p + min(edge, (1 - sampling.top_p) / 2))
        loose = Target(model.layout, wider, model.device)
        for start in range(0, tokens.shape[1], width):
            end = min(start + width, tokens.shape[1])
            positions = _slots(len(part), start, end).to(model.device)
            logits = session.forward(consumed[:, start:end], positions).float()
            p, chosen = target(logits, positions), tokens[:, start:end]
            masses = (*mass_before_id(p, chosen), *mass_before(p, p, chosen), entropy(p), at(p, chosen).log())
            own = chosen.clamp(max=logits.shape[-1] - 1)[..., None]
            raised = logits.scatter_add(-1, own, torch.full_like(own, edge, dtype=logits.dtype))
            yield [mass.cpu().numpy() for mass in (*masses, at(loose(raised, positions), chosen) > 0)]


def _slots(rows: int, start: int, end: int):
    import torch

    return torch.arange(start, end).expand(rows, -1)


def _model_of(spec: RunSpec, weights: str | None, revision: str | None) -> ModelFacts:
    """The run's model, its files on this disk."""
    model = recorded_model(spec.model, weights, revision)
    model.files()  # raises where they are not: nothing of this size is downloaded unasked
    if model.weights_sha256() != spec.weights_sha256:
        raise SpecbenchError(
            f"model '{model.name}' has other weights here than in the run "
            f"({model.weights_sha256()[:12]}, not {spec.weights_sha256[:12]})",
            "name the run's checkpoint with --weights" if not weights else "",
        )
    return model
