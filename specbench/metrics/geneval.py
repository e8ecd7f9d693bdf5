"""`geneval[hf-m2f]`: GenEval's rules on detections of transformers' Mask2Former, colours by CLIP.

The detector has the architecture of the official one but other weights, so its scores stand in a column of their own;
`geneval[official]` are those of the official program, see `specbench.metrics.official_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Metric, Sample, Score, column_difference, described, paired_features, part_scores
from specbench.metrics.clip import clip_versions
from specbench.metrics.crops import short_side_centre
from specbench.metrics.geneval_rules import GENEVAL_COLORS, Found, confident, details, judge_image
from specbench.metrics.mask2former import Instance, Mask2Former, mask2former_input
from specbench.metrics.openclip import OPENCLIP_PACKAGES, image_embeddings, load_openai, normalised, text_embeddings
from specbench.metrics.published_weights import folder_identity
from specbench.stats import Difference, mean_of_estimates, proportion_interval

GENEVAL_REPOSITORY = "facebook/mask2former-swin-small-coco-instance"
RENAMED = {64: "computer mouse", 65: "tv remote", 66: "computer keyboard"}
BACKGROUND = 0x99
TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
KEPT_SCORE = 0.05
"""Detections below are not kept with the features; the rules use none below 0.3."""


TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""Of the benchmark; its overall score is the mean over these six."""


class JudgedMetric(Metric):
    """Base class of metrics with a verdict per image: fraction of correct images per tag, and the unweighted mean
    over the six tags. The mean over fewer or other tags has another name, "metric:overall of N tags"."""

    columns: ClassVar = {"correct": pa.bool_(), "reason": pa.string(), "details": pa.string()}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return category is not None and "include" in meta

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        parts = part_scores(self.name, statistics, "category", "correct", proportion_interval)
        if not parts:
            return []
        overall = mean_of_estimates([part.estimate for part in parts])
        whole = set(statistics["category"]) == set(TAGS)
        name = self.name if whole else f"{self.name}:overall of {len(parts)} tag{'s' if len(parts) > 1 else ''}"
        return [Score(name, overall, sum(part.n for part in parts)), *parts]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        common = paired_features(features, baseline, "correct", ["category"])
        if set(common["category"]) != set(TAGS):
            return None
        return column_difference(features, baseline, "correct", over_categories=True)


class GenEval(JudgedMetric):
    """GenEval (Ghosh et al. 2023): detect objects, classify colours where the prompt names them, apply the rules."""

    name = "geneval[hf-m2f]"
    batch = 4
    checkpoints = ("clip-l14",)
    repositories: ClassVar = {"detector": GENEVAL_REPOSITORY}
    packages = OPENCLIP_PACKAGES

    def identity(self) -> Mapping[str, str]:
        return {
            "detector": folder_identity(self.network_folder(GENEVAL_REPOSITORY)),
            "colors": checkpoints.CHECKPOINTS["clip-l14"].digest,
            "resize": described("short side 800, long side at most 1333, Pillow bilinear, padded", mask2former_input),
            **clip_versions(),
        }

    @cached_property
    def detector(self) -> Callable[[Sequence[np.ndarray]], list[list[Instance]]]:
        from transformers import AutoConfig  # takes seconds

        folder = self.network_folder(GENEVAL_REPOSITORY)
        labels = AutoConfig.from_pretrained(folder, local_files_only=True).id2label
        return Mask2Former(folder, self.settings.device, dict(labels) | RENAMED)

    @cached_property
    def clip(self) -> torch.nn.Module:
        return load_openai(self.weights_file("clip-l14"), self.settings.device)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        detected = self.detector([sample.pixels for sample in samples])
        return [self._judge(sample, found) for sample, found in zip(samples, detected, strict=True)]

    def _judge(self, sample: Sample, detected: Sequence[Instance]) -> dict[str, object]:
        objects: dict[str, list[Found]] = {}
        for one in detected:
            if one.score > KEPT_SCORE:
                found = Found(one.box, one.score, partial(self.color, sample.pixels, one))
                objects.setdefault(one.label, []).append(found)
        verdict = judge_image(sample.meta, confident(objects, sample.category or ""))
        return {"correct": verdict.correct, "reason": "; ".join(verdict.reasons), "details": details(objects)}

    def color(self, pixels: np.ndarray, instance: Instance) -> str:
        """Classify the colour of an object, masked on grey, as one of `GENEVAL_COLORS`."""
        x1, y1, x2, y2 = instance.box
        alone = np.where(instance.mask[..., None], pixels, np.uint8(BACKGROUND))[y1:y2, x1:x2]
        size = self.clip.visual.image_size[0]
        seen = image_embeddings(self.clip, [normalised(short_side_centre(alone, size))], self.settings.device)
        texts = [one.format(color=color, name=instance.label) for color in GENEVAL_COLORS for one in TEMPLATES]
        found = text_embeddings(self.clip, texts, self.settings.device)
        means = found.unflatten(0, (len(GENEVAL_COLORS), len(TEMPLATES))).mean(1)
        return GENEVAL_COLORS[int((means / means.norm(dim=1, keepdim=True) @ seen[0]).argmax())]
