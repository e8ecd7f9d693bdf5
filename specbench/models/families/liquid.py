"""Liquid 7B (512 px): transformers' `GemmaForCausalLM` whose vocabulary ends with the 8192 codes of Chameleon's VQGAN.

The official script (top-k 0, top-p 1) can sample text tokens and clamps them to code 0; here only codes are sampled.
"""

from transformers import GemmaConfig, GemmaForCausalLM

from specbench.models.checkpoint_loading import build_network, read_model_config, read_tensors, read_tokenizer
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer

START, BEGIN_IMAGE, NO_PROMPT = "<bos>", "<boi>", "<unconditional>"
_WORDS = 256_000
_SPECIALS = {START: 2, BEGIN_IMAGE: 7, NO_PROMPT: 9}
_TINY = TINY | {"num_key_value_heads": 4, "head_dim": 16}


class Liquid(FamilyModel):
    marks = START, BEGIN_IMAGE, NO_PROMPT

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        asked = f"{START}{text} Generate an image based on this description.{BEGIN_IMAGE}"
        return self.words(asked), self.words(START + NO_PROMPT + BEGIN_IMAGE)


def load(request: LoadRequest) -> Liquid:
    vq_files = None
    if request.files:
        files, vq_files = request.files
        network = build_network(GemmaForCausalLM, read_model_config(files, GemmaConfig), files=files)
        request.fill(network, read_tensors(files), files)
        tokenizer = read_tokenizer(files)
        words = tokenizer.get_vocab_size(with_added_tokens=True)
    else:
        network = request.randomise(build_network(GemmaForCausalLM, GemmaConfig(**request.sized_network({}, _TINY))))
        tokenizer, words = stand_in_tokenizer(_SPECIALS, first_byte=1000), _WORDS
    ids = range(words, network.config.vocab_size)
    return Liquid.of_words(request, tokenizer, network, ids, request.chameleon_vq(vq_files))
