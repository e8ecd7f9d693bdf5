"""Command line: argument parsing and terminal output; commands call the Python API.

Modules of commands import nothing heavy at the top, so that `--help` and `list` start fast.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import typer

from specbench.cli.command_line import CommandLine
from specbench.cli.completion import command_completed
from specbench.errors import BAD_INPUT, FAILURE, INTERRUPTED, SpecbenchError, place, unknown_name
from specbench.specs import plugin_decoders
from specbench.system import console, plugins

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_UsageError = typer.BadParameter.__mro__[1]
_DEBUG, _NO_COLOR, _NO_PROGRESS = "--debug", "--no-color", "--no-progress"
_ANYWHERE = (_DEBUG, _NO_COLOR, _NO_PROGRESS)
"""Switches that are allowed anywhere on the command line."""


_MODULES = {
    "run": ["run"],
    "merge": ["merge"],
    "results": ["score", "report"],
    "show": ["show"],
    "bench": ["bench"],
    "compare": ["compare"],
    "forecast": ["forecast"],
    "listing": ["list"],
    "official": ["export", "import"],
    "checks": ["doctor", "audit", "check"],
    "heads": ["train-head", "check-head"],
    "demo": ["demo"],
    "prompts": ["prompts"],
    "shapes": ["shapes"],
}
"""Modules of this package and their commands, in the order of `--help`."""
_BRIEF = ("report", "compare", "show", "list")
"""Commands that mostly import, which makes many objects and next to no garbage."""
_COLLECT_AFTER = 100_000


def build_app(named: str | None = None) -> typer.Typer:
    """Build the app with all commands, or only with those of the module that defines the command `named`.

    Plug-ins are looked up first, because options of plug-in decoders become flags.
    """
    plugin_decoders.add_plugin_decoders()
    app = CommandLine(
        name="specbench",
        help="Measure speed-up and image quality of decoders for autoregressive text-to-image models.",
        epilog="Start with: specbench demo",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    having = [module for module, commands in _MODULES.items() if named in commands]
    for module in having or _MODULES:
        importlib.import_module(f"specbench.cli.{module}").add_to(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from specbench.system.environment import describe_installation  # only this option waits for it

        print(describe_installation())
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print versions and commit, and exit.", is_eager=True, callback=_version
    ),
    debug: bool = typer.Option(
        False,
        _DEBUG,
        help="Show tracebacks; allowed anywhere on the command line (also SPECBENCH_DEBUG=1).",
    ),
    no_color: bool = typer.Option(False, _NO_COLOR, help="Print without colours; allowed anywhere (also NO_COLOR=1)."),
    no_progress: bool = typer.Option(
        False, _NO_PROGRESS, help="Print no progress of images and downloads; allowed anywhere."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code; errors are printed as one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in arguments or os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")
    if _NO_COLOR in arguments:
        os.environ["NO_COLOR"] = "1"
    console.show_progress(_NO_PROGRESS not in arguments)
    arguments = [argument for argument in arguments if argument not in _ANYWHERE]
    warnings.showwarning = _show_warning
    if next(iter(arguments), None) in _BRIEF:
        gc.set_threshold(_COLLECT_AFTER)
    try:
        named = next(iter(arguments), None) or command_completed(os.environ)
        code = build_app(named)(arguments, standalone_mode=False, prog_name="specbench")
    except SpecbenchError as error:
        code = _fail(error, debug)
    except _UsageError as error:
        code = BAD_INPUT if type(error).__name__ == "NoArgsIsHelpError" else _fail(_usage_problem(error), debug)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(
            SpecbenchError(
                "interrupted", "finished images are kept; run the same command again to resume", INTERRUPTED
            ),
            debug,
        )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _fail(SpecbenchError(f"{where}{error.strerror or error}", "check the path"), debug)
    except MemoryError:
        code = _fail(SpecbenchError("not enough memory", "see 'ulimit -v' and what else runs here", FAILURE), debug)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        problem = SpecbenchError(what, f"a bug{place(error)}; {_DEBUG} shows the traceback", FAILURE)
        code = _fail(problem, debug)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: SpecbenchError, debug: bool) -> int:
    if debug and sys.exc_info()[1] is not None:
        traceback.print_exc()
    console.show_error(error)
    return error.exit_code


def _usage_problem(error: Exception) -> SpecbenchError:
    """Convert a usage error of typer to a SpecbenchError, with the nearest option or command as a hint."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "specbench"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and context:
        valid = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        problem = unknown_name("option", option, valid)
        return SpecbenchError(f"{problem.what} of '{path}'", problem.try_this, BAD_INPUT)
    return SpecbenchError(error.format_message(), f"see '{path} --help'", BAD_INPUT)


def _show_warning(message, category, *_rest) -> None:
    if issubclass(category, plugins.PluginWarning):
        console.warn(str(message))
