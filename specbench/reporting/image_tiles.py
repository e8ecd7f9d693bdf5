"""Images of a run with their numbers, scores and token maps.

A token map is a PNG with one pixel per token of the token grid. It shows the commit step or the origin (accepted draft
or sampled) of each token.
"""

import io
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import is_mean_of_images, read_scores
from specbench.store.image_scores import feature_place, stored_values
from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import IMAGE_TABLE, KEY, SAMPLES, TRACES, RowStatus, with_units
from specbench.store.token_sums import SUMS

_COLUMNS = (
    *("prompt", "status", "error", "nfe", "latency_ms", "image", "image_sha256"),
    *("forced", "committed_step", "accepted"),
)


@dataclass
class Tile:
    """An image of a run with its numbers."""

    problem: str | None = None  # reason for a missing image
    pixels: np.ndarray | None = None  # uint8 [H, W, 3]
    nfe: int | None = None  # target forwards; None if unknown
    latency_ms: float | None = None
    # steps, origins: token maps, see `commit_steps` and `origins`; None if the token grid is unknown
    steps: np.ndarray | None = None
    origins: np.ndarray | None = None
    scores: Mapping[str, float] = field(default_factory=dict)  # {metric: value}


@dataclass(frozen=True)
class Shown:
    """Text and category of a prompt."""

    text: str
    category: str | None


def first_prompts(folder: Path, limit: int) -> dict[str, Shown]:
    """Read the first prompts of a run as {prompt id: text and category}."""
    prompts: dict[str, Shown] = {}
    for piece in RunStore(folder).batches(["prompt", "category"]):
        rows = piece.filter(pc.equal(piece["sample"], 0)).slice(0, limit - len(prompts))
        columns = (rows[name].to_pylist() for name in ("prompt_id", "prompt", "category"))
        prompts |= {prompt: Shown(text, category) for prompt, text, category in zip(*columns, strict=True)}
        if len(prompts) >= limit:
            break
    return prompts


def tiles(folder: Path, prompts: Sequence[str], sample: int = 0) -> dict[str, Tile]:
    """Read the tiles of a run as {prompt id: tile}; prompts without a row are omitted."""
    scores: dict[str, dict[str, float]] = {}
    for (name, _), values in values_per_image(folder).items():  # of several fingerprints, the last edited
        shown = values[values["prompt_id"].isin(prompts) & (values["sample"] == sample)]
        for row in shown.itertuples(index=False):
            scores.setdefault(row.prompt_id, {})[name] = float(row.value)
    read: dict[str, Tile] = {}
    for piece in RunStore(folder).batches(_COLUMNS):
        here = pc.and_(pc.is_in(piece["prompt_id"], pa.array(prompts, pa.string())), pc.equal(piece["sample"], sample))
        for row in piece.filter(here).to_pandas().itertuples(index=False):
            read[row.prompt_id] = _tile(folder, row, scores.get(row.prompt_id, {}))
        if len(read) == len(set(prompts)):
            break
    return read


def _tile(folder: Path, row: Any, scores: Mapping[str, float]) -> Tile:
    if row.status != RowStatus.OK:
        return Tile(problem=f"failed: {row.error}")
    if not isinstance(row.image, str) or not os.path.lexists(folder / row.image):
        return Tile(problem="no image file")
    pixels = read_image(folder, row.image, row.image_sha256)
    counted = not pd.isna(row.nfe)  # for imported tokens, steps are unknown
    grid = grid_of(row.forced, pixels.shape[:2]) if counted else None
    return Tile(
        pixels=pixels,
        nfe=int(row.nfe) if counted else None,
        latency_ms=None if pd.isna(row.latency_ms) else float(row.latency_ms),
        steps=commit_steps(row.committed_step, row.forced, grid) if grid else None,
        origins=origins(row.committed_step, row.forced, row.accepted, grid) if grid else None,
        scores=scores,
    )


def sample_frame(folders: Sequence[Path]) -> pd.DataFrame:
    """Make a DataFrame with a row per image: columns of `specbench.store.schema.IMAGE_TABLE`, then one per metric: the
    values with the last edited code, or, if these have several fingerprints or a metric is called like another column,
    a column per fingerprint."""
    scored = [values_per_image(folder) for folder in folders]
    latest = {pair for values in scored for pair in dict(values.keys()).items()}
    several = {name for name, count in Counter(name for name, _ in latest).items() if count > 1} | {*IMAGE_TABLE.names}
    frames = []
    for folder, values in zip(folders, scored, strict=True):
        named = {f"{name} ({made})" if name in several else name: of for (name, made), of in values.items()}
        frames.append(_sample_rows(folder, named))
    frame = pd.concat(frames, ignore_index=True)
    metrics = [name for name in frame if name not in IMAGE_TABLE.names]
    return with_units(frame[[*IMAGE_TABLE.names, *metrics]], IMAGE_TABLE)


def _sample_rows(folder: Path, scored: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    names = [name for name in IMAGE_TABLE.names if name in SAMPLES.names]
    rows = RunStore(folder).samples([*names, "image", *SUMS.names])
    free, files = rows["free_tokens"].where(rows["free_tokens"] > 0), rows["image"]
    rows = rows.assign(
        tokens_per_step=rows["stream_tokens"] / rows["nfe"],
        logp_mean=rows["logp_sum"] / free,
        entropy_mean=rows["entropy_sum"] / free,
        path=[None if file is None else str(Path(folder) / file) for file in files],
    ).drop(columns=["image", *SUMS.names])
    for name, values in scored.items():
        named = values[[*KEY, "value"]].astype({"value": float}).rename(columns={"value": name})
        rows = rows.merge(named, on=list(KEY), how="left")
    return rows


def values_per_image(folder: Path) -> dict[tuple[str, str], pd.DataFrame]:
    """Map each metric with a value per image, and the fingerprint of the values, to a frame of `prompt_id, sample,
    category, value`. Of several fingerprints of a metric, the last edited is the last."""
    by_metric: dict[tuple[str, str], pd.DataFrame] = {}
    for score in sorted(read_scores(folder), key=lambda score: str(score["edited"] or "")):
        values = stored_values(feature_place(folder, f"{score['metric']}-{score['fingerprint']}"))
        if values is not None and (is_mean_of_images(score) or score["metric"] in metric_catalog.metric_names()):
            by_metric[str(score["metric"]), str(score["fingerprint"])] = values.dropna(subset=["value"])
    return by_metric


DRAWN, ACCEPTED = 0, 1
DRAWN_COLOUR, ACCEPTED_COLOUR = (224, 134, 42), (61, 139, 212)  # Distinguishable on light and dark backgrounds


def commit_steps(committed_step: Sequence[int], forced: Sequence[bool], grid: tuple[int, int]) -> np.ndarray:
    """Return for each image token the number (from 1) of the target forward that committed it; [height, width]."""
    return np.asarray(committed_step)[~np.asarray(forced, dtype=bool)].reshape(grid)


def origins(
    committed_step: Sequence[int], forced: Sequence[bool], accepted: Sequence[int] | None, grid: tuple[int, int]
) -> np.ndarray:
    """Return the origin of each image token: `ACCEPTED` draft, or `DRAWN` from p or a residual; [height, width].

    A step commits its accepted drafts and then one drawn token, but the last token of the image may be an accepted
    draft. The total of `accepted` (per window offset) shows which case it is. Without drafts, as in AR, every token was
    drawn.
    """
    step, free = np.asarray(committed_step), ~np.asarray(forced, dtype=bool)
    total = 0 if accepted is None else int(np.sum(accepted))
    if not total:
        return np.full(grid, DRAWN)
    kept: np.ndarray = np.append(step[1:] == step[:-1], False)
    kept[-1] = int(np.count_nonzero(kept & free)) < total
    return np.where(kept, ACCEPTED, DRAWN)[free].reshape(grid)


def grid_of(forced: Sequence[bool], pixels: tuple[int, int]) -> tuple[int, int] | None:
    """Infer height and width of the token grid from the number of free tokens and the height and width of the image in
    pixels; None if no integer grid fits. `forced`: [N] bool, tokens forced by the grammar."""
    free = int(np.size(forced) - np.count_nonzero(forced))
    height = round(math.sqrt(free * pixels[0] / pixels[1]))
    return (height, free // height) if height and free % height == 0 else None


def mean_map(folder: Path, quantity: str) -> np.ndarray | None:
    """Compute the mean over images at each grid position, [height, width]; NaN at positions without values. None if the
    run did not record the quantity, the token grid is unknown, or there were no drafts.

    `quantity`: "accepted" (whether the token is an accepted draft), "top1" (largest probability of the target),
    "entropy" (of the target, in nats), or of traced runs "draft_top1" (largest probability of the draft) and "draft_tv"
    (total variation of the two).
    """
    store, columns = RunStore(folder), ["status", "forced", "committed_step", "accepted", "image", "image_sha256"]
    columns += [quantity] if quantity in ("top1", "entropy") else []
    traces = store.traces() if quantity in TRACES.names else None
    if traces is not None and traces.empty:
        return None
    total, seen, grid = 0.0, 0, None
    for piece in store.batches(columns):  # in batches, for constant memory
        rows = piece.filter(pc.equal(piece["status"], RowStatus.OK)).to_pandas()
        rows = rows if traces is None else rows.merge(traces[[*KEY, quantity]], on=list(KEY))
        for row in rows.itertuples(index=False):
            if grid is None and row.image and os.path.lexists(folder / row.image):  # all images have the same shape
                grid = grid_of(row.forced, read_image(folder, row.image, row.image_sha256).shape[:2])
            if grid is None:
                return None
            if quantity == "accepted":
                values: np.ndarray = origins(row.committed_step, row.forced, row.accepted, grid).astype(float)
            else:
                free = ~np.asarray(row.forced, dtype=bool)
                values = np.asarray(getattr(row, quantity), dtype=float)[free].reshape(grid)
            mask = ~np.isnan(values)
            total, seen = total + np.where(mask, values, 0.0), seen + mask
    if grid is None or not np.any(seen) or (quantity == "accepted" and not np.any(total)):
        return None
    return np.divide(total, seen, out=np.full(grid, np.nan), where=seen > 0)


def step_picture(steps: np.ndarray) -> bytes:
    """Draw the commit step of each token (dark early, light late)."""
    from specbench.reporting.plotting import colormaps  # imported only if a picture is drawn

    shade = (steps - 1) / max(1, steps.max() - 1)
    return png((colormaps["viridis"](shade)[..., :3] * 255).astype(np.uint8))


def origin_picture(origins: np.ndarray) -> bytes:
    """Draw accepted drafts and sampled tokens in two colours."""
    return png(np.where((origins == ACCEPTED)[..., None], ACCEPTED_COLOUR, DRAWN_COLOUR).astype(np.uint8))


def share_picture(shares: np.ndarray) -> bytes:
    """Draw a fraction per grid position, from 0 (dark) to 1 (light); NaN is transparent."""
    from specbench.reporting.plotting import colormaps  # imported only if a picture is drawn

    return png(
        (colormaps["cividis"].with_extremes(bad=(0, 0, 0, 0))(np.ma.masked_invalid(shares)) * 255).astype(np.uint8)
    )


def png(pixels: np.ndarray) -> bytes:
    """Encode pixels as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()
