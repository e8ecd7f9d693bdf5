"""Generated blocks of what was measured, forecast or printed: their numbers come from results/ and benchmarks/."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from markdown_blocks import ROOT, as_table, escape, link

from specbench.papers.table_files import conventions
from specbench.specs.presets import PRESETS
from specbench.store.run_folders import find_runs
from specbench.system.version import __version__

RESULTS = ROOT / "results" / "readme"
REFERENCE = ROOT / "results" / "reference"


def effects(page: Path, argument: str) -> str:
    """What another reading changes, by setting, where that is known: stated, or measured on `shapes`."""
    rows = {setting: [escape(said)] for setting, said in conventions()["effects"].items()}
    for setting, found in _measured_readings().items():
        if setting != "schedule":  # a table of its own
            each = [f"`{one['reading']}` {_tokens(one)}" for one in found]
            rows.setdefault(setting, []).append(", ".join(each))
    return as_table(
        ["setting", "effect of another choice"],
        ([f"`{setting}`", "; ".join(said)] for setting, said in sorted(rows.items())),
    )


def _measured_readings() -> dict[str, list[dict]]:
    return json.loads((REFERENCE / "readings.json").read_text())


def _tokens(one: dict) -> str:
    return f"{one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"


def schedules(page: Path, argument: str) -> str:
    """The readings of Cool-SD's schedule: lengths of the fitted chain beside the printed ones, tokens on `shapes`."""
    from schedules import READINGS, fitted

    found, measured = fitted(), [_tokens(one) for one in _measured_readings()["schedule"]]
    places = [f"{model}, delta = {delta:g}" for model, delta in found]
    rows = [["printed", *(f"{length:.2f}" for length, _ in found.values()), "-"]]
    for place, name in enumerate(READINGS):
        rows.append([name, *(f"{lengths[name]:.2f}" for _, lengths in found.values()), measured[place]])
    return as_table(["the schedule's reading", *places, "`shapes`, delta = 1.1"], rows)


def printed_latencies(page: Path, argument: str) -> str:
    """The papers' latencies per step over the weight read of their GPUs: the range of a table's rows with a floor."""
    from printed_floors import printed_latencies as rows

    found: dict[tuple[str, str], list[dict]] = {}
    for one in rows():
        if one["over_floor"] is not None:
            found.setdefault((str(one["table"]), str(one["device"]).removeprefix("NVIDIA ")), []).append(one)

    def span(some: list[dict], number: str) -> str:
        low, high = (f"{end(one[number] for one in some):.1f}" for end in (min, max))
        return low if low == high else f"{low} to {high}"

    header = ["table", "GPU", "rows", "printed ms per step", "times the weight read", "times the floor"]
    numbers = ("printed_step_ms", "over_weights", "over_floor")
    return as_table(
        header,
        (
            [f"`{table}`", device, str(len(some)), *(span(some, n) for n in numbers)]
            for (table, device), some in found.items()
        ),
    )


def paper_plan(page: Path, argument: str) -> str:
    """Forecast hours and disk of the runs of a table of one model on a GPU."""
    from specbench import estimate, forecast

    table, _, device = argument.partition(" ")
    plans = estimate(table)
    speeds = forecast(device, [table], plans[0]["model"].partition("+")[0])

    def ranges(values: Iterable[Sequence[float]], factor: float) -> str:
        middle, low, high = (sum(ends) * factor for ends in zip(*values, strict=True))
        return f"{middle:.3g} ({low:.3g}-{high:.3g})"

    paces = [[speed[f"seconds{end}"] for end in ("", "_low", "_high")] for speed in speeds]
    hours = [[s * plan["images"] for s in pace] for pace, plan in zip(paces, plans, strict=True)]
    sets: dict[str, list[Sequence[float]]] = {}
    for plan, hour in zip(plans, hours, strict=True):
        sets.setdefault(plan["prompts"], []).append(hour)
    lines = [[f"{name}: {len(some)} rows", ranges(some, 1 / 3600)] for name, some in sets.items()]
    disk = sum(plan["megabytes"] for plan in plans) / 1e3
    images = sum(plan["images"] for plan in plans)
    lines.append(["all", ranges(hours, 1 / 3600)])
    each = dict.fromkeys(f"{plan['images']:,} for a row of {plan['prompts']}" for plan in plans)
    said = f"Images: {', '.join(each)}, {images:,} in all, at most {disk:.0f} GB on disk."
    return as_table(["prompts", "hours"], lines) + f"\n\n{said}"


def gpu(page: Path, argument: str) -> str:
    """A column for each device on which `make gpu` ran: the goals met by part."""
    raws = sorted((ROOT / "results" / "gpu").glob("*/raw.json"))
    if not raws:
        return "Nothing has been measured on a GPU yet; `make gpu` does."
    found = [json.loads(raw.read_text()) for raw in raws]
    parts = dict.fromkeys(part["part"] for device in found for part in device["parts"])
    met = [{part["part"]: _goals_met(part["claims"]) for part in device["parts"]} for device in found]
    titles = [
        f"[{device['device']}]({link(page, raw.with_name('report.md'))})"
        for raw, device in zip(raws, found, strict=True)
    ]
    rows = [[part, *(device.get(part, "not run") for device in met)] for part in parts]
    return as_table(["goals of `make gpu` met", *titles], rows)


def _goals_met(claims: list[dict]) -> str:
    if any(one["verdict"] == "failed" for one in claims):
        return "failed"
    aims = [one for one in claims if one["goal"] != "-"]
    return f"{sum(one['verdict'] == 'met' for one in aims)} of {len(aims)}" if aims else "-"


def results(page: Path, argument: str) -> str:
    """The headline table of the runs committed under results/readme, a forecast for a GPU, and their pictures."""
    from specbench.papers.forecasts import forecast
    from specbench.reporting import report_rows
    from specbench.reporting.columns import first_columns
    from specbench.reporting.demo import PICTURE

    rows = report_rows(find_runs(RESULTS / "runs.zip"))
    columns = [column for column in first_columns(rows) if any(column.cell(row) != "-" for row in rows)]
    columns = [column for column in columns if not column.title.startswith("images")]
    elsewhere = {row["source"]: row for row in forecast("A100", out=RESULTS / "runs.zip", model="lumina")}
    titles = [column.title for column in columns] + ["forecast for Lumina on an A100"]
    cells = ([column.cell(row) for column in columns] + [_forecast(elsewhere[f"run {row.run_id}"])] for row in rows)
    machine = rows[0].machine.environment[0]
    said = f"{rows[0].n} images of `shapes` per decoder, all compiled, also AR. Measured on {machine}."
    picture = f"![One row per prompt, one column per decoder]({link(page, RESULTS / PICTURE)})"
    ranges = (
        "A forecast's range covers its assumptions and the values that papers print for this decoder and options "
        "(for an exact decoder: for its kind of draft head) on other models. '-': no paper prints these values."
    )
    return f"{as_table(titles, cells)}\n\n{said} {ranges}\n\n{picture}"


def _forecast(row: dict) -> str:
    """A range of speed-ups; none of a decoder whose tokens per step no paper prints on another model."""
    if row["tokens_per_step_low"] == row["tokens_per_step_high"] != 1:
        return "-"
    low, high = row["speed_up_low"], row["speed_up_high"]
    return f"{low:.1f}x" if low == high else f"{low:.1f} to {high:.1f}x"


DROPPED = ("NLL - H, nats", "in its own context", "images", "window", "lossless", "Frechet")
"""Columns of the table of all decoders that its own file has alone."""


def reference(page: Path, argument: str) -> str:
    """The decoders of today, with their defaults, in the table of `dev/reference/collect.py`; a part of the picture."""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in _lines(REFERENCE / "headline.md")]
    kept = [number for number, name in enumerate(table[0]) if name not in DROPPED]
    # zipar-released decodes as AR here: its window is a row of `shapes`.
    rows = (row for row in table[2:] if row[0] in PRESETS and row[0] != "zipar-released")
    picture = f"![Five captions by some of the decoders]({link(page, REFERENCE / 'gallery.png')})"
    steps = table[0].index("tokens per step")
    cells = ([row[n].split(" [")[0] if n == steps else row[n] for n in kept] for row in rows)
    return as_table([table[0][n] for n in kept], cells) + "\n\n" + picture


def _lines(path: Path) -> list[str]:
    return path.read_text().strip().splitlines()


def drills(page: Path, argument: str) -> str:
    """What was tried and went wrong in the drills, with this version's code and in all."""
    kills, fuzz, interrupts, surroundings = (
        [json.loads(line) for line in (ROOT / "results" / "drills" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("kills", "fuzz", "interrupts", "surroundings")
    )
    faults = sum(row[name] for row in kills for name in ("lost", "duplicated", "changed", "foreign"))
    last = {row["place"]: row for row in surroundings}.values()  # a place is tried again once its faults are mended
    wrong = sum(row["wrong"] for row in last)
    lines = [
        ["kills and moved folders", *_by_version(kills), f"{faults} rows lost, duplicated or changed"],
        ["malformed inputs", *_by_version(fuzz), "0 tracebacks, hangs or files outside the folder"],
        ["Ctrl-C", *_by_version(interrupts), f"{sum(row['traceback'] for row in interrupts)} tracebacks"],
        [
            "commands in odd surroundings",
            _by_version([row | {"cases": row["commands"]} for row in last])[0],
            f"{sum(row['commands'] for row in last):,}",
            f"{wrong} fail only there",
        ],
    ]
    return as_table(["tried", f"with {__version__}", "in all", "went wrong"], lines)


def _by_version(rows: list[dict]) -> list[str]:
    """How many cases the rows of a drill's log count, of this version ("-" if no row states its version) and of all."""
    cases = [(row.get("specbench", row.get("version")), row.get("cases", 1)) for row in rows]
    ours = f"{sum(n for version, n in cases if version == __version__):,}" if any(v for v, _ in cases) else "-"
    return [ours, f"{sum(n for _, n in cases):,}"]
