"""Tiny checkpoint of LlamaGen, with an explicit version of the official computation."""

import argparse
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

from checkpoints.parts import Tiny, in_two_shards, random_tensors, randomise, stored, vocabulary, vq_network
from checkpoints.slow import attended, meta_layers, meta_shapes, turned

CODES = vocabulary(official=16_384)
WIDTH, INNER, LAYERS, HEAD, TEXT, CAPTION, GRID = 128, 48, 2, 64, 32, 120, 4


def write(folder: Path, file: str, text_folder: str = "flan-t5-xl", pickled: bool = False) -> Tiny:
    """`pickled`: FLAN-T5 as the authors' script downloads it."""
    tensors = _tensors()
    # Training saves its parsed arguments with the weights.
    torch.save({"model": tensors, "steps": 7, "args": argparse.Namespace(gpt_model="GPT-XL")}, folder / file)
    image = write_vq(folder / "vq_ds16_t2i.pt")
    t5 = _write_t5(folder / text_folder)
    if pickled:
        in_two_shards(folder / text_folder, stored(folder / text_folder), pickled=True)
    tokenizer = Tokenizer.from_file(str(folder / text_folder / "tokenizer.json"))

    @torch.no_grad()
    def features(text: str, stream: list[int], conditional: bool) -> Tensor:
        ids = tokenizer.encode(text.lower()).ids
        ids = ids if len(ids) <= CAPTION else [*ids[: CAPTION - 1], 1]
        padded = torch.tensor([ids + [0] * (CAPTION - len(ids))])
        valid = torch.arange(CAPTION)[None] < len(ids)
        vectors = t5.encoder(padded, attention_mask=valid.long()).last_hidden_state[0]
        vectors = torch.cat([vectors[len(ids) :] * 0, vectors[: len(ids)]])
        caption = vectors if conditional else tensors["cls_embedding.uncond_embedding"]
        return official_features(tensors, caption, CAPTION - len(ids), stream)

    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        return features(text, stream, conditional)[CAPTION - 1 :] @ tensors["output.weight"].T

    def seen(text: str, stream: list[int], conditional: bool) -> tuple[list[int], Tensor]:
        return [0] * CAPTION + stream, features(text, stream, conditional)

    return Tiny(folder, logits, range(CODES), lambda codes: image.decode(codes), seen, tensors["output.weight"])


def write_by_class(folder: Path, file: str, bare: bool = False, width: int = WIDTH, head: int = HEAD) -> Tiny:
    """A class-conditional checkpoint; `bare`: as FSDP saves it."""
    tensors, image = language_tensors(width), write_vq(folder / "vq_ds16_c2i.pt")
    table = torch.randn(1001, width, generator=torch.Generator().manual_seed(6))
    tensors["cls_embedding.embedding_table.weight"] = table
    torch.save(tensors if bare else {"model": tensors}, folder / file)

    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        x = torch.cat([table[int(text) if conditional else 1000][None], embedded(tensors, stream)])
        return official_layers(tensors, x, 0, 1, head) @ tensors["output.weight"].T

    return Tiny(folder, logits, range(CODES), lambda codes: image.decode(codes))


def embedded(tensors: dict[str, Tensor], stream: list[int]) -> Tensor:
    return tensors["tok_embeddings.weight"][torch.tensor(stream, dtype=torch.long)]


def official_features(tensors: dict[str, Tensor], caption: Tensor, padding: int, stream: list[int]) -> Tensor:
    """Last hidden states [120 + len(stream), d]: captions left-padded, one position and one head at a time."""
    fc1, fc2 = (tensors[f"cls_embedding.cap_proj.{name}.weight"] for name in ("fc1", "fc2"))
    x = functional.gelu(caption @ fc1.T, approximate="tanh") @ fc2.T
    return official_layers(tensors, torch.cat([x, embedded(tensors, stream)]), padding, len(x))


def official_layers(
    tensors: dict[str, Tensor], x: Tensor, padding: int, caption: int | None, head: int = HEAD
) -> Tensor:
    """Last hidden states of inputs [T, d], of which `caption` are the caption; None turns no position."""
    sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    sees[:, :padding] = False
    sees |= torch.eye(len(x), dtype=torch.bool)

    def attention(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        heads = []
        for q, k, v in zip(*(part.split(head, 1) for part in (x @ weights["wqkv"].T).chunk(3, 1)), strict=True):
            if caption is not None:
                q, k = (torch.stack([rotate(row, at, caption) for at, row in enumerate(m)]) for m in (q, k))
            heads.append(attended(q, k, v, sees))
        return torch.cat(heads, dim=-1) @ weights["wo"].T

    return meta_layers(tensors, x, attention)


def rotate(vector: Tensor, position: int, caption: int = CAPTION) -> Tensor:
    """Neighbouring pairs turned by row in the first half of a head, by column in the second; captions become 0."""
    if position < caption:
        return vector * 0
    row, column = divmod(position - caption, GRID)
    half = len(vector) // 2
    return turned(
        vector, [place * 10_000.0 ** (-2 * index / half) for place in (row, column) for index in range(half // 2)]
    )


def language_tensors(width: int = WIDTH) -> dict[str, Tensor]:
    """Without the condition."""
    return {name: tensor for name, tensor in _tensors(width).items() if not name.startswith("cls_embedding.")}


def _tensors(width: int = WIDTH) -> dict[str, Tensor]:
    caption = {"uncond_embedding": (CAPTION, TEXT), "cap_proj.fc1.weight": (width, TEXT)}
    caption["cap_proj.fc2.weight"] = (width, width)
    shapes = {f"cls_embedding.{name}": shape for name, shape in caption.items()}
    shapes |= meta_shapes(CODES, width, INNER, LAYERS, {"wqkv.weight": (3 * width, width)})
    return random_tensors(shapes, 3)


def write_vq(path: Path) -> nn.Module:
    """An image tokenizer, saved under LlamaGen's names."""
    network = vq_network(CODES, 8)
    tensors = {official_vq_name(name): tensor for name, tensor in network.state_dict().items()}
    torch.save({"model": tensors | {"quantize.codebook_used": torch.zeros(65_536)}}, path)
    return network


def official_vq_name(name: str) -> str:
    """LlamaGen's and Janus-Pro's name of a tensor of transformers' image tokenizer."""
    for side, blocks in (("decoder", "up"), ("encoder", "down")):
        name = re.sub(rf"^{side}\.{blocks}\.(\d+)", rf"{side}.conv_blocks.\1", name)
        name = re.sub(rf"^({side}\.conv_blocks\.\d+)\.block\.", r"\1.res.", name)
    for index, part in enumerate(("block_1", "attn_1", "block_2")):
        name = name.replace(f".mid.{part}.", f".mid.{index}.")
    return name


def _write_t5(folder: Path) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=40, d_model=TEXT, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )  # fmt: skip
    network = randomise(T5ForConditionalGeneration(config), seed=5)
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder)
    letters = "abcdefghijklmnopqrstuvwxyz,."
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return network
