"""Tiny checkpoints of Lumina-mGPT and Anole."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, Emu3VQVAE
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from checkpoints.baai import published_vq
from checkpoints.parts import (
    MOVQ_SIZES,
    VQ_SIZES,
    Tiny,
    byte_tokenizer,
    in_two_shards,
    randomise,
    stored,
    vocabulary,
    vq_network,
)
from checkpoints.slow import SIZES

CODES = vocabulary(official=8192)
END_IMAGE, BEGIN_IMAGE = 4 + CODES, 5 + CODES
RESERVED = {f"<reserved{number:05d}>": 6 + CODES + index for index, number in enumerate(range(8706, 8840))}
SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<eoss>": END_IMAGE, "<racm3:break>": BEGIN_IMAGE, **RESERVED}
LETTERS = "ABCDEFGHIJ"
IMAGE_WORDS = {f"IMGIMG{''.join(LETTERS[int(d)] for d in str(code))}Z": 4 + code for code in range(CODES)}
FIRST_BYTE = 6 + CODES + len(RESERVED)


def write_lumina(folder: Path, size: int, **changes: object) -> Tiny:
    """Only the 768 px repository has a tokenizer, and none has an image decoder; both are in subfolders here. Query and
    key norms are stored once per model-parallel shard of the training: one at 7B, several at 34B."""
    network = _network(**changes)
    parallel = network.config.model_parallel_size
    for layer in network.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            for values in (norm.weight, norm.bias):
                values.data = values.data[:parallel].repeat_interleave(len(values) // parallel, dim=0).clone()
    network.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in stored(folder).items() if not name.startswith("model.vqmodel.")}
    for name, tensor in tensors.items():
        if re.search("[qk]_norm", name):
            tensors[name] = tensor[:: len(tensor) // parallel]
    in_two_shards(folder, tensors)
    beside = folder if size == 768 else folder / "Lumina-mGPT-7B-768"
    beside.mkdir(exist_ok=True)
    tokenizer = byte_tokenizer(beside / "tokenizer.json", SPECIALS, FIRST_BYTE, IMAGE_WORDS)
    decoder = meta_vq()
    vq_folder = folder / "Anole-7b-v0.1-vqvae-hf"
    vq_folder.mkdir()
    save_file(decoder, vq_folder / "model.safetensors")

    def prompt(text: str, conditional: bool) -> list[int]:
        asked = f"Generate an image of 64x64 according to the following prompt:\n{text}"
        image = [BEGIN_IMAGE, RESERVED["<reserved08802>"], RESERVED["<reserved08802>"]]
        return [0, *tokenizer.encode(asked).ids, RESERVED["<reserved08706>"], *image] if conditional else image

    return _tiny(folder, network, prompt, decoder)


CODES_2, FIRST_2 = vocabulary(official=16_384), 155_000
SPECIALS_2 = {"<|endoftext|>": 300, "<eoss>": 301, "<racm3:break>": 302}
SPECIALS_2 |= {name: 303 + index for index, name in enumerate(RESERVED)}


def write_lumina2(folder: Path) -> Tiny:
    """Image tokens follow at the id that the authors' code names; the tokenizer has an end of text and no beginning."""
    network = _network(vocab_size=FIRST_2 + CODES_2, model_parallel_size=4)
    network.save_pretrained(folder)
    in_two_shards(folder, {n: t for n, t in stored(folder).items() if not n.startswith("model.vqmodel.")})
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS_2, 0)
    roles = {"bos_token": None, "eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    decoder = movq()
    torch.save(decoder | {"loss.logvar": torch.zeros(1)}, folder / "movqgan_270M.ckpt")

    def prompt(text: str, conditional: bool) -> list[int]:
        asked = "Generate an image of 32x32 according to the following prompt:\n" + text
        image = [SPECIALS_2[name] for name in ("<racm3:break>", "<reserved08801>", "<reserved08801>")]
        return [300, *tokenizer.encode(asked).ids, SPECIALS_2["<reserved08706>"], *image] if conditional else image

    ids = range(FIRST_2, FIRST_2 + CODES_2)
    return _tiny(folder, network, prompt, decoder, [*ids, SPECIALS_2["<reserved08799>"]])


def movq() -> dict[str, Tensor]:
    """An image tokenizer under MoVQGAN's names: Emu3's without the layers over time."""
    network = Emu3VQVAE(Emu3VQVAEConfig(codebook_size=CODES_2, attn_resolutions=[3], **MOVQ_SIZES))
    network.post_quant_conv = torch.nn.Conv2d(4, 4, 1)
    tensors = published_vq(randomise(network, seed=5).state_dict())
    return {name: tensor for name, tensor in tensors.items() if ".time_" not in name}


def write_anole(folder: Path) -> Tiny:
    network = _network()
    network.save_pretrained(folder)
    decoder = meta_vq()
    images = {f"model.vqmodel.{name}": tensor for name, tensor in decoder.items() if not name.startswith("loss.")}
    in_two_shards(folder, stored(folder) | images)
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS, FIRST_BYTE, IMAGE_WORDS)

    def prompt(text: str, conditional: bool) -> list[int]:
        words = [*tokenizer.encode(text).ids, RESERVED["<reserved08706>"]] if conditional else []
        return [0, *words, BEGIN_IMAGE]

    return _tiny(folder, network, prompt, decoder)


def write_lumina_34b(folder: Path) -> Tiny:
    """The larger size: norms after the blocks, grouped keys, and norms of two model-parallel shards."""
    return write_lumina(folder, 512, swin_norm=True, num_key_value_heads=2, model_parallel_size=2)


def _network(**changes: object) -> ChameleonForConditionalGeneration:
    sizes = {"vocab_size": FIRST_BYTE + 256, **SIZES, "num_key_value_heads": 4, "model_parallel_size": 1, **changes}
    vq = {name: size for name, size in VQ_SIZES.items() if name != "num_patches"}
    vq |= {"num_embeddings": CODES, "embed_dim": 32}
    words = {**SPECIALS, **IMAGE_WORDS, "<image>": RESERVED["<reserved08707>"]}
    config = ChameleonConfig(**sizes, vocabulary_map=words, vq_config=vq)
    return randomise(ChameleonForConditionalGeneration(config))


def _tiny(folder: Path, network, prompt, decoder: dict[str, Tensor], ids: list[int] | None = None) -> Tiny:
    ids = ids or [*range(4, 4 + CODES), RESERVED["<reserved08799>"]]

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        start = prompt(text, conditional)
        inputs = torch.tensor([start + [ids[token] for token in stream]])
        # The class hides image logits, so its head is applied here.
        return network.lm_head(network.model(inputs).last_hidden_state[0, len(start) - 1 :])

    @torch.no_grad()
    def seen(text: str, stream: list[int], conditional: bool) -> tuple[list[int], Tensor]:
        inputs = prompt(text, conditional) + [ids[token] for token in stream]
        return inputs, network.model(torch.tensor([inputs])).last_hidden_state[0]

    image_ids = range(ids[0], ids[-2] + 1)
    output = network.lm_head.weight[image_ids.start : image_ids.stop].detach()
    return Tiny(folder, logits, image_ids, lambda codes: meta_decode(decoder, codes.view(1, 4, 4)), seen, output)


def meta_vq() -> dict[str, Tensor]:
    """An image tokenizer under Meta's names, whose levels are numbered from the image down."""
    return published_taming(vq_network(CODES, 32, attention=False))


def published_taming(network: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors of a `JanusVQVAE` under the names of taming-transformers."""
    levels = len(VQ_SIZES["channel_multiplier"])
    return {
        re.sub(r"^decoder\.up\.(\d+)", lambda level: f"decoder.up.{levels - 1 - int(level[1])}", name): tensor.clone()
        for name, tensor in network.state_dict().items()
    }


def meta_decode(tensors: dict[str, Tensor], codes: Tensor) -> Tensor:
    """The published VQGAN decoder, written out: codes [1, h, w] to [1, 3, 16 h, 16 w]. A MoVQ has attention
    also in its lowest level, and norms that are scaled and shifted by the latents."""
    latents = tensors["quantize.embedding.weight"][codes].permute(0, 3, 1, 2)

    def convolve(name: str, x: Tensor) -> Tensor:
        weight = tensors[f"{name}.weight"]
        return functional.conv2d(x, weight, tensors[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def normalise(name: str, x: Tensor) -> Tensor:
        if f"{name}.conv_y.weight" in tensors:
            at = functional.interpolate(latents, size=x.shape[-2:])
            scale_and_shift = [tensors[f"{name}.norm_layer.{part}"] for part in ("weight", "bias")]
            return functional.group_norm(x, 32, *scale_and_shift, 1e-6) * convolve(f"{name}.conv_y", at) + convolve(
                f"{name}.conv_b", at
            )
        return functional.group_norm(x, 32, tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps=1e-6)

    def residual(name: str, x: Tensor) -> Tensor:
        h = convolve(f"{name}.conv1", functional.silu(normalise(f"{name}.norm1", x)))
        h = convolve(f"{name}.conv2", functional.silu(normalise(f"{name}.norm2", h)))
        shortcut = f"{name}.nin_shortcut"
        return h + (convolve(shortcut, x) if f"{shortcut}.weight" in tensors else x)

    def attend(name: str, x: Tensor) -> Tensor:
        h = normalise(f"{name}.norm", x)
        q, k, v = (convolve(f"{name}.{part}", h).flatten(2).transpose(1, 2) for part in "qkv")
        out = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return x + convolve(f"{name}.proj_out", out.transpose(1, 2).reshape(x.shape))

    x = convolve("decoder.conv_in", convolve("post_quant_conv", latents))
    x = residual("decoder.mid.block_1", x)
    x = residual("decoder.mid.block_2", attend("decoder.mid.attn_1", x))
    levels = {int(name.split(".")[2]) for name in tensors if name.startswith("decoder.up.")}
    for level in reversed(range(len(levels))):
        for block in range(VQ_SIZES["num_res_blocks"] + 1):
            x = residual(f"decoder.up.{level}.block.{block}", x)
            if f"decoder.up.{level}.attn.{block}.q.weight" in tensors:
                x = attend(f"decoder.up.{level}.attn.{block}", x)
        if level:
            x = convolve(f"decoder.up.{level}.upsample.conv", functional.interpolate(x, scale_factor=2.0))
    return convolve("decoder.conv_out", functional.silu(normalise("decoder.norm_out", x)))
