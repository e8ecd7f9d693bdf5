"""A draft head's distance to its target, measured on true images."""

from __future__ import annotations

from pathlib import Path

from specbench.models.catalog import find_model
from specbench.models.transformer.model import TransformerModel
from specbench.training.data import check_counts, corpus
from specbench.training.head import head_kind


def check_alignment(
    model: TransformerModel, head: str, data: Path | None, images: int, depths: int, seed: int, kind: str = "eagle"
) -> list[dict[str, object]]:
    """Measure a head on images of a run folder, or of the model's training data, at the model's official sampling.

    Args:
        head: folder or hub id; the model's own head if empty.
        seed: of the selection of images.
        kind: of head, a name of `specbench.training.head.KINDS`.

    Returns:
        As `specbench.training.alignment` has it.

    Raises:
        SpecbenchError: a number below 1, no such kind or head, or too few images.
    """
    check_counts(images=images, depths=depths)
    known = head_kind(kind)
    loaded = known.load(model, head)
    found = corpus(model, images, seed, data)
    return known.distances(model, loaded, found, find_model(model.name).sampling(), depths)
