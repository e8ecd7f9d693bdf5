"""`pickscore` (Kirstain et al. 2023), a preference learned by CLIP ViT-H/14, and `aesthetic[sac+logos+ava1]` (Schuhmann
2022), a linear predictor of how much people like a picture, whatever its caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Sample, Settings
from specbench.metrics.blip import linear_layers, load_weights, part_of
from specbench.metrics.clip import Clip, CosineMetric
from specbench.metrics.openclip import image_embeddings

PICKSCORE_REPOSITORY = "yuvalkirstain/PickScore_v1"


class TransformersClip(nn.Module):
    """transformers' CLIP from a checkpoint folder, called as one of open_clip."""

    context_length = 77

    def __init__(self, folder: Path):
        super().__init__()
        from transformers import CLIPModel  # takes seconds

        self.model = CLIPModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).float().eval()
        size = self.model.config.vision_config.image_size
        self.visual = SimpleNamespace(image_size=(size, size))

    def encode_image(self, images_BCHW: Tensor, normalize: bool) -> Tensor:
        return F.normalize(self.model.get_image_features(images_BCHW).pooler_output, dim=-1)

    def encode_text(self, ids_BT: Tensor, normalize: bool) -> Tensor:
        return F.normalize(self.model.get_text_features(ids_BT).pooler_output, dim=-1)


class PickScore(CosineMetric):
    """PickScore (Kirstain et al. 2023): cosine of image and caption times the learned scale, about 15 to 25."""

    name = "pickscore"
    repositories: ClassVar = {"network": PICKSCORE_REPOSITORY}

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": checkpoints.folder_identity(self.network_folder(PICKSCORE_REPOSITORY)),
            "transformers": version("transformers"),
            **super().identity(),
        }

    @cached_property
    def network(self) -> TransformersClip:
        network = TransformersClip(self.network_folder(PICKSCORE_REPOSITORY))
        return network.requires_grad_(False).to(self.settings.device)

    @property
    def scale(self) -> float:
        return self.network.model.logit_scale.exp().item()


class Aesthetic(Clip):
    """LAION aesthetic predictor V2 (Schuhmann 2022): linear layers on the unit CLIP ViT-L/14 embedding, about 1 to
    10."""

    def __init__(self, settings: Settings | None = None):
        super().__init__("l14", settings)
        self.name, self.checkpoints = "aesthetic[sac+logos+ava1]", ("aesthetic", "clip-l14")

    def identity(self) -> Mapping[str, str]:
        digests = {name: checkpoints.CHECKPOINTS[name].digest for name in self.checkpoints}
        return {**digests, **CosineMetric.identity(self)}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return True  # it reads no caption

    def captions_cut(self, captions: Sequence[str]) -> None:
        return None

    @cached_property
    def head(self) -> nn.Module:
        weights = load_weights(self.weights_file("aesthetic"))
        return linear_layers(part_of(weights, "layers.")).requires_grad_(False)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        images = image_embeddings(self.network, self.preprocessed(samples), self.settings.device)
        with torch.inference_mode():
            return [{"value": value} for value in self.head(images)[:, 0].tolist()]
