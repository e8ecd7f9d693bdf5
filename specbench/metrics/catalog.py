"""Metrics by name, without importing their code: the built-in table, and what installed plug-ins add."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from specbench.errors import unknown_name
from specbench.system.plugins import load_object, plugins


class MetricEntry(NamedTuple):
    """A metric before its code is imported.

    `variant` is handed to the class first, where one class has several; `bundled` ones need nothing from outside
    and are computed unless others are named.
    """

    target: str
    summary: str
    variant: str | None = None
    bundled: bool = False


_FRONT_ENDS = {
    "pytorch-fid": "bilinear",
    "tf1": "bilinear of TensorFlow 1",
    "tm-aa": "antialiased bilinear",
    "clean": "Pillow bicubic",
}


_FID = "distance to the reference images in Inception features, {} to 299{}; KID beside it"


_CLIP = "cosine of image and caption under CLIP {}, mean over images"


_CLIPS = {
    "b16": "ViT-B/16",
    "b16+299": "ViT-B/16, images first squashed to 299 by bilinear interpolation",
    "b32": "ViT-B/32",
    "b32+prefix": 'ViT-B/32, captions after "A photo depicts"',
    "b32+prefix+center256": 'ViT-B/32, captions after "A photo depicts", images cropped to the middle 256 square',
    "l14": "ViT-L/14",
}


_CROPS = {"": "", "+center256": " after cropping to the middle 256 square"}


METRICS: dict[str, MetricEntry] = {
    "shapes-detector": MetricEntry(
        "specbench.metrics.shapes_detector:ShapesDetector",
        "share of images in which the exact detector finds what the caption asked for, mean over categories",
        bundled=True,
    ),
    "shapes-clip": MetricEntry(
        "specbench.metrics.shapes_clip:ShapesClip",
        "cosine of image and caption under the small CLIP of the shapes world, mean over images",
        bundled=True,
    ),
    "shapes-frechet": MetricEntry(
        "specbench.metrics.shapes_frechet:ShapesFrechet",
        "Frechet distance to renders of the same captions in a small network's 64 features; no interval up to n = 64",
        bundled=True,
    ),
    **{
        f"fid[{front_end}{crop}]": MetricEntry(
            "specbench.metrics.fid:Fid", _FID.format(resize, cropped), f"{front_end}{crop}"
        )
        for front_end, resize in _FRONT_ENDS.items()
        for crop, cropped in _CROPS.items()
    },
    "cmmd[l14-336]": MetricEntry(
        "specbench.metrics.clip:Cmmd",
        "squared MMD to the reference images in CLIP ViT-L/14 embeddings (unbiased, Gaussian kernel, x 1000)",
    ),
    **{
        f"clip[{variant}]": MetricEntry("specbench.metrics.clip:Clip", _CLIP.format(network), variant)
        for variant, network in _CLIPS.items()
    },
    **{
        f"hpsv2[{variant}]": MetricEntry(
            "specbench.metrics.hpsv2:Hpsv2", f"human preference score {variant}, mean over images", variant
        )
        for variant in ("v2.1", "v2.0")
    },
    "imagereward": MetricEntry(
        "specbench.metrics.imagereward:ImageReward", "learned human preference, mean reward over images"
    ),
    "geneval[hf-m2f]": MetricEntry(
        "specbench.metrics.geneval:GenEval",
        "share of images in which transformers' Mask2Former finds what GenEval asked for, mean over tags",
    ),
    "compbench[blip-vqa]": MetricEntry(
        "specbench.metrics.compbench:BlipVqa",
        "T2I-CompBench++: BLIP's yes to every noun phrase of colour, shape and texture prompts, mean over images",
    ),
    "compbench[clip-b32]": MetricEntry(
        "specbench.metrics.compbench:CompBenchClip",
        "T2I-CompBench++: cosine of CLIP ViT-B/32 on non-spatial prompts, mean over images",
    ),
    **{
        f"compbench[{part}-owlv2]": MetricEntry(
            f"specbench.metrics.compbench_detected:{target}",
            f"T2I-CompBench++'s {rules}, mean over images; uncalibrated, the paper's own detector by export and import",
        )
        for part, target, rules in (
            ("spatial", "Spatial2d", "2D rules on what OWLv2 finds"),
            ("3d-spatial", "Spatial3d", "3D rules on what OWLv2 and Depth Anything V2 find"),
            ("numeracy", "Numeracy", "counting rules on what OWLv2 finds"),
            ("3-in-1", "ThreeInOne", "3-in-1 for complex prompts with OWLv2 in its 2D part"),
        )
    },
}
"""The built-in metrics by name."""


_BESIDE = {
    "kid": "unbiased squared MMD to the reference images in Inception features, cubic kernel",
    "geneval[official]": "share of right images by the official evaluator, mean over tags",
    "compbench[official]": "answers of the official T2I-CompBench++ scripts, mean over images",
}
"""Scores that stand in tables and are not metrics a user names."""


def metric_names() -> list[str]:
    return sorted({*METRICS, *plugins("metrics")})


def metric(name: str) -> Callable[..., object]:
    """What makes a metric, called with `specbench.metrics.base.Settings`.

    Raises:
        SpecbenchError: unknown name, or its code cannot be imported.
    """
    if name in METRICS:
        entry = METRICS[name]
        found = load_object(entry.target, f"metric {name}")
        return functools.partial(found, entry.variant) if entry.variant else found
    if name in plugins("metrics"):
        return load_object(plugins("metrics")[name].value, f"metric {name}")
    raise unknown_name("metric", name, metric_names())


def bundled_metrics() -> list[str]:
    """Metrics that need nothing from outside, and those of plug-ins."""
    return sorted({*(name for name, entry in METRICS.items() if entry.bundled), *plugins("metrics")})


def metric_summary(name: str) -> str:
    """One line about a score of that name; nothing of a built-in metric is imported.

    Raises:
        SpecbenchError: unknown name, or a plug-in's code cannot be imported.
    """
    beside = _BESIDE.get(name) or _BESIDE.get(name.partition("[")[0])
    if beside:
        return beside
    return METRICS[name].summary if name in METRICS else metric(name).summary
