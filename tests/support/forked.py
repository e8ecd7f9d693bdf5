"""Commands in a fork of the test process, which has torch and transformers loaded: a new process takes seconds of CPU
to import them. What depends on imports, on the encoding of streams, on signals or on how Python ends is tested in a
real process."""

import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import constants

TIMEOUT_S = 1800


def forked(
    work: Callable[[], object],
    cwd: Path | str = ".",
    env: Mapping[str, str] | None = None,
    path: Sequence[Path | str] = (),
    timeout_s: int = TIMEOUT_S,
) -> subprocess.CompletedProcess:
    """Call `work` in a fork with a separate working folder and environment; its exit code and output.

    Args:
        path: folders to import from, as if PYTHONPATH named them."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist: a hub's threads wait for a request
        child = os.fork()
        if not child:
            sys.path[:0] = map(str, path)
            for module in [module for name, module in sys.modules.items() if name.startswith("specbench")]:
                for cached in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                    cached.cache_clear()  # such as which plug-ins are installed
            _end(
                work, (out.fileno(), err.fileno()), Path(cwd).absolute(), os.environ if env is None else env, timeout_s
            )
        _, status = os.waitpid(child, 0)
        printed = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        return subprocess.CompletedProcess("forked", os.waitstatus_to_exitcode(status), *printed)


def forked_command(arguments: Sequence[str], **where) -> subprocess.CompletedProcess:
    """`specbench` with these arguments; see `forked`."""
    from specbench.cli import main

    return forked(lambda: main([str(argument) for argument in arguments]), **where)


def forked_script(source: str, **where) -> subprocess.CompletedProcess:
    """`python -c`; see `forked`."""
    return forked(lambda: exec(compile(source, "<script>", "exec"), {"__name__": "__main__"}), **where)


def _end(work: Callable[[], object], streams: Sequence[int], cwd: Path, env: Mapping[str, str], timeout_s: int) -> None:
    """Do the work of the child and end it, whatever happens, without any of the tests' own exit handlers."""
    code: object = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = io.StringIO(), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        variables = dict(env)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(cwd)
        torch.set_num_threads(1)
        importlib.reload(constants)  # the hub's client reads the environment when it is imported
        work()
        code = 0
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
