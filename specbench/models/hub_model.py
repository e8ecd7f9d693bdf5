"""A model whose weights are published elsewhere: its facts, its files, and how it is loaded. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles, Source, fetch, find, is_folder
from specbench.models.transformer.size import Size
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from specbench.prompts import Prompt

RANDOM = "+random"
"""In the name of every model with random weights, hence in every record of its runs."""
TINY_GRID = (4, 4)
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class HubModel:
    """A model whose weights are published elsewhere.

    Attributes:
        target: "module:function" called with a `specbench.models.families.base.LoadRequest`.
        source: the language model's files.
        companions: what it needs besides: tokenizer, text encoder, image decoder.
        patch: pixels per image token, each way.
        grid: image tokens, height and width.
        row_ends: whether the grammar closes every row with a forced token.
        v_image: image vocabulary.
        defaults: the official sampling.
        parameters: of the language model.
        step_parameters: of those, what one forward reads: no input embedding, image rows of the head only.
        layers: of the network.
        kv_numbers: numbers cached per token and row.
        attention_numbers: width of the queries, summed over layers.
        other_bytes: image decoder and text encoder in memory.
        table: rows of the token table, which draft heads have a copy of.
        pixel_numbers: float32 numbers per pixel alive at once while an image is decoded, one after the other; 0 where
            the decoder cannot be looked into.
        weights: folder or hub id that takes the place of `source`.
        revision: of the hub repository.
        random: the true architecture with random weights.
        tiny: a grid of 4 x 4 tokens, checkpoints of any vocabulary, and with `random` a network to match.
    """

    name: str
    summary: str
    target: str
    source: Source
    grid: tuple[int, int]
    v_image: int
    defaults: Sampling
    parameters: int
    step_parameters: int
    layers: int
    kv_numbers: int
    attention_numbers: int
    other_bytes: int
    table: int
    pixel_numbers: int
    companions: tuple[Source, ...] = ()
    patch: int = 16
    row_ends: bool = False
    dtype: str = "bfloat16"
    weights: str | None = None
    revision: str | None = None
    random: bool = False
    tiny: bool = False

    def configured(
        self, weights: str | None = None, revision: str | None = None, random: bool = False, tiny: bool = False
    ) -> HubModel:
        """This model with other weights. What is not the official model at its official size says so in its name."""
        if random and (weights or revision):
            raise SpecbenchError("--random-weights: cannot go together with --weights or --revision")
        if revision and weights and is_folder(weights):
            raise SpecbenchError(f"--revision {revision}: --weights {weights} is a folder, not a hub repository")
        name = self.name + RANDOM * random + "+tiny" * tiny
        changes = {"weights": weights or None, "revision": revision or None, "random": random, "tiny": tiny}
        return replace(self, name=name, grid=TINY_GRID if tiny else self.grid, **changes)

    head = None
    """No family brings a draft head along."""
    slot_numbers = 0
    """Families embed image tokens by tables alone."""
    renders_together = False

    @property
    def licence(self) -> str:
        return self.source.licence

    @property
    def hub_id(self) -> str:
        return self.source.repo

    @property
    def resolution(self) -> tuple[int, int]:
        """Image height and width in pixels."""
        return self.grid[0] * self.patch, self.grid[1] * self.patch

    @property
    def tokens(self) -> int:
        """Image tokens of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def stream(self) -> int:
        """Stream slots of one image, forced tokens included."""
        return self.grid[0] * (self.grid[1] + self.row_ends)

    def require_weights(self) -> None:
        """Raise a SpecbenchError with exit code 5 for files that are not on this disk and may not be downloaded."""
        from huggingface_hub import constants

        try:
            self.find()
        except SpecbenchError:
            if constants.HF_HUB_OFFLINE or (self.weights and is_folder(self.weights)):
                raise

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Any text will do."""

    def sampling(self) -> Sampling:
        """The sampling the model is meant to be used with."""
        return self.defaults

    @property
    def size(self) -> Size | None:
        """What a forward reads and computes; None at tiny scale, whose sizes vary."""
        return None if self.tiny else Size(self.step_parameters, self.kv_numbers, self.attention_numbers)

    def step_bytes(self, dtype: str | None = None) -> int | None:
        """Weight bytes that one forward reads, however wide its window; None at tiny scale, whose sizes vary."""
        return None if self.tiny else self.step_parameters * BYTES[dtype or self.dtype]

    def kv_bytes(self, dtype: str | None = None) -> int | None:
        """Cache bytes of one token of one row, None at tiny scale; guidance takes two rows per image."""
        return None if self.tiny else self.kv_numbers * BYTES[dtype or self.dtype]

    def memory_bytes(self, dtype: str | None = None, batch: int = 1) -> int | None:
        """Weights, cache with guidance, image decoder and text encoder while decoding; None at tiny scale."""
        if self.tiny:
            return None
        return self.fixed_bytes(dtype) + 2 * batch * (self.stream + 256) * self.kv_bytes(dtype)

    def fixed_bytes(self, dtype: str | None = None) -> int:
        """Weights, image decoder and text encoder in memory."""
        return self.parameters * BYTES[dtype or self.dtype] + self.other_bytes

    @property
    def ready(self) -> bool:
        """Whether all its files are on this disk."""
        try:
            self.find()
        except SpecbenchError:
            return False
        return True

    def find(self) -> tuple[CheckpointFiles, ...]:
        """Its files on this disk, the language model's first; none for random weights. Nothing is downloaded.

        Raises:
            SpecbenchError: exit code 5, naming what is missing.
        """
        return self._each(find)

    def fetch(self) -> tuple[CheckpointFiles, ...]:
        """Its files, downloaded where needed."""
        return self._each(fetch)

    def _each(self, get) -> tuple[CheckpointFiles, ...]:
        if self.random:
            return ()
        main = get(self.source, self.weights, self.revision)
        return (main, *(get(source, self.weights, main=False) for source in self.companions))

    def files(self) -> tuple[Path, ...]:
        """Its files on this disk; raises what `find` raises."""
        return tuple(path for found in self.find() for path in found.paths)

    def weights_sha256(self) -> str:
        """Digest of all its files, the same that the loaded model carries."""
        if self.random:
            return hashlib.sha256(self.name.encode()).hexdigest()
        return digest(self.find())


def digest(found: tuple[CheckpointFiles, ...]) -> str:
    """One digest over all files of a model."""
    return hashlib.sha256("".join(one.sha256() for one in found).encode()).hexdigest()
