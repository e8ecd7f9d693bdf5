"""CLIP networks of open_clip, and crops and resizes for metrics. open_clip's preprocessing needs torchvision, whose
wheels fit only one build of torch. Importing open_clip needs only torchvision's names, so empty substitutes suffice."""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Imports inside functions: torch is not needed if all images are scored.

Tokenize = Callable[[Sequence[str]], "Tensor"]  # Maps texts to ids [n, context length]

OPENCLIP_PACKAGES = {"open_clip_torch": "pip install open_clip_torch"}
CONTEXT = 77  # Context length in tokens of the published CLIP networks
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
_NAME = "torchvision"


def whole(pixels: np.ndarray) -> np.ndarray:
    return pixels


def center256(pixels: np.ndarray) -> np.ndarray:
    """Crop uint8 [H, W, 3] to the centre square, as in torchvision, and resize by Lanczos to [256, 256, 3]."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    left, top = round((width - side) / 2), round((height - side) / 2)
    square = Image.fromarray(pixels).crop((left, top, left + side, top + side))
    return np.asarray(square.resize((256, 256), Image.Resampling.LANCZOS))


def short_side_centre(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resize as CLIP: short side to `size`, Pillow's bicubic, then the centre square, uint8 [size, size, 3]."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    sides = int(size * width / short), int(size * height / short)
    resized = Image.fromarray(pixels).resize(sides, Image.Resampling.BICUBIC)
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def squashed(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resize uint8 [H, W, 3] to [size, size, 3] without a crop, by Pillow's bicubic."""
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))


@cache
def import_open_clip() -> ModuleType:
    """Import open_clip, with a substitute for torchvision if torchvision does not load."""
    with torchvision_if_it_loads():
        import open_clip
    return open_clip


def load_openai(path: Path, device: str) -> torch.nn.Module:
    """Load OpenAI's CLIP in float32, with sizes derived from the weights. The caller has checked the digest."""
    from specbench.models.script_archive import read_script_tensors

    # Without the attention mask, which open_clip creates.
    weights = {name: tensor for name, tensor in read_script_tensors(path).items() if not name.endswith("attn_mask")}
    model = import_open_clip().model.build_model_from_openai_state_dict(weights, cast_dtype=None)
    return model.float().eval().requires_grad_(False).to(device)


def untrained_model(architecture: str) -> torch.nn.Module:
    """Build the network of a named architecture with random weights that the caller replaces."""
    open_clip, nothing = import_open_clip(), logging.Filter("-")
    logging.getLogger().addFilter(nothing)  # hide only open_clip's warning that the weights are random
    try:
        return open_clip.create_model(architecture, pretrained=None, output_dict=True)
    finally:
        logging.getLogger().removeFilter(nothing)


def load_folder_model(folder: Path, device: str) -> torch.nn.Module:
    """Load a CLIP in float32 from a folder in open_clip's layout: configuration, weights and tokenizer."""
    return import_open_clip().create_model(f"local-dir:{folder}").eval().requires_grad_(False).to(device)


def folder_tokenizer(folder: Path) -> Tokenize:
    """Load the tokenizer of a folder in open_clip's layout."""
    return import_open_clip().get_tokenizer(f"local-dir:{folder}")


def planes(pixels: np.ndarray) -> Tensor:
    """Convert uint8 [H, W, 3] to float32 [3, H, W] from 0 to 255."""
    import torch

    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).to(torch.float32)


def centred(x_CHW: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Subtract a mean per channel and divide by a standard deviation; the default is CLIP's."""
    import torch

    return (x_CHW - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def normalised(pixels: np.ndarray) -> Tensor:
    """Normalise uint8 [H, W, 3] to CLIP's float32 [3, H, W]."""
    return centred(planes(pixels) / 255)


def image_embeddings(model: torch.nn.Module, images: Sequence[Tensor], device: str) -> Tensor:
    """Embed preprocessed images [3, H, W]: unit vectors float32 [n, d] on the CPU."""
    import torch

    with torch.inference_mode():
        return model.encode_image(torch.stack(list(images)).to(device), normalize=True).cpu()


def cut_by_clip(texts: Sequence[str]) -> tuple[int, int]:
    """Return the number of texts longer than CLIP's context, and the context length, including start and end."""
    tokens = import_open_clip().tokenize(list(texts), context_length=CONTEXT + 1)
    return int((tokens[:, CONTEXT] != 0).sum()), CONTEXT


def text_embeddings(
    model: torch.nn.Module, texts: Sequence[str], device: str, tokenize: Tokenize | None = None
) -> Tensor:
    """Embed texts: unit vectors float32 [n, d] on the CPU. CLIP's tokenizer truncates to 77 tokens."""
    import torch

    tokenize = tokenize or partial(import_open_clip().tokenize, context_length=model.context_length)
    with torch.inference_mode():
        return model.encode_text(tokenize(list(texts)).to(device), normalize=True).cpu()


class _Placeholder(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == _NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def torchvision_if_it_loads() -> Iterator[bool]:
    """Context in which `import torchvision` works. It yields True for the real package, False for substitutes."""
    if torchvision_loads():
        yield True
        return
    from transformers.utils import is_torchvision_available  # takes seconds; open_clip imports it anyway

    is_torchvision_available()  # transformers caches the answer, so call it before the substitutes exist
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield False
    finally:
        sys.meta_path.remove(finder)
        _forget()


def torchvision_loads() -> bool:
    """Return whether torchvision is installed and fits this torch."""
    if _NAME not in sys.modules and importlib.util.find_spec(_NAME) is None:
        return False
    try:
        importlib.import_module(_NAME)
    except (ImportError, OSError, RuntimeError):
        _forget()
        return False
    return True


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
