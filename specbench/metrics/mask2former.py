"""Instance segmentation by transformers' Mask2Former, post-processed as GenEval's own detector is: masks at full
resolution, boxes around them, score = class probability x mean mask probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics.openclip import centred, scaled

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORT, LONG, DIVISOR = 800, 1333, 32
MOST_INSTANCES = 100


@dataclass(frozen=True)
class Instance:
    """Detected instance: label, confidence, `box` x1, y1, x2, y2 in pixels, `mask` bool [H, W]."""

    label: str
    score: float
    box: tuple[int, int, int, int]
    mask: np.ndarray


def mask2former_input(pixels: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """Resize uint8 [H, W, 3] to float32 [3, h, w], padded right and below to multiples of 32; also the size before
    padding."""
    height, width = pixels.shape[:2]
    scale = min(SHORT / min(height, width), LONG / max(height, width))
    size = (int(height * scale + 0.5), int(width * scale + 0.5))
    resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    x_CHW = centred(scaled(np.asarray(resized)), MEAN, STD)
    return F.pad(x_CHW, (0, -size[1] % DIVISOR, 0, -size[0] % DIVISOR)), size


def instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    labels: Mapping[int, str],
    padded: Sequence[int],
    inner: Sequence[int],
    original: Sequence[int],
) -> list[Instance]:
    """Select the hundred best pairs of query and class.

    Args:
        class_logits: [Q, classes + 1], the last being "nothing".
        mask_logits: [Q, h, w] of the padded input at the network's own resolution.
        padded, inner, original: heights and widths of the padded input, of the picture in it, and of the picture.
    """
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
    found = [
        Instance(labels[kind], score, boxes[slot], seen[slot])
        for kind, slot, score in zip(label.tolist(), place.tolist(), scores, strict=True)
        if boxes[slot][2] > 0
    ]
    return sorted(found, key=lambda one: -one.score)


def _extent(marked: Tensor) -> tuple[Tensor, Tensor]:
    """First true index and the index after the last one in each row of bool [n, length]; both 0 in an empty row."""
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
        """Detect instances in each image uint8 [H, W, 3], best first; images of one size share a batch."""
        by_size = defaultdict(list)
        for number, pixels in enumerate(images):
            by_size[pixels.shape].append(number)
        found: list[list[Instance]] = [[] for _ in images]
        for numbers in by_size.values():
            inputs, inner = zip(*(mask2former_input(images[number]) for number in numbers), strict=True)
            output = self.network(torch.stack(inputs).to(self.device))
            for row, number in enumerate(numbers):
                found[number] = instances(
                    output.class_queries_logits[row], output.masks_queries_logits[row],
                    self.labels, inputs[row].shape[1:], inner[row], images[number].shape[:2],
                )  # fmt: skip
        return found
