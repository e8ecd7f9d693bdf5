"""Configuration of workers, import of Ray, and check of a cluster. Loads no model, for dry runs."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.runs.decoder_args import parse_decoders
from specbench.runs.settings import RunSettings
from specbench.specs.run_spec import Mode

_ANSWER_S = 15  # Timeout of a cluster's answer in seconds; Ray itself would try for minutes


@dataclass(frozen=True)
class Workers:
    """Configuration of workers. This process decodes unless `count` is above 1 (None: as many as the cluster allows) or
    `address` names a Ray cluster. `references`: decoders ("package.module:NAME") that workers must import."""

    count: int | None = 1
    address: str | None = None
    references: tuple[str, ...] = ()

    @property
    def elsewhere(self) -> bool:
        return self.address is not None or self.count != 1


def plan_workers(settings: RunSettings) -> Workers:
    """Make the worker configuration; reject settings that are incompatible with several workers."""
    references = tuple(name for name, _ in parse_decoders(settings.decoder) if ":" in name)
    workers = Workers(settings.workers or (None if settings.ray else 1), settings.ray or None, references)
    if workers.elsewhere and ":" in settings.device:
        raise SpecbenchError(f"--device {settings.device}: each worker has its own GPU", "write --device cuda")
    if workers.elsewhere and settings.batch == "auto":
        raise SpecbenchError("--batch auto cannot be combined with --workers or --ray", "omit them, or give a number")
    return workers


def run_mode(mode: Mode | None, batch: int | str, workers: Workers, device: str) -> Mode:
    """Return the mode: by default latency, but throughput if images share a device, which distorts latencies."""
    alone = not workers.elsewhere or (device == "cuda" and mode == "latency")
    if mode == "latency" and (batch != 1 or not alone):
        what = "--mode latency needs one image at a time on an exclusive device"
        raise SpecbenchError(what, "use --batch 1, and one worker or one GPU per worker")
    return mode or ("latency" if batch == 1 and alone else "throughput")


def import_ray() -> Any:
    """Import Ray without usage reports; raise a SpecbenchError with exit code 5 if it is not installed."""
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
    """Require Ray, and the cluster at `address` if given. The cluster is queried by Ray's own program, because a
    separate process can be stopped and has a separate log."""
    import_ray()
    if not address or "://" in address:
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise no_cluster(address, f"no answer within {_ANSWER_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise no_cluster(address, lines[-1] if lines else f"exit code {done.returncode}")


def no_cluster(address: str | None, why: str) -> SpecbenchError:
    """Make the error of an unusable cluster, with a hint. `address`: None for a cluster on this machine."""
    if "uthentication" in why or "AuthToken" in why:
        return SpecbenchError(
            f"--ray {address}: the Ray cluster requires a token",
            "export RAY_AUTH_MODE=token, and copy ~/.ray/auth_token from the machine of 'ray start --head'",
            MISSING_PREREQUISITE,
        )
    where = f"--ray {address}: no Ray cluster answers there" if address else "Ray does not start here"
    reason = why.strip().partition(". ")[0][:200]
    return SpecbenchError(f"{where}: {reason}", "start a cluster: ray start --head", MISSING_PREREQUISITE)
