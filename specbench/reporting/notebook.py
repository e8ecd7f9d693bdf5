"""Reports and runs in notebooks: tables, charts and pictures."""

import base64
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from markupsafe import Markup
from pandas.plotting import PlotAccessor

from specbench.errors import unknown_name
from specbench.reporting.figures import chart_figure, figure_names, saved
from specbench.reporting.html import page_charts, page_table, template
from specbench.reporting.picture_figures import find_grid, grid_figure
from specbench.reporting.plotting import Figure
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import ReportRow, unique_names
from specbench.reporting.sections import sections
from specbench.reporting.text_formats import report_arrow
from specbench.store.schema import with_units


class Figures(dict[str, Figure]):
    """{name: figure}. A notebook displays the figures one below the other."""

    def _repr_html_(self) -> str:
        pictures = (base64.b64encode(saved(figure, "png")).decode() for figure in self.values())
        shown = Markup('<p><b>{}</b></p><img style="max-width: 100%" src="data:image/png;base64,{}">')
        return "".join(shown.format(name, data) for name, data in zip(self, pictures, strict=True))


class PageCharts(PlotAccessor):
    """Charts of a report. `plot()` draws all charts of the HTML page, `plot(NAME, ...)` the named charts; `plot(x=...,
    y=...)` and `plot.scatter(...)` are the plots of pandas."""

    def __call__(self, *names: str, width: str = "page", **of_pandas: object) -> object:
        """Draw charts; return {name: figure}.

        Raises:
            SpecbenchError: an unknown name.
        """
        if of_pandas:
            return super().__call__(*names, **of_pandas)
        charts = figure_names(page_charts(self._parent._rows))
        if unknown := [name for name in names if name not in charts]:
            raise unknown_name("figure", unknown[0], charts, most=99)
        return Figures({name: chart_figure(charts[name], width) for name in names or charts})


class Report(pd.DataFrame):
    """Result of `specbench.report`, displayed like a table of a paper. Selections from it are plain DataFrames."""

    _rows: Sequence[ReportRow] = ()

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def _repr_html_(self) -> str:
        tables = [
            (section.heading, page_table(section.first, section.runs, best=True), [*section.notes])
            for section in sections(self._rows)
        ]
        return template("cell.html.jinja").render(tables=tables)

    @property
    def plot(self) -> PageCharts:
        """The charts of the page."""
        return PageCharts(self)

    def images(self, prompts: str | Sequence[str] = (), width: str = "page") -> Figure:
        """Draw the runs' images of the same prompts: a row per prompt and a column per run.

        Args:
            prompts: beginnings of ids, or words of texts; the first prompts if empty.

        Raises:
            SpecbenchError: no such prompt, or an image that is missing or damaged.
        """
        words = [prompts] if isinstance(prompts, str) else prompts
        folders = {name: row.folder for name, row in unique_names(self._rows).items()}
        return grid_figure(find_grid(folders, ":".join(["pictures", ",".join(words)]).rstrip(":")), width)


def report_frame(folders: Sequence[Path], long: bool = False) -> pd.DataFrame:
    """Convert `report_arrow` of runs to a `Report`, or to a plain DataFrame if `long`."""
    rows = report_rows(folders)
    table = report_arrow(rows, long)
    frame = with_units(table.to_pandas(), table.schema)
    if long:
        return frame
    shown = Report(frame)
    shown._rows, shown.attrs = rows, frame.attrs
    return shown
