"""Roofline model of a target forward: its memory traffic and computation, and the time that a device needs for it.

A forward has four parts that run in sequence, each bound by memory or by arithmetic:

    weights     all matrix products with weights, which are read once for any number of columns
    attention   the KV cache of every row is read once and its new entries are written; two products per query
    between     norms, rotation, sums and gates, which move activations through memory, as eager kernels do
    logits      of the image vocabulary: written, converted to float32, and mixed if there is guidance

Nothing here is a measurement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specbench.models.network_sizes import Size
from specbench.system.device_peaks import Peak


@dataclass(frozen=True)
class Forward:
    size: Size  # the model's size
    moved: float  # numbers per column that the layers read and write outside their products
    v_image: int  # image vocabulary
    itemsize: int  # bytes per number of weights and cache
    # columns, images: tokens per row (the window), images of the batch
    columns: float
    images: int
    guided: bool  # whether each image also has an unconditional row
    context: float  # cached tokens that a row attends to in addition to the columns

    @property
    def rows(self) -> int:
        """Rows: conditional and unconditional sequences."""
        return self.images * (1 + self.guided)


class Work(NamedTuple):
    bytes: float
    flops: float


@dataclass(frozen=True)
class Reached:
    """Shares of a device's peak bandwidth and peak FLOP/s that kernels reach."""

    bandwidth: float = 1.0
    flops: float = 1.0


def forward_work(forward: Forward) -> dict[str, Work]:
    """Return bytes and operations by part: `weights, attention, between, logits`."""
    size, rows, columns = forward.size, forward.rows, forward.columns
    seen = forward.context + columns
    attention = size.read(0, rows, seen, forward.itemsize) + forward.itemsize * rows * columns * size.kv
    moved = rows * columns * forward.moved
    logits = rows * columns * forward.v_image
    mixed = 4 + 4 / 2 if forward.guided else 0  # float32: both rows are read, a single row is written
    return {
        "weights": Work(size.read(1, rows, 0, forward.itemsize), size.operations(columns, rows, 0)),
        "attention": Work(attention, size.operations(0, rows, columns * seen)),
        "between": Work(forward.itemsize * moved, 0.0),
        "logits": Work(logits * (2 * forward.itemsize + 4 + mixed), 0.0),
    }


def forward_ms(forward: Forward, peak: Peak, reached: Reached) -> dict[str, float]:
    """Return milliseconds by part: the larger of its memory time and its arithmetic time. If products were measured by
    number of columns, the measured time is used for the weights."""
    work = forward_work(forward)
    spent = {}
    for name, part in work.items():
        moving = part.bytes / (peak.bandwidth(int(part.bytes)) * reached.bandwidth)
        spent[name] = 1e3 * max(moving, part.flops / (peak.flops * reached.flops))
    if peak.products:
        rate = product_rate(peak.products, forward.rows * forward.columns)
        spent["weights"] = 1e3 * work["weights"].flops / (rate * reached.flops)
    return spent


def product_rate(products: Mapping[int, float], columns: float) -> float:
    """Return the FLOP/s of a product with `columns` vectors: log-log interpolation, or the nearest, of `products`."""
    widths = sorted(products)
    below = max((width for width in widths if width <= columns), default=widths[0])
    above = min((width for width in widths if width >= columns), default=widths[-1])
    if above <= below:
        return products[below]
    share = math.log(columns / below) / math.log(above / below)
    return math.exp((1 - share) * math.log(products[below]) + share * math.log(products[above]))
