"""Plot results/speed/*.json as results/speed/steps.png: time per step by part, and step time against window.

Milliseconds are medians over the rounds of `bench.py`; a part that a file does not have is left out.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from specbench.reporting.charts import PART_COLOURS
from specbench.reporting.marks import mark_of

PARTS = dict(
    zip(
        ("target", "draft", "verify", "host"),
        zip(("target forward", "draft", "sample and verify", "host"), PART_COLOURS[::-1], strict=True),
        strict=True,
    )
)
"""Labels and colours, the same as on the HTML page."""


def read(folder: Path, name: str) -> dict | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def by_name(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """Group rows by contender, in order of first appearance."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    return groups


def part_ms(rows: Sequence[dict], part: str) -> float:
    """Milliseconds per step, the median over rounds."""
    return statistics.median(row["spans_ms"].get(part, 0.0) / row["nfe"] for row in rows)


def draw_parts(axes: Axes, rows: Sequence[dict], title: str = "Where a step goes, by decoder") -> None:
    """Draw one bar per decoder, with one segment per part of its step."""
    contenders = by_name(rows)
    names = list(contenders)
    left = [0.0] * len(names)
    for part, (label, colour) in PARTS.items():
        widths = [part_ms(contenders[name], part) for name in names]
        axes.barh(names, widths, left=left, label=label, color=colour, edgecolor="white", linewidth=0.8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.1f}", va="center", fontsize=8, color="#555555")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(left))
    axes.set_xlabel("milliseconds per step")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.45, -0.09), fontsize=8)


def draw_windows(axes: Axes, rows: Sequence[dict]) -> None:
    """Draw steps and target forwards for windows 1, 2, 4, ..."""
    contenders = by_name(rows)
    windows = sorted(int(name.split()[1]) for name in contenders if name.startswith("forward "))
    steps = [sum(part_ms(contenders[f"sjd {window}"], part) for part in PARTS) for window in windows]
    forwards = [statistics.median(row["wall_ms"] for row in contenders[f"forward {window}"]) for window in windows]
    axes.plot(windows, steps, "o-", color=mark_of("sjd").colour, label="whole step (SJD, mean over an image)")
    axes.plot(windows, forwards, "o-", color=mark_of("ar").colour, label="target forward (full window)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(windows, [str(window) for window in windows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("window (tokens fed per forward)")
    axes.set_ylabel("milliseconds")
    axes.set_title("What a wider window costs", loc="left")
    axes.legend(frameon=False, fontsize=8)


def plot(folder: Path) -> Path | None:
    """Draw the plot of the results in `folder`; None if the folder has no results."""
    draw_compiled = partial(draw_parts, title="Where a compiled step goes")
    parts = ((draw_parts, "decoders"), (draw_compiled, "decoders-compiled"), (draw_windows, "window"))
    documents = [(draw, read(folder, name)) for draw, name in parts]
    panels = [(draw, document) for draw, document in documents if document is not None]
    if not panels:
        return None
    bars = max(len(by_name(document["rows"])) for _, document in panels)
    size = 6.4 * len(panels), max(5.6, 0.22 * bars)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for (draw, document), axis in zip(panels, axes[0], strict=True):
        draw(axis, document["rows"])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y" if draw is draw_windows else "x", color="#eeeeee")
        axis.set_axisbelow(True)
    figure.supxlabel(
        " · ".join(dict.fromkeys(machine(document) for _, document in panels)), fontsize=8, color="#777777"
    )
    path = folder / "steps.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def machine(document: dict) -> str:
    hardware = document["hardware"]
    device = ", ".join(hardware["gpus"]) or hardware["cpu"]
    return f"shapes on {device}, {document['threads']} CPU thread{'s' if document['threads'] > 1 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the JSON files")
    options = parser.parse_args()
    print(plot(options.out) or f"nothing to draw in {options.out}")


if __name__ == "__main__":
    main()
