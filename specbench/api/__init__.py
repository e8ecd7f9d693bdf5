"""Public functions that convert settings and names of runs, by the user's task: make images, score, read results.

Each function is a few lines that call the package that does the work. Other public functions are in those packages;
`specbench.__init__` lists all. Importing this is cheap: functions import torch, pandas or matplotlib when called.

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

# Literal lists of texts, because type checkers read nothing else
__all__ = ["bench", "dry_run", "estimate", "generate", "import_tokens", "run", "show_prompts"]
__all__ += ["columns", "compare", "load", "methods_paragraph", "report", "report_page", "report_table", "samples"]
__all__ += ["differences", "export", "import_results", "score", "score_folder", "show"]
