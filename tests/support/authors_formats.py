"""Small networks saved in the authors' published formats, and independent forwards for comparison."""

import gzip
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.metrics import published_weights
from specbench.system.digests import digest_of
from specbench.system.downloads import Remote

VOCABULARY = [
    "[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat", "dog", "blue", "photo", "##s",
]  # fmt: skip


def stand_in(monkeypatch, name: str, path: Path) -> published_weights.Checkpoint:
    """Let the file at `path` be the published checkpoint `name`, digest and all."""
    entry = published_weights.Checkpoint(path.name, Remote("http://127.0.0.1:9/", digest_of(path)), "test")
    entry.path.parent.mkdir(parents=True, exist_ok=True)
    entry.path.symlink_to(path)
    monkeypatch.setitem(published_weights.CHECKPOINTS, name, entry)
    return entry


class _Archive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def save_openai_clip(path: Path, image: int = 64, patch: int = 32) -> Path:
    """A CLIP as OpenAI publishes them: a TorchScript archive of half-precision weights, and three sizes."""
    from specbench.metrics.openclip import import_open_clip

    torch.manual_seed(1)
    clip = import_open_clip().model.CLIP(
        32,
        {"layers": 2, "width": 64, "patch_size": patch, "image_size": image},
        {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2},
        quick_gelu=True,
    )
    weights = {name: value for name, value in clip.state_dict().items() if name != "attn_mask"}
    for name in weights:
        if "proj" in name and weights[name].ndim == 2:
            weights[name] = weights[name] * 3
    archive = _Archive()
    for name, value in weights.items():
        *folders, last = name.split(".")
        place = archive
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, _Archive())
            place = getattr(place, folder)
        place.register_buffer(last, value.half())
    sizes = {"input_resolution": image, "context_length": 77, "vocab_size": 49408}
    for name, size in sizes.items():
        archive.register_buffer(name, torch.tensor(size))
    torch.jit.save(torch.jit.script(archive), str(path))
    return path


TINY_HPS = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 80, "head_width": 80, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2},
}


def save_hpsv2(folder: Path) -> Path:
    """HPSv2 as its authors publish it, but small: its architecture, which open_clip then knows, is `tiny-hps.json`
    next to the returned file."""
    from specbench.metrics.openclip import import_open_clip

    (folder / "tiny-hps.json").write_text(json.dumps(TINY_HPS))
    import_open_clip().add_model_config(folder / "tiny-hps.json")
    torch.manual_seed(4)
    model = import_open_clip().create_model("tiny-hps", pretrained=None, output_dict=True)
    torch.save({"state_dict": {name: value.half() for name, value in model.state_dict().items()}}, folder / "HPS.pt")
    return folder / "HPS.pt"


def vision_weights(image: int, patch: int, hidden: int, layers: int, prefix: str) -> dict[str, Tensor]:
    """An image encoder in BLIP's naming."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, hidden),
        "pos_embed": (1, (image // patch) ** 2 + 1, hidden),
        "patch_embed.proj.weight": (hidden, 3, patch, patch),
        "patch_embed.proj.bias": (hidden,),
    } | _norm("norm", hidden)
    for number in range(layers):
        block = f"blocks.{number}."
        shapes |= _norm(block + "norm1", hidden) | _norm(block + "norm2", hidden)
        shapes |= _dense(block + "attn.qkv", hidden, 3 * hidden) | _dense(block + "attn.proj", hidden, hidden)
        shapes |= _dense(block + "mlp.fc1", hidden, 2 * hidden) | _dense(block + "mlp.fc2", 2 * hidden, hidden)
    return {prefix + name: _draw(name, shape) for name, shape in shapes.items()}


def text_weights(vocabulary: int, hidden: int, seen: int, layers: int, prefix: str, head: bool = False):
    """A BERT with cross-attention in BLIP's naming, with its language head if wanted."""
    body = "bert." if head else ""
    shapes: dict[str, tuple[int, ...]] = {
        f"{body}embeddings.word_embeddings.weight": (vocabulary, hidden),
        f"{body}embeddings.position_embeddings.weight": (512, hidden),
    } | _norm(f"{body}embeddings.LayerNorm", hidden)
    for number in range(layers):
        layer = f"{body}encoder.layer.{number}."
        for attention, source in (("attention", hidden), ("crossattention", seen)):
            shapes |= _dense(f"{layer}{attention}.self.query", hidden, hidden)
            shapes |= _dense(f"{layer}{attention}.self.key", source, hidden)
            shapes |= _dense(f"{layer}{attention}.self.value", source, hidden)
            shapes |= _dense(f"{layer}{attention}.output.dense", hidden, hidden)
            shapes |= _norm(f"{layer}{attention}.output.LayerNorm", hidden)
        shapes |= _dense(f"{layer}intermediate.dense", hidden, 2 * hidden)
        shapes |= _dense(f"{layer}output.dense", 2 * hidden, hidden) | _norm(f"{layer}output.LayerNorm", hidden)
    weights = {name: _draw(name, shape) for name, shape in shapes.items()}
    if head:
        weights |= {name: _draw(name, shape) for name, shape in _head_shapes(vocabulary, hidden).items()}
        weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
        weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    weights[f"{body}embeddings.position_ids"] = torch.arange(512)[None]
    return {prefix + name: value for name, value in weights.items()}


def _head_shapes(vocabulary: int, hidden: int) -> dict[str, tuple[int, ...]]:
    transform = "cls.predictions.transform."
    return (
        {"cls.predictions.bias": (vocabulary,)}
        | _dense(transform + "dense", hidden, hidden)
        | _norm(transform + "LayerNorm", hidden)
    )


def save_imagereward(path: Path, image: int = 32) -> Path:
    """ImageReward as its authors publish it, with the parts of BLIP it does not use."""
    torch.manual_seed(2)
    weights = vision_weights(image, 16, 128, 2, "blip.visual_encoder.")
    weights |= text_weights(30524, 64, 128, 2, "blip.text_encoder.")
    for number, (into, out) in zip((0, 2, 4, 6, 7), ((64, 20), (20, 12), (12, 8), (8, 4), (4, 1)), strict=True):
        weights[f"mlp.layers.{number}.weight"] = torch.randn(out, into) / into**0.5
        weights[f"mlp.layers.{number}.bias"] = torch.randn(out)
    weights["blip.vision_proj.weight"] = torch.zeros(256, 128)
    weights["blip.text_proj.weight"] = torch.zeros(256, 64)
    torch.save(weights, path)
    return path


def save_vqa(path: Path, image: int = 32) -> Path:
    """BLIP-VQA as its authors publish it."""
    torch.manual_seed(3)
    weights = vision_weights(image, 16, 128, 2, "visual_encoder.")
    weights |= text_weights(30524, 64, 128, 2, "text_encoder.")
    weights |= text_weights(30524, 64, 64, 2, "text_decoder.", head=True)
    torch.save({"model": weights}, path)
    return path


def save_vocabulary(path: Path) -> Path:
    """A BERT vocabulary of the published length with a few words in it, "yes" and "no" at their published places."""
    words = VOCABULARY + [f"[unused{number}]" for number in range(1, 30522 - len(VOCABULARY) + 1)]
    words[2748], words[2053] = "yes", "no"
    path.write_text("\n".join(words) + "\n")
    return path


def vision_forward(weights: dict[str, Tensor], image_CHW: Tensor) -> Tensor:
    """Features [tokens, hidden] of an image, written out."""
    patch = weights["patch_embed.proj.weight"].shape[2]
    grid = F.conv2d(image_CHW[None], weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], patch)
    x_TD = torch.cat([weights["cls_token"][0], grid[0].flatten(1).T]) + weights["pos_embed"][0]
    for number in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))):
        block = {name.partition(f"blocks.{number}.")[2]: value for name, value in weights.items()}
        y = _normed(block, "norm1", x_TD, 1e-6)
        q, k, v = _apply(block, "attn.qkv", y).chunk(3, dim=1)
        x_TD = x_TD + _apply(block, "attn.proj", _attend(q, k, v))
        y = _apply(block, "mlp.fc1", _normed(block, "norm2", x_TD, 1e-6))
        x_TD = x_TD + _apply(block, "mlp.fc2", F.gelu(y))
    return _normed(weights, "norm", x_TD, 1e-6)


def text_forward(weights: dict[str, Tensor], ids: list[int], seen_SD: Tensor, causal: bool = False) -> Tensor:
    """States [tokens, hidden] of an unpadded text that looks at `seen_SD`, written out."""
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x_TD = _normed(weights, "embeddings.LayerNorm", x, 1e-12)
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    for number in range(layers):
        layer = {name.partition(f"encoder.layer.{number}.")[2]: value for name, value in weights.items()}
        for attention, source in (("attention", None), ("crossattention", seen_SD)):
            looked_at = x_TD if source is None else source
            q = _apply(layer, f"{attention}.self.query", x_TD)
            k, v = (_apply(layer, f"{attention}.self.{part}", looked_at) for part in ("key", "value"))
            y = _apply(layer, f"{attention}.output.dense", _attend(q, k, v, causal and source is None))
            x_TD = _normed(layer, f"{attention}.output.LayerNorm", x_TD + y, 1e-12)
        y = _apply(layer, "output.dense", F.gelu(_apply(layer, "intermediate.dense", x_TD)))
        x_TD = _normed(layer, "output.LayerNorm", x_TD + y, 1e-12)
    return x_TD


def head_forward(weights: dict[str, Tensor], states_TD: Tensor) -> Tensor:
    """Vocabulary logits of the language head, written out."""
    y = F.gelu(_apply(weights, "cls.predictions.transform.dense", states_TD))
    y = _normed(weights, "cls.predictions.transform.LayerNorm", y, 1e-12)
    return y @ weights["cls.predictions.decoder.weight"].T + weights["cls.predictions.bias"]


def bpe_vocabulary() -> bytes:
    """CLIP's byte pair vocabulary, as open_clip ships it."""
    from specbench.metrics.openclip import import_open_clip

    return gzip.decompress((Path(import_open_clip().__file__).parent / "bpe_simple_vocab_16e6.txt.gz").read_bytes())


def _attend(q_TD: Tensor, k_SD: Tensor, v_SD: Tensor, causal: bool = False) -> Tensor:
    out = []
    for q, k, v in zip(q_TD.split(64, 1), k_SD.split(64, 1), v_SD.split(64, 1), strict=True):
        scores = q @ k.T / 8
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(1) @ v)
    return torch.cat(out, 1)


def _apply(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _normed(weights: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _dense(name: str, into: int, out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    if "norm" in name.lower() and name.endswith("weight"):
        return 1 + 0.2 * torch.randn(shape)
    spread = 0.3 if len(shape) == 1 or "embed" in name or "token" in name else 2.0 / shape[-1] ** 0.5
    return spread * torch.randn(shape)
