"""Reader of the papers' tables and figures: `benchmarks/<name>.toml`, see `benchmarks/README.md`. Imports no torch.

An unknown, missing, mistyped or meaningless field, or a mistyped table name, raises an error that names it.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError, unknown_name
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.catalog import find_protocol
from specbench.names import fitting, guess
from specbench.papers.table import (
    MAPS,
    PRINTED,
    SCORE,
    Column,
    PrintedNumber,
    Row,
    Table,
    choice,
    merge_settings,
    takes,
)
from specbench.runs.settings import RunSettings, decoder_settings, run_settings
from specbench.specs.components import CHOICES
from specbench.specs.options import SettingOrigin, SettingSource, Use, plain
from specbench.specs.presets import PRESETS, decoder_name, options_of
from specbench.specs.run_spec import SAMPLING
from specbench.store.run_folders import runs_in
from specbench.system import console
from specbench.system.files import data_folder, text_of
from specbench.system.plugins import is_reference

if TYPE_CHECKING:
    from specbench.stats import Better

_SETTINGS = {**{setting.name.replace("-", "_"): setting for setting in run_settings(use=Use.CELLS)}, **SAMPLING}
_CASE: dict[str, Any] = {"decoder": str, "options": dict, "sampling": dict}
_CASE |= dict.fromkeys(_SETTINGS.keys() - SAMPLING.keys(), object)  # `RunSettings` checks their values
_COLUMN: dict[str, Any] = {"key": str, "name": str, "header": str, "precision": int, "better": str, "scale": float}
_COLUMN |= _CASE
_ROW: dict[str, Any] = dict.fromkeys(("label", "group", "why", "hardware"), str)
_ROW |= {"paper": dict, "spread": dict, "notes": dict, "runnable": bool, "chosen": dict, "bold": list} | _CASE
_TABLE: dict[str, Any] = dict.fromkeys(("name", "paper", "source", "title", "hardware"), str)
_TABLE |= {"notes": list, "maps": list, "defaults": dict, "columns": list, "rows": list}
_PAPER = {"title": str, "authors": str, "venue": str, "year": int, "arxiv": str, "url": str}
_OPTIONS = {*CHOICES, *(name for preset in PRESETS.values() for name in options_of(preset))}
_NO_OPTIONS = {setting.name for setting in run_settings()} - {setting.name for setting in decoder_settings()}
_CHOOSABLE = sorted({*_OPTIONS, *_SETTINGS, "decoder", "protocol"})
_OPEN = "the model's own"
_BETTER: Mapping[str, Better | None] = {"higher": "higher", "lower": "lower", "none": None}
_PAPERS, _CONVENTIONS = "papers.toml", "conventions"
_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
_NOUNS[list] = "an array"


def table_names() -> list[str]:
    """List the names of the bundled tables in natural order."""
    names = (path.stem for path in data_folder("benchmarks").glob("*.toml") if path.name != _PAPERS)
    return sorted(names, key=_natural)


def _natural(name: str) -> tuple[object, ...]:
    """Natural sort key: sjd-2 before sjd-10, figures after tables."""
    head, _, tail = name.rpartition("-")
    digits = "".join(filter(str.isdigit, tail))
    return head, not tail.isdigit(), int(digits or 0), tail


def is_table(name: str) -> bool:
    """Return whether a name is a bundled table, or the file of a user's table."""
    return name.endswith(".toml") or table_name(name) in table_names()


def table_name(typed: str) -> str:
    """Return the name of the table that a text such as "SJD++ Table 2" or "2410.01699 fig. 6" means; else the text."""
    valid = table_names()
    if typed in valid:
        return typed
    text = re.sub(r"arxiv[: ]*|tab(le|\.)?(?=[\d _-])", "", typed.casefold())
    text = re.sub(r"fig(ure|\.)?(?=[\d _-])", "fig", text)
    also = {table: [f"{paper}-{table.rpartition('-')[2]}" for paper in _paper_names(table)] for table in valid}
    return next(iter(fitting(text, valid, "table", also)), typed)


def _paper_names(table: str) -> list[str]:
    """Return the accepted names of a table's paper: short name, decoder, arXiv number, and title up to a colon."""
    paper = table.rpartition("-")[0]
    entry = papers().get(paper, {})
    title = str(entry.get("title", paper)).partition(":")[0]
    return [paper, paper.replace("pp", "++"), str(entry.get("arxiv", paper)), title]


def load_table(name: str, out: str | Path | None = None) -> Table:
    """Load a bundled table by name, or a user's table from its file; see `read_table`."""
    if name.endswith(".toml"):
        return read_table(Path(name), out)
    name = table_name(name)
    if name not in table_names():
        if of_paper := _tables_of_paper(name):
            raise SpecbenchError(f"unknown table '{name}'", f"tables of this paper: {', '.join(of_paper)}")
        raise unknown_name("table", name, table_names())
    return read_table(data_folder("benchmarks") / f"{name}.toml", out)


def _tables_of_paper(typed: str) -> list[str]:
    """Return the tables of the paper that a text such as "gsd" or "gsd-99" names."""
    paper = re.sub(r"[ _-]+(tab|fig)?[a-z.]*[ _-]*\d+$", "", typed, flags=re.IGNORECASE)
    return fitting(paper, [], also={table: _paper_names(table) for table in table_names()})


def load_tables() -> list[Table]:
    """Load all tables, in the order of their names."""
    return [read_table(data_folder("benchmarks") / f"{name}.toml") for name in table_names()]


def refuse_mistyped(names: Sequence[str], out: str | Path) -> None:
    """Reject a name that matches no run in `out` but resembles a table or names a paper; without runs, any name."""
    runs, tables = [folder.name for folder in runs_in(Path(out))], table_names()
    for name in names:
        if name in tables or os.path.exists(name) or any(run.startswith(name) or f"-{name}-" in run for run in runs):
            continue
        if table_name(name) not in tables and (of_paper := _tables_of_paper(name)):
            hint = f"no run has this name; tables of this paper: {', '.join(of_paper)}"
            raise SpecbenchError(f"unknown table '{name}'", hint)
        if guess(name, tables):
            raise unknown_name("table", name, tables)
        if not runs and os.sep not in name and not name.endswith(".zip"):
            raise SpecbenchError(f"unknown run or table '{name}'", f"no runs in {out}; tables: specbench list tables")


def refuse_tables(command: str, names: Sequence[str]) -> None:
    """Reject papers' tables for a command that takes only runs."""
    if table := next(filter(is_table, names), None):
        raise SpecbenchError(f"{command} takes runs, and {table} is a paper's table", f"specbench report {table}")


@functools.cache
def papers() -> Mapping[str, Mapping[str, object]]:
    """Return {short name of a paper: `title`, and if known `authors, venue, year, arxiv, url`}."""
    path = data_folder("benchmarks") / _PAPERS
    content = {name: entry for name, entry in _read_toml(path).items() if name != _CONVENTIONS}
    for name, entry in content.items():
        _check(entry, _PAPER, ("title",), path.name, name)
    return content


@functools.cache
def conventions() -> Mapping[str, object]:
    """Return default `options` of all tables, their reasons (`chosen`), and {setting: `effects` of another reading}."""
    path = data_folder("benchmarks") / _PAPERS
    content = _read_toml(path)[_CONVENTIONS]
    _check(
        content, dict.fromkeys(("options", "chosen", "effects"), dict), ("options", "chosen"), path.name, _CONVENTIONS
    )
    return content


def read_table(path: Path, out: str | Path | None = None) -> Table:
    """Read a table from its file. In a user's table, `name`, `paper` and `source` are optional. `conventions()` apply
    only to papers' tables. `out`: results folder, whose scores may be named although their plug-in is not installed.
    """
    content, file = _read_toml(path), path.name
    axes = content.pop("axes", [])
    users = "paper" not in content and path.parent != data_folder("benchmarks")
    content = {"name": path.stem, "source": "own table"} | content if users else content
    _check(content, _TABLE, ("name", *(() if users else ("paper",)), "source", "title", "columns", "rows"), file)
    if content["name"] != path.stem:
        raise _wrong(file, "name", f"'{content['name']}' differs from the name of the file")
    if not users and content["paper"] not in papers():
        raise _wrong(file, "paper", str(unknown_name("paper", content["paper"], papers())))
    defaults = dict(content.get("defaults", {}))
    _check(defaults, _CASE | {"protocol": str, "chosen": dict, "readings": dict}, (), file, "defaults")
    shared = {"options": {}, "chosen": {}} if users else conventions()
    protocol, reasons = defaults.pop("protocol", None), shared["chosen"] | defaults.pop("chosen", {})
    readings = defaults.pop("readings", {})
    defaults["options"] = shared["options"] | defaults.get("options", {})
    _check_reasons(reasons, file, "defaults", readings)
    stated = _stated(defaults, file, "defaults")
    mistakes: list[SpecbenchError] = []
    read = _each(content["columns"], mistakes, lambda entry, i: _column(entry, protocol, path, f"columns[{i}]", out))
    columns = tuple(column for column in read if column)
    names = [column.name for column in columns]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise _wrong(file, "columns", f"two columns are called '{repeated[0]}'; give one of them another `name`")
    valid = names if len(columns) == len(read) else None  # if a column was rejected, its name is unknown
    rows_read = _each(
        content["rows"], mistakes, lambda entry, i: _row(entry, valid, stated, content, file, f"rows[{i}]")
    )
    _check_default_options(content.get("defaults", {}), rows_read, mistakes, file)
    for mistake in mistakes[:-1]:
        console.show_error(mistake)
    if mistakes:
        raise mistakes[-1]
    shared = {**readings, "protocol": protocol}
    rows = tuple(
        replace(row, chosen=_chosen(row, shared, reasons, entry.get("chosen", {}), readings.keys()))
        for row, entry in zip(rows_read, content["rows"], strict=True)
    )
    for field, empty in (("columns", not columns), ("rows", not rows)):
        if empty:
            raise _wrong(file, field, "empty")
    notes, maps = content.get("notes", []), content.get("maps", [])
    if not all(isinstance(note, str) for note in notes):
        raise _wrong(file, "notes", "not text")
    panels = axes if isinstance(axes, list) else [axes]
    for panel in panels:
        _check_axes(panel, names, file)
    for name in maps:
        if name not in MAPS:
            raise _wrong(file, "maps", str(unknown_name("map", str(name), MAPS)))
    return Table(
        content["name"], content.get("paper"), content["source"], content["title"], content.get("hardware"),
        tuple(notes), tuple(panels), columns, rows, tuple(maps),
    )  # fmt: skip


def _each(entries: Sequence[Any], mistakes: list[SpecbenchError], read: Callable[[Any, int], object]) -> list[Any]:
    """Apply `read` to each entry. If it raises an error, the result is None, and the error is added to `mistakes`."""
    entries_read: list[Any] = []
    for place, entry in enumerate(entries):
        try:
            entries_read.append(read(entry, place))
        except SpecbenchError as error:
            mistakes.append(error)
            entries_read.append(None)
    return entries_read


def _check_default_options(
    defaults: Mapping[str, Any], rows: Sequence[Row | None], mistakes: list[SpecbenchError], file: str
) -> None:
    """Reject default options that no decoder of the rows accepts, unless a row could not be read."""
    runnable = [row for row in rows if row and row.not_runnable_reason is None]
    taken = set().union(*(takes(row.decoder, row.settings.options) for row in runnable))
    for name in defaults.get("options", {}) if taken and all(rows) else ():
        if name not in taken:
            mistakes.append(_wrong(file, "defaults.options", str(unknown_name("option", name, taken))))


def _column(entry: Any, protocol: str | None, path: Path, place: str, out: str | Path | None) -> Column:
    file = path.name
    _check(entry, _COLUMN, ("key", "header"), file, place)
    key, score, better = entry["key"], None, None
    if key.startswith(SCORE):
        score, better = _score(key.removeprefix(SCORE), protocol, file, place, out)
    elif not key.startswith(PRINTED) and path.parent != data_folder("benchmarks"):
        from specbench.stats import NUMBERS  # imports pandas, which lists of the bundled tables do not need

        valid = [name for name, number in NUMBERS.items() if not number.type.startswith("list")]
        if key not in valid:
            raise _wrong(file, f"{place}.key", str(unknown_name("key", key, [*valid, "score:METRIC"])))
        better = NUMBERS[key].better
    if (stated := entry.get("better", better or "none")) not in _BETTER:
        raise _wrong(file, f"{place}.better", str(unknown_name("value", stated, _BETTER)))
    if _BETTER[stated] and better not in (None, stated):
        raise _wrong(file, f"{place}.better", f"'{stated}', but {better} values of {score or key} are better")
    return Column(
        entry.get("name", key), key, entry["header"], score, entry.get("precision", 2), _BETTER[stated],
        entry.get("scale", 1.0), *_stated(entry, file, place),
    )  # fmt: skip


def _score(text: str, protocol: str | None, file: str, place: str, out: str | Path | None) -> tuple[str, Better | None]:
    """Return the stored name of a score, and which values are better, if known: ":" replaces "/", and "fid" becomes the
    protocol's variant of FID. Scores in `out` name and direct metrics that are not installed, and parts of plug-ins."""
    metric, _, part = text.partition("/")
    variants, better, problem = [metric], None, None
    try:
        variants += [name for name in find_protocol(protocol) if name.partition("[")[0] == metric] if protocol else []
        metric_catalog.metric_summary(variants[-1])
        better = metric_catalog.direction(variants[-1], part)
        name = metric_catalog.metric(metric).name if is_reference(metric) else variants[-1]
    except SpecbenchError as error:
        name, problem = metric, error
    score = ":".join(filter(None, (name, part)))
    if better is None and out is not None:
        from specbench.metrics.score_store import stored_directions  # imports pandas

        better = stored_directions(runs_in(Path(out))).get(score)
    if problem and better is None:
        raise _wrong(file, f"{place}.key", str(problem))
    return score, better


def _row(
    entry: Any,
    columns: Sequence[str] | None,
    defaults: tuple[RunSettings, tuple[int, ...]],
    content: Mapping[str, Any],
    file: str,
    place: str,
) -> Row:
    _check(entry, _ROW, ("label",), file, place)
    runnable = entry.get("runnable", True)
    if runnable == ("why" in entry):
        raise _wrong(file, f"{place}.why", "`why` is required with `runnable = false`, and not allowed otherwise")
    (shared, shared_seeds), (stated, seeds) = defaults, _stated(entry, file, place)
    _check_reasons(entry.get("chosen", {}), file, place)
    for needed in ("model", "decoder") if runnable else ():
        if needed not in stated.origins and needed not in shared.origins:
            raise _wrong(file, f"{place}.{needed}", "missing here and in [defaults]")
    noted = columns and [*columns, "row"]
    for field, kind, valid in (("paper", float, columns), ("spread", float, columns), ("notes", str, noted)):
        for name, value in entry.get(field, {}).items():
            if valid is not None and name not in valid:
                raise _wrong(file, f"{place}.{field}", str(unknown_name("column", name, valid)))
            if not _is(value, kind):
                raise _wrong(file, f"{place}.{field}.{name}", f"{value!r} is not {_NOUNS[kind]}")
    for name in entry.get("bold", ()):
        if name not in entry.get("paper", {}):
            raise _wrong(file, f"{place}.bold", str(unknown_name("printed column", name, entry.get("paper", {}))))
    settings = _settings(shared, stated, runnable, file, place)
    return Row(
        entry["label"], entry.get("group"), settings, entry.get("paper", {}),
        entry.get("spread", {}), entry.get("notes", {}), entry.get("why"),
        entry.get("hardware", content.get("hardware")), bold=tuple(entry.get("bold", ())),
        seeds=seeds or shared_seeds,
    )  # fmt: skip


def _stated(entry: Mapping[str, Any], file: str, place: str) -> tuple[RunSettings, tuple[int, ...]]:
    """Read the settings that an entry states; also return the stated seeds."""
    values: dict[str, object] = {"decoder": (entry["decoder"],)} if "decoder" in entry else {}
    seeds: tuple[int, ...] = ()
    for name, value in {**entry, **entry.get("sampling", {})}.items():
        if name not in _SETTINGS:
            continue
        setting = _SETTINGS[name]
        try:
            if name == "seed":
                seeds = tuple(map(setting.parse, value if isinstance(value, list) and value else [value]))
            else:
                values[setting.name] = setting.parse(value)
        except SpecbenchError as error:
            raise _wrong(file, f"{place}.{'sampling.' * (name in SAMPLING)}{name}", str(error)) from None
    for name, value in entry.get("options", {}).items():
        if name in _NO_OPTIONS:  # `RunSettings` would read it as a setting of the same name
            raise _wrong(file, f"{place}.options", str(unknown_name("option", name, _OPTIONS)))
        if name in CHOICES and str(value) not in CHOICES[name]:
            raise _wrong(file, f"{place}.options", str(unknown_name(name, str(value), CHOICES[name])))
        values[name] = value
    return RunSettings().changed(values, dict.fromkeys(values, SettingOrigin(SettingSource.FILE, file))), seeds


def _settings(defaults: RunSettings, stated: RunSettings, runnable: bool, file: str, place: str) -> RunSettings:
    """Merge the settings of a row over the defaults; reject an unknown decoder and unknown options."""
    try:
        settings = merge_settings(defaults, stated)
        if runnable and decoder_name(settings.decoder[0]) not in PRESETS:
            raise unknown_name("decoder", settings.decoder[0], PRESETS)
    except SpecbenchError as error:
        raise _wrong(file, f"{place}.decoder", str(error)) from None
    valid = takes(settings.decoder[0], settings.options)
    for name in stated.options if runnable else ():
        if name not in valid:
            raise _wrong(file, f"{place}.options", str(unknown_name("option", name, valid)))
    return settings


def _check_reasons(
    reasons: Mapping[str, object], file: str, place: str, readings: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Reject reasons for unknown settings or readings, and reasons that are not text."""
    for name, reason in reasons.items():
        if not isinstance(reason, str):
            raise _wrong(file, f"{place}.chosen.{name}", f"{reason!r} is not text")
        if name not in (*_CHOOSABLE, *readings):
            raise _wrong(file, f"{place}.chosen", str(unknown_name("setting", name, _CHOOSABLE)))


def _chosen(
    row: Row, shared: Mapping[str, object], reasons: Mapping[str, str], stated: Mapping[str, str], readings: Set[str]
) -> tuple[str, ...]:
    """Return the choices of a row and of the whole table, except for options that the row's decoder lacks."""
    if row.not_runnable_reason is not None:
        return ()
    options = row.settings.options
    taken, stated_values = takes(row.decoder, options), row.settings.by_name
    named = {name: setting.name for name, setting in _SETTINGS.items() if setting.name in stated_values}
    fields = {**shared, **{name: stated_values[setting] for name, setting in named.items()}, **options}
    values = {name: _OPEN if value is None else plain(value) for name, value in fields.items()}
    values |= {"decoder": str(row.decoder), "seed": ", ".join(map(plain, row.seeds)) or _OPEN}
    return tuple(
        choice(name, values.get(name, _OPEN), reason)
        for name, reason in {**reasons, **stated}.items()
        if name in options or name in stated or name not in _OPTIONS or name in readings & taken
    )


def _check_axes(axes: object, columns: Sequence[str], file: str) -> None:
    if not isinstance(axes, Mapping) or set(axes) != {"x", "y"}:
        raise _wrong(file, "axes", "must have exactly x and y")
    for axis, value in axes.items():
        kind, colon, _ = str(value).partition(":")
        if axis == "x" and (value == "model" or (colon and kind in ("option", "sampling"))):
            continue
        if value not in columns:
            valid = [*columns, *(("model", "option:NAME", "sampling:NAME") if axis == "x" else ())]
            kind = "axis" if axis == "x" else "column"
            raise _wrong(file, f"axes.{axis}", str(unknown_name(kind, str(value), valid)))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text_of(path.read_bytes()), parse_float=PrintedNumber)
    except OSError as error:
        raise SpecbenchError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecbenchError(f"{path.name}: not a TOML file ({error})") from None


def _check(entry: object, fields: Mapping[str, type], needed: Sequence[str], file: str, place: str = "") -> None:
    """Reject an entry with an unknown, missing or mistyped field."""
    if not isinstance(entry, Mapping):
        raise _wrong(file, place, "is not a table of fields")
    dotted = f"{place}." if place else ""
    for name, value in entry.items():
        if name not in fields:
            raise _wrong(file, place or name, str(unknown_name("field", name, fields)))
        if not _is(value, fields[name]):
            raise _wrong(file, dotted + name, f"{value!r} is not {_NOUNS[fields[name]]}")
    for name in needed:
        if name not in entry:
            raise _wrong(file, dotted + name, "missing")
    if "sampling" in entry:
        _check(entry["sampling"], dict.fromkeys(SAMPLING, object), (), file, f"{dotted}sampling")


def _is(value: object, kind: type) -> bool:
    if kind is not object and (isinstance(value, bool) or kind is bool):
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _wrong(file: str, field: str, problem: str) -> SpecbenchError:
    return SpecbenchError(f"{file}: {field}: {problem}")
