"""Emu3-Gen 8B (720 px): transformers' `Emu3ForCausalLM` and `Emu3VQVAE`; every row, the last one too, is closed by an
end-of-line token.

Two layouts are read: BAAI's own (Emu3-Gen and Emu3-VisionTokenizer), and the one converted for transformers. In both,
prompts are split and normalised as the authors' tokenizer does it, though the conversion's `tokenizer.json` does not.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import Emu3Config, Emu3ForCausalLM, Emu3TextConfig, Emu3VQVAE
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from specbench.models.checkpoint_files import CheckpointFiles, read_json
from specbench.models.checkpoint_loading import (
    build_network,
    drop,
    fill,
    randomise,
    read_model_config,
    read_tensors,
    read_tokenizer,
    token_id,
)
from specbench.models.families import vq_decoder
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.system.console import warn

START, LINE_END = "<|extra_203|>", "<|extra_200|>"
BEGIN_IMAGE, IMAGE_TOKENS = "<|image start|>", "<|image token|>"
_POSITIVE = " masterpiece, film grained, best quality."
_NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
RANKS, VISION_TOKENS = "emu3.tiktoken", "emu3_vision_tokens.txt"
TEXT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
"""Special tokens that follow the byte strings of the authors' tokenizer; the vision tokens come after them."""
FIRST_CODE = 151_854
SPECIALS = {LINE_END: 151_846, START: 151_849, IMAGE_TOKENS: 151_851, BEGIN_IMAGE: 151_852}
_TINY_VQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "hidden_size": 32}
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of a text, from Qwen's tokenizer: one leading space or mark stays with a word, and every digit stands alone."""
_IMAGE_SETTINGS = {
    "codebook_size": "codebook_size",
    "embed_dim": "embed_dim",
    "z_channels": "latent_channels",
    "double_z": "double_latent",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "temporal_downsample_factor": "temporal_downsample_factor",
    "ch": "base_channels",
    "ch_mult": "channel_multiplier",
    "num_res_blocks": "num_res_blocks",
    "attn_resolutions": "attn_resolutions",
}
"""BAAI's names of the image tokenizer's settings, and transformers'; their defaults agree."""


class Emu3(FamilyModel):
    """The unconditional prompt is the official negative one, with the same beginning of the image."""

    marks = START, BEGIN_IMAGE, IMAGE_TOKENS

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        image = f"{BEGIN_IMAGE}{self.layout.height}*{self.layout.width}{IMAGE_TOKENS}"
        return self.words(START + text + _POSITIVE + image), self.words(START + _NEGATIVE + image)


def load(request: LoadRequest) -> Emu3:
    if not request.found:
        return _random(request)
    files = request.found[0]
    if published := files.holds(RANKS):
        language, language_tensors = (
            _language_model(read_model_config(files, Emu3TextConfig), files),
            read_tensors(files),
        )
        image_files = request.found[1]
        image_tensors = vq_decoder.movq_tensors(read_tensors(image_files))
        image_config = _published_image_config(image_files)
    else:
        config = read_model_config(files, Emu3Config)
        language, image_config, image_files = _language_model(config.text_config, files), config.vq_config, files
        language_tensors, image_tensors = _parts(read_tensors(files), files)
    image = image_network(image_config, image_files)
    request.fill(language, language_tensors, files)
    fill(image, drop(image_tensors, vq_decoder.ENCODER_SIDE), image_files, request.device, torch.float32)
    words = language.config.vocab_size
    tokenizer = ranked_tokenizer(files, words) if published else _converted_tokenizer(files)
    ids = visual_ids(tokenizer, image_config.codebook_size, files, VISION_TOKENS if published else "tokenizer.json")
    return _model(request, tokenizer, language, ids, image)


def _random(request: LoadRequest) -> Emu3:
    tiny_text = TINY | {"num_key_value_heads": 2}
    language = build_network(Emu3ForCausalLM, Emu3TextConfig(**request.sized_network({}, tiny_text)))
    image = image_network(Emu3VQVAEConfig(**request.sized({}, _TINY_VQ)))
    request.randomise(language)
    randomise(image, request.device, torch.float32)
    ids = range(FIRST_CODE, FIRST_CODE + request.info.v_image)
    return _model(request, stand_in_tokenizer(SPECIALS, first_byte=0), language, ids, image)


def _model(request: LoadRequest, tokenizer: Tokenizer, language: nn.Module, ids: range, image: nn.Module) -> Emu3:
    head = language.lm_head.weight[ids.start : ids.stop].clone()
    stream_ids = [*ids, token_id(tokenizer, LINE_END)]
    return Emu3(request, tokenizer, language.model, head, stream_ids, vq_decoder.Emu3Decoder(image))


def _language_model(config: Emu3TextConfig, files: CheckpointFiles) -> nn.Module:
    return build_network(Emu3ForCausalLM, config, found=files)


def visual_ids(tokenizer: Tokenizer, codes: int, files: CheckpointFiles, listed: str) -> range:
    """Vocabulary ids of the image tokens, which the file `listed` names."""
    first, last = (token_id(tokenizer, f"<|visual token {code:06d}|>") for code in (0, codes - 1))
    if last != first + codes - 1:
        raise files.refusal(": visual tokens are not in the order of their codes", files.named(listed))
    return range(first, last + 1)


def _parts(tensors: Mapping[str, Tensor], files: CheckpointFiles) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the language model and of the image tokenizer, from the converted layout."""
    parts = {"text_model.": {}, "vqmodel.": {}}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if prefix is None:
            raise files.refusal(f" holds unknown '{name}'")
        parts[prefix][name.removeprefix(prefix)] = tensor
    return parts["text_model."], parts["vqmodel."]


def _published_image_config(files: CheckpointFiles) -> Emu3VQVAEConfig:
    path = files.named("config.json")
    held = read_json(files.source, path)
    settings = {ours: held[theirs] for theirs, ours in _IMAGE_SETTINGS.items() if theirs in held}
    with files.source.blaming(path):
        widest = settings.get("base_channels", 256) * settings.get("channel_multiplier", (1, 2, 2, 4))[-1]
        return Emu3VQVAEConfig(**settings, hidden_size=widest)


def image_network(config: Emu3VQVAEConfig, found: CheckpointFiles | None = None) -> nn.Module:
    network = build_network(Emu3VQVAE, config, found=found)
    del network.encoder, network.quant_conv
    return network


def ranked_tokenizer(files: CheckpointFiles, words: int) -> Tokenizer:
    """The authors' tokenizer from its two files, which have all the `words` of the model between them."""
    path = files.named(RANKS)
    with files.source.blaming(path):
        ranks = read_ranks(path.read_bytes())
        names = files.named(VISION_TOKENS).read_text(encoding="utf-8").split("\n")
    specials = (*TEXT_SPECIALS, *(name.strip() for name in names if name.strip()))
    if len(ranks) + len(specials) != words:
        raise files.refusal(
            f" and {VISION_TOKENS} have {len(ranks) + len(specials)} tokens, the model has {words}", path
        )
    return ranked_bpe(ranks, {name: len(ranks) + index for index, name in enumerate(specials)})


def ranked_bpe(ranks: Mapping[bytes, int], specials: Mapping[str, int]) -> Tokenizer:
    """Byte-pair encoding that splits texts as Qwen's does. tiktoken stores ranks of byte strings, a lower one being
    merged first, and no merges: every pair of strings that makes a third one is one.

    Args:
        ranks: token bytes to id.
        specials: names of special tokens to ids; they are recognised anywhere in a text.
    """
    letters, merges = bytes_to_unicode(), []
    for token in sorted(ranks, key=ranks.get):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))

    def spelled(token: bytes) -> str:
        return "".join(map(letters.get, token))

    vocabulary = {spelled(token): rank for token, rank in ranks.items()} | specials
    pairs = [(spelled(first), spelled(second)) for first, second in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    split_as_qwen(tokenizer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _converted_tokenizer(files: CheckpointFiles) -> Tokenizer:
    """`tokenizer.json` with the authors' split and normalisation, whatever it says itself."""
    tokenizer = read_tokenizer(files)
    path = files.named("tokenizer.json")
    held = read_json(files.source, path)
    normal, pattern = held.get("normalizer"), json.dumps(_QWEN_PATTERN)
    as_qwen = isinstance(normal, dict) and normal.get("type") == "NFC" and pattern in json.dumps(held["pre_tokenizer"])
    if not as_qwen:
        warn(
            f"{path} splits prompts in another way than Emu3's authors; their split and NFC are used, so that some "
            "prompts have other ids than transformers gives them"
        )
    split_as_qwen(tokenizer)
    return tokenizer


def split_as_qwen(tokenizer: Tokenizer) -> None:
    """Let a byte-level tokenizer normalise and split texts as Qwen's does."""
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])


def read_ranks(lines: bytes) -> dict[bytes, int]:
    """Token bytes to id from the lines of a `.tiktoken` file.

    Raises:
        ValueError: a line that is not base64 and a number, or a byte without a token.
    """
    ranks = {}
    for number, line in enumerate(lines.splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        if len(parts) != 2 or not parts[1].isdigit():
            raise ValueError(f"line {number} is not a token and its rank")
        ranks[base64.b64decode(parts[0], validate=True)] = int(parts[1])
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"no token for byte {missing[0]}")
    return ranks
