"""Command line: argument parsing and terminal output; commands call the Python API.

Modules of commands import nothing heavy at the top, so that `--help` and `list` start fast.
"""

import gc
import importlib
import logging
import os
import re
import shlex
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn

import typer

from specbench import names
from specbench.cli.commands import ADDERS, COMMANDS, COMPLETION, CommandLine
from specbench.errors import BAD_INPUT, FAILURE, INTERRUPTED, SpecbenchError, place, read_name
from specbench.system import console, signals
from specbench.system.surroundings import check_working_folder, settle

# Imports inside functions: each command imports only what it needs, `--help` and completion nothing heavy.

_UsageError = typer.BadParameter.__mro__[1]
_DEBUG, _NO_COLOR, _NO_PROGRESS, _PINNED_ONLY = "--debug", "--no-color", "--no-progress", "--pinned-only"
_ANYWHERE = (_DEBUG, _NO_COLOR, _NO_PROGRESS, _PINNED_ONLY)  # Switches that are allowed anywhere on the command line
_OF_COMPLETION = ("--show-completion", "--install-completion")  # typer itself exits after these options
_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # Variables with the line to complete: of bash, of zsh and fish
_BRIEF = ("report", "figure", "methods", "compare", "show", "list")
"""Commands with rare garbage collection: they mostly import modules, which creates many objects but little garbage."""


def build_app(named: str | None = None, root_options: bool = True) -> typer.Typer:
    """Build the app with all commands, or only with the commands of the module that defines `named`.

    Plug-in decoders are loaded first, because their options become flags. `root_options`: whether to accept options
    before the command, and shell completion. False saves time if they are not needed: typer builds every option, and
    imports modules for 80 ms when it builds the first option."""
    from specbench.specs.presets import add_plugin_decoders  # searches all packages; not needed by the index

    add_plugin_decoders()
    app = _empty_app(root_options)
    for name, (module, _) in COMMANDS.items():
        if named is None or module == COMMANDS[named][0]:
            importlib.import_module(f"specbench.cli.{module}")
            ADDERS[name](app)
    return app


def build_index() -> typer.Typer:
    """Build an app that only lists the commands, for help, completion, and errors without a command."""
    app = _empty_app(root_options=True)
    for name, (_, text) in COMMANDS.items():
        app.command(name=name, help=text)(lambda: None)
    return app


def _empty_app(root_options: bool) -> CommandLine:
    app = CommandLine(
        name="specbench",
        help="Measure speed-up and image quality of decoders for autoregressive text-to-image models.",
        epilog="Start with: specbench demo",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=root_options,
        add_help_option=root_options,
    )
    app.callback()(_root if root_options else lambda: None)
    return app


def _version(version: bool) -> None:
    if version:
        from specbench.system.environment import describe_installation  # only for this option

        print(describe_installation())
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print versions and commit, and exit.", is_eager=True, callback=_version
    ),
    debug: bool = typer.Option(
        False, _DEBUG, help="Show tracebacks; allowed anywhere on the command line (also SPECBENCH_DEBUG=1)."
    ),
    no_color: bool = typer.Option(False, _NO_COLOR, help="Print without colours; allowed anywhere (also NO_COLOR=1)."),
    no_progress: bool = typer.Option(
        False, _NO_PROGRESS, help="Do not print the progress of images and downloads; allowed anywhere."
    ),
    pinned_only: bool = typer.Option(
        False,
        _PINNED_ONLY,
        help="Download hub repositories only at pinned commits, of specbench or your own; allowed anywhere (also "
        "SPECBENCH_PINNED_ONLY=1).",
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its exit code; errors are printed as one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in arguments or os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")
    if _NO_COLOR in arguments:
        os.environ["NO_COLOR"] = "1"
    if _PINNED_ONLY in arguments:
        os.environ["SPECBENCH_PINNED_ONLY"] = "1"
    console.prepare_streams()
    console.show_progress(_NO_PROGRESS not in arguments)
    arguments = [argument for argument in arguments if argument not in _ANYWHERE]
    if arguments[:1] == ["--"]:
        del arguments[0]
    warnings.showwarning = _show_warning
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns about missing kernels
        logging.getLogger(name).setLevel(logging.ERROR)
    if next(iter(arguments), None) in _BRIEF:
        gc.set_threshold(100_000)
    try:
        if COMPLETION not in os.environ:
            settle()
        arguments = _as_named(arguments)
        if COMPLETION not in os.environ and arguments and not {"-h", "--help", "--version"}.intersection(arguments):
            check_working_folder()
        app = _app_of(arguments)
        code = app(arguments, standalone_mode=False, prog_name="specbench")
        signals.look()
        if code == 1 and arguments[0].partition("=")[0] in _OF_COMPLETION:  # typer printed the reason
            code = BAD_INPUT
        if code == INTERRUPTED:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
    except BaseException as error:  # a plug-in may raise any exception
        code = _code_of(error, arguments, debug)
    signals.answered()
    sys.exit(code if isinstance(code, int) else 0)


def _code_of(error: BaseException, arguments: Sequence[str], debug: bool) -> int:
    """Print an error as one line, unless the pipe of stdout is closed, and return the exit code."""
    if isinstance(error, SpecbenchError):
        return _fail(error, debug)
    if isinstance(error, _UsageError):
        has_help = type(error).__name__ == "NoArgsIsHelpError"
        return BAD_INPUT if has_help else _fail(_usage_problem(error, arguments), debug)
    if signals.asked() or isinstance(error, KeyboardInterrupt | typer.Abort):
        return _stopped(debug)
    if isinstance(error, SystemExit):
        if COMPLETION in os.environ:
            raise error
        if arguments[0].partition("=")[0] in _OF_COMPLETION:
            return BAD_INPUT if error.code else 0  # typer has printed the name of the unknown shell
        if isinstance(error.__context__, BrokenPipeError):  # rich exits if its pipe is closed
            return 0
    if isinstance(error, BrokenPipeError):
        return 0 if _reader_left() else _fail(_bug(error), debug)
    if isinstance(error, OSError):
        from specbench.system.files import FULL  # only for this error

        where = f"{error.filename}: " if error.filename else ""
        advice = "free some space" if error.errno in FULL else "check the path"
        return _fail(SpecbenchError(f"{where}{error.strerror or error}", advice), debug)
    if isinstance(error, MemoryError):
        return _fail(SpecbenchError("not enough memory", "check 'ulimit -v' and other processes", FAILURE), debug)
    return _fail(_bug(error), debug)


def _stopped(debug: bool) -> int:
    """Print that the command was stopped by a signal, and return the exit code."""
    code = _fail(signals.stopped(), debug)
    # At exit, Python would wait for the threads of a download, which may retry for minutes.
    if any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _bug(error: BaseException) -> SpecbenchError:
    from specbench.system.plugins import PluginError, foreign_place  # only for this error

    if foreign_place(error):
        return PluginError("a plug-in", error)
    what = f"{type(error).__name__}: {error}"
    return SpecbenchError(what, f"a bug{place(error)}; {_DEBUG} shows the traceback", FAILURE)


def _reader_left() -> bool:
    """Return whether the pipe of stdout is closed by its reader; if so, discard all further output."""
    try:
        sys.stdout.flush()
        return False
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


def _as_named(arguments: Sequence[str]) -> list[str]:
    """Replace a typed command by its exact name; `help` and `version` become options."""
    first, *rest = arguments or [""]
    if COMPLETION in os.environ or not first or first.startswith("-"):
        return list(arguments)
    if first.casefold() in ("help", "version"):
        return [*rest[:1], "--help"] if first.casefold() == "help" else ["--version"]
    if done_by := names.command(arguments, COMMANDS):
        raise SpecbenchError(f"unknown command '{first}'", f"specbench {done_by}")
    return [read_name("command", first, COMMANDS), *rest]


def _app_of(arguments: Sequence[str]) -> typer.Typer:
    """Build the app with the commands of the required module, or the index if the line begins with no command."""
    completes = COMPLETION in os.environ
    named = command_completed(os.environ) if completes else next(iter(arguments), None)
    return build_app(named, root_options=completes) if named in COMMANDS else build_index()


def command_completed(environment: Mapping[str, str]) -> str | None:
    """Return the command in the line that a shell completes; None while the command itself is being typed."""
    line = next((environment[name] for name in _LINES if environment.get(name)), "")
    try:
        words = shlex.split(line)
    except ValueError:  # unclosed quotation mark
        words = line.split()
    return words[1] if len(words) > 2 or (len(words) == 2 and line[-1:].isspace()) else None


def _fail(error: SpecbenchError, debug: bool) -> int:
    signals.answered()
    if signals.asked() and error.exit_code <= 128:  # C code or a library converted the interrupt to another error
        error = signals.stopped()
    if debug and sys.exc_info()[1] is not None:
        traceback.print_exc()
    if COMPLETION not in os.environ:  # a shell would print the error into the typed line
        console.show_error(error)
    return error.exit_code


_PLAIN = {
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be a valid integer.*": "expected a whole number",
    "Input should be a valid number.*": "expected a number",
}
"""{words of the library that reads the command line: words of other errors}."""


def _usage_problem(error: Any, arguments: Sequence[str]) -> SpecbenchError:
    """Convert a usage error of typer to a SpecbenchError, with the nearest option or command as a hint."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "specbench"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and context:
        hint = _own_option(option.removeprefix("--"), arguments) or _option_meant(option, context)
        return SpecbenchError(f"unknown option '{option}' of '{path}'", hint, BAD_INPUT)
    extra = re.search(r"unexpected extra argument\S* \((.+)\)", error.format_message())
    if extra and context and context.info_name == "run":
        return _extra_argument(extra[1].split() or [""], arguments)
    parameter = getattr(error, "param", None)
    variable, names = getattr(parameter, "envvar", None), getattr(parameter, "opts", ())
    typed = any(argument.partition("=")[0] in names for argument in arguments)
    text = os.environ.get(variable or "")
    source = f" (environment {variable}={text})" if text and not typed else ""
    about = getattr(parameter, "help", None) if type(error).__name__ == "MissingParameter" else None
    what = error.format_message()
    for words, ours in _PLAIN.items():
        what = re.sub(f"Invalid value for '(.+?)': {words}", rf"\1: {ours}", what)
    return SpecbenchError(what + source, about or f"see '{path} --help'", BAD_INPUT)


def _own_option(option: str, arguments: Sequence[str]) -> str:
    """Return a hint on how to set an option of a decoder that is defined in a user's file."""
    from specbench.specs.presets import PRESETS, decoder_name, options_of  # only for this error

    for reference in re.findall(r"[^\W\d][\w.]*:[^\W\d]\w*", " ".join(arguments)):
        with suppress(SpecbenchError):
            if option in options_of(PRESETS[decoder_name(reference)]):
                return f"write it inline: --decoder {reference}:{option}=VALUE"
    return ""


def _option_meant(option: str, context: Any) -> str:
    """Return a hint for an option that a command does not have."""
    command, path = context.info_name, context.command_path
    answers: dict[tuple[str | None, str], str] = {
        ("--decoder", "bench"): "the table defines its decoders; to add a decoder, use --with",
        ("--metric", "run"): "images are scored afterwards: specbench score --metric NAME",
    }
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    meant = names.option(option, ["--decoder", "--metric"])
    if (meant, command) in answers:
        return answers[meant, command]
    if advice := names.advice(option):
        return advice
    if near := names.guess(option, [*options, "--help"]):
        return f"did you mean '{near}'?"
    others = [name for name in COMMANDS if name != command and option in _options_of(name)]
    if others and option.startswith("--"):
        return f"it is an option of {', '.join(f'specbench {name}' for name in others[:3])}"
    return f"see '{path} --help{' all' if command == 'run' else ''}'"


def _options_of(command: str) -> list[str]:
    """Return all names of a command's options."""
    group = typer.main.get_command(build_app(command, root_options=False))
    chosen = getattr(group, "commands", {}).get(command, group)
    return [name for parameter in chosen.params for name in parameter.opts]


def _extra_argument(words: Sequence[str], arguments: Sequence[str]) -> SpecbenchError:
    """Make the error for words after `run`, which accepts only flags. The hint names the probably meant flag."""
    from specbench.models.hub_model import MODELS  # only names, for this error
    from specbench.specs.presets import PRESETS

    named = {"--decoder": PRESETS, "--model": ["shapes", *(model.name for model in MODELS)]}
    first = re.split(r"[,:]", words[0])[0]
    meant = next((flag for flag, names in named.items() if first in names), None)
    before = [value for flag, value in pairwise(arguments) if flag == meant == "--decoder"]
    value = ",".join(text.strip(",") for text in (*before, *words))
    hint = f"did you mean: specbench run {meant} {value}" if meant else "for example: specbench run --decoder ar,sjd"
    return SpecbenchError(f"run {' '.join(words)}: run takes flags only", hint)


def _show_warning(message: Warning | str, category: type[Warning], *_rest: Any, **_more: Any) -> None:
    from specbench.system.plugins import PluginWarning  # only if something warns

    if issubclass(category, PluginWarning):
        console.warn(str(message))
