"""Instance segmentation by transformers' Mask2Former, post-processed as GenEval's own detector is: masks at full
resolution, boxes around them, score = class probability x mean mask probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORT, LONG, DIVISOR = 800, 1333, 32
MOST_INSTANCES = 100


@dataclass(frozen=True)
class Instance:
    """`box` is x1, y1, x2, y2; `mask` bool [H, W]."""

    label: str
    score: float
    box: tuple[int, int, int, int]
    mask: np.ndarray


def network_input(pixels: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """uint8 [H, W, 3] to float32 [3, h, w] padded right and below to multiples of 32, and the size without padding."""
    height, width = pixels.shape[:2]
    scale = min(SHORT / min(height, width), LONG / max(height, width))
    size = (int(height * scale + 0.5), int(width * scale + 0.5))
    resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    x_CHW = torch.from_numpy(np.array(resized)).permute(2, 0, 1).to(torch.float32) / 255
    x_CHW = (x_CHW - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    return F.pad(x_CHW, (0, -size[1] % DIVISOR, 0, -size[0] % DIVISOR)), size


def instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    labels: Mapping[int, str],
    padded: Sequence[int],
    inner: Sequence[int],
    original: Sequence[int],
) -> list[Instance]:
    """The best hundred pairs of query and class.

    Args:
        class_logits: [Q, classes + 1], the last being "nothing".
        mask_logits: [Q, h, w] of the padded input at the network's own resolution.
        padded, inner, original: heights and widths of the padded input, of the picture in it, and of the picture.
    """  # fmt: skip
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
    found = [
        Instance(labels[int(kind)], score, _box(binary[slot]), binary[slot].numpy())
        for kind, slot, score in zip(label, place, scores, strict=True)
        if binary[slot].any()
    ]
    return sorted(found, key=lambda one: -one.score)


def _box(mask: Tensor) -> tuple[int, int, int, int]:
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


class Mask2Former:
    """A detector of the 80 COCO classes from a transformers checkpoint folder."""

    def __init__(self, folder: Path, device: str, labels: Mapping[int, str]):
        from transformers import Mask2FormerForUniversalSegmentation

        model = Mask2FormerForUniversalSegmentation.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.network = model.float().eval().requires_grad_(False).to(device)
        self.device, self.labels = device, labels

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> list[Instance]:
        """The instances of an image uint8 [H, W, 3], best first."""
        x_CHW, inner = network_input(pixels)
        output = self.network(x_CHW[None].to(self.device))
        return instances(
            output.class_queries_logits[0].float().cpu(), output.masks_queries_logits[0].float().cpu(),
            self.labels, x_CHW.shape[1:], inner, pixels.shape[:2],
        )  # fmt: skip
