"""specbench (image AR): how much faster a decoder makes an autoregressive text-to-image model, and what it costs.

    import specbench
    specbench.generate("a red circle left of a blue square", model="shapes", decoder="gsd", G=50)

The names below are imported from `specbench.api` on first use, so that `import specbench` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.system.version import __version__

if TYPE_CHECKING:
    from specbench.api import *  # noqa: F403 - `__all__` names what is public
    from specbench.errors import SpecbenchError

# ruff: noqa: F405 - for type checkers, these names come from the star above
__all__ = [
    "__version__",
    "SpecbenchError",
    "generate",
    "run",
    "dry_run",
    "merge_runs",
    "load",
    "score",
    "score_folder",
    "cross_check",
    "differences",
    "compare",
    "report",
    "show",
    "report_page",
    "report_table",
    "bench",
    "estimate",
    "forecast",
    "printed_latencies",
    "audit",
    "audit_runs",
    "check",
    "doctor",
    "available",
    "export",
    "import_results",
    "show_prompts",
    "fetch_prompts",
    "render_shapes",
    "train_head",
    "check_head",
    "demo",
]


def __getattr__(name: str) -> object:
    if name == "SpecbenchError":
        from specbench.errors import SpecbenchError  # the first use pays for it

        return SpecbenchError
    if name in __all__:
        from specbench import api  # the first use pays for it, not `import specbench`

        return getattr(api, name)
    raise AttributeError(f"module 'specbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
