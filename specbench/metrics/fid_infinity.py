"""FID extrapolated to infinitely many images, after Chong and Forsyth 2020.

The plug-in FID is too large by a term that is nearly proportional to 1/n. Halves of both sets have twice that term, so
that twice the FID of the whole sets less the mean FID of halves is free of it. Unlike in the paper the reference images
are halved as well, because they are no more than the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from specbench.metrics.frechet import Gaussian, frechet_distance

SPLITS = 4
_SEED = 0


@dataclass(frozen=True)
class Extrapolated:
    """Extrapolated FID with its 95 % interval, None where halves have no more images than dimensions.

    `bias` is the plug-in FID less the extrapolated one.
    """

    value: float
    low: float | None
    high: float | None
    bias: float


def fid_infinity(images: Gaussian, reference: Gaussian, prompts: Sequence[str], plug_in: float) -> Extrapolated | None:
    """Extrapolate `plug_in`, the FID of all images; None with less than four prompts or reference images.

    The interval takes the spread of the FID of a half, which is at least that of the extrapolated value, from the two
    halves of each of four random splits (t distribution of four degrees of freedom). Whole prompts go into a half.
    """
    rng = np.random.default_rng(_SEED)
    units = np.unique(np.asarray(prompts), return_inverse=True)[1]
    if units.max() < 3 or reference.n < 4:
        return None
    pairs = np.array([_halves(images, reference, units, rng) for _ in range(SPLITS)])
    value = 2 * plug_in - pairs.mean()
    low = high = None
    if min(images.n, reference.n) // 2 > images.d:
        spread = np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2 / 2))
        reach = stats.t.ppf(0.975, SPLITS) * spread
        low, high = float(value - reach), float(value + reach)
    return Extrapolated(float(value), low, high, float(plug_in - value))


def _halves(images: Gaussian, reference: Gaussian, units: np.ndarray, rng: np.random.Generator) -> list[float]:
    """FID of each half of the images to the half of the reference images that goes with it."""
    first = rng.permutation(units.max() + 1)[units] < (units.max() + 1) // 2
    ours = rng.permutation(reference.n) < reference.n // 2
    return [
        frechet_distance(Gaussian(images.features[half]), Gaussian(reference.features[other]))
        for half, other in ((first, ours), (~first, ~ours))
    ]
