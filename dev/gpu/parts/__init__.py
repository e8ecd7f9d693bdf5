"""The parts of `make gpu`: each proves or measures one thing on a device, and returns claims and raw rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from parts.against_generate import generate
from parts.claims import Outcome
from parts.decisive import apart, decisive
from parts.energy import energy
from parts.engine import engine
from parts.exactness import exactness, recorded
from parts.families import families
from parts.forms import form
from parts.forwards import forwards
from parts.graphs import graphs
from parts.planned_memory import memory
from parts.repeats import repeats
from parts.scales import Scale
from parts.steps import eager_steps, steps, vertical_steps
from parts.throughput import throughput
from parts.true_size import one_model, small_card


def scores(device: str, scale: Scale) -> Iterator[Outcome]:
    """Run `parts.scores`, imported only here: the digest of a part covers all imports of its process, and a change of a
    metric must not make the measurements of decoders stale."""
    from parts.scores import scores

    return scores(device, scale)


class Part(NamedTuple):
    """One part.

    Attributes:
        run: measures the part; arguments device and scale. Returns its outcome, or yields pieces of it.
        seconds: its time limit.
        alone: whether nothing else may run at the same time, because the part measures time, memory or energy.
    """

    run: Callable[[str, Scale], Outcome | Iterator[Outcome]]
    seconds: int
    alone: bool = True


PARTS = {
    "decisive": Part(decisive, 270),
    "form-apart": Part(apart, 130),
    "janus": Part(partial(one_model, "janus", "ar,sjd", 1), 120),
    "int8wo": Part(partial(form, "int8wo"), 120),
    "exactness": Part(exactness, 300, alone=False),
    "graphs": Part(graphs, 220, alone=False),
    "families": Part(families, 200, alone=False),
    "recorded": Part(recorded, 200, alone=False),
    "engine": Part(engine, 120),
    "repeats": Part(repeats, 60, alone=False),
    "vertical": Part(vertical_steps, 200),
    "lumina": Part(partial(one_model, "lumina", "ar,sjd", 1), 240),
    "form-tuned": Part(partial(form, "form-tuned"), 200),
    "forwards": Part(forwards, 60),
    "steps": Part(steps, 270),
    "generate": Part(generate, 270),
    **{name: Part(partial(form, name), 200) for name in ("form-sums", "form-autotune")},
    **{name: Part(partial(one_model, name, "ar,sjd", 1), 200) for name in ("llamagen", "simplear", "emu3")},
    "small-card": Part(small_card, 270),
    "scores": Part(scores, 240),
    "memory": Part(memory, 30),
    "throughput": Part(throughput, 45),
    "eager-steps": Part(eager_steps, 60),
    "energy": Part(energy, 45),
}
"""The parts, the most important first, with time limits that fit into nine minutes; neighbours that are not `alone`
run side by side."""
