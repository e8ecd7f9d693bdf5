"""`shapes-frechet`: Frechet distance to true pictures of the same captions, in the features of a small network of the
`shapes` world.

The renderer draws the reference: every caption that was scored, equally often, from a fixed seed. The arithmetic is
FID's, the features are not, and its values compare with no FID.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from specbench.metrics.base import Metric, Sample, Score
from specbench.metrics.fid import fid_difference, fid_estimate, warn_of_few
from specbench.metrics.frechet import Gaussian
from specbench.metrics.inception_preprocessing import whole
from specbench.metrics.reference import ReferenceImages, damaged_features, feature_matrix, kept_features
from specbench.metrics.shapes_requests import read_request
from specbench.models.shapes import features, reading_order, render, scene
from specbench.stats import Difference
from specbench.system.downloads import digest_of
from specbench.system.json_values import parse_json

RENDERS = 2048
_SEED = 0


class ShapesFrechet(Metric):
    """Frechet distance between generated images and renders of their captions, or a folder of reference images; no
    interval up to 64 images."""

    name = "shapes-frechet"
    summary = (
        "Frechet distance to renders of the same captions in 64 features of a small network; no interval up to n = 64"
    )
    batch = 64
    columns: ClassVar = {"scene": pa.string(), "feature": pa.list_(pa.float32(), features.FEATURES)}

    def feature_identity(self) -> Mapping[str, str]:
        return {"weights": digest_of(features.FILE), "torch": torch.__version__}

    def identity(self) -> Mapping[str, str]:
        own = self.settings.reference
        return {**self.feature_identity(), **(ReferenceImages(self.settings).identity() if own else rendered())}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return read_request(meta) is not None

    @cached_property
    def network(self) -> torch.nn.Module:
        return features.load_features(self.settings.device)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        scenes = [json.dumps(sample.meta["scene"], sort_keys=True) for sample in samples]
        rows = self.extract([sample.pixels for sample in samples])
        return [{"scene": text, "feature": row} for text, row in zip(scenes, rows, strict=True)]

    @torch.inference_mode()
    def extract(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Extract features float32 [n, 64] of images uint8 [64, 64, 3]."""
        x_BCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        return self.network(x_BCHW.to(self.settings.device)).cpu().numpy()

    def reference_features(self, statistics: pd.DataFrame) -> Gaussian:
        """Features of renders of the scored captions, or of the user's folder."""
        if self.settings.reference:
            own = ReferenceImages(self.settings)
            return Gaussian(own.features(whole, self.extract, self.feature_identity(), self.batch))
        scenes = sorted({str(text) for text in statistics["scene"]})
        for text in scenes:
            _require_scene(text)
        key = [dict(self.feature_identity()), rendered(), scenes]
        return Gaussian(kept_features(key, lambda: self._of_renders(scenes)))

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if len(statistics) < 2:
            return []
        images = Gaussian(feature_matrix(statistics["feature"], features.FEATURES))
        distance = fid_estimate(images, self.reference_features(statistics), statistics["prompt_id"].to_list())
        return [Score(self.name, distance, images.n, warn_of_few(images))]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return fid_difference(features, baseline, self.reference_features(features))

    def _of_renders(self, scenes: Sequence[str]) -> np.ndarray:
        pictures = list(true_pictures(scenes, -(-RENDERS // len(scenes))))
        starts = range(0, len(pictures), self.batch)
        return np.concatenate([self.extract(pictures[start : start + self.batch]) for start in starts])


def _require_scene(text: str) -> None:
    """Refuse a stored scene that is not one of JSON."""
    try:
        sound = read_request({"scene": parse_json(text)}) is not None
    except ValueError:
        sound = False
    if not sound:
        raise damaged_features("a scene is malformed")


def true_pictures(scenes: Sequence[str], copies: int) -> Iterator[np.ndarray]:
    """Render each request in `scenes` (JSON) `copies` times, uint8 [64, 64, 3]; the renders of one request do not
    depend on the others."""
    for text in scenes:
        request = scene.SceneRequest.from_json(json.loads(text))
        rng = np.random.default_rng([_SEED, *hashlib.sha256(text.encode()).digest()])
        for _ in range(copies):
            yield render.render(reading_order.realize_in_order(request, rng))


def rendered() -> dict[str, str]:
    """Identity of the rendered reference, apart from the captions."""
    source = "".join(inspect.getsource(module) for module in (render, scene, reading_order))
    return {
        "reference": f"renders of the captions, {RENDERS} or a few more",
        "reference_seed": str(_SEED),
        "renderer": hashlib.sha256(source.encode()).hexdigest()[:16],
    }
