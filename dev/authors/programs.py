"""Compute metrics with their authors' packages, in an environment with these packages; it needs no specbench.

`dev/authors/compare.py` starts it. The exchange format is defined in `specbench/metrics/authors_programs.py`.
"""

import gzip
import importlib.metadata
import itertools
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "specbench" / "metrics"))
import authors_programs

del sys.path[0]  # modules of this folder have the names of packages

# Imports are inside functions because each program has a separate environment with nothing else.


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
    """FID by clean-fid: its resize and arithmetic, with the same weights in pytorch-fid's network, because clean-fid's
    network is a TorchScript archive of another publisher."""
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
    """Scores by hpsv2. Its wheel lacks the vocabulary, and hpsv2 would download 4 GB of weights and overwrite them."""
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
    """Rewards by image-reward, without the other imports of its package (CLIP, diffusers)."""
    import torch
    from transformers import BertTokenizer

    folder = importlib.metadata.distribution("image-reward").locate_file("ImageReward")
    for name in ("", ".models"):
        package = types.ModuleType("ImageReward" + name)
        package.__path__ = [str(Path(str(folder)).joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    vocabulary = request["vocabulary"]
    BertTokenizer.from_pretrained = classmethod(lambda cls, *_, **__: cls(vocabulary))
    from ImageReward import ImageReward as program
    from ImageReward.models.BLIP import blip, blip_pretrain

    if sizes := request.get("sizes"):  # sizes of a network smaller than the published network
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


def _head(torch, widths: list[int]):
    """ImageReward's head with other widths and the published layer numbers."""
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
    """Crop centre squares of 256 x 256 with torchvision, like LANTERN's evaluation, and save them in a folder."""
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


authors_programs.PROGRAMS |= {
    "pytorch-fid": (pytorch_fid, ()),
    "clean-fid": (clean_fid, ("pytorch-fid",)),
    "torchmetrics": (torchmetrics, ("torch-fidelity",)),
    "hpsv2": (hpsv2, ("clint",)),
    "image-reward": (image_reward, ("transformers", "timm", "fairscale")),
}

if __name__ == "__main__":
    authors_programs.main()
