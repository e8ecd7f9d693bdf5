"""Models small enough to enumerate every image: the ground truth that decoders are audited against.

An `EnumerableModel` draws each token from a random table row chosen by the complete prefix, so that a decoder that
conditions on a wrong prefix changes the joint distribution. `joint` computes the exact joint distribution in float64
and shares no code with the decode loop. An `EnumerableTransformer` adds a real KV cache, masks and positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import LlamaConfig, LlamaModel

from specbench.decoding.sampling import FILTER_RULES
from specbench.models.draft_head import EagleHead, new_head
from specbench.models.interface import DraftPrompt, TokenLayout, Tree
from specbench.models.transformer.model import Prefix, TransformerModel
from specbench.models.vertical_head import VerticalHead, new_vertical_head
from specbench.specs.run_spec import Sampling
from specbench.system.torch_state import PinnedTorch

_NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Settings of a Llama with image tokens only. The default special ids are too large for such a small vocabulary."""
_SLOT_ROWS = 65_537
"""Maximum number of table rows of a slot (a prime). If there are more prefixes, a polynomial hash selects the row."""
_WIDTH = 16
_SIZES = {"hidden_size": _WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
_PROMPT_IDS = 8


class EnumerableModel:
    """An `ImageModel` whose conditionals p(x_i | x_<i) are arbitrary tables, one set per prompt text.

    Args:
        layout: grammar of the stream; forced ids count as ordinary context.
        prompts: texts that the model knows; each has an independent table.
        sharpness: standard deviation of the random logits.
        seed: seed of the tables and of the codebook.
        grain: logits are rounded to multiples of this value, to make ties at top-k; 0: not rounded.
        shared: standard deviation of the part of the logits of a slot that does not depend on the prefix.
    """

    name = "enumerable"
    device = torch.device("cpu")
    dtype = torch.float32
    feature_size = 8  # Features are the padded logits, which suffice to audit a draft head

    def __init__(
        self,
        layout: TokenLayout,
        prompts: Sequence[str] = ("",),
        sharpness: float = 1.5,
        seed: int = 0,
        grain: float = 0.0,
        shared: float = 0.0,
    ):
        if layout.vocab**layout.length >= 2**53:
            raise ValueError(f"{layout.length} slots of {layout.vocab} tokens: too many prefixes")
        if layout.v_image > self.feature_size:
            raise ValueError(f"{layout.v_image} image tokens: features hold {self.feature_size}")
        self.layout = layout
        self.prompts = tuple(prompts)
        self.slot_rows = [min(layout.vocab**slot, _SLOT_ROWS) for slot in range(layout.length)]
        self.offsets = [sum(self.slot_rows[:slot]) for slot in range(layout.length)]
        draw = torch.Generator().manual_seed(seed)
        shape = (len(self.prompts), sum(self.slot_rows), layout.v_image)
        self.conditional = sharpness * torch.randn(shape, generator=draw)
        self.unconditional = sharpness * torch.randn(shape, generator=draw)
        if shared:
            for table in (self.conditional, self.unconditional):
                common = shared * torch.randn(len(self.prompts), layout.length, layout.v_image, generator=draw)
                table += common.repeat_interleave(torch.tensor(self.slot_rows), 1)
        if grain:
            for table in (self.conditional, self.unconditional):
                table.div_(grain).round_().mul_(grain)
        self.codebook = 0.5 * torch.randn(layout.v_image, 2, generator=draw)
        digest = hashlib.sha256(self.conditional.numpy().tobytes() + self.unconditional.numpy().tobytes())
        self.weights_sha256 = digest.hexdigest()

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Convert prompt texts to table numbers [B]."""
        number = {text: index for index, text in enumerate(self.prompts)}
        return torch.tensor([number[text] for text in prompts])

    def own_head(self) -> EagleHead:
        """An untrained draft head."""
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=self.layout.vocab, num_hidden_layers=1, **_NO_SPECIAL_TOKENS, **sizes)
        draw = torch.Generator().manual_seed(0)
        return new_head(config, torch.randn(self.layout.vocab, 8, generator=draw), seed=0)

    def own_eagle3_head(self) -> EagleHead:
        """An untrained EAGLE-3 head that reads only the features."""
        return new_head(self.own_head().config, self.own_head().embed_tokens.weight, seed=1, taps=())

    def tapped(self, taps: tuple[int, ...]) -> EnumerableModel:
        return self

    def own_vertical_head(self) -> VerticalHead:
        """An untrained vertical head."""
        return _sharp(new_vertical_head(self.feature_size, 16, seed=2))

    def token_table(self) -> Tensor:
        """Random token embeddings."""
        draw = torch.Generator().manual_seed(1)
        return torch.randn(self.layout.vocab, self.feature_size, generator=draw)

    def row(self, slot: int, code: int | np.ndarray) -> int | np.ndarray:
        """Table row of the prefix before `slot` whose `code` is sum_j token_j * vocab**j."""
        return self.offsets[slot] + code % self.slot_rows[slot]

    def guided(self, prompt: str, slot: int, codes: int | np.ndarray, guidance: float) -> np.ndarray:
        """Guided logits [n, V] of the prefixes `codes` [n] before `slot`, float64."""
        number, rows = self.prompts.index(prompt), self.row(slot, codes)
        conditional, unconditional = (
            table[number, rows].numpy().astype(np.float64) for table in (self.conditional, self.unconditional)
        )
        return unconditional + guidance * (conditional - unconditional)

    def adopt_head(self, head: EagleHead) -> EagleHead:
        return head

    def table_ids(self, tokens: Tensor) -> Tensor:
        return tokens

    def begin(self, prefix: Tensor, guidance: float, columns: int) -> EnumerableSession:
        return EnumerableSession(self, prefix, guidance, columns)

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return _grey(image_tokens, self.layout)


class EnumerableSession:
    """Consumed tokens of each row by stream position: the cache of a model without attention.

    The code of a prefix is the sum of token_j * vocab**j over its slots j.
    """

    def __init__(self, model: EnumerableModel, prefix: Tensor, guidance: float, columns: int):
        self.model = model
        self.prompt = prefix
        self.guidance = guidance
        self.columns = columns
        layout = model.layout
        self._length = layout.length
        # Tokens that are not kept are written to an extra slot at the end.
        self.consumed = torch.zeros(len(prefix), layout.length + 1, dtype=torch.long)
        self.weights = torch.tensor([layout.vocab**j for j in range(layout.length)])
        self.offsets, self.slot_rows = torch.tensor(model.offsets), torch.tensor(model.slot_rows)
        self.branches = self.features = torch.empty(0)  # results of the latest forward

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        if tokens.shape != positions.shape or tokens.shape[1] > self.columns:
            raise ValueError(f"forward of {tuple(tokens.shape)} tokens, at most {self.columns} columns")
        tokens, positions = tokens.long(), positions.long()
        if tree is None:
            self._store(tokens, positions)
            codes = self._prefix_codes().gather(1, positions.clamp(max=self._length - 1))
        else:
            self.branches = tokens
            trunk = torch.tensor(tree.in_trunk)
            self._store(tokens[:, trunk], positions[:, trunk])
            codes = self._tree_codes(tokens, positions, tree.ancestors)
        return self._logits(codes, positions)

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        """Slots that were not fed count as token 0, so that tables are defined for streams with gaps."""
        last = self._length - 1
        self._store(tokens, torch.where(aside, 0, positions))
        if fed.dim() == 3:
            return self._logits(self._visible_codes(tokens, positions, fed, aside), positions)
        before = (positions - 1).clamp(0, last)
        missing = torch.where(aside, tokens - self.consumed.gather(1, before), 0) * self.weights[before]
        return self._logits(self._prefix_codes().gather(1, positions.clamp(max=last)) + missing, positions)

    def draft_prompt(self) -> DraftPrompt:
        rows = len(self.prompt) * (1 if self.guidance == 1 else 2)
        return DraftPrompt(torch.ones(rows, dtype=torch.long), None, None)

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        self._store(self.branches.gather(1, columns.long()), positions.long())

    def refill(self, rows: Tensor, prefix: Tensor) -> None:
        self.prompt[rows], self.consumed[rows] = prefix, 0

    def _store(self, tokens: Tensor, positions: Tensor) -> None:
        """Store the consumed tokens: a column at `positions` consumes the token of the previous slot."""
        stays = (positions > 0) & (positions <= self._length)
        self.consumed.scatter_(1, torch.where(stays, positions - 1, self._length), tokens)

    def _prefix_codes(self) -> Tensor:
        """[B, N] code of the stored tokens before each slot."""
        terms = self.consumed[:, : self._length] * self.weights
        return terms.cumsum(1) - terms

    def _visible_codes(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        """[B, T] code of the tokens that each column may attend to; for columns `aside`, also of their `tokens`."""
        slot = torch.arange(self._length)
        before = positions[..., None] - 1
        seen = fed[..., 1:] & (slot < before) | ((slot == before) & ~aside[..., None])
        terms = (torch.where(seen, self.consumed[:, None, : self._length], 0) * self.weights).sum(-1)
        return terms + torch.where(aside, tokens * self.weights[(positions - 1).clamp(0, self._length - 1)], 0)

    def _tree_codes(self, tokens: Tensor, positions: Tensor, ancestors: Tensor) -> Tensor:
        """[B, T] code of the tokens stored before column 0 and of the tokens that each column's ancestors consume."""
        stored = self._prefix_codes().gather(1, (positions[:, :1] - 1).clamp(min=0))
        consumed = positions - 1
        within = (consumed >= 0) & (consumed < self._length)
        terms = torch.where(within, tokens * self.weights[consumed.clamp(0, self._length - 1)], 0)
        # Codes are below 2**53, so the product of float64, which is faster, is exact.
        return stored + (terms.double() @ ancestors.double().T).long()

    def reduced_head(self, ids: Tensor) -> _ReducedTable:
        return _ReducedTable(self, ids)

    def _logits(self, codes: Tensor, positions: Tensor) -> Tensor:
        """Guided logits of the prefixes `codes` [B, T]. Logits after the end of the stream are never read."""
        slots = positions.clamp(max=self._length - 1)
        rows = torch.where(positions < self._length, self.offsets[slots] + codes % self.slot_rows[slots], 0)
        tables = [self.model.conditional] + [self.model.unconditional] * (self.guidance != 1)
        features = torch.cat([table[self.prompt[:, None], rows] for table in tables])
        self.features = torch.nn.functional.pad(features, (0, self.model.feature_size - features.shape[-1]))
        return self.logits(self.features)

    def logits(self, features: Tensor) -> Tensor:
        features = features[..., : self.model.layout.v_image]
        if self.guidance == 1:
            return features
        conditional, unconditional = features.chunk(2)
        return unconditional + self.guidance * (conditional - unconditional)


class _ReducedTable(NamedTuple):
    """Logits of a session for selected ids [B, K]."""

    session: EnumerableSession
    ids: Tensor

    def logits(self, features: Tensor) -> Tensor:
        every = self.session.logits(features)
        return every.gather(2, self.ids[:, None].expand(-1, every.shape[1], -1))


class EnumerableTransformer(TransformerModel):
    """Two-layer Llama with random weights, with the cache and sessions of the real families. The n-th prompt has n + 2
    elements and unconditional rows have another length, so that rows of a batch use different slots of the cache."""

    name = "enumerable-transformer"
    codebook: Tensor

    def __init__(self, layout: TokenLayout, prompts: Sequence[str] = ("",), seed: int = 0):
        self.layout = layout
        self.prompts = tuple(prompts)
        draw = torch.Generator().manual_seed(seed)
        vocab = layout.vocab + _PROMPT_IDS * len(prompts)
        config = LlamaConfig(vocab_size=vocab, num_hidden_layers=2, **_NO_SPECIAL_TOKENS, **_SIZES)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        for name, weight in self.backbone.named_parameters():
            if "norm" not in name:
                # Weights so large that attention is sharp and logits depend on every earlier token.
                weight.copy_(torch.randn(weight.shape, generator=draw) * (1.0 if "embed" in name else 0.5))
        self.codebook = 0.5 * torch.randn(layout.v_image, 2, generator=draw)
        self.matrix = 0.4 * torch.randn(_WIDTH, layout.v_image, generator=draw)
        self.weights_sha256 = hashlib.sha256(self.matrix.numpy().tobytes()).hexdigest()

    def move(self, device: str) -> None:
        """Move the weights to a device; `joint` is computed on a CPU only."""
        self.backbone.to(device)
        self.codebook, self.matrix = self.codebook.to(device), self.matrix.to(device)

    def encode(self, prompts: Sequence[str]) -> Prefix:
        all_ids = [self._prompt(number).to(self.device) for number in range(len(self.prompts))]
        all_ids.append(torch.tensor([self.layout.vocab], device=self.device))
        embedded = [self.backbone.embed_tokens(ids) for ids in all_ids]
        rows = [self.prompts.index(text) for text in prompts] + [-1] * len(prompts)
        embeds = [embedded[row] for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(all_ids, batch_first=True)[rows, : max(map(len, embeds))]
        return Prefix(embeds, ids=ids)

    def _prompt(self, number: int) -> Tensor:
        first = self.layout.vocab + _PROMPT_IDS * number
        return first + torch.arange(number + 2) % _PROMPT_IDS

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.backbone.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.matrix

    def output_matrix(self) -> tuple[Tensor, None]:
        return self.matrix.T, None

    def own_eagle3_head(self) -> EagleHead:
        """An untrained EAGLE-3 head that also reads the first layer."""
        return self.own_head((1,))

    def own_head(self, taps: tuple[int, ...] | None = None) -> EagleHead:
        """An untrained draft head whose drafts depend on its cache."""
        sizes = {"num_hidden_layers": 1, **_NO_SPECIAL_TOKENS, **_SIZES}
        vocab = self.backbone.config.vocab_size
        head = new_head(LlamaConfig(vocab_size=vocab, **sizes), self.backbone.embed_tokens.weight, 1, taps)
        for name, weight in head.named_parameters():
            if "embed" not in name:
                weight.data.mul_(8)
        return head

    def own_vertical_head(self) -> VerticalHead:
        """An untrained vertical head."""
        return _sharp(new_vertical_head(_WIDTH, 16, seed=2))

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return _grey(image_tokens, self.layout)

    def guided(self, prompt: str, tokens: Tensor, guidance: float) -> np.ndarray:
        """Guided logits [n, N + 1, V], float64, of every slot of the prefixes `tokens` [n, N] and of the next slot,
        computed without a cache."""
        embedded, guided = self.backbone.embed_tokens(tokens), []
        for start in self.encode([prompt]).embeds:
            inputs = torch.cat([start.expand(len(tokens), -1, -1), embedded], 1)
            hidden = self.backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, len(start) - 1 :]
            guided.append(self.head(hidden).double().numpy())
        conditional, unconditional = guided
        return unconditional + guidance * (conditional - unconditional)

    @PinnedTorch()
    def joint(self, sampling: Sampling, prompt: str) -> np.ndarray:
        """Exact probability of every image, like the function `joint`, computed without a cache."""

        def logits(slot: int, prefixes: np.ndarray) -> np.ndarray:
            return self.guided(prompt, torch.from_numpy(prefixes), sampling.guidance)[:, -1]

        return _enumerate_images(self.layout, sampling, logits)


def joint(model: EnumerableModel, sampling: Sampling, prompt: str = "") -> np.ndarray:
    """Exact probability of every image under autoregressive sampling, float64 [v_image ** free slots].

    The image (x_0, .., x_m) of free tokens in stream order has index x_0 * V**m + .. + x_m, see `image_index`.
    """

    def logits(slot: int, prefixes: np.ndarray) -> np.ndarray:
        codes = prefixes @ np.array([model.layout.vocab**j for j in range(slot)], dtype=np.int64)
        return model.guided(prompt, slot, codes, sampling.guidance)

    return _enumerate_images(model.layout, sampling, logits)


def _enumerate_images(
    layout: TokenLayout, sampling: Sampling, logits: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """`joint` of any model. `logits(slot, prefixes)`: guided logits [n, V] of `slot` after prefixes [n, slot]."""
    mass = np.ones(1)
    prefixes: np.ndarray = np.zeros((1, 0), dtype=np.int64)
    for slot, forced in enumerate(layout.forced):
        tokens = np.array([forced]) if forced >= 0 else np.arange(layout.v_image)
        if forced < 0:
            low, high = layout.bounds[slot]
            allowed = np.where((tokens >= low) & (tokens < high), 0.0, -np.inf)
            mass = (mass[:, None] * processed(logits(slot, prefixes) + allowed, sampling)).ravel()
        repeated = np.repeat(prefixes, len(tokens), 0)
        prefixes = np.concatenate([repeated, np.tile(tokens, len(prefixes))[:, None]], 1)
    return mass


def processed(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Target distributions [.., V] in float64: temperature and filters in the order of `Sampling`; ties are kept."""
    scaled = logits if sampling.entropy_scale else logits / sampling.temperature
    if sampling.top_k:
        kth = np.sort(scaled)[..., -min(sampling.top_k, scaled.shape[-1])]
        scaled = np.where(scaled >= kth[..., None], scaled, -np.inf)
    if sampling.top_n_sigma:
        deviation = np.ma.masked_invalid(scaled).std(-1, keepdims=True).filled(0.0)
        scaled = np.where(scaled >= scaled.max(-1, keepdims=True) - sampling.top_n_sigma * deviation, scaled, -np.inf)
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    if sampling.entropy_scale:
        entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1, keepdims=True)
        scaled = scaled / (sampling.temperature * (2.5 * np.exp(-entropy / sampling.entropy_scale) + 0.6))
        p = np.exp(scaled - scaled.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
    if sampling.top_p < 1:
        ranked = -np.sort(-p, axis=-1)
        # A token is kept if the total probability of the tokens of higher rank is below top-p.
        last = (np.cumsum(ranked, -1) - ranked < sampling.top_p).sum(-1, keepdims=True) - 1
        p = np.where(p >= np.take_along_axis(ranked, last, -1), p, 0.0)
        p /= p.sum(-1, keepdims=True)
    if sampling.min_p:
        p = np.where(p >= sampling.min_p * p.max(-1, keepdims=True), p, 0.0)
        p /= p.sum(-1, keepdims=True)
    for name, drops in FILTER_RULES.items():  # filters without a formula above, in the order of the decoders
        if name in sampling.filters and name not in ("top_k", "top_n_sigma", "top_p", "min_p"):
            with np.errstate(divide="ignore"):
                dropped = drops(torch.from_numpy(np.log(p)), getattr(sampling, name))
            p = np.where(dropped, 0.0, p)
            p /= p.sum(-1, keepdims=True)
    return p


def image_index(image_tokens: np.ndarray, v_image: int) -> np.ndarray:
    """Position in `joint` of each image [.., free slots]."""
    return image_tokens @ v_image ** np.arange(image_tokens.shape[-1] - 1, -1, -1)


def _sharp(head: Module) -> Module:
    """Change an untrained head so that its drafts depend on all of its inputs."""
    for weight in head.parameters():
        weight.data.mul_(3)
    return head


def _grey(image_tokens: Tensor, layout: TokenLayout) -> Tensor:
    """Return pictures with a grey pixel for each token of the last grid."""
    grey = image_tokens[:, -layout.height * layout.width :] * 255 // max(layout.v_image - 1, 1)
    return grey.to(torch.uint8).view(-1, 1, layout.height, layout.width).expand(-1, 3, -1, -1)
