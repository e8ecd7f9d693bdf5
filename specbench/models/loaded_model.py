"""A causal language model of transformers that a user has loaded: its own modules, fed through the position-addressed
KV cache.

The network gets ids, positions and masks in the form that it takes itself, and its head is applied by its own forward,
so that scalings, biases and soft caps hold without a list of architectures. `specbench.models.forward_probe` compares
the result with the network's own forward.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import masking_utils

from specbench.errors import SpecbenchError
from specbench.models.forward_probe import Probe, own_forward, probe, refusing
from specbench.models.interface import TokenLayout
from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.model import Prefix, TransformerModel, TransformerSession
from specbench.system.matrix_products import product
from specbench.system.torch_state import PinnedTorch

PromptIds = Callable[[str], tuple[Sequence[int], Sequence[int]]]
"""Vocabulary ids of a text's prompt up to the first image token, and those of the unconditional prompt."""


class LoadedModel(TransformerModel):
    """A causal language model of transformers whose image tokens are words of its vocabulary.

    Args:
        network: with `get_output_embeddings()`; it may be compiled, quantised or wrapped by PEFT, and is not changed.
        layout: of the image tokens, or height and width of a plain grid.
        image_ids: vocabulary id of each image token, of which there are `layout.v_image`.
        forced_ids: vocabulary ids of the tokens that the layout forces, in the order of their stream ids.
        prompt_ids: see `PromptIds`.
        codebook: [v_image, d] embedding of each image token, for decoders that need distances between tokens.
        render: draws image tokens [B, free slots] as uint8 [B, 3, H, W]; without it there are no pictures.
    """

    weights_sha256 = ""
    branches: SpecbenchError | None = None  # why draft trees are refused

    def __init__(
        self,
        network: nn.Module,
        layout: TokenLayout | tuple[int, int],
        image_ids: Sequence[int],
        prompt_ids: PromptIds,
        forced_ids: Sequence[int] = (),
        codebook: Tensor | None = None,
        render: Callable[[Tensor], Tensor] | None = None,
    ):
        self.layout = layout if isinstance(layout, TokenLayout) else TokenLayout.plain(*layout, len(image_ids))
        if self.layout.vocab != len(image_ids) + len(forced_ids):
            what = f"{len(image_ids)} image ids and {len(forced_ids)} forced ids for a layout of {self.layout.vocab}"
            raise SpecbenchError(what, "one vocabulary id for each id of the layout")
        self.network = network
        inner = unwrapped(network)
        self.name = type(inner).__name__
        with refusing(self.name), PinnedTorch():
            self.backbone = Backbone(inner)
            self._stream_ids = torch.tensor([*image_ids, *forced_ids], device=self.device)
            after = _after_base(inner, {})
            sample = torch.randn(1, 3, self.feature_size, generator=torch.Generator().manual_seed(0))
            sample = sample.to(self.device, self.dtype)
            words = min(after(sample).shape[-1], inner.get_input_embeddings().num_embeddings)
        if len(image_ids) == 0 or not all(0 <= number < words for number in (*image_ids, *forced_ids)):
            raise SpecbenchError(f"image_ids and forced_ids must be of the {words} words of {self.name}")
        if len(set(image_ids)) < len(image_ids):
            raise SpecbenchError("image_ids names a word twice", "one vocabulary id for each image token")
        self._image_ids = self._stream_ids[: len(image_ids)]
        with refusing(self.name), PinnedTorch():
            self._head = own_head(inner, after, self._image_ids, sample)
        self.codebook = None if codebook is None else codebook.detach().float().to(self.device)
        self._ids_of, self._draw = prompt_ids, render

    @property
    def device(self) -> torch.device:
        """Where the network takes its inputs; accelerate keeps the weights of an offloaded network elsewhere."""
        placed = (getattr(part, "_hf_hook", None) for part in self.backbone.modules())
        devices = (getattr(hook, "execution_device", None) for hook in placed)
        return torch.device(next((device for device in devices if device is not None), super().device))

    @property
    def draws(self) -> bool:
        return self._draw is not None

    def problem(self, tokens: object) -> None:
        """Any tokens can be drawn."""

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        return _Session(self, prefix, guidance, columns)

    def encode(self, prompts: Sequence[str]) -> Prefix:
        """Prompts whose elements are ids [P, 1]: the network embeds them itself."""
        pairs = [self._ids_of(text) for text in prompts]
        rows = [list(conditional) for conditional, _ in pairs] + [list(other) for _, other in pairs]
        if not all(rows):
            raise SpecbenchError("prompt_ids returned a prompt without ids", "return at least one id, such as <s>")
        elements = [torch.tensor(row, device=self.device) for row in rows]
        ids = nn.utils.rnn.pad_sequence(elements, batch_first=True)
        return Prefix([row[:, None] for row in elements], ids=ids)

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self._stream_ids[tokens][..., None]

    def table_ids(self, tokens: Tensor) -> Tensor:
        return self._stream_ids[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    def output_matrix(self) -> tuple[Tensor, None]:
        if self._head.matrix is None:
            raise SpecbenchError(f"{self.name} has no plain output matrix to reduce", "choose eagle or vertical")
        return self._head.matrix, None

    def own_logits(self, prompt: Prefix, tokens: Tensor) -> Tensor:
        """See `TransformerModel.own_logits`; of a network whose forward hides the image tokens, by its head on the last
        hidden states of its base model's forward."""
        ids, first = torch.cat([prompt.embeds[0][:, 0], self._stream_ids[tokens]])[None], len(prompt.embeds[0]) - 1
        if self._head.masked:
            return self.head(self.backbone.base(input_ids=ids)[0])[0, first:]
        logits = _logits(self.network, ids)
        if logits.shape[:-1] != ids.shape:
            what = f"{self.name} returns logits {list(logits.shape)} for {ids.shape[1]} tokens"
            raise SpecbenchError(what, "specbench.decode needs the logits of one word after every token")
        return logits[0, first:, self._image_ids]

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return self._draw(image_tokens)


class _Session(TransformerSession):
    def _step(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor | None, *more: Any) -> Tensor:
        if mask is not None and self._model.branches is not None:
            raise self._model.branches
        return super()._step(tokens, positions, slots, mask, *more)


def unwrapped(network: nn.Module) -> Any:
    """The network inside `torch.compile` and PEFT, whose adapters are modules of it."""
    network = getattr(network, "_orig_mod", network)
    inside = getattr(network, "get_base_model", None)
    return network if inside is None else inside()


class Backbone(nn.Module):
    """The network below its head, called as `TransformerSession` calls a backbone, with ids [R, T, 1] as embeddings."""

    def __init__(self, network: Any):
        super().__init__()
        self.base = base_of(network)
        self.config = network.config.get_text_config(decoder=True)
        self._numbered = _accepted(self.base, position_ids=None, use_cache=None)

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: PositionCache,
        use_cache: bool,
    ) -> BackboneOutput:
        options = {"position_ids": position_ids, "use_cache": use_cache}
        with slot_masks(position_ids, attention_mask, past_key_values):
            output = self.base(
                input_ids=inputs_embeds[..., 0],
                past_key_values=past_key_values,
                **{name: options[name] for name in self._numbered},
            )
        return BackboneOutput(output[0])


def base_of(network: Any) -> nn.Module:
    """The network below its head."""
    base = next(
        (base for base in (network.base_model, getattr(network, "model", network)) if base is not network), None
    )
    if base is None:
        raise TypeError("it has no base model below its head")
    return base


class BackboneOutput(NamedTuple):
    last_hidden_state: Tensor  # [R, T, d]


def _accepted(function: nn.Module, **options: Any) -> dict[str, Any]:
    """Those of `options` that a network's forward takes."""
    parameters = inspect.signature(function.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if anything or name in parameters}


_MASKS = threading.Lock()


@contextmanager
def slot_masks(position_ids: Tensor, visible: Tensor | None, cache: PositionCache) -> Iterator[None]:
    """Let the network's masks be computed at the positions that the cache's slots hold.

    The network says by position what attends to what (causal, a sliding window, chunks), and its attention in which
    form it takes a mask; which slots hold anything is known here. `visible`: [R, 1, T, S] bool, None for all slots.
    """
    read, slots = cache.placement.visible, cache.placement.slots
    held = torch.arange(read, device=slots.device).repeat(len(slots), 1).scatter(1, slots, position_ids)

    def by_position(make: Callable[..., Any]) -> Callable[..., Any]:
        def mask(mask_function: Callable[..., Tensor], **arguments: Any) -> Any:
            rows = torch.arange(len(slots), device=slots.device)[:, None, None, None]
            pattern = mask_function(rows, torch.zeros_like(rows), position_ids[:, None, :, None], held[:, None, None])
            allowed = (pattern if visible is None else pattern & visible).expand(len(slots), 1, -1, read)[:, 0]
            columns = {"q_offset": 0} if "q_length" in arguments else {"cache_position": held[0, : slots.shape[1]]}
            arguments |= columns | {"kv_offset": 0, "allow_is_causal_skip": False, "attention_mask": None}
            return make(mask_function=lambda row, head, column, slot: allowed[row, column, slot], **arguments)

        return mask

    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    with _MASKS:
        before = dict(functions._local_mapping)
        functions._local_mapping.update({name: by_position(make) for name, make in functions.items()})
        try:
            yield
        finally:
            functions._local_mapping.clear()
            functions._local_mapping.update(before)


class OwnHead(NamedTuple):
    """A network's head on its image tokens alone."""

    logits: Callable[[Tensor], Tensor]  # [R, T, v_image] of hidden states [R, T, d]
    matrix: Tensor | None  # [v_image, d], if the head is the product with it
    masked: bool  # whether the network's own forward hides the image tokens


class _Hidden(nn.Module):
    """A base model that returns given hidden states."""

    def __init__(self, base: nn.Module):
        super().__init__()
        vars(self).update(base=base, hidden=None)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["base"], name)
        return self if isinstance(value, nn.Module) else value  # some networks call `model.decoder(...)`

    def forward(self, *arguments: Any, **options: Any) -> _Outputs:
        return _Outputs([vars(self)["hidden"]])


class _Outputs(tuple):
    """Hidden states as a base model returns them; every other field is None."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


def own_head(network: Any, after: Callable[[Tensor], Tensor], image_ids: Tensor, sample: Tensor) -> OwnHead:
    """The head on as few words as give the same logits [1, T, V] of hidden states `sample` as all of them, `after`."""
    expected = after(sample)[..., image_ids]
    rounding = 32 * torch.finfo(network.dtype).eps
    masked = bool((expected <= torch.finfo(expected.dtype).min / 2).all())
    output = network.get_output_embeddings()
    if masked:
        return OwnHead(lambda hidden: output(hidden)[..., image_ids], None, True)
    weight, bias = getattr(output, "weight", None), getattr(output, "bias", None)
    if type(output) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta:
        matrix = weight[image_ids]
        if torch.allclose(product(sample, matrix), expected, rounding, rounding):
            return OwnHead(lambda hidden: product(hidden, matrix), matrix, False)
        few = nn.Linear(matrix.shape[1], len(matrix), bias is not None, device="meta")
        few.weight = nn.Parameter(matrix, requires_grad=False)
        if bias is not None:
            few.bias = nn.Parameter(bias[image_ids], requires_grad=False)
        logits = _after_base(network, {output: few})
        with suppress(Exception):  # what follows the product may know the size of the vocabulary
            if torch.allclose(logits(sample), expected, rounding, rounding):
                return OwnHead(logits, None, False)
    return OwnHead(lambda hidden: after(hidden)[..., image_ids], None, False)


def _after_base(network: Any, replaced: dict[nn.Module, nn.Module]) -> Callable[[Tensor], Tensor]:
    """Logits of hidden states [R, T, d] by the network's forward, with some of its modules replaced."""
    base = base_of(network)
    given = _Hidden(base)
    twin = _with_modules(network, {**replaced, base: given})

    def logits(hidden: Tensor) -> Tensor:
        vars(given)["hidden"] = hidden
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return _logits(twin, ids)

    return logits


def _logits(network: nn.Module, ids: Tensor) -> Tensor:
    """Logits [R, T, words] by a forward of ids [R, T] without cache."""
    output = network(input_ids=ids, **_accepted(network, use_cache=False))
    return output.logits if hasattr(output, "logits") else output[0]


def _with_modules(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy that shares parameters and all modules but those of `replaced`, and those that contain them."""
    if module in replaced:
        return replaced[module]
    children = {name: child and _with_modules(child, replaced) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__ = dict(vars(module), _modules=children, _compiled_call_impl=None)
    if "forward" in vars(twin):  # set on the instance, by a library that patches or places networks
        patched = vars(twin).pop("forward")
        if isinstance(patched, MethodType):
            twin.forward = MethodType(patched.__func__, twin)
    return twin


_ANY_MASK = ("sdpa", "eager")  # Attention implementations of transformers that take any mask without compilation
_PROBED: WeakKeyDictionary[nn.Module, dict[object, tuple[str, Probe]]] = WeakKeyDictionary()


@contextmanager
def decoding(model: LoadedModel, text: str, guided: bool, check: bool) -> Iterator[Probe | None]:
    """Set the network to eval mode, and to an attention implementation with which decoding steps give what its own
    forward gives; both are as before afterwards. Yields the comparison, which is made once for a network and a kind of
    stream; None without `check`."""
    network = unwrapped(model.network)
    own = network.config._attn_implementation
    with _evaluating(network):
        chosen, result = own if own in _ANY_MASK else _ANY_MASK[0], None
        if check:
            key = model.layout, tuple(model._stream_ids.tolist()), guided, own, model.device, model.dtype
            known = _PROBED.setdefault(network, {})
            if key not in known:
                known[key] = _first_equal(model, network, text, guided, own)
            chosen, result = known[key]
            model.branches = result.branches
        with _attention(network, chosen):
            yield result


def _first_equal(model: LoadedModel, network: nn.Module, text: str, guided: bool, own: str) -> tuple[str, Probe]:
    """The first attention implementation whose decoding steps agree with the network's own forward: the network's own
    if it takes any mask, else it comes last."""
    prefix = model.encode([text])
    with refusing(model.name):
        prefix = prefix if guided else prefix.conditional()
        reference = own_forward(model, prefix)
    refused = None
    for way in [own] if own in _ANY_MASK else [*_ANY_MASK, own]:
        try:
            with _attention(network, way), refusing(model.name):
                return way, probe(model, reference)
        except SpecbenchError as error:
            refused = refused or error
    raise refused


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = [module for module in network.modules() if module.training]
    try:
        network.eval()
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _attention(network: nn.Module, implementation: str) -> Iterator[None]:
    """Set the attention implementation in every configuration of the network."""
    configs = {id(part.config): part.config for part in network.modules() if hasattr(part, "config")}.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = implementation
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
