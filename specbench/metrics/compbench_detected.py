"""Detector-based parts of T2I-CompBench++: objects by name from OWLv2 (Minderer et al. 2023), depth from Depth Anything
V2 (Yang et al. 2024). The paper's programs use UniDet, whose licence keeps it outside: OWLv2 sees other things with
other scores. Their own answers come by `specbench.metrics.official_exchange`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics import compbench_rules as rules
from specbench.metrics.base import Metric, Sample, Settings, described
from specbench.metrics.compbench import BlipVqa, CategoryMetric, CompBenchClip
from specbench.metrics.compbench_rules import distinct, overlap
from specbench.metrics.geneval import IMAGENET_MEAN, IMAGENET_STD
from specbench.metrics.geneval_rules import Found, details
from specbench.metrics.openclip import OPENCLIP_PACKAGES, centred, import_open_clip, scaled
from specbench.metrics.published_weights import folder_identity

OWLV2_REPOSITORY = "google/owlv2-base-patch16-ensemble"
QUERY = "a photo of a {name}"
QUERY_TOKENS = 16
DEPTH_REPOSITORY = "depth-anything/Depth-Anything-V2-Small-hf"
SHORT, PATCH = 518, 14
THRESHOLD, DUPLICATE = 0.2, 0.5  # Least score of a detection, and the overlap above which the better of two counts


def owlv2_input(pixels: np.ndarray, size: int) -> Tensor:
    """Pad uint8 [H, W, 3] with black to a square and resize to float32 [3, size, size], bilinear, antialiased."""
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
        if not (most := max(map(len, names), default=0)):
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
    objects = {}
    for column, name in enumerate(names):
        likely = (scores_PQ[:, column] > THRESHOLD).nonzero().squeeze(1).tolist()
        seen = [Found(tuple(corners[place].tolist()), scores_PQ[place, column].item()) for place in likely]
        objects[name] = distinct(seen, overlap, DUPLICATE)
    return objects


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
        depth = self.network(depth_input(pixels)[None].to(self.device)).predicted_depth[None]
        near = F.interpolate(depth, pixels.shape[:2], mode="bicubic", align_corners=False)[0, 0].cpu().numpy()
        low, high = near.min(), near.max()
        return (near - low) / (high - low) if high > low else np.zeros_like(near)


Seen = Mapping[str, Sequence[Found]]


class Detected(CategoryMetric):
    """Base class of metrics on OWLv2 detections; subclasses define queries and rules."""

    batch = 8
    columns: ClassVar = {"value": pa.float32(), "details": pa.string()}
    repositories: ClassVar[Mapping[str, str]] = {"detector": OWLV2_REPOSITORY}
    objects: ClassVar[str] = "first and last noun"  # where the objects that are looked for come from
    resizes: ClassVar[tuple[Callable, ...]] = (owlv2_input,)  # code that prepares an image for the networks
    packages: ClassVar = {**OPENCLIP_PACKAGES, **rules.SPACY_PACKAGES}

    def identity(self) -> Mapping[str, str]:
        weights = {
            name: folder_identity(self.network_folder(repository)) for name, repository in self.repositories.items()
        }
        return {
            **weights,
            "objects": self.objects,
            "query": QUERY,
            "threshold": f"{THRESHOLD}, duplicates above {DUPLICATE}",
            "resize": described("black to a square, tensor bilinear, antialiased", *self.resizes),
            **(rules.spacy_versions() if rules.SPACY_MODEL in self.packages else {}),
            **{package: version(package) for package in ("transformers", "torch", "pillow")},
            "open_clip": version("open_clip_torch"),
        }

    @cached_property
    def detector(self) -> Owl:
        return Owl(self.network_folder(OWLV2_REPOSITORY), self.settings.device)

    @cached_property
    def grammar(self) -> rules.Grammar:
        return rules.Grammar()

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        asked = [self.names(sample) for sample in samples]
        detected = self.detector([sample.pixels for sample in samples], asked)
        return [
            {"value": self.judge(sample, names, seen), "details": details(seen)}
            for sample, names, seen in zip(samples, asked, detected, strict=True)
        ]

    def names(self, sample: Sample) -> list[str]:
        """Queried objects: the first and the last noun of the prompt."""
        nouns = self.grammar.nouns(sample.prompt)
        return list(dict.fromkeys([nouns[0], nouns[-1]])) if nouns else []

    def judge(self, sample: Sample, names: Sequence[str], seen: Seen) -> float:
        raise NotImplementedError


class Spatial2d(Detected):
    """2D spatial relation of two objects."""

    name = "compbench[spatial-owlv2]"
    categories = ("spatial",)

    def judge(self, sample: Sample, names: Sequence[str], seen: Seen) -> float:
        asked = rules.relation(sample.prompt, rules.SPATIAL_RELATIONS)
        return rules.spatial(*_two_best(names, seen), asked, min(sample.pixels.shape[:2]))


class SpatialOfComplex(Spatial2d):
    """2D spatial relation of the two objects around the preposition of a complex prompt; 0 where there are not two."""

    categories = ("complex",)
    objects = "around the preposition"

    def names(self, sample: Sample) -> list[str]:
        return list(dict.fromkeys(rules.around_preposition(self.grammar.words(sample.prompt)) or ()))


class Spatial3d(Detected):
    """3D spatial relation of two objects."""

    name = "compbench[3d-spatial-owlv2]"
    categories = ("3d_spatial",)
    repositories: ClassVar = {"detector": OWLV2_REPOSITORY, "depth": DEPTH_REPOSITORY}
    resizes: ClassVar = (owlv2_input, depth_input)

    @cached_property
    def depth(self) -> Depth:
        return Depth(self.network_folder(DEPTH_REPOSITORY), self.settings.device)

    def judge(self, sample: Sample, names: Sequence[str], seen: Seen) -> float:
        near: list[np.ndarray] = []

        def nearness(box: rules.Box) -> float:
            if not near:
                near.append(self.depth(sample.pixels))
            return mean_in(near[0], box)

        return rules.spatial_3d(*_two_best(names, seen), rules.relation(sample.prompt, rules.DEPTH_SIGNS), nearness)


class Numeracy(Detected):
    """Counts of the objects that the prompt names."""

    name = "compbench[numeracy-owlv2]"
    categories = ("numeracy",)
    objects = "as counted in the prompt"
    packages = OPENCLIP_PACKAGES

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return super().accepts(category, meta) and bool(meta.get("counts"))

    def names(self, sample: Sample) -> list[str]:
        return list(sample.meta["counts"])

    def judge(self, sample: Sample, names: Sequence[str], seen: Seen) -> float:
        return rules.numeracy(sample.meta["counts"], seen)


class ThreeInOne(CategoryMetric):
    """3-in-1 score of complex prompts: mean of BLIP-VQA and, by the kind of the prompt, CLIP without adjectives, 2D
    spatial score, or both."""

    name = "compbench[3-in-1-owlv2]"
    categories = ("complex",)
    batch = 8
    columns: ClassVar = {"value": pa.float32(), **dict.fromkeys(("blip", "clip", "spatial"), pa.float32())}
    packages: ClassVar = {**OPENCLIP_PACKAGES, **rules.SPACY_PACKAGES}

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.parts: dict[str, Metric] = {
            "blip": BlipVqa(settings), "clip": CompBenchClip(settings), "spatial": SpatialOfComplex(settings)
        }  # fmt: skip
        self.checkpoints = tuple(file for part in self.parts.values() for file in part.checkpoints)
        self.repositories = {"detector": OWLV2_REPOSITORY}

    @cached_property
    def grammar(self) -> rules.Grammar:
        return rules.Grammar()

    def identity(self) -> Mapping[str, str]:
        return {f"{name}.{key}": value for name, part in self.parts.items() for key, value in part.identity().items()}

    def prepare(self) -> None:
        for part in self.parts.values():
            part.prepare()

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return super().accepts(category, meta) and str(meta.get("kind")) in rules.THREE_IN_ONE

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        plain = [replace(sample, prompt=self.grammar.without_adjectives(sample.prompt)) for sample in samples]
        rows: list[dict[str, object]] = [dict.fromkeys(self.columns) for _ in samples]
        by_sample = [rules.THREE_IN_ONE[sample.meta["kind"]] for sample in samples]
        for name, part in self.parts.items():
            needing = [number for number, parts in enumerate(by_sample) if name in parts]
            shown = [(plain if name == "clip" else samples)[number] for number in needing]
            for number, values in zip(needing, part.features(shown) if shown else (), strict=True):
                rows[number][name] = values["value"]
        for row, sample in zip(rows, samples, strict=True):
            row["value"] = rules.three_in_one(sample.meta["kind"], row)
        return rows


def mean_in(values: np.ndarray, box: rules.Box) -> float:
    """Mean of a map [H, W] inside a box, of at least one pixel."""
    height, width = values.shape
    x1, y1 = min(int(box[0]), width - 1), min(int(box[1]), height - 1)
    return float(values[y1 : max(y1 + 1, round(box[3])), x1 : max(x1 + 1, round(box[2]))].mean())


def _two_best(names: Sequence[str], seen: Seen) -> tuple[Found | None, Found | None]:
    """Best detection of the first and of the last name, which are one if the prompt names one object."""
    best = [next(iter(seen.get(name, ())), None) for name in names] or [None]
    return best[0], best[-1]
