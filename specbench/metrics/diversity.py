"""`diversity[VARIANT]`: mean distance over all pairs of a prompt's images. SJD (appendix I, Figure 17) and SJD++
(Figure 10) only show images as evidence that decoders keep diversity; this metric allows a comparison with AR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics.base import Metric, Sample, Score, Settings, described
from specbench.metrics.clip import Clip, CosineMetric
from specbench.metrics.openclip import image_embeddings, squashed
from specbench.metrics.shapes import ShapesClip
from specbench.stats import Difference, mean_difference, mean_interval

if TYPE_CHECKING:
    import torch

_SIDE, _ALEXNET = 256, "alexnet-owt-7be5be79.pth"


class Diversity(Metric):
    """Mean over prompts of the mean distance between two samples of a prompt; subclasses define `distances`."""

    samples = 2
    columns: ClassVar = {"feature": pa.list_(pa.float32())}

    def distances(self, features: Sequence[np.ndarray]) -> list[float]:
        """Return the distance of each pair of images of a prompt, by default 1 - cosine of their features."""
        unit = np.stack(features).astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        return [1.0 - float(unit[first] @ unit[second]) for first, second in combinations(range(len(unit)), 2)]

    def statistics(self, features: pd.DataFrame) -> pd.DataFrame:
        """Return a row per prompt with several samples: `prompt_id`, `value`, `images`."""
        rows = [
            {"prompt_id": prompt, "value": float(np.mean(self.distances([*images]))), "images": len(images)}
            for prompt, images in features.groupby("prompt_id", sort=False)["feature"]
            if len(images) > 1
        ]
        return pd.DataFrame(rows, columns=["prompt_id", "value", "images"])

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if statistics.empty:
            return []
        estimate = mean_interval(statistics["value"], statistics["prompt_id"])
        return [Score(self.name, estimate, int(statistics["images"].sum()), prompts=len(statistics))]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        """Compute the difference over the samples that both runs have."""
        common = features[["prompt_id", "sample"]].merge(baseline[["prompt_id", "sample"]])
        mine, theirs = (self.statistics(frame.merge(common)) for frame in (features, baseline))
        both = mine.merge(theirs, on="prompt_id", suffixes=("", "_base"))
        if both.empty:
            return None
        return mean_difference(both["value"] - both["value_base"], both["prompt_id"]), int(both["images"].sum())


class ClipDiversity(Diversity):
    """1 - cosine of image features of CLIP ViT-B/16, or of the small CLIP of `shapes`."""

    batch, packages = Clip.batch, Clip.packages

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.name = f"diversity[{variant}]"
        self.clip: CosineMetric = ShapesClip(self.settings) if variant == "shapes" else Clip("b16", self.settings)
        self.checkpoints = self.clip.checkpoints

    def identity(self) -> Mapping[str, str]:
        return {**self.clip.identity(), "distance": "1 - cosine"}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return self.clip.accepts(category, meta)

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        return self.clip.preprocess(pixels)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        embeddings = image_embeddings(self.clip.network, self.preprocessed(samples), self.settings.device)
        return [{"feature": row} for row in embeddings.numpy()]


class Lpips(Diversity):
    """LPIPS (Zhang et al. 2018) with AlexNet, from the authors' package, on images resized to 256."""

    name = "diversity[lpips-alex]"
    columns: ClassVar = {"feature": pa.list_(pa.uint8())}
    packages: ClassVar = {"lpips": "pip install lpips"}

    def identity(self) -> Mapping[str, str]:
        versions = {name: version(name) for name in ("lpips", "torch", "torchvision")}
        return {"network": "alex 0.1", "resize": described("256 x 256, Pillow bicubic", squashed), **versions}

    @cached_property
    def network(self) -> torch.nn.Module:
        import torch  # takes seconds

        # torchvision would download the weights silently and unpickle them.
        if not Path(torch.hub.get_dir(), "checkpoints", _ALEXNET).is_file():
            how = """it downloads them: python -c 'import torchvision; torchvision.models.alexnet(weights="DEFAULT")'"""
            what = f"metric '{self.name}': torchvision's {_ALEXNET} is not on this disk"
            raise SpecbenchError(what, how, MISSING_PREREQUISITE)
        import lpips  # installed by the user

        return lpips.LPIPS(net="alex", verbose=False).to(self.settings.device).eval()

    def features_of(self, sample: Sample) -> dict[str, object]:
        """Return the pixels as features, because LPIPS compares images, not feature vectors."""
        return {"feature": squashed(sample.pixels, _SIDE).reshape(-1)}

    def distances(self, features: Sequence[np.ndarray]) -> list[float]:
        import torch  # takes seconds

        from specbench.system.torch_state import PinnedTorch  # brings torch

        with PinnedTorch():
            images = torch.from_numpy(np.stack(features)).view(-1, _SIDE, _SIDE, 3).permute(0, 3, 1, 2) / 127.5 - 1
            images = images.to(self.settings.device)
            return [
                float(self.network(images[first][None], images[second][None]))
                for first, second in combinations(range(len(images)), 2)
            ]
