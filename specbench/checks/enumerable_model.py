"""Models small enough to enumerate every image: the ground truth that decoders are audited against.

An `EnumerableModel` draws each token from a random table row chosen by the complete prefix, so a decoder that
conditions on anything wrong, or reuses noise it should not, changes the joint distribution. `joint` gives the
exact one in float64 by walking every prefix, sharing no code with the decode loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from specbench.models.draft_head import EagleHead, new_head
from specbench.models.interface import DraftPrompt, TokenLayout, Tree
from specbench.specs.run_spec import Sampling


class EnumerableModel:
    """An `ImageModel` whose conditionals p(x_i | x_<i) are arbitrary tables, one set per prompt text.

    Args:
        layout: grammar of the stream; forced ids count as ordinary context.
        prompts: texts the model knows; each has its own independent table.
        sharpness: standard deviation of the random logits.
        seed: of the tables and of the codebook.
    """

    name = "enumerable"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, layout: TokenLayout, prompts: Sequence[str] = ("",), sharpness: float = 1.5, seed: int = 0):
        self.layout = layout
        self.prompts = tuple(prompts)
        self.offsets = [sum(layout.vocab**j for j in range(i)) for i in range(layout.length)]
        rows = self.offsets[-1] + layout.vocab ** (layout.length - 1)
        draw = torch.Generator().manual_seed(seed)
        shape = (len(self.prompts), rows, layout.v_image)
        self.conditional = sharpness * torch.randn(shape, generator=draw)
        self.unconditional = sharpness * torch.randn(shape, generator=draw)
        self.codebook = 0.5 * torch.randn(layout.v_image, 2, generator=draw)
        digest = hashlib.sha256(self.conditional.numpy().tobytes() + self.unconditional.numpy().tobytes())
        self.weights_sha256 = digest.hexdigest()

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Prompt texts to table numbers [B]."""
        number = {text: index for index, text in enumerate(self.prompts)}
        return torch.tensor([number[text] for text in prompts])

    feature_size = 8
    """Features are the logits themselves, padded: enough for a draft head to be audited with."""

    def own_head(self) -> EagleHead:
        """An untrained draft head."""
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=self.layout.vocab, num_hidden_layers=1, pad_token_id=None, **sizes)
        draw = torch.Generator().manual_seed(0)
        return new_head(config, torch.randn(self.layout.vocab, 8, generator=draw), seed=0)

    def table_ids(self, tokens: Tensor) -> Tensor:
        return tokens

    def begin(self, prefix: Tensor, guidance: float, columns: int) -> EnumerableSession:
        return EnumerableSession(self, prefix, guidance, columns)

    def render(self, image_tokens: Tensor) -> Tensor:
        """One grey pixel per token."""
        grey = image_tokens * 255 // max(self.layout.v_image - 1, 1)
        grid = grey.to(torch.uint8).view(-1, 1, self.layout.height, self.layout.width)
        return grid.expand(-1, 3, -1, -1)


class EnumerableSession:
    """The tokens each row has consumed, by stream position: the cache of a model without attention.

    A prefix is addressed by its code, the sum of token_j * vocab**j over its slots j.
    """

    def __init__(self, model: EnumerableModel, prefix: Tensor, guidance: float, columns: int):
        self.model = model
        self.prompt = prefix
        self.guidance = guidance
        self.columns = columns
        layout = model.layout
        self.consumed = torch.zeros(len(prefix), layout.length, dtype=torch.long)
        self.weights = torch.tensor([layout.vocab**j for j in range(layout.length)])
        self.offsets = torch.tensor(model.offsets)
        self.aside: Tensor | None = None
        self.features: Tensor | None = None

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        if tokens.shape != positions.shape or tokens.shape[1] > self.columns:
            raise ValueError(f"forward of {tuple(tokens.shape)} tokens, at most {self.columns} columns")
        tokens, positions = tokens.long(), positions.long()
        last = self.model.layout.length - 1
        if tree is None:
            self._store(tokens, positions)
            codes = self._prefix_codes().gather(1, positions.clamp(max=last))
        else:
            self.aside = tokens
            trunk = torch.tensor(tree.in_trunk)
            self._store(tokens[:, trunk], positions[:, trunk])
            codes = self._tree_codes(tokens, positions, tree.ancestors)
        rows = self.offsets[positions.clamp(max=last)] + codes
        return self._logits(torch.where(positions > last, 0, rows))

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        """Slots that were not fed count as token 0, so the tables are defined for streams with holes."""
        last = self.model.layout.length - 1
        self._store(tokens, torch.where(aside, 0, positions))
        before = (positions - 1).clamp(0, last)
        weight = self.weights[before]
        missing = torch.where(aside, tokens - self.consumed.gather(1, before), 0) * weight
        rows = positions.clamp(max=last)
        codes = self._prefix_codes().gather(1, rows) + missing
        return self._logits(torch.where(positions > last, 0, self.offsets[rows] + codes))

    def draft_prompt(self) -> DraftPrompt:
        rows = len(self.prompt) * (1 if self.guidance == 1 else 2)
        return DraftPrompt(torch.ones(rows, dtype=torch.long), None, None)

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        self._store(self.aside.gather(1, columns.long()), positions.long())

    def refill(self, rows: Tensor, prefix: Tensor) -> None:
        self.prompt[rows], self.consumed[rows] = prefix, 0

    def _store(self, tokens: Tensor, positions: Tensor) -> None:
        """Put the token consumed at `positions` (the one at the slot before) into its place."""
        row, column = torch.nonzero((positions > 0) & (positions <= self.consumed.shape[1]), as_tuple=True)
        self.consumed[row, positions[row, column] - 1] = tokens[row, column]

    def _prefix_codes(self) -> Tensor:
        """[B, N] code of the stored tokens before each slot."""
        terms = self.consumed * self.weights
        return terms.cumsum(1) - terms

    def _tree_codes(self, tokens: Tensor, positions: Tensor, ancestors: Tensor) -> Tensor:
        """[B, T] code of the tokens stored before column 0's own, plus those of each column's ancestors."""
        stored = self._prefix_codes().gather(1, (positions[:, :1] - 1).clamp(min=0))
        consumed = positions - 1
        within = (consumed >= 0) & (consumed < len(self.weights))
        terms = torch.where(within, tokens * self.weights[consumed.clamp(0, len(self.weights) - 1)], 0)
        return stored + terms @ ancestors.long().T

    def _logits(self, rows: Tensor) -> Tensor:
        tables = [self.model.conditional] + [self.model.unconditional] * (self.guidance != 1)
        found = torch.cat([table[self.prompt[:, None], rows] for table in tables])
        self.features = torch.nn.functional.pad(found, (0, self.model.feature_size - found.shape[-1]))
        return self.logits(self.features)

    def logits(self, features: Tensor) -> Tensor:
        features = features[..., : self.model.layout.v_image]
        if self.guidance == 1:
            return features
        conditional, unconditional = features.chunk(2)
        return unconditional + self.guidance * (conditional - unconditional)


def joint(model: EnumerableModel, sampling: Sampling, prompt: str = "") -> np.ndarray:
    """Exact probability of every image under autoregressive sampling, float64 [v_image ** free slots].

    The image (x_0, .., x_m) of free tokens in stream order has index x_0 * V**m + .. + x_m, see
    `image_index`.
    """
    layout, number = model.layout, model.prompts.index(prompt)
    probabilities = []

    def walk(slot: int, code: int, mass: float) -> None:
        if slot == layout.length:
            probabilities.append(mass)
            return
        forced = layout.forced[slot]
        if forced >= 0:
            walk(slot + 1, code + forced * layout.vocab**slot, mass)
            return
        row = model.offsets[slot] + code
        conditional = model.conditional[number, row].numpy().astype(np.float64)
        unconditional = model.unconditional[number, row].numpy().astype(np.float64)
        p = processed(unconditional + sampling.guidance * (conditional - unconditional), sampling)
        for token in range(layout.v_image):
            walk(slot + 1, code + token * layout.vocab**slot, mass * p[token])

    walk(0, 0, 1.0)
    return np.array(probabilities)


def processed(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """One slot's target distribution in float64: temperature, then top-k with ties kept, then top-p."""
    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-sampling.top_k], scaled, -np.inf)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if sampling.top_p < 1:
        mass, kept = 0.0, np.zeros_like(p)
        for token in np.argsort(-p, kind="stable"):
            if mass >= sampling.top_p:
                break
            kept[token] = p[token]
            mass += p[token]
        p = kept / kept.sum()
    return p


def image_index(image_tokens: np.ndarray, v_image: int) -> np.ndarray:
    """Position in `joint` of each image [.., free slots]."""
    return image_tokens @ v_image ** np.arange(image_tokens.shape[-1] - 1, -1, -1)
