"""X-Omni (AR of 7B): a Qwen2 with a second token table, norm and head for codes, whose first and last layers change the
hidden states of codes alone. A FLUX model turns the codes into pixels.

The network is written here after a copy of the authors' code, since transformers has none; the code of the FLUX model
and of the code table was not available, so only tokens are decoded. The script samples with transformers' `generate`
and its default temperature, top-k and top-p, which the generation settings of the repository replace.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from specbench.errors import SpecbenchError
from specbench.models import checkpoint_loading as stored
from specbench.models.families.base import LoadRequest, stand_in_tokenizer
from specbench.models.families.generation_config import read_repetition_penalty
from specbench.models.families.simplear import QWEN, TINY_QWEN, SimpleAR
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.system.console import warn

_SPECIALS = ("<SOM>", "<EOM>", "<IMAGE>")
_USUAL = {"mm_vocab_size": 16_448, "image_vocab_size": 16_384, "mm_special_tokens": _SPECIALS}
_USUAL |= {"num_mm_adap_layers": 4, "num_mm_head_layers": 4}
"""Entries of the authors' configuration and their defaults."""
_TINY = TINY_QWEN | {"num_hidden_layers": 4, "num_mm_adap_layers": 1, "num_mm_head_layers": 1}
_NORMS = {"model.lm_norm.weight": "model.norm.words.weight", "model.mm_norm.weight": "model.norm.codes.weight"}
_TABLES = ("model.lm_embed_tokens.weight", "model.mm_embed_tokens.weight")


class MarkedEmbedding(nn.Embedding):
    """Token ids [..., T] to vectors [..., T, d + 1], whose last number is 1 for ids after the `words`, else 0."""

    def __init__(self, words: int, codes: int, width: int):
        super().__init__(words + codes, width)
        self._words = words

    def forward(self, ids: Tensor) -> Tensor:
        vectors = super().forward(ids)
        return torch.cat([vectors, (ids >= self._words)[..., None].to(vectors.dtype)], -1)


class MarkedLayer(Qwen2DecoderLayer):
    """A layer for marked hidden states [R, T, d + 1]. All of them give keys and values; unless `for_words`, those
    without a mark leave the layer as they came."""

    for_words = True

    def forward(self, hidden_states: Tensor, *arguments: object, **options: object) -> Tensor:
        hidden, mark = hidden_states[..., :-1], hidden_states[..., -1:]
        changed = super().forward(hidden, *arguments, **options)
        if not self.for_words:
            changed = torch.where(mark > 0, changed, hidden)
        return torch.cat([changed, mark], -1)


class MarkedNorm(nn.Module):
    """The norms of words and of codes: hidden states [R, T, d + 1] to [R, T, d]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.words, self.codes = Qwen2RMSNorm(width, eps=eps), Qwen2RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden, mark = hidden[..., :-1], hidden[..., -1:]
        return torch.where(mark > 0, self.codes(hidden), self.words(hidden))


class XOmniNetwork(nn.Module):
    """The language model without its head for words."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.model = Qwen2Model(config)
        width, last = config.hidden_size, config.num_hidden_layers - config.num_mm_head_layers
        self.model.embed_tokens = MarkedEmbedding(config.vocab_size, config.mm_vocab_size, width)
        self.model.layers = nn.ModuleList(MarkedLayer(config, number) for number in range(config.num_hidden_layers))
        for number, layer in enumerate(self.model.layers):
            layer.for_words = config.num_mm_adap_layers <= number < last
        self.model.norm = MarkedNorm(width, config.rms_norm_eps)
        self.mm_head = nn.Linear(width, config.mm_vocab_size, bias=False)


class XOmni(SimpleAR):
    """Attributes: draws: whether it draws pictures."""

    draws = False
    codebook = None

    def __init__(self, request: LoadRequest, tokenizer: Tokenizer, network: XOmniNetwork):
        config = network.model.config
        start, _, image = self.marks = tuple(config.mm_special_tokens)
        words, codes = config.vocab_size, config.image_vocab_size
        super().__init__(
            request, tokenizer, network.model, network.mm_head.weight[:codes], range(words, words + codes), self
        )
        self._begin = f"{start}{self.layout.height} {self.layout.width}{image}"

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        return self.tokenizer.encode(text + self._begin).ids, self.words(self._begin)

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        if self.repetition_penalty != 1.0 and guidance != 1.0:
            what = f"--cfg {guidance:g}: '{self.name}' has no guidance with its repetition penalty"
            raise SpecbenchError(what, "omit --cfg, or set repetition_penalty to 1 in generation_config.json")
        return super().begin(prefix, guidance, columns)


def load(request: LoadRequest) -> XOmni:
    if not request.files:
        config = Qwen2Config(**_USUAL | request.sized_network(QWEN | {"tie_word_embeddings": False}, _TINY))
        first = config.vocab_size + config.image_vocab_size
        tokenizer = stand_in_tokenizer({name: first + number for number, name in enumerate(_SPECIALS)}, first_byte=0)
        model = XOmni(request, tokenizer, request.randomise(stored.build_network(XOmniNetwork, config)))
    else:
        [files] = request.files
        penalty = read_repetition_penalty(files, set_by_script=("min_p",))
        config = stored.read_model_config(files, Qwen2Config)
        for name, value in _USUAL.items():
            setattr(config, name, getattr(config, name, value))
        if config.use_sliding_window:
            raise files.refusal(": sliding-window attention is not supported", files.named("config.json"))
        network = stored.build_network(XOmniNetwork, config, files=files)
        tensors = stored.rename(stored.drop(stored.read_tensors(files), ("lm_head.",)), _NORMS.get)
        if absent := [name for name in _TABLES if name not in tensors]:
            raise files.refusal(f" lacks '{absent[0]}'")
        words, codes = (tensors.pop(name) for name in _TABLES)
        if words.shape[1:] != codes.shape[1:]:
            raise files.refusal(f": its tables have rows of {words.shape[1:]} and {codes.shape[1:]} numbers")
        # A check alone copies no gigabyte.
        both = words[:1].expand(len(words) + len(codes), -1) if request.device == "meta" else torch.cat([words, codes])
        tensors["model.embed_tokens.weight"] = both
        tokenizer = stored.read_tokenizer(files)
        first, last = config.vocab_size, config.image_vocab_size - 1
        if [stored.token_id(tokenizer, f"<MM-Token-{code}>") for code in (0, last)] != [first, first + last]:
            raise files.refusal(f": its tokenizer does not have <MM-Token-0> to <MM-Token-{last}> from id {first} on")
        model = XOmni(request, tokenizer, request.fill(network, tensors, files))
        model.repetition_penalty = penalty
    warn(f"{model.name} draws no pictures: its FLUX decoder is not supported")
    return model
