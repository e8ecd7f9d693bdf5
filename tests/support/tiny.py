"""A run small enough for hundreds of repetitions: an enumerable model, a few prompts, and their specs."""

import os
import signal

from specbench.checks.enumerable_model import EnumerableModel
from specbench.models.interface import TokenLayout
from specbench.prompts import Prompt, requests_for
from specbench.runs.executors.local import LocalExecutor
from specbench.runs.run_progress import Reporter
from specbench.specs.presets import resolve
from specbench.specs.run_spec import RunSpec, Sampling

TEXTS = ("a cat", "a dog", "two | cats", "a <b>dog</b>")
SAMPLING = Sampling(guidance=2.0)


def tiny_model() -> EnumerableModel:
    return EnumerableModel(TokenLayout.with_row_ends(2, 2, 3), TEXTS)


def prompts(n: int = 4) -> list[Prompt]:
    """`n` prompts with ids that need care in file names."""
    ids = ["cat", "../dog", "CAT", "a/b|c", *(f"p{index}" for index in range(4, n))]
    return [Prompt(ids[index], TEXTS[index % len(TEXTS)], category="pets") for index in range(n)]


def executor() -> LocalExecutor:
    return LocalExecutor(tiny_model())


class OnRow(Reporter):
    """Call `act` after each row with the number of rows so far."""

    def __init__(self, act=lambda rows: None):
        self.rows, self._act = 0, act

    def row(self, run_id, row):
        self.rows += 1
        self._act(self.rows)


def interrupt_after(rows: int) -> OnRow:
    """Ctrl-C after this row."""
    return OnRow(lambda number: number == rows and os.kill(os.getpid(), signal.SIGINT))


def spec(decoder: str = "sjd", seed: int = 0, batch: int = 1, threads: int = 1, **options) -> RunSpec:
    options = {"window": 3} | options if decoder != "ar" else options
    return RunSpec(
        model="enumerable", weights_sha256="0" * 64, decoder=resolve(decoder, options), sampling=SAMPLING,
        prompts="pets", prompts_sha256="1" * 64, seed=seed, batch=batch, dtype="float32", device="cpu",
        threads=threads,
    )  # fmt: skip


SPECS = [spec("ar"), spec("scd-mc")]
REQUESTS = requests_for(prompts(), 3)
