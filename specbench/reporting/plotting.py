"""Matplotlib, in the package's own style whatever the user's settings are."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError

__all__ = ["Axes", "Figure", "colormaps", "styled"]
_BACKEND = "MPLBACKEND"  # Files need none, and a notebook's may be of a package that is not here
_asked = os.environ.pop(_BACKEND, None)
try:  # the user's own settings are read by the import
    import matplotlib.style
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except (ValueError, OSError) as error:
    reason = str(error).strip().partition("\n")[0]
    what = f"matplotlib cannot be imported: {reason}"
    raise SpecbenchError(what, "see the file matplotlibrc", MISSING_PREREQUISITE) from error
finally:
    if _asked is not None:
        os.environ[_BACKEND] = _asked
if _asked is not None:
    with suppress(ValueError):  # for figures of a notebook's own
        matplotlib.rcParams["backend"] = _asked

STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "pdf.fonttype": 42, "svg.fonttype": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "hatch.linewidth": 0.5,
    "savefig.dpi": 300, "svg.hashsalt": "specbench",
}  # fmt: skip


def styled() -> AbstractContextManager:
    """The style of all figures, whatever the user's matplotlibrc says."""
    return matplotlib.style.context(["default", STYLE])
