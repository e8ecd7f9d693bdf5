"""Join a paper's table with runs: printed values next to measured values, with notes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from specbench import prompts, stats
from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.models.facts import EIGHT_BITS, ModelChoice
from specbench.papers.cells import (
    NOT_SCORED,
    OVER_BASELINE,
    SEEDS,
    Cell,
    Measured,
    column_fingerprint,
    make_cell,
    runs_as_one,
    same_hardware,
    seeds_of,
)
from specbench.papers.table import Column, Row, Table
from specbench.papers.table_files import papers
from specbench.prompts import public
from specbench.reporting.columns import FAILED_AUDIT, failed_audit
from specbench.reporting.comparability import Run, with_ar_runs
from specbench.reporting.compare import MARKED, against, marks
from specbench.reporting.row import Claim, ReportRow
from specbench.reporting.sections import captions_cut
from specbench.runs.settings import RunSettings
from specbench.store.run_info import RunInfo
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY, RowStatus

Prompts = frozenset[tuple[str, str]]  # (id, text) of each prompt
NOT_RUN = "not run"
_CLAIMS = {
    Claim.LOSSLESS: "Declared lossless: images measured here should follow the joint distribution of AR sampling.",
    Claim.LOSSY: "Declared lossy: images measured here need not follow the distribution of AR sampling.",
    Claim.FOREIGN: "Measured here on tokens of another program.",
}
_FAILED = f"{FAILED_AUDIT}: its images are not exact samples of the model."
_OVER_BASELINE = f"the ratio of latencies over the images in common with that row. {MARKED}"


@dataclass(frozen=True)
class Line:
    """A row of the joined table."""

    label: str
    group: str | None
    cells: Mapping[str, Cell]  # {column name: cell}
    runs: tuple[str, ...]  # ids of its runs
    images: int | None  # number of images; if there are several runs, of the smallest run
    notes: tuple[str, ...]  # remarks on the whole row
    # chosen, own: see `specbench.papers.table.Row`
    chosen: tuple[str, ...] = ()
    expected: int | None = None  # number of images that the table requires, if different
    folders: tuple[Path, ...] = ()  # folders of these runs
    own: bool = False


@dataclass(frozen=True)
class PaperTable:
    """A joined table, ready to be written in any format."""

    table: Table
    heading: str  # title and place in the paper
    lines: tuple[Line, ...]
    remarks: tuple[str, ...]  # remarks on the whole table
    definitions: tuple[str, ...]  # meaning of each column, a line each
    problem: SpecbenchError | None = None  # error of a run; the table is shown nevertheless

    @property
    def footnotes(self) -> list[str]:
        """Remarks on rows and cells, numbered from 1 in order of appearance."""
        notes: dict[str, None] = {}
        for line in self.lines:
            notes |= dict.fromkeys(line.notes)
            for cell in line.cells.values():
                notes |= dict.fromkeys((*cell.printed_notes, *cell.notes))
        return list(notes)


def join(table: Table, measured_in: Mapping[RunSettings, Path | str]) -> PaperTable:
    """Join a table with measured values. `measured_in`: {settings of a cell: run folder, or why the run is missing}."""
    every = [folder for folder in (*measured_in.values(), *(row.run for row in table.rows)) if isinstance(folder, Path)]
    read, joined = with_ar_runs(every), cache(lambda folders: runs_as_one([read[folder] for folder in folders]))

    @cache
    def asked_prompts(name: str, limit: int | None) -> Prompts | None:
        """Return ids and texts of the prompts that a cell requires; None if the prompt set is not on this disk."""
        try:
            return frozenset((prompt.id, prompt.text) for prompt in prompts.select(prompts.load_prompts(name), limit))
        except SpecbenchError:
            return None

    def measure(row: Row, column: Column) -> Measured | None:
        if row.run is not None:
            return Measured(*joined((row.run,)), (), None) if column.measurable else None
        settings = table.runs_of(row, column)
        folders = dict.fromkeys(folder for cell in settings if isinstance(folder := measured_in.get(cell), Path))
        return _measured(row, settings, joined(tuple(folders)), asked_prompts) if folders else None

    rows = [{column.name: measure(row, column) for column in table.columns} for row in table.rows]
    used = [measured for row in rows for measured in row.values() if measured is not None]
    fingerprints = {
        column.name: column_fingerprint(column, [measured for row in rows if (measured := row[column.name])])
        for column in table.columns
    }
    lines = [_line(table, row, cells, measured_in, fingerprints) for row, cells in zip(table.rows, rows, strict=True)]
    printed_on = [f"The paper's values were measured on {table.hardware}."] if table.hardware else []
    remarks = (*printed_on, *_remarks(used, lines), *table.notes, *table.shared_choices())
    return PaperTable(table, _heading(table), tuple(lines), remarks, tuple(map(definition, table.columns)))


def _measured(
    row: Row,
    settings: Sequence[RunSettings],
    joined: tuple[Run, ReportRow, Run | None],
    asked_prompts: Callable[[str, int | None], Prompts | None],
) -> Measured:
    run, report, ar = joined
    asked, expected = settings[0], _expected(settings[0])
    unlike, machine = _unlike(asked, run.info), same_hardware(row.hardware, run)
    measured = Measured(run, report, ar, unlike, machine, expected and expected * len(settings))
    if measured.unlike or asked.prompts is None:
        return measured
    return replace(measured, unlike=_other_prompts(asked_prompts(asked.prompts, asked.limit), measured, asked))


def _other_prompts(asked: Prompts | None, measured: Measured, settings: RunSettings) -> tuple[str, ...]:
    """Describe how the decoded prompts differ from the required prompts; fewer prompts are no difference."""
    if asked is None:
        return ()
    rows = pd.concat(RunStore(run.folder).samples(["status", "prompt"]) for run in seeds_of(measured.run))
    decoded = set(rows[rows["status"] == RowStatus.OK][["prompt_id", "prompt"]].itertuples(index=False, name=None))
    if decoded == asked or (decoded < asked and measured.partial):
        return ()
    first = f"the first {len(asked):,}" if settings.limit else f"all {len(asked):,}"
    return (f"prompts other than {first} of {settings.prompts}",)


def _expected(settings: RunSettings) -> int | None:
    """Return the number of images that a cell requires; None if the size of its prompt set is unknown."""
    if settings.prompts is None:
        return None
    try:
        if settings.prompts in prompts.public_names():
            public_set, category = public.find(settings.prompts)
            size = None if category else public_set.prompts
        else:
            size = len(prompts.load_prompts(settings.prompts).prompts)
    except SpecbenchError:
        return None
    count = min(settings.limit or size, size) if size else settings.limit
    return count and count * settings.samples


def _unlike(settings: RunSettings, info: RunInfo) -> tuple[str, ...]:
    """List settings of a run that differ from the table's, each as "model shapes instead of lumina"."""
    spec = info.spec
    forms, light = (settings.guidance_rows, settings.prompt_form), settings.dtype == EIGHT_BITS
    choice = ModelChoice(guidance_rows=forms[0], prompt_form=forms[1], eight_bits=light)
    asked: dict[str, Any] = {"model": choice.name(settings.model)}
    asked |= {"prompts": settings.prompts, "dtype": None if light else settings.dtype}
    asked |= {name.replace("_", "-"): value for name, value in sorted(settings.sampling.items())}
    there = {**vars(spec), **{name.replace("_", "-"): value for name, value in vars(spec.sampling).items()}}
    differing = [
        f"{name} {there[name]} instead of {value}"
        for name, value in asked.items()
        if value is not None and there[name] != value
    ]
    weights = [f"weights of {info.source_text} instead of the official weights"] if info.source_text else []
    return tuple(differing + weights)


def _line(
    table: Table,
    row: Row,
    measured: Mapping[str, Measured | None],
    places: Mapping[RunSettings, Path | str],
    fingerprints: Mapping[str, str | None],
) -> Line:
    cells: dict[str, Cell] = {}
    missing: dict[str | Path, None] = {}
    for column in table.columns:
        reasons = (
            [row.run] if row.run else [places.get(part, NOT_RUN) for part in table.runs_of(row, column)] or [NOT_RUN]
        )
        why = row.not_runnable_reason or (None if any(isinstance(part, Path) for part in reasons) else reasons[0])
        if why and column.measurable:
            missing[why] = None
        short = NOT_RUN if why else None
        cells[column.name] = make_cell(row, column, measured[column.name], short, fingerprints[column.name])
    there = [part for part in measured.values() if part is not None]
    runs = [run for part in there for run in seeds_of(part.run)]
    exact = (_FAILED if failed_audit(part.row) else _CLAIMS[part.row.claim] for part in there)
    notes = [*dict.fromkeys(exact)]
    notes += [f"Not run: {why}." for why in missing if why != NOT_RUN]
    notes += [row.notes["row"]] if "row" in row.notes else []
    notes += _mixed(there)
    shared = table.shared_choices()
    notes += [text for text in row.chosen if text not in shared]
    return Line(
        row.label, row.group, cells,
        tuple(dict.fromkeys(run.info.run_id for run in runs)),
        min((part.row.n for part in there), default=None), tuple(notes), row.chosen,
        next((part.expected for part in there if part.partial and not part.unlike), None),
        tuple(dict.fromkeys(run.folder for run in runs)),
        row.own,
    )  # fmt: skip


def _mixed(there: Sequence[Measured]) -> list[str]:
    """Return a note if the runs of a row's cells decoded different images."""
    sets = {frozenset(measured.run.rows[list(KEY)].itertuples(index=False, name=None)) for measured in there}
    if len(sets) < 2:
        return []
    few, many = min(map(len, sets)), max(map(len, sets))
    which = f"{few:,} to {many:,} images" if few < many else f"{few:,} images each, but different images"
    return [f"The cells of this row come from several runs over different images: {which}."]


def _heading(table: Table) -> str:
    if table.paper is None:
        return table.title
    paper = papers()[table.paper]
    parts = [str(paper["title"]), " ".join(str(paper[key]) for key in ("venue", "year") if key in paper)]
    return f"{table.title} ({', '.join(part for part in parts if part)}, {table.source})"


def _remarks(used: Sequence[Measured], lines: Sequence[Line]) -> list[str]:
    environments = dict.fromkeys(text for measured in used for text in measured.row.machine.environment)
    remarks = [f"Measured here on {text}." for text in environments]
    drawn = dict.fromkeys(text for measured in used for text in measured.row.drawn or ())
    remarks += [f"Prompts decoded here: {text}." for text in drawn]
    if images := sorted({measured.row.n for measured in used}):
        fewest_most = " to ".join(map(str, dict.fromkeys(images[:1] + images[-1:])))
        remarks.append(f"Images per row measured here: {fewest_most}.")
    unlike = dict.fromkeys(text for measured in used for text in measured.unlike)
    if unlike and any(cell.paper is not None for line in lines for cell in line.cells.values()):
        remarks.append(f"Some rows were run with {', '.join(unlike)}; their difference from the paper is not printed.")
    if any(cell.why == NOT_SCORED for line in lines for cell in line.cells.values()):
        remarks.append("To add missing scores, if the metric is installed: specbench score --metric NAME.")
    remarks += [SEEDS] if any(len(seeds_of(measured.run)) > 1 for measured in used) else []
    remarks += captions_cut([measured.row for measured in used])
    if any(measured.row.failed for measured in used):
        remarks.append("Failed images are omitted; `specbench show` lists them.")
    return remarks


def with_baseline(joined: PaperTable, name: str) -> PaperTable:
    """Use a row of each group as the group's baseline: add a column of speed-ups over the baseline, and mark scores and
    speed-ups that differ from the baseline's. `name`: the baseline's label or decoder, or the start of its run id."""
    if SEEDS in joined.remarks:
        raise several_seeds(joined.table, name)
    bases: dict[str | None, Line] = {}
    for row, line in zip(joined.table.rows, joined.lines, strict=True):
        named = name.lower() in (line.label.lower(), str(row.decoder).lower())
        if len(line.folders) == 1 and (named or line.runs[0].startswith(name)):
            bases.setdefault(line.group, line)
    for line in joined.lines if bases else ():  # an added run may be in a separate group
        if line.own and line.group not in bases:
            bases[line.group] = next(iter(bases.values()))
    others = {place: line for place, line in enumerate(joined.lines) if line.group in bases and len(line.folders) == 1}
    others = {place: line for place, line in others.items() if line is not bases[line.group]}
    if not others:
        raise SpecbenchError(f"--baseline {name}: no measured row of {joined.table.name} has that name or decoder")
    compared = {place: against(bases[line.group].folders[0], line.folders[0]) for place, line in others.items()}
    label = next(iter(bases.values())).label
    column = Column(OVER_BASELINE, OVER_BASELINE, f"speed-up over {label}", None, 2, "higher", 1.0, RunSettings())
    lines = []
    for place, line in enumerate(joined.lines):
        numbers = compared.get(place, {})
        marked = marks(numbers)
        speed = numbers.get("speedup")
        cell = Cell(why="-" if line in bases.values() else None)
        if speed and speed.estimate and speed.value is not None:
            cell = Cell(None, None, **vars(speed.estimate), n=speed.n, too_few=speed.estimate.low is None)
        cells = dict(line.cells) | {OVER_BASELINE: replace(cell, mark=marked.get("speedup", ""))}
        for shown_column in joined.table.columns:
            if shown_column.score in marked and cells[shown_column.name].value is not None:
                cells[shown_column.name] = replace(cells[shown_column.name], mark=marked[shown_column.score])
        lines.append(replace(line, cells=cells))
    return replace(
        joined,
        table=replace(joined.table, columns=(*joined.table.columns, column)),
        lines=tuple(lines),
        definitions=(*joined.definitions, definition(column)),
    )


def several_seeds(table: Table, name: str) -> SpecbenchError:
    """Build the error for a baseline of a table with rows of several seeds."""
    what = f"--baseline {name}: {table.name} has rows of several seeds"
    return SpecbenchError(what, f"choose a single seed: specbench bench {table.name} --seed N")


def definition(column: Column) -> str:
    """Return the definition of a column, preceded by its heading unless it begins with the heading."""
    text = _meaning(column) + ("" if column.scale == 1 else f" Shown times {column.scale:g}.")
    return text if text.lower().startswith(f"{column.header.lower()}:") else f"{column.header}: {text}"


def plain_name(column: Column) -> str:
    """Return the name that reports of runs use for a column's number: "nfe", "speed-up", "clip"."""
    if column.score or not column.measurable:
        return column.name.removeprefix("score:")
    return _meaning(column).partition(":")[0].lower()


def _meaning(column: Column) -> str:
    if not column.measurable:
        return "as printed; specbench does not measure it."
    if column.score and column.metric:
        try:
            summary = metric_catalog.metric_summary(column.metric)
        except SpecbenchError:  # the metric's plug-in is not installed
            summary = "a score"
        part = f", the part {column.score.partition(':')[2]}" if ":" in column.score else ""
        return f"{column.metric}: {summary}{part}."
    return _OVER_BASELINE if column.key == OVER_BASELINE else stats.NUMBERS[column.key].definition
