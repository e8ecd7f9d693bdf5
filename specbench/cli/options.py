"""Options and arguments that several commands share, and the flags of `run` and `bench`, which are generated from
`specbench.runs.settings`.

An option is the default of its parameter: `out: str = Out`, `seed: int = option("--seed", "N", "Random seed.", 0)`.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer
from rich.markup import escape

from specbench.errors import SpecbenchError, enumerated
from specbench.metrics.catalog import PROTOCOLS
from specbench.runs.settings import run_settings
from specbench.specs.options import Option, Setting, Use, plain
from specbench.specs.presets import PRESETS, options_of
from specbench.system import console
from specbench.system.table_formats import FORMATS, format_name, formats_with


def option(name: str, metavar: str, help: str, default: Any = None, **more: Any) -> Any:
    """Make an option with a placeholder for its value; further arguments as for `typer.Option`."""
    return typer.Option(default, name, metavar=metavar, help=help, **more)


def switch(name: str, help: str, **more: Any) -> Any:
    """Make an option without a value; further arguments as for `typer.Option`."""
    return typer.Option(False, name, help=help, **more)


def argument(metavar: str, help: str, default: Any = ..., **more: Any) -> Any:
    """Make a positional argument, required if it has no default; further arguments as for `typer.Argument`."""
    return typer.Argument(default, metavar=metavar, help=help, **more)


def of_run(name: str, default: Any, *short: str, help: str = "", **more: Any) -> Any:
    """Make an option of another command from a setting of `run`."""
    (setting,) = run_settings({name})
    more |= {"rich_help_panel": setting.panel} if setting.panel == "Output" else {}
    more |= {"metavar": setting.metavar or None, "help": help or f"{_sentence(setting.help)}.", "envvar": setting.env}
    return typer.Option(default, f"--{name}", *short, show_envvar=False, **more)


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:])


def protocol_option(what: str) -> Any:
    """Make the option --protocol. `what`: beginning of its help; the names of the protocols follow."""
    return option("--protocol", "NAME", f"{what} of a paper: {enumerated(PROTOCOLS, 'or')}.")


def served_option(**more: Any) -> Any:
    return option("--served", "NAME", "The engine's name for the model.", show_default="as checkpoint or model", **more)


def decoders_argument(show_default: str) -> Any:
    text = "Decoder names, or plug-ins as package.module:Name."
    return argument("DECODER", text, None, show_default=show_default)


def dry_run_switch(**more: Any) -> Any:
    text = "Print the resolved settings, the estimated cost and blocking problems of the runs, and exit."
    return switch("--dry-run", text, **more)


def format_option(formats: Sequence[str], usual: str = "markdown") -> Any:
    text, by_ending = f"One of {', '.join(formats)}.", f"by the ending of --to, else {usual}"
    return option("--format", "NAME", text, show_default=by_ending)


def require_ending(flag: str, path: Path, *endings: str) -> None:
    """Reject a file name whose suffix is not one of the `endings`."""
    if path.suffix[1:2].isalpha() and path.suffix.lower() not in endings:
        raise SpecbenchError(f"{flag} {path}: cannot write {path.suffix} files here", f"use {' or '.join(endings)}")


def warn_of_ending(to: Path | None, fmt: str, others: Collection[str]) -> None:
    """Warn if the suffix of a file name belongs to a format in `others`."""
    if to and to.suffix.lower()[1:] in others:
        console.warn(f"{to} is written as {fmt}, as requested, although its ending is of another format")


def chosen_format(output: str, fmt: str | None, to: Path | None, as_json: bool) -> str:
    """Return the requested format of a kind of output, else the format of the file's suffix, else markdown."""
    fmt, ending = "json" if as_json else fmt, to.suffix.lower()[1:] if to else ""
    if fmt is None:
        endings = {name: FORMATS[name].endings for name in formats_with(output)}
        fmt = next(
            (name for name, texts in endings.items() if ending in (name, *texts)), None if ending else "markdown"
        )
        if fmt is None:
            valid = ", ".join(f".{text}" for texts in endings.values() for text in texts)
            figures = "; for a figure: specbench figure NAME" if ending in ("pdf", "png", "svg") else ""
            raise SpecbenchError(f"--to {to}: tables cannot be written as .{ending}", f"valid: {valid}{figures}")
    fmt = format_name(output, fmt)
    if FORMATS[fmt].to_file and to is None:
        raise SpecbenchError(f"--format {fmt} cannot be printed", "name a file with --to")
    others = {text for name, other in FORMATS.items() if name != fmt for text in other.endings}
    warn_of_ending(to, fmt, others - {"txt"})
    return fmt


def check_latex(output: str, fmt: str, caption: str | None, notes: bool, page_alone: bool = False) -> None:
    """Reject --notes and --caption in formats without them. A caption is also the title of a paper's table.
    `page_alone`: whether only an HTML page is written."""
    fmt = "html" if page_alone else fmt
    titled = output == "tables" and fmt not in ("csv", "json")
    if fmt != "latex" and (notes or (caption and not titled)):
        advice = "also write LaTeX: --to FILE.tex" if page_alone else "use --format latex"
        raise SpecbenchError(f"{'--notes' if notes else '--caption'}: not in {fmt}", advice)


Runs = argument("RUN", "Run ids, prefixes of run ids, decoders of runs, or run folders.", None, show_default="all runs")
Run = argument("RUN", "Run id, prefix of a run id, decoder of the run, or run folder.")
Reference = option(
    "--reference", "DIR|FILE", "Reference images, or .npz file with their mu and sigma.", show_default="COCO's images"
)
Columns = option("--columns", "NAME,...", "Markdown and LaTeX: only the columns with these headings, in this order.")
OwnRows = option(
    "--with",
    "DECODER|RUN,...",
    "Add rows to a table: decoders (with the settings of the table's SJD row) or stored runs; may be repeated.",
)
Baseline = option("--baseline", "ROW", "Add speed-ups over this row, and mark differences from it.")
Caption = option("--caption", "TEXT", "LaTeX: the caption of the tables.")
Notes = switch("--notes", "LaTeX: also print notes, definitions and machines below the table.")
To = option("--to", "FILE", "Write to this file, in the format of its ending.")


def _hush(quiet: bool) -> bool:
    if quiet:
        console.show_progress(False)
    return quiet


Out = of_run("out", "results")
Quiet = of_run("quiet", False, "-q", callback=_hush)
Json = of_run("json", False)


def flags(settings: Sequence[Setting], defaults: Mapping[str, str] = MappingProxyType({})) -> Callable[[Any], Any]:
    """Decorate a command so that it accepts `settings` as flags.

    The command's parameter `flags` receives {setting name: value}; flags that were not given are None. `defaults`:
    texts that help shows instead of the default, for settings whose default the command replaces."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        by_parameter = {f"flag_{setting.name.replace('-', '_')}": setting for setting in settings}

        @wraps(command)
        def wrapper(**arguments: Any) -> None:
            values = {by_parameter[name].name: arguments.pop(name) for name in by_parameter}
            command(**arguments, flags=values)

        parameters = inspect.signature(command, eval_str=True).parameters.values()
        kept = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters if parameter.name != "flags"]
        generated = [_parameter(name, setting, defaults.get(setting.name)) for name, setting in by_parameter.items()]
        vars(wrapper)["__signature__"] = inspect.Signature([*generated, *kept])
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*generated, *kept)}
        return wrapper

    return decorate


def _parameter(name: str, setting: Setting, default: str | None) -> inspect.Parameter:
    switch = setting.type is bool
    kind = bool | None if switch else list[str] | None if setting.many else str | None
    short = ["-q"] if setting.name == "quiet" else []
    off = f"/--no-{setting.name}" if switch and Use.OPTION in setting.uses else ""
    more: dict[str, Any] = {"metavar": setting.metavar, "rich_help_panel": setting.panel, "show_default": False}
    option = typer.Option(None, f"--{setting.name}{off}", *short, help=_help(setting, default), **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _help(setting: Setting, default: str | None) -> str:
    if Use.OPTION in setting.uses:
        return ". ".join(_decoder_help(option, bool(setting.others)) for option in (setting, *setting.others))
    text = _sentence(setting.help)
    if default is None and (setting.unset or setting.type is bool or setting.value_unset in ("", ())):
        return text
    return f"{text} [dim](default {escape(default or str(setting.default))})[/dim]"


def _decoder_help(option: Option, of_several: bool) -> str:
    """Describe an option: "Cluster size (default for gsd: 10)". `of_several`: begin with at most 5 decoders."""
    owners: dict[str, list[str]] = {}
    for name, options in _options_by_preset(tuple(PRESETS)).items():
        if (same := options.get(option.name)) and same.help == option.help:
            value = ("on" if same.default else "off") if same.type is bool else plain(same.default)
            owners.setdefault(value, []).append(name)
    names = [name for some in owners.values() for name in some]
    few = of_several and 0 < len(names) <= 5
    common = [value for value, some in owners.items() if len(some) > 4 or (few and len(owners) == 1)]
    shown = [" or ".join(common) + " by decoder" * (len(common) > 1)] if any(common) else []
    shown += [f"for {'/'.join(some)}: {value}" for value, some in owners.items() if value not in common]
    note = f" [dim](default {escape('; '.join(shown))})[/dim]" if shown else "" if names else " (used by no preset)"
    return _sentence(f"for {'/'.join(names)}: {option.help}" if few else option.help) + note


@cache
def _options_by_preset(names: tuple[str, ...]) -> dict[str, dict[str, Option]]:
    return {name: options_of(PRESETS[name]) for name in names}
