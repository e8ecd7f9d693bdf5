"""Reference images of Frechet distances and KID: their features, cached by fingerprint, and their statistics."""

import hashlib
import io
import json
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specbench.errors import SpecbenchError
from specbench.metrics.base import Settings, read_ahead
from specbench.names import encodable
from specbench.prompts import public
from specbench.stats import Estimate, mean_difference
from specbench.system.console import counted
from specbench.system.digests import cache_folder, digest_of
from specbench.system.files import write_atomically
from specbench.system.images import pictures_in, read_picture

Preprocess = Callable[[np.ndarray], Any]  # Maps an image uint8 [H, W, 3] to the network's input
Embed = Callable[[Sequence[Any]], np.ndarray]  # Maps inputs of n images to features [n, d]
_MOST_BYTES = 2**26  # Maximum size of mu or sigma in a file; sigma of Inception features takes 32 MiB


class ReferenceImages:
    """Reference images: COCO's images, or the user's folder, or the user's file of statistics from another program."""

    def __init__(self, settings: Settings):
        self.path = settings.reference
        self.folder = settings.reference or public.public_sets()["coco"].folder / "images"

    @cached_property
    def statistics(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and covariance from the user's file; None if the user gives images."""
        return None if self.path is None or self.path.is_dir() else read_statistics(self.path)

    @cached_property
    def pictures(self) -> list[Path]:
        if self.statistics:
            raise SpecbenchError(f"{self.path} contains statistics (mu, sigma), not images", "use --reference DIR")
        if len(pictures := pictures_in(self.folder, use="reference images")) < 2:
            raise SpecbenchError(f"{self.folder} has fewer than two reference images", "add images")
        return pictures

    @property
    def summary(self) -> str:
        """Describe number and folders of the images, for messages."""
        if self.statistics:
            return f"reference: statistics in {self.path}"
        folders = dict.fromkeys(path.parent.relative_to(self.folder) for path in self.pictures)
        places = f", in {counted(len(folders), 'folder')} below it ({', '.join(map(str, folders)):.80})"
        below = places if folders != {Path("."): None} else ""
        return f"reference: {counted(len(self.pictures), 'image')} in {self.folder}{below}"

    def missing(self) -> list[tuple[str, str]]:
        if self.folder.is_dir() or self.statistics:
            return []
        return [("COCO's images are not on this disk", "specbench fetch coco --images, or --reference DIR")]

    def fits(self, meta: Mapping[str, Any]) -> bool:
        """Return whether a prompt has these reference images; COCO's images belong only to COCO's captions."""
        return self.path is not None or str(meta.get("image", "")).endswith(".jpg")

    @cached_property
    def identity(self) -> dict[str, str]:
        """Return the number of images and a digest of their names and contents."""
        lines = [f"{encodable(path.name)} {digest_of(path)}" for path in self.pictures]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return {"reference": digest[:16], "reference_n": str(len(lines))}

    def features(self, preprocess: Preprocess, embed: Embed, identity: Mapping[str, str], batch: int) -> np.ndarray:
        """Compute or read cached features [n, d] of all images; `identity` describes network and preprocessing."""

        def compute() -> np.ndarray:
            inputs = read_ahead(lambda path: preprocess(read_picture(path)), self.pictures, batch)
            return np.concatenate([embed(chunk) for chunk in inputs])

        return kept_features([dict(identity), self.identity], compute)


def read_statistics(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read mean [d] and covariance [d, d], float64, from `mu` and `sigma` of a .npz file. pytorch-fid, clean-fid and
    the reference batches of ImageNet (Dhariwal & Nichol 2021) use this format."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is no file")
        with zipfile.ZipFile(path) as packed:
            sizes = {member.filename.removesuffix(".npy"): member.file_size for member in packed.infolist()}
        if not {"mu", "sigma"} <= sizes.keys():
            raise ValueError(f"no mu and sigma in it, but {', '.join(list(sizes)[:5]) or 'nothing'}")
        if max(sizes["mu"], sizes["sigma"]) > _MOST_BYTES:
            raise ValueError("mu or sigma are too large")
        with np.load(path, allow_pickle=False) as stored:
            mean, covariance = (np.asarray(stored[name]).astype(np.float64, casting="safe") for name in ("mu", "sigma"))
        if mean.ndim != 1 or covariance.shape != mean.shape * 2:
            raise ValueError(f"a mu of {list(mean.shape)} and a sigma of {list(covariance.shape)}")
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all() and (np.diag(covariance) >= 0).all()):
            raise ValueError("numbers that are not a valid mean and covariance")
        if not np.allclose(covariance, covariance.T, rtol=1e-3, atol=1e-6):
            raise ValueError("a sigma that is not symmetric")
        spread = np.sqrt(np.diag(covariance))
        if (np.abs(covariance) > 1.001 * np.outer(spread, spread) + 1e-6).any():
            raise ValueError("a sigma with correlations above 1")
    except Exception as error:  # numpy and zipfile raise many types of errors for damaged files
        what = "is not a file of statistics (.npz with mu and sigma)"
        reason = str(getattr(error, "strerror", "") or error).partition("\n")[0][:100] or type(error).__name__
        raise SpecbenchError(f"--reference {path} {what}: {reason}", "use a folder of images") from error
    return mean, (covariance + covariance.T) / 2


def feature_matrix(vectors: pd.Series, width: int) -> np.ndarray:
    """Stack stored feature vectors to [n, width]."""
    rows = vectors.to_list()
    if not all(isinstance(vector, np.ndarray) and vector.shape == (width,) for vector in rows):
        raise damaged_features(f"not every image has a vector of {width} numbers")
    matrix = np.stack(rows) if rows else np.empty((0, width))
    if not np.isfinite(matrix).all():
        raise damaged_features("a vector contains a number that is not finite")
    return matrix


def damaged_features(problem: str) -> SpecbenchError:
    """Make the error for stored features that specbench cannot have written."""
    how = "delete the metric's folder under 'scores' of the run and score again"
    return SpecbenchError(f"the stored features are damaged: {problem}", how)


def with_influence(value: float, influence: np.ndarray | pd.Series, prompts: Sequence[str]) -> Estimate:
    """Make an estimate with a 95 % interval from the influence of each image; prompts are the independent units."""
    around = mean_difference(influence.tolist(), prompts, value)
    return Estimate(value, around.low, around.high)


def kept_features(key: object, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Return features [n, d] from the cache, or compute and cache them. `key`: plain JSON of all inputs."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / "references" / f"{digest[:16]}.npy"
    if path.is_file():
        with suppress(ValueError, EOFError):  # a damaged cache file is replaced
            return np.load(path, allow_pickle=False)
    from specbench.system.torch_state import PinnedTorch  # brings torch

    with PinnedTorch(False):  # the same state of torch as for generated images
        features = compute()
    sink = io.BytesIO()
    np.save(sink, features)
    with suppress(OSError, SpecbenchError):  # if not cached, the next call computes the features again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, sink.getvalue())
    return features
