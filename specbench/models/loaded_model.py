"""A causal language model of transformers that a user has loaded. Its modules run with the position-addressed KV
cache.

The network gets ids, positions and masks in the form it expects, and its forward applies its head. So scalings,
biases and soft caps need no list of architectures. `specbench.models.forward_probe` compares the result with a
reference forward.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import masking_utils

from specbench.errors import SpecbenchError
from specbench.models.forward_probe import Probe, Reference, lengths_named, own_forward, probe, refusing, unchanged
from specbench.models.interface import TokenLayout
from specbench.models.network_head import accepted, base_of, own_head, own_logits
from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.model import Prefix, TransformerModel, TransformerSession
from specbench.system.matrix_products import product
from specbench.system.torch_state import PinnedTorch

PromptIds = Callable[[str], tuple[Sequence[int], Sequence[int]]]
"""Function of a text: vocabulary ids of the prompt (up to the first image token), and of the unconditional prompt."""


_INTERFACE = "config", "base_model", "get_input_embeddings", "get_output_embeddings"  # attributes that a network needs


class LoadedModel(TransformerModel):
    """A causal language model of transformers whose image tokens are words of its vocabulary.

    Args:
        network: has `get_output_embeddings()`, may be compiled, quantised or wrapped by PEFT, and is not changed.
        layout: a `TokenLayout`, or height and width of a plain grid.
        image_ids: vocabulary id of each of the `layout.v_image` image tokens.
        forced_ids: vocabulary ids of the tokens that the layout forces, in the order of their stream ids.
        prompt_ids: see `PromptIds`.
        codebook: [v_image, d] embedding of each image token, for decoders that need distances between tokens.
        render: draws image tokens [B, free slots] as uint8 [B, 3, H, W]; without it there are no pictures.
    """

    weights_sha256 = ""
    no_trees: tuple[str, str] | None = None  # reason why draft trees are refused, and a hint

    def __init__(
        self,
        network: nn.Module,
        layout: TokenLayout | tuple[int, int],
        image_ids: Sequence[int],
        prompt_ids: PromptIds,
        forced_ids: Sequence[int] = (),
        codebook: Tensor | Sequence[Sequence[float]] | None = None,
        render: Callable[[Tensor], Tensor] | None = None,
    ):
        if isinstance(image_ids, set | frozenset) or not hasattr(image_ids, "__len__"):
            what = f"image_ids: {image_ids!r:.60} is not a list of ids"
            raise SpecbenchError(what, "give the vocabulary id of each image token, in their order")
        self.layout = layout if isinstance(layout, TokenLayout) else _grid(layout, len(image_ids))
        if self.layout.vocab != len(image_ids) + len(forced_ids):
            what = f"{len(image_ids)} image ids and {len(forced_ids)} forced ids for a layout of {self.layout.vocab}"
            raise SpecbenchError(what, "give one vocabulary id for each id of the layout")
        self.network = network
        inner = unwrapped(network)
        self.name = type(inner).__name__
        if wrong := [name for name in _INTERFACE if not hasattr(inner, name)]:
            what = f"{self.name} is not a causal language model of transformers with a KV cache"
            hint = "docs/extending-model.md describes a plug-in for other networks"
            raise SpecbenchError(f"{what}: it has no {', '.join(wrong)}", hint)
        for name, function in {"prompt_ids": prompt_ids, "render": render or prompt_ids}.items():
            if not callable(function):
                raise SpecbenchError(f"{name} = {function!r:.60} is not a function")
        with refusing(self.name):
            self.backbone = Backbone(inner)
            if self.device.type == "meta":
                raise SpecbenchError(f"{self.name} is on the meta device, so it has no weights", "load its weights")
            self._words = len(inner.get_input_embeddings().weight)
        ids = self._ids("image_ids", image_ids), self._ids("forced_ids", forced_ids)
        if not ids[0] or len(set(ids[0])) < len(ids[0]):
            what = "image_ids contains an id twice" if ids[0] else "image_ids is empty"
            raise SpecbenchError(what, "give one vocabulary id for each image token")
        # No inference tensors, because the training of a draft head differentiates through the head
        with refusing(self.name), PinnedTorch(False), torch.no_grad(), _evaluating(inner):
            self.stream_ids = torch.tensor([*ids[0], *ids[1]], device=self.device)
            self._image_ids = self.stream_ids[: len(ids[0])]
            base = self.backbone.base
            hidden = base(input_ids=self._image_ids[None, :3], **accepted(base, use_cache=False))[0]
            self._head = own_head(inner, self._image_ids, hidden)
            # As attributes, so that a compiled step takes their tensors as inputs
            self._matrix, self._after = self._head.matrix, self._head.module
        self.codebook = None if codebook is None else _codebook(codebook, self.layout.v_image).to(self.device)
        self._ids_of: Any = prompt_ids
        self._draw: Any = render

    @property
    def device(self) -> torch.device:
        """Device of the network's inputs; accelerate keeps the weights of an offloaded network elsewhere."""
        placed = (getattr(part, "_hf_hook", None) for part in self.backbone.modules())
        devices = (getattr(hook, "execution_device", None) for hook in placed)
        return torch.device(next((device for device in devices if device is not None), super().device))

    @property
    def draws(self) -> bool:
        return self._draw is not None

    def problem(self, tokens: object) -> None:
        """Return None: any tokens can be drawn."""

    def tapped(self, taps: tuple[int, ...]) -> TransformerModel:
        if taps:
            raise SpecbenchError(f"inner layers of {self.name} cannot be read", "choose a decoder other than eagle3")
        return self

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        return _Session(self, prefix, guidance, columns)

    def _ids(self, what: str, given: Any) -> list[int]:
        """Convert vocabulary ids, given as a list, range, array or tensor, to a list."""
        try:
            numbers = [operator.index(number) for number in (given.tolist() if hasattr(given, "tolist") else given)]
        except TypeError:
            raise SpecbenchError(f"{what}: {given!r:.60} is not a list of whole numbers") from None
        if wrong := [number for number in numbers if not 0 <= number < self._words]:
            raise SpecbenchError(f"{what}: {wrong[0]} is not one of the {self._words} words of {self.name}")
        return numbers

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return vocabulary ids of the conditional and the unconditional prompt, up to the first image token."""
        pair = _result(f"prompt_ids of {text!r:.40}", self._ids_of, text)
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise SpecbenchError("prompt_ids must return two lists of ids", "return ids with and without a prompt")
        return self._ids("prompt_ids", pair[0]), self._ids("prompt_ids", pair[1])

    def encode(self, prompts: Sequence[str]) -> Prefix:
        """Encode prompts as ids [P, 1], because the network embeds them itself."""
        rows: tuple[list[list[int]], list[list[int]]] = [], []
        for text in prompts:
            for ids, part in zip(rows, self.prompt_ids(text), strict=True):
                ids.append(part)
        if not all((*rows[0], *rows[1])):
            raise SpecbenchError("prompt_ids returned a prompt without ids", "return at least one id, such as <s>")
        total, positions = max(map(len, (*rows[0], *rows[1]))) + self.layout.length, self._positions()
        if total > positions:
            what = f"a prompt and its image have {total} tokens, but the network has {positions} positions"
            raise SpecbenchError(what, "give a shorter prompt or a smaller layout")
        elements = [torch.tensor(row, device=self.device) for row in (*rows[0], *rows[1])]
        ids = nn.utils.rnn.pad_sequence(elements, batch_first=True)
        return Prefix([row[:, None] for row in elements], ids=ids)

    def _positions(self) -> float:
        """Return the number of positions in the network's table of learned positions; infinite without a table."""
        tables = [part for name, part in self.backbone.named_modules() if re.search("wpe|position", name)]
        sizes = [table.num_embeddings for table in tables if isinstance(table, nn.Embedding)]
        named = getattr(self.backbone.config, "max_position_embeddings", math.inf)
        return min([*sizes, named]) if sizes else math.inf

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.stream_ids[tokens][..., None]

    def table_ids(self, tokens: Tensor) -> Tensor:
        return self.stream_ids[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        if self._matrix is not None:
            return product(hidden, self._matrix)
        return self._after(hidden) if self._head.selected else self._after(hidden)[..., self._image_ids]

    def output_matrix(self) -> tuple[Tensor, None]:
        if self._matrix is None:
            raise SpecbenchError(f"{self.name} has no plain output matrix to reduce", "choose eagle or vertical")
        return self._matrix, None

    def own_logits(self, prompt: Prefix, tokens: Tensor) -> Tensor:
        """See `TransformerModel.own_logits`. If the network's forward hides the image tokens, apply its head to the
        last hidden states of its base model's forward."""
        ids, first = torch.cat([prompt.embeds[0][:, 0], self.stream_ids[tokens]])[None], len(prompt.embeds[0]) - 1
        if self._head.masked:
            base = self.backbone.base
            return self.head(base(input_ids=ids, **accepted(base, use_cache=False))[0])[0, first:]
        logits = own_logits(self.network, ids)
        if logits.shape[:-1] != ids.shape:
            what = f"{self.name} returns logits {list(logits.shape)} for {ids.shape[1]} tokens"
            raise SpecbenchError(what, "specbench.decode needs logits [batch, tokens, vocabulary]")
        return logits[0, first:, self._image_ids]

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return _result("render", self._draw, image_tokens)


def _result(name: str, users: Callable[[Any], Any], given: object) -> Any:
    """Call a user's function; turn its error into a one-line SpecbenchError."""
    try:
        return users(given)
    except (SpecbenchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = f"{name} failed: {type(error).__name__}: {error!s:.100}"
        raise SpecbenchError(" ".join(what.split())) from error


def _grid(layout: Any, codes: int) -> TokenLayout:
    try:
        height, width = (0 if isinstance(size, bool) else operator.index(size) for size in layout)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise SpecbenchError(f"layout {layout!r:.60}", "give (height, width) in image tokens, or a TokenLayout")
    return TokenLayout.plain(height, width, codes)


def _codebook(given: Any, codes: int) -> Tensor:
    """Convert a codebook, given as a tensor, an array or nested lists, to float32 [v_image, d]."""
    try:
        codebook = torch.as_tensor(given).detach().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecbenchError(f"codebook: {error!s:.100}", "give a matrix with one row for each image token") from error
    if codebook.ndim != 2:
        what = f"codebook has {codebook.ndim} dimension{'s' * (codebook.ndim != 1)}, not 2"
        raise SpecbenchError(what, "give a matrix with one row for each image token")
    if len(codebook) != codes:
        raise SpecbenchError(f"codebook has {len(codebook)} rows for {codes} image tokens", "select one row for each")
    if not codebook.isfinite().all():
        raise SpecbenchError("codebook contains NaN or infinite numbers")
    return codebook


class _Session(TransformerSession):
    _model: LoadedModel

    def _step(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor | None, *more: Any) -> Tensor:
        if mask is not None and self._model.no_trees is not None:
            raise SpecbenchError(*self._model.no_trees)
        return super()._step(tokens, positions, slots, mask, *more)


def unwrapped(network: nn.Module) -> Any:
    """Return the network inside the wrappers of `torch.compile` and PEFT. It contains PEFT's adapters as modules."""
    network = getattr(network, "_orig_mod", network)
    inside = getattr(network, "get_base_model", None)
    return network if inside is None else inside()


class Backbone(nn.Module):
    """The network below its head, called as `TransformerSession` calls a backbone, with ids [R, T, 1] as embeddings."""

    def __init__(self, network: Any):
        super().__init__()
        self.base = base_of(network)
        self.config = network.config.get_text_config(decoder=True)
        self._options = accepted(self.base, position_ids=None, use_cache=None)

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
                **{name: options[name] for name in self._options},
            )
        return BackboneOutput(output[0])


class BackboneOutput(NamedTuple):
    last_hidden_state: Tensor  # [R, T, d]


class _Columns(NamedTuple):
    """Columns of a forward and the cache slots that they read."""

    positions: Tensor  # [R, T]
    held: Tensor  # [R, S] position of each slot's entry
    visible: Tensor | None  # [R, 1, T, S] bool, slots that each column may attend to; None means all

    def allowed(self, pattern: Callable[..., Tensor]) -> Tensor:
        """Evaluate a network's mask function of (row, head, query position, key position): bool [R, T, S]."""
        rows = torch.arange(len(self.held), device=self.held.device)[:, None, None, None]
        allowed = pattern(rows, torch.zeros_like(rows), self.positions[:, None, :, None], self.held[:, None, None])
        allowed = allowed if self.visible is None else allowed & self.visible
        return allowed.expand(len(self.held), 1, self.positions.shape[1], self.held.shape[1])[:, 0]


class _Here(threading.local):
    columns: _Columns | None = None  # columns of the forward that this thread runs


_here, _lock, _forwards = _Here(), threading.Lock(), 0


@contextmanager
def slot_masks(position_ids: Tensor, visible: Tensor | None, cache: PositionCache) -> Iterator[None]:
    """Let this thread's networks compute their masks with the positions of the cache's slots. The network defines by
    position which keys a query attends to (causal, a sliding window, chunks), and its attention defines the form of the
    mask. Only specbench knows which slots are in use. `visible`: [R, 1, T, S] bool, None for all slots."""
    global _forwards
    read, slots = cache.placement.visible, cache.placement.slots
    held = torch.arange(read, device=slots.device).repeat(len(slots), 1).scatter(1, slots, position_ids)
    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    with _lock:
        if not _forwards:
            _before.update(functions._local_mapping)
            functions._local_mapping.update({name: _by_position(make) for name, make in functions.items()})
        _forwards += 1
    _here.columns = _Columns(position_ids, held, visible)
    try:
        yield
    finally:
        _here.columns = None
        with _lock:
            _forwards -= 1
            if not _forwards:
                functions._local_mapping.clear()
                functions._local_mapping.update(_before)
                _before.clear()


_before: dict[str, Callable[..., Any]] = {}  # original mask functions, while ours replace them


def _by_position(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of transformers, so that it uses the slots of this thread's forward, if any."""

    def mask(*arguments: Any, **options: Any) -> Any:
        if (columns := _here.columns) is None:
            return make(*arguments, **options)
        allowed = columns.allowed(options["mask_function"])
        first = {"q_offset": 0} if "q_length" in options else {"cache_position": torch.arange(allowed.shape[1])}
        options |= first | {"kv_offset": 0, "allow_is_causal_skip": False, "attention_mask": None}
        options["mask_function"] = lambda row, head, column, slot: allowed[row, column, slot]
        return make(*arguments, **options)

    return mask


class _Known(NamedTuple):
    attention: str  # attention implementation for which the steps agree
    result: Probe
    prompt: int  # length of the longest prompt compared
    start: Reference  # reference of the first slots, to detect changes of the network


_ANY_MASK = ("sdpa", "eager")  # Attention implementations of transformers that take any mask without compilation
_KNOWN: WeakKeyDictionary[nn.Module, dict[object, _Known]] = WeakKeyDictionary()


@contextmanager
def decoding(model: LoadedModel, texts: Sequence[str], guided: bool, check: bool) -> Iterator[Probe | None]:
    """Set eval mode and an attention implementation with which decoding steps agree with the reference forward.
    Both are restored afterwards. Yields the comparison's result, None without `check`. A network is compared once per
    kind of stream, and again if it has changed, or if a longer prompt passes a length named in the configuration."""
    network = unwrapped(model.network)
    own = network.config._attn_implementation
    with _evaluating(network):
        attention, result = own if own in _ANY_MASK else _ANY_MASK[0], None
        if check:
            key = model.layout, tuple(model.stream_ids.tolist()), guided, own, model.device, model.dtype
            known = _KNOWN.setdefault(network, {})
            with refusing(model.name):
                prefix = max((model.encode([text]) for text in texts), key=lambda prefix: max(map(len, prefix.embeds)))
                # Two rows also without guidance, because a network may mix the rows of a batch
                prefix = prefix if guided else prefix.take([0, 0])
                if key not in known or not _holds(known[key], model, max(map(len, prefix.embeds))):
                    known[key] = _compare(model, network, prefix, own)
            attention, result = known[key].attention, known[key].result
            model.no_trees = result.no_trees
        with _attention(network, attention):
            yield result


def _holds(known: _Known, model: LoadedModel, prompt: int) -> bool:
    """Return whether a comparison is still valid for the current network and for prompts of up to `prompt` ids."""
    reach = prompt + model.layout.length
    passed = (known.prompt < length <= reach for length in lengths_named(model.backbone.config))
    return not (prompt > known.prompt and any(passed)) and unchanged(model, known.start)


def _compare(model: LoadedModel, network: nn.Module, prefix: Prefix, own: str) -> _Known:
    """Find the first attention implementation whose decoding steps agree with the reference forward. The
    implementation `own`, set by the network, is the only candidate if it accepts any mask, otherwise the last."""
    reference, refused = own_forward(model, prefix), list[SpecbenchError]()
    for implementation in [own] if own in _ANY_MASK else [*_ANY_MASK, own]:
        try:
            with _attention(network, implementation), refusing(model.name):
                result = probe(model, reference)
            start = reference._replace(tokens=reference.tokens[:, :8], logp=reference.logp[:, :9])
            return _Known(implementation, result, max(map(len, prefix.embeds)), start)
        except SpecbenchError as error:
            refused.append(error)
    raise refused[0]


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = [module for module in network.modules() if module.training]
    try:
        network.eval()
        yield
    finally:
        for module in training:
            module.training = True


def prepare_for_runs(model: LoadedModel) -> None:
    """Set eval mode and attention as `decoding` with `check` does, but permanently, because a plug-in loads the network
    only for runs. A test prompt that is too long, or that the plug-in cannot read, is replaced by a shorter prompt."""
    network = unwrapped(model.network).eval()
    prefix = Prefix([row[:, None] for row in (model.stream_ids[:8], model.stream_ids[:1])])
    for text in ("0", "a cup", "a photo of a cup, " * 12):
        with suppress(SpecbenchError):
            prefix = model.encode([text])
    with refusing(model.name):
        known = _compare(model, network, prefix, network.config._attn_implementation)
    model.no_trees = known.result.no_trees
    for config in _configs(network):
        config._attn_implementation = known.attention


def _configs(network: nn.Module) -> list[Any]:
    return list({id(part.config): part.config for part in network.modules() if hasattr(part, "config")}.values())


@contextmanager
def _attention(network: nn.Module, implementation: str) -> Iterator[None]:
    """Set the attention implementation in every configuration of the network."""
    configs = _configs(network)
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = implementation
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
