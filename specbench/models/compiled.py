"""The target's step as one compiled function.

A step becomes a few kernels (on a GPU one captured graph) instead of some hundred calls that each cost more than their
arithmetic. A form is compiled per combination of shapes, so there must be few: on a CPU they are symbols of one
function; on a GPU windows are filled up to powers of two and attention reads the cache in whole blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.cache import PositionCache
from specbench.models.step import Fed, run_step

if TYPE_CHECKING:
    from specbench.models.transformer import TransformerModel

FORMS = 64
"""Forms that may exist side by side in a process; torch's own limit of 8 is there for accidents."""


class CompiledStep:
    """`run_step` of one model under one guidance.

    Attributes:
        seconds: time of the calls that compiled something.
        forms: how many did.
    """

    def __init__(self, model: TransformerModel, guidance: float, fixed_shapes: bool, options: dict[str, object]):
        """`fixed_shapes`: compile a form per window and block of cache, as captured graphs need it; `options` are
        Inductor's."""
        self.seconds, self.forms = 0.0, 0
        self._fixed_shapes = fixed_shapes

        def step(buffers: Sequence[tuple[Tensor, Tensor]], fed: Fed) -> tuple[Tensor, Tensor]:
            cache = PositionCache(len(buffers), buffers[0][0].shape[2], buffers)
            # Its length as a number of this process would be compiled in; as that of a tensor it is a shape.
            cache.place(fed.slots, fed.index.shape[0])
            return run_step(model, guidance, cache, fed)

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
        options = {"guard_filter_fn": _relevant, **options}
        self._step = torch.compile(step, fullgraph=True, dynamic=not fixed_shapes, options=options)

    def __call__(self, cache: PositionCache, fed: Fed) -> tuple[Tensor, Tensor]:
        """See `run_step`; what it returns is overwritten by the next call."""
        width = fed.tokens.shape[1]
        if self._fixed_shapes:
            fed = fed.widened(1 << (width - 1).bit_length())
            torch.compiler.cudagraph_mark_step_begin()
        before, start = _graphs(), time.perf_counter()
        try:
            # Else two sizes that happen to agree at first are taken for one and the same.
            with torch.fx.experimental._config.patch(use_duck_shape=False):
                features, logits = self._step(cache.buffers(), fed)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise SpecbenchError(
                f"the target's step cannot be compiled here: {reason}", "--compile off", MISSING_PREREQUISITE
            ) from error
        if _graphs() != before:
            self.seconds += time.perf_counter() - start
            self.forms += 1
        return features[:, :width], logits[:, :width]


def compiled_step(model: TransformerModel, guidance: float) -> CompiledStep:
    """As the model's device needs it."""
    if model.device.type == "cuda":
        return CompiledStep(model, guidance, True, {"triton.cudagraphs": True})
    return CompiledStep(model, guidance, False, {"cpp_wrapper": True})


def _relevant(guards: Sequence) -> list[bool]:
    """All but the guard on transformers' list of known classes, which grows with the next one that is loaded."""
    return ["_CAN_RECORD_REGISTRY" not in guard.name for guard in guards]


def _graphs() -> int:
    """Graphs that this process has compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
