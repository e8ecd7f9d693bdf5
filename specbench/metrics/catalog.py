"""Catalogue of metrics, built-in and from plug-ins, and of the papers' protocols. Metrics are imported on use. Imports
no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from specbench import names as spellings
from specbench.errors import SpecbenchError, read_name, unknown_name
from specbench.system.foreign_code import code_of, refuse_edited
from specbench.system.plugins import (
    PluginError,
    is_reference,
    load_object,
    load_user_object,
    naming_plugin,
    path_component,
    plugins,
)

if TYPE_CHECKING:
    from specbench.metrics.base import Settings
    from specbench.stats import Better
    from specbench.system.downloads import Download


class MetricEntry(NamedTuple):
    """Catalogue entry of a metric. `target`: "module:class" of its code; `summary`: line of `specbench list metrics`;
    `variant`: first argument of a class with several variants; `bundled`: whether the metric needs no external files
    and is computed by default; `unjudged`: aspects of an image that the metric ignores."""

    target: str
    summary: str
    variant: str | None = None
    bundled: bool = False
    unjudged: str = ""


def unjudged(scores: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the aspects of an image that the metrics of stored scores ignore, in sentences."""
    told = {score["metric"].partition(":")[0]: score["unjudged"] for score in scores if score["unjudged"]}
    return [f"{name} does not judge {text}." for name, text in told.items()]


_FRONT_ENDS = {
    "pytorch-fid": "bilinear",
    "tf1": "TensorFlow 1 bilinear",
    "tm-aa": "antialiased bilinear",
    "clean": "Pillow bicubic",
}
_CROPS = {"": "", "+center256": " after a centre crop to 256"}
_FID = (
    "Frechet distance to the reference images in Inception features, {} resize to 299{}; also computes FID-infinity "
    "and KID"
)
_CLIP = "cosine similarity of image and caption under CLIP {}, mean over images"
_CLIPS = {
    "b16": "ViT-B/16",
    "b16+299": "ViT-B/16, images first resized to 299 x 299 (bilinear)",
    "b32": "ViT-B/32",
    "b32+prefix": 'ViT-B/32, captions prefixed with "A photo depicts"',
    "b32+prefix+center256": 'ViT-B/32, captions prefixed with "A photo depicts", images centre-cropped to 256',
    "l14": "ViT-L/14",
}
# fmt: off
METRICS: dict[str, MetricEntry] = {
    "shapes-detector": MetricEntry("specbench.metrics.shapes:ShapesDetector",
        "fraction of images that match their caption according to the detector of `shapes`, mean over categories",
        bundled=True,
        unjudged="backgrounds, how well objects are drawn, or objects that are not in the caption"),
    "shapes-clip": MetricEntry("specbench.metrics.shapes:ShapesClip",
        "cosine similarity of image and caption under the small CLIP of `shapes`, mean over images", bundled=True),
    "shapes-frechet": MetricEntry("specbench.metrics.shapes:ShapesFrechet",
        "Frechet distance to renders of the same captions in 64 features of a small network; no interval up to n = 64",
        bundled=True),
    **{f"fid[{front_end}{crop}]": MetricEntry("specbench.metrics.fid:Fid",
        _FID.format(resize, cropped), f"{front_end}{crop}")
       for front_end, resize in _FRONT_ENDS.items() for crop, cropped in _CROPS.items()},
    "fid[tf1+bicubic256]": MetricEntry("specbench.metrics.fid:Fid",
        _FID.format(_FRONT_ENDS["tf1"], " after a bicubic resize to 256"), "tf1+bicubic256"),
    **{f"clip[{variant}]": MetricEntry("specbench.metrics.clip:Clip", _CLIP.format(network), variant)
       for variant, network in _CLIPS.items()},
    **{f"hpsv2[{variant}]": MetricEntry("specbench.metrics.preference:Hpsv2",
        f"human preference score {variant}, mean over images", variant) for variant in ("v2.1", "v2.0")},
    "diversity[clip-b16]": MetricEntry("specbench.metrics.diversity:ClipDiversity",
        "distance between two samples of a prompt by CLIP ViT-B/16 (1 - cosine), mean over pairs and prompts",
        "clip-b16"),
    "diversity[lpips-alex]": MetricEntry("specbench.metrics.diversity:Lpips",
        "distance between two samples of a prompt by LPIPS, mean over pairs and prompts; needs the package lpips"),
    "diversity[shapes]": MetricEntry("specbench.metrics.diversity:ClipDiversity",
        "distance between two samples of a prompt by the small CLIP of `shapes` (1 - cosine)", "shapes"),
    "imagereward": MetricEntry("specbench.metrics.preference:ImageReward",
        "learned human preference reward, mean over images"),
    "pickscore": MetricEntry("specbench.metrics.preference:PickScore",
        "preference learned from Pick-a-Pic, mean over images"),
    "aesthetic[sac+logos+ava1]": MetricEntry("specbench.metrics.preference:Aesthetic",
        "LAION aesthetic predictor V2 on CLIP ViT-L/14, mean over images"),
    "vqascore[clip-flant5-xxl]": MetricEntry("specbench.metrics.packages:VqaScore",
        "CLIP-FlanT5-XXL's probability that the image shows the caption, mean over images; needs the package "
        "t2v-metrics"),
    "hpsv3": MetricEntry("specbench.metrics.packages:Hpsv3",
        "human preference score v3, mean over images; needs the package hpsv3"),
    "geneval[hf-m2f]": MetricEntry("specbench.metrics.geneval:GenEval",
        "fraction of images that fulfil the GenEval prompt, judged with transformers' Mask2Former; mean over tags",
        unjudged="how well objects are drawn, or objects that are not in the caption"),
    "geneval2[qwen3-vl-8b]": MetricEntry("specbench.metrics.geneval2:GenEval2",
        "Soft-TIFA: probability that Qwen3-VL-8B gives to the right answers, geometric mean over a prompt's atoms, "
        "mean over images"),
    "compbench[blip-vqa]": MetricEntry("specbench.metrics.compbench:BlipVqa",
        "T2I-CompBench++: BLIP-VQA probability of the noun phrases of colour, shape and texture prompts, "
        "mean over images"),
    "compbench[clip-b32]": MetricEntry("specbench.metrics.compbench:CompBenchClip",
        "T2I-CompBench++: cosine similarity under CLIP ViT-B/32 for non-spatial prompts, mean over images"),
}
# fmt: on
"""{name: built-in metric}."""
_DERIVED = {
    "kid": "unbiased squared MMD to the reference images in Inception features, cubic kernel, mean over subsets",
    "fid-infinity": "FID extrapolated to infinitely many images; no interval up to n = 4096",
    "precision": "fraction of images nearer to a reference image than its 3rd nearest neighbour (Inception features)",
    "recall": "fraction of reference images nearer to an image than its 3rd nearest neighbour (Inception features)",
    "density": "mean number of reference images nearer to an image than to their own 3rd nearest neighbour, over 3",
    "coverage": "fraction of reference images that are nearer to some image than to their own 3rd nearest neighbour",
    "inception-score": "exp of the mean KL divergence of class probabilities from their mean, mean over 10 splits",
    "geneval[official]": "fraction of images that the official evaluator judges correct, mean over tags",
    "dpg-bench": "fraction of a prompt's questions that the official judge answers with yes, mean over images; "
    "[released]: as in the released program, which skips a question, and counts categories only for the last image",
    "wise[verified]": "WISE of 2026: 0 or 1, judged by Qwen3.5-35B-A3B with its evaluator, mean over images",
    "wise[legacy]": "WISE of 2025: WiScore of three marks, given by GPT-4o with its evaluator, mean over images",
    "longtext-bench": "fraction of the requested words that Qwen2.5-VL-7B reads in the images, over all images; "
    "[released]: as in the released program, which counts stock phrases of the network as words",
    "compbench[official]": "scores of the official T2I-CompBench++ scripts, mean over images",
}
"""{score that is a part of another metric, or is imported from the authors' program: summary}."""
DISTANCES = ("fid", "fid-infinity", "kid", "shapes-frechet")
"""Built-in metrics of kind `distance`, without variants: lower values are better."""
IMPORTED = ("geneval[official]", "compbench[official]", "dpg-bench", "dpg-bench[released]",
            "wise[verified]", "wise[legacy]", "longtext-bench", "longtext-bench[released]")  # fmt: skip
"""Scores that `specbench import` reads from the authors' programs."""
BENCHMARKS = ("geneval", "t2i-compbench", "dpg-bench", "tiif",
              "wise-verified", "wise-legacy", "oneig", "longtext-bench")  # fmt: skip
"""Benchmarks with an official program: `specbench export` writes its input, `specbench import` reads its results."""
PROTOCOLS: Mapping[str, tuple[str, ...]] = {
    "sjd": ("fid[pytorch-fid]", "clip[b16+299]", "hpsv2[v2.1]"),
    "cool-sd": ("fid[clean+center256]", "clip[b32+prefix+center256]", "hpsv2[v2.1]", "imagereward"),
    "zipar": ("vqascore[clip-flant5-xxl]", "hpsv2[v2.1]", "imagereward", "aesthetic[sac+logos+ava1]", "clip[l14]"),
    "mulo-sd": ("geneval[hf-m2f]", "hpsv2[v2.1]"),
    "fid-50k": ("fid[tf1+bicubic256]",),
}
"""Metric variants of published numbers. Protocols differ in nearly every step, so their numbers are not comparable.
`sjd`: SJD, GSD, SJD++, which print CLIP times 100. `cool-sd`: Cool-SD, LANTERN, LANTERN++. `zipar` and `mulo-sd`: the
scores that these papers print; which variants their code computes was not checked. DPG-Bench, which MuLo-SD also
prints, comes from its program (`IMPORTED`). `fid-50k`: class-conditional LlamaGen and its followers, with a folder of
ImageNet as `--reference`; their script resizes before it clamps and rounds."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "": PROTOCOLS["sjd"][1:],
    "coco": PROTOCOLS["sjd"][:1],
    "geneval": ("geneval[hf-m2f]",),
    "geneval2": ("geneval2[qwen3-vl-8b]",),
    "imagenet": PROTOCOLS["fid-50k"],
    "t2i-compbench": ("compbench[blip-vqa]", "compbench[clip-b32]"),
}
"""{prompt set: default metrics of models other than `shapes`}. "" is for all other sets: the scores that papers of
protocol `sjd` print for every set. The set with reference images also gets FID; a benchmark gets its own scores."""


def metric_names() -> list[str]:
    return sorted({*METRICS, *plugins("metrics")})


def metric_name(typed: str) -> str:
    """Resolve a typed name to a metric name; a variant is not added. Return unknown names unchanged."""
    valid = metric_names()
    bases = dict.fromkeys(name.partition("[")[0] for name in (*valid, *_DERIVED))
    base, bracket, variant = typed.partition("[")
    meant = next(iter(spellings.fitting(base, [*bases, *valid], "metric")), base)
    return next(iter(spellings.fitting(f"{meant}{bracket}{variant}", [*valid, *_DERIVED, *bases])), typed)


def require_metric(name: str) -> str:
    """Return the metric's name for a typed name, without importing the metric. Raise a SpecbenchError if unknown."""
    if name in metric_names() or is_reference(name):
        return name
    if (meant := metric_name(name)) in metric_names():
        return meant
    name = meant
    variants = [other for other in metric_names() if other.startswith(f"{name}[")]
    if name in IMPORTED:
        metric(name)
    if name in _DERIVED and not variants:
        advice = "use its variants, for example --metric 'fid[pytorch-fid]' --reference DIR"
        raise SpecbenchError(f"'{name}' is computed by the metric fid", advice)
    if not variants and (protocol := spellings.fitting(name, PROTOCOLS)):
        raise SpecbenchError(f"'{name}' is a protocol, not a metric", f"use --protocol {protocol[0]}")
    if not variants:
        raise unknown_name("metric", name, metric_names())
    if len(variants) == 1:
        raise SpecbenchError(f"metric '{name}': the name must include the variant", f"use --metric '{variants[0]}'")
    found = ((paper, variant) for paper, names in PROTOCOLS.items() for variant in names if variant in variants)
    papers = [f"{variant} (--protocol {paper})" for paper, variant in found]
    hint = f"choose a variant; papers use {', '.join(papers)}" if papers else f"choose a variant: {', '.join(variants)}"
    raise SpecbenchError(f"metric '{name}' has {len(variants)} variants, which give different numbers", hint)


def metric(name: str) -> Any:
    """Return the function of `Settings` that makes a metric of the catalogue, a plug-in, or "package.module:NAME"."""
    name = metric_name(name)
    if name in METRICS:
        entry = METRICS[name]
        factory: Any = load_object(entry.target, f"metric {name}")
        return functools.partial(factory, entry.variant) if entry.variant else factory
    if name in plugins("metrics"):
        target = plugins("metrics")[name].value
        return _foreign(load_object(target, f"metric {name}"), target)
    if is_reference(name):
        return _foreign(load_user_object(name, "metric"), name)
    if name in IMPORTED:
        raise SpecbenchError(f"'{name}' is computed by its authors' program", "use export, then import")
    raise unknown_name("metric", name, metric_names())


def _foreign(cls: Any, reference: str) -> Any:
    """Check a plug-in's metric class. Wrap its methods, so that errors and wrong results name the metric."""
    from specbench.metrics.base import Kind, Metric  # a metric of a plug-in has already imported it
    from specbench.stats import Better
    from specbench.system.downloads import Download

    if not (isinstance(cls, type) and issubclass(cls, Metric)):
        raise SpecbenchError(f"'{reference}' is not a metric of specbench", "subclass specbench.metrics.base.Metric")
    refuse_edited(code_of([reference]))
    listed = {"missing": tuple, "missing_packages": tuple, "downloads": Download}

    def guarded(method: str) -> Callable[..., Any]:
        @functools.wraps(getattr(cls, method))
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                with naming_plugin("metric", self.name, cls.__module__):
                    value = getattr(cls, method)(self, *arguments, **named)
                    if method in listed and not all(isinstance(item, listed[method]) for item in value):
                        raise TypeError(f"{method}() returned {value!r:.60}")
                    return value
            except PluginError as error:
                if self.kind == "distance" and self.settings.reference is None:
                    advice = f"specbench score --metric {reference} --reference DIR"
                    error.try_this = f"give its reference images: {advice}; if it needs none, fix the plug-in"
                raise

        return call

    def made(self: Any, *arguments: Any) -> None:
        with naming_plugin("metric", reference, cls.__module__):
            Metric.__init__(self, *arguments)  # the class may not call it
            cls.__init__(self, *arguments)
            range(self.batch)[0], range(self.samples)[0]  # error if one of them is not above 0
            for fact, values in (("better", get_args(Better)), ("kind", get_args(Kind))):
                if (value := getattr(self, fact)) not in values:
                    raise ValueError(f"{fact} is {value!r:.40}, not {' or '.join(values)}")
            for fact in ("unit", "unjudged"):
                if not isinstance(value := getattr(self, fact), str):
                    raise TypeError(f"{fact} is {value!r:.40}, not a text")
        name = getattr(self, "name", None)
        if not path_component(name) or name in METRICS:
            taken = "the name of a built-in metric" if path_component(name) else "not a valid name"
            raise SpecbenchError(f"metric '{reference}' is called {name!r:.100}, {taken}", "use letters, digits .+-[]")

    methods = [name for name in vars(Metric) if not name.startswith("_") and callable(getattr(cls, name))]
    parts = {"__init__": made, "__module__": cls.__module__, "class_reference": reference}
    return type(cls.__name__, (cls,), {name: guarded(name) for name in methods} | parts)


def downloads(names: Iterable[str], settings: Settings | None = None) -> list[Download]:
    """List the files that metrics need, that are not on this disk, and that can be downloaded."""
    return [download for name in names if name not in IMPORTED for download in metric(name)(settings).downloads()]


def default_metrics(model: str, prompts: str | None = None) -> list[str]:
    """List the default metrics of a model's images, for a prompt set or for all sets."""
    if model == "shapes":
        return bundled_metrics()
    base = (prompts or "").partition("/")[0]
    sets = [*DEFAULTS] if prompts is None else [base] if base == "imagenet" else [*dict.fromkeys(("", base))]
    return bundled_metrics() + [name for prompt_set in sets for name in DEFAULTS.get(prompt_set, ())]


def bundled_metrics() -> list[str]:
    """List the metrics without external files, and the metrics of plug-ins."""
    return sorted({*(name for name, entry in METRICS.items() if entry.bundled), *plugins("metrics")})


def metric_summary(name: str) -> str:
    """Return the one-line summary of a score, without importing built-in metrics."""
    if derived := _DERIVED.get(name) or _DERIVED.get(name.partition("[")[0]):
        return derived
    return METRICS[name].summary if name in METRICS else metric(name).summary


def direction(name: str, part: str = "") -> Better | None:
    """Return which values of a score are better, without importing built-in metrics; None for a plug-in's part."""
    if is_reference(name) or name in plugins("metrics"):
        return None if part else cast("Better", metric(name).better)
    return "lower" if name.partition("[")[0] in DISTANCES else "higher"


def find_protocol(name: str) -> tuple[str, ...]:
    return PROTOCOLS[read_name("protocol", name, PROTOCOLS)]


def with_protocol(metrics: Sequence[str], protocol: str | None) -> list[str]:
    return list(dict.fromkeys([*metrics, *(find_protocol(protocol) if protocol else ())]))
