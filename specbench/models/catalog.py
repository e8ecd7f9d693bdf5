"""Catalogue of models by name, for `list models` and validation of plans. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import names
from specbench.errors import MISSING_PREREQUISITE, SpecbenchError, read_name
from specbench.models.facts import REFERENCES, ModelChoice, ModelFacts, require_torchao
from specbench.models.hub_model import MODELS, HubModel
from specbench.models.network_sizes import NetworkSize
from specbench.models.shapes import WEIGHTS as _SHAPES
from specbench.specs.run_spec import Sampling
from specbench.system import plugins
from specbench.system.foreign_code import Code, code_of
from specbench.system.torch_device import check_decoding_device, use_device

if TYPE_CHECKING:
    from specbench.models.interface import ImageModel
    from specbench.prompts import Prompt


@dataclass(frozen=True)
class ModelInfo(ModelFacts):
    """A model whose files have known paths. Its `target` is called as `function(device: str, dtype: torch.dtype)` and
    returns an `ImageModel`; for eight bits it must return a `TransformerModel`."""

    resolution: tuple[int, int]
    tokens: int
    licence: str
    # JSON file with `network.codes` (size of the image vocabulary) and `sampling` (fields of the default `Sampling`)
    config: Path
    weights: tuple[Path, ...] = ()  # files that must exist before the model can be loaded
    _: KW_ONLY
    prompt_check: str | None = None  # "module:function" that raises ValueError for a text the model cannot read
    parameters: int | None = None
    hub_id: str | None = None
    forced_slots: int = 0  # stream slots of one image whose tokens the grammar forces, such as row ends

    renders_together = True

    def __post_init__(self) -> None:
        if not isinstance(self.config, Path):
            raise TypeError(f"config = {self.config!r:.40} is no path")

    def configured(self, choice: ModelChoice, download: bool = False) -> ModelInfo:
        """Return the model with `choice` applied; a choice of other weights or another size is refused."""
        for name in choice.released:
            what = f"--{name.replace('_', '-')} released: model '{self.name}' has only the form official"
            raise SpecbenchError(what, "omit the option")
        if choice.weights or choice.revision or choice.random or choice.tiny or choice.size:
            what = f"model '{self.name}' has only one set of weights and one size"
            raise SpecbenchError(what, "omit --weights, --revision, --random-weights, --scale and --size")
        return replace(self, name=choice.name(self.name), choice=choice) if choice.eight_bits else self

    @property
    def network(self) -> NetworkSize | None:
        """Sizes of a Llama whose vocabulary is the image tokens; None if the configuration lacks a size."""
        sizes = [self._content["network"].get(name) for name in ("codes", "width", "inner", "layers", "heads", "heads")]
        return None if None in sizes else NetworkSize(*sizes)

    @property
    def layers(self) -> int:
        return self._content["network"]["layers"]

    @property
    def stream(self) -> int:
        return self.tokens + self.forced_slots

    def fixed_bytes(self, dtype: str | None = None) -> int:
        """Upper bound on the bytes of weights in memory: weights stored in half precision become float32."""
        return 2 * sum(path.stat().st_size for path in self.weights)

    def load(self, device: str, dtype: str | None = None) -> ImageModel:
        import torch  # takes seconds, and `list models` does not need it

        from specbench.models import loaded_model  # imports torch

        make: Any = plugins.load_object(self.target, f"model {self.name}")
        with plugins.naming_plugin("model", self.name, self.target):
            loaded = make(device=device, dtype=getattr(torch, dtype or self.dtype))
            for part in ("layout", "codebook", "device", "encode", "begin", "render"):
                getattr(loaded, part)
            if not isinstance(loaded.weights_sha256, str):
                raise TypeError(f"weights_sha256 = {loaded.weights_sha256!r:.40}")
        if wrong := wrongly_declared(self, loaded):
            raise SpecbenchError(f"model '{self.name}': {'; '.join(wrong)}", "correct its ModelInfo, or its layout")
        if self.eight_bits:
            if not isinstance(getattr(loaded, "backbone", None), torch.nn.Module):
                raise SpecbenchError(
                    f"--dtype int8wo: '{self.name}' has no transformer as its backbone", "omit --dtype"
                )
            from specbench.models.checkpoint_loading import quantise_network  # imports torch

            quantise_network(loaded.backbone)
        if isinstance(loaded, loaded_model.LoadedModel):
            loaded.name, loaded.weights_sha256 = self.name, self.weights_sha256()
            loaded_model.prepare_for_runs(loaded)
        return loaded

    def require_weights(self) -> None:
        if self.eight_bits:
            require_torchao()
        self.files()

    def files(self) -> tuple[Path, ...]:
        paths = self.config, *self.weights
        if missing := [path for path in paths if not path.is_file()]:
            what = f"model '{self.name}' is not on this disk: {missing[0]} is missing"
            hint = "reinstall specbench; in a checkout, 'make train-shapes' trains the weights"
            raise SpecbenchError(what, hint, MISSING_PREREQUISITE)
        return paths

    def weights_sha256(self) -> str:
        digest = hashlib.sha256()
        for path in self.weights:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    @property
    def v_image(self) -> int:
        return self._content["network"]["codes"]

    def sampling(self) -> Sampling:
        settings = self._content.get("sampling", {})
        return Sampling(**{name: settings[name] for name in Sampling.__dataclass_fields__ if name in settings})

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        if self.prompt_check is None:
            return
        check: Any = plugins.load_object(self.prompt_check, "prompt check")
        for prompt in prompts:
            try:
                check(prompt.text)
            except ValueError as error:
                hint = f"'{self.name}' knows only a small vocabulary"
                raise SpecbenchError(f"prompt '{prompt.id}': {error}", hint) from None

    @functools.cached_property
    def _content(self) -> dict[str, Any]:
        with plugins.naming_plugin("model", self.name, self.target):
            if not self.config.is_file():
                self.files()
            content: dict[str, Any] = json.loads(self.config.read_text())
            content["network"]["codes"]
        return content


def wrongly_declared(facts: ModelFacts, model: ImageModel) -> list[str]:
    """Describe each declared image size that differs from the loaded model's size."""
    layout = model.layout
    pairs = {
        "image tokens": (facts.tokens, len(layout.free_slots())),
        "stream slots": (facts.stream, layout.length),
        "image vocabulary": (facts.v_image, layout.v_image),
    }
    return [f"{what}: {fact} declared, {value} found" for what, (fact, value) in pairs.items() if fact != value]


_BUILT_IN = (
    ModelInfo(
        name="shapes",
        summary="the embedded model: coloured shapes on textured backgrounds, weights in the package",
        target="specbench.models.shapes.adapter:load",
        resolution=(64, 64),
        tokens=256,
        licence="Apache-2.0",
        parameters=2_400_000,
        config=_SHAPES / "config.json",
        weights=(_SHAPES / "network.safetensors", _SHAPES / "tokenizer.safetensors"),
        heads={kind: _SHAPES / kind for kind in ("eagle", "eagle3", "vertical")},
        prompt_check="specbench.models.shapes.captions:encode",
        slot_numbers=128,
        pixel_numbers=36,
    ),
)


@functools.cache
def models() -> dict[str, ModelFacts]:
    """Return all models, built-in models first. Built-in names take precedence over names of plug-ins."""
    by_name: dict[str, ModelFacts] = {model.name: model for model in (*_BUILT_IN, *MODELS)}
    for name in plugins.plugins("models"):
        model = plugins.load_plugin("models", name, _is_model, "a ModelInfo with a name of letters, digits and .+-[]")
        if model is not None and by_name.setdefault(model.name, model) is model:
            REFERENCES[model.name] = plugins.plugins("models")[name].value
    return by_name


def _is_model(model: object) -> bool:
    return isinstance(model, ModelInfo | HubModel) and plugins.path_component(model.name)


def find_model(name: str) -> ModelFacts:
    """Find a model by name, or import it as "package.module:NAME". An error suggests a similar name."""
    if plugins.is_reference(name):
        return _users_model(name)
    return models()[model_name(name)]


def model_name(typed: str) -> str:
    """Return a model's name in the catalogue, given its name in a paper or on the hub."""
    also = {name: _repositories(model) for name, model in models().items()}
    if typed in models() or names.fitting(typed, models(), "model", also):
        return read_name("model", typed, models(), also)
    fitting = _by_words(typed.rpartition("/")[2])
    if "/" in typed:
        model = fitting[0] if len(fitting) == 1 else "NAME"
        hint = f"to load a checkpoint, also name the model of its architecture: --model {model} --weights {typed}"
        raise SpecbenchError(f"unknown model '{typed}'", hint)
    return read_name("model", typed, models(), fallback=fitting)


def _repositories(model: ModelFacts) -> list[str]:
    """List the ids of a model's repositories on the hub, and their names without the owner."""
    sources = [model.source, *(layout.sources[0] for layout in model.also)] if isinstance(model, HubModel) else []
    return [text for source in sources for text in (source.repo, source.repo.rpartition("/")[2])]


def _by_words(typed: str) -> list[str]:
    """Return the models that match all words of the text, if the text begins with the model's family name."""
    facts = {
        name: [model.summary.partition(" at ")[0], name, str(model.resolution[0]), *_repositories(model)]
        for name, model in models().items()
    }
    families = {name: model.target for name, model in models().items()}
    fitting = names.by_words(typed, facts, families)
    return [name for name in fitting if names.folded(typed).startswith(re.split("[^a-z]", name)[0])]


def _users_model(reference: str) -> ModelFacts:
    """Import a model from a user's module and register it under the model's name."""
    model = plugins.load_user_object(reference, "model")
    if not isinstance(model, ModelInfo | HubModel):
        raise SpecbenchError(f"model '{reference}' is a {type(model).__name__}, not a specbench ModelInfo")
    if not _is_model(model):
        raise SpecbenchError(f"model '{reference}' is called {model.name!r}", "use a name of letters, digits and .+-[]")
    again = REFERENCES.get(model.name) == reference  # the module may have been reloaded
    if not again and models().setdefault(model.name, model) is not model:
        raise SpecbenchError(f"model '{reference}' is called '{model.name}', which is already taken")
    REFERENCES[model.name] = reference
    models()[model.name] = model
    return model


def default_prompts(model: str) -> str | None:
    """Default prompts: the set with the model's name, class labels for class-conditional models, else PartiPrompts.
    None for a second stage, whose prompts are the images of a first stage."""
    from specbench.prompts.loading import LABELS, prompt_set_names  # `--help` does not need this import

    if isinstance(facts := models().get(model), HubModel) and (facts.classes or (facts.codes and not facts.second)):
        return LABELS if facts.classes else None
    return model if model in prompt_set_names() else "parti"


def model_code(model: ModelFacts) -> Code | None:
    """Return the code and configuration of a model from outside specbench; None for specbench's models."""
    reference = REFERENCES.get(ModelChoice.of_name(model.name)[0])
    targets = [getattr(model, name, None) for name in ("target", "prompt_check")]
    config = getattr(model, "config", None)
    return code_of([*targets, reference], [config] if isinstance(config, Path) else [])


def recorded_model(
    name: str, weights: str | None = None, revision: str | None = None, plugin: bool = False
) -> ModelFacts:
    """Return a run's model from its recorded name, whose endings encode its configuration ("janus+random+tiny").
    `plugin`: whether the model comes from a plug-in or a user's module."""
    model, choice = ModelChoice.of_name(name, weights, revision)
    try:
        return find_model(model).configured(choice)
    except SpecbenchError as error:
        if not plugin or model in models():
            raise
        what = f"the run's model '{model}' is a plug-in that is not installed"
        raise SpecbenchError(what, "add --recompute --model MODULE:NAME") from error


def load_model(model: str | ModelFacts, device: str = "cpu", dtype: str | None = None) -> ImageModel:
    """Load a model, given by name or by its (configured) facts, so that it is ready to decode. `dtype`: None for the
    model's default number format. An error has exit code 5 if the weights or the device are missing."""
    info: Any = find_model(model) if isinstance(model, str) else model
    check_decoding_device(device)
    info.require_weights()
    use_device(device)
    from specbench.system.torch_state import PinnedTorch  # imports torch

    with PinnedTorch(False):
        if not isinstance(info, HubModel):
            return info.load(device, dtype)
        from specbench.models.families.base import load  # imports torch's networks, which takes seconds

        loaded: Any = load(info, device, dtype or info.dtype, info.checkpoint.fetch())
        if not (info.choice.random or info.checkpoint.official):
            from specbench.models.forward_probe import check_own_forward  # imports torch

            long = "a photo of a cup, " * 12  # Longer than most captions, because positions may depend on the length
            check_own_forward(loaded, "0" if info.classes else f"{long}<I1>" if info.codes else long)
        return loaded


def check_model(info: ModelFacts) -> None:
    """Check every tensor and token like `load_model`, but only by names and shapes: the weights are not read."""
    if not isinstance(info, HubModel):
        info.require_weights()
    elif not info.choice.random:
        from specbench.models.families.base import load  # imports torch's networks, which takes seconds

        load(info, "meta", info.dtype, info.checkpoint.find())
