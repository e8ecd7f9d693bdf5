"""`geneval2[qwen3-vl-8b]`: GenEval 2 (Kamath et al. 2025), Soft-TIFA by Qwen3-VL. Each atom of the prompt has one
question, scored by the probability of the right answer as the first token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from PIL import Image

from specbench.errors import SpecbenchError
from specbench.metrics.base import PerImageMetric, Sample, Score, answer_scores, mean_score, part_scores

GENEVAL2_JUDGE = "Qwen/Qwen3-VL-8B-Instruct"
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
Judge = Callable[[np.ndarray, str, Sequence[str]], float]
"""Function of an image uint8 [H, W, 3], a question and its right answers; returns the answers' total probability."""


def right_answers(question: str, answer: str) -> tuple[str, ...]:
    """Return the answers that count as right in the authors' program."""
    if not question.startswith("How many"):
        return "Yes", "yes", " yes", " Yes"
    number = str(_NUMBERS.index(answer) + 1) if answer in _NUMBERS else "other"
    return answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", number, f" {number}"


class QwenJudge:
    """First-token probabilities of a vision-language model of transformers."""

    def __init__(self, model: torch.nn.Module, processor: Any):
        self.model, self.processor = model.eval(), processor

    @classmethod
    def load(cls, folder: Path, device: str) -> QwenJudge:
        from transformers import AutoProcessor, Qwen3VLForConditionalGeneration  # takes seconds

        model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype="auto"
        )
        return cls(model.to(device), AutoProcessor.from_pretrained(folder, local_files_only=True))

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray, question: str, answers: Sequence[str]) -> float:
        image = {"type": "image", "image": Image.fromarray(pixels)}
        text = {"type": "text", "text": f"{question} Answer in one word."}
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": [image, text]}],
            tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
        ).to(self.model.device)  # fmt: skip
        shares = self.model(**inputs).logits[0, -1].float().softmax(0)
        return sum(shares[self.processor.tokenizer.encode(answer)[0]].item() for answer in answers)


class GenEval2(PerImageMetric):
    """Soft-TIFA: geometric mean over a prompt's atoms, then mean over images. Parts: the score per number of atoms (`:3
    atoms`), the arithmetic mean over atoms (`:atoms`), and arithmetic means per skill."""

    name = "geneval2[qwen3-vl-8b]"
    batch = 4
    columns: ClassVar = {"value": pa.float32(), "atoms": pa.float32(), "answers": pa.string()}
    repositories: ClassVar = {"judge": GENEVAL2_JUDGE}
    files = ("config.json", "*.safetensors*", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json",
             "chat_template*")  # fmt: skip
    packages: ClassVar = {"torchvision": "pip install torchvision"}

    def identity(self) -> Mapping[str, str]:
        judge = self.network_identity(GENEVAL2_JUDGE)
        return {"judge": judge, **{name: version(name) for name in ("torch", "transformers", "torchvision")}}

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return "vqa_list" in meta and "skills" in meta

    @cached_property
    def judge(self) -> Judge:
        return QwenJudge.load(self.network_folder(GENEVAL2_JUDGE), self.settings.device)

    def features_of(self, sample: Sample) -> dict[str, object]:
        asked, skills = sample.meta["vqa_list"], sample.meta["skills"]
        if not asked or len(asked) != len(skills):
            what = f"prompt '{sample.prompt_id}' has {len(asked)} questions and {len(skills)} skills"
            raise SpecbenchError(what, "use the prompt set of: specbench fetch geneval2")
        atoms = [self.judge(sample.pixels, question, right_answers(question, answer)) for question, answer in asked]
        with np.errstate(divide="ignore"):
            geometric = float(np.exp(np.mean(np.log(atoms))))
        kept = json.dumps(list(zip(skills, atoms, strict=True)))
        return {"value": geometric, "atoms": float(np.mean(atoms)), "answers": kept}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if statistics.empty:
            return []
        results = [mean_score(self.name, statistics, "value"), mean_score(f"{self.name}:atoms", statistics, "atoms")]
        results += part_scores(self.name, statistics.dropna(subset="category"), "category", "value")
        return results + answer_scores(self.name, statistics, map(json.loads, statistics["answers"]))
