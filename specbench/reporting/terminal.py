"""Terminal output of `specbench report` and `specbench show`; facts of runs and images ("cards") as plain values."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench import stats
from specbench.decoding.generation import SPANS
from specbench.errors import SpecbenchError
from specbench.metrics.catalog import unjudged
from specbench.metrics.score_store import read_scores
from specbench.reporting import columns as col
from specbench.reporting.answer import disturbances
from specbench.reporting.columns import MISSING, QUALITY, SPEED, THROUGHPUT, number, score_columns
from specbench.reporting.image_tiles import tiles
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import ReportRow, record
from specbench.reporting.sections import ReportTable, circumstances, definitions, sections, with_columns
from specbench.specs.components import COMPONENT_KINDS
from specbench.specs.options import SettingSource
from specbench.specs.presets import PRESETS
from specbench.specs.run_spec import SAMPLING
from specbench.store.run_info import decoder_json, describe_point
from specbench.store.run_store import RunStore
from specbench.store.schema import SAMPLES, RowStatus, read_facts
from specbench.system.console import one_line
from specbench.system.text_tables import distinct_columns, panel_count, terminal_table

_IN_THE_TITLE = (col.DECODER, col.WINDOW, col.IMAGES, col.LOSSLESS)  # Columns shown in a card's title
_MORE = "specbench report --all: every number; --explain: definitions of the columns"


def report_view(
    rows: Sequence[ReportRow],
    width: int,
    explain: bool = False,
    everything: bool = False,
    printed: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Group:
    """Lay out the rows of `report_rows` in `width` characters. `explain`: add definitions; `everything`: all tables and
    notes; `printed`: lines to add with the values that papers print for the same cells; `columns`: if given, only these
    columns."""
    parts: list[RenderableType] = []
    grouped = with_columns(sections(rows), columns) if columns else sections(rows)
    for section in grouped:
        heading = "; ".join(filter(None, (section.heading, section.machines)))
        parts += [*([Text()] if parts else []), Text(one_line(heading), style="bold")]
        parts += [*(Text(one_line(sentence)) for sentence in section.answer), Text()] if section.answer else []
        for table in section.shown(everything):
            parts += [_table(table, section.runs, width, whole=bool(columns))]
            parts += [Text()] if everything else []
        parts += [] if everything else [Text(one_line(note), style="dim") for note in section.notes]
    below = [*(definitions(grouped, everything) if explain else ()), *(circumstances(rows) if everything else ())]
    texts = [*(Text(one_line(text)) for text in printed), *(Text(one_line(text), style="dim") for text in below)]
    return Group(*parts, *texts, *([] if below else [Text(_MORE, style="dim")]))


def first_table(runs: Sequence[ReportRow], width: int) -> Group:
    """Lay out the first table of a report: one line per run, and a line below with the values that all runs share."""
    return _table(ReportTable(col.first_columns(runs)), runs, width)


def narrow_table(runs: Sequence[ReportRow], width: int) -> Group:
    """Lay out the kept and brief columns of `first_table`, with a few scores."""
    every, shown = col.first_columns(runs), list[str]()

    def table() -> ReportTable:
        return ReportTable([column for column in every if column.kept or column.brief or column.heading in shown])

    for column in score_columns(runs):
        shown.append(column.heading)
        if panel_count(table().texts(runs), width) > 1:
            shown.pop()
    return _table(table(), runs, width)


def _table(table: ReportTable, runs: Sequence[ReportRow], width: int, whole: bool = False) -> Group:
    kept = [column.title for column in table.columns if whole or column.kept]
    words = [column.title for column in table.columns if column.words]
    return terminal_table(distinct_columns(table.texts(runs), kept), width, words)


def run_view(folder: Path) -> RenderableType:
    """Lay out the card of a run."""
    (row,) = report_rows([folder])
    card = _card(folder, row)
    decoder = card["decoder"]
    audited = col.AUDIT if row.audit else ()
    columns = (*(THROUGHPUT if row.setting.batch > 1 else SPEED), *QUALITY, *audited, *score_columns([row]))
    numbers = [(column.heading, column.cell(row)) for column in columns if column not in _IN_THE_TITLE]
    for metric, parts in col.part_columns([row]).items():
        numbers += [(f"{metric} {part.heading}", part.cell(row)) for part in parts]
    numbers += [("remark", sentence) for sentence in disturbances([row])]
    numbers += [("roofline", row.roofline.roofline_note)] if row.roofline.roofline_note else []
    exactness = "lossless" if decoder["lossless"] else "another program" if row.imported else "not lossless"
    exactness = f"declared lossless, {col.FAILED_AUDIT}" if col.failed_audit(row) else exactness
    components = [(decoder["name"], exactness), *((kind, decoder[kind]) for kind in COMPONENT_KINDS)]
    components += [("follows", card["method"])] if card["method"] else []
    options = [(name, _with_origin(value, card["origins"].get(name))) for name, value in decoder["options"].items()]
    failed = f", {card['failed']} failed" if card["failed"] else ""
    return Group(
        _title(card["run_id"], f"{card['images']} image{'s' * (card['images'] != 1)}{failed}"),
        _block("decoder", components),
        _block("options", options),
        _block("setting", _setting(card, row)),
        _block("numbers", numbers),
        _block("decoder statistics, mean over images", _numbers(card["facts"])),
        _block("windows tried", [(point["window"], describe_point(point)) for point in card["window_curve"] or ()]),
        _block("failures", [(f"{times} times", error) for error, times in card["errors"].items()]),
        _block("invocations", [(call["started_at"], call["environment"]) for call in card["invocations"]]),
    )


def _setting(card: Mapping[str, Any], row: ReportRow) -> Iterator[tuple[str, str]]:
    origins = card["origins"]
    yield "model", card["model"]
    yield from ((name, card[name]) for name in ("source", "processors") if card[name])
    yield "steps", row.steps
    for name, value in card["setting"].items():
        items = value.items() if isinstance(value, Mapping) else [(name, value)]
        for key, item in items:
            yield key, _with_origin(item, origins.get(SAMPLING[key].name if key in SAMPLING else key.replace("_", "-")))
        if name == "prompts":
            yield from (("prompts drawn", text) for text in row.drawn or ())


def _with_origin(value: object, origin: str | None) -> str:
    return str(value) if origin in (None, SettingSource.DEFAULT) else f"{value}  ({origin})"


def image_view(card: Mapping[str, Any]) -> RenderableType:
    """Lay out the card of an image."""
    spans = [(f"{span} ms", number(value)) for span, value in card["spans_ms"].items()]
    in_title = ("sample", "seed")
    shown = {name: value for name, value in card.items() if isinstance(value, int | float) and name not in in_title}
    rates = [value for value in card.get("acceptance_by_offset") or () if value is not None]
    by_offset = [("acceptance by offset", " ".join(number(value) for value in rates))] if rates else []
    return Group(
        _title(card["prompt"], f"{card['run_id']}, {card['prompt_id']}, sample {card['sample']}, seed {card['seed']}"),
        _block("failed", [("error", card["error"])] if card["error"] else []),
        _block("numbers", [*_numbers(shown), *by_offset]),
        _block("time", spans),
        _block("decoder statistics", _numbers(card["facts"])),
        _block("scores", [*_numbers(card["scores"]), *(("remark", text) for text in card["unjudged"])]),
        Text(card["image"] or "no image file"),
    )


def _title(text: str, under: str) -> RenderableType:
    return Group(Text(one_line(text), style="bold"), Text(one_line(under), style="dim"))


def _block(title: str, lines: Iterable[tuple[object, object]]) -> RenderableType:
    """Lay out names and values below a title; empty if there are no lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(Text(one_line(str(name))), Text(one_line(str(value))))
    if not table.rows:
        return Group()
    return Padding(Group(Text(title, style="bold dim"), table), (1, 0, 0, 0))


def _numbers(values: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [(name, MISSING if value is None else f"{value:,.4g}") for name, value in values.items()]


_MOST_NAMED = 5  # Maximum number of prompt ids in an error


def card(folder: Path) -> dict[str, Any]:
    """Collect the facts of one run as nested plain values.

    Keys: `run_id, folder, model, source` (the checkpoint if it is not the official one), `processors` (logits
    processors in `generation_config.json`), `decoder` (components and options), `method` (the paper or released
    program that its preset follows), `setting, origins` (source of each setting), `window_curve` (of `--window auto`),
    `invocations` (each with `started_at, finished_at, environment`), `images, failed` (counts), `errors` (count by
    message), `facts` (means of the decoder's per-image statistics) and `numbers` (the report row).
    """
    (row,) = report_rows([Path(folder)])
    return _card(folder, row) | {"numbers": record(row)}


def _card(folder: Path, row: ReportRow) -> dict[str, Any]:
    store = RunStore(folder)
    info = store.info()
    preset = PRESETS.get(info.spec.decoder.name)
    rows = store.samples(["status", "error", "facts"])
    decoded = rows[rows["status"] == RowStatus.OK]
    facts = read_facts(pa.array(decoded["facts"], pa.string())).to_pandas().mean()
    return {
        "run_id": info.run_id,
        "folder": str(folder),
        "model": info.spec.model,
        "source": info.source_text,
        "processors": info.processors_text,
        "decoder": decoder_json(info.spec.decoder),
        "method": f"{preset.paper}: {preset.equation}" if preset and preset.paper != "-" else None,
        "setting": row.setting.content(),
        "origins": info.origins or {},
        "window_curve": info.window_curve,
        "invocations": [
            {"started_at": call.started_at, "finished_at": call.finished_at, "environment": call.environment}
            for call in info.invocations
        ],
        "images": len(decoded),
        "failed": len(rows) - len(decoded),
        "errors": {str(error): int(times) for error, times in rows["error"].value_counts().items()},
        "facts": {name: None if pd.isna(mean) else float(mean) for name, mean in facts.items()},
    }


def image_card(folder: Path, prompt: str, sample: int = 0) -> dict[str, Any]:
    """Collect the facts of one image as nested plain values.

    Keys: `run_id, prompt_id, sample, prompt, category, seed, status, error, started_at, image` (a path), the numbers of
    `specbench.stats` for this image alone (`nfe, step_compression, latency_ms, latency_e2e_ms, acceptance,
    acceptance_by_offset, logp_mean, logp_std, perplexity, nll_gap, top1`), `spans_ms`, `facts` (additional statistics
    of the decoder), `scores` by metric, `unjudged` (what no score judges), `committed_step` and `accepted_draft`
    (rows of the token grid; None if the grid is unknown).

    Args:
        prompt: prompt id, unique prefix of an id, or part of the prompt text.
    """
    row = _find(folder, prompt, sample)
    rows = stats.condense(row)
    (stored,) = row.to_pylist()
    tile = tiles(folder, [stored["prompt_id"]], sample)[stored["prompt_id"]]
    columns = ("prompt_id", "sample", "prompt", "category", "seed", "status", "error", "started_at")
    decoded = stored["status"] == RowStatus.OK
    return {
        "run_id": folder.name,
        **{name: stored[name] for name in columns},
        "image": str(folder / stored["image"]) if stored["image"] else None,
        **(_image_numbers(rows) if decoded else {}),
        "spans_ms": {span: stored[f"{span}_ms"] for span in SPANS if stored[f"{span}_ms"] is not None},
        "facts": json.loads(stored["facts"] or "{}"),
        "scores": dict(tile.scores),
        "unjudged": unjudged(score for score in read_scores(folder) if score["metric"] in tile.scores),
        "committed_step": None if tile.steps is None else tile.steps.tolist(),
        "accepted_draft": None if tile.origins is None else tile.origins.astype(bool).tolist(),
    }


def _find(folder: Path, prompt: str, sample: int) -> pa.Table:
    """Read the stored row of the image (one row)."""
    store = RunStore(folder)
    names = store.samples(["prompt"])
    highest = names["sample"].max()
    names = names[names["sample"] == sample]
    if names.empty and highest == highest:  # false for NaN: no images
        raise SpecbenchError(f"--sample {sample}: this run has no such sample", f"its samples are 0 to {highest}")
    prompt = prompt.encode("utf-8", "replace").decode()  # invalid UTF-8 becomes "?", which matches no prompt
    ids, texts, folded = names["prompt_id"], names["prompt"], prompt.casefold()
    for matches in (ids == prompt, ids.str.startswith(prompt), texts.str.casefold().str.contains(folded, regex=False)):
        if matches.any():
            break
    else:
        some = ", ".join(map(one_line, ids.head(_MOST_NAMED)))
        raise SpecbenchError(
            f"no prompt of this run matches '{prompt}'", f"give an id or words of the prompt; ids: {some}"
        )
    if len(chosen := ids[matches].to_list()) > 1:
        shown = ", ".join(map(one_line, chosen[:_MOST_NAMED]))
        raise SpecbenchError(f"prompt '{prompt}' is ambiguous", f"{len(chosen)} prompts match, for example {shown}")
    here = (pc.field("prompt_id") == chosen[0]) & (pc.field("sample") == sample)
    for piece in store.batches(SAMPLES.names):
        if (row := piece.filter(here)).num_rows:
            return row
    raise SpecbenchError(f"{folder} was changed while it was read", "try again")


def _image_numbers(rows: pd.DataFrame) -> dict[str, object]:
    of_image = ("nfe", "step_compression", "latency_ms", "latency_e2e_ms", "acceptance", "acceptance_by_offset", "top1")
    shared = ("logp_mean", "logp_std", "perplexity", "nll_gap")
    names = {*of_image, *(shared if stats.tokens_measured(rows) else ())}
    return {name: stats.NUMBERS[name](rows) if name in names else None for name in (*of_image, *shared)}
