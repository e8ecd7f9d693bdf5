"""The page of the field: printed speeds of all papers by model and prompt set, in a table each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markdown_blocks import as_table, escape

from specbench.models.catalog import find_model
from specbench.papers.field import AR_SECONDS, STEPS, field
from specbench.papers.table_files import papers
from specbench.specs.presets import PRESETS, resolve

AR, MARK, UNKNOWN = "ar", "†", "not named"
Rows = Sequence[Mapping]


def field_tables(page: Path, argument: str) -> str:
    """A table for each model and prompt set that several papers print, a column per paper and GPU."""
    places = {place: rows for place, rows in _places().items() if _shared(place, rows)}
    order = sorted(places, key=lambda place: -len(_columns(places[place])))
    return "\n\n".join(_section(*place, places[place]) for place in order)


def field_alone(page: Path, argument: str) -> str:
    """What a single paper prints for a model, over its prompt sets, a row each."""
    found: dict[tuple[str, str, str], list[Mapping]] = {}
    for place, rows in _places().items():
        for (paper, gpu), some in () if _shared(place, rows) else _columns(rows).items():
            found.setdefault((place[0], paper, gpu), []).extend(some)
    lines = [
        [
            *(model, ", ".join(dict.fromkeys(row["prompts"] or UNKNOWN for row in rows)), paper, gpu),
            _span([row["seconds"] for row in rows if row["decoder"] == AR]),
            "; ".join(f"{_named(name)} {_ratio_spans(some)}" for name, some in _decoders(rows).items()),
        ]
        for (model, paper, gpu), rows in found.items()
    ]
    shown = [row for rows in found.values() for row in rows]
    return as_table(["model", "prompts", "paper", "GPU", "AR, s", "latency/step ratio"], lines) + _reasons(shown)


def _ratio_spans(rows: Rows) -> str:
    ratios = [_span([row[key] for row in rows if row[key]]) for key in ("latency_ratio", "step_ratio")]
    return "/".join(ratios) + max(map(_mark, rows))


def _span(values: Sequence[float]) -> str:
    return "-".join(dict.fromkeys(_number(end(values)) for end in (min, max))) if values else "-"


def _shared(place: tuple[str, str], rows: Rows) -> bool:
    return UNKNOWN not in place and len(_columns(rows)) > 1


def _places() -> dict[tuple[str, str], list[Mapping]]:
    """Rows by model and prompt set, the papers in the order of their list."""
    order = [name.replace("pp", "++") for name in papers()]
    found: dict[tuple[str, str], list[Mapping]] = {}
    for row in sorted(field(), key=lambda row: order.index(row["paper"])):
        found.setdefault((row["model"] or UNKNOWN, row["prompts"] or UNKNOWN), []).append(row)
    return dict(sorted(found.items()))


def _columns(rows: Rows) -> dict[tuple[str, str], list[Mapping]]:
    """Rows by paper, with a star if its own tables were not read, and GPU."""
    found: dict[tuple[str, str], list[Mapping]] = {}
    for row in rows:
        star = "" if row["source"].startswith("Table") else "*"
        found.setdefault((row["paper"] + star, row["gpu"] or UNKNOWN), []).append(row)
    return found


def _decoders(rows: Rows) -> dict[str, list[Mapping]]:
    """Rows by decoder, in the order of the presets; others follow."""
    found: dict[str, list[Mapping]] = {}
    presets = [*PRESETS]
    for row in sorted(rows, key=lambda row: [*presets, row["decoder"].split()[0]].index(row["decoder"].split()[0])):
        if row["decoder"] != AR:
            found.setdefault(row["decoder"], []).append(row)
    return found


def _named(decoder: str) -> str:
    """A decoder, and whether it is lossy, if it has a preset."""
    preset = decoder.split()[0]
    return decoder if preset not in PRESETS or resolve(preset).lossless else f"{decoder} (lossy)"


def _section(model: str, prompts: str, rows: Rows) -> str:
    columns, (high, wide) = _columns(rows), find_model(model).resolution
    lines = [["GPU", *(gpu for _, gpu in columns)], ["AR, s", *map(_ar_seconds, columns.values())]]
    for name in _decoders(rows):
        lines.append(
            [_named(name), *(_ratios([row for row in some if row["decoder"] == name]) for some in columns.values())]
        )
    table = as_table(["latency/step ratio", *(paper for paper, _ in columns)], lines)
    return f"### {model}, {high} x {wide}, {prompts}\n\n{table}{_reasons(rows)}"


def _ar_seconds(rows: Rows) -> str:
    seconds = (row for row in rows if row["decoder"] == AR and row["seconds"])
    return ", ".join(dict.fromkeys(f"{_number(row['seconds'])}{_mark(row)}" for row in seconds)) or "-"


def _ratios(rows: Rows) -> str:
    """Latency and step ratio of each row; a repetition without steps is left out."""
    known = {row["latency_ratio"] for row in rows if row["step_ratio"]}
    shown = (row for row in rows if row["step_ratio"] or row["latency_ratio"] not in known)
    cells = (f"{_number(row['latency_ratio'])}/{_number(row['step_ratio'])}{_mark(row)}" for row in shown)
    return ", ".join(dict.fromkeys(cells))


def _number(value: float | None) -> str:
    """The digits as printed; a computed ratio with two decimals."""
    if value is None or isinstance(value, int):
        return "-" if value is None else str(value)
    return f"{value:.{getattr(value, 'decimals', 2)}f}"


def _mark(row: Mapping) -> str:
    return MARK if row["contradiction"] else ""


def _reasons(rows: Rows) -> str:
    """Contradictions, in a line for each paper, kind and reason."""
    found: dict[tuple[str, str, str], list[Mapping]] = {}
    for row in rows:
        if row["contradiction"] and row["contradiction"] != STEPS:  # the legend of the page says it
            found.setdefault((row["paper"], row["contradiction"], row["reason"]), []).append(row)
    lines = [
        f"- {MARK} {paper}, {kind}: {_size(kind, some)}{escape(why)}" for (paper, kind, why), some in found.items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def _size(kind: str, rows: Rows) -> str:
    """How large a contradiction is, where the numbers for it are printed."""
    if kind == AR_SECONDS:
        return f"{max(row['times_lowest'] for row in rows):.1f} times the lowest; "
    steps = [row["step_ms"] for row in rows if row["step_ms"] and row["ar_step_ms"]]
    span = " to ".join(dict.fromkeys(f"{end(steps):.1f}" for end in (min, max))) if steps else ""
    return f"AR takes {rows[0]['ar_step_ms']:.1f} ms per step, the decoders {span} ms; " if steps else ""
