"""Content of a report, independent of its format: runs grouped by setting, their tables and notes."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from specbench.errors import unknown_name
from specbench.models.facts import EIGHT_BITS, EIGHT_BITS_GAIN
from specbench.reporting import columns as col
from specbench.reporting.answer import answer
from specbench.reporting.columns import MISSING, SPEED, THROUGHPUT, ReportColumn
from specbench.reporting.compare import MARKED, marks, real_differences
from specbench.reporting.row import Compared, ReportRow, typed_heading
from specbench.specs.run_spec import OFF_IF_NONE, SAMPLING
from specbench.stats import RULE, Number
from specbench.store.run_folders import same_but_for_threads
from specbench.system.foreign_code import edited_text
from specbench.system.text_tables import TextCell, TextTable, plain_table

READING = (
    "speed-up = tokens per step / (window cost x overhead), "
    "with the tokens per step relative to AR over the same images."
)
BOLD_RULE = (
    f"Bold: the best value of its column, if its difference from AR is real. {RULE} Columns that are not tested have "
    "no bold values."
)


@dataclass(frozen=True)
class ReportTable:
    """Table of the runs of a section. If it has a `title`, its columns have no definitions. `topic`: name of the folded
    table on a page, if there is no title."""

    columns: Sequence[ReportColumn]
    title: str = ""
    remark: str = ""
    topic: str = ""

    def texts(self, runs: Sequence[ReportRow], best: bool = False) -> TextTable:
        """Format the table for these runs. `best`: whether the best values are bold, see `BOLD_RULE`."""
        real = [real_differences(row.folder, row.over_ar) if best else () for row in runs]
        columns = []
        for column in self.columns:
            top = column.best(runs)
            bold = [column.tested in names and column.value(row) == top for row, names in zip(runs, real, strict=True)]
            columns.append(map(TextCell, map(column.cell, runs), bold))
        rows = zip(*columns, strict=True)
        notes = [self.remark] if self.remark else []
        return plain_table([column.title for column in self.columns], rows, self.title, notes)


@dataclass(frozen=True)
class Section:
    """Report rows of one model and setting, with the first table, further tables, and the answer in sentences. `notes`:
    the most important notes, for the first table; `circumstances`: all notes; `machines`: hardware in words."""

    heading: str
    runs: Sequence[ReportRow]
    first: ReportTable
    tables: Sequence[ReportTable]
    answer: Sequence[str] = ()
    notes: Sequence[str] = ()
    machines: str = ""

    def shown(self, everything: bool) -> Sequence[ReportTable]:
        """Return the first table, or all tables if `everything`."""
        return (self.first, *self.tables) if everything else (self.first,)


def sections(rows: Sequence[ReportRow]) -> list[Section]:
    """Group the rows of `report_rows` by model and setting."""
    groups = groupby(rows, key=lambda row: (row.model, row.setting))
    grouped = [_section(list(group)) for _, group in groups]
    return [replace(section, heading=_told_apart(section, grouped)) for section in grouped]


def _told_apart(section: Section, others: Sequence[Section]) -> str:
    """Make the heading of a section. If headings are equal except for the selected prompts, add differing settings."""
    plain = _heading(section.runs, drawn=False)
    alike = [other.runs[0].setting.content() for other in others if _heading(other.runs, drawn=False) == plain]
    setting_here, edited = section.runs[0].setting.content(), section.runs[0].model_edited or ""
    apart = [name for name in setting_here if any(setting.get(name) != setting_here[name] for setting in alike)]
    titles = {"prompts_sha256": "prompt file", "weights_sha256": "weights", "model_code": f"model {edited}, code"}
    return ", ".join([section.heading, *(f"{titles.get(name, name)} {str(setting_here[name])[:8]}" for name in apart)])


_MOST_NOTES = 3


def _notes(runs: Sequence[ReportRow], remark: str) -> list[str]:
    """List the notes needed to understand the first table, at most `_MOST_NOTES` lines."""
    over = [row.over_ar.pairs or 0 for row in runs if row.over_ar.speedup is not None and row.over_ar.speedup_note]
    images = " to ".join(map(str, dict.fromkeys((min(over), max(over))))) if over else ""
    shared = "one image" if images == "1" else f"{images} images"
    common = [f"The speed-up is over the {shared} in common with AR."] if over else []
    few = [col.FEW_PROMPTS] if lacks_interval(runs, parts=False) else []
    unbounded = any(row.roofline.roofline_note for row in runs)
    wrong = ["Decoding was faster than the device's peak; see specbench report --all"] if unbounded else []
    lines = [*legend(runs), *common, *few, *captions_cut(runs), *([remark] if remark else []), *wrong]
    left = len(lines) - _MOST_NOTES
    return lines if left <= 0 else [*lines[: _MOST_NOTES - 1], f"{left + 1} more notes: specbench report --all"]


def with_columns(grouped: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """Reduce each section to one table: the decoder, then the named columns in the given order. `names`: headings, in
    any case, with or without arrow and "[95 %]", or short names (`_short_names`)."""
    by_heading = list(map(_by_heading, grouped))
    short = [_short_names(columns) | columns for columns in by_heading]
    headings = [name for name in map(typed_heading, names) if name != col.DECODER.heading]
    for name in headings:
        if not any(name in columns for columns in short):
            raise unknown_name("column", name, dict.fromkeys(name for columns in by_heading for name in columns))
    shown = []
    for section, columns in zip(grouped, short, strict=True):
        over = (heading for heading, column in columns.items() if column.against)
        wanted = (col.DECODER.heading.lower(), *headings, *over)
        kept = list(dict.fromkeys(columns[name] for name in wanted if name in columns))
        notes = _notes(section.runs, _remarks(section.runs, {column.tested for column in kept}))
        shown.append(replace(section, first=ReportTable(kept), tables=(), notes=notes))
    return shown


def _by_heading(section: Section) -> dict[str, ReportColumn]:
    """Return {name: column} of all tables. Of columns with the same name, use the first, which is the shortest. Of the
    decoder columns, use the last, whose labels have no window, unless two runs then have the same label."""
    columns = [column for table in section.shown(True) for column in table.columns]
    labels = [column for column in columns if column.heading == col.DECODER.heading]
    alike = len(set(map(labels[-1].cell, section.runs))) < len(section.runs)
    order = [*columns[::-1], labels[0 if alike else -1]]
    return {column.heading.lower().removesuffix(" [95 %]"): column for column in order}


def _short_names(columns: Mapping[str, ReportColumn]) -> dict[str, ReportColumn]:
    """Return {further name: column}: the key of the number ("nfe", "speedup"), or a metric without its variant."""
    keys = {column.source.name: column for column in columns.values() if isinstance(column.source, Number)}
    also = {column.also: column for column in columns.values() if column.also}
    plain = {heading.partition("[")[0]: column for heading, column in columns.items() if "[" in heading}
    return plain | keys | also


def definitions(shown: Sequence[Section], everything: bool = True) -> list[str]:
    """List the definitions of the columns in the first tables, or in all tables, each once."""
    columns = {
        column.heading: column
        for section in shown
        for table in section.shown(everything)
        if not table.title
        for column in table.columns
        if any(column.cell(row) != MISSING for row in section.runs)
    }
    return [*(text for column in columns.values() if (text := column.definition())), *([READING] * everything)]


def circumstances(rows: Sequence[ReportRow], load: bool = True) -> list[str]:
    """Describe omitted data, machines, versions, roofline inputs and, with `load`, load averages of the rows."""
    machines = dict.fromkeys(line for row in rows for line in row.machine.environment)
    floors = dict.fromkeys(
        f"Roofline of {floor['device']}: {floor['bytes_per_s'] / 1e9:,.1f} GB/s, {floor['flops'] / 1e12:,.3g} TFLOP/s "
        f"({floor['source']})."
        for row in rows
        if (floor := row.roofline.floor)
    )
    same = ("model", "decoder", "label", "options")
    parts_of_one = same_but_for_threads(
        {row.run_id: {**row.setting.content(), **{name: getattr(row, name) for name in same}} for row in rows}
    )
    wrong = dict.fromkeys(f"Roofline: {row.roofline.roofline_note}." for row in rows if row.roofline.roofline_note)
    few = [col.FEW_PROMPTS] if lacks_interval(rows) else []
    light = any(f"+{EIGHT_BITS}" in row.model for row in rows)
    return (
        legend(rows)
        + few
        + captions_cut(rows)
        + [f"Measured on {line}." for line in machines]
        + list(dict.fromkeys(f"Steps: {row.steps}." for row in rows if tells_steps(row)))
        + list(floors)
        + list(wrong)
        + ([f"--dtype {EIGHT_BITS} {EIGHT_BITS_GAIN}; its roofline counts one byte per weight."] if light else [])
        + [*(f"{text}." for text in parts_of_one), *(_load(rows) if load else ())]
    )


def legend(rows: Sequence[ReportRow]) -> list[str]:
    """Explain the marks of differences from a baseline that the reader chose; empty without a baseline."""
    return [MARKED] if any(row.against for row in rows) else []


def captions_cut(rows: Sequence[ReportRow]) -> list[str]:
    """Report captions that were too long for the model: a sentence per model, for the run with most such captions."""
    cut = sorted((row for row in rows if row.captions_cut), key=lambda row: row.captions_cut or 0)
    return [
        f"{model} truncated the captions of {row.captions_cut:,} of {row.n:,} images."
        for model, row in {row.model: row for row in cut}.items()
    ]


def tells_steps(row: ReportRow) -> bool:
    """Return whether to print how steps ran (`row.steps`): not for eager steps on a CPU, which are usual."""
    return not row.imported and (row.steps != "eager" or row.setting.device != "cpu")


def lacks_interval(rows: Sequence[ReportRow], parts: bool = True) -> bool:
    """Return whether an interval was omitted because there are too few prompts. `parts`: also of parts of metrics."""
    speed = any(row.over_ar.speedup is not None and row.over_ar.speedup.low is None for row in rows)
    return speed or any(score.too_few for row in rows for score in row.scores if parts or score.whole)


def _section(runs: list[ReportRow]) -> Section:
    speed = THROUGHPUT if runs[0].setting.batch > 1 else SPEED
    traced = col.TRACED if any(row.number("draft_tv") for row in runs) else ()
    audited = col.AUDIT if any(row.audit for row in runs) else ()
    quality = (*col.QUALITY, *audited, *traced, *col.score_columns(runs))
    remarks = _remarks(runs)
    parts = col.part_columns(runs).items()
    drafting = any("head" in row.options or row.by_key.get("theorem2_bound") for row in runs)
    tables = [
        ReportTable(speed, topic="Speed, every column"),
        ReportTable(quality, remark=remarks, topic="Quality, every column"),
        *([ReportTable(col.DRAFTS, topic="Drafting")] if drafting else ()),
        ReportTable(col.TAILS, topic="Tails: median, 95th percentile, slowest category"),
        *([ReportTable(col.STAGES, topic="Second stage")] if any(row.number("stage2_nfe") for row in runs) else ()),
        *(ReportTable((col.DECODER, col.WINDOW, *columns), f"{metric} by part") for metric, columns in parts),
    ]
    first = ReportTable(col.first_columns(runs))
    if any(row.against for row in runs):
        first, *tables = (replace(table, columns=_against(table.columns, runs)) for table in (first, *tables))
    notes = _notes(runs, remarks)
    machines = dict.fromkeys(line.partition(", python ")[0] for row in runs for line in row.machine.environment)
    return Section(_heading(runs), runs, first, tables, answer(runs), notes, " and ".join(machines))


def _remarks(runs: Sequence[ReportRow], metrics: Set[str] | None = None) -> str:
    """Join the notes on scores as sentences: on all scores, or only on the given metrics and parts."""
    scores = [score for row in runs for score in row.scores if metrics is None or score.metric in metrics]
    versions = {name: col.score_versions(name, runs) for name in dict.fromkeys(score.metric for score in scores)}
    edits = [score.edited if versions[score.metric][score.fingerprint] else None for score in scores]
    noted = dict.fromkeys(
        (note, score.metric, score.fingerprint)
        for score, edited in zip(scores, edits, strict=True)
        for note in (edited and edited_text(edited), score.note)
        if note
    )
    shown = [(note, name + versions[name][made]) for note, name, made in noted]
    named = {note: ", ".join(name for other, name in shown if other == note) for note, _ in shown}
    return " ".join(f"{names}: {note}." for note, names in named.items())


def _against(columns: Sequence[ReportColumn], runs: Sequence[ReportRow]) -> list[ReportColumn]:
    """Mark scores that differ from the chosen baseline's, and add a column with the speed-up over this baseline."""
    base = next(row.against.baseline for row in runs if row.against)

    def numbers(row: ReportRow) -> Mapping[str, Compared]:
        return row.against.numbers if row.against else {}

    def marked(column: ReportColumn) -> ReportColumn:
        def cell(row: ReportRow) -> str:
            found = marks(numbers(row))
            return column.cell(row) + found.get(column.heading, found.get(column.tested, ""))

        return replace(column, cell=cell)

    def over(row: ReportRow) -> str:
        speed = numbers(row).get("speedup")
        if not speed or speed.value is None:
            return MISSING
        return col.with_interval(speed.estimate, unit="x", too_few=True) + marks(numbers(row)).get("speedup", "")

    with_marks: list[ReportColumn] = []
    for column in columns:
        with_marks.append(column if column.tested in ("", "speedup") else marked(column))
        if column.tested == "speedup":
            meaning = f"Over: speed-up over {base}, the baseline's latency divided by the run's latency."
            with_marks.append(ReportColumn(f"over {base} [95 %]", over, meaning, "higher", against=True))
    return with_marks


def _heading(runs: Sequence[ReportRow], drawn: bool = True) -> str:
    row = runs[0]
    setting, sampling = row.setting, row.setting.sampling
    drafting = [run for run in runs if not run.is_ar]  # an AR baseline may have fewer prompts
    which = "; ".join(dict.fromkeys(text for run in drafting or runs for text in run.drawn or ()))
    ours = not all(run.imported for run in runs)
    parts = [f"prompts {setting.prompts}" + (f" ({which})" if which and drawn else "")]
    parts += [f"seed {setting.seed}"] if ours else []
    parts += [f"guidance {sampling.guidance:g}", f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}" if sampling.top_k else "no top-k"]
    threads = setting.threads
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [row.processors] if row.processors else []
    parts += [f"{SAMPLING[name].name} {value:g}" for name in OFF_IF_NONE if (value := getattr(sampling, name))]
    parts += [setting.dtype, *([setting.device] if ours else [])]
    parts += [f"{threads} thread{'s' * (threads != 1)}"] if threads else []
    parts += dict.fromkeys(row.steps.partition(" ")[0] for row in runs if tells_steps(row))
    # For imported images without a latency, the batch size is unknown.
    told = ours or setting.batch > 1 or any(run.by_key.get("latency_ms") for run in runs)
    parts += [f"batch {setting.batch}"] if told else []
    source = f" from {row.source}" if row.source else ""
    return f"{row.model}{source}: {', '.join(parts)}"


def _load(rows: Sequence[ReportRow]) -> list[str]:
    """Format the range of load averages, because other processes make latencies noisy."""
    if not (loads := [load for row in rows for load in row.machine.load if isinstance(load, int | float)]):
        return []
    span = f"{min(loads):.1f}" if min(loads) == max(loads) else f"{min(loads):.1f} to {max(loads):.1f}"
    return [f"Load average when the runs started: {span}."]
