"""`compbench[...]`: the parts of T2I-CompBench++ (Huang et al. 2025) that are computed without the paper's programs.
`blip-vqa` asks BLIP about every noun phrase of colour, shape and texture prompts, parsed by spaCy's small English model
as in these programs. `clip-b32` is the cosine of non-spatial prompts and their images. The other parts need the paper's
detector, which is not included because of its licence: export the images to the paper's programs, and import the
answers (`specbench.metrics.official_exchange`)."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specbench.metrics import blip
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import PerImageMetric, Sample, Score, Settings, described, part_scores
from specbench.metrics.clip import Clip
from specbench.metrics.openclip import normalised, squashed
from specbench.stats import Difference

SPACY_MODEL = "en_core_web_sm"
YES, NO = 2748, 2053
MOST_QUESTIONS = 8
NOT_ASKED = ("top", "the side", "the left", "the right")
REMOVED = '.!"()*#:;~'


def questions(phrases: Sequence[str]) -> list[str]:
    """Make at most eight questions for BLIP from the noun phrases of a prompt."""
    asked = [phrase for phrase in phrases if phrase not in NOT_ASKED][:MOST_QUESTIONS]
    return [f"{phrase}?".lower().translate(str.maketrans("", "", REMOVED)) for phrase in asked]


class CategoryMetric(PerImageMetric):
    """Base class of metrics with a score "metric:category" for each of `categories`, and no mean over categories."""

    categories: Sequence[str]

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return category in self.categories and "line" in meta

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        return part_scores(self.name, statistics, "category", "value")

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return super().difference(features, baseline) if features["category"].nunique() == 1 else None


class CompBenchClip(CategoryMetric, Clip):
    """Cosine under CLIP ViT-B/32 with the unmodified prompt."""

    categories = ("non_spatial",)

    def __init__(self, settings: Settings | None = None):
        Clip.__init__(self, "b32", settings)
        self.name = "compbench[clip-b32]"


class VqaNetwork(nn.Module):
    """BLIP-VQA (Li et al. 2022): probability of "yes", relative to "no", for questions about an image."""

    def __init__(self, weights: Mapping[str, Tensor]):
        super().__init__()
        self.vision = blip.vision_network(blip.part_of(weights, "visual_encoder."))
        self.reader = blip.text_network(blip.part_of(weights, "text_encoder."), self.vision.config.hidden_size)
        width = self.reader.config.hidden_size
        self.answerer = blip.text_network(blip.part_of(weights, "text_decoder."), width, head=True)

    def forward(self, seen_BSD: Tensor, ids_BT: Tensor) -> Tensor:
        """Compute the probabilities of "yes", float32 [B], from features of images. Questions must have equal lengths,
        because padding would change the result."""
        states = self.reader(
            input_ids=ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            encoder_hidden_states=seen_BSD,
            encoder_attention_mask=torch.ones(seen_BSD.shape[:2], dtype=torch.long, device=ids_BT.device),
        ).last_hidden_state
        start = torch.full((len(ids_BT), 1), blip.DECODE_TOKEN, device=ids_BT.device)
        logits_BV = self.answerer(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            encoder_hidden_states=states,
            encoder_attention_mask=torch.ones_like(ids_BT),
            use_cache=False,
        ).logits[:, -1]
        return torch.sigmoid(logits_BV[:, YES] - logits_BV[:, NO])


class BlipVqa(CategoryMetric):
    """BLIP-VQA score of T2I-CompBench (Huang et al. 2023), 0 to 1: product of the probabilities of "yes" over the noun
    phrases of the prompt, each rounded to four digits."""

    name = "compbench[blip-vqa]"
    categories = ("color", "shape", "texture")
    batch = 8
    checkpoints = ("blip-vqa", "bert-vocabulary")
    packages: ClassVar = {
        "spacy": "pip install spacy",
        SPACY_MODEL: f"python -m spacy download {SPACY_MODEL} (the paper's programs use its version 3.5.0)",
    }

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": checkpoints.file_digest("blip-vqa"),
            "vocabulary": checkpoints.CHECKPOINTS["bert-vocabulary"].digest,
            "resize": described("squashed to 480, Pillow bicubic", squashed),
            "phrases": f"{SPACY_MODEL} {version(SPACY_MODEL)}",
            **{package: version(package) for package in ("spacy", "transformers", "torch", "pillow")},
        }

    @cached_property
    def network(self) -> VqaNetwork:
        weights = blip.load_weights(self.weights_file("blip-vqa"))
        return VqaNetwork(weights).float().eval().requires_grad_(False).to(self.settings.device)

    @cached_property
    def tokenizer(self) -> blip.Tokenizer:
        return blip.Tokenizer(self.weights_file("bert-vocabulary"))

    @cached_property
    def phrases(self) -> Callable[[str], list[str]]:
        import spacy  # an extra

        parse = spacy.load(SPACY_MODEL)
        return lambda text: [chunk.text for chunk in parse(text).noun_chunks]

    def preprocess(self, pixels: np.ndarray) -> Tensor:
        return normalised(squashed(pixels, self.network.vision.config.image_size))

    @torch.inference_mode()
    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        images_BCHW = torch.stack(self.preprocessed(samples)).to(self.settings.device)
        seen_BSD = self.network.vision(images_BCHW).last_hidden_state
        asked = [
            (number, [blip.ENCODE_TOKEN, *self.tokenizer.ids(question)[1:]])
            for number, sample in enumerate(samples)
            for question in questions(self.phrases(sample.prompt))
        ]
        answers = [1.0] * len(samples)
        for place, answer in enumerate(self._answers(seen_BSD, asked)):
            answers[asked[place][0]] *= round(answer, 4)
        return [{"value": value} for value in answers]

    def _answers(self, seen_BSD: Tensor, asked: Sequence[tuple[int, list[int]]]) -> list[float]:
        """Return answers in the order of `asked`. Questions of equal length form a batch, so that none is padded."""
        by_length = defaultdict(list)
        for place, (_, ids) in enumerate(asked):
            by_length[len(ids)].append(place)
        answers = [0.0] * len(asked)
        for places in by_length.values():
            ids = torch.tensor([asked[place][1] for place in places], device=seen_BSD.device)
            probabilities = self.network(seen_BSD[[asked[place][0] for place in places]], ids)
            for place, answer in zip(places, probabilities.tolist(), strict=True):
                answers[place] = answer
        return answers
