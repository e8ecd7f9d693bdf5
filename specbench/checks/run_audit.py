"""Audit a stored run of any model: the Rosenblatt transform of its tokens, recorded while decoding or recomputed.

Recorded values rely on the decoder; recomputation feeds the finished tokens through the model once, teacher-forced in
float32, and relies on nothing but the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from specbench.errors import SpecbenchError
from specbench.models.catalog import load_model, recorded_model
from specbench.models.facts import ModelFacts
from specbench.specs.run_spec import RunSpec, Sampling
from specbench.stats.rosenblatt import LEVEL, Deviation, RosenblattResult, Tokens, audit_tokens
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
_TOLERANCE = 0.01
_COLUMNS = (
    *KEY,
    "prompt",
    "status",
    "started_at",
    "seed",
    "tokens",
    "forced",
    "committed_step",
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
) -> list[dict[str, object]]:
    """Test whether the tokens of runs are exact samples of their model, and store the verdicts for reports.

    Args:
        runs: run ids, unique beginnings of them, or folders; all runs in `out` if empty.
        recompute, weights, revision, device: as for `audit_run`.

    Returns:
        One dict per run, as of `audit_run`.

    Raises:
        SpecbenchError: an unknown or damaged run, or one that cannot be audited.
    """
    return [audit_run(folder, recompute, weights, revision, device) for folder in find_runs(out, runs)]


def audit_run(
    folder: Path | str,
    recompute: bool = False,
    weights: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    level: float = LEVEL,
    keep: bool = True,
) -> dict[str, object]:
    """Test whether the tokens of a run are exact samples of its model.

    Args:
        recompute: take p from the model instead of the recorded values.
        weights, revision: the checkpoint to recompute with, if it is no longer where the run found it.
        level: share of exact runs that are flagged.
        keep: store the result with the run, for reports.

    Returns:
        A flat dict: `run_id, decoder, declared, verdict` ("consistent" or "deviates"), `deviates, failed` (it claims
        to be lossless and deviates), `tv, tv_low, tv_high` (the lower bound on the mean total variation per token),
        `p_value` (smallest, corrected), `level, order, kind, group` (of the test with the smallest p-value),
        `place, entropy` (the place in the window and the range of entropy that deviate most, None where none does),
        `detectable` (see `specbench.stats.rosenblatt.detectable`), `images, tokens, tests, by_order`, `recomputed`,
        `unavailable` (orders without values), `agreement` (stored against recomputed, by order), and `fingerprint`
        (of the rows, see `specbench.store.run_audits`).

    Raises:
        SpecbenchError: no decoded images, no recorded values, other weights than the run's; exit code 5 where the
            model is not on this disk.
    """
    folder = Path(folder)
    store = RunStore(folder)
    info, rows = store.info(), _decoded(store)
    if recompute:
        values = _recomputed(info.spec, rows, *_checkpoint(info, weights, revision), device)
        stored = _stacked(rows, OF_TARGET)
        agreement = {name: _agreement(stored[name], values.u[name]) for name in stored}
    else:
        rows = _with_values(rows, folder)
        values, agreement = Values(_stacked(rows, PRINTED_ORDERS), np.stack(rows["entropy"])), {}
    try:
        result = audit_tokens(_tokens(rows, values), level)
    except ValueError as error:
        raise SpecbenchError(f"run '{folder.name}': {error} to test", "decode more images") from None
    described = _described(info, result) | {
        "recomputed": recompute,
        "unavailable": [PRINTED_ORDERS[name] for name in PRINTED_ORDERS if name not in values.u],
        "agreement": agreement,
        "fingerprint": images_fingerprint(rows),
    }
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
    """

    u: dict[str, np.ndarray]
    entropy: np.ndarray


def _decoded(store: RunStore) -> pd.DataFrame:
    """Rows of the decoded images, sorted by key; a SpecbenchError if there are none."""
    rows = store.samples(_COLUMNS)
    rows = rows[rows["status"] == "ok"].sort_values(list(KEY), ignore_index=True)
    if rows.empty:
        raise SpecbenchError(f"run '{store.folder.name}' has no decoded images to audit")
    return rows


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
    free = ~np.stack(rows["forced"])[0]
    place = _place(np.stack(rows["committed_step"]))
    u = {name: held[:, free].astype(float) for name, held in values.u.items()}
    return Tokens(u, None if place is None else place[:, free], values.entropy[:, free].astype(float))


def _described(info: RunInfo, result: RosenblattResult) -> dict[str, object]:
    decoder, worst = info.spec.decoder, result.tests[0]
    return {
        "run_id": info.run_id,
        "decoder": decoder.name,
        "declared": "lossless" if decoder.lossless else "lossy",
        "verdict": "deviates" if result.deviates else "consistent",
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
        "by_order": {PRINTED_ORDERS[name]: _bound(bound) for name, bound in result.by_order.items()},
        "tests": [vars(test) | {"order": PRINTED_ORDERS[test.order]} for test in result.tests],
    }


def _bound(bound: Deviation) -> dict[str, float | None]:
    return {"tv": bound.value, "tv_low": bound.low, "tv_high": bound.high}


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


def _agreement(stored: np.ndarray, recomputed: np.ndarray) -> dict[str, float]:
    """Mean difference between recorded and recomputed values, and the share of tokens beyond `_TOLERANCE`."""
    gap = np.abs(stored - recomputed)
    gap = gap[~np.isnan(gap)]
    if not len(gap):
        return {"mean": math.nan, "beyond": math.nan}
    return {"mean": float(gap.mean()), "beyond": float((gap > _TOLERANCE).mean())}


def _recomputed(spec: RunSpec, rows: pd.DataFrame, weights: str | None, revision: str | None, device: str) -> Values:
    """Values in the orders `OF_TARGET` from one teacher-forced pass."""
    from specbench.decoding.noise import Noise, row_key
    from specbench.decoding.uniforms import uniforms

    model = load_model(_model_of(spec, weights, revision), device, "float32")
    sampling, length = spec.sampling, model.layout.length
    width = max(1, min(length, _CHUNK // model.layout.vocab))
    batch = max(1, min(16, _CHUNK // (model.layout.vocab * width)))
    pieces = []
    for start in range(0, len(rows), batch):
        part = rows.iloc[start : start + batch]
        masses = [np.concatenate(held, 1) for held in zip(*_forced_masses(model, part, sampling, width), strict=True)]
        keys = [row_key(int(row.seed), row.prompt_id, int(row.sample)) for row in part.itertuples()]
        v = Noise(keys, model.layout.vocab).tie_break(_slots(len(part), 0, length)).numpy()
        pieces.append([uniforms(*masses[:2], v), uniforms(*masses[2:4], v), masses[4]])
    by_id, by_p, entropy = (np.concatenate(piece) for piece in zip(*pieces, strict=True))
    return Values({"u_id": by_id, "u_p": by_p}, entropy)


def _forced_masses(model, part: pd.DataFrame, sampling: Sampling, width: int) -> Iterator[list[np.ndarray]]:
    """For `width` slots at a time: masses before and through the tokens by id and by p, and the entropy, [B, width]."""
    import torch

    from specbench.decoding.sampling import Target, entropy
    from specbench.decoding.uniforms import mass_before, mass_before_id

    with torch.inference_mode():
        tokens = torch.from_numpy(np.stack(part["tokens"]).astype(np.int64)).to(model.device)
        consumed = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
        session = model.begin(model.encode(part["prompt"].tolist()), sampling.guidance, width)
        target = Target(model.layout, sampling, model.device)
        for start in range(0, tokens.shape[1], width):
            end = min(start + width, tokens.shape[1])
            positions = _slots(len(part), start, end).to(model.device)
            p = target(session.forward(consumed[:, start:end], positions), positions)
            chosen = tokens[:, start:end]
            masses = (*mass_before_id(p, chosen), *mass_before(p, p, chosen), entropy(p))
            yield [mass.cpu().numpy() for mass in masses]


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
