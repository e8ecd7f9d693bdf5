"""The target's step as one compiled function.

A step becomes a few kernels (on a GPU one captured graph) instead of some hundred calls that each cost more than their
arithmetic. A form is compiled per combination of shapes, so there must be few: on a CPU they are symbols of one
function; on a GPU windows are filled up to powers of two, and attention reads whole parts of the cache.

A step of a small model takes hardly longer than torch takes to check that what it has compiled still fits. Only what
changes from call to call, the arguments, is checked then; the model is looked at when a session begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specbench.models.transformer.compilation import Compiled
from specbench.models.transformer.forward import ForwardInputs, StepModel, run_step
from specbench.models.transformer.kv_cache import PositionCache


class CompiledStep:
    """`run_step` of one model under one guidance."""

    def __init__(self, model: StepModel, guidance: float, fixed_shapes: bool, options: dict[str, object]):
        """`fixed_shapes`: compile a form per window and block of cache, as captured graphs need it; `options` are
        Inductor's."""
        self._model, self._guidance, self._fixed_shapes, self._options = model, guidance, fixed_shapes, options
        self._made: list[tuple[list[object], Compiled]] = []
        self.follow_model()

    def follow_model(self) -> None:
        """Compile anew if the model's tensors or modules are no longer of the kind it was compiled for."""
        kind = _kind(self._model)
        if not self._made or self._made[-1][0] != kind:
            self._made.append((kind, self._compile()))

    @property
    def seconds(self) -> float:
        """Time of the calls that compiled something."""
        return sum(compiled.seconds for _, compiled in self._made)

    @property
    def forms(self) -> int:
        """How many did."""
        return sum(compiled.forms for _, compiled in self._made)

    def _compile(self) -> Compiled:
        model, guidance = self._model, self._guidance

        def step(buffers: Sequence[tuple[Tensor, Tensor]], inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
            cache = PositionCache(len(buffers), buffers[0][0].shape[2], buffers)
            # Its length as a number of this process would be compiled in; as that of a tensor it is a shape.
            cache.place(inputs.slots, inputs.index.shape[0])
            return run_step(model, guidance, cache, inputs)

        options = {"guard_filter_fn": _not_on_model, **self._options}
        return Compiled(step, not self._fixed_shapes, options)

    def __call__(self, cache: PositionCache, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
        """See `run_step`; what it returns is overwritten by the next call."""
        width = inputs.tokens.shape[1]
        if self._fixed_shapes:
            inputs = inputs.widened(1 << (width - 1).bit_length())
            torch.compiler.cudagraph_mark_step_begin()
        with _sizes_apart_floats_fixed():
            features, logits = self._made[-1][1](cache.buffers(), inputs)
        return features[:, :width], logits[:, :width]


def compiled_step(model: StepModel, guidance: float) -> CompiledStep:
    """As the model's device needs it."""
    if model.device.type == "cuda":
        return CompiledStep(model, guidance, True, {"triton.cudagraphs": True})
    return CompiledStep(model, guidance, False, {"cpp_wrapper": True})


def _not_on_model(guards: Sequence) -> list[bool]:
    """All but the guards on the model and on what its code imports: those on arguments, shapes and torch's state."""
    return [re.search(r"\bmodel\b|\bG\[", guard.name) is None for guard in guards]


def _kind(model: StepModel) -> list[object]:
    """All that compiled code takes for granted of a model's modules and tensors; it reads their values anew."""
    held = vars(model).values()
    modules = [part for value in held if isinstance(value, nn.Module) for part in value.modules()]
    tensors = [value for value in held if isinstance(value, Tensor)]
    for part in modules:
        tensors += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return [*map(type, modules), *((t.dtype, t.device, t.shape, t.stride()) for t in tensors)]


@contextmanager
def _sizes_apart_floats_fixed() -> Iterator[None]:
    """While something may be compiled: sizes that happen to agree at first are not taken for one and the same, and a
    module's numbers, as the scale of attention, are constants. (`config.patch` would take longer than the guards.)"""
    shapes, dynamo = torch.fx.experimental._config, torch._dynamo.config
    before = shapes.use_duck_shape, dynamo.specialize_float
    shapes.use_duck_shape, dynamo.specialize_float = False, True
    try:
        yield
    finally:
        shapes.use_duck_shape, dynamo.specialize_float = before
