"""Compare scores with the scores of the same images by packages of the metrics' authors.

    python dev/authors/compare.py 'hpsv2[v2.1]' 'fid[clean]' [--out results] [--run RUN] [--reference DIR]
    python dev/authors/compare.py     # list installed packages, and how to get the others

Those packages pin old versions of libraries, so each has a separate environment and runs as a subprocess, see
`dev/authors/programs.py`.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from specbench.cli.output import print_table
from specbench.metrics import catalog as metric_catalog
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Metric, Settings, made_score
from specbench.metrics.fid import Fid
from specbench.metrics.openclip import import_open_clip
from specbench.metrics.packages import PACKAGES, Package, ask, recipe
from specbench.metrics.packages import python_of as _python_of
from specbench.metrics.score_store import image_features, read_scores
from specbench.metrics.scoring import Images, run_images
from specbench.store.run_folders import find_runs
from specbench.system.digests import cache_folder

_COMMON = ("torch torchvision torchmetrics 'scipy<1.18' requests clint ftfy regex",)
_TOGETHER = (*_COMMON, "--no-deps hpsv2 clean-fid pytorch-fid torch-fidelity")
AUTHORS_PACKAGES = {
    **dict.fromkeys(("pytorch-fid", "clean-fid", "torchmetrics", "hpsv2"), Package("authors", _TOGETHER)),
    "image-reward": Package(
        "authors-image-reward",
        ("torch torchvision transformers==4.36.2 timm==0.6.13 fairscale", "--no-deps image-reward"),
    ),
}
PACKAGES |= AUTHORS_PACKAGES
PROGRAM = Path(__file__).with_name("programs.py")
MOST_IMAGES = 16
"""Maximum images for metrics with a value per image: hpsv2 reads its 2 GB of weights again for each image."""
_TOLERANCE = 1e-3
"""Largest difference at which two programs count as equal: of a value per image, or of a distance (relative)."""
COLUMNS = ("run_id", "metric", "package", "ours", "theirs", "largest_difference", "n", "verdict")
TEXT_CONFIG = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 30524, "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "pad_token_id": 0,
    "type_vocab_size": 2, "model_type": "bert", "add_cross_attention": True, "encoder_width": 1024,
}  # fmt: skip
"""Configuration of BERT in image-reward's text encoder, which image-reward would download."""


def python_of(package: str) -> Path:
    """`specbench.metrics.packages.python_of`; torchmetrics is installed here, but it also needs torch-fidelity."""
    return (
        cache_folder() / PACKAGES[package].environment / "bin" / "python"
        if package == "torchmetrics"
        else _python_of(package)
    )


def package_of(metric: str) -> str | None:
    """Name of the package with which a metric is compared."""
    front_end = metric.removeprefix("fid[").rstrip("]").partition("+")
    if metric.startswith("fid["):
        whole = {"pytorch-fid": "pytorch-fid", "tf1": "torchmetrics", "tm-aa": "torchmetrics", "clean": "clean-fid"}
        return whole[front_end[0]] if front_end[0] == "clean" or not front_end[2] else None
    return {"hpsv2[v2.1]": "hpsv2", "hpsv2[v2.0]": "hpsv2", "imagereward": "image-reward"}.get(metric)


def readiness(python: Path | None = None) -> list[dict[str, str]]:
    """List which of the authors' packages are installed, and how to get the others."""
    rows = []
    for package in AUTHORS_PACKAGES:
        answer = ask(python or python_of(package), {"package": package, "versions_only": True}, PROGRAM)
        versions = ", ".join(f"{name} {version}" for name, version in answer.get("versions", {}).items())
        ready = {"status": "ok", "detail": f"{versions} in {python or python_of(package)}", "fix": ""}
        lacking = {"status": "warning", "detail": _problem(answer), "fix": recipe(package)}
        rows.append({"name": f"cross-check by {package}"} | (ready if versions else lacking))
    return rows


def check_by_package(images: Images, metric: Metric, python: Path | None = None) -> dict[str, object]:
    """Compare a scored metric with its authors' package over the same images.

    Args:
        python: Python of the environment to use, instead of `python_of`.

    Returns:
        A dict with the keys `COLUMNS`; `largest_difference` is the difference of a value per image or of a feature.
    """
    row: dict[str, object] = dict.fromkeys(COLUMNS) | {"run_id": images.name, "metric": metric.name}
    package = package_of(metric.name)
    if package is None:
        return row | {"verdict": "no package to compare with"}
    kept = image_features(images.folder, metric).merge(images.rows, on=["prompt_id", "sample", "started_at"])
    kept = kept.sort_values(["prompt_id", "sample"])
    if not isinstance(metric, Fid):
        kept = kept.iloc[:MOST_IMAGES]
    with tempfile.TemporaryDirectory() as folder:
        request = {"images": _files(images, kept)} | _request(package, metric, kept, Path(folder))
        answer = ask(python or python_of(package), request, PROGRAM)
        row |= {"package": package, "n": len(kept)}
        if "versions" not in answer:
            return row | {"verdict": f"not run: {_problem(answer)}; see python dev/authors/compare.py"}
        row["package"] = f"{package} {answer['versions'][package]}"
        compared = _compare_features if isinstance(metric, Fid) else _compare_values
        return row | compared(images, metric, kept, answer, request)


def _compare_values(images: Images, metric: Metric, kept: pd.DataFrame, answer: dict, request: dict) -> dict:
    ours, theirs = kept["value"].to_numpy(np.float64), np.array(answer["values"])
    gap = float(np.abs(ours - theirs).max())
    return {"ours": ours.mean(), "theirs": theirs.mean(), "largest_difference": gap, "verdict": _verdict(gap)}


def _compare_features(images: Images, metric: Metric, kept: pd.DataFrame, answer: dict, request: dict) -> dict:
    digest = made_score(metric).fingerprint
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
    """Read the image files here first, because the packages open any file in any format."""
    for row in kept.itertuples():
        images.read(row)
    return [str(Path(path).resolve()) for path in kept["path"]]


def _request(package: str, metric: Metric, kept: pd.DataFrame, folder: Path) -> dict[str, object]:
    request: dict[str, object] = {
        "package": package,
        "weights": str(checkpoints.require_weights_file(metric.checkpoints[0], forbidden=True)),
    }
    if isinstance(metric, Fid):
        reference = [str(path.resolve()) for path in metric.reference.pictures]
        crop = "center256" if metric.name.endswith("+center256]") else "none"
        settings = {"reference": reference, "crop": crop, "antialias": metric.name.startswith("fid[tm-aa")}
        return request | settings | {"features": str(folder / "features.npy")}
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


def main() -> None:
    """Print the rows of `readiness`, or of `check_by_package` for each run and metric."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="*")
    parser.add_argument("--run", nargs="*", default=())
    parser.add_argument("--out", default="results")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--python", type=Path)
    options = parser.parse_args()
    if not options.metrics:
        return print_table(readiness(options.python), ("name", "status", "detail", "fix"))
    settings = Settings(reference=options.reference, offline=True)
    shown = [run_images(folder) for folder in find_runs(options.out, options.run)]
    made = [metric_catalog.metric(name)(settings) for name in options.metrics]
    pairs = [(images, metric) for images in shown for metric in made if is_scored(images, metric)]
    print_table([check_by_package(*pair, options.python) for pair in pairs], COLUMNS)


if __name__ == "__main__":
    main()
