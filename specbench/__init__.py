"""specbench (image AR): how much faster a decoder makes an autoregressive text-to-image model, and what it costs.

    import specbench
    specbench.generate("a red circle left of a blue square", model="shapes", decoder="gsd", G=50)

The names below are imported from `specbench.api` on first use, so that `import specbench` costs nothing.
"""

from __future__ import annotations

from specbench.system.version import __version__

__all__ = ["__version__", "generate", "load", "report", "run", "score"]


def __getattr__(name: str):
    if name in __all__:
        from specbench import api

        return getattr(api, name)
    raise AttributeError(f"module 'specbench' has no attribute '{name}'")


def __dir__():
    return __all__
