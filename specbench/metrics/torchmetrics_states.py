"""torchmetrics' accumulators of FID and KID, fed with features that this package's front ends made."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from specbench.metrics.torchvision_stub import torchvision_if_it_loads

KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
"""As published (Binkowski et al. 2018), and torchmetrics' defaults."""
KID_SEED = 0
_ROWS = 512


class FeaturesAsImages(nn.Module):
    """Identity network for torchmetrics, fed with features [n, d]: its own resize is never reached."""

    def __init__(self, d: int):
        super().__init__()
        self.num_features = d

    def forward(self, features_ND: Tensor) -> Tensor:
        return features_ND


def moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [d] and unbiased covariance [d, d] of features [n, d], accumulated by torchmetrics in float64."""
    states = _library("fid").FrechetInceptionDistance(FeaturesAsImages(features.shape[1]))
    for start in range(0, len(features), _ROWS):
        states.update(torch.tensor(features[start : start + _ROWS]), real=True)
    n = len(features)
    mean = (states.real_features_sum / n).numpy()
    return mean, (states.real_features_cov_sum.numpy() - n * np.outer(mean, mean)) / (n - 1)


def kid(images: np.ndarray, reference: np.ndarray) -> float:
    """KID in float64: mean over 100 pairs of subsets of at most 1000 rows, drawn with a fixed seed."""
    size = min(KID_SUBSET_SIZE, len(images), len(reference))
    subsets = 1 if size == len(images) == len(reference) else KID_SUBSETS
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # features being kept in memory is what is wanted here
        states = _library("kid").KernelInceptionDistance(FeaturesAsImages(images.shape[1]), subsets, size)
        states.update(torch.tensor(reference).double(), real=True)
        states.update(torch.tensor(images).double(), real=False)
        torch.manual_seed(KID_SEED)
        mean, _ = states.compute()
    return mean.item()


@cache
def _library(name: str) -> ModuleType:
    if importlib.util.find_spec("torch_fidelity"):  # torchmetrics imports it where it is there, and it torchvision
        with torchvision_if_it_loads():
            importlib.import_module("torch_fidelity")
    return importlib.import_module(f"torchmetrics.image.{name}")
