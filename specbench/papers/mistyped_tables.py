"""Names of tables that were typed wrongly where runs or tables may be named."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import unknown_name
from specbench.papers.table_files import table_names
from specbench.store.run_folders import runs_in


def refuse_mistyped(names: Sequence[str], out: str | Path) -> None:
    """Reject a name that resembles a table's name, or has another number, and matches no run in `out`.

    Raises:
        SpecbenchError: there is such a name.
    """
    runs, tables = [folder.name for folder in runs_in(Path(out))], table_names()
    papers = {table.rpartition("-")[0] for table in tables}
    for name in names:
        if name in tables or any(run.startswith(name) for run in runs):
            continue
        paper, _, number = name.rpartition("-")
        if (paper in papers and number.isdigit()) or difflib.get_close_matches(name, tables, n=1, cutoff=0.8):
            raise unknown_name("table", name, tables)
