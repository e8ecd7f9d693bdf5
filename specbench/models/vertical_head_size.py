"""Size of a vertical draft head, for training, memory estimates and forecasts. No torch here."""

from __future__ import annotations

LARGEST_LAYER = 1024
"""Most hidden units: each draft reads most layers again, so that they have to stay small beside the target."""
_INPUTS = 6
"""Features and embeddings that the head looks at."""


def vertical_hidden(width: int) -> int:
    """Hidden units of a new head for features of `width` numbers."""
    return min(3 * width, LARGEST_LAYER)


def vertical_weights(width: int) -> int:
    """Weights of that head, without biases."""
    hidden = vertical_hidden(width)
    return first_layer_weights(width) + hidden**2 + hidden * width


def first_layer_weights(width: int) -> int:
    """Its first layer, which is read once for a run of drafts."""
    return _INPUTS * width * vertical_hidden(width)


def draft_weights(width: int) -> int:
    """What is read again for each draft: the other layers, and the part of the first for the token before."""
    hidden = vertical_hidden(width)
    return 2 * width * hidden + hidden**2
