"""The text-to-image families with official checkpoints, as facts that need no torch.

Sources of the facts: each family's official repository and its configuration on the hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.config import Sampling
from specbench.errors import SpecbenchError
from specbench.models.sources import Found, Source, fetch, find, is_folder

if TYPE_CHECKING:
    from specbench.models.family import FamilyModel
    from specbench.prompts import Prompt

RANDOM = "+random"
"""In the name of every model with random weights, hence in every record of its runs."""
TINY_GRID = (4, 4)
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class HubModel:
    """A model whose weights are published elsewhere.

    Attributes:
        target: "module:function" called with a `specbench.models.family.Request`.
        source: the language model's files.
        companions: what it needs besides: tokenizer, text encoder, image decoder.
        patch: pixels per image token, each way.
        grid: image tokens, height and width.
        row_ends: whether the grammar closes every row with a forced token.
        v_image: image vocabulary.
        defaults: the official sampling.
        parameters: of the language model.
        step_parameters: of those, what one forward reads: no input embedding, image rows of the head only.
        kv_numbers: numbers cached per token and row.
        other_bytes: image decoder and text encoder in memory.
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
    kv_numbers: int
    other_bytes: int
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

    def step_bytes(self, dtype: str | None = None) -> int:
        """Weight bytes that one forward reads, however wide its window."""
        return self.step_parameters * BYTES[dtype or self.dtype]

    def kv_bytes(self, dtype: str | None = None) -> int:
        """Cache bytes of one token of one row; guidance takes two rows per image."""
        return self.kv_numbers * BYTES[dtype or self.dtype]

    def memory_bytes(self, dtype: str | None = None, batch: int = 1) -> int:
        """What is held while decoding with guidance: weights, cache, image decoder, text encoder."""
        cache = 2 * batch * (self.stream + 256) * self.kv_bytes(dtype)
        return self.parameters * BYTES[dtype or self.dtype] + cache + self.other_bytes

    @property
    def ready(self) -> bool:
        """Whether all its files are on this disk."""
        try:
            self.find()
        except SpecbenchError:
            return False
        return True

    def find(self) -> tuple[Found, ...]:
        """Its files on this disk, the language model's first; none for random weights. Nothing is downloaded.

        Raises:
            SpecbenchError: exit code 5, naming what is missing.
        """
        return self._each(find)

    def fetch(self) -> tuple[Found, ...]:
        """Its files, downloaded where needed."""
        return self._each(fetch)

    def _each(self, get) -> tuple[Found, ...]:
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

    def check(self) -> None:
        """Account for every tensor and token as `load` does, reading names and shapes but not the weights.

        Raises:
            SpecbenchError: what `load` would raise for these files; nothing is downloaded.
        """
        from specbench.models.family import load

        load(self, "meta", self.dtype, self.find())

    def load(self, device: str, dtype: str | None = None) -> FamilyModel:
        """The model, ready to decode.

        Raises:
            SpecbenchError: a missing, damaged, incomplete or foreign file.
        """
        from specbench.models.family import load

        return load(self, device, dtype or self.dtype, self.fetch())


def digest(found: tuple[Found, ...]) -> str:
    """One digest over all files of a model."""
    return hashlib.sha256("".join(one.sha256() for one in found).encode()).hexdigest()


_CHAMELEON = "Chameleon research licence (Meta), non-commercial"
_LM = ("config.json", "*.safetensors")
_VQ = Source(
    "the image decoder (Chameleon's VQGAN)",
    "leloy/Anole-7b-v0.1-vqvae-hf",
    ("*.safetensors",),
    _CHAMELEON,
    beside=("vqgan.ckpt", "tokenizer/vqgan.ckpt"),
    note="Lumina-mGPT ships none; Meta's vqgan.ckpt serves as well",
)
_T5 = Source("the text encoder", "google/flan-t5-xl", (*_LM, "tokenizer.json"), "Apache-2.0", note="11.4 GB in float32")
_COSMOS = Source(
    "the image decoder (Cosmos DV8x16x16)",
    "nvidia/Cosmos-1.0-Tokenizer-DV8x16x16",
    ("decoder.jit",),
    "NVIDIA Open Model License",
    beside=("decoder.jit",),
)


def _lumina(name: str, side: int, size: int) -> HubModel:
    holds_tokenizer = size == 768
    main = f"Alpha-VLLM/Lumina-mGPT-7B-{size}"
    tokenizer = Source(
        "the tokenizer", "Alpha-VLLM/Lumina-mGPT-7B-768", ("tokenizer.json",), _CHAMELEON, beside=("tokenizer.json",)
    )
    return HubModel(
        name=name,
        summary=f"Lumina-mGPT 7B at {size} px",
        target="specbench.models.lumina:load",
        source=Source("the language model", main, _LM + ("tokenizer.json",) * holds_tokenizer, _CHAMELEON),
        companions=(_VQ,) if holds_tokenizer else (_VQ, tokenizer),
        grid=(side, side),
        row_ends=True,
        v_image=8192,
        defaults=Sampling(guidance=3.0, top_k=2000),
        parameters=7_013_666_816,
        step_parameters=6_510_350_336,
        kv_numbers=2 * 32 * 4096,
        other_bytes=165_831_180,
    )


def _llamagen(name: str, side: int, file: str) -> HubModel:
    return HubModel(
        name=name,
        summary=f"LlamaGen XL text-to-image at {16 * side} px",
        target="specbench.models.llamagen:load",
        source=Source("the language model", "peizesun/llamagen_t2i", (file, "vq_ds16_t2i.pt"), "MIT"),
        companions=(_T5,),
        grid=(side, side),
        v_image=16384,
        defaults=Sampling(guidance=7.5, top_k=1000),
        parameters=777_923_840,
        step_parameters=752_446_720,
        kv_numbers=2 * 36 * 1280,
        other_bytes=170_332_684 + 2_447_054_848,
    )


MODELS = (
    _lumina("lumina-512", 32, 512),
    _lumina("lumina", 48, 768),
    _lumina("lumina-1024", 64, 1024),
    HubModel(
        name="anole",
        summary="Anole 7B at 512 px",
        target="specbench.models.anole:load",
        source=Source("the language model", "leloy/Anole-7b-v0.1-hf", (*_LM, "tokenizer.json"), _CHAMELEON),
        grid=(32, 32),
        v_image=8192,
        defaults=Sampling(guidance=3.0, temperature=0.7, top_p=0.9),
        parameters=7_013_666_816,
        step_parameters=6_510_350_336,
        kv_numbers=2 * 32 * 4096,
        other_bytes=165_831_180,
    ),
    _llamagen("llamagen", 16, "t2i_XL_stage1_256.pt"),
    _llamagen("llamagen-512", 32, "t2i_XL_stage2_512.pt"),
    HubModel(
        name="janus",
        summary="Janus-Pro 1B at 384 px",
        target="specbench.models.janus:load",
        source=Source(
            "the model",
            "deepseek-community/Janus-Pro-1B",
            (*_LM, "tokenizer.json", "tokenizer_config.json"),
            "MIT code, DeepSeek model licence (use restrictions)",
        ),
        grid=(24, 24),
        v_image=16384,
        defaults=Sampling(guidance=5.0),
        parameters=1_485_053_952,
        step_parameters=1_275_207_680,
        kv_numbers=2 * 24 * 2048,
        other_bytes=85_166_342,
    ),
    HubModel(
        name="simplear",
        summary="SimpleAR 0.5B (RL) at 1024 px",
        target="specbench.models.simplear:load",
        source=Source(
            "the language model",
            "Daniel0724/SimpleAR-0.5B-RL",
            (*_LM, "tokenizer.json"),
            "not stated; code MIT, base model Apache-2.0",
        ),
        companions=(_COSMOS,),
        grid=(64, 64),
        v_image=64000,
        defaults=Sampling(guidance=6.0),
        parameters=551_140_224,
        step_parameters=415_242_112,
        kv_numbers=2 * 24 * 128,
        other_bytes=135_000_000,
    ),
    HubModel(
        name="emu3",
        summary="Emu3-Gen 8B at 720 px",
        target="specbench.models.emu3:load",
        source=Source("the model", "BAAI/Emu3-Gen-hf", (*_LM, "tokenizer.json"), "Apache-2.0"),
        grid=(90, 90),
        patch=8,
        row_ends=True,
        v_image=32768,
        defaults=Sampling(guidance=3.0, top_k=2048),
        parameters=8_492_011_520,
        step_parameters=7_113_805_824,
        kv_numbers=2 * 32 * 8 * 128,
        other_bytes=645_007_932,
    ),
)
