"""Training that can be stopped at any step and continued."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import nn

LOG_EVERY = 50
SAVE_EVERY = 250


class Stateful(Protocol):
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> object: ...


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT (Ctrl-C) in the yielded list, so that the loop can end at the next safe point."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, lambda got, _: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def train(
    out: Path, name: str, parts: Mapping[str, Stateful], steps: int, step: Callable[[int], Mapping[str, float]]
) -> bool:
    """Call `step` with the numbers 0 to steps - 1, continuing after the state of `parts` in `out/<name>.pt`.

    SIGTERM or Ctrl-C ends it early with everything saved. Means of the results of `step` go to `out/<name>.jsonl`.

    Returns:
        Whether all steps are done.
    """
    checkpoint = out / f"{name}.pt"
    first, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu")
        for key, part in parts.items():
            part.load_state_dict(state[key])
        first, spent = state["step"], state["cpu_s"]
    began, sums = time.process_time(), {}
    with stop_signals() as stopped:
        for number in track(range(first, steps), description=name):
            for key, value in step(number).items():
                sums.setdefault(key, []).append(value)
            done, cpu_s = number + 1, spent + time.process_time() - began
            if done % LOG_EVERY == 0 or done == steps:
                row = {"step": done, "cpu_s": round(cpu_s)} | {k: round(sum(v) / len(v), 4) for k, v in sums.items()}
                with open(out / f"{name}.jsonl", "a") as log:
                    log.write(json.dumps(row) + "\n")
                sums = {}
            if done % SAVE_EVERY == 0 or done == steps or stopped:
                state = {key: part.state_dict() for key, part in parts.items()}
                torch.save(state | {"step": done, "cpu_s": cpu_s}, checkpoint.with_suffix(".part"))
                os.replace(checkpoint.with_suffix(".part"), checkpoint)
            if stopped:
                return False
    return True


def save_half(module: nn.Module, file: Path) -> None:
    """Write a module as safetensors, its floating-point numbers in 16 bits."""
    state = module.state_dict().items()
    halves = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state}
    save_file({name: tensor.contiguous() for name, tensor in halves.items()}, file)
