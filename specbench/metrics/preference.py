"""Learned human preference: `hpsv2[...]`, `imagereward`, `pickscore`, and `aesthetic[...]`, which ignores captions.
HPSv2 loads the authors' checkpoints into open_clip. ImageReward is BLIP's image-grounded text encoder with a small
head."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import PerImageMetric, Sample, Settings, described
from specbench.metrics.blip import Tokenizer, linear_layers, load_weights, part_of, text_network, vision_network
from specbench.metrics.clip import Clip, CosineMetric, clip_versions
from specbench.metrics.openclip import centred, image_embeddings, normalised, planes, short_side_centre, untrained_model

PICKSCORE_REPOSITORY = "yuvalkirstain/PickScore_v1"
HPS_ARCHITECTURE = "ViT-H-14"
_HPS_SIZE = 224
REWARD_MEAN, REWARD_STD = 0.16717362830052426, 1.0333394966054072


def hps_input(pixels: np.ndarray) -> Tensor:
    """Preprocess uint8 [H, W, 3] for HPSv2: normalised float32 [3, 224, 224]."""
    x_BCHW = planes(pixels)[None] / 255
    height, width = x_BCHW.shape[2:]
    scale = _HPS_SIZE / max(height, width)
    target = (round(height * scale), round(width * scale))
    if scale != 1:
        x_BCHW = F.interpolate(x_BCHW, target, mode="bicubic", antialias=True, align_corners=False)
    down, across = _HPS_SIZE - target[0], _HPS_SIZE - target[1]
    x_BCHW = F.pad(x_BCHW, (across // 2, across - across // 2, down // 2, down - down // 2))
    return centred(x_BCHW[0])


def load_hpsv2(path: Path, device: str, architecture: str = HPS_ARCHITECTURE) -> torch.nn.Module:
    """Build the network in float32 from the authors' checkpoint. The caller has checked the digest."""
    model = untrained_model(architecture)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
    return model.float().eval().requires_grad_(False).to(device)


class Hpsv2(CosineMetric):
    """HPSv2 (Wu et al. 2023): cosine of image and caption, -1 to 1, in float32."""

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.name = f"hpsv2[{variant}]"
        self.checkpoints = (f"hpsv2-{variant}",)

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": checkpoints.CHECKPOINTS[self.checkpoints[0]].digest,
            "resize": described("longer side 224, tensor bicubic, antialiased, black padding", hps_input),
            **clip_versions(),
        }

    @cached_property
    def network(self) -> torch.nn.Module:
        return load_hpsv2(self.weights_file(self.checkpoints[0]), self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> Tensor:
        return hps_input(pixels)


class RewardNetwork(nn.Module):
    """ImageReward network; maps images and token ids to rewards."""

    def __init__(self, weights: Mapping[str, Tensor]):
        super().__init__()
        self.vision = vision_network(part_of(weights, "blip.visual_encoder."))
        self.text = text_network(part_of(weights, "blip.text_encoder."), self.vision.config.hidden_size)
        self.head = linear_layers(part_of(weights, "mlp.layers."))

    def forward(self, images_BCHW: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Compute rewards [B], normalised as published: mean 0 and standard deviation 1 on the authors' data."""
        seen = self.vision(images_BCHW).last_hidden_state
        states_BTD = self.text(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        ).last_hidden_state
        return (self.head(states_BTD[:, 0])[:, 0] - REWARD_MEAN) / REWARD_STD


class ImageReward(PerImageMetric):
    """ImageReward (Xu et al. 2023): reward of image and caption; unbounded, usually between -2 and 2."""

    name = "imagereward"
    checkpoints = ("imagereward", "bert-vocabulary")

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": checkpoints.CHECKPOINTS["imagereward"].digest,
            "vocabulary": checkpoints.CHECKPOINTS["bert-vocabulary"].digest,
            "resize": described("short side, Pillow bicubic, centre", short_side_centre),
            **{package: version(package) for package in ("transformers", "torch", "pillow")},
        }

    @cached_property
    def network(self) -> RewardNetwork:
        weights = load_weights(self.weights_file("imagereward"))
        return RewardNetwork(weights).float().eval().requires_grad_(False).to(self.settings.device)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.weights_file("bert-vocabulary"))

    def preprocess(self, pixels: np.ndarray) -> Tensor:
        return normalised(short_side_centre(pixels, self.network.vision.config.image_size))

    def captions_cut(self, captions: Sequence[str]) -> tuple[int, int]:
        return self.tokenizer.cut(captions)

    @torch.inference_mode()
    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        images = torch.stack(self.preprocessed(samples))
        ids, mask = self.tokenizer.padded([sample.prompt for sample in samples])
        device = self.settings.device
        rewards = self.network(images.to(device), ids.to(device), mask.to(device))
        return [{"value": value} for value in rewards.tolist()]


class TransformersClip(nn.Module):
    """CLIP of transformers, loaded from a checkpoint folder, with open_clip's interface."""

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
            "weights": self.network_identity(PICKSCORE_REPOSITORY),
            "transformers": version("transformers"),
            **super().identity(),
        }

    @cached_property
    def network(self) -> TransformersClip:
        network = TransformersClip(self.network_folder(PICKSCORE_REPOSITORY)).requires_grad_(False)
        self.scale = network.model.logit_scale.exp().item()
        return network.to(self.settings.device)


class Aesthetic(Clip):
    """LAION aesthetic predictor V2 (Schuhmann 2022): linear layers on the unit CLIP ViT-L/14 embedding, 1 to 10."""

    def __init__(self, settings: Settings | None = None):
        super().__init__("l14", settings)
        self.name, self.checkpoints = "aesthetic[sac+logos+ava1]", ("aesthetic", "clip-l14")

    def identity(self) -> Mapping[str, str]:
        digests = {name: checkpoints.CHECKPOINTS[name].digest for name in self.checkpoints}
        return {**digests, **CosineMetric.identity(self)}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return True  # captions are ignored

    def captions_cut(self, captions: Sequence[str]) -> None:
        return None

    @cached_property
    def head(self) -> nn.Module:
        return linear_layers(part_of(load_weights(self.weights_file("aesthetic")), "layers.")).requires_grad_(False)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        images = image_embeddings(self.network, self.preprocessed(samples), self.settings.device)
        with torch.inference_mode():
            return [{"value": value} for value in self.head(images)[:, 0].tolist()]
