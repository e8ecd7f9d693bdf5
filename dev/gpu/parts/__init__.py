"""The parts of `make gpu`: each proves or measures one thing on a device, and returns claims and raw rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parts.against_generate import generate
from parts.claims import Outcome
from parts.energy import energy
from parts.exactness import exactness
from parts.families import families
from parts.forwards import forwards
from parts.graphs import graphs
from parts.planned_memory import memory
from parts.repeats import repeats
from parts.scales import Scale
from parts.steps import eager_steps, steps
from parts.throughput import throughput


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
    "exactness": Part(exactness, 300, alone=False),
    "families": Part(families, 200, alone=False),
    "graphs": Part(graphs, 300, alone=False),
    "repeats": Part(repeats, 60, alone=False),
    "forwards": Part(forwards, 45),
    "generate": Part(generate, 330),
    "steps": Part(steps, 330),
    "eager-steps": Part(eager_steps, 60),
    "throughput": Part(throughput, 45),
    "memory": Part(memory, 30),
    "energy": Part(energy, 45),
}
"""The parts in the order of the report, 20 minutes in all: those that are not alone run side by side."""
