"""The plain SJD loop that steps are timed against samples the model's distribution exactly."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from scipy.stats import chisquare

SOURCE = (Path(__file__).parents[2] / "dev" / "speed" / "plain_sjd.py").read_text()
LENGTH, WINDOW, IMAGES = 5, 3, 4000
# Row: the token before; the last row starts an image.
P = torch.tensor([[0.3, 0.7], [0.2, 0.8], [0.75, 0.25]], dtype=torch.float64)


class Bigram:
    """A session whose next token depends on the token before."""

    def forward(self, tokens, positions):
        return P.log()[torch.where(positions > 0, tokens, 2)]


def p_value(source: str) -> float:
    """Chi-square p-value of whole images against their exact probabilities."""
    module: dict[str, Callable] = {}
    exec(source, module)
    images = list(product(range(2), repeat=LENGTH))
    exact = [P[[2, *image[:-1]], list(image)].prod().item() for image in images]
    counts = dict.fromkeys(images, 0)
    for seed in range(IMAGES):
        counts[tuple(module["plain_sjd"](Bigram(), LENGTH, WINDOW, 2, 2, seed).tolist())] += 1
    return chisquare(list(counts.values()), [IMAGES * share for share in exact]).pvalue


def test_plain_loop_is_exact():
    assert p_value(SOURCE) > 1e-3


def test_a_replacement_drawn_from_p_is_seen():
    wrong = SOURCE.replace("(p[accepted] - q[n]).clamp(min=0)", "p[accepted]")
    assert wrong != SOURCE
    assert p_value(wrong) < 1e-6
