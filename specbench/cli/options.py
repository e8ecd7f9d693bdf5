"""Command-line flags made from `specbench.runs.settings`, so that a setting is written down once."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer
from rich.box import MARKDOWN, Box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench.runs.settings import Setting
from specbench.specs.options import Option, plain
from specbench.specs.presets import PRESETS, options_of
from specbench.system.console import one_line


def flags(settings: Sequence[Setting]) -> Callable:
    """Decorate a command so that it takes `settings` as flags, handed over in one dict by setting name.

    The command's parameter `flags` receives the dict; a flag that was not given is None.
    """

    def decorate(command: Callable) -> Callable:
        by_parameter = {_parameter_name(setting): setting for setting in settings}

        def wrapper(**arguments):
            given = {by_parameter[name].name: arguments.pop(name) for name in by_parameter}
            return command(**arguments, flags=given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own if parameter.name != "flags"]
        generated = [_parameter(name, setting) for name, setting in by_parameter.items()]
        wrapper.__signature__ = inspect.Signature([*generated, *kept])
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*generated, *kept)}
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        return wrapper

    return decorate


def _parameter_name(setting: Setting) -> str:
    return "flag_" + setting.name.replace("-", "_")


def _parameter(name: str, setting: Setting) -> inspect.Parameter:
    switch = setting.option.type is bool
    kind = bool | None if switch else list[str] | None if setting.many else str | None
    short = {"quiet": ["-q"]}.get(setting.name, [])
    option = typer.Option(
        f"--{setting.name}",
        *short,
        help=_help(setting),
        metavar=setting.metavar,
        rich_help_panel=setting.panel,
        show_default=False,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _help(setting: Setting) -> str:
    if setting.panel == "Decoder options":
        return "; ".join(_decoder_help(option) for option in (setting.option, *setting.others))
    text = _sentence(setting.option.help)
    if setting.unset or setting.option.type is bool or setting.default in ("", []):
        return text
    return f"{text} [dim](default {escape(str(setting.option.default))})[/dim]"


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:])


def _decoder_help(option: Option) -> str:
    """What a decoder option does, who takes it and with which default: "Cluster size (gsd 10)"."""
    defaults: dict[object, list[str]] = {}
    for name, preset in PRESETS.items():
        known = options_of(preset).get(option.name)
        if known and known.help == option.help:
            defaults.setdefault(known.default, []).append(name)
    rare = [f"{'/'.join(names)} {plain(value)}" for value, names in defaults.items() if len(names) <= 4]
    common = [f"default {plain(value)}" for value, names in defaults.items() if len(names) > 4]
    owners = ", ".join([*common, *rare]) or "with other choices"
    return f"{_sentence(option.help)} [dim]({escape(owners)})[/dim]"


def print_json(rows: Iterable[dict]) -> None:
    """Rows as one JSON array on stdout; what JSON cannot say (NaN, infinity) is null."""
    print(json.dumps([_plain(row) for row in rows], indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def print_table(rows: Sequence[dict], columns: Sequence[str]) -> None:
    """Rows as a table on stdout: as roomy as a terminal allows, markdown where there is no terminal."""
    if sys.stdout.isatty():
        console = Console(highlight=False)
        layouts = [_table(rows, columns, None, *shape) for shape in ((" ", 2), ("\n", 2), ("\n", 1))]
        table = next((one for one in layouts if console.measure(one).maximum <= console.width), layouts[-1])
    else:
        console, table = Console(width=1000), _table(rows, columns, MARKDOWN, " ", 1)
    with console.capture() as text:
        console.print(table)
    print(text.get().strip("\n" if sys.stdout.isatty() else None))


def _table(rows: Sequence[dict], columns: Sequence[str], box: Box | None, space: str, gap: int) -> Table:
    """`space` stands between the words of a heading, `gap` blanks after each column."""
    table = Table(box=box, header_style="bold", padding=(0, gap, 0, 1 if box else 0), pad_edge=bool(box))
    for column in columns:
        table.add_column(column.replace("_", " ").replace(" ", space), overflow="fold")
    for row in rows:
        cells = (one_line(_cell(row.get(column))) for column in columns)
        table.add_row(*(Text(cell.replace("|", "\\|") if box is MARKDOWN else cell) for cell in cells))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}={plain(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return plain(value)
