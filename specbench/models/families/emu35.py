"""Emu3.5-Image 34B: Emu3's vocabulary and grammar with 131,072 image tokens, on transformers' `Qwen3ForCausalLM`, whose
queries and keys are normalised head by head, and an image decoder of the taming VQGAN's kind (IBQ), 16 pixels a token.

Differences from the official script: the begin-of-image token, which it samples, and the grid's size, which it forces,
stand in the prompt. Every row is closed by an end of line, the last one by the end of the image.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import Qwen3Config, Qwen3ForCausalLM

from specbench.models.checkpoint_files import read_json
from specbench.models.checkpoint_loading import build_network, read_tensors, token_id
from specbench.models.families import vq_decoder
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.emu3 import (
    BEGIN_IMAGE,
    FIRST_CODE,
    IMAGE_TOKENS,
    LINE_END,
    SPECIALS,
    START,
    VISION_TOKENS,
    ranked_tokenizer,
    visual_ids,
)

END_IMAGE, ANSWER = "<|image end|>", "<|extra_100|>"
_SPECIALS = {**SPECIALS, END_IMAGE: 151_853, ANSWER: 151_746}
_CONFIG = {
    "vocab_size": 184_622,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
"""What the authors' configuration takes for an entry that is left out, where transformers' takes something else."""
_TINY = TINY | {"num_key_value_heads": 2, "head_dim": 16}
_VQ = vq_decoder.CHAMELEON_VQ | {"num_embeddings": 131_072, "num_res_blocks": 4}
_TINY_VQ = {"latent_channels": 32, "embed_dim": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1]}


class Emu35(FamilyModel):
    """The unconditional prompt has no request, and says nothing of a task."""

    marks = START, BEGIN_IMAGE, IMAGE_TOKENS, ANSWER

    def __init__(self, request: LoadRequest, *parts: object):
        super().__init__(request, *parts)
        self.layout = replace(self.layout, forced=(*self.layout.forced[:-1], self.layout.v_image + 1))

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        image = f"{BEGIN_IMAGE}{self.layout.height}*{self.layout.width}{IMAGE_TOKENS}"
        helper, answer = f"{START}You are a helpful assistant", f" ASSISTANT: {ANSWER}{image}"
        return self.words(f"{helper} for t2i task. USER: {text}{answer}"), self.words(f"{helper}. USER: {answer}")


def load(request: LoadRequest) -> Emu35:
    if request.found:
        files, words, vq_files = request.found
        path = files.named("config.json")
        config = _CONFIG | read_json(files.source, path)
        with files.source.blaming(path):
            config["rope_theta"] = float(config["rope_theta"])
        network = build_network(lambda: Qwen3ForCausalLM(Qwen3Config.from_dict(config)), found=files)
        request.fill(network, read_tensors(files), files)
        tokenizer = ranked_tokenizer(words, network.config.vocab_size)
        decoder = vq_decoder.load_chameleon_vq(read_tensors(vq_files), vq_files, request.device)
        ids = visual_ids(tokenizer, len(decoder.codebook), words, VISION_TOKENS)
    else:
        config = Qwen3Config(**_CONFIG | request.sized_network({}, _TINY))
        network = request.randomise(build_network(Qwen3ForCausalLM, config))
        tokenizer = stand_in_tokenizer(_SPECIALS, first_byte=0)
        ids = range(FIRST_CODE, FIRST_CODE + request.info.v_image)
        settings = request.sized(_VQ, _TINY_VQ)
        decoder = vq_decoder.random_taming(settings, normalise=False, attention=True, device=request.device)
    stream_ids = [*ids, token_id(tokenizer, LINE_END), token_id(tokenizer, END_IMAGE)]
    head = network.lm_head.weight[ids.start : ids.stop].clone()
    return Emu35(request, tokenizer, network.model, head, stream_ids, decoder)
