"""What a paper's table or data figure is: rows, columns, printed values, and what each cell is measured with. No torch.

A cell is measured with the file's `[defaults]`, its row's settings and its column's, the later ones winning.
`specbench.papers.table_files` reads them from `benchmarks/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbench.specs.components import CHOICES
from specbench.specs.presets import PRESETS, options_of

NUMBERS = (
    *("nfe", "step_compression", "latency_ms", "latency_e2e_ms", "step_ms", "throughput"),
    *("acceptance", "acceptance_length", "speedup", "speedup_e2e", "step_ratio", "window_cost", "overhead"),
    *("logp_mean", "logp_std", "perplexity", "nll_gap", "top1", "draft_tv", "draft_top1"),
)
"""Keys of a report row (`specbench.reporting.report_rows`) that a column may show."""
SCORE, PRINTED = "score:", "printed:"
BETTER = ("higher", "lower", "none")


@dataclass(frozen=True)
class Case:
    """What one cell is measured with. None leaves a value to the model or to specbench.

    Attributes:
        options: of the decoder, its choices included.
        sampling: fields of `specbench.specs.run_spec.Sampling`.
    """

    model: str
    decoder: str
    options: tuple[tuple[str, object], ...] = ()
    prompts: str | None = None
    limit: int | None = None
    samples: int | None = None
    seed: int | None = None
    batch: int | None = None
    dtype: str | None = None
    sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of a paper's table.

    Attributes:
        name: what rows call it.
        key: one of `NUMBERS`, "score:METRIC", "score:METRIC/PART", or "printed:..." for what is never measured.
        score: the stored score it shows, "metric" or "metric:part"; None for other columns.
        precision: printed decimals.
        better: one of `BETTER`.
        scale: the measured number times this has the printed one's unit.
        case: settings of its cells.
    """

    name: str
    key: str
    header: str
    score: str | None
    precision: int
    better: str
    scale: float
    case: Mapping[str, object]

    @property
    def metric(self) -> str | None:
        """The metric that makes its score."""
        return self.score and self.score.partition(":")[0]

    @property
    def measurable(self) -> bool:
        return not self.key.startswith(PRINTED)


@dataclass(frozen=True)
class Row:
    """A row of a paper's table.

    Attributes:
        case: settings of its cells, the file's defaults included.
        paper: printed values by column name; what the paper does not give is absent.
        spread: what is printed beside them in brackets or after a plus-minus sign, likewise.
        notes: remarks on printed values by column name, and on the whole row under "row".
        why: why specbench cannot run it; None where it can.
        hardware: what its values were measured on.
    """

    label: str
    group: str | None
    case: Mapping[str, object]
    paper: Mapping[str, float]
    spread: Mapping[str, float]
    notes: Mapping[str, str]
    why: str | None
    hardware: str | None


@dataclass(frozen=True)
class Table:
    """A table or data figure.

    Attributes:
        paper: a name in `benchmarks/papers.toml`.
        source: where in the paper it stands, "Table 1" or "Figure 6".
        hardware: what its values were measured on, where known.
        axes: of a figure, by "x", "y": a column's name, "option:NAME", "sampling:NAME" or "model".
    """

    name: str
    paper: str
    source: str
    title: str
    hardware: str | None
    notes: tuple[str, ...]
    axes: Mapping[str, str]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def case(self, row: Row, column: Column) -> Case | None:
        """What a cell is measured with; None where specbench cannot."""
        return _case(row.case, column.case) if row.why is None and column.measurable else None

    def cases(self) -> list[Case]:
        """The distinct cases of its cells, in order."""
        unlike: list[Column] = []
        for column in self.columns:
            if column.measurable and all(column.case != other.case for other in unlike):
                unlike.append(column)
        found = [self.case(row, column) for row in self.rows for column in unlike]
        return list(dict.fromkeys(case for case in found if case is not None))

    def metrics(self) -> list[str]:
        """Metrics behind its columns."""
        return list(dict.fromkeys(column.metric for column in self.columns if column.metric))


def merge_case(defaults: Mapping, own: Mapping) -> dict[str, object]:
    """The defaults with settings that win; default options count where the decoder takes them."""
    merged = {**defaults, **own}
    takes = _takes(str(merged.get("decoder")), own.get("options", {}))
    options = {name: value for name, value in defaults.get("options", {}).items() if name in takes}
    merged["options"] = options | own.get("options", {})
    merged["sampling"] = {**defaults.get("sampling", {}), **own.get("sampling", {})}
    return merged


def _case(row: Mapping, column: Mapping) -> Case:
    merged = merge_case(row, column)
    return Case(**merged | {name: tuple(sorted(merged[name].items())) for name in ("options", "sampling")})


def _takes(decoder: str, given: Mapping[str, object]) -> set[str]:
    """Options and choices a decoder understands, with the choices among those given; none for AR, which drafts
    nothing."""
    preset = PRESETS.get(decoder)
    if preset is None or preset.choices["drafter"] == "none":
        return set()
    choices = {kind: given.get(kind, value) for kind, value in preset.choices.items()}
    return {*options_of(preset, choices), *CHOICES}
