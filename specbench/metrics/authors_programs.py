"""Compute metrics with their authors' packages, in an environment without specbench.

`specbench.metrics.packages` runs this file with another Python. The file reads requests from stdin, one JSON object per
line, and answers each on stdout; networks stay loaded. Nothing is downloaded: a request gives paths of images, and
weights are in the hub's cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

# Imports inside functions: an environment contains only one of the packages.


@functools.cache
def _vqascore_network(model: str, device: str) -> Any:
    import t2v_metrics
    from huggingface_hub import constants

    return t2v_metrics.VQAScore(model=model, device=device, cache_dir=constants.HF_HUB_CACHE)


def vqascore(request: dict[str, Any]) -> dict[str, Any]:
    """Compute scores of images and their captions with t2v-metrics."""
    network = _vqascore_network(request["model"], request["device"])
    pairs = zip(request["images"], request["captions"], strict=True)
    return {"values": [float(network(images=[path], texts=[text])[0][0]) for path, text in pairs]}


@functools.cache
def _hpsv3_network(device: str) -> Any:
    from hpsv3 import HPSv3RewardInferencer

    return HPSv3RewardInferencer(device=device)


def hpsv3(request: dict[str, Any]) -> dict[str, Any]:
    """Compute rewards with hpsv3. Of its two numbers per image, the first (the mean) is used."""
    import torch

    with torch.no_grad():
        rewards = _hpsv3_network(request["device"]).reward(request["images"], request["captions"])
    return {"values": [float(reward[0]) for reward in rewards]}


def _weights(hub: list[str]) -> dict[str, str]:
    """Return the digest of cached files as `weights`, or a missing repository as `lacking`. `hub`: as in `Package`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    lines = []
    for repository in (arguments.partition(" ")[0] for arguments in hub):
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
        except LocalEntryNotFoundError:
            return {"lacking": repository}
        lines += sorted(
            f"{path.relative_to(folder)} {path.resolve().name}" for path in folder.rglob("*") if path.is_file()
        )
    return {"weights": f"sha256:{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"}


PROGRAMS = {"t2v-metrics": (vqascore, ("torch", "transformers")), "hpsv3": (hpsv3, ("torch", "transformers"))}
"""{package: (function, further distributions that it needs, which the package may not declare)}."""


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    name = request["package"]
    program, others = PROGRAMS[name]
    try:
        answer = {"versions": {package: importlib.metadata.version(package) for package in (name, *others)}}
        if request.get("versions_only"):
            return answer | (_weights(request["hub"]) if "hub" in request else {})
        return answer | program(request)
    except importlib.metadata.PackageNotFoundError as error:
        return {"missing": error.name}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages print on stdout, which is for answers
    for text in sys.stdin:
        answer_to.write(json.dumps(answer_request(json.loads(text))) + "\n")
        answer_to.flush()


if __name__ == "__main__":
    main()
