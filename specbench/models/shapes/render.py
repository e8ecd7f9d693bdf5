"""Pixels from a scene: anti-aliased objects on dark cards, on six kinds of muted background.

Object colors are saturated (or white); backgrounds are muted and never bright, so that the detector can distinguish
them. Four backgrounds consist of whole 4 x 4-pixel tokens without noise. Two have noise in a part of the picture:
clouds in the upper part, grain in the lower part.
"""

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
GROUNDS = np.array([(0.33, 0.37, 0.41), (0.50, 0.44, 0.36), (0.36, 0.39, 0.31), (0.44, 0.40, 0.43), (0.45, 0.49, 0.52)])
CARD = np.array((0.10, 0.10, 0.12))
TOKEN = 4
NOISY_ROWS = (6, 11)
CROSS_ARM = 0.4
_Y, _X = np.mgrid[0:SIZE, 0:SIZE] + 0.5


def shape_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Return the signed distance in pixels, negative inside, to a shape at the origin with half side `radius`."""
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
    """Return the share of each pixel that an object covers, float [64, 64] in 0..1."""
    return np.clip(0.5 - shape_distance(item.shape, _X - item.x, _Y - item.y, item.radius), 0, 1)


def render(scene: Scene) -> np.ndarray:
    """Render a scene as uint8 [64, 64, 3]. The same scene always gives the same pixels."""
    image = background(scene.texture, np.random.default_rng(scene.seed)).copy()
    for item in scene.items:
        left, top, right, bottom = item.card
        image[top:bottom, left:right] = CARD
        alpha = coverage(item)[..., None]
        image = image * (1 - alpha) + np.array(RGB[item.color]) * alpha
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def background(texture: str, rng: np.random.Generator) -> np.ndarray:
    """Draw a background of the named texture, float [64, 64, 3] in 0..1."""
    color, rows = ground(rng)
    flat = np.broadcast_to(color, (SIZE, SIZE, 3))
    if texture == "smooth":
        return flat
    if texture == "gradient":
        along = (_X, SIZE - _X, _Y, SIZE - _Y)[rng.integers(4)]
        return color + ((along // TOKEN) / (SIZE // TOKEN - 1) - 0.5)[..., None] * 0.3
    if texture == "striped":
        return _mix(color, _accent(color), ((_X, _Y)[rng.integers(2)] // TOKEN) % 2)
    if texture == "checkered":
        cell = int(rng.choice((4, 8)))
        return _mix(color, _accent(color), ((_X // cell + _Y // cell) % 2))
    if texture == "cloudy":
        clouds = 0.09 * _value_noise(rng, 5) + 0.04 * _value_noise(rng, 16) + 0.05 * _grains(rng)
        return np.where((rows * TOKEN > _Y)[..., None], color + np.clip(clouds, -0.2, 0.2)[..., None], flat)
    if texture == "grainy":
        grains = 0.05 * _value_noise(rng, 16) + 0.07 * _grains(rng)
        return np.where((SIZE - rows * TOKEN <= _Y)[..., None], color + np.clip(grains, -0.2, 0.2)[..., None], flat)
    raise ValueError(f"unknown texture {texture!r}")


def ground(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Draw the background's color, and the height of its noisy part in token rows."""
    return GROUNDS[rng.integers(len(GROUNDS))], int(rng.integers(NOISY_ROWS[0], NOISY_ROWS[1] + 1))


def _mix(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> np.ndarray:
    return first + (second - first) * share[..., None]


def _accent(color: np.ndarray) -> np.ndarray:
    return color + (0.13 if color.mean() < 0.40 else -0.13)


def _grains(rng: np.random.Generator) -> np.ndarray:
    return np.kron(rng.standard_normal((SIZE // 2, SIZE // 2)), np.ones((2, 2)))


def _value_noise(rng: np.random.Generator, cells: int) -> np.ndarray:
    grid = rng.standard_normal((cells + 1, cells + 1))
    at = np.linspace(0, cells, SIZE, endpoint=False)
    low = at.astype(int)
    part = at - low
    part = part * part * (3 - 2 * part)
    rows = grid[low] * (1 - part)[:, None] + grid[low + 1] * part[:, None]
    return rows[:, low] * (1 - part) + rows[:, low + 1] * part
