"""Commands `specbench train-head` and `specbench check-head`: draft heads of the EAGLE and vertical decoders."""

from pathlib import Path

from specbench.cli.commands import command
from specbench.cli.options import Json, Quiet, option
from specbench.cli.output import print_json, print_table
from specbench.runs.progress_bar import ProgressReporter
from specbench.system.torch_device import AUTO, chosen_device

_Model = option("--model", "NAME", "Target model.", "shapes", show_default="shapes")
_Device = option("--device", "DEVICE", "Torch device.", AUTO)
_Threads = option("--threads", "N", "CPU threads; 0 uses all.", 0)
_Data = option("--data", "FOLDER", "Folder of a run whose images replace the model's training data.")
_Kind = option("--kind", "KIND", "Kind of head: eagle, eagle3 or vertical.", "eagle")


@command(
    "train-head",
    "--kind eagle: an EAGLE-1 head, for the EAGLE decoders. --kind eagle3: a head that reads several layers and "
    "learns from its own outputs, for eagle3. --kind vertical: a head that reads the image row above, for vertical. "
    "The target's features are computed once; the head learns to predict from them. To resume an interrupted training, "
    "run the same command again; the interruption does not change the weights. Use the result with --head FOLDER.",
)
def train_head(
    *,
    model: str = _Model,
    out: Path = option("--out", "FOLDER", "Folder of the trained head.", ...),
    kind: str = _Kind,
    data: Path | None = _Data,
    images: int = option("--images", "N", "Number of training images.", 1024),
    epochs: int = option("--epochs", "N", "Passes over the training images.", 16),
    batch: int = option("--batch", "N", "Images per training step.", 16),
    lr: float = option("--lr", "X", "Peak learning rate.", 2e-3),
    seed: int = option("--seed", "N", "Random seed.", 0),
    device: str = _Device,
    threads: int = _Threads,
    quiet: bool = Quiet,
) -> None:
    from specbench.training import head as heads

    progress, device, known = _Progress(), chosen_device(device), heads.head_name(kind)
    tell = None if quiet else progress.tell
    try:
        print(heads.train_head(out, model, data, images, epochs, batch, lr, seed, device, threads, tell, known))
    finally:
        progress.finish()


class _Progress:
    """Training progress: one bar per stage."""

    def __init__(self) -> None:
        self._stage, self._done = "", 0
        self._bar: ProgressReporter | None = None

    def tell(self, stage: str, done: int, total: int, note: str) -> None:
        if self._bar is None or stage != self._stage:
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


@command(
    "check-head",
    "tv: mean total variation between the guided distributions of target and head along training images, with its 95 % "
    "confidence interval. acceptance: expected acceptance rate of a chain of drafts with the exact test. In the last "
    "row, each feature is paired with the previous instead of the next token (EAGLE heads only); if tv is lower in "
    "that row, the head was trained on misaligned pairs.",
)
def check_head(
    model: str = _Model,
    head: str = option(
        "--head", "FOLDER", "Folder of the head.", "", show_default="the head that is bundled with the model"
    ),
    kind: str = _Kind,
    data: Path | None = _Data,
    images: int = option("--images", "N", "Number of images to evaluate.", 32, min=1),
    depths: int = option("--depths", "N", "Number of draft depths.", 5, min=1),
    seed: int = option(
        "--seed", "N", "Seed of the image selection; the default differs from the default of train-head.", 10**6, min=0
    ),
    device: str = _Device,
    threads: int = _Threads,
    json: bool = Json,
) -> None:
    from specbench.training import head as heads

    device, known = chosen_device(device), heads.head_name(kind)
    rows = heads.check_head(model, head, data, images, depths, seed, device, threads, known)
    print_json(rows) if json else print_table(rows, ("depth", "tv", "tv_low", "tv_high", "acceptance"))
