"""Metrics of the `shapes` world, for images whose prompt has a `scene`: an exact detector, a small CLIP of open_clip,
and the Frechet distance on features of a small network. Reference images of the distance are renders of the scored
captions, equally many of each, from a fixed seed. Values are not comparable with other CLIPs or FID."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import SpecbenchError
from specbench.metrics.base import Metric, Sample, Score, Settings, category_scores, column_difference
from specbench.metrics.clip import CosineMetric
from specbench.metrics.distances import Gaussian
from specbench.metrics.fid import fid_difference, fid_estimate, joined, warn_of_few, warn_of_points
from specbench.metrics.openclip import Tokenize, folder_tokenizer, load_folder_model, whole
from specbench.metrics.reference import ReferenceImages, damaged_features, feature_matrix, kept_features
from specbench.models.shapes import FEATURE_FILE, FEATURES, WEIGHTS, detector, render, scene
from specbench.models.shapes.scene import SceneRequest
from specbench.stats import Difference
from specbench.system.digests import digest_of
from specbench.system.json_values import parse_json

if TYPE_CHECKING:
    import torch

# Imports inside functions: torch is not needed if all images are scored.

CLIP_FOLDER = WEIGHTS / "clip"
RENDERS = 2048
_SEED = 0
# Identities of detector and renderer, which a test pins. Change them if results change.
_DETECTOR, _RENDERER = "e2aadacd455f76e5", "a6f67b6da33bc51a"


class SceneMetric(Metric):
    """Base class of metrics of images whose prompt has a scene."""

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return read_request(meta) is not None


class ShapesDetector(SceneMetric):
    """`shapes-detector`: fraction of images that satisfy their caption, per category; overall: mean over categories."""

    name = "shapes-detector"
    kind = "proportions"
    batch = 16
    columns: ClassVar = {
        **dict.fromkeys(("correct", "shape", "color", "bound", "count", "position"), pa.bool_()),
        "objects": pa.int64(),
    }

    def identity(self) -> Mapping[str, str]:
        return {"detector": _DETECTOR, "image": "64x64, no resize"}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        return category_scores(self.name, statistics, "correct")

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return column_difference(features, baseline, "correct", by_category=True)

    def features_of(self, sample: Sample) -> dict[str, object]:
        objects = detector.detect(_of_size(self.name, sample.pixels))
        verdict = detector.judge(SceneRequest.from_json(sample.meta["scene"]), objects)
        return {**vars(verdict), "objects": len(objects)}


def _of_size(metric: str, pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    if height != scene.SIZE or width != scene.SIZE:
        what = f"{metric} reads images of {scene.SIZE} x {scene.SIZE} pixels, not of {width} x {height}"
        raise SpecbenchError(what, "choose another --metric; see: specbench list metrics")
    return pixels


class ShapesClip(SceneMetric, CosineMetric):
    """`shapes-clip`: cosine of image and caption under the small CLIP of `shapes`, -1 to 1."""

    name = "shapes-clip"
    batch = 64

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": digest_of(CLIP_FOLDER / "open_clip_model.safetensors"),
            "words": digest_of(CLIP_FOLDER / "tokenizer.json"),
            **super().identity(),
        }

    @cached_property
    def network(self) -> torch.nn.Module:
        return load_folder_model(CLIP_FOLDER, self.settings.device)

    @cached_property
    def tokenize(self) -> Tokenize:
        return folder_tokenizer(CLIP_FOLDER)


class ShapesFrechet(SceneMetric):
    """`shapes-frechet`: Frechet distance between generated images and renders of their captions, or a folder of
    reference images; no interval for at most 64 images."""

    name = "shapes-frechet"
    better, kind = "lower", "distance"
    batch = 64
    columns: ClassVar = {"scene": pa.string(), "feature": pa.list_(pa.float32(), FEATURES)}

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.reference = ReferenceImages(self.settings) if self.settings.reference else None

    def feature_identity(self) -> Mapping[str, str]:
        return {"weights": digest_of(FEATURE_FILE), "torch": version("torch")}

    def identity(self) -> Mapping[str, str]:
        return {**self.feature_identity(), **(self.reference.identity if self.reference else _rendered())}

    @cached_property
    def network(self) -> torch.nn.Module:
        from specbench.models.shapes.tokenizer import load_features

        return load_features(self.settings.device)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        scenes = [json.dumps(sample.meta["scene"], sort_keys=True) for sample in samples]
        rows = self.extract([_of_size(self.name, sample.pixels) for sample in samples])
        return [{"scene": text, "feature": row} for text, row in zip(scenes, rows, strict=True)]

    def extract(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Extract features float32 [n, 64] of images uint8 [64, 64, 3]."""
        import torch

        x_BCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        with torch.inference_mode():
            return self.network(x_BCHW.to(self.settings.device)).cpu().numpy()

    def reference_features(self, statistics: pd.DataFrame) -> Gaussian:
        """Compute the features of renders of the scored captions, or of the images in the user's folder."""
        if self.reference:
            return Gaussian(self.reference.features(whole, self.extract, self.feature_identity(), self.batch))
        scenes = sorted({str(text) for text in statistics["scene"]})
        try:
            sound = all(read_request({"scene": parse_json(text)}) for text in scenes)
        except ValueError:
            sound = False
        if not sound:
            raise damaged_features("a scene is malformed")
        key = [dict(self.feature_identity()), _rendered(), scenes]
        return Gaussian(kept_features(key, lambda: self._of_renders(scenes)))

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if len(statistics) < 2:
            return []
        images = Gaussian(feature_matrix(statistics["feature"], FEATURES))
        reference = self.reference_features(statistics)
        distance = fid_estimate(images, reference, statistics["prompt_id"].to_list())
        return [Score(self.name, distance, images.n, joined(warn_of_few(images), warn_of_points(images, reference)))]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return fid_difference(features, baseline, self.reference_features(features))

    def _of_renders(self, scenes: Sequence[str]) -> np.ndarray:
        pictures = list(true_pictures(scenes, -(-RENDERS // len(scenes))))
        starts = range(0, len(pictures), self.batch)
        return np.concatenate([self.extract(pictures[start : start + self.batch]) for start in starts])


def true_pictures(scenes: Sequence[str], copies: int) -> Iterator[np.ndarray]:
    """Render each of `scenes` (JSON) `copies` times as uint8 [64, 64, 3], independent of the other scenes."""
    for text in scenes:
        request = SceneRequest.from_json(json.loads(text))
        rng = np.random.default_rng([_SEED, *hashlib.sha256(text.encode()).digest()])
        for _ in range(copies):
            yield render.render(scene.realize_in_order(request, rng))


def _rendered() -> dict[str, str]:
    """Return the identity of the rendered reference images, without the captions."""
    return {
        "reference": f"renders of the captions, {RENDERS} or a few more",
        "reference_seed": str(_SEED),
        "renderer": _RENDERER,
    }


def read_request(meta: Mapping[str, Any]) -> SceneRequest | None:
    """Parse `scene` of a prompt's metadata, which is untrusted input; None if absent or malformed."""
    try:
        request = SceneRequest.from_json(meta["scene"])
        clauses, counts = request.clauses, [clause.count for clause in request.clauses]
        sound = (
            bool(clauses)
            and all(isinstance(count, int) and count >= 1 for count in counts)
            and sum(counts) <= scene.MAX_COUNT
            and all(clause.shape in scene.SHAPES and clause.color in (None, *scene.COLORS) for clause in clauses)
            and all(name in scene.RELATIONS and {i, j} <= set(range(len(clauses))) for name, i, j in request.relations)
            and request.texture in (None, *scene.TEXTURES)
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return request if sound else None
