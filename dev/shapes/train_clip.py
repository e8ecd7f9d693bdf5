"""Train the small CLIP on rendered scenes.

The loss is CLIP's, image to caption and caption to image within a batch, with two changes that are possible because the
scenes are known. Captions that are true of another image too are no negatives for this image. In addition to the other
captions, each image is contrasted with its own near misses. Held-out meanings are never seen.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from dev.shapes.data import pixels
from dev.shapes.negatives import is_true, near_misses, seen
from dev.shapes.resumable import save_half, train
from dev.shapes.train_tokenizer import learning_rate
from specbench.metrics.openclip import MEAN, STD, import_open_clip
from specbench.models.shapes import captions
from specbench.models.shapes.scene import Scene, SceneRequest, describe, realize, sample_request

_IMAGES = 12_288
_BATCH = 64
_STEPS = 400
_PEAK = 1.5e-3
NEAR_MISSES = 3
_TRIES = 1000
MAX_SCALE = 50.0
UNKNOWN, START, END = "<unknown>", "<start>", "<end>"
CONTEXT = captions.PREFIX + 1
_MODEL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64},
    "text_cfg": {
        "context_length": CONTEXT,
        "vocab_size": len(captions.VOCABULARY) + 2,
        "hf_tokenizer_name": "shapes",
        "width": 64,
        "heads": 2,
        "layers": 2,
    },
}


def write_definition(folder: Path) -> None:
    """The model's configuration and vocabulary as open_clip reads them from a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": _MODEL, "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(),
        model_max_length=CONTEXT,
        pad_token=captions.PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
    )
    tokenizer.save_pretrained(folder)


def word_tokenizer() -> Tokenizer:
    """The meaningful words of a caption as `captions.words` reads it, between start and end; the end has the highest
    id, where open_clip's text tower reads."""
    words = [word for word in captions.VOCABULARY if not word.startswith("<")]
    vocabulary = {word: index for index, word in enumerate((captions.PAD, UNKNOWN, START, *words, END))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    aliases = [(rf"\b{raw}\b" if raw.isalnum() else raw, f" {word} ") for raw, word in captions.ALIASES.items()]
    fillers = rf"\b({'|'.join(sorted(captions.FILLERS))})\b|[.;]"
    rewrites = [*aliases, (fillers, " "), (r"\band(\s+and)+\b", "and")]
    steps = [normalizers.Replace(Regex(pattern), word) for pattern, word in rewrites]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(START, vocabulary[START]), (END, vocabulary[END])]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    return tokenizer


def scenes_with_captions(count: int, rng: np.random.Generator, held_out: bool = False) -> list[Scene]:
    """Scenes with a caption that is held out if `held_out`, else with a caption that is not."""
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = realize(sample_request(rng), rng)
        if request_of(scene, rng, held_out) is not None:
            scenes.append(scene)
    return scenes


def clip_input(images: Tensor) -> Tensor:
    """uint8 [B, 3, 64, 64] to CLIP's normalised floats."""
    return (images.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def request_of(scene: Scene, rng: np.random.Generator, held_out: bool = False) -> SceneRequest | None:
    """A true request that is held out if `held_out`, else not; None if many tries found no such request."""
    tries = (describe(scene, rng) for _ in range(_TRIES))
    return next((request for request in tries if request.held_out() == held_out), None)


def true_pairs(requests: Sequence[SceneRequest], scenes: Sequence[Scene]) -> Tensor:
    """bool [scenes, requests]: whether each request is true of each scene."""
    needed = [{(clause.shape, clause.color) for clause in request.clauses} for request in requests]
    rows = []
    for scene in scenes:
        objects = seen(scene)
        there = {(shape, color) for item in objects for shape, color in ((item.shape, item.color), (item.shape, None))}
        rows.append([w <= there and is_true(r, scene, objects) for r, w in zip(requests, needed, strict=True)])
    return torch.tensor(rows)


def contrastive_loss(images: Tensor, texts: Tensor, misses: Tensor, true: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss with near misses.

    Args:
        images, texts: unit vectors [B, d]; row i of images belongs to row i of texts.
        misses: unit vectors [B, M, d], padded with zeros if an image has fewer than M near misses.
        true: bool [B, B], which captions (columns) are true of which images.
        scale: of the cosines.
    """
    others = true & ~torch.eye(len(true), dtype=torch.bool)
    logits = (scale * images @ texts.T).masked_fill(others, -torch.inf)
    near = (scale * torch.einsum("bd,bmd->bm", images, misses)).masked_fill(~misses.any(-1), -torch.inf)
    target = torch.arange(len(images))
    to_text = F.cross_entropy(torch.cat([logits, near], 1), target)
    return (to_text + F.cross_entropy(logits.T, target)) / 2


class ClipTrainer:
    """One step on a batch that depends only on seed and step number."""

    def __init__(self, folder: Path, steps: int, seed: int):
        torch.manual_seed(seed)
        self.seed = seed
        self.model = import_open_clip().create_model(f"local-dir:{folder}", load_weights=False)
        self.words = word_tokenizer()
        self.words.enable_padding(length=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_PEAK, betas=(0.9, 0.98), weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: learning_rate(s, steps))

    @cached_property
    def scenes(self) -> list[Scene]:
        return scenes_with_captions(_IMAGES, np.random.default_rng([9, self.seed]))

    @cached_property
    def images(self) -> Tensor:
        return pixels(self.scenes)

    def step(self, number: int) -> dict[str, float]:
        rng = np.random.default_rng([10, self.seed, number])
        rows = rng.choice(len(self.scenes), _BATCH, replace=False)
        scenes = [self.scenes[row] for row in rows]
        requests = [request for scene in scenes if (request := request_of(scene, rng))]
        assert len(requests) == _BATCH, "every scene had a caption before"
        near = [near_misses(r, s, NEAR_MISSES, rng) for r, s in zip(requests, scenes, strict=True)]
        there = torch.tensor([[m < len(misses) for m in range(NEAR_MISSES)] for misses in near])
        texts = [captions.caption(request) for request in [*requests, *(miss for misses in near for miss in misses)]]
        self.model.train()
        images = self.model.encode_image(clip_input(self.images[torch.from_numpy(rows)]), normalize=True)
        ids = torch.tensor([encoding.ids for encoding in self.words.encode_batch(texts)])
        embedded = self.model.encode_text(ids, normalize=True)
        misses = images.new_zeros(_BATCH, NEAR_MISSES, images.shape[1]).masked_scatter(
            there[..., None], embedded[_BATCH:]
        )
        scale = self.model.logit_scale.exp().clamp(max=MAX_SCALE)
        loss = contrastive_loss(images, embedded[:_BATCH], misses, true_pairs(requests, scenes), scale)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return {"loss": loss.item(), "scale": scale.item()}


def train_clip(out: Path, folder: Path, steps: int = _STEPS, seed: int = 0) -> bool:
    """Train, or continue the checkpoint in `out`; after the last step write the weights to `folder` in float16."""
    out.mkdir(parents=True, exist_ok=True)
    write_definition(folder)
    trainer = ClipTrainer(folder, steps, seed)
    parts = {"model": trainer.model, "optimizer": trainer.optimizer, "schedule": trainer.schedule}
    done = train(out, "clip", parts, steps, trainer.step)
    if done:
        save_half(trainer.model, folder / "open_clip_model.safetensors")
    return done
