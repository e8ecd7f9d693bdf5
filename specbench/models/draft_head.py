"""EAGLE-1's draft head (Li et al., ICML 2024, arXiv 2401.15077): one layer that extrapolates a target's features.

A feature f_t is the target's last hidden state, the input of its output matrix. Element t combines f_t with the token
after it, and the layer's output predicts the next feature:

    input_t = W [e(x_{t+1}); f_t] + b        f^_{t+1} = layer(input_1 .. input_t)        logits = target.head(f^_{t+1})

Checkpoints have the layout of the public heads: `config.json`, and `model.safetensors` or `pytorch_model.bin` with
`embed_tokens.weight`, `fc.{weight,bias}` and `layers.0.*`, without the target's output matrix.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.chameleon.configuration_chameleon import ChameleonConfig
from transformers.models.chameleon.modeling_chameleon import ChameleonDecoderLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import MAX_JSON_BYTES, CheckpointFiles
from specbench.models.checkpoint_loading import renew_rotary
from specbench.models.draft_head_files import NO_HEAD, HeadFiles, no_head, published_head, wrong_width
from specbench.models.interface import DraftHeadModel, DraftPrompt, ImageModel, TappedModel
from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.llama_layer import rotary_of, run_layer, runs_directly
from specbench.system.files import blaming, read_regular
from specbench.system.json_values import parse_json


class EagleHead(LlamaModel):
    """A one-layer Llama without final norm that takes features as input. `input_norm`: whether the layer normalises its
    input (Chameleon's heads do, LlamaGen's do not); `query_norm`: whether queries and keys are normalised per head, as
    Chameleon does; `published_as`: the `input_type` of LlamaGen's published heads, empty for all others."""

    published_as = ""
    taps: tuple[int, ...] = ()  # the head also reads the target's hidden states after these numbers of layers

    def __init__(self, config: LlamaConfig, input_norm: bool = False, query_norm: bool = False):
        super().__init__(config)
        if query_norm:
            self.layers[0] = _QueryNormed(ChameleonConfig(**_shared(config)), 0)
        if not input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        self.norm = nn.Identity()
        self.width = config.hidden_size
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.embed_tokens.requires_grad_(False)

    def seen_prompt(self, prompt: DraftPrompt) -> DraftPrompt:
        """Return the prompt in the form that the head was trained on."""
        return prompt

    def fused(self, features: Tensor) -> Tensor:
        """Convert the target's features to the head's features [..., d]."""
        return features

    def read(self, features: Tensor) -> Tensor:
        """Convert the head's features [..., d] to the input of the target's output matrix."""
        return features

    def extrapolate(
        self,
        ids: Tensor,
        features: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PositionCache | None = None,
    ) -> Tensor:
        """Predict the next features [R, T, d] from table ids of tokens [R, T] and the features [R, T, d] before them.
        Without mask and `rotary`, the elements are a causal sequence from position 0. The layer is called directly,
        because the rest of `LlamaModel.forward` takes a quarter of a small layer's time."""
        inputs = self.fc(torch.cat([self.embed_tokens(ids), features], dim=-1))
        if rotary is None:
            rotary = self.rotary(torch.arange(ids.shape[1], device=ids.device)[None])
        if past_key_values is not None and runs_directly(self.layers[0], inputs, attention_mask):
            return run_layer(self.layers[0], inputs, attention_mask, rotary, past_key_values)
        cosine, sine = rotary
        return self.layers[0](
            inputs,
            attention_mask=attention_mask,
            position_embeddings=(cosine[:, 0], sine[:, 0]),
            past_key_values=past_key_values,
        )

    def rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, 1, T, d'] of positions [R, T]."""
        return rotary_of(self.rotary_emb, self.fc.weight, position_ids)


class Eagle3Head(EagleHead):
    """EAGLE-1's head trained like EAGLE-3's (Li et al., NeurIPS 2025, arXiv 2503.01840): it reads hidden states of
    several layers, and is trained on its own outputs, which need not resemble the target's features. It keeps the
    target's output matrix."""

    def __init__(self, config: LlamaConfig, taps: tuple[int, ...]):
        super().__init__(config, input_norm=True)
        width = config.hidden_size
        self.taps = taps
        self.fuse = nn.Linear((1 + len(taps)) * width, width, bias=False)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)

    def fused(self, features: Tensor) -> Tensor:
        return self.fuse(features)

    def read(self, features: Tensor) -> Tensor:
        return self.norm(features)


class JanusHead(EagleHead):
    """The head that CASCADE's authors publish for Janus-Pro-7B, as implied by their loading code (selinyldrm/
    Deepseek-JanusPro-EAGLE, commit 09cf7d2): a Janus-Pro with one layer after a joint projection and SiLU. The
    normalised state is fed back. The head embeds image tokens only. Here it attends to all tokens of the image, as in
    training; in the authors' decoding it attends to the newest token only."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, input_norm=True)
        self.fc = _SiluLinear(2 * config.hidden_size, config.hidden_size)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def seen_prompt(self, prompt: DraftPrompt) -> DraftPrompt:
        return DraftPrompt(torch.ones_like(prompt.lengths), None, None)

    def extrapolate(self, *inputs: Any, **cached: Any) -> Tensor:
        return self.norm(super().extrapolate(*inputs, **cached))


class _SiluLinear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(inputs))


_NOT_READ = ("vision_model.", "aligner.", "gen_vision_model.", "gen_head.", "language_model.lm_head.")
"""Parts of a published Janus head that belong to the target."""


def _of_janus(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of the published layout to a `JanusHead`'s, with EAGLE-1's names."""
    named = {name.removeprefix("language_model.model."): tensor for name, tensor in tensors.items()}
    fusion, codes = named.pop("fusion.weight"), named.pop("gen_embed.weight")
    named["fc.weight"], named["fc.bias"] = torch.cat(fusion.chunk(2, 1)[::-1], 1), named.pop("fusion.bias")
    layers = sorted({name.rpartition(".")[0] for name in named if name.startswith("gen_aligner.")})
    for layer in layers:
        codes = codes if layer == layers[0] else nn.functional.gelu(codes)
        codes = nn.functional.linear(codes, named.pop(f"{layer}.weight"), named.pop(f"{layer}.bias"))
    return named | {"embed_tokens.weight": torch.cat([named["embed_tokens.weight"], codes])}


class _QueryNormed(ChameleonDecoderLayer):
    """Chameleon's layer, but it returns a tensor like Llama's layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)[0]


def _shared(config: LlamaConfig) -> dict[str, Any]:
    names = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads rms_norm_eps "
        "max_position_embeddings vocab_size"
    )
    return {name: getattr(config, name) for name in names.split()} | {"attn_implementation": "sdpa"}


def new_head(
    config: LlamaConfig, embedding: Tensor, seed: int, taps: tuple[int, ...] | None = None
) -> EagleHead | Eagle3Head:
    """Create an untrained head with the frozen token table `embedding` [V, d]; with `taps`, an EAGLE-3 head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config) if taps is None else Eagle3Head(config, taps)
    head.embed_tokens.weight.data.copy_(embedding)
    return head


Head = TypeVar("Head", bound=nn.Module)
_LATEST: WeakKeyDictionary[ImageModel, dict[str, tuple[object, Any]]] = WeakKeyDictionary()
"""For each model and kind of head: the head used last, and where it was loaded from."""


def head_for(model: ImageModel, path: str) -> EagleHead:
    """Load the head `path` (a folder or hub id; if empty, the published head, else the model's); see `ready_head`."""
    return ready_head(model, path or published_head(model.name), DraftHeadModel, "own_head", load_head)


def eagle3_head_for(model: ImageModel, path: str) -> Eagle3Head:
    return ready_head(model, path, TappedModel, "own_eagle3_head", partial(load_head, tapped=True))


def ready_head(model: Any, path: str, able: Any, own: str, load: Callable[[CheckpointFiles], Head]) -> Head:
    """Return a head ready to draft for `model`: `load` reads it from `path`. If `path` is empty, the model's method
    `own`, which the type `able` has, returns it. The latest head is cached until its files, device or dtype change."""
    if not isinstance(model, able):
        what = f"model '{model.name}' cannot be used with a draft head"
        raise SpecbenchError(what, "choose a decoder without a draft head")
    files = HeadFiles(path, model.name).find(download=True) if path else None
    states = [(file.resolve(), file.stat()) for file in files.paths] if files else []
    source = [(file, state.st_size, state.st_mtime_ns) for file, state in states], model.device, model.dtype
    kept = _LATEST.setdefault(model, {})
    if own not in kept or kept[own][0] != source:
        head: Any = load(files) if files else getattr(model, own)()
        if head is None:
            kind = own.removeprefix("own_").removesuffix("head").strip("_")
            raise no_head(model.name, bool(model.weights_sha256), kind)
        if head.width != model.feature_size:
            raise wrong_width(path, head.width, model.name, model.feature_size)
        head = _adopted(head, model, path) if isinstance(head, EagleHead) else head
        kept[own] = source, head.to(model.device, model.dtype).eval().requires_grad_(False)
    return kept[own][1]


def _adopted(head: EagleHead, model: Any, path: str) -> EagleHead:
    """Check that `head` has embeddings of all the model's tokens, and let the model adapt it."""
    largest = int(model.table_ids(torch.arange(model.layout.vocab, device=model.device)).max())
    if largest >= head.embed_tokens.num_embeddings:
        what = f"--head {path}: its ids end below {head.embed_tokens.num_embeddings}, '{model.name}' has id {largest}"
        raise SpecbenchError(what, "check that the head was trained for this model")
    return model.adopt_head(head)


def load_head(files: CheckpointFiles, tapped: bool = False) -> EagleHead:
    """Load the head in these files, in float32. `tapped`: whether it is an EAGLE-3 head."""
    config_file, weights = files.paths
    with blaming(weights, *NO_HEAD):
        safe = weights.suffix == ".safetensors"
        read = load_file if safe else partial(torch.load, map_location="cpu", weights_only=True)
        tensors = {
            name.removeprefix("model."): tensor.float()
            for name, tensor in read(weights).items()
            if not name.startswith(_NOT_READ)
        }
        janus = "fusion.weight" in tensors
        tensors = _of_janus(tensors) if janus else tensors
    with blaming(config_file, *NO_HEAD):
        stored: Any = parse_json(read_regular(config_file, MAX_JSON_BYTES))
        sizes = stored["language_config"] if janus else stored
        settings = {name: sizes[name] for name in LlamaConfig().to_dict() if name in sizes}
        settings |= {"vocab_size": len(tensors["embed_tokens.weight"])} if janus else {}
        settings |= {"num_hidden_layers": 1, "model_type": "llama", "pad_token_id": None}
        config = LlamaConfig(**settings, attn_implementation="sdpa")
        _spread_norms(tensors, config)
        with torch.device("meta"):  # no memory yet: the sizes in the file may be wrong
            if janus:
                head = JanusHead(config)
            elif tapped:
                taps = tuple(stored.get("taps") or ())
                if not taps or any(type(tap) is not int for tap in taps):
                    raise ValueError("the layer numbers `taps` of an EAGLE-3 head are missing")
                head = Eagle3Head(config, taps)
            else:
                norms = ("input_layernorm", "self_attn.q_norm")
                head = EagleHead(config, *(f"layers.0.{norm}.weight" in tensors for norm in norms))
        expected = head.state_dict()
        odd = sorted(expected.keys() ^ tensors.keys())
        odd += sorted(n for n in expected.keys() & tensors.keys() if expected[n].shape != tensors[n].shape)
        if odd:
            raise SpecbenchError(f"{weights}: not an EAGLE-{3 if tapped else 1} head, see its tensor {odd[0]}")
        head.load_state_dict(tensors, assign=True)
        renew_rotary(head)
        head.published_as = str(stored.get("input_type", ""))
    return head


def _spread_norms(tensors: dict[str, Tensor], config: LlamaConfig) -> None:
    """Repeat query and key norms that are stored once for all attention heads; norms stored per head do not change."""
    largest = max((len(tensor) for tensor in tensors.values() if tensor.dim()), default=0)
    for name, count in (("q_norm", config.num_attention_heads), ("k_norm", config.num_key_value_heads)):
        for norm in (f"layers.0.self_attn.{name}.{part}" for part in ("weight", "bias")):
            if norm in tensors and count <= largest:
                tensors[norm] = tensors[norm].repeat_interleave(max(count // len(tensors[norm]), 1), dim=0)


def save_head(head: EagleHead, folder: Path, extra: Mapping[str, object]) -> None:
    """Write `head` as float16 safetensors; `extra` entries go into config.json."""
    kept = (*_shared(head.config).keys() - {"attn_implementation"}, "head_dim", "rope_parameters")
    config = {name: getattr(head.config, name) for name in sorted(kept)} | {"num_hidden_layers": 1, **extra}
    config |= {"taps": list(head.taps)} if head.taps else {}
    write_head(head, folder, config)


def write_head(head: nn.Module, folder: Path, config: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
