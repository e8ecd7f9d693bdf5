"""Commands `specbench train-head` and `specbench check-head`: draft heads of the EAGLE and vertical decoders."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import Json, Quiet, model_option, option
from specbench.cli.output import print_json, print_table
from specbench.runs.progress_bar import ProgressReporter
from specbench.system.torch_device import AUTO, chosen_device


def add_to(app: typer.Typer) -> None:
    app.command(name="train-head", help=_TRAIN_HELP)(train_head)
    app.command(name="check-head", help=_CHECK_HELP)(check_head)


_TRAIN_HELP = help_of(
    "train-head",
    "--kind eagle: an EAGLE-1 head, for the EAGLE decoders. --kind eagle3: a head that reads several layers and "
    "learns from its own outputs, for eagle3. --kind vertical: a head that looks at the image row above, for vertical. "
    "The target's features are computed once; the head learns to predict from them. To resume an interrupted training, "
    "run the same command again; the weights will be identical. Use the result with --head FOLDER.",
)
_CHECK_HELP = help_of(
    "check-head",
    "tv: mean total variation between the guided distributions of target and head along training images, with its "
    "95 % confidence interval. acceptance: expected acceptance of an exact chain. In the last row, each feature "
    "is paired with the previous instead of the next token; a head with a lower tv in that row was trained on "
    "misaligned pairs (EAGLE heads only).",
)

_Model = model_option("Target model.", kind=str, show_default="shapes")
_Device = option("--device", "DEVICE", "Torch device.", str)
_Threads = option("--threads", "N", "CPU threads; 0 uses all.", int)
_Data = option("--data", "FOLDER", "Folder of a run whose images replace the model's training data.", Path | None)
_Head = option("--head", "FOLDER", "Folder of the head; by default the head that is bundled with the model.", str)
_Kind = option("--kind", "KIND", "Kind of head: eagle, eagle3 or vertical.", str)
_Out = option("--out", "FOLDER", "Folder of the trained head.", Path)
_SelectionSeed = option("--seed", "N", "Seed of the image selection; the default differs from training's.", int, min=0)


def train_head(
    *,
    model: _Model = "shapes",
    out: _Out,
    kind: _Kind = "eagle",
    data: _Data = None,
    images: option("--images", "N", "Training images.", int) = 1024,
    epochs: option("--epochs", "N", "Passes over the training images.", int) = 16,
    batch: option("--batch", "N", "Images per training step.", int) = 16,
    lr: option("--lr", "X", "Peak learning rate.", float) = 2e-3,
    seed: option("--seed", "N", "Random seed.", int) = 0,
    device: _Device = AUTO,
    threads: _Threads = 0,
    quiet: Quiet = False,
) -> None:
    from specbench.training import head as heads

    progress = None if quiet else _Progress()
    tell, device = progress and progress.tell, chosen_device(device)
    try:
        print(heads.train_head(out, model, data, images, epochs, batch, lr, seed, device, threads, tell, kind))
    finally:
        if progress:
            progress.finish()


class _Progress:
    """Training progress: one bar per stage."""

    def __init__(self) -> None:
        self._stage, self._done = "", 0
        self._bar: ProgressReporter | None = None

    def tell(self, stage: str, done: int, total: int, note: str) -> None:
        if stage != self._stage:
            self.finish()
            self._stage, self._done = stage, 0
            self._bar = ProgressReporter(stage)
            self._bar.start(total, 0)
        for _ in range(done - self._done):
            self._bar.row(f"{stage} {note}-", {})
        self._done = done

    def finish(self) -> None:
        if self._bar:
            self._bar.finish()


def check_head(
    model: _Model = "shapes",
    head: _Head = "",
    kind: _Kind = "eagle",
    data: _Data = None,
    images: option("--images", "N", "Images to evaluate.", int, min=1) = 32,
    depths: option("--depths", "N", "Number of draft depths.", int, min=1) = 5,
    seed: _SelectionSeed = 10**6,
    device: _Device = AUTO,
    threads: _Threads = 0,
    json: Json = False,
) -> None:
    from specbench.training import head as heads

    rows = heads.check_head(model, head, data, images, depths, seed, chosen_device(device), threads, kind)
    print_json(rows) if json else print_table(rows, ("depth", "tv", "tv_low", "tv_high", "acceptance"))
