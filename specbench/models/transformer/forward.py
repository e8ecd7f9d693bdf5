"""One forward of a target as a function of tensors, from token ids to guided logits, run eagerly or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaModel

from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.llama_layer import rotary_of, run_layer, runs_directly


class StepModel(Protocol):
    """The parts of a `TransformerModel` that one forward uses: embedding, transformer and image head."""

    backbone: nn.Module
    taps: tuple[int, ...]  # hidden states after these numbers of layers are also features
    made_of: str | None

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...
    def guide(self, logits: Tensor, guidance: float, positions: Tensor) -> Tensor: ...


class ForwardInputs(NamedTuple):
    """Inputs of a forward, without the cache. R rows, T query positions (columns), S slots that attention reads."""

    # tokens, positions: [R, T] as in `Session.forward`, for all rows
    tokens: Tensor
    positions: Tensor
    slots: Tensor  # [R, T] cache slots that are written
    index: Any  # tensor [S] of indices of the slots that are read; None if every column attends to all of them
    # [R, T, S] bool, slots each column attends to; None for a chain: all slots up to the column's slot
    mask: Tensor | None
    # last, shift: [R, 1] slot and rotary offset of the prompts' last elements
    last: Tensor
    shift: Tensor
    start: Tensor | None  # [R, 1, d] the prompts' last elements; None if no column predicts slot 0
    state: tuple[Tensor, ...]  # tensors with which the model embeds tokens

    def widened(self, width: int) -> ForwardInputs:
        """Pad to `width` columns by repeating the last column. The other columns' results do not change."""
        if width == self.tokens.shape[1]:
            return self
        column = torch.arange(width, device=self.tokens.device).clamp(max=self.tokens.shape[1] - 1)
        columns = {name: getattr(self, name)[:, column] for name in ("tokens", "positions", "slots")}
        return self._replace(**columns, mask=None if self.mask is None else self.mask[:, column])


def run_step(model: StepModel, guidance: float, cache: PositionCache, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
    """Return features [R, T, d] and guided logits [B, T, v_image]. The cache's placement must be set."""
    embeds = model.embed(inputs.tokens, inputs.positions, inputs.state)
    if inputs.start is not None:
        embeds = torch.where((inputs.positions == 0)[..., None], inputs.start, embeds)
    mask = inputs.mask
    if mask is None and inputs.index is not None:
        mask = inputs.index <= inputs.slots[..., None]
    mask = None if mask is None else mask[:, None]
    places = inputs.last + inputs.positions + inputs.shift
    features = last_hidden_state(model.backbone, embeds, places, mask, cache, model.taps)
    hidden = features[..., : features.shape[-1] // (1 + len(model.taps))]
    return features, model.guide(model.head(hidden).float(), guidance, inputs.positions)


def last_hidden_state(
    backbone: nn.Module,
    embeds: Tensor,
    position_ids: Tensor,
    mask: Tensor | None,
    cache: PositionCache,
    taps: tuple[int, ...] = (),
) -> Tensor:
    """Return the last hidden states of input embeddings [R, T, d], followed by the hidden states after each number of
    layers in `taps`, all normalised by the same norm: [R, T, d (1 + taps)]. `mask`: [R, 1, T, S] bool.

    A Llama's layers are called directly: the checks and wrappers of its forward take a quarter of a small model's step.
    """
    if type(backbone) is LlamaModel and runs_directly(backbone.layers[0], embeds, mask):
        rotary = rotary_of(backbone.rotary_emb, embeds, position_ids)
        run = getattr(backbone, "run_layer", run_layer)  # set by `nest_layers`
        states = {}  # The states of other layers are freed, because in a prefill they are large.
        for number, layer in enumerate(backbone.layers):
            if number in taps:
                states[number] = embeds
            embeds = run(layer, embeds, mask, rotary, cache)
        last = backbone.norm(embeds)
    else:
        more = {"output_hidden_states": True} if taps else {}
        fed = {"inputs_embeds": embeds, "position_ids": position_ids, "attention_mask": mask, "past_key_values": cache}
        seen = backbone(**fed, use_cache=True, **more)
        last, states = seen.last_hidden_state, seen.hidden_states if taps else {}
    return torch.cat([last, *(backbone.norm(states[tap]) for tap in taps)], -1) if taps else last


def guide(logits: Tensor, guidance: float | Tensor) -> Tensor:
    """Apply guidance u + s (c - u) to float32 logits [R, ...], conditional rows first. s may differ by column."""
    if isinstance(guidance, float) and guidance == 1.0:
        return logits
    conditional, unconditional = logits.chunk(2)
    return torch.lerp(unconditional, conditional, guidance)


class OutputRows(NamedTuple):
    """A model's image head for a few ids of each row: rows of the output matrix [B, K, d], and of its bias [B, K], if
    any. They are gathered once and used many times."""

    before: Callable[[Tensor], Tensor]  # converts features to the input of the matrix
    guidance: float
    weight: Tensor
    bias: Tensor | None

    def logits(self, features: Tensor) -> Tensor:
        """Compute guided logits [B, T, K] of features [R, T, d], conditional rows first."""
        halves = self.before(features).unflatten(0, (-1, len(self.weight)))
        # An image's conditional and unconditional rows are adjacent, so its part of the matrix is read once.
        logits = halves.transpose(0, 1).flatten(1, 2) @ self.weight.mT
        logits = logits if self.bias is None else logits + self.bias[:, None]
        logits = logits.unflatten(1, (len(halves), -1)).transpose(0, 1).flatten(0, 1)
        return guide(logits.float(), self.guidance)
