"""What every transformers-backed family shares: cache, masks, positions, guidance. Adapters hold only differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specbench.models.base import TokenLayout, Tree
from specbench.models.cache import PositionCache


@dataclass(frozen=True)
class Prefix:
    """Encoded prompts: conditional rows, then as many unconditional ones.

    Attributes:
        embeds: per row its prompt [P, d]; lengths may differ.
        state: per-row tensors [2B, ...] the adapter needs to embed image tokens.
        ids: [2B, P'] per row the elements' numbers in the token table of a draft head, rows padded; zeros if None.
        shift: [2B] rotary position of each row's first element, for networks trained on left-padded prompts whose
            positions count the padding; zeros if None.
    """

    embeds: Sequence[Tensor]
    state: tuple[Tensor, ...] = ()
    shift: Tensor | None = None
    ids: Tensor | None = None

    def conditional(self) -> Prefix:
        """The rows without their unconditional twins."""
        rows = len(self.embeds) // 2
        return self.take(range(rows))

    def take(self, rows: Sequence[int]) -> Prefix:
        """Some of the rows."""
        rows = list(rows)
        shift, ids = (None if tensor is None else tensor[rows] for tensor in (self.shift, self.ids))
        return Prefix([self.embeds[row] for row in rows], tuple(tensor[rows] for tensor in self.state), shift, ids)


class TransformerModel:
    """Base of the adapters; see `specbench.models.base.ImageModel` for what the attributes mean.

    Attributes:
        backbone: transformers model that maps `inputs_embeds` to `last_hidden_state`.
    """

    name: str
    layout: TokenLayout
    codebook: Tensor | None
    weights_sha256: str
    backbone: nn.Module

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.backbone.parameters()).dtype

    def encode(self, prompts: Sequence[str]) -> Prefix:
        raise NotImplementedError

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        """Inputs [R, T, d] for stream tokens [R, T] whose successors stand at stream slots `positions` [R, T].

        Entries with position 0 are replaced by the prompt's last element; those past the end are never read.
        """
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, T, d] to logits [R, T, v_image] over image ids only."""
        raise NotImplementedError

    def render(self, image_tokens: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def feature_size(self) -> int:
        """Width of the hidden states that `head` reads."""
        return self.backbone.config.hidden_size

    def table_ids(self, tokens: Tensor) -> Tensor:
        """Stream tokens as numbers in the backbone's token table, which draft heads share."""
        return tokens

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        return TransformerSession(self, prefix, guidance, columns)


class TransformerSession:
    """A batch being decoded. Row r's prompt of P elements holds slots 0 .. P-1, its stream slot i the slot P + i.

    A column that predicts stream slot i consumes the element at cache slot P - 1 + i, so the prompt's last element is
    fed by the first forward and prefill stops before it.

    Attributes:
        features: [R, T, d] last hidden states of the latest forward, conditional rows first.
        prompt_lengths: [R] elements P of each row's prompt.
        prompt_features: [R, longest P - 1, d] hidden states of the prompts without their last elements, padded.
        prompt_ids: [R, longest P] see `Prefix.ids`.
    """

    def __init__(self, model: TransformerModel, prefix: Prefix, guidance: float, columns: int):
        self._model = model
        self._guidance = guidance
        self._prefix = prefix if guidance != 1.0 else prefix.conditional()
        lengths = [len(embeds) for embeds in self._prefix.embeds]
        self.prompt_lengths = torch.tensor(lengths, device=model.device)
        self._last = self.prompt_lengths[:, None] - 1
        shift = self._prefix.shift
        self._shift = torch.zeros_like(self._last) if shift is None else shift.to(model.device)[:, None]
        self._start = torch.stack([embeds[-1] for embeds in self._prefix.embeds])[:, None]
        # Past the stream's last slot: room for a window that overhangs it, then for branches of a tree.
        self._scratch = max(lengths) + model.layout.length + columns
        self._cache = PositionCache(model.backbone.config.num_hidden_layers, self._scratch + columns)
        self._index = torch.arange(self._scratch + columns, device=model.device)
        self._fed: Tensor | None = None
        ids = self._prefix.ids
        self.prompt_ids = torch.zeros_like(self._index[: max(lengths)]).expand(len(lengths), -1) if ids is None else ids
        self.features: Tensor | None = None
        self.prompt_features = self._prefill(max(lengths) - 1)

    def _prefill(self, longest: int) -> Tensor | None:
        """Feed every prompt but its last element. Shorter rows write slots that their stream will overwrite."""
        if not longest:
            return None
        rows = [embeds[:-1] for embeds in self._prefix.embeds]
        embeds = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        slots = self._index[:longest].expand(len(embeds), -1)
        return self._run(embeds, slots, slots, self._index[:longest] <= slots[..., None], longest)

    def _run(self, embeds: Tensor, slots: Tensor, position_ids: Tensor, mask: Tensor, visible: int) -> Tensor:
        self._cache.placement.slots = slots
        self._cache.placement.visible = visible
        output = self._model.backbone(
            inputs_embeds=embeds,
            position_ids=position_ids + self._shift,
            attention_mask=mask[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        repeats = len(self._last) // len(tokens)
        tokens, positions = tokens.repeat(repeats, 1), positions.repeat(repeats, 1)
        embeds = self._model.embed(tokens, positions, self._prefix.state)
        embeds = torch.where((positions == 0)[..., None], self._start, embeds)
        position_ids = self._last + positions
        visible = self._visible(position_ids, tree)
        if tree is None:
            slots = position_ids
            mask = self._index[:visible] <= slots[..., None]
        else:
            slots, mask = self._place_tree(position_ids, tree, visible)
        self._fed = slots
        self.features = self._run(embeds, slots, position_ids, mask, visible)
        return self.logits(self.features)

    def logits(self, features: Tensor) -> Tensor:
        """Guided logits [B, T, v_image] of features [R, T, d], the target's own or a draft head's."""
        return self._guide(self._model.head(features).float())

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        repeats = len(self._last) // len(tokens)
        tokens, positions, fed, aside = (x.repeat(repeats, 1) for x in (tokens, positions, fed, aside))
        embeds = self._model.embed(tokens, positions, self._prefix.state)
        embeds = torch.where((positions == 0)[..., None], self._start, embeds)
        position_ids = self._last + positions
        own = self._scratch + self._index[: positions.shape[1]]
        slots = torch.where(aside, own, position_ids)
        place = self._index - self._last
        known = (place <= 0) | (fed.gather(1, place.clamp(0, fed.shape[1] - 1)) & (place < fed.shape[1]))
        mask = known[:, None] & (self._index <= position_ids[..., None])
        mask.scatter_(2, slots[..., None], True)
        self._fed = slots
        self.features = self._run(embeds, slots, position_ids, mask, len(self._index))
        return self.logits(self.features)

    def _visible(self, position_ids: Tensor, tree: Tree | None) -> int:
        """Slots worth reading. On a GPU the answer would cost a synchronisation, so the whole buffer is."""
        if tree is not None or position_ids.is_cuda:
            return len(self._index)
        return int(position_ids.max()) + 1

    def _place_tree(self, position_ids: Tensor, tree: Tree, visible: int) -> tuple[Tensor, Tensor]:
        """Cache slots [R, T] and mask [R, T, visible] of a tree: the trunk in place, branches in the scratch slots."""
        columns = self._index[: position_ids.shape[1]]
        in_trunk = torch.tensor(tree.in_trunk, device=columns.device)
        slots = torch.where(in_trunk, position_ids, self._scratch + columns)
        mask = (self._index[:visible] < position_ids[:, :1, None]).expand(-1, len(columns), -1).clone()
        ancestors = tree.ancestors.to(columns.device).expand(len(slots), -1, -1)
        mask.scatter_(2, slots[:, None].expand_as(ancestors), ancestors)
        return slots, mask

    def _guide(self, logits: Tensor) -> Tensor:
        """u + s (c - u), float32."""
        if self._guidance == 1.0:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional + self._guidance * (conditional - unconditional)

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        repeats = len(self._last) // len(columns)
        source = self._fed.gather(1, columns.repeat(repeats, 1))
        self._cache.move(source, self._last + positions.repeat(repeats, 1))
