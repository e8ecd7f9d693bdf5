"""Networks of T2I-CompBench++'s detected parts through transformers: objects by name from OWLv2 (Minderer et al. 2023),
depth from Depth Anything V2 (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics.compbench_rules import distinct, overlap
from specbench.metrics.geneval import IMAGENET_MEAN, IMAGENET_STD
from specbench.metrics.geneval_rules import Found
from specbench.metrics.openclip import centred, import_open_clip, scaled

OWLV2_REPOSITORY = "google/owlv2-base-patch16-ensemble"
QUERY = "a photo of a {name}"
QUERY_TOKENS = 16
DEPTH_REPOSITORY = "depth-anything/Depth-Anything-V2-Small-hf"
SHORT, PATCH = 518, 14
THRESHOLD, DUPLICATE = 0.2, 0.5  # Least score of a detection, and the overlap above which the better of two counts


def owlv2_input(pixels: np.ndarray, size: int) -> Tensor:
    """Pad uint8 [H, W, 3] with black below or beside to a square and resize to float32 [3, size, size], bilinear,
    antialiased."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    square = F.pad(scaled(pixels), (0, side - width, 0, side - height))[None]
    return centred(F.interpolate(square, (size, size), mode="bilinear", align_corners=False, antialias=True)[0])


class Owl:
    """OWLv2 (Minderer et al. 2023), open-vocabulary detector, from a transformers checkpoint folder."""

    def __init__(self, folder: Path, device: str):
        from transformers import Owlv2ForObjectDetection  # takes seconds

        model = Owlv2ForObjectDetection.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.network = model.float().eval().requires_grad_(False).to(device)
        self.device = device

    @torch.inference_mode()
    def __call__(self, images: Sequence[np.ndarray], names: Sequence[Sequence[str]]) -> list[dict[str, list[Found]]]:
        """Detect the named objects in each image uint8 [H, W, 3], best first."""
        most = max(map(len, names), default=0)
        if not most:
            return [{} for _ in images]
        size = self.network.config.vision_config.image_size
        x_BCHW = torch.stack([owlv2_input(pixels, size) for pixels in images]).to(self.device)
        ids_BQT = torch.stack([_queries(asked, most) for asked in names]).to(self.device)
        output = self.network(
            pixel_values=x_BCHW, input_ids=ids_BQT.flatten(0, 1), attention_mask=(ids_BQT > 0).long().flatten(0, 1)
        )
        scores_BPQ, boxes_BP4 = output.logits.sigmoid().cpu(), output.pred_boxes.cpu()
        return [
            _named(asked, scores, boxes, pixels.shape[:2])
            for asked, scores, boxes, pixels in zip(names, scores_BPQ, boxes_BP4, images, strict=True)
        ]


def _queries(names: Sequence[str], rows: int) -> Tensor:
    """Tokenize queries to ids [rows, 16]; a row of zeros asks for nothing."""
    ids = torch.zeros(rows, QUERY_TOKENS, dtype=torch.long)
    if names:
        texts = [QUERY.format(name=name) for name in names]
        ids[: len(names)] = import_open_clip().tokenize(texts, context_length=QUERY_TOKENS)
    return ids


def _named(names: Sequence[str], scores_PQ: Tensor, boxes_P4: Tensor, shape: tuple[int, int]) -> dict[str, list[Found]]:
    """List the detections of one image by name, with boxes in its own pixels instead of shares of the padded square."""
    height, width = shape
    centre, size = boxes_P4[:, :2], boxes_P4[:, 2:]
    corners = torch.cat([centre - size / 2, centre + size / 2], 1) * max(shape)
    corners = corners.clamp(min=torch.zeros(4), max=torch.tensor([width, height, width, height]).float())
    found = {}
    for column, name in enumerate(names):
        likely = (scores_PQ[:, column] > THRESHOLD).nonzero().squeeze(1).tolist()
        seen = [Found(tuple(corners[place].tolist()), scores_PQ[place, column].item()) for place in likely]
        found[name] = distinct(seen, overlap, DUPLICATE)
    return found


def depth_input(pixels: np.ndarray) -> Tensor:
    """Resize uint8 [H, W, 3] to float32 [3, h, w]: short side 518, long side to whole patches, Pillow bicubic."""
    height, width = pixels.shape[:2]
    scale = SHORT / min(height, width)
    size = [PATCH * round(side * scale / PATCH) for side in (width, height)]
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    return centred(scaled(np.asarray(resized)), IMAGENET_MEAN, IMAGENET_STD)


class Depth:
    """Depth Anything V2 (Yang et al. 2024) from a transformers checkpoint folder."""

    def __init__(self, folder: Path, device: str):
        from transformers import DepthAnythingForDepthEstimation  # takes seconds

        model = DepthAnythingForDepthEstimation.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.network = model.float().eval().requires_grad_(False).to(device)
        self.device = device

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Estimate the nearness of each pixel of uint8 [H, W, 3]: float32 [H, W] from 0 (farthest) to 1 (nearest)."""
        found = self.network(depth_input(pixels)[None].to(self.device)).predicted_depth[None]
        near = F.interpolate(found, pixels.shape[:2], mode="bicubic", align_corners=False)[0, 0].cpu().numpy()
        low, high = near.min(), near.max()
        return (near - low) / (high - low) if high > low else np.zeros_like(near)
