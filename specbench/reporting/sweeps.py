"""Sweeps among the runs of a report: runs of one decoder that differ in a single option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.specs.options import plain
from specbench.stats import Estimate

Sweep = dict[str, list[tuple[object, Estimate, float]]]
_NO_SWEEP = {"head", "tree"}


def sweeps(rows: Sequence[Mapping]) -> dict[str, Sweep]:
    """By swept option and curve, (value, speed-up, step ratio) triples in the order of the values.

    A curve is a decoder with the options that its runs vary besides; runs without a speed-up are left out.
    """
    timed = [row for row in rows if row["speedup"] is not None]
    found: dict[str, Sweep] = {}
    for decoder in dict.fromkeys(row["decoder"] for row in timed):
        runs = [row for row in timed if row["decoder"] == decoder]
        varied = [name for name in _options(runs) if len({_value(row, name) for row in runs}) > 1]
        for option in varied:
            for curve, members in _curves(decoder, runs, [name for name in varied if name != option]).items():
                if len({_value(row, option) for row in members}) > 1:
                    found.setdefault(option, {})[curve] = sorted(map(_point(option), members), key=_by_value)
    return found


def _options(runs: Sequence[Mapping]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in runs for name in row["options"]) if name not in _NO_SWEEP]


def _value(row: Mapping, name: str) -> object:
    return row["options"].get(name)


def _curves(decoder: str, runs: Sequence[Mapping], others: Sequence[str]) -> dict[str, list[Mapping]]:
    """Runs that agree in the other varied options, by the decoder's name with these."""
    curves: dict[str, list[Mapping]] = {}
    for row in runs:
        name = " ".join([decoder, *(f"{other}={plain(_value(row, other))}" for other in others)])
        curves.setdefault(name, []).append(row)
    return curves


def _point(option: str):
    return lambda row: (
        _value(row, option),
        Estimate(row["speedup"], row["speedup_low"], row["speedup_high"]),
        row["step_ratio"],
    )


def _by_value(point: tuple) -> tuple:
    number = isinstance(point[0], int | float)
    return not number, point[0] if number else 0, str(point[0])
