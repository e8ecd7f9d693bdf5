"""The command line: parsing and terminal output only; every command calls the Python API.

Nothing heavy is imported here or at the top of a command's module, so that `--help` and `list` answer at
once.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import typer

from specbench.errors import BAD_INPUT, FAILURE, INTERRUPTED, SpecbenchError, place, unknown_name
from specbench.specs import plugin_decoders
from specbench.system import console, plugins
from specbench.system.version import __version__

_UsageError = typer.BadParameter.__mro__[1]
_DEBUG = "--debug"


_MODULES = {
    "run": ["run"],
    "merge": ["merge"],
    "results": ["score", "report"],
    "show": ["show"],
    "bench": ["bench"],
    "compare": ["compare"],
    "listing": ["list"],
    "official": ["export", "import"],
    "checks": ["doctor", "audit"],
    "check": ["check"],
    "heads": ["train-head", "check-head"],
    "demo": ["demo"],
    "prompts": ["prompts"],
    "shapes": ["shapes"],
}
"""Modules of this package and their commands, in the order of `--help`."""


def build_app(named: str | None = None) -> typer.Typer:
    """The commands, or only those of the module that has the one `named`.

    Options of installed plug-in decoders become flags too, so plug-ins are looked up first.
    """
    plugin_decoders.add_plugin_decoders()
    app = typer.Typer(
        name="specbench",
        help="How much faster does a decoder make an autoregressive text-to-image model, and what does it cost?",
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
        print(f"specbench {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", metavar="", help="Print the version and stop.", is_eager=True, callback=_version
    ),
    debug: bool = typer.Option(
        False, _DEBUG, metavar="", help="Show tracebacks (anywhere on the line, or SPECBENCH_DEBUG=1)."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; an error is one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in arguments or os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != _DEBUG]
    warnings.showwarning = _show_warning
    try:
        code = build_app(next(iter(arguments), None))(arguments, standalone_mode=False, prog_name="specbench")
    except SpecbenchError as error:
        code = _fail(error, debug)
    except _UsageError as error:
        code = BAD_INPUT if type(error).__name__ == "NoArgsIsHelpError" else _fail(_usage_problem(error), debug)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(
            SpecbenchError("interrupted", "what was done is kept; the same command continues", INTERRUPTED), debug
        )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _fail(SpecbenchError(f"{where}{error.strerror or error}", "is the path right?"), debug)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        problem = SpecbenchError(what, f"a bug{place(error)}; {_DEBUG} shows all", FAILURE)
        code = _fail(problem, debug)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: SpecbenchError, debug: bool) -> int:
    if debug and sys.exc_info()[1] is not None:
        import traceback

        traceback.print_exc()
    console.show_error(error)
    return error.exit_code


def _usage_problem(error: Exception) -> SpecbenchError:
    """Typer's complaint as one of ours, with the nearest option or command."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "specbench"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and context:
        valid = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        problem = unknown_name("option", option, valid)
        return SpecbenchError(f"{problem.what} of '{path}'", problem.try_this, BAD_INPUT)
    return SpecbenchError(error.format_message(), f"'{path} --help' tells more", BAD_INPUT)


def _show_warning(message, category, *_rest) -> None:
    if issubclass(category, plugins.PluginWarning):
        console.warn(str(message))
