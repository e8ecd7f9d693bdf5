"""The autoregressive network: a stock `LlamaModel` over 16 caption slots and 256 image tokens.

The input that predicts image token i carries the token at i - 1, the row and column of i, and the pooled caption:

    llama.embed_tokens(x[i - 1]) + row[i // 16] + column[i % 16] + pooled

The input that predicts token 0 is the last caption slot, `<image>`, with the same additions. The input of a caption's
word also carries the number of objects named before it. All inputs are built as `inputs_embeds`, so the weights fit the
plain transformers class.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from specbench.models.shapes import WEIGHTS, captions
from specbench.models.shapes.scene import COLORS, MAX_COUNT, RELATIONS, SHAPES, TEXTURES
from specbench.models.shapes.tokenizer import GRID, TOKENS, ShapesTokenizer


class ShapesNetwork(nn.Module):
    """Conditioning, transformer and head. Caption word w has row `codes` + w of the embedding table; `width` is the
    model dimension d, `inner` the MLP width."""

    prefix = captions.PREFIX

    def __init__(self, codes: int = 512, width: int = 128, layers: int = 6, heads: int = 2, inner: int = 384):
        super().__init__()
        self.config = {"codes": codes, "width": width, "layers": layers, "heads": heads, "inner": inner}
        self.codes = codes
        self.llama = LlamaModel(
            LlamaConfig(
                vocab_size=codes + len(captions.VOCABULARY),
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                max_position_embeddings=captions.PREFIX + TOKENS,
                rms_norm_eps=1e-5,
                attn_implementation="sdpa",
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        self.row = nn.Embedding(GRID, width)
        self.column = nn.Embedding(GRID, width)
        self.place = nn.Embedding(MAX_COUNT + 1, width)  # index: `objects_before`
        self.slot_word = nn.Parameter(torch.zeros(captions.PREFIX, len(captions.VOCABULARY), width))
        self.mix_in = nn.Linear(width, 2 * width, bias=False)
        self.mix_out = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, codes, bias=False)
        for table in (self.row.weight, self.column.weight, self.slot_word, self.head.weight):
            nn.init.normal_(table, std=0.02)
        nn.init.zeros_(self.place.weight)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Convert captions to word ids [R, 16]; raises `CaptionError` for an unknown word."""
        return torch.tensor([captions.encode(text) for text in prompts], device=self.device).view(-1, self.prefix)

    def null_ids(self, rows: int) -> Tensor:
        """Word ids [R, 16] of the empty caption."""
        return torch.tensor([captions.null_caption()], device=self.device).repeat(rows, 1)

    def pooled(self, ids: Tensor) -> Tensor:
        """Return one vector per caption, ids [R, 16] to [R, d]: entries of a (role, word) table, summed and mixed."""
        total = self.slot_word[roles(ids), ids].sum(1)
        return total + self.mix_out(F.silu(self.mix_in(total)))

    def prefix_embeds(self, ids: Tensor) -> Tensor:
        """Return the caption slots' inputs [R, 16, d]. The output at the last slot predicts image token 0."""
        embeds = self.llama.embed_tokens(ids + self.codes) + self.place(objects_before(ids))
        return torch.cat([embeds[:, :-1], embeds[:, -1:] + self.slot_embeds(ids)[:, :1]], dim=1)

    def slot_embeds(self, ids: Tensor) -> Tensor:
        """Return the inputs [R, 256, d] that predict image tokens, without the previous token's part."""
        slots = torch.arange(TOKENS, device=ids.device)
        return self.row(slots // GRID) + self.column(slots % GRID) + self.pooled(ids)[:, None]

    def token_embeds(self, tokens: Tensor, slots: Tensor, slot_embeds: Tensor) -> Tensor:
        """Return inputs [R, W, d] of image tokens [R, W]. `slots`: [R, W] index of the image token that each input
        predicts (the token after its own); past the end, the last index."""
        index = slots.clamp(max=TOKENS - 1)[..., None].expand(-1, -1, slot_embeds.shape[-1])
        return self.llama.embed_tokens(tokens) + slot_embeds.gather(1, index)

    def inputs(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return the teacher-forced inputs [R, 271, d] of whole images: ids [R, 16] and tokens [R, 256]. The last 256
        outputs predict the 256 tokens."""
        slots = torch.arange(1, TOKENS, device=tokens.device).expand(len(tokens), -1)
        image = self.token_embeds(tokens[:, :-1], slots, self.slot_embeds(ids))
        return torch.cat([self.prefix_embeds(ids), image], dim=1)

    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return teacher-forced logits [R, 256, K] of tokens [R, 256], given captions [R, 16]."""
        hidden = self.llama(inputs_embeds=self.inputs(ids, tokens), use_cache=False).last_hidden_state
        return self.head(hidden[:, self.prefix - 1 :])


def objects_before(ids: Tensor) -> Tensor:
    """Return the number of objects named before each word of a caption, int [R, 16]; 0 for the first object's words."""
    named = _is(ids, SHAPES)
    return (named.cumsum(1) - named.long()).clamp(max=MAX_COUNT)


def roles(ids: Tensor) -> Tensor:
    """Return the role of each word of a caption, int [R, 16], below 16. Joiner, color and shape of object k have roles
    3k - 1, 3k and 3k + 1, at any place in the caption; numbers have roles from 11 on, the texture 14. Padding, and
    words after padding, have their slot as the role."""
    before = objects_before(ids)
    role = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    role = torch.where(_is(ids, SHAPES), 3 * before + 1, role)
    role = torch.where(_is(ids, COLORS), 3 * before, role)
    role = torch.where(_is(ids, (*RELATIONS, "and")), (3 * before - 1).clamp(min=0), role)
    role = torch.where(_is(ids, captions.COUNT_WORDS), 11 + before.clamp(max=1), role)
    role = torch.where(_is(ids, ("on",)), 13, role)
    return torch.where(_is(ids, TEXTURES), 14, role).clamp(max=15)


def _is(ids: Tensor, names: Iterable[str]) -> Tensor:
    return torch.isin(ids, torch.tensor([captions.WORD_ID[name] for name in names], device=ids.device))


def settings(folder: Path = WEIGHTS) -> dict[str, Any]:
    """Read the shipped config.json: sizes of network and tokenizer, default `Sampling`, training samples."""
    return json.loads((folder / "config.json").read_text())


def load_network(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, folder: Path = WEIGHTS
) -> ShapesNetwork:
    """Load the shipped network in evaluation mode. The file must have exactly the network's tensors."""
    network = ShapesNetwork(**settings(folder)["network"])
    network.load_state_dict(load_file(folder / "network.safetensors"), strict=True)
    return network.to(device, dtype).eval().requires_grad_(False)


def load_tokenizer(device: str | torch.device = "cpu", folder: Path = WEIGHTS) -> ShapesTokenizer:
    """Load the shipped tokenizer in evaluation mode, in float32."""
    tokenizer = ShapesTokenizer(**settings(folder)["tokenizer"])
    tokenizer.load_state_dict(load_file(folder / "tokenizer.safetensors"), strict=True)
    return tokenizer.to(device).eval().requires_grad_(False)
