"""Signals that ask a command to stop: Ctrl-C, SIGTERM, and the signals of closed terminals and batch schedulers.

Python raises KeyboardInterrupt wherever the main thread is, also in a destructor, which swallows it. `install` keeps
the signal's number, so that phases can `look`, and raises again every second until the command has answered.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from specbench.errors import SpecbenchError

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
TERMINATION_S = 20.0
"""Seconds from a signal other than Ctrl-C until unfinished images are dropped; schedulers kill 30 s after SIGTERM."""
_AGAIN_S = 1.0


@dataclass
class _State:
    process: int = 0
    asked: int = 0
    ending: bool = False


_state = _State()


class Stop(threading.Event):
    """Set when the images in work are the last to decode. `number`: the signal that set it."""

    number = 0


def install() -> None:
    """Handle the signals for the rest of this process. Those that it was started to ignore, as by nohup,
    stay ignored."""
    _state.process = os.getpid()
    signal.signal(signal.SIGALRM, _raise_again)
    take_back()
    sys.unraisablehook = _without_interrupts(sys.unraisablehook)
    sys.excepthook = _without_interrupts(sys.excepthook)


def take_back() -> None:
    """Handle the signals of a command again after a library, such as Ray, has set its own handlers."""
    if _state.process == os.getpid() and threading.current_thread() is threading.main_thread():
        for number in _free(NUMBERS):
            signal.signal(number, _on_signal)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are started within the block do not end by signals that a scheduler sends to the whole process
    group and that this process answers; by SIGTERM they do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*NUMBERS} - {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def look() -> None:
    """Raise KeyboardInterrupt if a signal came, wherever the first one may have got lost."""
    if _state.asked:
        raise KeyboardInterrupt


def asked() -> int:
    """Number of the first signal that came since `install`; 0 if none did."""
    return _state.asked


def answered() -> None:
    """The command ends: nothing is raised any more, and one more signal ends the process at once."""
    _state.ending = True
    if _state.asked:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stopped(done: str = "", number: int = 0) -> SpecbenchError:
    """The error of a command that was stopped, with exit code 128 + the signal's number. `done`: how far it is, as in "
    with 3 of 8 images done". `number`: the signal; by default the received signal, or Ctrl-C."""
    number = number or _state.asked or signal.SIGINT
    what = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    kept = "" if done else "what is finished is kept; "
    return SpecbenchError(f"{what}{done}", f"{kept}run the same command again to resume", 128 + number)


def in_place_of(error: SpecbenchError) -> SpecbenchError:
    """The error to show: an interrupt that C code or a library turned into another error is an interrupt."""
    return stopped() if _state.asked and error.exit_code <= 128 else error


@contextmanager
def finishing(tell: Callable[[float | None], None]) -> Iterator[Stop]:
    """Within the block the first signal sets the `Stop` in place of raising. A second Ctrl-C raises at once, and so do
    all other signals after `TERMINATION_S`. `tell` is called from the handler, with the seconds that are left if the
    signal sets a limit."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    look()
    limited: list[int] = []

    def on_signal(number, _frame):
        again, stop.number = stop.is_set(), stop.number or number
        stop.set()
        if _state.process == os.getpid():
            _state.asked = stop.number
        if number != signal.SIGINT:
            if not limited:  # a second one gives no more time
                signal.setitimer(signal.ITIMER_REAL, TERMINATION_S, _AGAIN_S)
            limited.append(number)
        elif again:
            raise KeyboardInterrupt
        if not again:
            with suppress(RuntimeError):  # a signal in the middle of a write to the same stream
                tell(None if number == signal.SIGINT else TERMINATION_S)

    before = {number: signal.signal(number, on_signal) for number in _free(NUMBERS)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _raise_again)
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _free(numbers: tuple[int, ...]) -> list[int]:
    """The signals to handle: those that this process was not started to ignore (nohup) and, but for Ctrl-C and SIGTERM,
    nobody else uses. Shells make background jobs deaf to Ctrl-C; `kill -INT` should stop these nonetheless."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    unused = {n for n, handler in handlers.items() if handler in (signal.SIG_DFL, _on_signal)}
    term = {signal.SIGTERM} if handlers.get(signal.SIGTERM) not in (signal.SIG_IGN, None) else set()
    return [n for n in numbers if n in unused | term | {signal.SIGINT}]


def _on_signal(number, _frame):
    if os.getpid() != _state.process:  # a forked process, which this is not for
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    first, _state.asked = not _state.asked, _state.asked or number
    if _state.ending:
        if not first:
            os._exit(128 + _state.asked)
        return
    if first:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    if first or number == signal.SIGINT:
        raise KeyboardInterrupt


def _raise_again(_number, _frame):
    if not _state.ending:
        raise KeyboardInterrupt


def _without_interrupts(hook: Callable) -> Callable:
    """A hook of `sys` that gets no interrupts, which are raised again."""

    def guarded(what, *rest):
        if not issubclass(getattr(what, "exc_type", what), KeyboardInterrupt):
            hook(what, *rest)

    return guarded
