"""Emu3 as BAAI publishes it: the language model with a tiktoken vocabulary, and the vision tokenizer in a folder of its
own."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import Emu3ForConditionalGeneration

from checkpoints import emu3
from checkpoints.parts import Tiny, in_bfloat16, in_two_shards
from checkpoints.slow import full_forward

MERGES = (b"cl", b"os", b"clos", b"close", b"-u", b"-up", b"up", b" c", b" ca", b" cat", b"'s", b". ", b"'t", b"ed")
"""Tokens of more than one byte; those across a hyphen, an apostrophe or a full stop distinguish splits."""
RANKS = {bytes([byte]): byte for byte in range(256)} | {token: 256 + index for index, token in enumerate(MERGES)}
TEXT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
VISION = ("<|image token|>", "<|image start|>", "<|image end|>", "<|frame start|>", "<|frame end|>")
CODES = emu3.CODES
NAMES = (*TEXT_SPECIALS, *VISION, *(f"<|visual token {code:06d}|>" for code in range(CODES)))
SPECIALS = {name: len(RANKS) + index for index, name in enumerate(NAMES)}
FIRST = SPECIALS["<|visual token 000000|>"]
LINE_END = SPECIALS["<|extra_200|>"]


def write(folder: Path) -> Tiny:
    text = emu3.text_sizes(len(RANKS) + len(SPECIALS), SPECIALS)
    network = in_bfloat16(emu3.network_of(text, {"<image>": SPECIALS["<|image token|>"]}))
    _write_language_model(folder, network, text)
    _write_image_tokenizer(folder / "Emu3-VisionTokenizer", network)
    write_words(folder, NAMES)
    ids = [*range(FIRST, FIRST + CODES), LINE_END]

    def prompt(text: str, conditional: bool) -> list[int]:
        asked = f"{text} masterpiece, film grained, best quality." if conditional else emu3.NEGATIVE
        image = [SPECIALS["<|image start|>"], *b"4*4", SPECIALS["<|image token|>"]]
        return [SPECIALS["<|extra_203|>"], *slow_ids(asked), *image]

    def pixels(codes: Tensor) -> Tensor:
        return network.model.vqmodel.decode(codes.view(1, 4, 4))

    return Tiny(folder, full_forward(network, prompt, ids), range(FIRST, FIRST + CODES), pixels)


def slow_ids(text: str) -> list[int]:
    """Ids of a text without special tokens: words by a scanner written out, then the lowest rank first."""
    return [number for word in slow_words(text) for number in _merged(word.encode())]


def slow_words(text: str) -> list[str]:
    """Qwen's words of a text of ASCII letters, digits, spaces, line ends and marks, scanned by hand."""
    words, at = [], 0
    while at < len(text):
        end = at + _word_length(text[at:])
        words.append(text[at:end])
        at = end
    return words


def _word_length(text: str) -> int:
    contraction = re.match(r"'(s|t|re|ve|m|ll|d)", text.lower())
    if contraction:
        return contraction.end()
    first, letters = text[0], len(re.match("[a-z]*", text[1:].lower())[0])
    if first.isalpha():
        return 1 + letters
    if letters and first not in "\r\n" and not first.isdigit():
        return 1 + letters  # one mark or space before the letters
    if first.isdigit():
        return 1
    marks = re.match(r" ?[^\sa-zA-Z0-9]+[\r\n]*", text)
    if marks:
        return marks.end()
    space = re.match(r"\s+", text)[0]
    if "\n" in space or "\r" in space:
        return max(space.rfind("\n"), space.rfind("\r")) + 1
    return len(space) - 1 if len(space) < len(text) and len(space) > 1 else len(space)


def _merged(word: bytes) -> list[int]:
    if word in RANKS:
        return [RANKS[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        ranked = [
            (RANKS[parts[at] + parts[at + 1]], at) for at in range(len(parts) - 1) if parts[at] + parts[at + 1] in RANKS
        ]
        if not ranked:
            return [RANKS[part] for part in parts]
        at = min(ranked)[1]
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


def _write_language_model(folder: Path, network: Emu3ForConditionalGeneration, text: dict[str, object]) -> None:
    tensors = {}
    for name, tensor in network.state_dict().items():
        if name.startswith("model.text_model."):
            tensors["model." + name.removeprefix("model.text_model.")] = tensor.bfloat16()
        elif name.startswith("lm_head."):
            tensors[name] = tensor.bfloat16()
    in_two_shards(folder, tensors)
    config = {"architectures": ["Emu3ForCausalLM"], "model_type": "Emu3", "rope_theta": 1000000.0, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config | text))


def _write_image_tokenizer(folder: Path, network: Emu3ForConditionalGeneration) -> None:
    folder.mkdir()
    tensors = published_vq(network.model.vqmodel.state_dict())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "Emu3VisionVQ", "codebook_size": CODES, "ch": 32, "ch_mult": [1, 1, 1, 2]}
    config |= {"num_res_blocks": 1, "embed_dim": 4, "z_channels": 4, "attn_resolutions": [3], "dropout": 0.0}
    (folder / "config.json").write_text(json.dumps(config))


def published_vq(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of an `Emu3VQVAE` under the authors' names, which are MoVQGAN's."""
    tensors = {}
    for name, tensor in ours.items():
        for side, block, names in (("decoder", "up_block.up", "up"), ("encoder", "down_block.down", "down")):
            name = name.replace(f"{side}.{block}.", f"{side}.{names}.").replace(f"{side}.middle_block.", f"{side}.mid.")
        name = name.replace(".mid.attn_norm.", ".mid.attn_1.norm.")
        name = re.sub(r"\.attn_norms\.(\d+)\.", r".attn.\1.norm.", name)
        name, matrices = re.subn(r"\.(attn\.\d+|attn_1)\.([qkv])_proj\.", r".\1.\2.", name)
        name, outputs = re.subn(r"\.(attn\.\d+|attn_1)\.out_proj\.", r".\1.proj_out.", name)
        if (matrices or outputs) and name.endswith("weight"):
            tensor = tensor[:, :, None, None]
        tensors[name] = tensor.clone()
    return tensors


def write_words(folder: Path, names: Sequence[str]) -> None:
    """The tokenizer's files: ranks of byte strings, and the names of the image tokens."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "emu3.tiktoken").write_text("\n".join(lines) + "\n")
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(names[len(TEXT_SPECIALS) :]) + "\n")
