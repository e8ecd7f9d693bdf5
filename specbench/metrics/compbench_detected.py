"""Detector-based parts of T2I-CompBench++, with a detector of transformers.

The paper's programs use UniDet, whose licence keeps it outside; OWLv2 sees other things with other scores, and asks
for the very words of the prompt. Their own answers come by `specbench.metrics.official_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import ClassVar

import numpy as np
import pyarrow as pa

from specbench.metrics import compbench_rules as rules
from specbench.metrics.base import Metric, Sample, Settings, described
from specbench.metrics.compbench import BlipVqa, CategoryMetric, CompBenchClip
from specbench.metrics.compbench_networks import (
    DEPTH_REPOSITORY,
    DUPLICATE,
    OWLV2_REPOSITORY,
    QUERY,
    THRESHOLD,
    Depth,
    Owl,
    depth_input,
    owlv2_input,
)
from specbench.metrics.geneval_rules import Found, details
from specbench.metrics.openclip import OPENCLIP_PACKAGES
from specbench.metrics.published_weights import folder_identity

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
        wanted = [rules.THREE_IN_ONE[sample.meta["kind"]] for sample in samples]
        for name, part in self.parts.items():
            needing = [number for number, parts in enumerate(wanted) if name in parts]
            shown = [(plain if name == "clip" else samples)[number] for number in needing]
            for number, found in zip(needing, part.features(shown) if shown else (), strict=True):
                rows[number][name] = found["value"]
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
