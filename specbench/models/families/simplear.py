"""SimpleAR 0.5B and 1.5B (1024 px): transformers' `Qwen2ForCausalLM` whose vocabulary ends with the 64000 Cosmos codes.

The official loop may sample text tokens inside an image and clamps them to codes afterwards; here only codes can be
sampled. A repetition penalty in `generation_config.json`, which the official script inherits, is part of the target.
"""

from __future__ import annotations

from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import (
    build_network,
    drop,
    read_model_config,
    read_tensors,
    read_tokenizer,
)
from specbench.models.families import cosmos
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.generation_config import read_repetition_penalty
from specbench.models.transformer.attention import use_grouped_attention
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.models.transformer.repetition_penalty import PenalisedSession

BEGIN, BEGIN_IMAGE = "<|t2i|>", "<|soi|>"
_NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion"
)
_WORDS = 151_672
_SPECIALS = {BEGIN: 151_665, BEGIN_IMAGE: 151_667}
QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
TINY_QWEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class SimpleAR(FamilyModel):
    """Attributes: repetition_penalty: on image tokens that the image already holds; 1 for none."""

    marks: tuple[str, ...] = (BEGIN, BEGIN_IMAGE)
    repetition_penalty = 1.0

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        if self.repetition_penalty == 1.0:
            return super().begin(prefix, guidance, columns)
        use_grouped_attention(self.backbone)
        return PenalisedSession(self, prefix, guidance, columns, self.repetition_penalty)

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        asked = f"{BEGIN}A highly realistic image of {text}{BEGIN_IMAGE}"
        return self.words(asked), self.words(BEGIN + _NEGATIVE + BEGIN_IMAGE)


def load(request: LoadRequest) -> SimpleAR:
    if not request.found:
        config = Qwen2Config(**request.sized_network(QWEN, TINY_QWEN))
        network = request.randomise(build_network(Qwen2ForCausalLM, config))
        decoder = cosmos.random_cosmos(cosmos.TINY if request.info.choice.tiny else cosmos.PUBLISHED, request.device)
        return SimpleAR.after_words(request, stand_in_tokenizer(_SPECIALS, first_byte=0), network, _WORDS, decoder)
    files, decoder_files = request.found
    network, penalty = load_qwen(request, files)
    tokenizer = read_tokenizer(files)
    decoder = cosmos.load_cosmos(decoder_files, request.device)
    words = tokenizer.get_vocab_size(with_added_tokens=True)
    model = SimpleAR.after_words(request, tokenizer, network, words, decoder)
    model.repetition_penalty = penalty
    return model


def load_qwen(request: LoadRequest, files: CheckpointFiles, *unused: str) -> tuple[nn.Module, float]:
    """A stored Qwen2 without the tensors whose names start with `unused`, and its repetition penalty."""
    penalty = read_repetition_penalty(files)
    config = read_model_config(files, Qwen2Config)
    if config.use_sliding_window:
        raise files.refusal(": sliding-window attention is not supported", files.named("config.json"))
    network = build_network(Qwen2ForCausalLM, config, found=files)
    return request.fill(network, drop(read_tensors(files), unused), files), penalty
