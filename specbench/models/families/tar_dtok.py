"""Tar's de-tokenizer, its second stage: a Llama with absolute positions in the place of the rotation writes tokens of
LlamaGen's image decoder, given the features of the codes that the language model has written.

Its prompts are those codes as the authors' code passes them on, a text with "<I5><I17>..."; missing ones are code 0.
The unconditional rows have features of zero. The official code runs all in bfloat16; the image decoder is float32 here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, Siglip2VisionConfig, Siglip2VisionModel

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import (
    build_network,
    drop,
    fill,
    randomise,
    read_arguments,
    read_tensors,
    rename,
)
from specbench.models.facts import TINY_GRID
from specbench.models.families import vq_decoder
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.llamagen import TINY_SIZES, TINY_VQ, converted, llama_config, stored_config
from specbench.models.hub_model import codes_in
from specbench.models.transformer.model import Prefix

CODE_GRID = (27, 27)  # Codes of an image, of the finest of the authors' three scales
_ENCODER = ("encoder.", "encode_task_layer.", "teacher", "scale_layer.", "bottleneck.in_linear.")
_UNUSED = (*_ENCODER, "bottleneck.regularizer.stochastic", "decoder.vision_model.head.")
_LEVELS = re.compile(r"^bottleneck\.(regularizer\.)?|(?<=^decoder\.)vision_model\.")
"""Parts of the authors' names, of older transformers, that are not levels here."""
_FEATURES = {"hidden_size": 1152, "num_hidden_layers": 3, "num_channels": 1536}
_TINY_FEATURES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_channels": 16}


class TarDetokenizer(FamilyModel):
    def __init__(
        self, request: LoadRequest, network: nn.Module, features: CodeFeatures, decoder: vq_decoder.ImageDecoder
    ):
        unused, ids = stand_in_tokenizer({}, first_byte=0), range(network.output.out_features)
        super().__init__(request, unused, network.model, network.output.weight, ids, decoder)
        network.model.rotary_emb = NoRotation(network.model.config.head_dim)
        self.features, self._projection, self._places = features, network.clip_proj, network.abs_pe[0]
        self._count = math.prod(TINY_GRID if request.info.choice.tiny else CODE_GRID)
        if request.found and len(self._places) < self._count + self.layout.length - 1:
            problem = f" has {len(self._places)} positions, too few for {self._count} codes"
            raise request.found[0].refusal(f"{problem} and {self.layout.length} image tokens")

    def encode(self, prompts: Sequence[str]) -> Prefix:
        written = [codes_in(text)[: self._count] for text in prompts]
        codes = torch.tensor([row + [0] * (self._count - len(row)) for row in written], device=self.device)
        features = self.features(codes).to(self.dtype)
        rows = [*features, *torch.zeros_like(features)]
        return Prefix([self._projection(row) + self._places[: self._count] for row in rows])

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        places = (self._count - 1 + positions).clamp(max=len(self._places) - 1)
        return super().embed(tokens, positions, state) + self._places[places]


class NoRotation(nn.Module):
    """Takes the place of a Llama's rotation by position, and turns nothing."""

    def __init__(self, head: int):
        super().__init__()
        self._head = head

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self._head)
        return x.new_ones(shape), x.new_zeros(shape)


class PositionedNetwork(nn.Module):
    """The network of `width` features, and the vectors of `positions`, those of the features first."""

    def __init__(self, config: LlamaConfig, width: int, positions: int):
        super().__init__()
        self.model = LlamaModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.clip_proj = nn.Linear(width, config.hidden_size)
        self.abs_pe = nn.Parameter(torch.empty(1, positions, config.hidden_size))


class CodeFeatures(nn.Module):
    """TA-Tok's decoder: codes [B, n] of a square grid to features [B, n, d].

    Args:
        words, width: rows and columns of the code table.
        normalise: whether its projected rows are l2-normalised.
    """

    def __init__(self, config: Siglip2VisionConfig, words: int, width: int, normalise: bool):
        super().__init__()
        size = config.hidden_size
        self.embedding, self.embedding_proj = nn.Embedding(words, width), nn.Linear(width, width)
        self.out_linear = nn.Linear(width, config.num_channels)
        decoder = Siglip2VisionModel(config)
        self.decoder = getattr(decoder, "vision_model", decoder)  # one level more in transformers 5.1
        self.decode_task_layer = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))
        self._normalise = normalise

    @property
    def codebook(self) -> Tensor:
        """[words, width] float32, as the decoder sees it."""
        projection = self.embedding_proj
        return self._normed(functional.linear(*(p.float() for p in (self.embedding.weight, *projection.parameters()))))

    def _normed(self, found: Tensor) -> Tensor:
        return functional.normalize(found, dim=-1) if self._normalise else found

    def forward(self, codes: Tensor) -> Tensor:
        sides = torch.full((len(codes), 2), math.isqrt(codes.shape[1]), device="cpu")  # read by the host
        latents = self.out_linear(self._normed(self.embedding_proj(self.embedding(codes))))
        seen = self.decoder(latents, None, sides).last_hidden_state
        return self.decode_task_layer(seen)


def load(request: LoadRequest) -> TarDetokenizer:
    if not request.found:
        settings = request.sized(_FEATURES, _TINY_FEATURES)
        config = llama_config(request.sized_network({}, TINY_SIZES), request.info.network.one_head)
        shape = settings["hidden_size"], math.prod(CODE_GRID) + request.info.stream - 1
        network = request.randomise(build_network(PositionedNetwork, config, *shape))
        shape = request.info.codes, settings["num_channels"]
        features = build_network(CodeFeatures, _vision_config(settings), *shape, False)
        randomise(features, request.device, request.dtype)
        vq = request.sized(vq_decoder.LLAMAGEN_VQ, TINY_VQ)
        decoder = vq_decoder.random_taming(vq, normalise=True, attention=True, device=request.device)
        return TarDetokenizer(request, network, features, decoder)
    files, image = request.found
    language, tokenizer = files.only("ar_dtok_*.pth"), files.only("ta_tok.pth")
    tensors, head = converted(request, language, "clip_proj.weight")
    if "abs_pe" not in tensors:
        raise language.refusal(" lacks 'abs_pe'")
    config, arguments = stored_config(tensors, language, head), read_arguments(language)
    config.rms_norm_eps = arguments.get("norm_eps", config.rms_norm_eps)
    heads = config.num_attention_heads
    if any(arguments.get(name) not in (None, heads) for name in ("n_head", "n_kv_head")):
        raise language.refusal(f" says of itself n_head = {arguments.get('n_head')}; its size has {heads} heads")
    sizes = tensors["clip_proj.weight"].shape[1], tensors["abs_pe"].shape[1]
    network = request.fill(build_network(PositionedNetwork, config, *sizes, found=language), tensors, language)
    decoder = vq_decoder.load_llamagen_vq(read_tensors(image), image, request.device)
    return TarDetokenizer(request, network, _stored_features(tokenizer, request), decoder)


def _stored_features(found: CheckpointFiles, request: LoadRequest) -> CodeFeatures:
    """TA-Tok's decoder; that codes are normalised is told by the file's arguments alone."""
    tensors = rename(drop(read_tensors(found), _UNUSED), lambda name: _LEVELS.sub("", name))
    path = found.paths[0]
    with found.source.blaming(path):
        normalise = read_arguments(found)["bottleneck"]["args"]["regularizer"]["args"].get("l2_normalized", False)
        layers = {name.split(".")[3] for name in tensors if name.startswith("decoder.encoder.layers.")}
        size, channels = tensors["decoder.embeddings.patch_embedding.weight"].shape
        settings = {"hidden_size": size, "num_channels": channels, "num_hidden_layers": len(layers)}
        settings["intermediate_size"] = len(tensors["decoder.encoder.layers.0.mlp.fc1.weight"])
        settings["num_patches"] = len(tensors["decoder.embeddings.position_embedding.weight"])
        shape = tensors["embedding.weight"].shape
    features = build_network(CodeFeatures, _vision_config(settings), *shape, normalise, found=found)
    return fill(features, tensors, found, request.device, request.dtype)


def _vision_config(settings: Mapping[str, int]) -> Siglip2VisionConfig:
    return Siglip2VisionConfig(**settings, patch_size=1, vision_use_head=False)
