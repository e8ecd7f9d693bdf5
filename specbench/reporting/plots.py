"""Plots as inline SVG in the colours of the page, light and dark.

matplotlib draws with two placeholder colours, which are replaced by `currentColor` and the page's `--rule`.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from specbench.reporting.pareto import Point, lower_is_better
from specbench.reporting.plot_data import LOGP_EDGES, STEP_SPANS
from specbench.reporting.token_maps import ACCEPTED, ACCEPTED_COLOUR, DRAWN_COLOUR
from specbench.stats import Estimate
from specbench.system.console import printable

PALETTE = ("#8a8a8a", "#3d8bd4", "#e0862a", "#2fa36f", "#cf5ca0", "#8d74dd", "#b3932b", "#d9584a", "#3aa8b8", "#86a336")
"""Colours distinguishable on white and on black; further runs repeat them with another line style."""
_DASHES = ("-", "--", ":", "-.")
_INK, _RULE = "#123456", "#123457"
_SPAN_LABELS = dict(zip(STEP_SPANS, ("target forward", "draft", "verify + sample", "host gap"), strict=True))
_WIDTH, _HEIGHT, _LEGEND_LINE = 4.8, 2.9, 0.21
_STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": _RULE, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.edgecolor": _INK, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.6,
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Printed or measured points of a paper's figure: x (a number or a category) and y."""

    label: str
    measured: bool
    points: Sequence[tuple[Estimate | str, Estimate]]


def figure_plot(curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """Plot a paper's figure: printed values hollow and dashed, measured values filled with intervals."""
    groups = list(dict.fromkeys(curve.label for curve in curves))
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas(f"{y_label} against {x_label}", len(curves))
        for curve in curves:
            colour = _colour(1 + groups.index(curve.label))
            x, y = zip(*curve.points, strict=True)
            places = [place if isinstance(place, str) else place.value for place in x]
            numbers = not isinstance(x[0], str)
            axes.errorbar(
                places, [value.value for value in y], yerr=_all_bars(y), xerr=_all_bars(x) if numbers else None,
                fmt="o", ls="-" if curve.measured else "--", color=colour, mfc=colour if curve.measured else "none",
                ms=5, elinewidth=1, label=_cut(f"{curve.label} {'here' if curve.measured else 'paper'}".strip()),
            )  # fmt: skip
        axes.set(xlabel=x_label, ylabel=y_label)
        if _spans_decades(curves):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        return _svg(figure, axes)


def pareto_plot(points: Sequence[Point], metric: str, order: Sequence[str]) -> str:
    """Plot speed-up against a score, both with intervals; up and right is better. Dominated runs are hollow.

    Args:
        order: run ids in the order of the page, which determines their colours.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas(f"speed-up and {metric} of each run", len(points) + 1)
        for point in points:
            colour, dominated = _colour(order.index(point.run_id)), point.dominated_by is not None
            axes.errorbar(
                point.speed.value, point.quality.value, xerr=_bars(point.speed), yerr=_bars(point.quality), fmt="o",
                color=colour, mfc="none" if dominated else colour, ms=7, mew=1.6, elinewidth=1, alpha=0.9,
                label=f"{_cut(point.label)}{' (dominated)' if dominated else ''}",
            )  # fmt: skip
        best = sorted((p.speed.value, p.quality.value) for p in points if p.dominated_by is None)
        axes.plot(*zip(*best, strict=True), color=_INK, lw=0.8, ls=":", zorder=1)
        axes.set(xlabel="speed-up over AR", ylabel=f"{metric}{' (axis inverted)' if lower_is_better(metric) else ''}")
        if lower_is_better(metric):
            axes.invert_yaxis()
        return _svg(figure, axes)


def offsets_plot(rates: Mapping[str, Sequence[float | None]], order: Sequence[str]) -> str:
    """Plot acceptance by window offset, one line per run with drafts.

    Args:
        rates: per label, acceptance at each offset; None where no draft was verified.
        order: labels of all runs of the page.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas("acceptance by window offset", len(rates))
        for label, values in rates.items():
            place = order.index(label)
            shown = [np.nan if value is None else value for value in values]
            axes.plot(range(1, len(shown) + 1), shown, **_line(place), marker="o", ms=3, label=_cut(label))
        axes.set(xlabel="position of the draft in the window", ylabel="acceptance", ylim=(0, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure, axes)


def time_plot(step_ms: Mapping[str, Mapping[str, float]]) -> str:
    """Plot milliseconds per step by span, one bar per label."""
    with mpl.rc_context(_STYLE | {"axes.grid.axis": "x"}):
        figure, axes = _canvas("time of a step", len(STEP_SPANS), height=0.65 + 0.3 * len(step_ms))
        places, left = np.arange(len(step_ms)), np.zeros(len(step_ms))
        for number, span in enumerate(STEP_SPANS):
            width = np.array([spans[span] for spans in step_ms.values()])
            colour = PALETTE[1 + number]
            axes.barh(places, width, left=left, height=0.7, color=colour, label=_SPAN_LABELS[span])
            left += width
        axes.set_yticks(places, [_cut(label, 18) for label in step_ms])
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds per step")
        return _svg(figure, axes)


def logp_plot(shares: Mapping[str, np.ndarray], order: Sequence[str]) -> str:
    """Plot the histogram of log p of the committed tokens, one line per label."""
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas("log p of the committed tokens", len(shares))
        for label, share in shares.items():
            middles = (LOGP_EDGES[1:] + LOGP_EDGES[:-1]) / 2
            axes.plot(middles, np.where(share > 0, share * 100, np.nan), **_line(order.index(label)), label=_cut(label))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="log p in nats (first bin: and below)", ylabel="% of free tokens")
        return _svg(figure, axes)


def step_picture(steps: np.ndarray) -> bytes:
    """Draw the commit step of each token (dark early, light late) as a PNG with one pixel per token."""
    shade = (steps - 1) / max(1, steps.max() - 1)
    return _png((colormaps["viridis"](shade)[..., :3] * 255).astype(np.uint8))


def origin_picture(origins: np.ndarray) -> bytes:
    """Draw accepted drafts and sampled tokens in two colours, as a PNG with one pixel per token."""
    return _png(np.where((origins == ACCEPTED)[..., None], ACCEPTED_COLOUR, DRAWN_COLOUR).astype(np.uint8))


def share_picture(shares: np.ndarray) -> bytes:
    """Draw a fraction per grid position, from 0 (dark) to 1 (light), as a PNG with one pixel per token."""
    return _png((colormaps["cividis"](shares)[..., :3] * 255).astype(np.uint8))


def _canvas(title: str, entries: int, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    """Create a figure with room below the axes for a two-column legend of `entries` entries."""
    below = _LEGEND_LINE * -(-entries // 2)
    figure = Figure((_WIDTH, height + below), layout="constrained")
    figure.set_label(title)
    return figure, figure.add_subplot()


def _bars(estimate: Estimate) -> list[list[float]] | None:
    if estimate.low is None:
        return None
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]


def _all_bars(estimates: Sequence[Estimate]) -> np.ndarray:
    """Error bar lengths [2, points] below and above each value; 0 without an interval."""
    return np.hstack([np.array(_bars(estimate) or [[0.0], [0.0]]) for estimate in estimates])


def _spans_decades(curves: Sequence[Curve]) -> bool:
    values = [x.value for curve in curves for x, _ in curve.points if not isinstance(x, str)]
    return bool(values) and 0 < 100 * min(values) <= max(values)


def _colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _line(place: int) -> dict[str, object]:
    return {"color": _colour(place), "linestyle": _DASHES[place // len(PALETTE) % len(_DASHES)]}


def _cut(text: str, most: int = 26) -> str:
    clean = printable(text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def _svg(figure: Figure, axes: Axes) -> str:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, handlelength=1.6, columnspacing=1.2)
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _inline(text.getvalue(), figure.get_label())


def _inline(svg: str, title: str) -> str:
    """Convert an SVG document to an inline element: no header, unique ids, colours of the page."""
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    prefix = f"f{zlib.crc32(body.encode()):08x}"
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", body)
    body = body.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
    return body.replace("<svg ", f'<svg role="img" aria-label="{_attribute(title)}" ', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()
