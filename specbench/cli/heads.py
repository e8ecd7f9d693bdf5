"""Commands `specbench train-head` and `specbench check-head`: draft heads for the EAGLE decoders."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli import completion
from specbench.cli.options import flags, print_json, print_table
from specbench.runs.settings import JSON, QUIET, merge
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_TRAIN = (QUIET,)
_CHECK = (JSON,)


def add_to(app: typer.Typer) -> None:
    app.command(name="train-head", help=_TRAIN_HELP)(train_head)
    app.command(name="check-head", help=_CHECK_HELP)(check_head)


_TRAIN_HELP = "\n\n".join(
    (
        "Train an EAGLE-1 draft head for a model, and print its folder.",
        "The target's features are computed once; the head is trained to extrapolate them. Run the same command again "
        "to resume an interrupted training, with identical weights. Use the result with --head FOLDER.",
    )
)
_CHECK_HELP = "\n\n".join(
    (
        "Measure the total variation between draft head and target by draft depth.",
        "tv: mean total variation between the guided distributions of target and head along training images, with its "
        "95 % confidence interval. acceptance: expected acceptance of an exact chain. The last row pairs each feature "
        "with the previous instead of the next token; a head with a lower tv there was trained on misaligned pairs.",
    )
)

_MODEL = typer.Option(
    "shapes", "--model", metavar="NAME", help="Target model.", show_default="shapes", autocompletion=completion.models
)
_DEVICE = typer.Option("cpu", "--device", metavar="DEVICE", help="Torch device.", show_default="cpu")
_THREADS = typer.Option(0, "--threads", metavar="N", help="CPU threads; 0 uses all.")
_DATA = typer.Option(
    None, "--data", metavar="FOLDER", help="Folder of a run whose images replace the model's training data."
)


@flags(_TRAIN)
def train_head(
    flags: dict,
    model: str = _MODEL,
    out: Path = typer.Option(..., "--out", metavar="FOLDER", help="Folder of the trained head."),
    data: Path = _DATA,
    images: int = typer.Option(1024, "--images", metavar="N", help="Training images."),
    epochs: int = typer.Option(16, "--epochs", metavar="N", help="Passes over the training images."),
    batch: int = typer.Option(16, "--batch", metavar="N", help="Images per training step."),
    lr: float = typer.Option(2e-3, "--lr", metavar="X", help="Peak learning rate."),
    seed: int = typer.Option(0, "--seed", metavar="N", help="Random seed."),
    device: str = _DEVICE,
    threads: int = _THREADS,
) -> None:
    from specbench import api

    progress = None if merge(_TRAIN, flags)["quiet"].value else _Progress()
    try:
        print(
            api.train_head(
                out,
                model,
                data,
                images,
                epochs,
                batch,
                lr,
                seed,
                device=device,
                threads=threads,
                tell=progress and progress.tell,
            )
        )
    finally:
        if progress:
            progress.finish()


class _Progress:
    """Training progress: one bar per stage."""

    def __init__(self) -> None:
        self._stage, self._done = "", 0
        self._bar: console.ProgressReporter | None = None

    def tell(self, stage: str, done: int, total: int, note: str) -> None:
        if stage != self._stage:
            self.finish()
            self._stage, self._done = stage, 0
            self._bar = console.ProgressReporter(stage)
            self._bar.start(total, 0)
        for _ in range(done - self._done):
            self._bar.row(f"{stage} {note}-", {})
        self._done = done

    def finish(self) -> None:
        if self._bar:
            self._bar.finish()


@flags(_CHECK)
def check_head(
    flags: dict,
    model: str = _MODEL,
    head: str = typer.Option(
        "", "--head", metavar="FOLDER", help="Folder of the head; without it, the head that comes with the model."
    ),
    data: Path = _DATA,
    images: int = typer.Option(32, "--images", metavar="N", min=1, help="Images to evaluate."),
    depths: int = typer.Option(5, "--depths", metavar="N", min=1, help="Number of draft depths."),
    seed: int = typer.Option(
        10**6, "--seed", metavar="N", min=0, help="Seed of the image selection; the default differs from training."
    ),
    device: str = _DEVICE,
    threads: int = _THREADS,
) -> None:
    from specbench import api

    rows = api.check_head(model, head, data, images, depths, seed, device, threads)
    as_json = merge(_CHECK, flags)["json"].value
    print_json(rows) if as_json else print_table(rows, ("depth", "tv", "tv_low", "tv_high", "acceptance"))
