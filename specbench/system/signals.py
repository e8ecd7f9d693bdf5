"""Signals that ask a command to stop: Ctrl-C, SIGTERM, and the signals of closed terminals and batch schedulers.

Python raises KeyboardInterrupt at any point of the main thread, also in a destructor, which ignores it. `install`
therefore keeps the signal's number, which `look` checks, and raises again every second until the command reacts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from specbench.errors import SpecbenchError

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
TERMINATION_S = 20.0
"""Seconds after which a signal other than Ctrl-C drops unfinished images. Schedulers kill 30 s after SIGTERM."""
_AGAIN_S = 1.0


@dataclass
class _State:
    process: int = 0
    asked: int = 0
    ending: bool = False


_state = _State()


class Stop(threading.Event):
    """Event: finish the current images and decode no others. `number`: the signal that set it."""

    number = 0


def install() -> None:
    """Handle the signals for the rest of this process. Signals that were ignored at its start, for example by nohup,
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
    """Context in which started processes ignore the signals that a scheduler sends to the whole process group and that
    this process handles, except SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*NUMBERS} - {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def look() -> None:
    """Raise KeyboardInterrupt if a signal was received, because the first exception may have been lost."""
    if _state.asked:
        raise KeyboardInterrupt


def asked() -> int:
    """Number of the first signal since `install`; 0 if there was none."""
    return _state.asked


def answered() -> None:
    """Mark the command as ending: no more exceptions are raised, and one more signal ends the process at once."""
    _state.ending = True
    if _state.asked:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stopped(done: str = "", number: int = 0) -> SpecbenchError:
    """Make the error of a stopped command, with exit code 128 + the signal's number. `done`: its progress, for example
    " with 3 of 8 images done". `number`: the signal; by default the received signal, or Ctrl-C."""
    number = number or _state.asked or signal.SIGINT
    what = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    kept = "" if done else "what is finished is kept; "
    return SpecbenchError(f"{what}{done}", f"{kept}run the same command again to resume", 128 + number)


@contextmanager
def finishing(tell: Callable[[float | None], None]) -> Iterator[Stop]:
    """Context in which the first signal sets the `Stop` instead of raising. A second Ctrl-C raises at once; any other
    signal raises after `TERMINATION_S`. The handler calls `tell`, with the remaining seconds if the signal sets a
    limit."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    look()
    limited: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        again, stop.number = stop.is_set(), stop.number or number
        stop.set()
        if _state.process == os.getpid():
            _state.asked = stop.number
        if number != signal.SIGINT:
            if not limited:  # another signal does not extend the time
                signal.setitimer(signal.ITIMER_REAL, TERMINATION_S, _AGAIN_S)
            limited.append(number)
        elif again:
            raise KeyboardInterrupt
        if not again:
            with suppress(RuntimeError):  # the signal interrupted a write to the same stream
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
    """The signals to handle: those not ignored at the start of this process (nohup) and, except Ctrl-C and SIGTERM, not
    handled by others. Shells make background jobs ignore Ctrl-C; `kill -INT` should stop these anyway."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    unused = {n for n, handler in handlers.items() if handler in (signal.SIG_DFL, _on_signal)}
    term = {signal.SIGTERM} if handlers.get(signal.SIGTERM) not in (signal.SIG_IGN, None) else set()
    return [n for n in numbers if n in unused | term | {signal.SIGINT}]


def _on_signal(number: int, _frame: object) -> None:
    if os.getpid() != _state.process:  # not in forked processes
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


def _raise_again(_number: int, _frame: object) -> None:
    if not _state.ending:
        raise KeyboardInterrupt


def _without_interrupts(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook of `sys` so that it gets no interrupts; these are raised again."""

    def guarded(what: Any, *rest: Any) -> None:
        if not issubclass(getattr(what, "exc_type", what), KeyboardInterrupt):
            hook(what, *rest)

    return guarded
