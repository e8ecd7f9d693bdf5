"""The target's forward on a GPU as one compiled function: one CUDA graph instead of some hundred calls.

A form is compiled for each combination of shapes. To keep these few, windows are padded to the session's widest
window, a multiple of 8, and only the number of slots read is symbolic. The layers are alike and are compiled only once,
if torch can (`nest_layers`). Only guards on the arguments are kept, because checking all of torch's guards takes about
as long as the forward of a small model. The model is checked when a session begins.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from specbench.errors import SpecbenchError
from specbench.models.transformer.compilation import Compiled, CompiledForms
from specbench.models.transformer.forward import ForwardInputs, StepModel, last_hidden_state, run_step
from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.llama_layer import run_layer

CUDA_OPTIONS: dict[str, Any] = {"triton.cudagraphs": True}  # Options of Inductor


Buffers = Sequence[tuple[Tensor, Tensor]]  # keys and values of every layer


class CompiledStep(CompiledForms):
    """Compiled `run_step` and prefill of one model with one guidance scale. `run_step` has a form per padded window,
    captured for each part of the cache; the prefill has one form for all lengths and no graph."""

    part = "forward"

    def __init__(self, model: StepModel, guidance: float, options: dict[str, Any]):
        self._model, self._guidance, self.options = model, guidance, options
        self._kind: list[object] = []
        self._made: list[Compiled] = []  # a forward and a prefill for each kind of model; the last two are in use
        self.follow_model()

    def follow_model(self) -> None:
        """Compile again if the model's modules, or its tensors' dtypes, devices or shapes have changed."""
        kind = kind_of(self._model)
        if kind != self._kind:
            self._kind = kind
            self._compile()

    def all_compiled(self) -> Iterable[Compiled]:
        return self._made

    def _compile(self) -> None:
        model, guidance = self._model, self._guidance

        def step(buffers: Buffers, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
            # As a Python int the length would be a constant in compiled code; as a tensor's size it can be symbolic.
            return run_step(model, guidance, placed(buffers, inputs.slots, inputs.index.shape[0]), inputs)

        def prefill(buffers: Buffers, embeds: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
            index = torch.arange(embeds.shape[1], device=embeds.device)
            cache = placed(buffers, slots, embeds.shape[1])
            mask = (index <= slots[..., None])[:, None]
            return last_hidden_state(model.backbone, embeds, positions, mask, cache, model.taps)

        def not_on_model(guards: Sequence[Any]) -> list[bool]:
            """Keep guards on arguments, shapes and torch's state; drop guards on the model and module globals."""
            return [re.search(r"\bmodel\b|\bG\[", guard.name) is None for guard in guards]

        filtered = {"guard_filter_fn": not_on_model}
        self._made += [Compiled(step, False, {**filtered, **self.options}), Compiled(prefill, True, filtered)]

    def _call(self, place: int, *args: Any) -> Any:
        """Call the latest forward (-2) or prefill (-1). If torch cannot compile nested layers, call without nesting."""
        with sizes_apart_floats_fixed():
            try:
                return self._made[place](*args)
            except SpecbenchError:
                if not unnest_layers(self._model.backbone):
                    raise
                del self._made[-2:]
                self._compile()
                return self._made[place](*args)

    def prefill(self, cache: PositionCache, embeds: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Return the last hidden states [R, L, d] of a prompt's `embeds` [R, L, d]; fill the cache's first L slots."""
        return self._call(-1, cache.buffers(), embeds, positions, slots)

    def __call__(self, cache: PositionCache, inputs: ForwardInputs, most: int) -> tuple[Tensor, Tensor]:
        """Return the result of `run_step`, which the next call overwrites. `most`: tokens of the largest forward."""
        width = inputs.tokens.shape[1]
        inputs = inputs.widened(padded_columns(max(width, most)))
        # The number of slots read is symbolic: one form covers all parts of a cache, with a separate capture each.
        for read, dim in ((inputs.index, 0), (inputs.mask, 2)):
            if read is not None:
                torch._dynamo.maybe_mark_dynamic(read, dim)
        torch.compiler.cudagraph_mark_step_begin()
        features, logits = self._call(-2, cache.buffers(), inputs)
        return features[:, :width], logits[:, :width]


def placed(buffers: Buffers, slots: Tensor, visible: int) -> PositionCache:
    """Return a cache of these buffers, for compiled code, that writes `slots` and reads `visible` slots."""
    rows, capacity = slots.shape[0], buffers[0][0].shape[2]
    for buffer in chain.from_iterable(buffers):
        # This avoids symbols: each symbol is an argument of the compiled code and is converted in every call.
        torch._check(buffer.shape[0] == rows)
        torch._check(buffer.shape[2] == capacity)
    cache = PositionCache(len(buffers), capacity, buffers)
    cache.place(slots, visible)
    return cache


def nest_layers(backbone: nn.Module) -> None:
    """Make each layer a region that torch compiles once for all layers; otherwise compile time grows with the depth."""
    region = getattr(torch.compiler, "nested_compile_region", None)  # torch 2.8 and later
    if region is None:
        return
    backbone.run_layer = region(run_layer)
    for layer in getattr(backbone, "layers", ()):
        layer.forward = region(_as_function(layer.forward))


def _as_function(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a method in a function, because methods cannot be marked as regions."""
    return lambda *args, **kwargs: method(*args, **kwargs)


def unnest_layers(backbone: nn.Module) -> bool:
    """Undo `nest_layers`. Return True if layers were nested."""
    for part in (backbone, *getattr(backbone, "layers", ())):
        part.__dict__.pop("forward", None)
    return backbone.__dict__.pop("run_layer", None) is not None


def padded_columns(columns: int) -> int:
    """Return the number of tokens that a window is padded to, so that there are few shapes."""
    return -(-columns // 8) * 8 if columns > 8 else 1 << (columns - 1).bit_length()


def kind_of(model: StepModel) -> list[object]:
    """List the properties of modules and tensors that compiled code assumes. Tensors' values are read in every call."""
    values = vars(model).values()
    modules: list[nn.Module] = [part for value in values if isinstance(value, nn.Module) for part in value.modules()]
    tensors: list[Tensor] = [value for value in values if isinstance(value, Tensor)]
    for part in modules:
        tensors += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return [*map(type, modules), *((t.dtype, t.device, t.shape, t.stride()) for t in tensors)]


@contextmanager
def sizes_apart_floats_fixed() -> Iterator[None]:
    """Set two options of torch while it compiles: sizes that are equal by chance get different symbols, and a module's
    floats, such as the attention scale, are constants. `config.patch` would take longer than the guards."""
    shapes, dynamo = torch.fx.experimental._config, torch._dynamo.config
    before = shapes.use_duck_shape, dynamo.specialize_float
    shapes.use_duck_shape, dynamo.specialize_float = False, True
    try:
        yield
    finally:
        shapes.use_duck_shape, dynamo.specialize_float = before
