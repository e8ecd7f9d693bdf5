"""The target's forward on a CPU as a shared library of AOTInductor, which runs without guards and Python code.

A library's file name is the digest of the graph that it was compiled from, so changed code or another configuration
never uses an outdated library. Exporting the graph takes seconds. To avoid this for a model loaded from files, a note
whose name is the digest of files and code names the library. Weights are arguments, so in-place changes of values need
no other library.
"""

from __future__ import annotations

import copy
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from specbench.errors import SpecbenchError
from specbench.models.transformer.compilation import CompiledForms, compile_error, compiled_folder
from specbench.models.transformer.compiled_forward import Buffers, kind_of, placed, sizes_apart_floats_fixed
from specbench.models.transformer.forward import ForwardInputs, StepModel, run_step
from specbench.models.transformer.kv_cache import PositionCache
from specbench.system.environment import cpu_features
from specbench.system.files import lock_when_free, write_atomically


class _Sizes(NamedTuple):
    """Sizes that are symbolic in a form: columns, slots that are read, and the larger number of slots in the cache."""

    columns: int
    read: int
    slots: int

    def of(self, name: str) -> dict[int, int]:
        """Return the symbolic sizes of an input, by dimension."""
        places = {"index": {0: self.read}, "mask": {1: self.columns, 2: self.read}}
        return places.get(name, {1: self.columns} if name in ("tokens", "positions", "slots") else {})


_TRACED = _Sizes(13, 251, 509)  # Different sizes, so that each gets its own symbol
_ALLOWED = _Sizes(2, 2, 3), _Sizes(2, 9000, 9001), _Sizes(9000, 2, 18000)
"""Extreme sizes with which a form is called."""
_Runner = torch._C._aoti.AOTIModelContainerRunnerCpu


class PackagedStep(CompiledForms):
    """Compiled `run_step` of one model with one guidance scale. There is a form for each number of rows, and for a
    single column, a window and a tree. The numbers of columns, of slots read and of slots in the cache are symbolic."""

    part = "forward"

    def __init__(self, model: StepModel, guidance: float):
        self._model, self._guidance, self.options = model, guidance, {"aot_inductor": True}
        self._compiled = SimpleNamespace(seconds=0.0, forms=0)
        self._kind: list[object] = []
        self._runners: dict[tuple[object, ...], Any] = {}
        self.follow_model()

    def follow_model(self) -> None:
        """Use the model's current tensors; compile again if its modules, or their dtypes or shapes, have changed."""
        kind = kind_of(self._model)
        if kind != self._kind:
            self._kind, self._runners = kind, {}
        self._weights = list(_Step(self._model, self._guidance).tensors().values())

    def all_compiled(self) -> Iterable[SimpleNamespace]:
        return [self._compiled]

    def __call__(self, cache: PositionCache, inputs: ForwardInputs, most: int) -> tuple[Tensor, Tensor]:
        """See `run_step`; `most` is not used, because sizes are symbolic."""
        rows, columns = inputs.tokens.shape
        key = rows, columns == 1, inputs.mask is None, *(tensor.shape for tensor in inputs.state)
        if key not in self._runners:
            self._runners[key] = self._runner(cache.buffers(), inputs)
        # The library assumes the strides that it was traced with.
        given = [tensor.contiguous() for tensor in (*inputs[:-1], *inputs.state) if tensor is not None]
        buffers = [buffer for pair in cache.buffers() for buffer in pair]
        features, logits = self._runners[key].run([*self._weights, *buffers, *given])
        return features, logits

    def _runner(self, buffers: Buffers, inputs: ForwardInputs) -> Any:
        """Load the library for arguments of this form; compile it first if there is none."""
        start, note = time.perf_counter(), self._note(buffers, inputs)
        try:
            runner = _load(_noted(note)) or self._compile(buffers, inputs, note)
        except SpecbenchError:
            raise
        except Exception as error:  # whatever the compiler raises
            raise compile_error(error) from error
        self._compiled.seconds += time.perf_counter() - start
        self._compiled.forms += 1
        return runner

    def _note(self, buffers: Buffers, inputs: ForwardInputs) -> Path | None:
        """Return the file that names the library for arguments of this form; None if the model is not identified."""
        if self._model.made_of is None:
            return None
        shapes = [(str(tensor.dtype), tensor.shape[:2], tensor.shape[3:]) for pair in buffers for tensor in pair]
        fed = [tensor if tensor is None else (str(tensor.dtype), tensor.shape[:1]) for tensor in inputs[:-1]]
        state = [(str(tensor.dtype), tensor.shape) for tensor in inputs.state]
        plain = (str, int, float, bool, tuple)
        own = {name: value for name, value in sorted(vars(self._model).items()) if isinstance(value, plain)}
        facts = own, self._kind, self._guidance, inputs.tokens.shape[1] == 1, shapes, fed, state
        return compiled_folder() / f"forward-{_digest_of(repr(facts))}.txt"

    def _compile(self, buffers: Buffers, inputs: ForwardInputs, note: Path | None) -> Any:
        from torch._dynamo.callback import CallbackTrigger, callback_handler  # takes seconds to import

        with (
            torch.inference_mode(False),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),
            callback_handler.install_callbacks(CallbackTrigger.DYNAMO, self.part),
            sizes_apart_floats_fixed(),
        ):
            exported, arguments = _export(_Step(self._model, self._guidance), buffers, inputs)
            library = compiled_folder() / f"forward-{_digest(exported)}.so"
            runner = _load(library) or _compile_once(exported, arguments, library)
        if note:
            with suppress(SpecbenchError):
                write_atomically(note, library.name.encode())
        return runner


class _Step(nn.Module):
    """Module for `run_step` with the model's tensors, which tracing may replace."""

    def __init__(self, model: StepModel, guidance: float):
        super().__init__()
        self._model, self._guidance = copy.copy(model), guidance
        for name, value in vars(model).items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif isinstance(value, Tensor):
                self.register_buffer(name, value)

    def tensors(self) -> dict[str, Tensor]:
        """Return each tensor once, because `functional_call` replaces it under all its names."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor for name, tensor in {id(tensor): (name, tensor) for name, tensor in named[::-1]}.values()}

    def apart(self) -> _Step:
        """Copy the modules, but share their tensors: tracing replaces the tensors in the modules that it traces."""
        apart = copy.copy(self)
        shared = {id(tensor): tensor for tensor in self.tensors().values()}
        apart._modules, apart._buffers = copy.deepcopy(self._modules, shared), dict(self._buffers)
        for name, module in apart._modules.items():
            setattr(apart._model, name, module)
        return apart

    def forward(self, buffers: Buffers, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        for name, tensor in self._buffers.items():
            setattr(self._model, name, tensor)
        fed = ForwardInputs(*inputs)
        return run_step(self._model, self._guidance, placed(buffers, fed.slots, fed.index.shape[0]), fed)


class _OfWeights(nn.Module):
    """A step as a function that also takes the model's weights as an argument."""

    def __init__(self, step: _Step):
        super().__init__()
        self._step = (step,)  # a tuple, because the tensors of a submodule would be constants

    def forward(self, weights: Mapping[str, Tensor], buffers: Buffers, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(self._step[0], weights, (buffers, inputs))


def _export(step: _Step, buffers: Buffers, inputs: ForwardInputs) -> tuple[ExportedProgram, tuple[Any, ...]]:
    """Trace a step for arguments of this form. Also return the arguments of the trace, whose values are never read."""
    columns = {"columns": 1} if inputs.tokens.shape[1] == 1 else {}
    shown, *allowed = (sizes._replace(**columns) for sizes in (_TRACED, *_ALLOWED))
    fields = [(name, value) for name, value in inputs._asdict().items() if name != "state"]

    def arguments(sizes: _Sizes, device: str) -> tuple[Any, ...]:
        fed = [None if value is None else _blank(value, sizes.of(name), device) for name, value in fields]
        kept = [tuple(_blank(buffer, {2: sizes.slots}, device) for buffer in pair) for pair in buffers]
        weights = {name: _blank(tensor, None, device) for name, tensor in step.tensors().items()}
        return weights, kept, [*fed, tuple(_blank(tensor, {}, device) for tensor in inputs.state)]

    def symbols(sizes: Mapping[int, int]) -> dict[int, object]:
        return {dim: Dim.DYNAMIC for dim, size in sizes.items() if size > 1}

    traced = arguments(shown, "cpu")
    fed = [None if value is None else symbols(shown.of(name)) for name, value in fields]
    cache = symbols({2: shown.slots})
    shapes: Any = (
        {name: {} for name in traced[0]},
        [(cache, cache) for _ in buffers],
        [*fed, tuple({} for _ in inputs.state)],
    )
    exported = torch.export.export(_OfWeights(step.apart()), traced, dynamic_shapes=shapes, strict=False)
    # The library checks nothing, so the tracer's assumptions must hold in every call.
    assumed: Any = getattr(exported.module(), "_guards_fn", None)
    for sizes in allowed if assumed else ():
        assumed(*pytree.tree_leaves(arguments(sizes, "meta")))
    if exported.constants:
        shapes = ", ".join(str(list(getattr(value, "shape", ()))) for value in exported.constants.values())
        raise RuntimeError(f"the model keeps tensors outside of its modules: {shapes}")
    return exported, traced


def _blank(tensor: Tensor, sizes: Mapping[int, int] | None, device: str) -> Tensor:
    """Allocate memory like a tensor: with its strides if `sizes` is None, else contiguous with these sizes."""
    if sizes is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    return torch.empty(shape, dtype=tensor.dtype, device=device)


def _digest(exported: ExportedProgram) -> str:
    """Digest of everything that a library depends on, except torch's version."""
    text = exported.graph_module.print_readable(print_output=False, include_stride=True, include_device=True)
    return _digest_of("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))  # no comments


def _digest_of(text: str) -> str:
    """Return the digest of a text and of the threads, the processor and the instructions that torch may use."""
    machine = str(torch.get_num_threads()), torch.backends.cpu.get_cpu_capability(), cpu_features()
    return sha256("\n".join([text, *machine]).encode()).hexdigest()[:32]


def _noted(note: Path | None) -> Path | None:
    """Return the library that a note names; None if there is none."""
    try:
        name = note.read_text() if note else ""
    except (OSError, ValueError):
        return None
    return compiled_folder() / name if re.fullmatch(r"forward-\w+\.so", name) else None


def _load(library: Path | None) -> Any:
    """Load a library; None if there is none or it is damaged."""
    try:
        return _Runner(str(library), 1) if library and library.exists() else None
    except RuntimeError:
        return None


def _compile_once(exported: ExportedProgram, arguments: tuple[Any, ...], library: Path) -> Any:
    """Compile and store a library, unless another process has done so in the meantime."""
    with ExitStack() as locked:
        with suppress(OSError):  # the cache may be read-only
            locked.callback(os.close, lock_when_free(library.with_suffix(".lock"), ""))
        if loaded := _load(library):
            return loaded
        made = Path(str(torch._inductor.aot_compile(exported.module(check_guards=False), arguments)))
        with suppress(SpecbenchError):
            write_atomically(library, made.read_bytes())
    return _load(library) or _Runner(str(made), 1)
