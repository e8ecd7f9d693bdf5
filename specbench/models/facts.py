"""The facts of a model before it is loaded: what plans, memory estimates, `list` and `doctor` read. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specbench.models.transformer.size import Size
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from specbench.prompts import Prompt
    from specbench.system.downloads import Download

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number by dtype."""
EIGHT_BITS = "int8wo"
"""Value of `--dtype` for matrices in eight bits; activations and all other weights keep the model's own dtype."""
EIGHT_BITS_GAIN = "saves memory, not time"
"""What eight bits do: torchao's product writes the matrix in the model's own dtype before it is read."""
DTYPES = (*BYTES, EIGHT_BITS)
"""Values of `--dtype`."""


RANDOM = "+random"
"""Part of the name of every model with random weights, and so of all records of its runs."""
TINY_GRID, TINY_BEFORE = (4, 4), (2, 3)
"""Grid of an image at tiny scale, and the one before it in models that have a preview."""


@dataclass(frozen=True)
class ModelChoice:
    """What a user may choose about a model: its checkpoint, its size, and the prompts of released decoders.

    Attributes:
        weights: folder or hub id that takes the place of the official checkpoint.
        revision: of the hub repository.
        random: the true architecture with random weights.
        tiny: a grid of `TINY_GRID` tokens, checkpoints of any vocabulary, and with `random` a network to match.
        guidance_rows: "official", or "released" for the unconditional prompt of SJD's and GSD's released code.
        prompt_form: "official", or "released" for the words that SJD's released script writes before the prompt.
        guidance_schedule: "official" for a constant scale, or "released" for what the family's code makes of it.
        size: WIDTHxHEIGHT in pixels; the model's own if None.
        eight_bits: matrices of the layers in eight bits, see `specbench.models.eight_bits`.
    """

    weights: str | None = None
    revision: str | None = None
    random: bool = False
    tiny: bool = False
    guidance_rows: str = "official"
    prompt_form: str = "official"
    guidance_schedule: str = "official"
    size: str | None = None
    eight_bits: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "revision", "size"):
            object.__setattr__(self, name, getattr(self, name) or None)

    @property
    def released_rows(self) -> bool:
        return self.guidance_rows == "released"

    @property
    def released_guidance(self) -> bool:
        return self.guidance_schedule == "released"

    @property
    def released_prompt(self) -> bool:
        return self.prompt_form == "released"

    def name(self, model: str) -> str:
        """Name of the model in records, with an ending for each deviation from the official model."""
        held = {ending: getattr(self, field) for ending, field in _ENDINGS.items()}
        size = f"+{self.size}" if self.size else ""
        return model + size + "".join(ending for ending, present in held.items() if present)

    @classmethod
    def of_name(cls, name: str, weights: str | None = None, revision: str | None = None) -> tuple[str, ModelChoice]:
        """Name of the model, and the choice, of a name in records ("janus+random+tiny")."""
        found = set()
        while ending := next((one for one in _ENDINGS if name.endswith(one)), None):
            name = name.removesuffix(ending)
            found.add(_ENDINGS[ending])
        released = ("released_rows", "released_prompt", "released_guidance")
        forms = ("released" if one in found else "official" for one in released)
        sized = re.fullmatch(r"(.*)\+(\d+x\d+)", name)
        name, size = sized.groups() if sized else (name, None)
        return name, cls(weights, revision, "random" in found, "tiny" in found, *forms, size, "eight_bits" in found)


AS_PUBLISHED = ModelChoice()
"""The published checkpoint in full size."""
_ENDINGS = {
    RANDOM: "random",
    "+tiny": "tiny",
    "+released-rows": "released_rows",
    "+released-prompt": "released_prompt",
    "+released-guidance": "released_guidance",
    f"+{EIGHT_BITS}": "eight_bits",
}
"""Endings of a model's name in records, by what they record of a `ModelChoice`, in their order."""


class ModelFacts(Protocol):
    """A model before it is loaded; `ModelInfo` and `HubModel` implement it.

    Attributes:
        name: in records and on the command line.
        summary, licence: for people.
        hub_id: the hub repository of the weights; None for bundled ones.
        parameters: of the language model; None if not counted.
        dtype: the number format the model is meant to run in.
        resolution: image height and width in pixels.
        tokens: image tokens of one image.
        stream: stream slots of one image, forced tokens included.
        v_image: size of the image vocabulary.
        layers: of the network.
        size: weights, KV numbers and query width of a forward; None if not counted.
        table: rows of the token embedding table.
        heads: folders of bundled draft heads, by kind.
        slot_numbers: numbers held per row and stream slot to embed image tokens with.
        pixel_numbers: float32 numbers per pixel alive at once while an image is rendered.
        renders_together: whether a batch is rendered at once.
        guided: whether it has an unconditional prompt, as guidance needs it.
        ready: whether all files are on this disk.
    """

    name: str
    summary: str
    licence: str
    hub_id: str | None
    parameters: int | None
    dtype: str
    resolution: tuple[int, int]
    tokens: int
    stream: int
    v_image: int
    layers: int
    size: Size | None
    table: int
    heads: Mapping[str, Path]
    slot_numbers: int
    pixel_numbers: int
    renders_together: bool
    guided: bool
    ready: bool

    @property
    def source_facts(self) -> dict[str, object] | None:
        """Weights, revision and layout of a checkpoint that is not the official one; None for the official one."""
        return None

    @property
    def commits(self) -> dict[str, str]:
        """Commits of the hub repositories that its files come from, by repository; none for bundled models."""
        return {}

    def configured(self, choice: ModelChoice, download: bool = False) -> ModelFacts:
        """This model as chosen; a SpecbenchError if it cannot be. `download` permits fetching the small files that tell
        the size of other weights.
        """
        ...

    @property
    def size_note(self) -> str | None:
        """Why this model's size may not be that of its weights, in words; None where it is."""
        return None

    def as_stored(self, download: bool = False) -> ModelFacts:
        """This model with the size of the checkpoint on this disk, if that is not the official one."""
        return self

    def sampling(self) -> Sampling:
        """The official sampling settings."""
        ...

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise a SpecbenchError for the first prompt the model cannot read."""
        ...

    def captions_cut(self, captions: Iterable[str]) -> tuple[int | None, int] | None:
        """Count the captions longer than what it reads (None before its files are here), and give that number of
        tokens; None where it reads all of each."""
        return None

    def fixed_bytes(self, dtype: str | None = None) -> int:
        """Bytes of weights, image decoder and text encoder in memory."""
        ...

    @property
    def file_digests(self) -> dict[str, str]:
        """SHA-256 of every file, by folder and name; none for bundled models."""
        return {}

    def downloads(self) -> list[Download]:
        """What of its files this disk lacks and the hub has; a SpecbenchError if something cannot be had."""
        return []

    def require_weights(self) -> None:
        """Raise a SpecbenchError with exit code 5 that names a missing file which may not be downloaded."""
        ...

    def files(self) -> tuple[Path, ...]:
        """The files on this disk; a SpecbenchError with exit code 5 where one is missing."""
        ...

    def weights_sha256(self) -> str:
        """Digest of all files, equal to the loaded model's."""
        ...

    def step_bytes(self, dtype: str | None = None) -> int | None:
        """Weight bytes that one forward reads, however wide its window; None if not counted."""
        return self.size and self.size.read(1, 1, 0, BYTES[dtype or self.dtype])

    def kv_bytes(self, dtype: str | None = None) -> int | None:
        """KV cache bytes of one token of one row (two rows per image with guidance); None if not counted."""
        return self.size and self.size.kv * BYTES[dtype or self.dtype]
