"""Compute metrics with their authors' packages, in an environment that has these and need not have specbench.

Run as a program: one JSON object on stdin, one on stdout, or with `--serve` one a line, the network being kept.
`specbench.metrics.packages` starts it with another Python, so it imports nothing of specbench and takes all it needs
(pictures, captions, weights) from files named in the request. Nothing is downloaded: where a package would, it is given
the file, or finds it in the hub's cache.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
import tempfile
import types
from pathlib import Path

# Imports inside functions: each program has an environment of its own, which holds nothing else.


def pytorch_fid(request: dict) -> dict:
    """FID by pytorch-fid; features of the images go to the file `features`."""
    from pytorch_fid import fid_score

    model = _trunk(request["weights"])

    def activations(files: list[str]):
        return fid_score.get_activations(files, model, batch_size=1, dims=2048, device="cpu", num_workers=0)

    images, reference = activations(request["images"]), activations(request["reference"])
    _keep(request, images)
    (m1, s1), (m2, s2) = _moments(images), _moments(reference)
    return {"value": float(fid_score.calculate_frechet_distance(m1, s1, m2, s2))}


def clean_fid(request: dict) -> dict:
    """FID by clean-fid: its resize and arithmetic, with the same weights in pytorch-fid's network, because its own is a
    TorchScript archive of another publisher."""
    import torch
    from cleanfid import fid

    trunk = _trunk(request["weights"], resize_input=False, normalize_input=False)

    def network(x):
        return trunk((x - 128) / 128)[0][:, :, 0, 0]

    def features(files: list[str]):
        return fid.get_files_features(files, network, 0, batch_size=8, device=torch.device("cpu"), verbose=False)

    with tempfile.TemporaryDirectory() as folder:
        shown = [_cropped(files, request["crop"], Path(folder) / name)
                 for name, files in (("images", request["images"]), ("reference", request["reference"]))]  # fmt: skip
        images, reference = map(features, shown)
    _keep(request, images)
    return {"value": float(fid.fid_from_feats(images, reference))}


def torchmetrics(request: dict) -> dict:
    """FID and KID by torchmetrics, with its own front end."""
    import numpy as np
    import torch
    from PIL import Image
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    fid = FrechetInceptionDistance(feature_extractor_weights_path=request["weights"], antialias=request["antialias"])
    size = min(1000, len(request["images"]), len(request["reference"]))
    kid = KernelInceptionDistance(fid.inception, subset_size=size)
    features = []
    for name in ("reference", "images"):
        for path in request[name]:
            pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)[None]
            with torch.no_grad():
                fid.update(pixels, real=name == "reference")
                kid.update(pixels, real=name == "reference")
            if name == "images":
                features.append(kid.fake_features[-1][0].numpy())
    _keep(request, np.stack(features))
    torch.manual_seed(0)
    return {"value": fid.compute().item(), "kid": kid.compute()[0].item()}


def hpsv2(request: dict) -> dict:
    """Scores by hpsv2. Its wheel lacks the vocabulary, and it would first download a network of 4 GB to overwrite."""
    bundled = gzip.open
    gzip.open = lambda path, *rest: bundled(request["vocabulary"] if "bpe_simple" in str(path) else path, *rest)
    sys.modules.setdefault("turtle", types.SimpleNamespace(forward=None))  # a stray import, absent without a display
    from hpsv2 import img_score
    from hpsv2.src.open_clip import factory

    if request.get("architecture_file"):
        factory.add_model_config(Path(request["architecture_file"]))
    model, _, preprocess = factory.create_model_and_transforms(
        request["architecture"], pretrained=None, light_augmentation=True, output_dict=True
    )
    img_score.model_dict |= {"model": model, "preprocess_val": preprocess}
    pairs = zip(request["images"], request["captions"], strict=True)
    return {"values": [float(img_score.score(path, text, cp=request["weights"])[0]) for path, text in pairs]}


def image_reward(request: dict) -> dict:
    """Rewards by image-reward. What its package imports besides the model (CLIP, diffusers) is left out."""
    import torch
    from transformers import BertTokenizer

    found = importlib.metadata.distribution("image-reward").locate_file("ImageReward")
    for name in ("", ".models"):
        package = types.ModuleType("ImageReward" + name)
        package.__path__ = [str(Path(str(found)).joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    vocabulary = request["vocabulary"]
    BertTokenizer.from_pretrained = classmethod(lambda cls, *_, **__: cls(vocabulary))
    from ImageReward import ImageReward as program
    from ImageReward.models.BLIP import blip, blip_pretrain

    if sizes := request.get("sizes"):  # of a network smaller than the published one
        vision = {"img_size": sizes["image"], "patch_size": 16, "embed_dim": sizes["width"], "depth": sizes["depth"]}
        vision["mlp_ratio"] = sizes["inner"] / sizes["width"]
        made = lambda *_: (blip.VisionTransformer(num_heads=sizes["heads"], **vision), sizes["width"])  # noqa: E731
        blip_pretrain.create_vit = made
        program._transform = lambda size, plain=program._transform: plain(sizes["image"])
        program.MLP = lambda width: _head(torch, sizes["head"])
    model = program.ImageReward(request["text_config"], device="cpu")
    weights = torch.load(request["weights"], map_location="cpu", weights_only=True)
    left = model.load_state_dict(weights, strict=False).missing_keys
    problem = [name for name in left if not name.endswith("position_ids") and "_proj" not in name]
    if problem:
        raise ValueError(f"the weights lack {problem[0]}")
    model.eval()
    pairs = zip(request["images"], request["captions"], strict=True)
    with torch.no_grad():
        return {"values": [float(model.score(text, path)) for path, text in pairs]}


@functools.cache
def _vqascore_network(model: str, device: str):
    import t2v_metrics
    from huggingface_hub import constants

    return t2v_metrics.VQAScore(model=model, device=device, cache_dir=constants.HF_HUB_CACHE)


def vqascore(request: dict) -> dict:
    """Scores by t2v-metrics, each image with its own caption."""
    network = _vqascore_network(request["model"], request["device"])
    pairs = zip(request["images"], request["captions"], strict=True)
    return {"values": [float(network(images=[path], texts=[text])[0][0]) for path, text in pairs]}


@functools.cache
def _hpsv3_network(device: str):
    from hpsv3 import HPSv3RewardInferencer

    return HPSv3RewardInferencer(device=device)


def hpsv3(request: dict) -> dict:
    """Rewards by hpsv3: the first of its two numbers, the mean."""
    import torch

    with torch.no_grad():
        rewards = _hpsv3_network(request["device"]).reward(request["images"], request["captions"])
    return {"values": [float(reward[0]) for reward in rewards]}


def _weights(hub: list[str]) -> dict:
    """Digest the cached files of hub repositories, whose names in the cache are their digests; or what is lacking.

    Args:
        hub: arguments of `hf download`, the repository first.
    """
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


def _head(torch, widths: list[int]):
    """ImageReward's head of other widths, with the published layer numbers."""
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    idle = torch.nn.Identity()
    head = torch.nn.Module()
    head.layers = torch.nn.Sequential(layers[0], idle, layers[1], idle, layers[2], idle, layers[3], layers[4])
    head.forward = head.layers.forward
    return head


def _trunk(weights: str, **options: object):
    """pytorch-fid's network with the weights of a local file."""
    import torch
    from pytorch_fid import inception

    inception.load_state_dict_from_url = lambda *_, **__: torch.load(weights, map_location="cpu", weights_only=True)
    return inception.InceptionV3([3], **options).eval()


def _cropped(files: list[str], crop: str, folder: Path) -> list[str]:
    """Centre squares at 256 x 256 by torchvision, saved in a folder, as LANTERN's evaluation makes them."""
    if crop == "none":
        return files
    from PIL import Image
    from torchvision.transforms import functional as T

    folder.mkdir()
    saved = []
    for number, path in enumerate(files):
        image = Image.open(path).convert("RGB")
        square = T.resize(T.center_crop(image, min(image.size)), [256, 256], T.InterpolationMode.LANCZOS)
        saved.append(str(folder / f"{number:08d}.png"))
        square.save(saved[-1])
    return saved


def _moments(features):
    import numpy as np

    return features.mean(axis=0), np.cov(features, rowvar=False)


def _keep(request: dict, features) -> None:
    import numpy as np

    np.save(request["features"], features, allow_pickle=False)


PROGRAMS = {
    "pytorch-fid": (pytorch_fid, ()),
    "clean-fid": (clean_fid, ("pytorch-fid",)),
    "torchmetrics": (torchmetrics, ("torch-fidelity",)),
    "hpsv2": (hpsv2, ("clint",)),
    "image-reward": (image_reward, ("transformers", "timm", "fairscale")),
    "t2v-metrics": (vqascore, ("torch", "transformers")),
    "hpsv3": (hpsv3, ("torch", "transformers")),
}
"""By package: its program, and the distributions that must be there besides, of which the package names some and does
not ask for others."""


def answer_request(request: dict) -> dict:
    name = request["package"]
    program, others = PROGRAMS[name]
    try:
        found = {"versions": {package: importlib.metadata.version(package) for package in (name, *others)}}
        if request.get("versions_only"):
            return found | (_weights(request["hub"]) if "hub" in request else {})
        return found | program(request)
    except importlib.metadata.PackageNotFoundError as error:
        return {"missing": error.name}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages print on stdout
    for text in sys.stdin if "--serve" in sys.argv else [sys.stdin.read()]:
        answer_to.write(json.dumps(answer_request(json.loads(text))) + "\n")
        answer_to.flush()


if __name__ == "__main__":
    main()
