"""Anole as GAIR publishes it, in Meta's layout, with Meta's computation written out slowly."""

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from checkpoints import chameleon
from checkpoints.parts import Tiny, byte_tokenizer, random_tensors
from checkpoints.slow import attended, gated, rms, turned

WIDTH, INNER, LAYERS, HEADS, EPS = 32, 48, 2, 4, 1e-5
HEAD = WIDTH // HEADS
WORDS = chameleon.FIRST_BYTE + 256


def write(folder: Path) -> Tiny:
    models, tokens = folder / "models" / "7b", folder / "tokenizer"
    models.mkdir(parents=True)
    tokens.mkdir()
    tensors = _tensors()
    torch.save({name: tensor.bfloat16() for name, tensor in tensors.items()}, models / "consolidated.pth")
    params = {
        "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "multiple_of": 256, "norm_eps": EPS,
        "qk_normalization": True,
    }  # fmt: skip
    params |= {"rope_theta": 10000.0, "swin_norm": False, "vocab_size": WORDS}
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
        hidden = _features(tensors, start + [first + token for token in stream])
        return hidden[len(start) - 1 :] @ tensors["output.weight"].T

    ids = range(first, first + chameleon.CODES)
    return Tiny(folder, logits, ids, lambda codes: chameleon.meta_decode(decoder, codes.view(1, 4, 4)))


def _features(tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Last hidden states [T, d], one head at a time."""
    x = tensors["tok_embeddings.weight"][torch.tensor(ids)]
    for layer in range(LAYERS):
        weights = {
            name.removeprefix(f"layers.{layer}."): t for name, t in tensors.items() if f"layers.{layer}." in name
        }
        x = x + _attention(weights, rms(x, weights["attention_norm.weight"]))
        h = rms(x, weights["ffn_norm.weight"])
        x = x + gated(h, *(weights[f"feed_forward.w{number}.weight"] for number in (1, 3, 2)))
    return rms(x, tensors["norm.weight"])


def _attention(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (x @ weights[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
    heads = []
    for start in range(0, WIDTH, HEAD):
        part = slice(start, start + HEAD)
        queries, keys = (
            torch.stack([_rotate(row, at) for at, row in enumerate(_normed(weights, f"attention.{name}", m[:, part]))])
            for name, m in (("q_normalization", q), ("k_normalization", k))
        )
        heads.append(attended(queries, keys, v[:, part]))
    return torch.cat(heads, dim=-1) @ weights["attention.wo.weight"].T


def _normed(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (HEAD,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def _rotate(vector: Tensor, position: int) -> Tensor:
    return turned(vector, [position * 10_000.0 ** (-2 * index / HEAD) for index in range(HEAD // 2)])


def _tensors() -> dict[str, Tensor]:
    """Values that bfloat16 can hold, under Meta's names."""
    shapes = {"tok_embeddings.weight": (WORDS, WIDTH), "output.weight": (WORDS, WIDTH), "norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        inner = {f"attention.{name}.weight": (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")}
        inner |= {f"attention.{n}_normalization.{part}": (HEAD,) for n in "qk" for part in ("weight", "bias")}
        inner |= {f"feed_forward.{name}.weight": (INNER, WIDTH) for name in ("w1", "w3")}
        inner |= {"feed_forward.w2.weight": (WIDTH, INNER)}
        inner |= {"attention_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in inner.items()}
    tensors = {"rope.freqs": torch.ones(HEAD // 2)} | random_tensors(shapes, 11)
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
