"""Emu3-Gen 8B (720 px) on transformers' `Emu3ForCausalLM` and `Emu3VQVAE`, and Emu3.5-Image 34B. An end-of-line token
closes every row; in Emu3.5 the end of the image closes the last row.

Two layouts of Emu3 are read: BAAI's (Emu3-Gen and Emu3-VisionTokenizer), and the layout converted for transformers.
Prompts are split and normalised as in the authors' tokenizer, unlike in the conversion's `tokenizer.json`.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import Emu3Config, Emu3ForCausalLM, Emu3TextConfig, Emu3VQVAE, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.families import vq_decoder
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.family_sizes import default_sizes
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
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of a text, from Qwen's tokenizer: a leading space or mark stays with its word, and every digit is separate."""
_SAME_NAMES = ("codebook_size", "embed_dim", "in_channels", "out_channels", "num_res_blocks", "attn_resolutions")
_IMAGE_SETTINGS = {name: name for name in (*_SAME_NAMES, "temporal_downsample_factor")}
_IMAGE_SETTINGS |= {"z_channels": "latent_channels", "double_z": "double_latent", "ch": "base_channels"}
_IMAGE_SETTINGS |= {"ch_mult": "channel_multiplier"}
"""Names of the image tokenizer's settings in BAAI's and in transformers' configuration; the defaults are equal."""
END_IMAGE, ANSWER = "<|image end|>", "<|extra_100|>"
_CONFIG_35: dict[str, Any] = default_sizes("emu35") | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
"""Defaults of the authors' configuration that differ from transformers'."""
_VQ_35 = vq_decoder.CHAMELEON_VQ | {"num_embeddings": 131_072, "num_res_blocks": 4}


class Emu3(FamilyModel):
    """Emu3-Gen. The unconditional prompt is the official negative prompt; both prompts end with an image's start."""

    marks, forced = (START, BEGIN_IMAGE, IMAGE_TOKENS), (LINE_END,)

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        image = f"{BEGIN_IMAGE}{self.layout.height}*{self.layout.width}{IMAGE_TOKENS}"
        return self.words(START + text + _POSITIVE + image), self.words(START + _NEGATIVE + image)


def load(request: LoadRequest) -> Emu3:
    if not request.files:
        settings = request.sized_network({}, TINY | {"num_key_value_heads": 2})
        language = request.randomise(stored.build_network(Emu3ForCausalLM, Emu3TextConfig(**settings)))
        image = image_network(Emu3VQVAEConfig(**request.sized({}, vq_decoder.TINY_MOVQ)))
        decoder = vq_decoder.Emu3Decoder(stored.randomise(image, request.device, torch.float32))
        ids = range(FIRST_CODE, FIRST_CODE + request.info.v_image)
        return Emu3.of_words(request, stand_in_tokenizer(SPECIALS, first_byte=0), language, ids, decoder)
    files = image_files = request.files[0]
    if published := files.holds(RANKS):
        config, tensors = stored.read_model_config(files, Emu3TextConfig), stored.read_tensors(files)
        image_files = request.files[1]
        image_tensors = vq_decoder.movq_tensors(stored.read_tensors(image_files))
        image_config = _published_image_config(image_files)
    else:
        whole = stored.read_model_config(files, Emu3Config)
        config, image_config = whole.text_config, whole.vq_config
        tensors, image_tensors = _parts(stored.read_tensors(files), files)
    language = stored.build_network(Emu3ForCausalLM, config, files=files)
    image = image_network(image_config, image_files)
    request.fill(language, tensors, files)
    stored.fill(image, stored.drop(image_tensors, vq_decoder.ENCODER_SIDE), image_files, request.device, torch.float32)
    tokenizer = ranked_tokenizer(files, language.config.vocab_size) if published else _converted_tokenizer(files)
    ids = visual_ids(tokenizer, image_config.codebook_size, files, VISION_TOKENS if published else "tokenizer.json")
    return Emu3.of_words(request, tokenizer, language, ids, vq_decoder.Emu3Decoder(image))


def visual_ids(tokenizer: Tokenizer, codes: int, files: CheckpointFiles, listed: str) -> range:
    """Return the vocabulary ids of the image tokens. `listed`: file that lists them."""
    first, last = (stored.token_id(tokenizer, f"<|visual token {code:06d}|>") for code in (0, codes - 1))
    if last != first + codes - 1:
        raise files.refusal(": visual tokens are not in the order of their codes", files.named(listed))
    return range(first, last + 1)


def _parts(tensors: Mapping[str, Tensor], files: CheckpointFiles) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of the converted layout into language model and image tokenizer."""
    parts: dict[str, dict[str, Tensor]] = {"text_model.": {}, "vqmodel.": {}}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if prefix is None:
            raise files.refusal(f" holds unknown '{name}'")
        parts[prefix][name.removeprefix(prefix)] = tensor
    return parts["text_model."], parts["vqmodel."]


def _published_image_config(files: CheckpointFiles) -> Emu3VQVAEConfig:
    config = files.json("config.json")
    settings = {ours: config[theirs] for theirs, ours in _IMAGE_SETTINGS.items() if theirs in config}
    with files.blaming("config.json"):
        widest = settings.get("base_channels", 256) * settings.get("channel_multiplier", (1, 2, 2, 4))[-1]
        return Emu3VQVAEConfig(**settings, hidden_size=widest)


def image_network(config: Emu3VQVAEConfig, files: CheckpointFiles | None = None) -> nn.Module:
    network = stored.build_network(Emu3VQVAE, config, files=files)
    del network.encoder, network.quant_conv
    return network


def ranked_tokenizer(files: CheckpointFiles, words: int) -> Tokenizer:
    """Build the authors' tokenizer from its two files, which together contain all `words` of the model."""
    path = files.named(RANKS)
    with files.source.blaming(path):
        ranks = read_ranks(path.read_bytes())
        names = files.named(VISION_TOKENS).read_text(encoding="utf-8").split("\n")
    specials = (*TEXT_SPECIALS, *(name.strip() for name in names if name.strip()))
    if (count := len(ranks) + len(specials)) != words:
        raise files.refusal(f" and {VISION_TOKENS} have {count} tokens, the model has {words}", path)
    return ranked_bpe(ranks, {name: len(ranks) + index for index, name in enumerate(specials)})


def ranked_bpe(ranks: Mapping[bytes, int], specials: Mapping[str, int]) -> Tokenizer:
    """Build a byte-pair encoding from `ranks` (token bytes to id) that splits texts like Qwen's. tiktoken stores no
    merges, only ranks of byte strings; lower ranks are merged first. So every pair of strings that forms a third string
    is a merge. `specials`: special tokens to ids; they are recognised anywhere in a text."""
    letters, merges = bytes_to_unicode(), list[tuple[bytes, bytes]]()
    for token in sorted(ranks, key=lambda token: ranks[token]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merged = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(merged, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {spelled(token): rank for token, rank in ranks.items()} | dict(specials)
    pairs = [(spelled(first), spelled(second)) for first, second in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    split_as_qwen(tokenizer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _converted_tokenizer(files: CheckpointFiles) -> Tokenizer:
    """Read `tokenizer.json`, but with the authors' split and normalisation."""
    tokenizer, file = stored.read_tokenizer(files), files.json("tokenizer.json")
    normal, pattern = file.get("normalizer"), json.dumps(_QWEN_PATTERN)
    as_qwen = isinstance(normal, dict) and normal.get("type") == "NFC" and pattern in json.dumps(file["pre_tokenizer"])
    if not as_qwen:
        warn(
            f"{files.named('tokenizer.json')} splits prompts differently from Emu3's authors; the authors' split and "
            "NFC are used, so the ids of some prompts differ from those of transformers"
        )
    split_as_qwen(tokenizer)
    return tokenizer


def split_as_qwen(tokenizer: Tokenizer) -> None:
    """Make a byte-level tokenizer normalise and split texts like Qwen's tokenizer."""
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])


def read_ranks(lines: bytes) -> dict[bytes, int]:
    """Parse a `.tiktoken` file to token bytes and ids; a ValueError for a damaged line, or a byte without a token."""
    ranks = {}
    for number, line in enumerate(lines.splitlines(), 1):
        if not (parts := line.split()):
            continue
        if len(parts) != 2 or not parts[1].isdigit():
            raise ValueError(f"line {number} is not a token and its rank")
        ranks[base64.b64decode(parts[0], validate=True)] = int(parts[1])
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"no token for byte {missing[0]}")
    return ranks


class Emu35(FamilyModel):
    """Emu3.5: Emu3's vocabulary with 131,072 image tokens, on transformers' `Qwen3ForCausalLM` (queries and keys are
    normalised per head), and an image decoder like the taming VQGAN's (IBQ), 16 pixels a token.

    The unconditional prompt has no request and names no task. The official script samples the begin-of-image token and
    forces the grid's size; here both are in the prompt.
    """

    marks, forced = (START, BEGIN_IMAGE, IMAGE_TOKENS, ANSWER), (LINE_END, END_IMAGE)

    def __init__(self, request: LoadRequest, *parts: Any):
        super().__init__(request, *parts)
        self.layout = replace(self.layout, forced=(*self.layout.forced[:-1], self.layout.v_image + 1))

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        image = f"{BEGIN_IMAGE}{self.layout.height}*{self.layout.width}{IMAGE_TOKENS}"
        helper, answer = f"{START}You are a helpful assistant", f" ASSISTANT: {ANSWER}{image}"
        return self.words(f"{helper} for t2i task. USER: {text}{answer}"), self.words(f"{helper}. USER: {answer}")


def load_emu35(request: LoadRequest) -> Emu35:
    if request.files:
        files, words, vq_files = request.files
        config = _CONFIG_35 | files.json("config.json")
        with files.blaming("config.json"):
            config["rope_theta"] = float(config["rope_theta"])
        network = stored.build_network(lambda: Qwen3ForCausalLM(Qwen3Config.from_dict(config)), files=files)
        request.fill(network, stored.read_tensors(files), files)
        tokenizer = ranked_tokenizer(words, network.config.vocab_size)
        decoder = vq_decoder.load_chameleon_vq(stored.read_tensors(vq_files), vq_files, request.device)
        ids = visual_ids(tokenizer, len(decoder.codebook), words, VISION_TOKENS)
    else:
        tiny = TINY | {"num_key_value_heads": 2, "head_dim": 16}
        config = Qwen3Config(**_CONFIG_35 | request.sized_network({}, tiny))
        network = request.randomise(stored.build_network(Qwen3ForCausalLM, config))
        tokenizer = stand_in_tokenizer({**SPECIALS, END_IMAGE: 151_853, ANSWER: 151_746}, first_byte=0)
        ids = range(FIRST_CODE, FIRST_CODE + request.info.v_image)
        settings = request.sized(_VQ_35, vq_decoder.TINY_CHAMELEON_VQ)
        decoder = vq_decoder.random_taming(settings, normalise=False, attention=True, device=request.device)
    return Emu35.of_words(request, tokenizer, network, ids, decoder)
