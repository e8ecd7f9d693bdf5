"""python collect.py RUNS TO: results of all scored runs in a folder, compared with AR.

With --add, TO keeps its AR and the decoders that RUNS lacks; RUNS must have AR's images with the same keys.

`headline.md` is the table of differences to AR, `against-ar.json` the same for programs, `scores.parquet` has a row per
run and score, `images.parquet` a row per image with its tokens, from which the model's tokenizer draws it again.
The verdicts of `specbench audit --run`, in TO/audit.json, are a column of the table.
`make pictures` draws the pictures in the same folder.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
from teacher_forced import read_rows, rewrite

from specbench import api
from specbench.metrics.score_store import feature_parts, read_scores
from specbench.metrics.shapes import ShapesClip, ShapesDetector
from specbench.reporting.columns import with_interval
from specbench.reporting.marks import label
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import record
from specbench.stats import ratio_of_totals
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY

SCORES = ("run_id", "decoder", "metric", "value", "low", "high", "n", "note", "images")
METRICS = {"shapes-detector": "detector", "shapes-clip": "CLIP", "shapes-frechet": "Frechet"}
GREEDY = "ar, top-k 1"


def images(store: RunStore) -> pd.DataFrame:
    """Read one row per image: key, category, steps, tokens and per-image scores."""
    rows = store.samples(["category", "nfe", "tokens"])
    for metric in (ShapesDetector(), ShapesClip()):
        column = "value" if "value" in metric.columns else "correct"
        values = feature_parts(store.folder, metric).read([column]).to_pandas().rename(columns={column: metric.name})
        rows = rows.merge(values[[*KEY, metric.name]], on=list(KEY), how="left")
    return rows


def difference(row: dict, metric: str) -> str:
    """Format `value [low, high]`; bold if the interval excludes 0."""
    entry = next((other for other in row["differences"] if other["metric"] == metric), None)
    if entry is None:
        return "-"
    low, high, digits = entry["low"], entry["high"], 1 if metric == "shapes-frechet" else 3
    text = f"{entry['difference']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def gap(row: dict) -> str:
    """NLL - H gap with its standard error."""
    value, error = row["nll_gap"], row["nll_gap_se"]
    if not error:
        return "-"
    text = f"{value:+.3f} ± {error:.3f}"
    return f"**{text}**" if abs(value) > 1.96 * error else text


def headline(rows: list[dict]) -> str:
    """Build the table: one row per run, exact decoders first, then by decreasing number of steps."""
    counted = ["window", "images", "tokens per step"]
    heads = ["decoder", "lossless", "audit", *counted, *METRICS.values(), "NLL - H, nats"]
    lines = [heads, ["---"] * len(heads)]
    for row in sorted(rows, key=lambda row: (row["name"] == GREEDY, not row["lossless"], row["tokens_per_step"])):
        lossless = "-" if row["name"] == GREEDY else "yes" if row["lossless"] else "no"
        window = str(row["options"].get("window", "-"))
        counts = [row["name"], lossless, row["audit"], window, f"{row['n']}", f"{row['step_compression']:.2f}"]
        lines.append([*counts, *(difference(row, metric) for metric in METRICS), gap(row)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def joined(old: str, new: str) -> str:
    """Merge the rows of two headline tables into one order; a row of `new` replaces the row of the same name."""
    head, new = old.splitlines(keepends=True)[:2], [line.removesuffix("\n") for line in new.splitlines()[2:]]
    new = [line + " = |\n" * ("own context" in head[0]) for line in new]  # as in `rewrite`
    names = {line.split(" | ")[0] for line in new}
    kept = [line for line in old.splitlines(keepends=True)[2:] if line.split(" | ")[0] not in names]

    def place(line: str) -> tuple[bool, bool, float]:
        cells = line.strip("| \n").split(" | ")
        return cells[0] == GREEDY, cells[1] != "yes", float(cells[5].partition(" ")[0])

    return "".join([*head, *sorted(kept + new, key=place)])


def with_intervals(table: str, pictures: pd.DataFrame) -> str:
    """Add 95 % intervals over prompts to the tokens per step of the headline table."""
    lines = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    at = lines[0].index("tokens per step")
    for line in lines[2:]:
        of_decoder = pictures[pictures["decoder"] == line[0]]
        ratio = ratio_of_totals(of_decoder["tokens"].map(len), of_decoder["nfe"], of_decoder["prompt_id"])
        steps_differ = ratio.low < ratio.high
        line[at] = with_interval(ratio if steps_differ else replace(ratio, low=None, high=None))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--add", action="store_true")
    options = parser.parse_args()
    runs, to = options.runs, options.to
    stores = {folder.name: RunStore(folder) for folder in sorted(runs.glob("shapes-*"))}
    specs = {name: store.info().spec for name, store in stores.items()}
    names = {name: label(spec.decoder) for name, spec in specs.items()}
    names |= {name: GREEDY for name, spec in specs.items() if spec.sampling.top_k == 1}
    baseline = next(name for name in names if names[name] == "ar")
    differences = api.differences(baseline, metrics=list(METRICS), out=runs).to_dict("records")
    rows, audits = [record(row) for row in report_rows(find_runs(runs))], json.loads((to / "audit.json").read_text())
    verdicts = {audit["run_id"]: audit["verdict"] for audit in audits}
    for row in rows:
        row["audit"] = verdicts.get(row["run_id"], "-")
        row["name"] = names[row["run_id"]]
        row["differences"] = [entry for entry in differences if entry["run_id"] == row["run_id"]]
    if options.add:
        stores.pop(baseline)
    taken = [names[name] for name in stores]
    table, forced = headline([row for row in rows if row["name"] in taken]), to / "teacher-forced.jsonl"
    scores = pd.DataFrame(
        {"run_id": n, "decoder": names[n], **r} for n, s in stores.items() for r in read_scores(s.folder)
    )
    parts = [images(store).assign(decoder=names[name]) for name, store in stores.items()]
    if options.add:
        gone = {entry["run_id"] for entry in differences}
        differences = [
            row for row in json.loads((to / "against-ar.json").read_text()) if row["run_id"] not in gone
        ] + differences
        table = joined((to / "headline.md").read_text(), table)
        kept = [pd.read_parquet(to / f"{name}.parquet") for name in ("scores", "images")]
        scores_kept, pictures_kept = (frame[~frame["decoder"].isin(taken)] for frame in kept)
        scores, parts = pd.concat([scores_kept, scores]), [pictures_kept, *parts]
    (to / "against-ar.json").write_text(json.dumps(differences, indent=1) + "\n")
    pictures = pd.concat(parts)
    table = with_intervals(table, pictures)
    (to / "headline.md").write_text(rewrite(table, read_rows(forced)) if forced.exists() else table)
    scores[list(SCORES)].to_parquet(to / "scores.parquet", index=False)
    pictures.to_parquet(to / "images.parquet", index=False, compression="zstd")


if __name__ == "__main__":
    main()
