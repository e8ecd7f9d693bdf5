"""The parts of `make gpu`: each proves or measures one thing on a device, and returns claims and raw rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from parts.against_generate import generate
from parts.claims import Outcome
from parts.energy import energy
from parts.exactness import exactness, recorded
from parts.families import families
from parts.forms import FORMS, form
from parts.forwards import forwards
from parts.graphs import graphs
from parts.planned_memory import memory
from parts.repeats import repeats
from parts.scales import Scale
from parts.steps import eager_steps, steps
from parts.throughput import throughput
from parts.true_size import one_model, small_card


def scores(device: str, scale: Scale) -> Outcome:
    """`parts.scores`, imported where it is measured: the digest of a part is of all that its process has imported, and
    a change of a metric makes no measurement of a decoder stale."""
    from parts.scores import scores

    return scores(device, scale)


class Part(NamedTuple):
    """One part.

    Attributes:
        run: measures it; arguments device and scale.
        seconds: that it may take.
        alone: whether nothing else may run meanwhile, because it takes times, memory or energy.
    """

    run: Callable[[str, Scale], Outcome]
    seconds: int
    alone: bool = True


PARTS = {
    "steps": Part(steps, 330),
    "lumina": Part(partial(one_model, "lumina", "ar,sjd,gsd:G=50,scd-mc", 2), 540),
    **{name: Part(partial(form, name), 200) for name in FORMS},
    "exactness": Part(exactness, 300, alone=False),
    "recorded": Part(recorded, 400, alone=False),
    "repeats": Part(repeats, 60, alone=False),
    "graphs": Part(graphs, 300, alone=False),
    "families": Part(families, 200, alone=False),
    "generate": Part(generate, 330),
    "forwards": Part(forwards, 45),
    **{name: Part(partial(one_model, name, "ar,sjd", 1), 300) for name in ("janus", "llamagen", "simplear", "emu3")},
    "small-card": Part(small_card, 540),
    "scores": Part(scores, 240),
    "memory": Part(memory, 30),
    "throughput": Part(throughput, 45),
    "eager-steps": Part(eager_steps, 60),
    "energy": Part(energy, 45),
}
"""The parts in the order of their worth, with what each may take; those that are not alone run side by side."""
