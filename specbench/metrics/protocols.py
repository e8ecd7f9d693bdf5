"""Evaluation protocols of the papers: the metric variants behind published numbers.

They differ in nearly every step, so numbers of one never compare with numbers of the other. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.errors import unknown_name

PROTOCOLS: Mapping[str, tuple[str, ...]] = {
    "sjd": ("fid[pytorch-fid]", "clip[b16+299]", "hpsv2[v2.1]"),
    "cool-sd": ("fid[clean+center256]", "clip[b32+prefix+center256]", "hpsv2[v2.1]", "imagereward"),
}
"""`sjd`: SJD, GSD, SJD++. `cool-sd`: Cool-SD, LANTERN, LANTERN++. The first group prints CLIP times 100."""


def find_protocol(name: str) -> tuple[str, ...]:
    """List the metrics of a protocol.

    Raises:
        SpecbenchError: unknown name.
    """
    if name not in PROTOCOLS:
        raise unknown_name("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def with_protocol(metrics: Sequence[str], protocol: str | None) -> list[str]:
    """Metrics by name and those of a protocol, each once."""
    return list(dict.fromkeys([*metrics, *(find_protocol(protocol) if protocol else ())]))
