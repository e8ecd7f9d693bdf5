"""Tar 1.5B and 7B: transformers' `Qwen2ForCausalLM` whose vocabulary ends with TA-Tok's 65536 codes. The codes are the
prompt of a second language model, the de-tokenizer, which draws the picture.
The official script lets the first stage write text and an end between codes, drops them and pads with code 0; here only
codes can be sampled. Its `generate` applies the repetition penalty of `generation_config.json` in addition to the
script's temperature, top-k and top-p, so the penalty is part of the target. There is no guidance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2ForCausalLM, Siglip2VisionConfig, Siglip2VisionModel

from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.facts import TINY_GRID
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.llamagen import converted, random_config
from specbench.models.families.simplear import QWEN, TINY_QWEN, SimpleAR, load_qwen
from specbench.models.families.vq_decoder import ImageDecoder
from specbench.models.hub_model import codes_in
from specbench.models.transformer.compilation import CompiledForms
from specbench.models.transformer.model import Prefix
from specbench.specs.run_spec import Sampling

TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
_FIRST_CODE = 151_670
_SPECIALS = {TURN: 151_644, END_OF_TURN: 151_645, "<im_start>": 151_665, "<S0>": 151_667}
_SYSTEM = f"{TURN}system\nYou are a helpful assistant.{END_OF_TURN}\n"
CODE_GRID = (27, 27)  # Codes of an image at the finest of the authors' three scales
_ENCODER = ("encoder.", "encode_task_layer.", "teacher", "scale_layer.", "bottleneck.in_linear.")
_UNUSED = (*_ENCODER, "bottleneck.regularizer.stochastic", "decoder.vision_model.head.")
_LEVELS = re.compile(r"^bottleneck\.(regularizer\.)?|(?<=^decoder\.)vision_model\.")
"""Parts of names in the authors' older transformers that are not modules in the installed version."""
_FEATURES = {"hidden_size": 1152, "num_hidden_layers": 3, "num_channels": 1536}
_TINY_FEATURES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_channels": 16}


class Tar(SimpleAR):
    marks = TURN, END_OF_TURN, "<im_start>", "<S0>"
    draws = False
    # see `specbench.models.interface.StagedModel`
    second: TarDetokenizer
    second_sampling: Sampling

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        user = f"{TURN}user\n{text}{END_OF_TURN}\n{TURN}assistant\n"
        ids = self.words(f"{_SYSTEM}{user}<im_start><S0>")
        return ids, ids

    def second_text(self, text: str, tokens: Sequence[int]) -> str:
        """Append the codes to the prompt. As in the official script, codes in `text` count as codes of the image."""
        return text + "".join(f"<I{code}>" for code in tokens)

    def compile(self) -> None:
        super().compile()
        self.second.compile()

    @property
    def compiled(self) -> list[CompiledForms]:
        return [*super().compiled, *self.second.compiled]


def load(request: LoadRequest) -> Tar:
    if request.files:
        files = request.files[0]
        network, penalty = load_qwen(request, files, "model.vision_tower.")
        tokenizer = stored.read_tokenizer(files)
        first = stored.token_id(tokenizer, "<I0>")
    else:
        tied = {"tie_word_embeddings": not request.info.network.head_rows}
        config = Qwen2Config(**request.sized_network(QWEN | tied, TINY_QWEN))
        network, penalty = request.randomise(stored.build_network(Qwen2ForCausalLM, config)), 1.0
        tokenizer, first = stand_in_tokenizer(_SPECIALS, first_byte=0), _FIRST_CODE
    second = load_detokenizer(replace(request, info=request.info.second[0], files=request.files[1:]))
    codes = len(second.features.embedding.weight)
    if request.files and tokenizer.token_to_id(f"<I{codes - 1}>") != first + codes - 1:
        raise request.files[0].refusal(f" has no tokens <I0> to <I{codes - 1}> in this order")
    model = Tar.of_words(request, tokenizer, network, range(first, first + codes), second.features)
    model.second, model.second_sampling = second, request.info.second[0].defaults
    model.repetition_penalty = penalty
    return model


class TarDetokenizer(FamilyModel):
    """The second stage: a Llama with absolute positions instead of rotation. It writes tokens of LlamaGen's image
    decoder, given the features of the codes that the language model has written.

    A prompt is the text of these codes as the authors' code writes them ("<I5><I17>..."); missing codes are code 0.
    The features of unconditional rows are zero. The official code runs completely in bfloat16; here the image decoder
    is float32.
    """

    def __init__(self, request: LoadRequest, network: nn.Module, features: CodeFeatures, decoder: ImageDecoder):
        unused, ids = stand_in_tokenizer({}, first_byte=0), range(network.output.out_features)
        super().__init__(request, unused, network.model, network.output.weight, ids, decoder)
        network.model.rotary_emb = NoRotation(network.model.config.head_dim)
        self.features, self._projection, self._places = features, network.clip_proj, network.abs_pe[0]
        self._count = math.prod(TINY_GRID if request.info.choice.tiny else CODE_GRID)
        if request.files and len(self._places) < self._count + self.layout.length - 1:
            problem = f" has {len(self._places)} positions, too few for {self._count} codes"
            raise request.files[0].refusal(f"{problem} and {self.layout.length} image tokens")

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
    """Replacement of a Llama's rotary embedding that rotates nothing."""

    def __init__(self, head: int):
        super().__init__()
        self._head = head

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self._head)
        return x.new_ones(shape), x.new_zeros(shape)


class PositionedNetwork(nn.Module):
    """The network with a projection of `width` features, and a vector per position, first of the features."""

    def __init__(self, config: LlamaConfig, width: int, positions: int):
        super().__init__()
        self.model = LlamaModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.clip_proj = nn.Linear(width, config.hidden_size)
        self.abs_pe = nn.Parameter(torch.empty(1, positions, config.hidden_size))


class CodeFeatures(nn.Module):
    """TA-Tok's decoder: codes [B, n] of a square grid to features [B, n, d]. `words`, `width`: rows and columns of the
    code table; `normalise`: whether its projected rows are l2-normalised."""

    def __init__(self, config: Siglip2VisionConfig, words: int, width: int, normalise: bool):
        super().__init__()
        size = config.hidden_size
        self.embedding, self.embedding_proj = nn.Embedding(words, width), nn.Linear(width, width)
        self.out_linear = nn.Linear(width, config.num_channels)
        decoder = Siglip2VisionModel(config)
        self.decoder = getattr(decoder, "vision_model", decoder)  # nested one level deeper in transformers 5.1
        self.decode_task_layer = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))
        self._normalise = normalise

    @property
    def codebook(self) -> Tensor:
        """[words, width] float32, as the decoder reads it."""
        projection = self.embedding_proj
        return self._normed(functional.linear(*(p.float() for p in (self.embedding.weight, *projection.parameters()))))

    def _normed(self, rows: Tensor) -> Tensor:
        return functional.normalize(rows, dim=-1) if self._normalise else rows

    def forward(self, codes: Tensor) -> Tensor:
        sides = torch.full((len(codes), 2), math.isqrt(codes.shape[1]), device="cpu")  # the host reads these sizes
        latents = self.out_linear(self._normed(self.embedding_proj(self.embedding(codes))))
        return self.decode_task_layer(self.decoder(latents, None, sides).last_hidden_state)


def load_detokenizer(request: LoadRequest) -> TarDetokenizer:
    if not request.files:
        settings = request.sized(_FEATURES, _TINY_FEATURES)
        shape = settings["hidden_size"], math.prod(CODE_GRID) + request.info.stream - 1
        network = request.randomise(stored.build_network(PositionedNetwork, random_config(request), *shape))
        shape = request.info.codes, settings["num_channels"]
        features = stored.build_network(CodeFeatures, _vision_config(settings), *shape, False)
        stored.randomise(features, request.device, request.dtype)
        return TarDetokenizer(request, network, features, request.llamagen_vq(None))
    files, image = request.files
    language, tokenizer = files.only("ar_dtok_*.pth"), files.only("ta_tok.pth")
    tensors, config = converted(request, language, "clip_proj.weight")
    if "abs_pe" not in tensors:
        raise language.refusal(" lacks 'abs_pe'")
    arguments = stored.read_arguments(language)
    config.rms_norm_eps = arguments.get("norm_eps", config.rms_norm_eps)
    heads = config.num_attention_heads
    if any(arguments.get(name) not in (None, heads) for name in ("n_head", "n_kv_head")):
        raise language.refusal(f" states n_head = {arguments.get('n_head')}, but this size has {heads} heads")
    sizes = tensors["clip_proj.weight"].shape[1], tensors["abs_pe"].shape[1]
    network = request.fill(stored.build_network(PositionedNetwork, config, *sizes, files=language), tensors, language)
    decoder = request.llamagen_vq(image)
    return TarDetokenizer(request, network, _stored_features(tokenizer, request), decoder)


def _stored_features(files: CheckpointFiles, request: LoadRequest) -> CodeFeatures:
    """Load TA-Tok's decoder; only the arguments in the file define whether codes are normalised."""
    tensors = stored.rename(stored.drop(stored.read_tensors(files), _UNUSED), lambda name: _LEVELS.sub("", name))
    path = files.paths[0]
    with files.source.blaming(path):
        regularizer = stored.read_arguments(files)["bottleneck"]["args"]["regularizer"]["args"]
        normalise = regularizer.get("l2_normalized", False)
        layers = {name.split(".")[3] for name in tensors if name.startswith("decoder.encoder.layers.")}
        size, channels = tensors["decoder.embeddings.patch_embedding.weight"].shape
        settings = {"hidden_size": size, "num_channels": channels, "num_hidden_layers": len(layers)}
        settings["intermediate_size"] = len(tensors["decoder.encoder.layers.0.mlp.fc1.weight"])
        settings["num_patches"] = len(tensors["decoder.embeddings.position_embedding.weight"])
        shape = tensors["embedding.weight"].shape
    features = stored.build_network(CodeFeatures, _vision_config(settings), *shape, normalise, files=files)
    return stored.fill(features, tensors, files, request.device, request.dtype)


def _vision_config(settings: Mapping[str, int]) -> Siglip2VisionConfig:
    return Siglip2VisionConfig(**settings, patch_size=1, vision_use_head=False)
