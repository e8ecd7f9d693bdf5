"""specbench (image AR): measure speed-up and image quality of decoders for autoregressive text-to-image models.

    import specbench
    specbench.generate("a red circle left of a blue square", model="shapes", decoder="gsd", G=50)

Public names are imported on first use, so that `import specbench` is fast.
"""

import importlib
from typing import TYPE_CHECKING

from specbench.system.version import __version__

if TYPE_CHECKING:
    from specbench.api import *  # noqa: F403 - `__all__` names what is public
    from specbench.checks.contracts import check_all as check
    from specbench.checks.doctor import doctor
    from specbench.checks.losslessness import audit_decoders as audit
    from specbench.checks.run_audit import audit_runs
    from specbench.checks.verify import verify
    from specbench.errors import SpecbenchError
    from specbench.papers.downloads import fetch
    from specbench.papers.field import field, field_figure
    from specbench.papers.forecasts import forecast
    from specbench.papers.listing import available
    from specbench.prompts import fetch_prompts
    from specbench.reporting.demo import demo
    from specbench.reporting.status import status
    from specbench.runs.preparation import decode_loaded as decode
    from specbench.specs.presets import define_decoder as decoder
    from specbench.store.merge_shards import merge_runs
    from specbench.store.packed import pack
    from specbench.training.head import check_head, train_head

# ruff: noqa: F405 - for type checkers, these names come from the star above
__all__ = ["__version__", "SpecbenchError", "demo", "available", "doctor"]
__all__ += ["generate", "decode", "run", "dry_run", "status", "load", "samples", "columns", "show"]
__all__ += ["score", "score_folder", "differences", "compare", "report", "report_page", "methods_paragraph"]
__all__ += ["bench", "report_table", "field", "field_figure", "estimate", "forecast", "decoder", "check", "audit"]
__all__ += ["audit_runs", "verify"]
__all__ += ["merge_runs", "pack", "export", "import_results", "import_tokens", "fetch", "fetch_prompts", "show_prompts"]
__all__ += ["train_head", "check_head"]

_ELSEWHERE = {
    "SpecbenchError": "specbench.errors",
    "audit": "specbench.checks.losslessness:audit_decoders",
    "audit_runs": "specbench.checks.run_audit",
    "available": "specbench.papers.listing",
    "check": "specbench.checks.contracts:check_all",
    "check_head": "specbench.training.head",
    "decode": "specbench.runs.preparation:decode_loaded",
    "decoder": "specbench.specs.presets:define_decoder",
    "demo": "specbench.reporting.demo",
    "doctor": "specbench.checks.doctor",
    "fetch": "specbench.papers.downloads",
    "field": "specbench.papers.field",
    "field_figure": "specbench.papers.field",
    "fetch_prompts": "specbench.prompts",
    "forecast": "specbench.papers.forecasts",
    "merge_runs": "specbench.store.merge_shards",
    "pack": "specbench.store.packed",
    "status": "specbench.reporting.status",
    "train_head": "specbench.training.head",
    "verify": "specbench.checks.verify",
}
"""{public name outside `specbench.api`: its module, as "module:name" if the object has another name in the module}."""


def __getattr__(name: str) -> object:
    if name in __all__:
        module, _, there = _ELSEWHERE.get(name, "specbench.api").partition(":")
        return getattr(importlib.import_module(module), there or name)
    raise AttributeError(f"module 'specbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
