"""Find the objects of a `shapes` image and judge them against a request: a pure function of pixels.

A pixel belongs to the nearest object color, if any is near enough; every connected patch of one color is compared
with the outline of each shape. The judgement follows GenEval: every clause must be found; surplus objects are forbidden
only if a clause requests several objects of a kind.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.models.shapes.render import RGB, shape_distance
from specbench.models.shapes.scene import COLORS, SHAPES, SIZE, SceneRequest, holds

NEAR = 0.28
MIN_AREA = 45
MIN_OVERLAP = 0.72
MAX_ASPECT = 1.5
_RASTER = 24
_Y, _X = (np.mgrid[:_RASTER, :_RASTER] + 0.5) * 2 - _RASTER
_OUTLINES = np.stack([shape_distance(shape, _X, _Y, _RASTER) < 0 for shape in SHAPES])
_PALETTE = np.array([RGB[name] for name in COLORS], np.float32)


@dataclass(frozen=True)
class Detection:
    shape: str
    color: str
    # x, y: centre of the bounding box, in pixels
    x: float
    y: float
    box: tuple[int, int, int, int]  # left, top, right, bottom, in pixels; right and bottom are exclusive
    overlap: float  # intersection over union with the outline of the shape


@dataclass(frozen=True)
class Judgement:
    """GenEval-like verdict. A field is None if the request mentions nothing of this kind."""

    correct: bool  # the image satisfies the whole request
    shape: bool  # every named shape is in the image
    color: bool | None  # every named color is in the image, on any shape
    bound: bool | None  # every named color is in the image on its shape
    count: bool  # every clause for several objects has exactly this number, every other clause at least one object
    position: bool | None  # every relation holds between found objects


def detect(image: np.ndarray) -> list[Detection]:
    """Find all objects of an image, uint8 [64, 64, 3]."""
    if image.shape != (SIZE, SIZE, 3) or image.dtype != np.uint8:
        raise ValueError(f"expected uint8 pixels of shape ({SIZE}, {SIZE}, 3), got {image.dtype} {image.shape}")
    pixels = image.astype(np.float32) / 255
    distance = np.linalg.norm(pixels[:, :, None] - _PALETTE, axis=-1)
    nearest = np.where(distance.min(-1) < NEAR, distance.argmin(-1), -1)
    detections = []
    for index, color in enumerate(COLORS):
        mask = nearest == index
        if mask.sum() < MIN_AREA:
            continue
        labels = connected(mask)
        for label, area in zip(*np.unique(labels[mask], return_counts=True), strict=True):
            if area >= MIN_AREA:
                detections.append(_recognize(labels == label, color))
    return [d for d in detections if d is not None]


def connected(mask: np.ndarray) -> np.ndarray:
    """Label the 4-connected patches of a mask, int [H, W]: 0 outside, a different positive label for each patch."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        grown = labels.copy()
        np.maximum(grown[1:], labels[:-1], out=grown[1:])
        np.maximum(grown[:-1], grown[1:], out=grown[:-1])
        np.maximum(grown[:, 1:], grown[:, :-1], out=grown[:, 1:])
        np.maximum(grown[:, :-1], grown[:, 1:], out=grown[:, :-1])
        grown *= mask
        if np.array_equal(grown, labels):
            return labels
        labels = grown


def judge(request: SceneRequest, detections: list[Detection]) -> Judgement:
    matches = [[d for d in detections if d.shape == c.shape and c.color in (None, d.color)] for c in request.clauses]
    shape = all(any(d.shape == c.shape for d in detections) for c in request.clauses)
    pairs = list(zip(request.clauses, matches, strict=True))
    count = all(len(m) == c.count if c.count > 1 else len(m) >= 1 for c, m in pairs)
    named = [(c, m) for c, m in pairs if c.color]
    color = all(any(d.color == c.color for d in detections) for c, _ in named) if named else None
    bound = all(bool(m) for _, m in named) if named else None
    position = None
    if request.relations:
        position = all(
            any(holds(name, a.x, a.y, b.x, b.y) for a in matches[i] for b in matches[j] if a is not b)
            for name, i, j in request.relations
        )
    return Judgement(count and position is not False, shape, color, bound, count, position)


def _recognize(patch: np.ndarray, color: str) -> Detection | None:
    rows: Any = np.flatnonzero(patch.any(1))
    columns: Any = np.flatnonzero(patch.any(0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = bottom - top, right - left
    if max(height, width) > MAX_ASPECT * min(height, width):
        return None
    raster = np.arange(_RASTER)
    seen = patch[top + raster * height // _RASTER][:, left + raster * width // _RASTER]
    overlaps = (seen & _OUTLINES).sum((1, 2)) / (seen | _OUTLINES).sum((1, 2))
    best = int(overlaps.argmax())
    if overlaps[best] < MIN_OVERLAP:
        return None
    box = (int(left), int(top), int(right), int(bottom))
    return Detection(SHAPES[best], color, (left + right) / 2, (top + bottom) / 2, box, float(overlaps[best]))
