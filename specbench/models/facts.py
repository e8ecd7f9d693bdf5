"""Facts of a model before it is loaded, for plans, memory estimates, `list` and `doctor`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.network_sizes import NetworkSize, Size
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from specbench.prompts import Prompt
    from specbench.system.downloads import Download

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # Bytes of one number by dtype
EIGHT_BITS = "int8wo"
"""Value of `--dtype` that stores matrices in eight bits; activations and other weights keep the model's dtype."""
EIGHT_BITS_GAIN = "saves memory, not time"
"""Effect of eight bits. No time is saved, because torchao's product first writes the matrix in the model's dtype."""
DTYPES = (*BYTES, EIGHT_BITS)  # Values of `--dtype`
Form = Literal["official", "released"]
"""Form of a model's prompts or guidance: from its authors, or from the released code of a decoder."""
Scale = Literal["full", "tiny"]
SCALES: tuple[Scale, ...] = ("full", "tiny")

RANDOM = "+random"  # Part of the name of a model with random weights, so that all records of its runs show it
TINY_GRID, TINY_BEFORE = (4, 4), (2, 3)
"""Grid of an image at tiny scale, and the preceding grid in models with a preview."""


def require_torchao() -> None:
    """Raise a SpecbenchError with exit code 5 if torchao is not installed."""
    if find_spec("torchao") is None:
        what = "--dtype int8wo needs torchao, which is not installed"
        raise SpecbenchError(what, "pip install 'torchao>=0.18'", MISSING_PREREQUISITE)


@dataclass(frozen=True)
class ModelChoice:
    """User's choices for a model: checkpoint, size, eight bits, and forms of prompts and guidance."""

    weights: str | None = None  # folder or hub id that replaces the official checkpoint
    revision: str | None = None  # revision of the hub repository
    _: KW_ONLY
    random: bool = False  # the true architecture with random weights
    # decode a grid of `TINY_GRID` tokens, accept any vocabulary size; with `random`, use a small network
    tiny: bool = False
    # "official", or "released" for the unconditional prompt of SJD's and GSD's released code
    guidance_rows: Form = "official"
    # "official", or "released" for the words that SJD's released script writes before the prompt
    prompt_form: Form = "official"
    # "official" for a constant scale, or "released" for the schedule of the family's code
    guidance_schedule: Form = "official"
    size: str | None = None  # WIDTHxHEIGHT in pixels; None for the model's size
    # matrices of the layers in eight bits: a different target, whose logits differ from 16 bits
    eight_bits: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "revision", "size"):
            object.__setattr__(self, name, getattr(self, name) or None)

    @property
    def released(self) -> list[str]:
        """Names of the fields whose value is "released"."""
        return [field for field in _FORMS if getattr(self, field) == "released"]

    def name(self, model: str) -> str:
        """Return the model's name in records, with an ending for each deviation from the official model."""
        size = f"+{self.size}" if self.size else ""
        return model + size + "".join(end for end, (field, value) in _ENDINGS.items() if getattr(self, field) == value)

    @classmethod
    def of_name(cls, name: str, weights: str | None = None, revision: str | None = None) -> tuple[str, ModelChoice]:
        """Split a name in records ("janus+random+tiny") into the model's name and the choice."""
        chosen: dict[str, Any] = {}
        while ending := next((ending for ending in _ENDINGS if name.endswith(ending)), None):
            name = name.removesuffix(ending)
            chosen |= [_ENDINGS[ending]]
        if sized := re.fullmatch(r"(.*)\+(\d+x\d+)", name):
            name, chosen["size"] = sized.groups()
        return name, cls(weights, revision, **chosen)


AS_PUBLISHED = ModelChoice()  # The published checkpoint in full size
_FORMS = ("guidance_rows", "prompt_form", "guidance_schedule")
# Endings of a model's name in records, in their order, with the field of `ModelChoice` that they record and its value
_ENDINGS: dict[str, tuple[str, object]] = {
    RANDOM: ("random", True),
    "+tiny": ("tiny", True),
    "+released-rows": ("guidance_rows", "released"),
    "+released-prompt": ("prompt_form", "released"),
    "+released-guidance": ("guidance_schedule", "released"),
    f"+{EIGHT_BITS}": ("eight_bits", True),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model and of its files before it is loaded. Subclasses define where the files are."""

    name: str  # name in records and on the command line
    summary: str  # description for users
    target: str  # "module:function" that loads the model
    _: KW_ONLY
    dtype: str = "float32"  # the model's intended number format
    guided: bool = True  # whether the model has an unconditional prompt, which guidance needs
    heads: Mapping[str, Path] = field(default_factory=dict, hash=False)  # folders of bundled draft heads, by kind
    slot_numbers: int = 0  # numbers per row and stream slot kept in memory for embedding image tokens
    pixel_numbers: int = 0  # peak float32 numbers per pixel in memory while an image, or a whole batch, is rendered
    choice: ModelChoice = AS_PUBLISHED  # checkpoint, size and prompts that were chosen

    if TYPE_CHECKING:  # facts that are fields in some subclasses and properties in others

        @property
        def licence(self) -> str: ...  # description for users
        @property
        def hub_id(self) -> str | None: ...  # the hub repository of the weights; None for bundled weights
        @property
        def resolution(self) -> tuple[int, int]: ...  # image height and width in pixels
        @property
        def tokens(self) -> int: ...  # image tokens of one image, without tokens that the grammar forces
        @property
        def stream(self) -> int: ...  # stream slots of one image, forced tokens included
        @property
        def v_image(self) -> int: ...  # size of the image vocabulary
        @property
        def layers(self) -> int: ...  # number of layers of the network
        @property
        def network(self) -> NetworkSize | None: ...  # sizes of the language model; None if not known
        @property
        def parameters(self) -> int | None: ...  # parameters of the language model; None if not counted
        @property
        def renders_together(self) -> bool: ...  # whether a batch is rendered at once

    @property
    def eight_bits(self) -> bool:
        return self.choice.eight_bits

    @property
    def size(self) -> Size | None:
        """Memory traffic and computation of a forward; None if not counted."""
        return self.network.size(self.v_image, self.eight_bits) if self.network else None

    @property
    def ready(self) -> bool:
        try:
            self.files()
        except SpecbenchError:
            return False
        return True

    @property
    def has_codebook(self) -> bool:
        """Whether the loaded model has a codebook, if that is known; otherwise True."""
        return True

    def configured(self, choice: ModelChoice, download: bool = False) -> ModelFacts:
        """Return this model as chosen; a SpecbenchError if the choice is not possible. `download`: whether the small
        files that show the size of other weights may be fetched."""
        raise NotImplementedError

    @property
    def size_note(self) -> str | None:
        """Reason why the weights may have another size than this model; None if the sizes are known to be equal."""
        return None

    def as_stored(self, download: bool = False) -> ModelFacts:
        """Return this model with the size of its checkpoint on this disk, if the checkpoint is not official."""
        return self

    def sampling(self) -> Sampling:
        """Return the official sampling settings."""
        raise NotImplementedError

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise a SpecbenchError for the first prompt the model cannot read."""
        raise NotImplementedError

    def captions_cut(self, captions: Iterable[str]) -> tuple[int | None, int] | None:
        """Return the number of captions that the model cuts (None if its files are not on this disk) and its limit in
        tokens; None if it reads all captions completely."""
        return None

    def fixed_bytes(self, dtype: str | None = None) -> int:
        """Bytes of weights, image decoder and text encoder in memory."""
        raise NotImplementedError

    def file_facts(self, weights_sha256: str) -> dict[str, object]:
        """Return three fields of `run.json`: `source` (weights, revision, layout, digest of an unofficial checkpoint),
        `commits` (by hub repository) and `file_digests` (SHA-256 of every file, by folder and name)."""
        return {"source": None, "commits": {}, "file_digests": {}}

    def downloads(self) -> list[Download]:
        """List the downloads of files missing on this disk; a SpecbenchError if a file is not available."""
        return []

    def require_weights(self) -> None:
        """Raise a SpecbenchError with exit code 5 if a file is missing that may not be downloaded."""
        raise NotImplementedError

    def files(self) -> tuple[Path, ...]:
        """Return the files on this disk; a SpecbenchError with exit code 5 if a file is missing."""
        raise NotImplementedError

    def weights_sha256(self) -> str:
        """Return the digest of all files; the loaded model has the same digest."""
        raise NotImplementedError

    def step_bytes(self) -> int | None:
        """Return the weight bytes that one forward reads, for any window width; None if not counted."""
        return int(self.size.read(1, 1, 0, BYTES[self.dtype])) if self.size else None

    def kv_bytes(self, dtype: str | None = None) -> int | None:
        """Return the KV cache bytes of one token of one row (two rows per image with guidance); None if not counted."""
        return self.size.kv * BYTES[dtype or self.dtype] if self.size else None


REFERENCES: dict[str, str] = {}  # Import paths of the models of plug-ins and of the user's modules, by name


def typed_name(model: str) -> str:
    """Return a model's name on the command line: MODULE:NAME for the models of plug-ins and of the user's modules."""
    return REFERENCES.get(model, model)
