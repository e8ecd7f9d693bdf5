"""`shapes-clip`: cosine of image and caption under the small CLIP that the package brings for the `shapes` world.

It goes the way of the real ones, through open_clip, and its values compare with no other CLIP's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from specbench.metrics.base import Sample
from specbench.metrics.clip import clip_versions
from specbench.metrics.code_version import described
from specbench.metrics.openclip import (
    OPENCLIP_PACKAGES,
    Tokenize,
    folder_tokenizer,
    image_embeddings,
    load_folder_model,
    normalised,
    short_side_centre,
    text_embeddings,
)
from specbench.metrics.per_image import PerImageMetric
from specbench.metrics.shapes_requests import read_request
from specbench.models.shapes.network import WEIGHTS
from specbench.system.downloads import digest_of

FOLDER = WEIGHTS / "clip"


class ShapesClip(PerImageMetric):
    """CLIP score of the small CLIP of `shapes`: cosine of image and caption, -1 to 1."""

    name = "shapes-clip"
    summary = "cosine similarity of image and caption under the small CLIP of `shapes`, mean over images"
    batch = 64
    packages = OPENCLIP_PACKAGES

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": digest_of(FOLDER / "open_clip_model.safetensors"),
            "words": digest_of(FOLDER / "tokenizer.json"),
            "resize": described("short side, Pillow bicubic, centre", short_side_centre),
            **clip_versions(),
        }

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return read_request(meta) is not None

    @cached_property
    def network(self) -> torch.nn.Module:
        return load_folder_model(FOLDER, self.settings.device)

    @cached_property
    def tokenize(self) -> Tokenize:
        return folder_tokenizer(FOLDER)

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        return normalised(short_side_centre(pixels, self.network.visual.image_size))

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        device = self.settings.device
        images = image_embeddings(self.network, self.preprocessed(samples), device)
        texts = text_embeddings(self.network, [sample.prompt for sample in samples], device, self.tokenize)
        return [{"value": value} for value in (images * texts).sum(1).tolist()]
