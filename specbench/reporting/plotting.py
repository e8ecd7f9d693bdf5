"""Matplotlib in specbench's style, independent of the user's settings."""

from contextlib import AbstractContextManager

from specbench.system.surroundings import plain_matplotlib

__all__ = ["Axes", "Figure", "colormaps", "styled"]

with plain_matplotlib():
    import matplotlib.style
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "pdf.fonttype": 42, "svg.fonttype": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "hatch.linewidth": 0.5,
    "savefig.dpi": 300, "svg.hashsalt": "specbench",
}  # fmt: skip


def styled() -> AbstractContextManager[None]:
    """Context with the style of all figures, independent of the user's matplotlibrc."""
    return matplotlib.style.context(["default", STYLE])
