"""Signals that request a command to stop: Ctrl-C, SIGTERM, and the signals of closed terminals and batch schedulers.

Python raises KeyboardInterrupt at any point of the main thread. A destructor would ignore it. The handler therefore
records the signal's number, which `look` checks, and raises again every second until the command reacts.
"""

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
SIGNAL_NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
TERMINATION_S = 20.0
"""Seconds from a signal other than Ctrl-C until unfinished images are dropped. Schedulers kill 30 s after SIGTERM."""
_AGAIN_S = 1.0


@dataclass
class _State:
    process: int = 0
    asked: int = 0
    ending: bool = False


_state = _State()


class Stop(threading.Event):
    """Event that requests to finish only the current images. `number`: the signal that set the event."""

    number = 0


def install() -> None:
    """Handle the signals until this process ends. Signals that the process ignored at its start (nohup) stay
    ignored."""
    _state.process = os.getpid()
    signal.signal(signal.SIGALRM, _raise_again)
    take_back()
    sys.unraisablehook = _without_interrupts(sys.unraisablehook)
    sys.excepthook = _without_interrupts(sys.excepthook)


def take_back() -> None:
    """Set the handlers again after a library, such as Ray, has replaced them."""
    if _state.process == os.getpid() and threading.current_thread() is threading.main_thread():
        for number in _free(SIGNAL_NUMBERS):
            signal.signal(number, _on_signal)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Context in which new child processes ignore the signals that this process handles, except Ctrl-C and SIGTERM: a
    scheduler sends its signals to the whole process group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNAL_NUMBERS} - {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def look() -> None:
    """Raise KeyboardInterrupt if a signal was received, because the handler's exception may have been lost."""
    if _state.asked:
        raise KeyboardInterrupt


def asked() -> int:
    """Number of the first signal since `install`; 0 if there was none."""
    return _state.asked


def answered() -> None:
    """Mark the command as ending: the handler raises no more, and the next signal ends the process at once."""
    _state.ending = True
    if _state.asked:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stopped(done: str = "", number: int = 0) -> SpecbenchError:
    """Make the error of a stopped command, with exit code 128 + the signal's number. `done`: its progress, for example
    " with 3 of 8 images done". `number`: the signal; by default the received signal, or Ctrl-C."""
    number = number or _state.asked or signal.SIGINT
    what = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    kept = "" if done else "finished work is kept; "
    return SpecbenchError(f"{what}{done}", f"{kept}run the same command again to resume", 128 + number)


@contextmanager
def finishing(tell: Callable[[float | None], None]) -> Iterator[Stop]:
    """Context in which the first signal sets the `Stop` instead of raising. A second Ctrl-C raises at once; any other
    signal raises after `TERMINATION_S`. The handler calls `tell` with the remaining seconds, or with None for a first
    Ctrl-C, which sets no limit."""
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
            if not limited:  # a second signal does not extend the limit
                signal.setitimer(signal.ITIMER_REAL, TERMINATION_S, _AGAIN_S)
            limited.append(number)
        elif again:
            raise KeyboardInterrupt
        if not again:
            with suppress(RuntimeError):  # raised if the signal interrupted a write to the same stream
                tell(None if number == signal.SIGINT else TERMINATION_S)

    before = {number: signal.signal(number, on_signal) for number in _free(SIGNAL_NUMBERS)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _raise_again)
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _free(numbers: tuple[int, ...]) -> list[int]:
    """Select the signals to handle: Ctrl-C always (for `kill -INT` of background jobs), SIGTERM unless it is ignored,
    other signals only if they have the default handler. A process may start with ignored signals (nohup)."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    unused = {n for n, handler in handlers.items() if handler in (signal.SIG_DFL, _on_signal)}
    term = {signal.SIGTERM} if handlers.get(signal.SIGTERM) not in (signal.SIG_IGN, None) else set()
    return [n for n in numbers if n in unused | term | {signal.SIGINT}]


def _on_signal(number: int, _frame: object) -> None:
    if os.getpid() != _state.process:  # a forked process
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
    """Wrap a hook of `sys` so that it does not receive KeyboardInterrupts, which are raised again."""

    def guarded(what: Any, *rest: Any) -> None:
        if not issubclass(getattr(what, "exc_type", what), KeyboardInterrupt):
            hook(what, *rest)

    return guarded
