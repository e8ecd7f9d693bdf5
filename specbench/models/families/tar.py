"""Tar 1.5B and 7B: transformers' `Qwen2ForCausalLM` whose vocabulary ends with TA-Tok's 65536 codes. They are the
prompt of a second language model, `specbench.models.families.tar_dtok`, which draws the picture.

The official script lets the first one write text and an end between codes, leaves those out and fills up with code 0;
here only codes can be sampled. A repetition penalty in `generation_config.json`, which its `generate` applies beside
the script's temperature, top-k and top-p, is part of the target. There is no guidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from specbench.models.checkpoint_loading import build_network, read_tokenizer, token_id
from specbench.models.families.base import LoadRequest, stand_in_tokenizer
from specbench.models.families.simplear import QWEN, TINY_QWEN, SimpleAR, load_qwen
from specbench.models.families.tar_dtok import TarDetokenizer
from specbench.models.families.tar_dtok import load as load_detokenizer
from specbench.models.transformer.compiled_forward import CompiledStep

TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
_FIRST_CODE = 151_670
_SPECIALS = {TURN: 151_644, END_OF_TURN: 151_645, "<im_start>": 151_665, "<S0>": 151_667}
_SYSTEM = f"{TURN}system\nYou are a helpful assistant.{END_OF_TURN}\n"


class Tar(SimpleAR):
    """Attributes: second: the de-tokenizer, see `specbench.models.interface.StagedModel`."""

    marks = TURN, END_OF_TURN, "<im_start>", "<S0>"
    draws = False

    def __init__(
        self, request: LoadRequest, tokenizer: Tokenizer, network: nn.Module, ids: range, second: TarDetokenizer
    ):
        head = network.lm_head.weight[ids.start : ids.stop]
        super().__init__(request, tokenizer, network.model, head, ids, second.features)
        self.second, self.second_sampling = second, request.info.second[0].defaults

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        user = f"{TURN}user\n{text}{END_OF_TURN}\n{TURN}assistant\n"
        ids = self.words(f"{_SYSTEM}{user}<im_start><S0>")
        return ids, ids

    def second_text(self, text: str, tokens: Sequence[int]) -> str:
        """The official script reads codes from all it has, so that those in a prompt count, too."""
        return text + "".join(f"<I{code}>" for code in tokens)

    def compile(self) -> None:
        super().compile()
        self.second.compile()

    @property
    def compiled(self) -> list[CompiledStep]:
        return [*super().compiled, *self.second.compiled]


def load(request: LoadRequest) -> Tar:
    if request.found:
        files = request.found[0]
        network, penalty = load_qwen(request, files, "model.vision_tower.")
        tokenizer = read_tokenizer(files)
        first = token_id(tokenizer, "<I0>")
    else:
        tied = {"tie_word_embeddings": not request.info.network.head_rows}
        config = Qwen2Config(**request.sized_network(QWEN | tied, TINY_QWEN))
        network, penalty = request.randomise(build_network(Qwen2ForCausalLM, config)), 1.0
        tokenizer, first = stand_in_tokenizer(_SPECIALS, first_byte=0), _FIRST_CODE
    second = load_detokenizer(replace(request, info=request.info.second[0], found=request.found[1:]))
    codes = len(second.features.embedding.weight)
    if request.found and tokenizer.token_to_id(f"<I{codes - 1}>") != first + codes - 1:
        raise request.found[0].refusal(f" has no tokens <I0> to <I{codes - 1}> in this order")
    model = Tar(request, tokenizer, network, range(first, first + codes), second)
    model.repetition_penalty = penalty
    return model
