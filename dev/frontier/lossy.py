"""Score runs of lossy decoders and compare them: most tokens per step with images as good as AR's.

    specbench run ... --out RUNS             2,226 images of each decoder; the command is in results/frontier/README.md
    python dev/frontier/lossy.py RUNS        score new images, print and write the table
    python dev/frontier/lossy.py RUNS RUN RUN ... --out /tmp/trial      some of the runs
    python dev/frontier/lossy.py results/frontier/lossy.json            the table again, from the stored values

RUNS is the folder of the runs, outside the repository; their scores are kept there, so only new images are scored.
All runs have the same weights, sampling and prompts; each is compared with AR on the images that both have. Target
forwards and scores of every image go to lossy.json, and the table to lossy.md.

Equivalence is declared before anything is decoded: a decoder's mean score is equivalent to AR's on the same prompts and
seeds if two one-sided t tests over prompts reject a difference of MARGINS or more at the level 0.05. Both scores must
pass, so no correction for two scores is needed; p-values are corrected over decoders by Holm. dev/notes/methods.md
explains the margins. Seconds come from `specbench forecast` for Lumina-mGPT 7B, at this many tokens per step.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from scipy.special import stdtr, stdtrit

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from search import DEVICES, modelled_seconds, shown  # noqa: E402 - found through the line above

from specbench import api  # noqa: E402 - after the path
from specbench.errors import SpecbenchError  # noqa: E402 - likewise
from specbench.metrics.score_store import feature_parts  # noqa: E402
from specbench.metrics.shapes import ShapesClip, ShapesDetector  # noqa: E402
from specbench.models.catalog import find_model  # noqa: E402
from specbench.reporting.marks import label  # noqa: E402
from specbench.runs.memory_estimate import most_columns  # noqa: E402
from specbench.specs.presets import DecoderSpec, resolve  # noqa: E402
from specbench.stats.intervals import (  # noqa: E402
    Estimate,
    clustered_mean,
    holm,
    ratio_of_totals,
)
from specbench.store.run_folders import find_runs  # noqa: E402
from specbench.store.run_store import RunStore  # noqa: E402
from specbench.store.schema import KEY  # noqa: E402

MARGINS = {"shapes-detector": 0.03, "shapes-clip": 0.01}
"""By metric, a mean score that differs from AR's by less than this is equivalent."""
LEVEL = 0.05
OVER_CATEGORIES = ("shapes-detector",)
"""Metrics whose score is the mean of the categories' means, as `specbench score` prints it."""
BASELINE = "ar"
SHARED = ("model", "weights_sha256", "sampling", "prompts_sha256", "seed")
"""Settings in which all runs must agree."""
OUT = Path("results/frontier")


class Decoded(NamedTuple):
    """One run.

    Attributes:
        decoder, spec: name and components.
        settings: those in SHARED.
        images: one row per image: prompt, sample, target forwards, score by metric.
    """

    run_id: str
    decoder: str
    spec: DecoderSpec
    settings: Mapping[str, str]
    images: pd.DataFrame


def weights(prompts: pd.Series, metric: str) -> pd.Series:
    """Weight of each image in the metric's score, 1 on average; a prompt's id begins with its category."""
    if metric not in OVER_CATEGORIES:
        return pd.Series(1.0, prompts.index)
    category = prompts.map(str).str.rpartition("-")[0]
    return len(prompts) / (category.nunique() * category.map(category.value_counts()))


def read_stored(file: Path) -> list[Decoded]:
    """Read the runs stored in lossy.json."""
    stored = json.loads(file.read_text())
    settings = {name: stored[name] for name in SHARED}
    runs = []
    for entry in stored["decoders"]:
        name, *options = entry["decoder"].split()
        columns = {column: stored[column] for column in KEY} | {column: entry[column] for column in ("nfe", *MARGINS)}
        spec = resolve(name, dict(option.split("=") for option in options))
        runs.append(Decoded(entry["run_id"], entry["decoder"], spec, settings, pd.DataFrame(columns).dropna()))
    return runs


def read_run(folder: Path) -> Decoded:
    """Read a scored run."""
    store = RunStore(folder)
    info, rows = store.info(), store.samples(["status", "nfe"])
    rows = rows[rows["status"] == "ok"][[*KEY, "nfe"]]
    for metric in (ShapesDetector(), ShapesClip()):
        column = "value" if "value" in metric.columns else "correct"
        values = feature_parts(folder, metric).read([column]).to_pandas().rename(columns={column: metric.name})
        rows = rows.merge(values[[*KEY, metric.name]].astype({metric.name: float}), on=list(KEY))
    settings = {name: str(getattr(info.spec, name)) for name in SHARED}
    return Decoded(info.run_id, label(info.spec.decoder), info.spec.decoder, settings, rows)


def check_runs(runs: Sequence[Decoded]) -> Decoded:
    """Return the run of AR after a check that the other runs can be compared with it.

    Raises:
        SpecbenchError: no run of AR, several runs of a decoder, or settings that differ from AR's.
    """
    names = [run.decoder for run in runs]
    for name in (BASELINE, *names):
        if names.count(name) != 1:
            raise SpecbenchError(f"{names.count(name)} runs of '{name}', expected one", "name the runs to compare")
    baseline = next(run for run in runs if run.decoder == BASELINE)
    for run in runs:
        if differing := [name for name in SHARED if run.settings[name] != baseline.settings[name]]:
            raise SpecbenchError(
                f"{run.run_id} and {baseline.run_id} differ in {', '.join(differing)}", "name the runs to compare"
            )
    return baseline


def equivalence(gaps: Sequence[float], prompts: Sequence[str], margin: float) -> dict[str, float | None]:
    """Mean difference over prompts with its 90 % interval, and the p-value of two one-sided tests with `margin`."""
    mean, error, n = clustered_mean(gaps, prompts)
    if not error:  # one prompt, or differences that are all equal
        return {"difference": mean, "low": None, "high": None, "p": None}
    half = float(stdtrit(n - 1, 1 - LEVEL)) * error
    p = float(stdtr(n - 1, -(margin - abs(mean)) / error))
    return {"difference": mean, "low": mean - half, "high": mean + half, "p": p}


def compare(runs: Sequence[Decoded]) -> list[dict[str, object]]:
    """Per decoder: tokens per step, seconds, and differences to AR with the verdict. Fewest steps come first."""
    baseline = check_runs(runs)
    facts = find_model(baseline.settings["model"])
    rows = []
    for run in runs:
        pairs = run.images.merge(baseline.images, on=list(KEY), suffixes=("", "_ar"))
        tokens = ratio_of_totals([facts.stream] * len(pairs), pairs.nfe, pairs.prompt_id)
        at = [tokens.value, *(rate for rate in (tokens.high, tokens.low) if rate)]
        modelled = [modelled_seconds(rate, run.spec) for rate in at]
        row = {
            "decoder": run.decoder,
            "lossless": run.spec.lossless,
            "columns": most_columns(run.spec, facts),
            "images": len(pairs),
            "prompts": int(pairs.prompt_id.nunique()),
            "tokens": (tokens.value, tokens.low, tokens.high),
            "seconds": {name: [row[name] for row in modelled] for name in DEVICES},
            "scores": {metric: float((pairs[metric] * weights(pairs.prompt_id, metric)).mean()) for metric in MARGINS},
        }
        if run is not baseline:
            row["differences"] = {
                metric: equivalence(
                    (pairs[metric] - pairs[f"{metric}_ar"]) * weights(pairs.prompt_id, metric), pairs.prompt_id, margin
                )
                for metric, margin in MARGINS.items()
            }
        rows.append(row)
    judge(rows)
    return sorted(rows, key=lambda row: -row["tokens"][0])


def judge(rows: Sequence[dict[str, object]]) -> None:
    """Add `front` to each row; add `p`, corrected by Holm, and `equivalent` to each row except AR's."""
    others = [row for row in rows if "differences" in row]
    p_values = [[gap["p"] for gap in row["differences"].values()] for row in others]
    worst = [None if None in both else max(both) for both in p_values]
    for row, p in zip(others, holm(worst), strict=True):
        row |= {"p": p, "equivalent": p is not None and p < LEVEL}
    for row in rows:
        row["front"] = not any(better(other, row) for other in rows)


def better(row: Mapping, other: Mapping) -> bool:
    """Whether a decoder takes fewer modelled seconds on all devices, with scores at least as good."""
    faster = all(row["seconds"][device][0] < other["seconds"][device][0] for device in DEVICES)
    return faster and all(_difference(row, metric) >= _difference(other, metric) for metric in MARGINS)


def _difference(row: Mapping, metric: str) -> float:
    return row["differences"][metric]["difference"] if "differences" in row else 0.0


def table(rows: Sequence[Mapping]) -> str:
    """Markdown of `compare`."""
    devices = [f"{name}, s" for name in DEVICES]
    scores = [f"{metric.removeprefix('shapes-')} - AR's (margin {margin}) [90 %]" for metric, margin in MARGINS.items()]
    heads = ["decoder", "lossless", "columns", "images", "tokens per step [95 %]", *devices, *scores]
    lines = [[*heads, "p", "equivalent to AR", "front"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        times = [f"{v[0]:.1f} [{min(v):.1f}, {max(v):.1f}]" for v in row["seconds"].values()]
        line = [f"`{row['decoder']}`", "yes" if row["lossless"] else "no", str(row["columns"]), str(row["images"])]
        line += [shown(Estimate(*row["tokens"])), *times]
        if "differences" in row:
            line += [signed(gap) for gap in row["differences"].values()]
            line += ["-" if row["p"] is None else f"{row['p']:.2g}", "yes" if row["equivalent"] else "not shown"]
        else:
            line += ["-"] * (len(MARGINS) + 2)
        lines.append([*line, "yes" if row["front"] else ""])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def signed(gap: Mapping[str, float | None]) -> str:
    """Difference and its interval as text."""
    if gap["low"] is None:
        return f"{gap['difference']:+.3f}"
    return f"{gap['difference']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"


def raw(runs: Sequence[Decoded], rows: Sequence[Mapping]) -> dict[str, object]:
    """Content of lossy.json; values of an image that a run lacks are null."""
    keys = pd.concat([run.images[list(KEY)] for run in runs]).drop_duplicates().sort_values(list(KEY))
    decoders = []
    for run in runs:
        kept = keys.merge(run.images, on=list(KEY), how="left").round({"shapes-clip": 4})
        values = {
            name: kept[name].astype(object).where(kept[name].notna(), None).tolist() for name in ("nfe", *MARGINS)
        }
        decoders.append({"decoder": run.decoder, "run_id": run.run_id, **values})
    settings = {"margins": MARGINS, "level": LEVEL, **runs[0].settings}
    return settings | {"rows": list(rows), **keys.to_dict("list"), "decoders": decoders}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs, or a lossy.json")
    parser.add_argument("names", nargs="*", help="run ids or folders; default: all runs of the folder")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--threads", type=int, default=1, help="of the CLIP network")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(options.threads)
    try:
        if options.runs.is_file():
            runs = read_stored(options.runs)
        else:
            folders = find_runs(options.runs, options.names)
            api.score([str(folder) for folder in folders], list(MARGINS), out=options.runs)
            runs = [read_run(folder) for folder in folders]
        rows = compare(runs)
    except SpecbenchError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "lossy.json").write_text(json.dumps(raw(runs, rows)) + "\n")
    (options.out / "lossy.md").write_text(table(rows))
    print(table(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
