"""Base of all models with a transformers backbone: KV cache, masks, positions, guidance."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specbench.errors import SpecbenchError
from specbench.models.interface import Call, DraftPrompt, TokenLayout, Tree
from specbench.models.network_sizes import whole_blocks
from specbench.models.transformer.compilation import CompiledForms, CompiledFunctions, call_eager, keep_compiled
from specbench.models.transformer.compiled_forward import CUDA_OPTIONS, CompiledStep, nest_layers
from specbench.models.transformer.forward import ForwardInputs, OutputRows, guide, last_hidden_state, run_step
from specbench.models.transformer.host_sync import to_host
from specbench.models.transformer.kv_cache import PARTS, CacheExtent, PositionCache, whole_parts
from specbench.models.transformer.llama_layer import use_grouped_attention
from specbench.system.matrix_products import join_products

if TYPE_CHECKING:
    from specbench.models.transformer.packaged_forward import PackagedStep


@dataclass(frozen=True)
class Prefix:
    """Encoded prompts: conditional rows, then as many unconditional rows."""

    embeds: Sequence[Tensor]  # prompt [P, d] of each row; lengths may differ
    state: tuple[Tensor, ...] = ()  # per-row tensors [2B, ...] with which the adapter embeds image tokens
    # [2B] rotary position of each row's first element, for networks trained on left-padded prompts whose positions
    # count the padding; zeros if None
    shift: Tensor | None = None
    # [2B, P'] ids of the elements in a draft head's token table, rows padded; zeros if None
    ids: Tensor | None = None

    def conditional(self) -> Prefix:
        return self.take(range(len(self.embeds) // 2))

    def take(self, rows: Sequence[int]) -> Prefix:
        rows = list(rows)
        shift, ids = (None if tensor is None else tensor[rows] for tensor in (self.shift, self.ids))
        return Prefix([self.embeds[row] for row in rows], tuple(tensor[rows] for tensor in self.state), shift, ids)


class TransformerModel:
    """Base of the adapters; see `specbench.models.interface` for the attributes and methods that models share."""

    name: str
    layout: TokenLayout
    codebook: Tensor | None
    weights_sha256: str
    backbone: nn.Module  # transformers model that maps `inputs_embeds` to `last_hidden_state`
    made_of: str | None = None
    """Identity of the network's files and code: equal for the same network in another process; None if unknown."""
    taps: tuple[int, ...] = ()
    compiles = False
    _compiled_steps: dict[float, CompiledStep | PackagedStep]
    _views: dict[tuple[int, ...], TransformerModel] | None = None
    _compiled_functions: dict[Hashable, CompiledFunctions]
    _spare_cache: PositionCache | None = None
    _forwards_alone = False

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.backbone.parameters()).dtype

    def encode(self, prompts: Sequence[str]) -> Prefix:
        raise NotImplementedError

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        """Embed stream tokens [R, T] as the inputs that predict the stream slots `positions` [R, T]: [R, T, d].
        Entries with position 0 are replaced by the prompt's last element; entries past the end are never read."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [R, T, v_image] over image ids only, of hidden states [R, T, d]."""
        raise NotImplementedError

    def before_output(self, hidden: Tensor) -> Tensor:
        """Convert the hidden states that `head` reads to the input of the output matrix."""
        return hidden

    def output_matrix(self) -> tuple[Tensor, Tensor | None]:
        """Return output matrix [v_image, d] and bias of `head`, for draft heads with a reduced vocabulary."""
        raise SpecbenchError(f"'{self.name}' has no output matrix to reduce", "choose eagle or vertical-coupled")

    def guide(self, logits: Tensor, guidance: float, positions: Tensor) -> Tensor:
        """Guided logits [B, T, v_image] of float32 logits [R, T, v_image] that predict stream slots [R, T]."""
        return guide(logits, guidance)

    def own_logits(self, prompt: Prefix, tokens: Tensor) -> Tensor:
        """Compute logits [N + 1, v_image] of the slots after a single prompt, for stream tokens [N], by one forward of
        transformers' network without cache, mask and compiled steps."""
        positions = torch.arange(1, len(tokens) + 1, device=self.device)
        embeds = torch.cat([prompt.embeds[0][None], self.embed(tokens[None], positions[None], prompt.state)], 1)
        numbers = torch.arange(embeds.shape[1], device=self.device)[None]
        numbers = numbers if prompt.shift is None else numbers + prompt.shift[:, None].to(self.device)
        hidden = self.backbone(inputs_embeds=embeds, position_ids=numbers, use_cache=False).last_hidden_state
        return self.head(hidden)[0, len(prompt.embeds[0]) - 1 :]

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        raise NotImplementedError

    @property
    def feature_size(self) -> int:
        return self.backbone.config.hidden_size

    def token_table(self) -> Tensor:
        """Return token embeddings [n, d] for a new draft head."""
        return self.backbone.get_input_embeddings().weight

    def table_ids(self, tokens: Tensor) -> Tensor:
        return tokens

    def draft_prompt(self, prompt: DraftPrompt, state: tuple[Tensor, ...]) -> DraftPrompt:
        """Convert the prompts for a draft head, in families whose heads take a longer prompt than the model."""
        return prompt

    def own_head(self) -> nn.Module | None:
        return None

    def own_vertical_head(self) -> nn.Module | None:
        return None

    def own_eagle3_head(self) -> nn.Module | None:
        return None

    def tapped(self, taps: tuple[int, ...]) -> TransformerModel:
        if not taps:
            return self
        if wrong := [tap for tap in taps if not 0 <= tap < len(self.backbone.layers)]:
            what = f"the head reads layer {wrong[0]}; '{self.name}' has layers 0 to {len(self.backbone.layers) - 1}"
            raise SpecbenchError(what, "check that the head was trained for this model")
        self._views = self._views or {}
        if taps not in self._views or self._views[taps].compiles != self.compiles:
            view = copy.copy(self)
            view.taps, view._spare_cache = taps, None
            if self.compiles:
                view._compiled_steps, view._compiled_functions = {}, {}
            self._views[taps] = view
        return self._views[taps]

    def adopt_head(self, head: nn.Module) -> nn.Module:
        return head

    def draft_data(self, count: int, seed: int) -> tuple[Sequence[str], Tensor] | None:
        """Return `count` captions and stream tokens [count, N] to train a draft head on; None if the model has none."""
        return None

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        use_grouped_attention(self.backbone)
        return TransformerSession(self, prefix, guidance, columns)

    def compile(self) -> None:
        """Run the steps of later sessions compiled, on a GPU with joined products."""
        if self.device.type == "cuda":
            join_products(self.backbone)
            nest_layers(self.backbone)
        keep_compiled()
        self.compiles = True
        self._compiled_steps, self._compiled_functions = {}, {}

    def compiled_step(self, guidance: float) -> CompiledStep | PackagedStep | None:
        """Return the compiled step for a guidance scale; None if it is not compiled."""
        from specbench.models.transformer.packaged_forward import PackagedStep  # imports torch.export

        if not self.compiles:
            return None
        if guidance not in self._compiled_steps:
            on_gpu = self.device.type == "cuda"
            new = CompiledStep(self, guidance, CUDA_OPTIONS) if on_gpu else PackagedStep(self, guidance)
            self._compiled_steps[guidance] = new
        (step := self._compiled_steps[guidance]).follow_model()
        return step

    def lend_cache(self, session: TransformerSession, rows: int, slots: int) -> PositionCache:
        """Return an empty cache for a compiled session. Reuse the cache of an earlier session of the same shape, if
        any, because captured graphs write to its addresses."""
        slots += 1  # one more than is ever read: compiled forwards assume that they read only a part
        cache, self._spare_cache = self._spare_cache, None
        if cache is None or not cache.fits(rows, slots, self.device, self.dtype):
            cache = PositionCache(self.backbone.config.num_hidden_layers, slots)
        else:
            cache.clear()
        weakref.finalize(session, setattr, self, "_spare_cache", cache).atexit = False
        return cache

    def call_for(self, key: Hashable, rows: int) -> Call:
        if not self.compiles or self._forwards_alone:
            return call_eager
        key = key, rows, self.device, self.dtype
        if key not in self._compiled_functions:
            self._compiled_functions[key] = CompiledFunctions(self.device)
        return self._compiled_functions[key]

    @contextmanager
    def forwards_alone(self) -> Iterator[None]:
        self._forwards_alone = True
        try:
            yield
        finally:
            self._forwards_alone = False

    @property
    def compiled(self) -> list[CompiledForms]:
        parts: list[CompiledForms] = []
        for model in dict.fromkeys((self, *(self._views or {}).values())):  # a view's `_views` also contains the view
            if model.compiles:
                parts += [*model._compiled_steps.values(), *model._compiled_functions.values()]
        return parts


class TransformerSession:
    """One batch being decoded. A row's prompt of P elements has cache slots 0 .. P - 1; stream slot i has slot P + i. A
    column that predicts stream slot i consumes the element at cache slot P - 1 + i, so the prompt's last element is fed
    by the first forward and prefill stops before it. `features`: [R, T, d] last hidden states of the latest forward,
    and hidden states of tapped layers, conditional rows first."""

    features: Tensor

    def __init__(
        self, model: TransformerModel, prefix: Prefix, guidance: float, columns: int, length: int | None = None
    ):
        """`length`: number of stream slots to allocate; all if None."""
        self._model = model
        self._guidance = guidance
        self._compiled = model.compiled_step(guidance)
        self._prefix = prefix if guidance != 1.0 else prefix.conditional()
        lengths = [len(embeds) for embeds in self._prefix.embeds]
        self._longest = max(lengths)
        self._last = torch.tensor(lengths, device=model.device)[:, None] - 1
        shift = self._prefix.shift
        self._shift = torch.zeros_like(self._last) if shift is None else shift.to(model.device)[:, None]
        self._start = torch.stack([embeds[-1] for embeds in self._prefix.embeds])[:, None]
        # After the last stream slot: scratch slots for windows that extend past it, then for placeholder columns.
        self._scratch = self._room(max(lengths)) + (model.layout.length if length is None else length) + columns
        self._columns = columns
        slots = self._room(self._scratch + self._columns)
        self._index = torch.arange(slots, device=model.device)
        if self._compiled and length is None:
            self._cache = cache = model.lend_cache(self, len(lengths), slots)
            for name in ("_last", "_shift", "_start", "_index"):  # every step reads them at fixed addresses
                setattr(self, name, cache.hold(name, getattr(self, name)))
            state = [cache.hold(f"state {number}", tensor) for number, tensor in enumerate(self._prefix.state)]
            self._prefix = replace(self._prefix, state=tuple(state))
        else:
            self._cache = PositionCache(model.backbone.config.num_hidden_layers, slots)
        self._extent = CacheExtent()
        self._fed: Any = None  # slots of the latest forward
        self._hidden = (0, 0)
        self._prompt_features = self._prefill(max(lengths) - 1)

    def _room(self, slots: int) -> int:
        """Return the slots to allocate for `slots`: on a GPU whole blocks, so that there are few shapes."""
        return slots if self._model.device.type == "cpu" else whole_blocks(slots)

    def _prefill(self, longest: int) -> Tensor | None:
        """Feed every prompt except its last element. Shorter rows write slots that their stream overwrites later."""
        if not longest:
            return None
        embeds = nn.utils.rnn.pad_sequence([embeds[:-1] for embeds in self._prefix.embeds], batch_first=True)
        slots = self._index[:longest].expand(len(embeds), -1)
        positions, backbone = slots + self._shift, self._model.backbone
        # Compiled for a GPU only: on a CPU a prefill spends its time in products, not in calls.
        if isinstance(self._compiled, CompiledStep) and self._cache.is_ready:
            return self._compiled.prefill(self._cache, embeds, positions, slots)
        self._cache.place(slots, longest)
        mask = (self._index[:longest] <= slots[..., None])[:, None]
        if self._model.taps:
            return last_hidden_state(backbone, embeds, positions, mask, self._cache, self._model.taps)
        fed = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
        return backbone(**fed, past_key_values=self._cache, use_cache=True).last_hidden_state

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        tokens, positions = self._twice(tokens), self._twice(positions)
        slots = self._last + positions
        columns = slots.shape[1] if tree is None else 2 * slots.shape[1]
        end, start = self._extent.of(slots[:, 0], columns)
        visible = self._readable(end)
        if tree is not None:
            return self._step(tokens, positions, *self._place_tree(slots, tree, visible), visible)
        return self._step(tokens, positions, slots, self._seen(slots[..., None], visible), visible, start)

    def _seen(self, slots: Tensor, visible: int) -> Tensor | None:
        """Return the mask of columns at `slots` [R, T, 1] if `move` has hidden slots, else None."""
        if not any(self._hidden):
            return None
        (unseen, lost), index, last = self._hidden, self._index[:visible], self._last[..., None]
        return (index <= slots - unseen * (slots > last)) & ~((last - lost <= index) & (index < last))

    def _readable(self, end: int) -> int:
        """Return the number of slots to read, at least `end`. A GPU reads whole parts, so that there are few shapes; a
        CPU reads at least two slots, because a symbolic size is never 1."""
        return max(end, 2) if self._index.device.type == "cpu" else whole_parts(end, len(self._index))

    def part_starts(self) -> list[int]:
        """Return the stream slots at which the widest forward begins to read one more of the cache's `PARTS`; empty if
        it reads any number of slots. In a batch, rows ahead of the slowest row may read a part earlier."""
        if self._readable(2) == 2:
            return []
        last, part = max(to_host(self._last[:, 0])), len(self._index) // PARTS
        starts = (number * part - last - self._columns + 1 for number in range(1, PARTS))
        # A tree with n columns reads n more slots.
        end = self._model.layout.length
        return [min(start, end - 1) for start in starts if 0 < start < end + self._columns]

    def _step(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor | None,
        visible: int,
        start: int | None = None,
    ) -> Tensor:
        """Compute logits of tokens [R, T] at cache slots [R, T]. `start`: first slot of a chain if it is the same in
        all rows. Then the rows are written as one slice, and a single column needs no mask."""
        first, self._fed = self._fed is None, slots
        # Only a session's first forward predicts slot 0, whose input is the prompt's last element.
        opening = self._start if first or self._compiled else None
        index = self._index[:visible]
        if self._compiled and index.device.type == "cuda":
            torch._dynamo.mark_static_address(index, guard=False)
        inputs = ForwardInputs(
            tokens, positions, slots, index, mask, self._last, self._shift, opening, self._prefix.state
        )
        if self._compiled and self._cache.is_ready:
            self.features, logits = self._compiled(self._cache, inputs, self._columns)
            return logits
        if start is not None and slots.shape[1] == 1:
            # Without a mask a column attends to all slots read, so empty slots of a GPU's whole parts must not be read.
            inputs, visible = inputs._replace(index=None), start + 1
        self._cache.place(slots, visible, None if start is None else slice(start, start + slots.shape[1]))
        self.features, logits = run_step(self._model, self._guidance, self._cache, inputs)
        return logits

    def move(self, positions: int = 0, unseen: int = 0, lost: int = 0) -> None:
        """Introduce errors into later forwards: shift rotary positions by `positions` away from the prompt. Hide from
        every column the `unseen` cache slots that end with its own slot, and `lost` slots before the prompt's last."""
        self._shift, self._hidden = self._shift + positions, (unseen, lost)

    def _twice(self, columns: Tensor) -> Tensor:
        """Repeat [B, T] to [R, T]: under guidance, unconditional rows are fed the same tokens as conditional rows."""
        return columns if len(columns) == len(self._last) else torch.cat([columns, columns])

    def logits(self, features: Tensor) -> Tensor:
        return guide(self._model.head(features[..., : self._model.feature_size]).float(), self._guidance)

    def reduced_head(self, ids: Tensor) -> OutputRows:
        weight, bias = self._model.output_matrix()
        return OutputRows(self._model.before_output, self._guidance, weight[ids], None if bias is None else bias[ids])

    def draft_prompt(self) -> DraftPrompt:
        lengths, ids = self._last[:, 0] + 1, self._prefix.ids
        if ids is None:
            ids = lengths.new_zeros(len(lengths), int(lengths.max()))
        return self._model.draft_prompt(DraftPrompt(lengths, self._prompt_features, ids), self._prefix.state)

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        tokens, positions = self._twice(tokens), self._twice(positions)
        fed, aside = self._twice(fed), self._twice(aside)
        position_ids = self._last + positions
        slots = torch.where(aside, self._scratch + self._index[: position_ids.shape[1]], position_ids)
        place = self._index - self._last
        fed = fed if fed.dim() == 3 else fed[:, None]
        end = fed.shape[2]
        attended = fed.gather(2, place.clamp(0, end - 1)[:, None].expand(-1, fed.shape[1], -1))
        attended = (place <= 0)[:, None] | (attended & (place < end)[:, None])
        mask = attended & (self._index <= position_ids[..., None])
        mask.scatter_(2, slots[..., None], True)
        return self._step(tokens, positions, slots, mask, len(self._index))

    def _place_tree(self, position_ids: Tensor, tree: Tree, visible: int) -> tuple[Tensor, Tensor]:
        """Return cache slots [R, T] and mask [R, T, visible] of a tree: the trunk in place, branches in later slots."""
        in_trunk, ancestors = _tree_tables(tree, position_ids.device)
        columns = self._index[: position_ids.shape[1]]
        slots = torch.where(in_trunk, position_ids, position_ids[:, :1] + len(columns) + columns)
        mask = (self._index[:visible] < position_ids[:, :1, None]).expand(-1, len(columns), -1).clone()
        mask.scatter_(2, slots[:, None].expand(-1, len(columns), -1), ancestors.expand(len(slots), -1, -1))
        return slots, mask

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        self._cache.move(self._fed.gather(1, self._twice(columns)), self._last + self._twice(positions))

    def refill(self, rows: Tensor, prefix: Prefix) -> None:
        fresh = TransformerSession(self._model, prefix, self._guidance, columns=0, length=0)
        conditional = len(self._last) // 2 if len(fresh._last) > len(rows) else 0
        rows = torch.cat([rows, rows + conditional]) if conditional else rows
        self._scratch = max(self._scratch, self._room(fresh._longest) + self._model.layout.length + self._columns)
        if (more := self._room(self._scratch + self._columns) - len(self._index)) > 0:
            self._cache.grow(more)
            self._index = torch.arange(len(self._index) + more, device=rows.device)
        self._cache.put(rows, fresh._cache)
        self._last[rows], self._shift[rows], self._start[rows] = fresh._last, fresh._shift, fresh._start
        for stored, new in zip(self._prefix.state, fresh._prefix.state, strict=True):
            stored[rows] = new
        self._fed, self._extent = None, CacheExtent()


@lru_cache(maxsize=64)
def _tree_tables(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the trunk's columns, [T] bool, and the ancestors, [T, T] bool; see `Tree`."""
    return torch.tensor(tree.in_trunk, device=device), tree.ancestors.to(device)
