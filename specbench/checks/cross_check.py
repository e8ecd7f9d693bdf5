"""Compare scores with what the authors' packages compute of the same images (`score --cross-check`).

Those packages pin libraries of other years, so they live in environments of their own and are run as subprocesses, see
`specbench.metrics.authors_programs`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specbench.metrics import catalog as metric_catalog
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Metric, Settings, fingerprint
from specbench.metrics.external_images import external_images, prompts_of_images
from specbench.metrics.openclip import import_open_clip
from specbench.metrics.packages import AUTHORS_PACKAGES, ask, python_of, recipe, require_python
from specbench.metrics.reference import ReferenceMetric
from specbench.metrics.score_store import image_features, read_scores
from specbench.metrics.scoring import Images, run_images
from specbench.store.run_folders import find_runs

MOST_IMAGES = 16
"""Of a metric with a value per image: hpsv2 reads its 2 GB of weights again for each."""
_TOLERANCE = 1e-3
"""Largest difference between equal programs: of a value per image, or of a distance relative to it."""
COLUMNS = ("run_id", "metric", "package", "ours", "theirs", "largest_difference", "n", "verdict")
TEXT_CONFIG = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 30524, "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "pad_token_id": 0,
    "type_vocab_size": 2, "model_type": "bert", "add_cross_attention": True, "encoder_width": 1024,
}  # fmt: skip
"""BERT of image-reward's text encoder, which its package would download."""


def package_of(metric: str) -> str | None:
    """The package that a metric is compared with."""
    front_end = metric.removeprefix("fid[").rstrip("]").partition("+")
    if metric.startswith("fid["):
        whole = {"pytorch-fid": "pytorch-fid", "tf1": "torchmetrics", "tm-aa": "torchmetrics", "clean": "clean-fid"}
        return whole[front_end[0]] if front_end[0] == "clean" or not front_end[2] else None
    return {"hpsv2[v2.1]": "hpsv2", "hpsv2[v2.0]": "hpsv2", "imagereward": "image-reward"}.get(metric)


def readiness(python: Path | None = None) -> list[dict[str, str]]:
    """Rows of `specbench doctor` about the authors' packages."""
    rows = []
    for package in AUTHORS_PACKAGES:
        answer = ask(python or python_of(package), {"package": package, "versions_only": True})
        versions = ", ".join(f"{name} {version}" for name, version in answer.get("versions", {}).items())
        ready = {"status": "ok", "detail": f"{versions} in {python or python_of(package)}", "fix": ""}
        lacking = {"status": "warning", "detail": _problem(answer), "fix": recipe(package)}
        rows.append({"name": f"cross-check by {package}"} | (ready if versions else lacking))
    return rows


def cross_check(
    metrics: Sequence[str],
    runs: Sequence[str] = (),
    out: str | Path = "results",
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    settings: Settings | None = None,
    python: str | Path | None = None,
    layout: str | None = None,
) -> list[dict[str, object]]:
    """Compare scores with what the metrics' authors' packages compute of the same images
    (`specbench score --cross-check`).

    Args:
        metrics: names of metrics the runs were scored with; those that do not apply to a run are left out.
        runs: run ids, unique beginnings of them, or folders; all runs in `out` if empty.
        images, prompts: folder of images made elsewhere and the set or file of their prompts, instead of runs.
        layout: of that folder.
        python: Python of an environment with the packages; that of `python_of` if None.

    Returns:
        One dict per run and metric, with the keys `COLUMNS`.

    Raises:
        SpecbenchError: an unknown run or metric, or `python` does not exist.
    """
    if images is not None:
        shown = [external_images(Path(images), prompts_of_images(Path(images), prompts), Path(out), layout)]
    else:
        shown = [run_images(folder) for folder in find_runs(out, runs)]
    made = [metric_catalog.metric(name)(settings) for name in metrics]
    own = None if python is None else Path(python)
    require_python(own)
    return [check_by_package(one, metric, own) for one in shown for metric in made if is_scored(one, metric)]


def check_by_package(images: Images, metric: Metric, python: Path | None = None) -> dict[str, object]:
    """Compare a scored metric with its authors' package over the same images.

    Args:
        python: of the environment to use instead of `python_of`.

    Returns:
        A dict with the keys `COLUMNS`; `largest_difference` is that of a value per image, or of a feature.
    """
    row: dict[str, object] = dict.fromkeys(COLUMNS) | {"run_id": images.name, "metric": metric.name}
    package = package_of(metric.name)
    if package is None:
        return row | {"verdict": "no package to compare with"}
    kept = image_features(images.folder, metric).merge(images.rows, on=["prompt_id", "sample", "started_at"])
    kept = kept.sort_values(["prompt_id", "sample"])
    if not isinstance(metric, ReferenceMetric):
        kept = kept.iloc[:MOST_IMAGES]
    with tempfile.TemporaryDirectory() as folder:
        request = {"images": _files(images, kept)} | _request(package, metric, kept, Path(folder))
        answer = ask(python or python_of(package), request)
        row |= {"package": package, "n": len(kept)}
        if "versions" not in answer:
            return row | {"verdict": f"not run: {_problem(answer)}; see specbench doctor --cross-check"}
        row["package"] = f"{package} {answer['versions'][package]}"
        compared = _compare_features if isinstance(metric, ReferenceMetric) else _compare_values
        return row | compared(images, metric, kept, answer, request)


def _compare_values(images: Images, metric: Metric, kept: pd.DataFrame, answer: dict, request: dict) -> dict:
    ours, theirs = kept["value"].to_numpy(np.float64), np.array(answer["values"])
    gap = float(np.abs(ours - theirs).max())
    return {"ours": ours.mean(), "theirs": theirs.mean(), "largest_difference": gap, "verdict": _verdict(gap)}


def _compare_features(images: Images, metric: Metric, kept: pd.DataFrame, answer: dict, request: dict) -> dict:
    digest = fingerprint(metric)
    ours = {row["metric"]: row["value"] for row in read_scores(images.folder) if row["fingerprint"] == digest}
    features = np.stack(kept["feature"].to_list())
    gap = float(np.abs(features - np.load(request["features"], allow_pickle=False)).max())
    pairs = [(ours[metric.name], answer["value"])]
    if "kid" in answer:
        pairs.append((ours[metric.name.replace("fid", "kid", 1)], answer["kid"]))
    gaps = [abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in pairs]
    value = ours[metric.name]
    return {"ours": value, "theirs": answer["value"], "largest_difference": gap, "verdict": _verdict(max(gaps))}


def _verdict(gap: float) -> str:
    return "agrees" if gap <= _TOLERANCE else "differs"


def _files(images: Images, kept: pd.DataFrame) -> list[str]:
    """The image files, read here first: the packages open whatever a path names, in any format."""
    for row in kept.itertuples():
        images.read(row)
    return [str(Path(path).resolve()) for path in kept["path"]]


def _request(package: str, metric: Metric, kept: pd.DataFrame, folder: Path) -> dict[str, object]:
    request: dict[str, object] = {
        "package": package,
        "weights": str(checkpoints.require_weights_file(metric.checkpoints[0], forbidden=True)),
    }
    if isinstance(metric, ReferenceMetric):
        reference = [str(path.resolve()) for path in metric.reference.pictures]
        crop = "center256" if metric.name.endswith("+center256]") else "none"
        own = {"reference": reference, "crop": crop, "antialias": metric.name.startswith("fid[tm-aa")}
        return request | own | {"features": str(folder / "features.npy")}
    request["captions"] = list(kept["prompt"])
    if package == "hpsv2":
        vocabulary = Path(import_open_clip().__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
        return request | {"vocabulary": str(vocabulary), "architecture": "ViT-H-14"}
    config = folder / "med_config.json"
    config.write_text(json.dumps(TEXT_CONFIG))
    vocabulary = checkpoints.require_weights_file("bert-vocabulary", forbidden=True)
    return request | {"vocabulary": str(vocabulary), "text_config": str(config)}


def _problem(answer: Mapping[str, str]) -> str:
    return f"{answer['missing']} is not installed" if "missing" in answer else answer.get("error", "")


def is_scored(images: Images, metric: Metric) -> bool:
    """Whether the metric has scored any of these images."""
    return not image_features(images.folder, metric).empty
