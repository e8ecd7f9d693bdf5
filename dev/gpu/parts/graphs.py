"""Compiled steps: equality of tokens, numbers of forms and captures, addresses of the KV caches."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from timing import CAPTION

from parts.claims import Outcome, claim
from parts.scales import GIB, Scale, has_graphs
from specbench.decoding.loop import decode
from specbench.models.catalog import find_model, load_model
from specbench.models.transformer.compilation import graph_bytes
from specbench.prompts import Request
from specbench.specs.presets import resolve


def graphs(device: str, scale: Scale) -> Outcome:
    """Decode successive images eagerly and compiled; count forms and captures, and record the caches' addresses."""
    eager, compiled = load_model("shapes", device), load_model("shapes", device)
    if has_graphs(device):
        compiled.compile()
    names, sampling = ("ar", "sjd", "eagle") if has_graphs(device) else ("ar",), find_model("shapes").sampling()
    rows = []
    with _counting_captures() as captured, _noting_addresses() as addresses:
        for name in names:
            for number in range(4 if has_graphs(device) else 2):
                request = [Request(CAPTION, "gpu", number)]
                [image] = decode(eager, request, resolve(name), sampling, 0, render=False)
                addresses.clear()
                [other] = decode(compiled, request, resolve(name), sampling, 0, render=False)
                forms = sum(function.forms for function in getattr(compiled, "compiled", []))
                rows.append(
                    {
                        "decoder": name,
                        "image": number,
                        "same": float(np.mean(image.tokens == other.tokens)),
                        "forms": forms,
                        "captures": captured[0] or 0,
                        "addresses": list(addresses),
                    }
                )
    same = statistics.mean(row["same"] == 1 for row in rows)
    again = sum(row["captures"] > before["captures"] for before, row in pairwise(rows) if row["image"] > 1)
    gib = graph_bytes() / GIB if has_graphs(device) else 0.0
    unlike = len({address for row in rows for address in row["addresses"]})
    claims = [
        claim("images whose compiled tokens equal the eager ones", f"{same:.0%}", "all", same == 1),
        claim("different addresses of the KV cache over all images", unlike),
        claim("compiled forms; captured graphs; GiB they hold", f"{rows[-1]['forms']}; {captured[0]}; {gib:.2f}"),
    ]
    if has_graphs(device):
        claims.append(claim("images after a decoder's second that captured a graph again", again, "0", again == 0))
    return claims, rows


@contextmanager
def _counting_captures() -> Iterator[list[int | None]]:
    """Number of CUDA graphs that torch records in the block; None if this version of torch keeps them elsewhere."""
    count: list[int | None] = [0]
    try:
        from torch._inductor.cudagraph_trees import CUDAGraphNode
    except ImportError:
        yield [None]
        return
    made = CUDAGraphNode.__init__

    def counted(self, *args, **kwargs):
        count[0] += 1
        made(self, *args, **kwargs)

    CUDAGraphNode.__init__ = counted
    try:
        yield count
    finally:
        CUDAGraphNode.__init__ = made


@contextmanager
def _noting_addresses() -> Iterator[list[int]]:
    """Addresses of the first layer's keys in the caches that sessions create in the block."""
    from specbench.models.transformer.kv_cache import PositionLayer

    addresses: list[int] = []
    hold = PositionLayer._hold

    def noted(self, keys, values):
        hold(self, keys, values)
        addresses.append(keys.data_ptr())

    PositionLayer._hold = noted
    try:
        yield addresses
    finally:
        PositionLayer._hold = hold
