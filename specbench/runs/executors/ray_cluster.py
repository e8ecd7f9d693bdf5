"""Ray itself, and whether a cluster answers; for dry runs, too, which load no model."""

from __future__ import annotations

import os
import subprocess
import sys

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError

_ANSWER_S = 15
"""Seconds a cluster may take to answer; Ray itself would try for minutes."""


def import_ray():
    """Import Ray with logging and usage reports off; a SpecbenchError with exit code 5 where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray  # an extra
        import ray.cloudpickle
        import ray.exceptions
    except ImportError:
        raise SpecbenchError(
            "several workers need Ray, which is not installed",
            "pip install 'ray>=2.40', or use --shard, which needs no Ray",
            MISSING_PREREQUISITE,
        ) from None
    return ray


def require_ray(address: str | None) -> None:
    """Require Ray, and the cluster at an address if one is given. Ray's own program asks it, in a process of its own:
    that can be stopped, and keeps its log to itself.

    Raises:
        SpecbenchError: Ray is not installed (exit code 5), or nothing answers.
    """
    import_ray()
    if not address or "://" in address:
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise no_cluster(address, f"nothing within {_ANSWER_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise no_cluster(address, said[-1] if said else f"exit code {done.returncode}")


def no_cluster(address: str | None, why: str) -> SpecbenchError:
    """The error of a cluster that cannot be used, None being one on this machine, with what helps."""
    if "uthentication" in why or "AuthToken" in why:
        return SpecbenchError(
            f"--ray {address}: the Ray cluster wants a token",
            "export RAY_AUTH_MODE=token, and copy ~/.ray/auth_token from the machine of 'ray start --head'",
            MISSING_PREREQUISITE,
        )
    where = f"--ray {address}: no Ray cluster answers there" if address else "Ray does not start here"
    return SpecbenchError(
        f"{where}: {why.strip().partition('. ')[0][:200]}", "start one with 'ray start --head'", MISSING_PREREQUISITE
    )
