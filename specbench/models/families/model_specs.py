"""The text-to-image families with official checkpoints, as facts that need no torch: `models.toml`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specbench.models import network_sizes
from specbench.models.checkpoint_files import Source
from specbench.models.checkpoint_layouts import Layout
from specbench.models.hub_model import HubModel, Sizes
from specbench.specs.run_spec import Sampling

_PLAIN = ("summary", "patch", "row_ends", "v_image", "caption_tokens", "classes", "codes", "guided", "pixel_numbers")
"""Entries that are the model's fields as they stand."""


def _glm_preview(height: int, width: int) -> tuple[tuple[int, int], ...]:
    """Height and width of GLM-Image's preview of a grid: about 256 tokens in its ratio, rounded down as its processor
    does."""
    ratio = height / width
    return ((int(math.sqrt(ratio) * 16), int(math.sqrt(1 / ratio) * 16)),)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _source(entry: Mapping[str, Any]) -> Source:
    return Source(**{name: _tuples(value) for name, value in entry.items()})


def _model(
    name: str, entry: Mapping[str, Any], companions: Mapping[str, Source], second: Sequence[HubModel]
) -> HubModel:
    grid, (size, _, of_kind) = _tuples(entry["grid"]), entry["network"].partition(".")
    network = getattr(network_sizes, size)
    sizes = Sizes(**{field: _tuples(value) for field, value in entry["sizes"].items()}) if "sizes" in entry else None
    needed = tuple(companions[part] for part in entry.get("companions", ()))
    other = entry.get("other_bytes", 0)
    if second:  # its memory includes the second stage, with the KV cache of one picture
        needed = (second[0].source, *second[0].companions)
        sizes = Sizes(tuple(stage.resolution for stage in second))
        cached = 2 * 2 * (math.prod(grid) + second[0].stream) * second[0].network.kv_numbers
        other = second[0].fixed_bytes() + cached
    layouts = [
        Layout(layout, tuple(companions[part["companion"]] if "companion" in part else _source(part) for part in parts))
        for layout, parts in entry.get("also", {}).items()
    ]
    return HubModel(
        name=name,
        target=f"specbench.models.families.{entry['family']}:load",
        source=_source(entry["source"]),
        companions=needed,
        also=tuple(layouts),
        grid=grid,
        sizes=sizes,
        second=tuple(second),
        before=_glm_preview if "before" in entry else None,
        defaults=Sampling(**entry["sampling"]),
        network=network[of_kind] if of_kind else network,
        other_bytes=sum(other) if isinstance(other, list) else other,
        **{field: entry[field] for field in _PLAIN if field in entry},
    )


def _read() -> tuple[HubModel, ...]:
    held = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
    entries, companions = held["model"], {name: _source(entry) for name, entry in held["companion"].items()}

    @cache
    def made(name: str) -> HubModel:
        own = entries[name]
        base = entries.get(own.get("like"), {})
        entry = base | own | {"source": base.get("source", {}) | own.get("source", {})}
        return _model(name, entry, companions, [made(stage) for stage in entry.get("second", ())])

    return tuple(map(made, entries))


MODELS = _read()
