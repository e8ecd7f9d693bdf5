"""From run folders to tables, galleries and cards."""

from specbench.reporting.rows import report_rows
from specbench.reporting.tables import FORMATS, render

__all__ = ["FORMATS", "render", "report_rows"]
