"""`clip[VARIANT]`: mean cosine of CLIP's image and text embeddings (Hessel et al. 2021). The papers use two
incomparable variants: `b16` (SJD and its followers, printed times 100) and `b32+prefix` (LANTERN, Cool-SD)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.metrics import openclip
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import PerImageMetric, Sample, Settings, described
from specbench.metrics.openclip import center256

if TYPE_CHECKING:
    import torch

_PREFIX = "A photo depicts "


def as_saved(pixels: np.ndarray) -> np.ndarray:
    return pixels


def bilinear299(pixels: np.ndarray) -> np.ndarray:
    """Resize uint8 [H, W, 3] to [299, 299, 3] by bilinear interpolation without antialiasing, rounded to 8 bits."""
    import torch  # not needed if all images are scored
    from torch.nn import functional as F

    resized = F.interpolate(openclip.planes(pixels)[None], (299, 299), mode="bilinear", align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0).numpy()


@dataclass(frozen=True)
class Variant:
    """Variant of the CLIP score: a checkpoint of `published_weights`, a prefix of every caption, and the transform of
    the uint8 image before CLIP's own resize."""

    checkpoint: str
    prefix: str = ""
    prepare: Callable[[np.ndarray], np.ndarray] = as_saved


VARIANTS: Mapping[str, Variant] = {
    "b16": Variant("clip-b16"),
    "b16+299": Variant("clip-b16", prepare=bilinear299),
    "b32": Variant("clip-b32"),
    "b32+prefix": Variant("clip-b32", _PREFIX),
    "b32+prefix+center256": Variant("clip-b32", _PREFIX, center256),
    "l14": Variant("clip-l14"),
}


class CosineMetric(PerImageMetric):
    """Scaled cosine similarity of image and caption, by a network with open_clip's `encode_image` and `encode_text`.
    `tokenize` converts texts to ids (None: CLIP's tokenizer); `prefix` is prepended to every caption."""

    packages: ClassVar = openclip.OPENCLIP_PACKAGES
    network: torch.nn.Module
    tokenize: Any = None
    prefix = ""
    scale = 1.0

    def identity(self) -> Mapping[str, str]:
        resize = described("short side, Pillow bicubic, centre", openclip.short_side_centre)
        return {"resize": resize, **clip_versions()}

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        size = self.network.visual.image_size
        return openclip.normalised(openclip.short_side_centre(pixels, size[0] if isinstance(size, tuple) else size))

    def captions_cut(self, captions: Sequence[str]) -> tuple[int, int] | None:
        return None if self.tokenize else openclip.cut_by_clip([self.prefix + caption for caption in captions])

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        images = openclip.image_embeddings(self.network, self.preprocessed(samples), self.settings.device)
        captions = [self.prefix + sample.prompt for sample in samples]
        texts = openclip.text_embeddings(self.network, captions, self.settings.device, self.tokenize)
        return [{"value": value} for value in (self.scale * (images * texts).sum(1)).tolist()]


class Clip(CosineMetric):
    """CLIP score (Hessel et al. 2021, without their factor 2.5): cosine of image and caption, -1 to 1. Captions over 77
    tokens are truncated but keep the end token; a note reports this."""

    batch = 32

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.name = f"clip[{variant}]"
        self.variant = VARIANTS[variant]
        self.checkpoints, self.prefix = (self.variant.checkpoint,), self.variant.prefix

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": checkpoints.CHECKPOINTS[self.variant.checkpoint].digest,
            "prefix": self.variant.prefix,
            "prepare": described(self.variant.prepare.__name__, self.variant.prepare),
            **super().identity(),
        }

    @cached_property
    def network(self) -> torch.nn.Module:
        return openclip.load_openai(self.weights_file(self.variant.checkpoint), self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        return super().preprocess(self.variant.prepare(pixels))


def clip_versions() -> dict[str, str]:
    """Versions of the libraries that CLIP scores depend on."""
    return {"open_clip": version("open_clip_torch"), "torch": version("torch"), "pillow": version("pillow")}
