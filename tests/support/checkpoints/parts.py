"""Shared parts of the checkpoint writers."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

VQ_SIZES = {
    "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2, 2], "num_res_blocks": 1,
    "num_patches": 4,
}  # fmt: skip
MOVQ_SIZES = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 2], "hidden_size": 64, "num_res_blocks": 1}
"""Of Emu3's image tokenizer, which is MoVQGAN's."""


def vocabulary(official: int) -> int:
    """Image tokens of a checkpoint: few, unless the official number is asked for, as `--model` without `--scale tiny`
    needs it."""
    return official if os.environ.get("OFFICIAL_VOCABULARIES") else 24


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk and what it should compute.

    Attributes:
        folder: for `--weights`.
        logits: `logits(text, stream, conditional)` gives the logits [len(stream) + 1, vocabulary] of every slot, from
            one full forward without cache; `stream` holds stream tokens, the row end follows the codes.
        image_ids: ids of the image tokens in that vocabulary.
        pixels: [1, h * w] codes to the reference's [1, 3, H, W] in [-1, 1].
        seen: `seen(text, stream, conditional)` gives what a published draft head is shown, for families that have one:
            token ids [P + len(stream)] and the target's features [P + len(stream), d].
        output: [codes, d] the target's output matrix."""

    folder: Path
    logits: Callable[[str, list[int], bool], Tensor]
    image_ids: range
    pixels: Callable[[Tensor], Tensor]
    seen: Callable[[str, list[int], bool], tuple[list[int], Tensor]] | None = None
    output: Tensor | None = None


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Random norms, biases and matrices, so that none can be confused with another."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        vector = len(shape) == 1 or "norm" in name
        fan = math.prod(shape[1:])
        tensors[name] = 0.2 * noise + ("bias" not in name) if vector else 1.5 * noise * fan**-0.5
    return tensors


def randomise(network: nn.Module, seed: int = 0) -> nn.Module:
    """Random values in all parameters."""
    values = random_tensors({name: parameter.shape for name, parameter in network.named_parameters()}, seed)
    for name, parameter in network.named_parameters():
        parameter.data = values[name]
    return network.eval()


def byte_tokenizer(
    path: Path | None, specials: Mapping[str, int], first_byte: int, fillers: Mapping[str, int] | None = None
) -> Tokenizer:
    """A token per byte of text, the special tokens, and ordinary words that no text contains; saved at `path`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: first_byte + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **specials, **(fillers or {})}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    if path is not None:
        tokenizer.save(str(path))
    return tokenizer


def in_two_shards(folder: Path, tensors: Mapping[str, Tensor], pickled: bool = False) -> None:
    """Replace a folder's weights by two shards and their index, as safetensors or pickled."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    shards = {f"{stem}-0000{number}-of-00002.{ending}": sorted(tensors)[number - 1 :: 2] for number in (1, 2)}
    for file, members in shards.items():
        content = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in members}
        torch.save(content, folder / file) if pickled else save_file(content, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file in shards for name in shards[file]}}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))


def in_bfloat16(network: nn.Module) -> nn.Module:
    """The network with parameters that bfloat16 can hold, as most authors publish them; it computes in float32."""
    for parameter in network.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return network


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def vq_network(codes: int, width: int, attention: bool = True) -> JanusVQVAE:
    network = randomise(JanusVQVAE(JanusVQVAEConfig(num_embeddings=codes, embed_dim=width, **VQ_SIZES)), seed=7)
    if not attention:
        network.decoder.up[0].attn = nn.ModuleList()
        network.encoder.down[-1].attn = nn.ModuleList()
    return network
