"""Data model of a paper's table or figure: rows, columns, printed values, settings per cell. Imports no torch.

A cell is measured with the settings of its column, then of its row, then of the file's `[defaults]`, in order of
precedence. `specbench.papers.table_files` reads tables from `benchmarks/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import SpecbenchError, read_name
from specbench.runs.decoder_args import parse_decoders
from specbench.runs.settings import RunSettings
from specbench.specs.components import CHOICES
from specbench.specs.options import SettingOrigin, SettingSource
from specbench.specs.presets import PRESETS, decoder_name, named_ar, options_of
from specbench.store.run_info import read_info
from specbench.system.plugins import is_reference

if TYPE_CHECKING:
    from specbench.stats import Better

STEP_RATIOS = ("step_ratio", "step_compression", "acceptance_length")
"""Keys of step ratios, in order of preference: the first key that a row prints is used."""
MAPS = ("accepted", "top1", "draft_top1", "draft_tv")
"""Quantities per token that can be drawn as a map over the image; see `specbench.reporting.image_tiles`."""
SCORE, PRINTED = "score:", "printed:"
_CHOSEN = "Chosen: "


class PrintedNumber(float):
    """A number that keeps the paper's number of decimals."""

    decimals: int

    def __new__(cls, text: str) -> PrintedNumber:
        number = super().__new__(cls, text)
        number.decimals = len(text.partition(".")[2].partition("e")[0])
        return number


@dataclass(frozen=True)
class Column:
    """A column of a paper's table."""

    name: str  # key in the rows
    key: str  # a name in `stats.NUMBERS`, "score:METRIC", "score:METRIC/PART", or "printed:..." if never measured
    header: str
    score: str | None  # the displayed score, "metric" or "metric:part"; None for other columns
    precision: int  # printed decimals
    better: Better | None
    scale: float  # factor that converts the measured to the printed unit
    settings: RunSettings  # settings that the file states for the column
    seeds: tuple[int, ...] = ()  # stated seeds

    @property
    def metric(self) -> str | None:
        """Name of the metric of the column's score; None without a score."""
        if self.score is None:
            return None
        asked = self.key.removeprefix(SCORE).partition("/")[0]
        return asked if is_reference(asked) else self.score.partition(":")[0]

    @property
    def measurable(self) -> bool:
        return not self.key.startswith(PRINTED)


@dataclass(frozen=True)
class Row:
    """A row of a paper's table."""

    label: str
    group: str | None
    settings: RunSettings  # settings that the file states for the row, merged over the file's defaults
    paper: Mapping[str, float]  # {column: printed value}, without values that the paper omits
    spread: Mapping[str, float]  # {column: printed spread} (in brackets or after a plus-minus sign)
    notes: Mapping[str, str]  # {column: remark on the printed value}, and "row": remark on the whole row
    not_runnable_reason: str | None  # reason why specbench cannot run the row; None if it can
    hardware: str | None  # hardware of the printed values
    # choices for settings that the paper does not state: a line with value and reason per choice
    chosen: tuple[str, ...] = ()
    own: bool = False  # whether the user added the row
    run: Path | None = None  # the run folder of an added row; None if the settings define its run
    bold: tuple[str, ...] = ()  # columns whose printed value is bold, if the paper's source shows this
    seeds: tuple[int, ...] = ()  # stated seeds

    @property
    def model(self) -> str | None:
        return self.settings.model if "model" in self.settings.origins else None

    @property
    def decoder(self) -> str | None:
        return self.settings.decoder[0] if "decoder" in self.settings.origins else None


@dataclass(frozen=True)
class Table:
    """A table or data figure."""

    name: str
    paper: str | None  # a name in `benchmarks/papers.toml`; None for a table of the user
    source: str  # place in the paper, "Table 1" or "Figure 6"
    title: str
    hardware: str | None  # hardware of the printed values, if known
    notes: tuple[str, ...]
    # axes "x", "y" of each panel of a figure: a column's name, "option:NAME", "sampling:NAME" or "model"
    axes: tuple[Mapping[str, str], ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    maps: tuple[str, ...] = ()  # quantities that a figure shows as a map over the image; names in `MAPS`
    whole: bool = True  # whether all printed values are included; if not, the best value is unknown

    def runs_of(self, row: Row, column: Column) -> tuple[RunSettings, ...]:
        """Return the settings of a cell's runs, one per seed; empty if the cell cannot be run or is a stored run."""
        if row.not_runnable_reason is not None or row.run is not None or not column.measurable:
            return ()
        merged = merge_settings(row.settings, column.settings)
        origin = {"seed": SettingOrigin(SettingSource.FILE, f"{self.name}.toml")}
        return tuple(merged.changed({"seed": seed}, origin) for seed in column.seeds or row.seeds) or (merged,)

    def runs_of_row(self, row: Row) -> list[RunSettings]:
        """Return the distinct settings of a row's runs, in order."""
        return list(dict.fromkeys(settings for column in self.columns for settings in self.runs_of(row, column)))

    def all_settings(self) -> list[RunSettings]:
        """Return the distinct settings of all runs, in order."""
        return list(dict.fromkeys(settings for row in self.rows for settings in self.runs_of_row(row)))

    def shared_choices(self) -> tuple[str, ...]:
        """Return the choices that all runnable rows share."""
        rows = [row.chosen for row in self.rows if row.not_runnable_reason is None and not row.own]
        return tuple(text for text in rows[0] if all(text in chosen for chosen in rows)) if rows else ()

    def metrics(self) -> list[str]:
        """Return the metrics of the columns."""
        return list(dict.fromkeys(column.metric for column in self.columns if column.metric))


def with_own_rows(table: Table, decoders: Sequence[str]) -> Table:
    """Add a row for each of the given decoders at the end of each group of the table.

    An added row copies prompts, sampling and applicable options from the row of SJD in the group, or else from the
    group's first decoder with drafts, which lacks some options of SJD: these are copied from the table's first row of
    SJD. Inline options take precedence.
    """
    drafting = [row for row in table.rows if row.not_runnable_reason is None and takes(row.decoder, {})]
    likes: dict[str | None, Row] = {}
    for row in sorted(drafting, key=lambda row: row.decoder != "sjd"):
        likes.setdefault(row.group, row)
    if decoders and not likes:
        raise SpecbenchError(f"--decoder: no decoder in {table.name} has drafts", "decode with specbench run instead")
    usual = next((row.settings.options for row in table.rows if row.decoder == "sjd"), {})
    rows = list(table.rows)
    for reference, inline in parse_decoders(decoders):
        name = decoder_name(reference)
        name = read_name("decoder", name, PRESETS)
        label = ":".join([name, ",".join(f"{key}={value}" for key, value in inline.items())]).rstrip(":")
        for group, like in likes.items():
            accepted = takes(name, inline) - set(CHOICES)
            options = {**usual, **like.settings.options}
            options = {key: value for key, value in options.items() if key in accepted} | inline
            settings = replace(like.settings, decoder=(reference,), options=options)
            last = max(place for place, row in enumerate(rows) if row.group == group)
            rows.insert(last + 1, Row(label, group, settings, {}, {}, {}, None, None, own=True, seeds=like.seeds))
    return replace(table, rows=tuple(rows))


def with_runs(table: Table, runs: Sequence[Path]) -> Table:
    """Add a row for each run folder, to the group with the same prompts, or else in a separate group."""
    rows = list(table.rows)
    for folder in runs:
        spec = read_info(folder).spec
        settings = RunSettings(
            model=spec.model, decoder=(spec.decoder.name,), options=spec.decoder.options, prompts=spec.prompts,
            sampling=vars(spec.sampling),
            origins=dict.fromkeys(("model", "decoder"), SettingOrigin(SettingSource.FILE, str(folder))),
        )  # fmt: skip
        one_group = len({row.group for row in table.rows}) == 1
        alike = [place for place, row in enumerate(rows) if one_group or row.settings.prompts == spec.prompts]
        group, last = (rows[alike[-1]].group, alike[-1]) if alike else ("runs", len(rows) - 1)
        rows.insert(last + 1, Row(folder.name, group, settings, {}, {}, {}, None, None, own=True, run=folder))
    return replace(table, rows=tuple(rows))


def choice(setting: str, value: object, reason: str) -> str:
    """Make a line of `Row.chosen`."""
    return f"{_CHOSEN}{setting.replace('_', '-')} = {value}: {reason}."


def chosen_setting(line: str) -> str:
    """Return the flag of the setting that a line of `Row.chosen` is about."""
    return line.removeprefix(_CHOSEN).partition(" = ")[0]


def merge_settings(defaults: RunSettings, stated: RunSettings) -> RunSettings:
    """Merge stated settings over the defaults; default options apply only to decoders that accept them."""
    merged = defaults.changed(stated.by_name, stated.origins)
    accepted = takes(merged.decoder[0], merged.options) | stated.options.keys()
    return replace(merged, options={name: value for name, value in merged.options.items() if name in accepted})


def takes(decoder: str | None, overrides: Mapping[str, object]) -> set[str]:
    """Return the options and kinds of components that a decoder accepts, given its components; empty for AR."""
    preset = PRESETS.get(decoder_name(decoder)) if decoder else None
    if preset is None or named_ar(preset.name):
        return set()
    choices = {kind: str(overrides.get(kind, value)) for kind, value in preset.choices.items()}
    return {*options_of(preset, choices), *CHOICES}
