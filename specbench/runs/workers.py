"""Where the images of a run are decoded: this process or several workers, and which shard of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbench.errors import SpecbenchError
from specbench.runs.decoder_args import parse_decoders
from specbench.runs.settings import Value


@dataclass(frozen=True)
class Workers:
    """Worker configuration: this process, unless `count` is above 1 or `address` names a Ray cluster.

    `count` None: as many as the cluster allows; `references` are the decoders ("package.module:NAME") workers must
        import.
    """

    count: int | None = 1
    address: str | None = None
    references: tuple[str, ...] = ()

    @property
    def elsewhere(self) -> bool:
        return self.address is not None or self.count != 1


THIS_PROCESS = Workers()


def plan_workers(values: Mapping[str, Value]) -> Workers:
    """Worker configuration from the settings; rejects settings incompatible with several workers."""
    value = {name: held.value for name, held in values.items()}
    references = tuple(name for name, _ in parse_decoders(value["decoder"]) if ":" in name)
    workers = Workers(value["workers"] or (None if value["ray"] else 1), value["ray"] or None, references)
    if workers.elsewhere and ":" in value["device"]:
        raise SpecbenchError(f"--device {value['device']}: each worker has its own GPU", "write --device cuda")
    if workers.elsewhere and value["batch"] == "auto":
        raise SpecbenchError("--batch auto: cannot be estimated with --workers or --ray", "omit them, or set a number")
    return workers


def plan_shard(text: str | None) -> tuple[int, int]:
    """Parse "2/8" to (2, 8)."""
    if not text:
        return 1, 1
    number, slash, shards = text.partition("/")
    if not (slash and number.isdecimal() and shards.isdecimal() and 1 <= int(number) <= int(shards) <= 100_000):
        raise SpecbenchError(
            f"--shard {text}: expected I/N with 1 <= I <= N", "for example 2/8, the second of eight parts"
        )
    return int(number), int(shards)


def shard_folder(number: int, shards: int) -> str:
    """Folder of a shard's runs inside --out, so that shards never write to the same folder."""
    return f"shard-{number}-of-{shards}" if shards > 1 else ""


def run_mode(given: str | None, batch: int | str, workers: Workers, device: str) -> str:
    """Latency mode, or throughput if images share a device, which invalidates their latencies."""
    alone = not workers.elsewhere or (device == "cuda" and given == "latency")
    if given == "latency" and (batch != 1 or not alone):
        raise SpecbenchError(
            "--mode latency: needs one image at a time on an exclusive device",
            "use --batch 1, and one worker or one GPU per worker",
        )
    return given or ("latency" if batch == 1 and alone else "throughput")
