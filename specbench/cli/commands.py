"""Index of the commands: their modules, the first paragraphs of their help, and their groups.

`specbench --help` prints these paragraphs and imports none of the modules.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from specbench import names

COMPLETION = "_SPECBENCH_COMPLETE"  # Environment variable by which a shell requests completion
COMMANDS = {
    "run": ("run", "Decode a prompt set with one or several decoders, and store images and measurements."),
    "status": ("stored", "Print the progress of runs: images, tokens per second, speed-up so far, time left."),
    "merge": ("stored", "Merge the shards of runs, and print the run folders."),
    "score": ("score", "Score the images of runs; existing scores are kept."),
    "report": ("report", "Print the tables of runs: speed, quality, and the definition of each number."),
    "figure": ("report", "Draw a figure of a paper: a chart of runs or of a table, a map of tokens, or pictures."),
    "methods": ("report", "Print a methods paragraph in LaTeX, with BibTeX entries; --to m.tex also writes m.bib."),
    "show": ("stored", "Print settings and results of a run, or of one of its images."),
    "bench": ("bench", "Reproduce a paper's table: run what is missing, and print measured and published values."),
    "compare": ("report", "Compare two runs on their common images: speed-up, score differences, their significance."),
    "forecast": ("forecast", "Forecast the speed of decoders on another device; nothing is measured."),
    "list": ("listing", "List models, decoders, metrics, prompt sets, papers' tables, or runs."),
    "export": ("stored", "Export the images of a run in the layout of a benchmark's official evaluator."),
    "import": ("stored", "Import scores of a benchmark's official evaluator, or image tokens of another program."),
    "pack": ("stored", "Write runs to one zip file; every command that reads runs also reads this file."),
    "verify": ("stored", "Check packed or unpacked runs: digests, recorded values, images, scores and latencies."),
    "fetch": ("listing", "Download models, prompts and metrics in advance; an interruption keeps complete files."),
    "doctor": ("checks", "Check whether this machine is ready to run, and print how to fix problems."),
    "audit": ("checks", "Measure whether a decoder is lossless."),
    "check": ("checks", "Run the conformance tests on a decoder, a model or a metric."),
    "train-head": ("heads", "Train a draft head for a model, and print its folder."),
    "check-head": ("heads", "Measure the total variation between draft head and target by draft depth."),
    "demo": ("run", "Compare decoders on the embedded model in minutes: run, score, print a table, draw images."),
    "prompts": ("listing", "Print prompts."),
}
"""{command: (module, first paragraph of help)}, in the order of `--help`."""


ADDERS: dict[str, Callable[[typer.Typer], Any]] = {}
"""{command: function that adds it to an app}; importing the module of a command adds the entry."""


def command(name: str, *paragraphs: str, **settings: Any) -> Callable[[Any], Any]:
    """Decorate the function of a command. `paragraphs`: further paragraphs of its help; `settings`: as for typer."""

    def register(function: Any) -> Any:
        text = "\n\n".join((COMMANDS[name][1], *paragraphs))
        ADDERS[name] = lambda app: app.command(name=name, help=text, **settings)(function)
        return function

    return register


_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class _PlainSwitches:
    """Mixin of commands whose help prints switches as `--quiet`, not as `--quiet <bool>`. A switch with a negation
    (--zero-p, --no-zero-p) also accepts a value, as other options do: `--zero-p false`."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:  # type: ignore[attr-defined]
            parameter.secondary_opts = []  # a column of --no-NAME in the help would take too much width
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = [text for param in self.params for text in (*param.opts, *param.secondary_opts)]  # type: ignore[attr-defined]
        args = _as_here(args, flags)
        off = {param.opts[0]: param.secondary_opts[0] for param in self.params if param.secondary_opts}  # type: ignore[attr-defined]
        return super().parse_args(ctx, _as_switches(args, off))  # type: ignore[misc]


def _as_here(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Replace other programs' names of options by specbench's names."""
    ends = args.index("--") if "--" in args else len(args)
    words = list(args)
    for place, word in enumerate(args[:ends]):
        name, equals, value = word.partition("=")
        meant = names.option(name, flags) if name.startswith("--") else None
        if meant and meant.startswith("--"):
            words[place] = f"{meant}{equals}{value}"
    return words


def _as_switches(args: Sequence[str], off: Mapping[str, str]) -> list[str]:
    """Replace `--name true` and `--name=false` by switches. `off`: {switch: its negation}."""
    words: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        if words and words[-1] in off and word.lower() in _TRUTHS:
            name, value = words.pop(), word
        elif not (equals and name in off and value.lower() in _TRUTHS):
            words.append(word)
            continue
        words.append(name if _TRUTHS[value.lower()] else off[name])
    return words


class Command(_PlainSwitches, TyperCommand):
    """A command of specbench."""


class Group(_PlainSwitches, TyperGroup):
    """A command of specbench with subcommands."""


class CommandLine(typer.Typer):
    """Group of commands; arguments as for `typer.Typer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=settings.pop("cls", Command), **settings)
