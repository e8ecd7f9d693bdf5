"""Train the feature network to read background, kinds of objects and their number from pictures of scenes."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dev.shapes.data import pixels
from dev.shapes.resumable import save_half, train
from dev.shapes.train_tokenizer import learning_rate
from specbench.models.shapes.scene import COLORS, MAX_COUNT, SHAPES, TEXTURES, Scene, realize, sample_request
from specbench.models.shapes.tokenizer import FEATURES, FeatureNetwork

_IMAGES = 12_288
_BATCH = 64
_STEPS = 500
_PEAK = 5e-3
_KINDS = [(shape, color) for shape in SHAPES for color in COLORS]


class Reader(nn.Module):
    """The feature network, and the linear read-outs that are used only in training."""

    def __init__(self):
        super().__init__()
        self.features = FeatureNetwork()
        self.texture = nn.Linear(FEATURES, len(TEXTURES))
        self.kinds = nn.Linear(FEATURES, len(_KINDS))
        self.count = nn.Linear(FEATURES, MAX_COUNT)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the background, of the presence of each kind of object, and of the number of objects."""
        features = self.features(images)
        return self.texture(features), self.kinds(features), self.count(features)


def scenes_of(count: int, seed: int) -> list[Scene]:
    rng = np.random.default_rng([11, seed])
    return [realize(sample_request(rng), rng) for _ in range(count)]


def labels(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor, Tensor]:
    """Targets of `Reader`: background [N], kinds 0 or 1 [N, 24], number of objects minus one [N]."""
    kinds = torch.zeros(len(scenes), len(_KINDS))
    for row, scene in enumerate(scenes):
        kinds[row, [_KINDS.index((item.shape, item.color)) for item in scene.items]] = 1
    texture = torch.tensor([TEXTURES.index(scene.texture) for scene in scenes])
    return texture, kinds, torch.tensor([len(scene.items) - 1 for scene in scenes])


@torch.inference_mode()
def accuracies(reader: Reader, count: int = 1024, seed: int = 1) -> dict[str, float]:
    """Share of fresh pictures whose background, kinds of objects (all of them) and number of objects are read right."""
    scenes = scenes_of(count, seed)
    texture, kinds, number = reader.eval()(pixels(scenes))
    truth = labels(scenes)
    right = {
        "texture": texture.argmax(1) == truth[0],
        "kinds": ((kinds > 0) == truth[1]).all(1),
        "count": number.argmax(1) == truth[2],
    }
    return {name: round(float(hits.float().mean()), 4) for name, hits in right.items()}


class FeatureTrainer:
    """Training steps. The batch of a step depends only on the seed and the step's number."""

    def __init__(self, steps: int, seed: int):
        torch.manual_seed(seed)
        self.seed = seed
        self.reader = Reader()
        self.optimizer = torch.optim.AdamW(self.reader.parameters(), lr=_PEAK, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: learning_rate(s, steps))

    @cached_property
    def data(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Pictures and labels."""
        scenes = scenes_of(_IMAGES, seed=2 * self.seed)
        return pixels(scenes), labels(scenes)

    def step(self, number: int) -> dict[str, float]:
        images, targets = self.data
        rng = np.random.default_rng([12, self.seed, number])
        rows = torch.from_numpy(rng.choice(len(images), _BATCH, replace=False))
        texture, kinds, count = self.reader(images[rows])
        truth = [label[rows] for label in targets]
        losses = {
            "texture": F.cross_entropy(texture, truth[0]),
            "kinds": F.binary_cross_entropy_with_logits(kinds, truth[1], reduction="none").sum(1).mean(),
            "count": F.cross_entropy(count, truth[2]),
        }
        self.optimizer.zero_grad(set_to_none=True)
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(self.reader.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return {name: loss.item() for name, loss in losses.items()}


def train_features(out: Path, file: Path, steps: int = _STEPS, seed: int = 0) -> dict[str, float] | None:
    """Train, or continue the checkpoint in `out`. After the last step, write the network to `file` in float16 and
    return its accuracies on fresh pictures."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = FeatureTrainer(steps, seed)
    parts = {"reader": trainer.reader, "optimizer": trainer.optimizer, "schedule": trainer.schedule}
    if not train(out, "features", parts, steps, trainer.step):
        return None
    save_half(trainer.reader.features, file)
    return accuracies(trainer.reader, seed=2 * seed + 1)
