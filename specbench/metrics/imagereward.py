"""`imagereward`: a learned human preference (Xu et al. 2023), BLIP's image-grounded text encoder with a small head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import PerImageMetric, Sample, described
from specbench.metrics.blip import Tokenizer, linear_layers, load_weights, part_of, text_network, vision_network
from specbench.metrics.crops import short_side_centre
from specbench.metrics.openclip import normalised

MEAN, STD = 0.16717362830052426, 1.0333394966054072


class RewardNetwork(nn.Module):
    """ImageReward network: images and token ids to rewards."""

    def __init__(self, weights: Mapping[str, Tensor]):
        super().__init__()
        self.vision = vision_network(part_of(weights, "blip.visual_encoder."))
        self.text = text_network(part_of(weights, "blip.text_encoder."), self.vision.config.hidden_size)
        self.head = linear_layers(part_of(weights, "mlp.layers."))

    def forward(self, images_BCHW: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Rewards [B]; published to have mean 0 and deviation 1 on the authors' data."""
        seen = self.vision(images_BCHW).last_hidden_state
        states_BTD = self.text(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        ).last_hidden_state
        return (self.head(states_BTD[:, 0])[:, 0] - MEAN) / STD


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
