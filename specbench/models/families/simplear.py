"""SimpleAR 0.5B and 1.5B (1024 px): transformers' `Qwen2ForCausalLM` whose vocabulary ends with the 64000 Cosmos codes.

The official loop may sample text tokens inside an image and clamps them to codes afterwards; here only codes can be
sampled. A repetition penalty in `generation_config.json`, which the official script inherits, is part of the target.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import (
    build_network,
    fill,
    randomise,
    read_model_config,
    read_tensors,
    read_tokenizer,
)
from specbench.models.families import vq_decoder
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.generation_config import read_repetition_penalty
from specbench.models.transformer.attention import use_grouped_attention
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.models.transformer.repetition_penalty import PenalisedSession

TRUSTED: set[str] = set()
"""SHA-256 digests that need no consent. None of a publisher's is known to this project."""
_TRUST_VARIABLE = "SPECBENCH_TRUST"
BEGIN, BEGIN_IMAGE = "<|t2i|>", "<|soi|>"
_NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion"
)
_WORDS = 151_672
_SPECIALS = {BEGIN: 151_665, BEGIN_IMAGE: 151_667}
_QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class SimpleAR(FamilyModel):
    """Attributes: repetition_penalty: on image tokens that the image already holds; 1 for none."""

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
        config = Qwen2Config(**request.sized_network(_QWEN, _TINY))
        network = randomise(build_network(Qwen2ForCausalLM, config), request.device, request.dtype)
        return _model(
            request, stand_in_tokenizer(_SPECIALS, first_byte=0), network, _WORDS, vq_decoder.FsqColours(request.device)
        )
    files, decoder_files = request.found
    penalty = read_repetition_penalty(files)
    config = read_model_config(files, Qwen2Config)
    if config.use_sliding_window:
        raise files.refusal(": sliding-window attention is not supported", files.named("config.json"))
    network = build_network(Qwen2ForCausalLM, config, found=files)
    fill(network, read_tensors(files), files, request.device, request.dtype)
    tokenizer = read_tokenizer(files)
    script = _load_script(decoder_files, decoder_files.named("decoder.jit"), request.device)
    decoder = vq_decoder.CosmosDecoder(script, request.device)
    model = _model(request, tokenizer, network, tokenizer.get_vocab_size(with_added_tokens=True), decoder)
    model.repetition_penalty = penalty
    return model


def _model(
    request: LoadRequest, tokenizer, network: nn.Module, words: int, decoder: vq_decoder.ImageDecoder
) -> SimpleAR:
    """Image tokens follow the tokenizer's own words, as many as the head has rows left."""
    head = network.lm_head.weight[words:]
    return SimpleAR(request, tokenizer, network.model, head, range(words, words + len(head)), decoder)


def _load_script(files: CheckpointFiles, path: Path, device: str) -> torch.jit.ScriptModule:
    """A TorchScript module, ready to be called. Such a file is a program: loaded only where its digest is trusted.

    Raises:
        SpecbenchError: exit code 5 for a digest that nobody trusts, and for a damaged file.
    """
    try:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in TRUSTED | set(os.environ.get(_TRUST_VARIABLE, "").split(",")):
            raise SpecbenchError(
                f"{path} is a program (TorchScript) with the unknown SHA-256 {digest}",
                f"to run it, compare the digest with the publisher's and set {_TRUST_VARIABLE} to it",
                MISSING_PREREQUISITE,
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(io.BytesIO(data), map_location="cpu" if device == "meta" else device).eval()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        raise files.source.damaged(path, error) from error
