"""`specbench forecast`: the speed of a decoder on another device, predicted by a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.cli.commands import command
from specbench.cli.options import Json, Out, argument, option
from specbench.cli.output import print_json, print_line, print_table
from specbench.errors import SpecbenchError


@command(
    "forecast",
    "Tokens per step come from runs, or from values that a paper prints. The time of a step is a roofline estimate for "
    "the window, batch and context (weights, KV cache, attention, output logits), plus an overhead. The ranges "
    "follow from the assumed shares of the device's peaks and the assumed overhead; each assumption is printed.",
    epilog="For example: specbench forecast gsd-1 --on A100 --model lumina",
)
def forecast(
    sources: list[str] | None = argument(
        "RUN|TABLE",
        "Run ids, prefixes of run ids, decoders of runs, run folders, or tables of papers (or FILE.toml).",
        None,
        show_default="all runs",
    ),
    on: str | None = option(
        "--on", "DEVICE", "Device: A100, RTX 4090, H100, H200, cpu, or its bandwidth and peak: 2039GB/s,312TFLOP/s."
    ),
    model: str | None = option("--model", "NAME", "Model.", show_default="the sources' model"),
    batch: int = option("--batch", "N", "Images decoded together.", 1),
    dtype: str | None = option("--dtype", "TYPE", "Number format.", show_default="the model's"),
    bandwidth: str = option("--bandwidth-share", "LOW,HIGH", "Share of the peak bandwidth that is reached.", "0.6,0.9"),
    flops: str = option("--flops-share", "LOW,HIGH", "Share of the peak FLOP/s that is reached.", "0.4,0.75"),
    overhead: str = option(
        "--overhead-ms",
        "LOW,HIGH",
        "Milliseconds per step outside forward and drafting; or the word run, for the overhead that each run measured.",
        "0.1,5",
    ),
    window: str = option(
        "--window-factor",
        "LOW,HIGH",
        "Factor by which a forward of several columns takes longer than its bytes and operations predict.",
        "1,1.25",
    ),
    threads: int = option("--threads", "N", "Threads of --on cpu; 0 uses all.", 0),
    out: str = Out,
    json: bool = Json,
) -> None:
    if on is None:
        raise SpecbenchError("--on is missing", "name a device, for example --on A100, or --on 2039GB/s,312TFLOP/s")
    from specbench.papers import forecasts
    from specbench.system.limits import available_threads

    spent = None if overhead == forecasts.OWN_OVERHEAD else forecasts.read_range("overhead-ms", overhead)
    shares = forecasts.read_range("bandwidth-share", bandwidth), forecasts.read_range("flops-share", flops)
    factor = forecasts.read_range("window-factor", window)
    rows = forecasts.forecast(
        on, sources or (), model, out, batch, dtype, *shares, spent, threads or available_threads(), factor
    )
    print_json(rows) if json else _print_forecast(rows)


def _print_forecast(rows: Sequence[Mapping[str, Any]]) -> None:
    first = rows[0]
    print_line(
        f"A forecast, not a measurement: {first['model']} on {first['device']}, {first['dtype']}, batch "
        f"{first['batch']}. In brackets: low to high.\n"
    )
    print_table([_told(row) for row in rows], ("source", "decoder", "columns", "tokens_per_step", *_numbers(first)))
    print("\nAssumed:\n")
    for line in dict.fromkeys(line for row in rows for line in row["assumptions"]):
        print_line(f"- {line}")


def _numbers(row: Mapping[str, Any]) -> dict[str, str]:
    """Return {column of the table: key of the forecast number}. Seconds are per batch if a batch has several images."""
    batched = {"s_per_batch": "seconds", "images_per_hour": "images_per_hour"}
    seconds = {"s_per_image": "seconds"} if row["batch"] == 1 else batched
    return {"ms_per_step": "step_ms", **seconds, "speed_up": "speed_up", "window_cost": "window_cost"}


def _told(row: Mapping[str, Any]) -> dict[str, object]:
    """Format one row as texts, each number with its range."""
    shown = {name: _ranged(row, key) for name, key in _numbers(row).items()}
    cells = {name: row[name] for name in ("source", "columns")}
    return {**cells, "decoder": row["label"], "tokens_per_step": _ranged(row, "tokens_per_step"), **shown}


def _ranged(row: Mapping[str, Any], name: str) -> str:
    values = (row[key] for key in (f"{name}_low", name, f"{name}_high"))
    low, middle, high = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values)
    return middle if low == high else f"{middle} ({low}-{high})"
