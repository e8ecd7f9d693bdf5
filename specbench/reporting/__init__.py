"""Reports of run folders: tables, pages, pictures, run and image cards."""

from specbench.reporting.report_rows import report_rows
from specbench.reporting.text_formats import render

__all__ = ["render", "report_rows"]
