"""Public functions that make images, score them and read results. They convert settings and names of runs.

Each function only calls the package that does the work. Further public functions are in those packages;
`specbench.__init__` lists all. Importing `specbench.api` is fast: functions import torch or pandas when called.

    prompts -> model.encode -> decoding.loop.decode -> Generation -> store -> scoring -> reporting
"""

from specbench.api.images import bench, dry_run, estimate, generate, import_tokens, run, show_prompts
from specbench.api.results import (
    columns,
    compare,
    differences,
    export,
    import_results,
    load,
    methods_paragraph,
    report,
    report_page,
    report_table,
    samples,
    score,
    score_folder,
    show,
)

# Literal lists, because type checkers cannot evaluate other expressions
__all__ = ["bench", "dry_run", "estimate", "generate", "import_tokens", "run", "show_prompts"]
__all__ += ["columns", "compare", "load", "methods_paragraph", "report", "report_page", "report_table", "samples"]
__all__ += ["differences", "export", "import_results", "score", "score_folder", "show"]
