"""`geneval[hf-m2f]`: GenEval's rules on detections of transformers' Mask2Former, with colours by CLIP. The official
detector has other weights; its scores are `geneval[official]` (`specbench.metrics.official_exchange`). Post-processing
is GenEval's: boxes around masks, score = class probability x mean mask probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics import openclip
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Metric, Sample, Score, category_scores, column_difference, described
from specbench.metrics.clip import clip_versions
from specbench.metrics.geneval_rules import GENEVAL_COLORS, TAGS, Found, confident, details, judge_image
from specbench.metrics.openclip import short_side_centre
from specbench.stats import Difference

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORT, LONG, DIVISOR = 800, 1333, 32
MOST_INSTANCES = 100
GENEVAL_REPOSITORY = "facebook/mask2former-swin-small-coco-instance"
RENAMED = {64: "computer mouse", 65: "tv remote", 66: "computer keyboard"}
BACKGROUND = 0x99
TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
KEPT_SCORE = 0.05  # Minimum score of stored detections; the rules only use scores above 0.3


class JudgedMetric(Metric):
    """Base class of metrics with a verdict per image: fraction of correct images per tag, and the unweighted mean over
    the six tags of GenEval. If tags are missing, the mean is named "metric:overall of N tags"."""

    kind = "proportions"
    columns: ClassVar = {"correct": pa.bool_(), "reason": pa.string(), "details": pa.string()}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return category is not None and "include" in meta

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        scores = category_scores(self.name, statistics, "correct")
        if scores and set(statistics["category"]) != set(TAGS):
            tags = f"{len(scores) - 1} tag{'s' if len(scores) > 2 else ''}"
            scores[0] = replace(scores[0], name=f"{self.name}:overall of {tags}")
        return scores

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return column_difference(features, baseline, "correct", by_category=True, all_of=TAGS)


class GenEval(JudgedMetric):
    """GenEval (Ghosh et al. 2023): detects objects, classifies the colours that the prompt names, applies the rules."""

    name = "geneval[hf-m2f]"
    batch = 4
    checkpoints = ("clip-l14",)
    repositories: ClassVar = {"detector": GENEVAL_REPOSITORY}
    packages = openclip.OPENCLIP_PACKAGES

    def identity(self) -> Mapping[str, str]:
        return {
            "detector": self.network_identity(GENEVAL_REPOSITORY),
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
        return openclip.load_openai(self.weights_file("clip-l14"), self.settings.device)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        detected = self.detector([sample.pixels for sample in samples])
        return [self._judge(sample, seen) for sample, seen in zip(samples, detected, strict=True)]

    def _judge(self, sample: Sample, detected: Sequence[Instance]) -> dict[str, object]:
        objects: dict[str, list[Found]] = {}
        for instance in detected:
            if instance.score > KEPT_SCORE:
                candidate = Found(instance.box, instance.score, partial(self.color, sample.pixels, instance))
                objects.setdefault(instance.label, []).append(candidate)
        verdict = judge_image(sample.meta, confident(objects, sample.category or ""))
        return {"correct": verdict.correct, "reason": "; ".join(verdict.reasons), "details": details(objects)}

    def color(self, pixels: np.ndarray, instance: Instance) -> str:
        """Classify the colour of an object, shown on a grey background, as one of `GENEVAL_COLORS`."""
        x1, y1, x2, y2 = instance.box
        alone = np.where(instance.mask[..., None], pixels, np.uint8(BACKGROUND))[y1:y2, x1:x2]
        size = self.clip.visual.image_size[0]
        scaled = openclip.normalised(short_side_centre(alone, size))
        seen = openclip.image_embeddings(self.clip, [scaled], self.settings.device)
        texts = [words.format(color=color, name=instance.label) for color in GENEVAL_COLORS for words in TEMPLATES]
        embeddings = openclip.text_embeddings(self.clip, texts, self.settings.device)
        means = embeddings.unflatten(0, (len(GENEVAL_COLORS), len(TEMPLATES))).mean(1)
        return GENEVAL_COLORS[int((means / means.norm(dim=1, keepdim=True) @ seen[0]).argmax())]


@dataclass(frozen=True)
class Instance:
    """Detected instance: label, confidence, `box` (x1, y1, x2, y2 in pixels), `mask` (bool [H, W])."""

    label: str
    score: float
    box: tuple[int, int, int, int]
    mask: np.ndarray


def mask2former_input(pixels: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """Resize uint8 [H, W, 3] to float32 [3, h, w], padded to multiples of 32; also return the size before padding."""
    height, width = pixels.shape[:2]
    scale = min(SHORT / min(height, width), LONG / max(height, width))
    size = (int(height * scale + 0.5), int(width * scale + 0.5))
    resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    x_CHW = openclip.centred(openclip.planes(np.asarray(resized)) / 255, IMAGENET_MEAN, IMAGENET_STD)
    return F.pad(x_CHW, (0, -size[1] % DIVISOR, 0, -size[0] % DIVISOR)), size


def instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    labels: Mapping[int, str],
    padded: Sequence[int],
    inner: Sequence[int],
    original: Sequence[int],
) -> list[Instance]:
    """Select the hundred best (query, class) pairs from class logits [Q, classes + 1] (the last class is "nothing") and
    mask logits [Q, h, w] of the padded input. `padded, inner, original`: heights and widths of the padded input, of the
    resized image in it, and of the original image."""
    probabilities = class_logits.softmax(-1)[:, :-1]
    classes = probabilities.shape[1]
    best = probabilities.flatten().topk(min(MOST_INSTANCES, probabilities.numel()))
    query, label = best.indices // classes, best.indices % classes
    used, place = query.unique(return_inverse=True)
    masks = F.interpolate(mask_logits[used][None], tuple(padded), mode="bilinear", align_corners=False)
    masks = masks[:, :, : inner[0], : inner[1]]
    masks = F.interpolate(masks, tuple(original), mode="bilinear", align_corners=False)[0]
    binary = masks > 0
    inside = (masks.sigmoid() * binary).flatten(1).sum(1) / (binary.flatten(1).sum(1) + 1e-6)
    scores = (best.values * inside[place]).tolist()
    (x1, x2), (y1, y2) = (_extent(binary.any(axis)) for axis in (1, 2))  # x2 is 0 for an empty mask
    boxes, seen = list(map(tuple, torch.stack([x1, y1, x2, y2], 1).tolist())), binary.cpu().numpy()
    pairs = [
        Instance(labels[kind], score, boxes[slot], seen[slot])
        for kind, slot, score in zip(label.tolist(), place.tolist(), scores, strict=True)
        if boxes[slot][2] > 0
    ]
    return sorted(pairs, key=lambda instance: -instance.score)


def _extent(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of bool [n, length] the first true index, and the last plus 1; both 0 if no value is true."""
    length = marked.shape[1]
    last = length - marked.flip(1).int().argmax(1)
    return marked.int().argmax(1), torch.where(marked.any(1), last, 0)


class Mask2Former:
    """Mask2Former (Cheng et al. 2022), detector of the 80 COCO classes, from a transformers checkpoint folder."""

    def __init__(self, folder: Path, device: str, labels: Mapping[int, str]):
        from transformers import Mask2FormerForUniversalSegmentation  # takes seconds

        model = Mask2FormerForUniversalSegmentation.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.network = model.float().eval().requires_grad_(False).to(device)
        self.device, self.labels = device, labels

    @torch.inference_mode()
    def __call__(self, images: Sequence[np.ndarray]) -> list[list[Instance]]:
        """Detect instances in each image uint8 [H, W, 3], best first; images of equal size share a batch."""
        by_size = defaultdict(list)
        for number, pixels in enumerate(images):
            by_size[pixels.shape].append(number)
        results: list[list[Instance]] = [[] for _ in images]
        for numbers in by_size.values():
            inputs, inner = zip(*(mask2former_input(images[number]) for number in numbers), strict=True)
            output = self.network(torch.stack(inputs).to(self.device))
            for row, number in enumerate(numbers):
                results[number] = instances(
                    output.class_queries_logits[row], output.masks_queries_logits[row],
                    self.labels, inputs[row].shape[1:], inner[row], images[number].shape[:2],
                )  # fmt: skip
        return results
