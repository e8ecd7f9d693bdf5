"""`specbench run` and `specbench demo`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from specbench.cli.commands import Command, command
from specbench.cli.options import Json, Quiet, dry_run_switch, flags, of_run, option
from specbench.cli.output import print_json, print_line, print_table
from specbench.errors import MISSING_PREREQUISITE, unknown_name
from specbench.runs.progress_bar import ProgressReporter, ScoreProgress
from specbench.runs.settings import (
    RunSettings,
    check_environment,
    decoder_settings,
    merge,
    names_with,
    read_config,
    run_settings,
)
from specbench.specs.components import CHOICES
from specbench.specs.options import SettingOrigin, SettingSource, Use, plain
from specbench.specs.presets import PRESETS, decoder_name, options_of
from specbench.system import console
from specbench.system.downloads import offline
from specbench.system.torch_device import AUTO

if TYPE_CHECKING:
    from specbench.runs.plan import Plan
    from specbench.runs.run_progress import Reporter

_SETTINGS = run_settings()
_FIRST_LOOK = 8  # Default number of prompts if neither prompts nor decoders are named; the minimum for an interval
_FIRST = SettingOrigin(SettingSource.DEFAULT, "where neither decoders nor prompts are named")
_MOST_USED = ("decoder", "prompts", "limit", "model", "window", "device", "out", "dry-run")
_EVERYTHING = "all"


class _RunCommand(Command):
    """Command `run`: `--help` prints the most used options, `--help gsd` a decoder's options, `--help all` all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asked = next((place for place, text in enumerate(args) if text in ("--help", "-h")), None)
        self._topic = "".join(args[asked + 1 : asked + 2]) if asked is not None else ""
        if self._topic and self._topic != _EVERYTHING and not self._topic.startswith("-"):
            from specbench.runs.decoder_args import parse_decoders

            self._typed = parse_decoders([self._topic])[0][0]  # without inline options
            self._topic = decoder_name(self._typed)
            if self._topic not in PRESETS:
                raise unknown_name("decoder", self._topic, PRESETS)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options = {**dict.fromkeys(CHOICES), **options_of(PRESETS[self._topic])} if self._topic in PRESETS else {}
        parameters: list[Any] = self.params
        of_decoders = {setting.name for setting in decoder_settings()}
        flags = {parameter.opts[0].removeprefix("--") for parameter in parameters}
        if inline := [f"{name}: {option.help}" for name, option in options.items() if option and name not in flags]:
            self.epilog = escape(f"To be written inline, as in {self._typed}:NAME=VALUE: {'; '.join(inline)}")
        for parameter in parameters:
            name, panel = parameter.opts[0].removeprefix("--"), getattr(parameter, "rich_help_panel", None) or ""
            if options:
                parameter.hidden = name not in options
                if (option := options.get(name)) is not None:
                    parameter.help = escape(f"{option.help} (default {plain(option.default) or 'none'})")
            elif self._topic != _EVERYTHING:
                parameter.rich_help_panel = "Most used" if name in _MOST_USED else panel
                parameter.hidden = name in of_decoders and name not in _MOST_USED
        super().format_help(ctx, formatter)


@command(
    "run",
    "Several decoders take turns on one loaded model, in a balanced order. Stored images are not decoded "
    "again, so the same command resumes an interrupted run.",
    "Each flag is also an environment variable (--top-k: SPECBENCH_TOP_K) and a key of the --config file (top-k = "
    "100); flags override the environment, the environment overrides the file.",
    epilog="Options of a decoder: specbench run --help gsd; all options: --help all. Then: specbench score",
    cls=_RunCommand,
)
@flags(_SETTINGS, {"prompts": "the model's own set, else parti"})
def run(
    flags: dict[str, object],
    config: str | None = option("--config", "FILE", "Read settings from a TOML file.", rich_help_panel="Output"),
    dry_run: bool = dry_run_switch(rich_help_panel="Output"),
    sweep: list[str] | None = option(
        "--sweep",
        "NAME=VALUE,...",
        "Run once with each of these values of a setting. Several --sweep options run every combination.",
        rich_help_panel="What to run",
    ),
) -> None:
    from specbench.runs.sweep import parse_sweep, sweep_plans

    settings = _read(flags, config)
    if dry_run:
        return _show_dry_run(settings, parse_sweep(sweep or ()))
    if settings.quiet:
        console.show_progress(False)
    plans = sweep_plans(settings, parse_sweep(sweep or ()))
    from specbench.runs.run_progress import Reporter
    from specbench.runs.runner import run_plans

    reporter = Reporter() if settings.quiet else ProgressReporter()
    _say_unequal(plans, reporter)
    summary = run_plans(plans, reporter)
    if settings.json:
        print_json([{"run_id": folder.name, "folder": str(folder)} for folder in summary.folders])
    else:
        print(*summary.folders, sep="\n")
    if not settings.json and not settings.quiet and console.is_terminal():
        _show_table(summary.folders)
    if problem := summary.problem():
        raise problem
    if not settings.quiet and settings.origins["limit"] == _FIRST:
        console.say(
            f"Only {_FIRST_LOOK} prompts were decoded; for all: specbench run --decoder ar,sjd; then: specbench score"
        )


def _say_unequal(plans: Sequence[Plan], reporter: Reporter) -> None:
    """Report settings (published values, defaults) in which decoders differ, so that the decoders are incomparable."""
    differences, equal, inline = [], [], SettingOrigin(SettingSource.INLINE)
    for name in ("window", "fresh-q"):
        decoders = [decoder for plan in plans for decoder in plan.decoders]
        open_here = [decoder.spec for decoder in decoders if decoder.origins.get(name) != inline]
        values = {spec.name: spec.options[name] for spec in open_here if spec.options.get(name) is not None}
        if len(set(values.values())) > 1:
            differences.append(f"{name} ({', '.join(f'{decoder} {value}' for decoder, value in values.items())})")
            equal.append(f"--{name} {min(values.values())}")
    if differences:
        reporter.note(f"decoders differ in {' and '.join(differences)}; for equal values: {' '.join(equal)}")


def _read(flags: Mapping[str, object], config: str | None) -> RunSettings:
    check_environment()
    config = config or os.environ.get("SPECBENCH_CONFIG") or None
    stored = read_config(config, [setting.name for setting in _SETTINGS]) if config else {}
    settings = merge(_SETTINGS, flags, config=stored, config_name=config or "")
    if any(map(settings.is_given, ("decoder", "prompts", *names_with(Use.DRAWING)))):
        return settings
    return settings.changed({"limit": _FIRST_LOOK}, {"limit": _FIRST})


def _show_dry_run(settings: RunSettings, axes: Mapping[str, Sequence[object]]) -> None:
    from specbench.runs.dry_run import LISTED, Costs, distinct_outlooks, obstacle
    from specbench.runs.sweep import check_effects, sweep_values

    shared = Costs()
    outlooks = distinct_outlooks(sweep_values(settings, axes), shared)
    if (problem := obstacle(outlooks)) is None:
        check_effects(settings, axes, shared)
    rows = [outlook.row for outlook in outlooks]
    if settings.json:
        print_json(rows)
    elif problem is None or problem.try_this == LISTED or problem.exit_code == MISSING_PREREQUISITE:
        print_dry_run(rows, needed=_needed(sweep_values(settings, {**axes, "seed": ["0"]})))
    if problem:
        raise problem


def print_dry_run(
    rows: Sequence[Mapping[str, Any]], first: Sequence[str] = (), notes: Sequence[str] = (), needed: Sequence[str] = ()
) -> None:
    """Print rows of `specbench.runs.dry_run` as a table that begins with the columns `first` and refers by number to
    obstacles and `notes` below it. `needed`: lines on missing files; if empty, taken from the rows."""
    from specbench.prompts.public import missing_set
    from specbench.runs.dry_run import ON_DISK, ROW

    notes = (*notes, "obstacles")
    texts = {name: list(dict.fromkeys(text for row in rows for text in row[name])) for name in notes}
    signs = {name: ascii_lowercase if name == "obstacles" else map(str, count(1)) for name in texts}
    marks = {name: dict(zip(marked, signs[name], strict=False)) for name, marked in texts.items()}
    shown = [
        {
            **row,
            **{name: _short(row[name]) for name in ("seconds", "megabytes")},
            **{name: row[name] and ("yes" if row[name] == ON_DISK else "no") for name in ("weights", "head")},
            **{
                name: " ".join(marks[name][text] for text in texts[name] if text in row[name]) or None for name in notes
            },
        }
        for row in rows
    ]
    columns = [name for name in ROW if name not in ("run_id", "lossless", "captions", "obstacles")]
    print_table(shown, (*first, *columns, "run_id", *notes), elsewhere=160)
    for marked in marks.values():
        _print_lines([f"{mark}. {text}" for text, mark in marked.items()])
    missing = dict.fromkeys((row["model"], row["weights"]) for row in rows if row["weights"] not in (None, ON_DISK))
    lines = [f"weights of {model}: {brings}" for model, brings in missing if not needed]
    heads = dict.fromkeys((row["model"], row["head"]) for row in rows if row["head"] not in (None, ON_DISK))
    of_heads = [f"draft head of {model}: {brings}" for model, brings in heads if brings.startswith("specbench fetch")]
    lines += of_heads if not needed else []
    absent = [name for name in dict.fromkeys(str(row["prompts"]) for row in rows) if missing_set(name) and not needed]
    lines += [f"prompts of {name}: specbench fetch {name.partition('/')[0]}" for name in absent]
    _print_lines(list(dict.fromkeys(text for row in rows if (text := row["captions"]))))
    title = "Not on this disk:" if offline() else "The run would download these files first; to download them now:"
    _print_lines([title, *lines] if lines else [*needed, *of_heads])


def _needed(settings: Iterable[RunSettings]) -> list[str]:
    """List the missing files of runs of these settings and of their scores, with the commands to fetch the files."""
    from specbench.runs.needs import fetch_command, needs_of, score_needs
    from specbench.runs.plan import plan_model

    lines: list[str] = []
    for model, prompts in dict.fromkeys((plan_model(asked), str(asked.prompts)) for asked in settings):
        needs, scores = needs_of(model, prompts), score_needs(model, prompts)
        when = "Not on this disk" if offline() else "Will be downloaded first"
        for title, some, every in ((f"{when}; to fetch now", needs, False), ("For score; to fetch now", scores, True)):
            lines += [f"{title}: {fetch_command(model, prompts, every)}"] if some else []
            lines += [f"  {need.what} {need.text()}" for need in some]
    return lines


def _print_lines(lines: Sequence[str]) -> None:
    """Print lines after an empty line; print nothing if there are none."""
    if lines:
        print()
    for line in lines:
        print_line(console.one_line(line))


def _short(value: float | None) -> float | None:
    return None if value is None else round(value) if value >= 10 else float(f"{value:.2g}")


def _show_table(folders: Sequence[Path]) -> None:
    """Print the first table of `specbench report` for these runs."""
    from specbench.reporting.report_rows import report_rows
    from specbench.reporting.sections import sections
    from specbench.reporting.terminal import first_table

    screen = console.stdout()
    for section in sections(report_rows(folders)):
        screen.print()
        screen.print(first_table(section.runs, screen.width))


@command("demo", epilog="The same step by step: specbench run, specbench score, specbench report")
def demo(
    limit: int = of_run("limit", 8, help="Number of prompts.", min=1),
    out: Path = of_run("out", Path("results/demo"), help="Folder of the runs, the table and the image grid."),
    compile: str = option(
        "--compile", "WHEN", "Compile the steps: on, off, or auto (on if a compiler is installed).", AUTO
    ),
    quiet: bool = Quiet,
    json: bool = Json,
) -> None:
    from rich.text import Text

    from specbench.reporting import demo as demonstration
    from specbench.reporting.answer import answer, disturbances
    from specbench.reporting.report_rows import report_rows
    from specbench.reporting.terminal import narrow_table

    reporters = (None, None) if quiet else (ProgressReporter(notes=False), ScoreProgress())
    if not quiet:
        console.say(
            f"{len(demonstration.SHOWN)} decoders draw the same {console.counted(limit, 'caption')} with the "
            "bundled model `shapes`. Measured are the speed-up over plain sampling (ar) and the quality of the images."
        )
    records = demonstration.demo(out, limit, compile, *reporters, *(() if quiet else (console.say,)))
    if json:
        return print_json(records)
    rows = report_rows([Path(str(run["folder"])) for run in records])
    screen = console.stdout()
    screen.print(Text(), narrow_table(rows, screen.width), Text(), sep="\n")
    lines = [*answer(rows)[:1], *disturbances(rows)[-1:], f"Images of every decoder: {out / demonstration.PICTURE}"]
    screen.print(*map(Text, lines), sep="\n")
    if not quiet:
        console.stderr().print(
            "Type next:",
            f"  specbench report --out {out} --html report.html  # plots and images",
            "  specbench list decoders",
            "  specbench run --decoder ar,sjd --limit 8",
            sep="\n",
            markup=False,
        )
