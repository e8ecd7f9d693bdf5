"""Models with weights on the Hugging Face hub: facts from `families/models.toml`, and files. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles, Source, local_folder, read_json
from specbench.models.checkpoint_layouts import Layout, ModelFiles
from specbench.models.facts import BYTES, TINY_BEFORE, TINY_GRID, ModelChoice, ModelFacts, require_torchao
from specbench.models.family_sizes import FAMILIES, network_size, stored_size
from specbench.models.network_sizes import NetworkSize, Size
from specbench.specs.options import parse_size
from specbench.specs.run_spec import Sampling
from specbench.system.downloads import Download

if TYPE_CHECKING:
    from specbench.prompts import Prompt


@dataclass(frozen=True)
class Sizes:
    """Image sizes that a model was trained for: `listed` (height, width), or multiples of `unit` pixels."""

    listed: tuple[tuple[int, int], ...] = ()
    unit: int = 32
    pixels: tuple[int, int] = (0, 0)  # minimum and maximum pixels of a size that is not listed
    ratio: float = 4.0  # maximum ratio of the longer to the shorter side

    def check(self, model: str, size: str) -> tuple[int, int]:
        """Return height and width of a requested size; refuse sizes for which the model was not trained."""
        height, width = parse_size(size)
        if self.listed:
            trained = (height, width) in self.listed
            valid = ", ".join(f"{wide}x{high}" for high, wide in self.listed)
        else:
            trained = height % self.unit == width % self.unit == 0
            trained = trained and self.pixels[0] <= height * width <= self.pixels[1]
            trained = trained and max(height, width) <= self.ratio * min(height, width)
            least, most = (round(count**0.5) for count in self.pixels)
            area = f"of the area of {least}x{least} to {most}x{most}" if least else f"up to the area of {most}x{most}"
            valid = f"multiples of {self.unit} {area}, sides at most {self.ratio:g} to 1"
        if not trained:
            raise SpecbenchError(f"--size {size}: '{model}' was not trained for this size", f"valid: {valid}")
        return height, width


@dataclass(frozen=True, kw_only=True)
class HubModel(ModelFacts):
    """A model with published weights. Its `target` is called with a `specbench.models.families.base.LoadRequest`."""

    v_image: int
    network: NetworkSize
    family: str  # the family's name, which is also the name of the first layout
    source: Source  # the language model's files
    grid: tuple[int, int]  # image tokens, height and width
    defaults: Sampling  # the official sampling
    other_bytes: int  # image decoder and text encoder in memory
    companions: tuple[Source, ...] = ()  # other required files: tokenizer, text encoder, image decoder
    also: tuple[Layout, ...] = ()  # other layouts in which `weights` may be
    patch: int = 16  # side of an image token in pixels
    row_ends: bool = False  # whether the grammar closes every row with a forced token
    sizes: Sizes | None = None  # further image sizes, or None
    # maximum number of caption tokens that the model reads; 0 for no limit. With a limit, the family's module defines
    # `caption_tokenizer` and `tokens_cut`.
    caption_tokens: int = 0
    classes: int = 0  # number of class labels if these are the prompts; 0 if prompts are texts
    # models of the second stage, which draw the pictures; the first model is used
    second: tuple[HubModel, ...] = ()
    # vocabulary size of the codes ("<I5>") that prompts contain; 0 if prompts contain no codes. Without a second stage,
    # a prompt needs at least one code.
    codes: int = 0
    # computes the grids before the last grid of the stream from its height and width
    before: Callable[[int, int], tuple[tuple[int, int], ...]] | None = None
    # fields of `ModelChoice` with a form "released": the form in code of the family, of SJD or of GSD
    released_forms: tuple[str, ...] = ()
    # whether the authors sample with transformers' `generate` and the repository's generation settings
    generates: bool = False
    # place in `config.json` of the path to the file with the codebook, if the listed files lack the codebook
    codebook_path: str = ""
    # False for another checkpoint whose size is unknown; `network` then has the official size
    size_known: bool = True

    renders_together = False

    def configured(self, choice: ModelChoice, download: bool = False) -> HubModel:
        """See `ModelFacts.configured`. The network's size is read from the chosen checkpoint, because memory
        estimate, windows and roofline depend on it. The name records any deviation from the official model."""
        if choice.random and (choice.weights or choice.revision):
            raise SpecbenchError("--random-weights cannot be combined with --weights or --revision")
        if choice.revision and local_folder(choice.weights):
            what = f"--revision {choice.revision}: --weights {choice.weights} is a folder, not a hub repository"
            raise SpecbenchError(what)
        for name in choice.released:
            if name not in self.released_forms:
                what = f"--{name.replace('_', '-')} released: '{self.name}' has no released form"
                others = dict.fromkeys(model.family for model in MODELS if name in model.released_forms)
                raise SpecbenchError(what, f"families with a released form: {', '.join(others)}")
        grid, second = TINY_GRID if choice.tiny else self.grid, self.second
        if choice.size:
            if choice.tiny:
                raise SpecbenchError(f"--size {choice.size}: a tiny network has only one size", "omit --scale tiny")
            only = f"{self.resolution[1]}x{self.resolution[0]}"
            if self.sizes is None and choice.size != only:
                raise SpecbenchError(f"--size {choice.size}: '{self.name}' has only the size {only}", "omit --size")
            asked = self.sizes.check(self.name, choice.size) if self.sizes else self.resolution
            if second:
                second = tuple(stage for stage in second if stage.resolution == asked)
            else:
                grid = asked[0] // self.patch, asked[1] // self.patch
            choice = replace(choice, size=choice.size if asked != self.resolution else None)
        companions, alike = self.companions, ModelChoice(random=choice.random, tiny=choice.tiny)
        if second:
            companions = (second[0].source, *second[0].companions)
            second = (second[0].configured(alike), *second[1:])
        name = choice.name(self.name)
        chosen = replace(self, name=name, grid=grid, choice=choice, second=second, companions=companions)
        return chosen.as_stored(download)

    def as_stored(self, download: bool = False) -> HubModel:
        # LlamaGen has no configuration, so the size of another hub repository is unknown before its download.
        if self.choice.tiny or self.choice.random or self.checkpoint.official:
            return self
        folder = self.checkpoint.folder(download)
        size = folder and stored_size(self.family, self.network, folder, self.source)
        if size not in (None, self.network):
            alike = [model.name for model in MODELS if (model.family, model.network) == (self.family, size)]
            if alike:
                what = f"--weights {self.choice.weights or folder}: its network has the size of '{min(alike, key=len)}'"
                raise SpecbenchError(what, f"use --model {min(alike, key=len)}")
        return replace(self, network=size or self.network, size_known=size is not None)

    @property
    def has_codebook(self) -> bool:
        if not self.codebook_path:
            return True
        try:
            config = self.checkpoint.find()[0].named("config.json")
            path: Any = read_json(self.source, config)
            for name in self.codebook_path.split("."):
                path = path[name]
            return (config.parent / path).is_file()
        except (SpecbenchError, LookupError, TypeError):  # without files, or with random weights
            return False

    @property
    def parameters(self) -> int:
        return self.network.parameters

    @property
    def layers(self) -> int:
        return self.network.layers

    @property
    def licence(self) -> str:
        return self.source.licence

    @property
    def hub_id(self) -> str:
        return self.source.repo

    @property
    def resolution(self) -> tuple[int, int]:
        if self.second:
            return self.second[0].resolution
        return self.grid[0] * self.patch, self.grid[1] * self.patch

    @property
    def tokens(self) -> int:
        return sum(rows * columns for rows, columns in (*self.grids_before, self.grid))

    @property
    def grids_before(self) -> tuple[tuple[int, int], ...]:
        """Height and width of the grids that precede the image's own grid in the stream."""
        if self.before is None:
            return ()
        return (TINY_BEFORE,) if self.choice.tiny else self.before(*self.grid)

    @property
    def stream(self) -> int:
        return self.tokens + self.grid[0] * self.row_ends

    @property
    def checkpoint(self) -> ModelFiles:
        return ModelFiles(self.name, (Layout(self.family, (self.source, *self.companions)), *self.also), self.choice)

    def require_weights(self) -> None:
        if self.eight_bits:
            require_torchao()
        self.checkpoint.require_known()

    def downloads(self) -> list[Download]:
        return self.checkpoint.missing()

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Refuse prompts of another kind than the model's: texts, class numbers, or codes of a first stage's run."""
        for prompt in prompts:
            if (codes := codes_in(prompt.text)) and "codes" in prompt.meta and (self.second or not self.codes):
                what = f"prompt '{prompt.id:.40}': codes of a run are for a second stage, not for '{self.name}'"
                raise SpecbenchError(what, "use the prompts of that run: --prompts SET|FILE")
            if self.codes and max(codes, default=0 if self.second else self.codes) >= self.codes:
                what = f"prompt '{prompt.id:.40}': {prompt.text!r:.40} has no codes, or a code above {self.codes - 1}"
                first = "use the folder of a run of the first stage: --prompts results/tar-1.5b-..."
                raise SpecbenchError(what, "" if self.second else first)
            if not self.classes and str(prompt.meta.get("class")) == prompt.text:
                raise SpecbenchError(f"prompt '{prompt.id:.40}' is a class number; '{self.name}' takes captions")
            if self.classes and not (prompt.text.isdecimal() and int(prompt.text) < self.classes):
                what = f"prompt '{prompt.id:.40}': {prompt.text!r:.40} is not a class of '{self.name}'"
                raise SpecbenchError(what, f"use numbers from 0 to {self.classes - 1}, as in --prompts imagenet")

    def captions_cut(self, captions: Iterable[str]) -> tuple[int | None, int] | None:
        if not self.caption_tokens:
            return None
        # A token has at least one byte, and cleaning adds few bytes, so short captions need no tokenizer and no torch.
        long = [text for text in set(captions) if len(text.encode()) > 0.75 * self.caption_tokens]
        if not long or not self.ready:
            return (None if long else 0), self.caption_tokens
        family = importlib.import_module(self.target.partition(":")[0])
        tokenizer = family.caption_tokenizer(self.checkpoint.find())
        return sum(family.tokens_cut(tokenizer, text) > 0 for text in long), self.caption_tokens

    def sampling(self) -> Sampling:
        """Return the recommended sampling: from the generation settings if the authors use them and the file exists."""
        if not self.generates or self.choice.random or not self.ready:
            return self.defaults
        return read_sampling(self.checkpoint.find()[0], self.defaults)

    @property
    def size(self) -> Size | None:
        """See `ModelFacts.size`; None at tiny scale, because sizes vary there."""
        return None if self.choice.tiny else super().size

    def fixed_bytes(self, dtype: str | None = None) -> int:
        itemsize, in_eight_bits = BYTES[dtype or self.dtype], self.network.trunk * self.choice.eight_bits
        return self.parameters * itemsize - in_eight_bits * (itemsize - 1) + self.other_bytes

    @property
    def size_note(self) -> str | None:
        if self.size_known or local_folder(self.choice.weights):
            return None
        at = f" at {self.choice.revision}" if self.choice.revision else ""
        repo = f"{self.choice.weights or self.source.repo}{at}"
        return f"the size of {repo} is unknown before its download; memory and windows are estimated for {self.summary}"

    def file_facts(self, weights_sha256: str) -> dict[str, object]:
        return self.checkpoint.facts(weights_sha256)

    def files(self) -> tuple[Path, ...]:
        return tuple(path for part in self.checkpoint.find() for path in part.paths)

    def weights_sha256(self) -> str:
        if self.choice.random:
            return hashlib.sha256(self.name.encode()).hexdigest()
        return digest(self.checkpoint.find())


def codes_in(text: str) -> list[int]:
    """Return the codes ("<I5>") in a text that a first-stage model has written."""
    return [int(code) for code in re.findall(r"<I(\d{1,9})>", text)]


def read_sampling(files: CheckpointFiles, defaults: Sampling) -> Sampling:
    """Return the sampling of `generate`: the generation settings in `files`, else transformers' defaults."""
    if not files.holds("generation_config.json"):
        return defaults
    usual: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    stored = files.json("generation_config.json")
    kept = {name: stored[name] for name in stored if name in usual and stored[name] is not None}
    sampling = replace(defaults, **usual | kept)
    with files.blaming("generation_config.json"):
        top_k = sampling.top_k
        if not (sampling.temperature > 0 and top_k >= 0 and top_k % 1 == 0 and 0 < sampling.top_p <= 1):
            raise ValueError(f"{kept} are not valid sampling settings")
    return sampling


def digest(parts: tuple[CheckpointFiles, ...]) -> str:
    return hashlib.sha256("".join(part.sha256() for part in parts).encode()).hexdigest()


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _source_of(entry: Mapping[str, Any]) -> Source:
    return Source(**{name: _tuples(value) for name, value in entry.items()})


def _model(
    name: str, entry: Mapping[str, Any], companions: Mapping[str, Source], second: Sequence[HubModel]
) -> HubModel:
    grid = _tuples(entry["grid"])
    sizes = Sizes(**{field: _tuples(value) for field, value in entry["sizes"].items()}) if "sizes" in entry else None
    needed = tuple(companions[part] for part in entry.get("companions", ()))
    other = entry.get("other_bytes", 0)
    if second:  # the memory includes the second stage with the KV cache of one picture
        needed = (second[0].source, *second[0].companions)
        sizes = Sizes(tuple(stage.resolution for stage in second))
        cached = 2 * 2 * (math.prod(grid) + second[0].stream) * second[0].network.kv_numbers
        other = second[0].fixed_bytes() + cached
    layouts = {
        layout: [companions[part["companion"]] if "companion" in part else _source_of(part) for part in parts]
        for layout, parts in entry.get("also", {}).items()
    }
    made: dict[str, Any] = dict(
        name=name,
        target=f"specbench.models.families.{entry.get('loader', entry['family'] + ':load')}",
        source=_source_of(entry["source"]),
        companions=needed,
        also=tuple(Layout(layout, tuple(sources)) for layout, sources in layouts.items()),
        grid=grid,
        sizes=sizes,
        second=tuple(second),
        before=FAMILIES[entry["family"]].before,
        dtype="bfloat16",
        defaults=Sampling(**entry["sampling"]),
        network=network_size(entry["family"], **entry["network"]),
        other_bytes=sum(other) if isinstance(other, list) else other,
    )
    return HubModel(
        **{field: _tuples(entry[field]) for field in entry if field in HubModel.__dataclass_fields__} | made
    )


def _read() -> tuple[HubModel, ...]:
    content = tomllib.loads((Path(__file__).parent / "families" / "models.toml").read_text(encoding="utf-8"))
    entries, companions = content["model"], {name: _source_of(entry) for name, entry in content["companion"].items()}

    def full(name: str) -> dict[str, Any]:
        entry = entries[name]
        base = full(entry["like"]) if "like" in entry else {}
        return base | entry | {"source": base.get("source", {}) | entry.get("source", {})}

    @cache
    def made(name: str) -> HubModel:
        entry = full(name)
        return _model(name, entry, companions, [made(stage) for stage in entry.get("second", ())])

    return tuple(map(made, entries))


MODELS = _read()
