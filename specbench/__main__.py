"""Entry point of `python -m specbench` and of the installed command `specbench`."""

import atexit
import os
import sys
from typing import NoReturn

from specbench.system import signals


def program() -> NoReturn:
    """Run the command line and end the process.

    The process ends after Python's exit handlers and before native libraries are unloaded, because threads of Arrow
    sometimes abort during unloading (https://github.com/apache/arrow/issues/39862), after all work is done.
    """
    signals.install()
    _restart_with_docstrings()
    code: object = 1

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream:
                    stream.flush()
            except (OSError, ValueError):  # full disk or closed stream: Python reports it at exit
                if not signals.asked():  # not after a signal, because the terminal may be closed
                    return
        os._exit(code if isinstance(code, int) else int(bool(code)))

    atexit.register(end)  # registered first, called last
    try:
        from specbench.cli import main  # registers its exit handlers after `end`: they run before `end`

        main()
    except SystemExit as ending:
        code = ending.code
        raise
    except BaseException:
        if not signals.asked():
            raise
        signals.answered()  # a signal came during an import, or outside of `main`
        stopped = signals.stopped()
        sys.stderr.write(f"error: {stopped}\n")
        code = stopped.exit_code
        sys.exit(code)


def _restart_with_docstrings() -> None:
    """Restart with PYTHONOPTIMIZE=1 if Python drops docstrings, because transformers reads its own on import."""
    options = [option for option in sys.orig_argv[1:] if option != "-OO"]
    fewer = len(options) < len(sys.orig_argv) - 1
    if sys.flags.optimize > 1 and (fewer or os.environ.get("PYTHONOPTIMIZE") != "1"):
        os.execve(sys.executable, [sys.executable, *options], os.environ | {"PYTHONOPTIMIZE": "1"})


if __name__ == "__main__":
    program()
