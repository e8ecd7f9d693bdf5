"""A process that ends what a local Ray leaves behind when its driver is killed: Ray's own agents outlive it by minutes.
It is this file run as a program, on the standard library alone, and waits for the end of its standard input."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

ROUNDS, PAUSE_S = 20, 0.25


def watch(driver: int) -> subprocess.Popen:
    """Start watching over the Ray session of a driver; closing the `stdin` of the result ends it as a death does."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(driver)], stdin=subprocess.PIPE, start_new_session=True
    )


def session_processes(driver: int) -> list[int]:
    """Processes that have a file of the driver's Ray session open; none where there is no /proc."""
    session = re.compile(rf"/session_[0-9_-]+_{driver}/")
    processes = []
    for entry in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            handles = f"/proc/{entry}/fd"
            if any(session.search(_target(f"{handles}/{handle}")) for handle in os.listdir(handles)):
                processes.append(int(entry))
    return [process for process in processes if process not in (driver, os.getpid())]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(ROUNDS):  # those that were about to start, too
        for process in session_processes(int(sys.argv[1])):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(PAUSE_S)
