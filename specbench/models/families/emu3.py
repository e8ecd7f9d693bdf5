"""Emu3-Gen 8B (720 px): transformers' `Emu3ForCausalLM` and `Emu3VQVAE`; every row, the last one too, is closed by an
end-of-line token.

Two layouts are read: BAAI's own (Emu3-Gen and Emu3-VisionTokenizer), and the one converted for transformers. In both,
prompts are split and normalised as the authors' tokenizer does it, though the conversion's `tokenizer.json` does not.
"""

from __future__ import annotations

import base64
import heapq
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import Emu3Config, Emu3ForCausalLM, Emu3TextConfig, Emu3VQVAE
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
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
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
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_VQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "hidden_size": 32}
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of a text, from Qwen's tokenizer: one leading space or mark stays with a word, and every digit stands alone."""
_SPECIAL = re.compile(r"<\|[^|]*\|>")
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
    tiny_text = _TINY | {"num_key_value_heads": 2}
    language = build_network(Emu3ForCausalLM, Emu3TextConfig(**request.sized_network({}, tiny_text)))
    image = image_network(Emu3VQVAEConfig(**request.sized({}, _TINY_VQ)))
    request.randomise(language)
    randomise(image, request.device, torch.float32)
    ids = range(FIRST_CODE, FIRST_CODE + request.info.v_image)
    return _model(request, stand_in_tokenizer(SPECIALS, first_byte=0), language, ids, image)


def _model(
    request: LoadRequest, tokenizer: Tokenizer | RankedBpe, language: nn.Module, ids: range, image: nn.Module
) -> Emu3:
    head = language.lm_head.weight[ids.start : ids.stop].clone()
    stream_ids = [*ids, token_id(tokenizer, LINE_END)]
    return Emu3(request, tokenizer, language.model, head, stream_ids, vq_decoder.Emu3Decoder(image))


def _language_model(config: Emu3TextConfig, files: CheckpointFiles) -> nn.Module:
    return build_network(Emu3ForCausalLM, config, found=files)


def visual_ids(tokenizer: Tokenizer | RankedBpe, codes: int, files: CheckpointFiles, listed: str) -> range:
    """Vocabulary ids of the image tokens, which the file `listed` names.

    Raises:
        SpecbenchError: they are not in the order of their codes.
    """
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


def ranked_tokenizer(files: CheckpointFiles, words: int) -> RankedBpe:
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
    return RankedBpe(ranks, {name: len(ranks) + index for index, name in enumerate(specials)})


def _converted_tokenizer(files: CheckpointFiles) -> Tokenizer:
    """`tokenizer.json` with the authors' split and normalisation, whatever it says itself."""
    tokenizer = read_tokenizer(files)
    path = files.named("tokenizer.json")
    held = read_json(files.source, path)
    if not _splits_as_qwen(held):
        warn(
            f"{path} splits prompts in another way than Emu3's authors; their split and NFC are used, so that some "
            "prompts have other ids than transformers gives them"
        )
    split_as_qwen(tokenizer)
    return tokenizer


def _splits_as_qwen(held: Mapping[str, object]) -> bool:
    """Whether a `tokenizer.json` has Qwen's split and normalisation."""
    normal = held.get("normalizer")
    pattern = json.dumps(_QWEN_PATTERN)
    return isinstance(normal, dict) and normal.get("type") == "NFC" and pattern in json.dumps(held["pre_tokenizer"])


def split_as_qwen(tokenizer: Tokenizer) -> None:
    """Let a byte-level tokenizer normalise and split texts as Qwen's does."""
    tokenizer.normalizer = normalizers.NFC()
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_qwen_split(), bytes_of_words])


def _qwen_split() -> pre_tokenizers.PreTokenizer:
    """The split of a text into words that are encoded one by one."""
    return pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated")


class RankedBpe:
    """Byte-pair encoding from the ranks of byte strings; has what `FamilyModel` uses of `tokenizers.Tokenizer`.

    tiktoken stores these ranks rather than a list of merges, so the tokenizers library cannot read them.

    Args:
        ranks: token bytes to id; a lower id is merged first.
        specials: names of special tokens, all like "<|this|>", to ids; they are recognised anywhere in a text.
    """

    def __init__(self, ranks: Mapping[bytes, int], specials: Mapping[str, int]):
        self._ranks = ranks
        self._specials = specials
        self._split = _qwen_split()

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Ids of a text in which special tokens are written by name; nothing is added to it."""
        return Encoding(list(self._ids(unicodedata.normalize("NFC", text))))

    def token_to_id(self, name: str) -> int | None:
        return self._specials.get(name)

    def _ids(self, text: str) -> Iterator[int]:
        start = 0
        for found in _SPECIAL.finditer(text):
            if found[0] not in self._specials:
                continue
            yield from self._ordinary(text[start : found.start()])
            yield self._specials[found[0]]
            start = found.end()
        yield from self._ordinary(text[start:])

    def _ordinary(self, text: str) -> Iterator[int]:
        for word, _ in self._split.pre_tokenize_str(text):
            yield from merge_word(word.encode(), self._ranks)


@dataclass(frozen=True)
class Encoding:
    """Vocabulary ids of a text, as `tokenizers.Encoding` has them."""

    ids: list[int]


def merge_word(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Ids of one word: of all neighbours, the pair with the lowest rank is joined first, the leftmost of equals.

    A heap of the joins still possible keeps words of thousands of characters, as of languages without spaces, fast.
    """
    if word in ranks:
        return [ranks[word]]
    end = list(range(1, len(word) + 1))  # of the part that starts at each byte; 0 for bytes inside a part
    before = list(range(-1, len(word) - 1))  # start of the part before it
    joins: list[tuple[int, int, int]] = []

    def consider(start: int) -> None:
        middle = end[start]
        if middle < len(word) and (rank := ranks.get(word[start : end[middle]])) is not None:
            heapq.heappush(joins, (rank, start, end[middle]))

    for start in range(len(word)):
        consider(start)
    while joins:
        _, start, stop = heapq.heappop(joins)
        middle = end[start]
        if not 0 < middle < len(word) or end[middle] != stop:
            continue  # one of the two was joined with another
        end[start], end[middle] = stop, 0
        if stop < len(word):
            before[stop] = start
        consider(start)
        if before[start] >= 0:
            consider(before[start])
    return [ranks[word[start:stop]] for start, stop in enumerate(end) if stop]


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
