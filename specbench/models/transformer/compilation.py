"""Functions of tensors, run eagerly or compiled for the shapes they are called with."""

import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from specbench.errors import MISSING_PREREQUISITE, CompileError
from specbench.system.digests import cache_folder
from specbench.system.environment import cpu_features
from specbench.system.surroundings import COMPILED, private_folder

_SHAPE_GUARDS = ("TENSOR_MATCH", "SHAPE_ENV")  # Kinds of guards on shapes and tensors
FORMS = 64  # Maximum number of compiled forms of a function; windows of different widths need more than torch's 8

_UNFIT = re.compile(r"[\s'\"\\]")  # unfit for paths: Inductor splits the compiler's command line like a shell

Args = ParamSpec("Args")
Result = TypeVar("Result")


def call_eager(function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Eager `call`: returns function(*args)."""
    return function(*args, **kwargs)


def in_turn(step: Callable[..., Any], carry: tuple[Tensor, ...], given: Sequence[Tensor]) -> list[Tensor]:
    """Run `step` on each column of `given` [B, n, ...] from left to right: step(carry, columns [B, 1, ...]) returns
    the next carry and outputs [B, 1, ...], which are joined to [B, n, ...].

    Code compiled for a CPU keeps the loop: n copies of a draft head take ten times as long to compile, and save only a
    tenth of the head's time. On a GPU one graph holds n copies.
    """
    if torch.compiler.is_compiling() and given[0].device.type == "cpu" and given[0].shape[1] > 1:
        from torch._higher_order_ops.scan import scan  # imported only if something is compiled

        def column(carry: tuple[Tensor, ...], columns: Sequence[Tensor]) -> tuple[Any, Any]:
            carry, outputs = step(carry, [tensor.unsqueeze(1) for tensor in columns])
            return carry, tuple(output.squeeze(1).clone() for output in outputs)  # not sharing memory with the carry

        # Scan over dimension 0: for other dimensions the layout of the outputs differs between versions of torch.
        # The result has the strides of the eager result, so that the code that reads it is compiled once.
        outputs = scan(column, carry, tuple(tensor.movedim(1, 0) for tensor in given), dim=0)[1]
        return [joined.movedim(0, 1).clone(memory_format=torch.contiguous_format) for joined in outputs]
    made = []
    for number in range(given[0].shape[1]):
        carry, outputs = step(carry, [tensor[:, number : number + 1] for tensor in given])
        made.append(outputs)
    return [torch.cat(parts, 1) for parts in zip(*made, strict=True)]


class Compiled:
    """One function, compiled. `seconds`: time of the calls that compiled a form; `forms`: their number."""

    def __init__(self, function: Any, dynamic: bool, options: dict[str, Any]):
        """`dynamic`: one form with symbolic sizes, else a form per set of sizes. `options`: Inductor's options."""
        self.seconds, self.forms = 0.0, 0
        # torch looks compiled code up by code object, and the kept guards do not distinguish two models.
        copied = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
        self._call = torch.compile(copied, fullgraph=True, dynamic=dynamic, options=options)

    def __call__(self, *args: Any) -> Any:
        counters, start = torch._dynamo.utils.counters, time.perf_counter()
        before = counters["stats"]["unique_graphs"]
        try:
            result = self._call(*args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit, OSError) as error:
            if isinstance(error, OSError):
                frames = traceback.walk_tb(error.__traceback__)
                if all(frame.f_globals.get("__name__") != torch._dynamo.convert_frame.__name__ for frame, _ in frames):
                    raise  # the error is not the compiler's
            raise compile_error(error) from error
        if counters["stats"]["unique_graphs"] != before:
            self.seconds += time.perf_counter() - start
            self.forms += 1
        return result


def compiled_folder() -> Path:
    """Return the folder of compiled code: named by the environment, else a folder in the user's cache for this
    torch version and processor type (separate, because Inductor would run wide-vector code on any CPU)."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # imports Inductor

    named = os.environ.get(COMPILED)
    if named not in (None, default_cache_dir()) and not _UNFIT.search(named):  # Inductor sets it to this default
        return Path(named)
    place = cache_folder() / "compiled"
    if _UNFIT.search(os.path.abspath(place)):
        place = private_folder() / "compiled"
    processor = sha256(f"{torch.backends.cpu.get_cpu_capability()} {cpu_features()}".encode()).hexdigest()[:8]
    return place / f"torch-{torch.__version__}-{processor}"


def compile_error(error: Exception) -> CompileError:
    """Return a compiler's message as one line, with the first error that it printed."""
    first, _, rest = str(error).strip().partition("\n")
    lines = rest.partition("Output:\n")[2].splitlines()
    reason = ": ".join([first, *[line.strip()[:200] for line in lines if "error" in line or "cannot" in line][:1]])
    return CompileError(f"a step cannot be compiled here: {reason}", "use --compile off", MISSING_PREREQUISITE)


def keep_compiled() -> None:
    """Let Inductor keep its code in `compiled_folder` and trust torch's CPU capability."""
    config, known = torch._inductor.config.cpp, torch.backends.cpu.get_cpu_capability() == "AVX512"
    # Otherwise Inductor loads a compiled test library for each instruction set, in six processes per start. With AMX,
    # which older compilers do not know, the tests stay.
    if config.vec_isa_ok is None and known and "amx" not in cpu_features():
        config.vec_isa_ok = True
    if _UNFIT.search(tempfile.gettempdir()):  # the compiler writes headers into this folder
        tempfile.tempdir = os.environ["TMPDIR"] = str(private_folder())
    folder = compiled_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[COMPILED] = str(folder)


def graph_bytes() -> int | None:
    """Return the GPU memory of CUDA graphs, which have separate pools; None if the allocator does not report it."""
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # the allocator cudaMallocAsync does not report it
        return None
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


class CompiledForms:
    part: Literal["forward", "sampling"]  # compiled part of a step, a key in run.json
    options: dict[str, Any]  # options of Inductor

    def all_compiled(self) -> Iterable[Any]:
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """Time of the calls that compiled a form."""
        return sum(compiled.seconds for compiled in self.all_compiled())

    @property
    def forms(self) -> int:
        return sum(compiled.forms for compiled in self.all_compiled())


class CompiledFunctions(CompiledForms):
    """Compiled `call` for the drafting, sampling and verification of a decoder. On a small model the hundred small
    operations of these functions take as long as the target's forward. Each function is compiled for one set of shapes;
    only shapes are guarded, so everything else that a function depends on must be the same in all calls."""

    part = "sampling"

    def __init__(self, device: torch.device):
        # On a GPU no CUDA graph is captured, because its next run would overwrite outputs that the drafter still reads.
        # A hash uses each intermediate result twice; unless these are materialised early, the fused expression grows
        # exponentially, and compiling takes minutes.
        # In-place buffers are off: torch 2.13 would declare a buffer for a loop's results twice.
        self.options = {"realize_opcount_threshold": 8, "inplace_buffers": False}
        self.options |= {} if device.type == "cuda" else {"cpp_wrapper": True}
        self._compiled: dict[Callable[..., Any], Compiled] = {}

    def __call__(self, function: Callable[..., Result], *args: Any) -> Result:
        if function not in self._compiled:
            guards_kept = {"guard_filter_fn": lambda guards: [guard.guard_type in _SHAPE_GUARDS for guard in guards]}
            self._compiled[function] = Compiled(function, False, self.options | guards_kept)
        return self._compiled[function](*args)

    def all_compiled(self) -> Iterable[Compiled]:
        return self._compiled.values()


def compile_facts(compiled: Sequence[CompiledForms], device: torch.device) -> dict[str, object]:
    """Facts of compilation for `run.json`, see `specbench.store.run_info.Invocation`; empty if nothing was compiled."""
    if not compiled:
        return {}
    facts = {
        "compile_s": round(sum(part.seconds for part in compiled), 3),
        "compiled_forms": sum(part.forms for part in compiled),
        "compile_options": {part.part: part.options for part in compiled if part.forms},
    }
    graphs = graph_bytes() if device.type == "cuda" else None
    return facts if graphs is None else facts | {"graph_bytes": graphs}
