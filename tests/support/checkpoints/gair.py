"""Anole as GAIR publishes it, in Meta's layout, with Meta's computation written out slowly."""

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from checkpoints import chameleon
from checkpoints.parts import Tiny, byte_tokenizer, random_tensors
from checkpoints.slow import attended, meta_layers, meta_shapes, turned

WIDTH, INNER, LAYERS, HEADS, EPS = 32, 48, 2, 4, 1e-5
HEAD = WIDTH // HEADS
WORDS = chameleon.FIRST_BYTE + 256


def write(folder: Path) -> Tiny:
    models, tokens = folder / "models" / "7b", folder / "tokenizer"
    models.mkdir(parents=True)
    tokens.mkdir()
    tensors = _tensors()
    torch.save({name: tensor.bfloat16() for name, tensor in tensors.items()}, models / "consolidated.pth")
    params = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "multiple_of": 256, "norm_eps": EPS}
    params |= {"qk_normalization": True, "rope_theta": 10000.0, "swin_norm": False, "vocab_size": WORDS}
    (models / "params.json").write_text(json.dumps({"model": params, "model_parallel_size": 1, "seed": 1}))
    (models / "consolidate_params.json").write_text(json.dumps({"model_parallel_size": 1}))
    words = chameleon.SPECIALS, chameleon.FIRST_BYTE, chameleon.IMAGE_WORDS
    tokenizer = byte_tokenizer(tokens / "text_tokenizer.json", *words)
    decoder = chameleon.meta_vq()
    torch.save({"state_dict": decoder | {"loss.logvar": torch.zeros(())}}, tokens / "vqgan.ckpt")
    (tokens / "vqgan.yaml").write_text("model: {}\n")
    first = 4

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        words = [*tokenizer.encode(text).ids, chameleon.RESERVED["<reserved08706>"]] if conditional else []
        start = [0, *words, chameleon.BEGIN_IMAGE]
        inputs = tensors["tok_embeddings.weight"][torch.tensor(start + [first + token for token in stream])]
        return meta_layers(tensors, inputs, _attention)[len(start) - 1 :] @ tensors["output.weight"].T

    ids = range(first, first + chameleon.CODES)
    return Tiny(folder, logits, ids, lambda codes: chameleon.meta_decode(decoder, codes.view(1, 4, 4)))


def _attention(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """One head at a time."""
    heads = []
    for q, k, v in zip(*((x @ weights[name].T).split(HEAD, 1) for name in ("wq", "wk", "wv")), strict=True):
        queries, keys = (
            torch.stack([_rotate(row, at) for at, row in enumerate(_normed(weights, f"{name}_normalization", m))])
            for name, m in (("q", q), ("k", k))
        )
        heads.append(attended(queries, keys, v))
    return torch.cat(heads, dim=-1) @ weights["wo"].T


def _normed(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (HEAD,), weights[name], weights[f"{name}.bias"], 1e-5)


def _rotate(vector: Tensor, position: int) -> Tensor:
    return turned(vector, [position * 10_000.0 ** (-2 * index / HEAD) for index in range(HEAD // 2)])


def _tensors() -> dict[str, Tensor]:
    """Values that bfloat16 can hold, under Meta's names."""
    attention = {f"{name}.weight": (WIDTH, WIDTH) for name in ("wq", "wk", "wv")}
    attention |= {f"{n}_normalization.{part}": (HEAD,) for n in "qk" for part in ("weight", "bias")}
    shapes = meta_shapes(WORDS, WIDTH, INNER, LAYERS, attention)
    tensors = {"rope.freqs": torch.ones(HEAD // 2)} | random_tensors(shapes, 11)
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
