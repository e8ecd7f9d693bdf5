"""Pixels from a scene: anti-aliased objects on six kinds of muted background.

Object colors are saturated (or white); backgrounds are muted and never bright, so the detector can tell them apart.
"""

from __future__ import annotations

import numpy as np

from specbench.models.shapes.scene import SIZE, Item, Scene

RGB = {
    "red": (0.88, 0.14, 0.13),
    "yellow": (0.96, 0.84, 0.10),
    "green": (0.10, 0.68, 0.25),
    "blue": (0.12, 0.30, 0.90),
    "purple": (0.62, 0.18, 0.75),
    "white": (0.97, 0.97, 0.97),
}
GROUNDS = np.array(
    [
        (0.30, 0.34, 0.38),
        (0.50, 0.44, 0.36),
        (0.36, 0.38, 0.30),
        (0.42, 0.36, 0.38),
        (0.21, 0.21, 0.23),
        (0.44, 0.48, 0.51),
    ]
)
COLOR_JITTER = 0.03
GROUND_JITTER = 0.015
CROSS_ARM = 0.4
_Y, _X = np.mgrid[0:SIZE, 0:SIZE] + 0.5


def shape_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Signed distance in pixels, negative inside, of a shape centred at the origin with half side `radius`."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - radius
    if shape == "triangle":
        slanted = (2 * np.abs(x) - (y + radius)) / np.sqrt(5)
        return np.maximum(slanted, y - radius)
    if shape == "cross":
        arm = CROSS_ARM * radius
        upright = np.maximum(np.abs(x) - arm, np.abs(y) - radius)
        level = np.maximum(np.abs(x) - radius, np.abs(y) - arm)
        return np.minimum(upright, level)
    raise ValueError(f"unknown shape {shape!r}")


def coverage(item: Item) -> np.ndarray:
    """Share of each pixel that an object covers, float [64, 64] in 0..1."""
    return np.clip(0.5 - shape_distance(item.shape, _X - item.x, _Y - item.y, item.radius), 0, 1)


def render(scene: Scene) -> np.ndarray:
    """A scene as uint8 [64, 64, 3]; the same scene always gives the same pixels."""
    rng = np.random.default_rng(scene.seed)
    image = background(scene.texture, rng)
    for item in scene.items:
        color = np.array(RGB[item.color]) + rng.uniform(-COLOR_JITTER, COLOR_JITTER, 3)
        alpha = coverage(item)[..., None]
        image = image * (1 - alpha) + color * alpha
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def object_mask(scene: Scene) -> np.ndarray:
    """Share of each pixel covered by any object, float [64, 64]."""
    return np.max([coverage(i) for i in scene.items], axis=0)


def background(texture: str, rng: np.random.Generator) -> np.ndarray:
    """A background of the named texture, float [64, 64, 3] in 0..1."""
    first, second = GROUNDS[rng.permutation(len(GROUNDS))[:2]] + rng.uniform(-GROUND_JITTER, GROUND_JITTER, (2, 3))
    if texture == "smooth":
        return np.broadcast_to(first, (SIZE, SIZE, 3))
    if texture == "gradient":
        return _mix(first, second, _ramp(rng))
    if texture == "striped":
        return _mix(first, _accent(first), _stripes(rng))
    if texture == "checkered":
        cell = int(rng.choice((4, 8)))
        return _mix(first, _accent(first), ((_X // cell + _Y // cell) % 2))
    if texture == "cloudy":
        clouds = 0.6 * _value_noise(rng, 5) + 0.4 * _value_noise(rng, 12)
        return first + 0.11 * clouds[..., None] + 0.02 * _value_noise(rng, 32)[..., None]
    if texture == "grainy":
        grains = 0.075 * np.kron(rng.standard_normal((SIZE // 2, SIZE // 2, 1)), np.ones((2, 2, 1)))
        return first + np.clip(grains, -0.18, 0.18) + 0.02 * rng.standard_normal((SIZE, SIZE, 1))
    raise ValueError(f"unknown texture {texture!r}")


def _mix(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> np.ndarray:
    return first + (second - first) * share[..., None]


def _accent(color: np.ndarray) -> np.ndarray:
    return color + (0.13 if color.mean() < 0.40 else -0.13)


def _ramp(rng: np.random.Generator) -> np.ndarray:
    angle = rng.integers(8) * np.pi / 4
    along = _X * np.cos(angle) + _Y * np.sin(angle)
    return (along - along.min()) / np.ptp(along)


def _stripes(rng: np.random.Generator) -> np.ndarray:
    along = (_X, _Y, _X + _Y)[rng.integers(3)]
    return (along // 4) % 2


def _value_noise(rng: np.random.Generator, cells: int) -> np.ndarray:
    grid = rng.standard_normal((cells + 1, cells + 1))
    at = np.linspace(0, cells, SIZE, endpoint=False)
    low = at.astype(int)
    part = at - low
    part = part * part * (3 - 2 * part)
    rows = grid[low] * (1 - part)[:, None] + grid[low + 1] * part[:, None]
    return rows[:, low] * (1 - part) + rows[:, low + 1] * part
