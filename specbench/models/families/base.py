"""Common parts of the families with official checkpoints, on top of the transformer core: prompts of token ids, image
tokens that are words of the language model's vocabulary, an output matrix with rows of image tokens only, and loading.

The networks are transformers' classes. Hand-written parts are image heads and decoders that transformers hides or
lacks, the conversion of authors' tensors into its classes, rotations over grids, and all prompts, because transformers'
processors build no image prompts or differ from the official scripts. Tokenizers are read from `tokenizer.json`
directly, without transformers' tokenizer classes. Loading fails if a tensor is missing or left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import fill, randomise, read_tensors, token_id
from specbench.models.families import vq_decoder
from specbench.models.hub_model import HubModel, digest
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerModel
from specbench.system.matrix_products import product
from specbench.system.plugins import load_object

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Sizes of a network at tiny scale."""


@dataclass(frozen=True)
class LoadRequest:
    info: HubModel  # the model's facts, with the grid to decode
    files: tuple[CheckpointFiles, ...]  # the model's files, the language model's first; empty for random weights
    weights_sha256: str  # digest of the files
    # device, dtype: of the language model
    device: str
    dtype: torch.dtype

    def layout(self, v_image: int) -> TokenLayout:
        """Return the grammar for a checkpoint with `v_image` image tokens."""
        if v_image != self.info.v_image and not self.info.choice.tiny:
            small = "; a small checkpoint needs --scale tiny" if v_image < self.info.v_image else ""
            problem = f" has {v_image} image tokens, {self.info.name} has {self.info.v_image}{small}"
            raise self.files[0].refusal(problem)
        if self.info.row_ends:
            return TokenLayout.with_row_ends(*self.info.grid, v_image)
        return TokenLayout.plain(*self.info.grid, v_image, self.info.grids_before)

    def fill(self, network: nn.Module, tensors: Mapping[str, Tensor], files: CheckpointFiles) -> nn.Module:
        """Assign the language model's stored values; see `specbench.models.checkpoint_loading.fill`."""
        return fill(network, tensors, files, self.device, self.dtype, self.info.choice.eight_bits)

    def randomise(self, network: nn.Module) -> nn.Module:
        """Draw the language model; see `specbench.models.checkpoint_loading.randomise`."""
        return randomise(network, self.device, self.dtype, eight_bits=self.info.choice.eight_bits)

    def sized(self, full: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
        """Return an architecture's settings at the requested size."""
        return {**full, **tiny} if self.info.choice.tiny else dict(full)

    def sized_network(self, full: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
        """`sized` for the language model, with the sizes of `info.network`."""
        return self.sized({**self.info.network.config(), **full}, tiny)

    def llamagen_vq(self, files: CheckpointFiles | None) -> vq_decoder.TamingDecoder:
        """Load LlamaGen's image decoder, or without files draw a random decoder."""
        if files:
            return vq_decoder.load_llamagen_vq(files, self.device)
        settings = self.sized(vq_decoder.LLAMAGEN_VQ, vq_decoder.TINY_VQ)
        return vq_decoder.random_taming(settings, normalise=True, attention=True, device=self.device)

    def chameleon_vq(self, files: CheckpointFiles | None) -> vq_decoder.TamingDecoder:
        """Load Chameleon's image decoder, or without files draw a random decoder."""
        if files:
            return vq_decoder.load_chameleon_vq(read_tensors(files), files, self.device)
        settings = self.sized(vq_decoder.CHAMELEON_VQ, vq_decoder.TINY_CHAMELEON_VQ)
        return vq_decoder.random_taming(settings, normalise=False, attention=False, device=self.device)


def load(info: HubModel, device: str, dtype: str, files: tuple[CheckpointFiles, ...]) -> FamilyModel:
    """Load the model of these facts from `files`; without files, with random weights. On the device "meta" everything
    is checked, but no weight is read or drawn."""
    weights_sha256 = "" if device == "meta" else digest(files) if files else info.weights_sha256()
    request = LoadRequest(info, files, weights_sha256, device, getattr(torch, dtype))
    load_family: Any = load_object(info.target, f"model {info.name}")
    return load_family(request)


def stand_in_tokenizer(specials: Mapping[str, int], first_byte: int) -> Tokenizer:
    """Build a tokenizer for random weights: special tokens with their official ids, and one token per byte of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: first_byte + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **specials}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


class FamilyModel(TransformerModel):
    """A family whose prompts are token ids and whose image tokens are words of its vocabulary. `backbone`:
    transformers' network without head; `head`: [v_image, d] rows of the output matrix; `stream_ids`: [layout.vocab]
    vocabulary id of each stream id: image tokens, then the forced special; `decoder`: a `vq_decoder.ImageDecoder`
    (only its `codebook` is needed if the family overrides `render`); `vocabulary`: [words, d] output matrix of all
    words, None if they are the image tokens."""

    # special tokens of its prompts; a tokenizer without them would encode them as letters.
    marks: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()  # special tokens that its grammar forces, in the order of their stream ids

    def __init__(
        self,
        request: LoadRequest,
        tokenizer: Tokenizer,
        backbone: nn.Module,
        head: Tensor,
        stream_ids: Sequence[int],
        decoder: Any,
        vocabulary: Tensor | None = None,
    ):
        self.name = request.info.name
        self.layout = request.layout(len(head))
        self.released = request.info.choice.released
        self.tokenizer = tokenizer
        if spelled := [name for name in self.marks if len(self.words(name)) != 1]:
            raise request.files[-1].refusal(f": the tokenizer of '{self.name}' has no token '{spelled[0]}'")
        self.backbone = backbone
        self.weights_sha256 = request.weights_sha256
        self.codebook = decoder.codebook
        self._head, self.vocabulary = head, vocabulary
        self._stream_ids = torch.tensor(stream_ids, device=request.device)
        self._decoder = decoder

    @classmethod
    def of_words(cls, request: LoadRequest, tokenizer: Tokenizer, network: nn.Module, ids: range, decoder: Any) -> Self:
        """Build a model whose image tokens are the words `ids` of a network with an output matrix of all words."""
        matrix = network.lm_head.weight
        stream_ids = [*ids, *(token_id(tokenizer, name) for name in cls.forced)]
        return cls(request, tokenizer, network.model, matrix[ids.start : ids.stop], stream_ids, decoder, matrix)

    def words(self, text: str) -> list[int]:
        """Return the vocabulary ids of a text in which special tokens are written by name. No tokens are added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return vocabulary ids of the conditional and the unconditional prompt, up to the first image token."""
        raise NotImplementedError

    def encode(self, prompts: Sequence[str]) -> Prefix:
        pairs = [self.prompt_ids(text) for text in prompts]
        rows = [conditional for conditional, _ in pairs] + [unconditional for _, unconditional in pairs]
        rows = [torch.tensor(row, device=self.device) for row in rows]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Prefix([self.backbone.embed_tokens(row) for row in rows], ids=ids)

    def table_ids(self, tokens: Tensor) -> Tensor:
        return self._stream_ids[tokens]

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.backbone.embed_tokens(self._stream_ids[tokens])

    def output_matrix(self) -> tuple[Tensor, None]:
        return self._head, None

    def head(self, hidden: Tensor) -> Tensor:
        return product(hidden, self._head)

    def all_words(self, hidden: Tensor) -> Tensor:
        """Logits [R, T, words] of the whole `vocabulary`."""
        return product(hidden, self.vocabulary)

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return vq_decoder.render_codes(self._decoder, image_tokens.view(-1, self.layout.height, self.layout.width))
