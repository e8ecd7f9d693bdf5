"""Draw loss and scores of a training against the number of samples.

Reads `ar.jsonl` and every `scores*.json` of a folder and writes `curve.png` to the same folder.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dev.shapes.sample import TRIAL
from dev.shapes.train_ar import TrainingPlan
from specbench.models.shapes.scene import CATEGORIES
from specbench.stats import Estimate, mean_of_proportions

TARGET = 0.80


def log_rows(file: Path, column: str) -> list[dict]:
    """The rows of a log that have a column."""
    rows = (json.loads(line) for line in file.read_text().splitlines())
    return [row for row in rows if column in row]


def small_estimate(row: Mapping[str, float], prompts: int = TrainingPlan.prompts) -> Estimate:
    """The detector's score of a row of the log, over equally many prompts of each category."""
    each = prompts // len(CATEGORIES)
    hits = [round(row[name] * each) for name in CATEGORIES]
    return mean_of_proportions([([1] * k + [0] * (each - k), range(each)) for k in hits])


def panels(figure: Figure, evaluations: Sequence[Mapping], rates: Sequence[Mapping], scores: Sequence[Mapping]) -> None:
    """Plot loss and learning rate, gain of the caption, and detector score against thousands of samples."""
    loss, gain, detector = figure.subplots(1, 3)
    thousands = [row["samples"] / 1000 for row in evaluations]
    loss.plot(thousands, [row["held_out_nll"] for row in evaluations], "o-", color="tab:blue")
    loss.set_ylabel("held-out nats per token", color="tab:blue")
    rate = loss.twinx()
    rate.plot([row["samples"] / 1000 for row in rates], [row["lr"] for row in rates], color="tab:gray", linewidth=1)
    rate.set_ylabel("learning rate, share of its peak", color="tab:gray")
    rate.set_ylim(0, 1.6)
    gain.plot(thousands, [row["gain"] for row in evaluations], "o-", color="tab:green")
    gain.set_ylabel("gain of the caption, nats per image")
    gain.set_ylim(bottom=0)
    label = f"{TrainingPlan.prompts} prompts, guidance {TRIAL.guidance:g}, temperature {TRIAL.temperature:g}"
    _bars(detector, thousands, [small_estimate(row) for row in evaluations], label, color="tab:orange", alpha=0.6)
    shuffled = [row["shuffled"] for row in evaluations]
    detector.plot(thousands, shuffled, ":", color="tab:orange", label=f"{label}, shuffled captions")
    full = [Estimate(*(score["shapes"]["correct"]["overall"][k] for k in ("value", "low", "high"))) for score in scores]
    _bars(
        detector,
        [s["trained_samples"] / 1000 for s in scores],
        full,
        "318 prompts, default sampling of the weights",
        color="tab:red",
        marker="s",
    )
    detector.axhline(TARGET, color="black", linewidth=0.8, linestyle="--")
    detector.set_ylim(0, 1)
    detector.set_ylabel("share of images that the detector finds correct")
    detector.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 0.12))
    for axes in (loss, gain, detector):
        axes.set_xlabel("thousands of training samples")


def _bars(
    axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], label: str, marker: str = "o", **style
) -> None:
    values = np.array([estimate.value for estimate in estimates])
    reach = np.abs(np.array([(estimate.low, estimate.high) for estimate in estimates]).T - values)
    axes.errorbar(x, values, reach, marker=marker, linestyle="-", capsize=2, label=label, **style)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.shapes.curve", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("results/shapes-training"))
    folder = parser.parse_args().folder
    log = folder / "ar.jsonl"
    scores = [json.loads(file.read_text()) for file in folder.glob("scores*.json")]
    scores.sort(key=lambda score: score["trained_samples"])
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    panels(figure, log_rows(log, "held_out_nll"), log_rows(log, "lr"), scores)
    figure.savefig(folder / "curve.png", dpi=100)


if __name__ == "__main__":
    main()
