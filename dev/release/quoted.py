"""Compare numbers that the pages quote with the raw files they come from: `make numbers`.

A quoted number agrees if it equals the raw number rounded to as many digits. The exit code is 1 if a number does not
agree or its sentence is missing. Then the program prints the sentences that are marked as without a raw file, and the
count of numbers on each page that are not compared, except in generated tables, which come from raw files.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from specbench.reporting import report_rows
from specbench.reporting.row import ReportRow
from specbench.store.run_folders import find_runs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
LOSSY = "dev/notes/methods.md"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*[\w])")
RELAXED, AMPLIFIED = "vertical verifier=relax residual=optimal delta=1 relax-scale=2", "vertical verifier=amplify k=2"
UNMARKED = re.compile(r"[^.;|]*(?:no raw (?:file|data))[^.;|]*")


def _json(name: str):
    return json.loads((RESULTS / name).read_text())


def _more_tokens(decoder: str) -> float:
    """Excess of tokens per step over the tokens per step of `vertical`, in percent."""
    rows = {row["decoder"]: row["tokens"][0] for row in _json("frontier/lossy.json")["rows"]}
    return 100 * (rows[decoder] / rows["vertical"] - 1)


def _difference(decoder: str, metric: str) -> float:
    rows = {row["decoder"]: row for row in _json("frontier/lossy.json")["rows"]}
    return rows[decoder]["differences"][metric]["difference"]


def _siblings() -> float:
    nfe = _json("frontier/siblings.json")["nfe"]
    return sum(nfe["scd-mc"].values()) / sum(nfe["sjd-pac"].values())


def _false_alarms(what: str) -> float:
    rows = pd.read_json(RESULTS / "audit" / "false_alarms.jsonl", lines=True)
    p = rows[rows.asked == 27_000].p_value
    return {"audits": len(p), "below": int((p < 0.05).sum()), "smallest": float(p.min())}[what]


def _impossible(decoder: str, what: str) -> float:
    rows = pd.read_json(RESULTS / "reference" / "teacher-forced.jsonl", lines=True)
    counts = rows[rows.decoder == decoder].impossible
    return {"tokens": counts.sum(), "images": (counts > 0).sum(), "of": len(counts)}[what]


def _over_generate(guidance: float) -> float:
    """Ratio of compiled AR to `generate()` with its best cache, by medians of CPU time."""
    rows = pd.DataFrame(_json("speed/generate.json")["rows"])
    times = rows[rows.guidance == guidance].groupby("name").cpu_ms.median()
    return times["specbench ar, compiled"] / times[times.index.str.startswith("generate()")].min()


def _audited(decoder: str, key: str) -> float:
    return next(row[key] for row in _json("audit/best-lossless.json") if row["decoder"] == decoder)


def _first_page(archive: str) -> dict[str, ReportRow]:
    """Report rows of the README's runs by label: of compiled runs (`runs.zip`) or of eager runs."""
    return {row.label: row for row in report_rows(find_runs(RESULTS / "readme" / archive))}


def _window_costs() -> list[float]:
    """The cost of 16 columns in each run of the README that has a window of 16."""
    rows = _first_page("runs.zip").values()
    return sorted(row.over_ar.window_cost for row in rows if row.options.get("window") == 16)


def _column_costs() -> list[float]:
    """The cost of 16 columns in each of ten processes."""
    times = pd.DataFrame(_json("speed/columns.json")["rows"]).pivot(index="round", columns="window", values="wall_ms")
    return sorted(times[16] / times[1])


def _free_window() -> float:
    return _first_page("runs.zip")["vertical siblings=1"].over_ar.equal_forwards


def _eager_over_compiled() -> float:
    eager, compiled = (_first_page(name)["ar"].number("latency_ms").value for name in ("eager.zip", "runs.zip"))
    return eager / compiled


def _steps_on_h200(window: int) -> float:
    """Ratio of the time of a step of SJD to the time of a step of AR, at Lumina's size and length."""
    parts = {part["part"]: part["rows"] for part in _json("gpu/nvidia-h200/raw.json")["parts"]}
    spent = {
        row["name"]: sum(row["spans_ms"][name] for name in ("draft", "target", "verify", "host")) / row["nfe"]
        for row in parts["decisive"]
    }
    return spent[f"sjd, window {window}"] / spent["ar"]


COST, STEPS = "docs/speed.md", "dev/notes/drafts.md"
QUOTED: tuple[tuple[str, str, Callable[[], float]], ...] = (
    (LOSSY, r"what they gain, ([\d.]+) to", lambda: _more_tokens(RELAXED)),
    (LOSSY, r"what they gain, [\d.]+ to ([\d.]+) %", lambda: _more_tokens(AMPLIFIED)),
    (LOSSY, r"\| `vertical` \| yes .*? \| (\+[\d.]+) \[", lambda: _difference("vertical", "shapes-detector")),
    ("dev/notes/drafts.md", r"`scd-mc` takes ([\d.]+) times the steps", _siblings),
    ("results/frontier/README.md", r"`scd-mc` takes ([\d.]+) \[", _siblings),
    ("dev/notes/audit.md", r"False alarms.\*\* (\d+) audits", lambda: _false_alarms("audits")),
    ("dev/notes/audit.md", r"0.0001, (\d+) with p below", lambda: _false_alarms("below")),
    ("dev/notes/audit.md", r"smallest p ([\d.]+)", lambda: _false_alarms("smallest")),
    ("README.md", r"takes ([\d.]+) to [\d.]+ times as long as a forward of a", lambda: _window_costs()[0]),
    ("README.md", r"takes [\d.]+ to ([\d.]+) times as long as a forward of a", lambda: _window_costs()[-1]),
    ("README.md", r"`vertical siblings=1` would be ([\d.]+) times", _free_window),
    ("README.md", r"cost ratio was ([\d.]+) to", lambda: _column_costs()[0]),
    ("README.md", r"cost ratio was [\d.]+ to ([\d.]+) \(", lambda: _column_costs()[-1]),
    ("README.md", r"time eager AR, which takes ([\d.]+) times", _eager_over_compiled),
    ("README.md", r"then looks ([\d.]+) times",
     lambda: _first_page("eager.zip")["vertical siblings=1"].over_ar.speedup.value),
    ("README.md", r"step of SJD takes ([\d.]+) times\s+AR's", lambda: _steps_on_h200(16)),
    ("README.md", r"16 columns, and\s+([\d.]+) times with 96", lambda: _steps_on_h200(96)),
    ("docs/choose.md", r"an H200 takes\]\(.*?\) ([\d.]+)\s", lambda: _steps_on_h200(16)),
    (COST, r"faster than AR if it accepts more than ([\d.]+) tokens", lambda: _steps_on_h200(16)),
    (COST, r"16 columns take ([\d.]+) to [\d.]+ times", lambda: _window_costs()[0]),
    (COST, r"16 columns take [\d.]+ to ([\d.]+) times", lambda: _window_costs()[-1]),
    (COST, r"\(compiled; eager ([\d.]+) times",
     lambda: _first_page("eager.zip")["vertical siblings=1"].over_ar.window_cost),
    (COST, r"it takes ([\d.]+) times as long with guidance", lambda: _over_generate(1.5)),
    (COST, r"with guidance and ([\d.]+)\s+times without. \[On", lambda: _over_generate(1.0)),
    (STEPS, r"audit \([\d,]+ images\): lossless, p = ([\d.]+)", lambda: _audited("best-lossless", "p_value")),
    (STEPS, r"siblings\s+lossless, p = ([\d.]+)", lambda: _audited("best-lossless:siblings=1", "p_value")),
    (STEPS, r"would have seen a total variation of ([\d.]+\d)", lambda: _audited("best-lossless", "detectable_tv")),
    ("results/audit/README.md", r"cannot draw \((\d+) in \d+ of the images", lambda: _impossible("zipar", "tokens")),
    ("results/audit/README.md", r"cannot draw \(\d+ in (\d+) of the images", lambda: _impossible("zipar", "images")),
)  # fmt: skip
"""Page, pattern with the quoted number as its group, and the raw number."""


def agrees(quoted: str, raw: float) -> bool:
    digits = len(quoted.partition(".")[2])
    return abs(float(quoted) - raw) <= 0.5 * 10**-digits + 1e-9


def main() -> int:
    wrong, compared = 0, dict.fromkeys((page for page, _, _ in QUOTED), 0)
    for page, pattern, raw in QUOTED:
        match = re.search(pattern, (ROOT / page).read_text())
        right = match is not None and agrees(match[1], raw())
        wrong += not right
        compared[page] += 1
        print(f"{'ok' if right else 'WRONG'}  {page}: {match[1] if match else 'gone: ' + pattern}, raw {raw():.6g}")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "dev/notes").glob("*.md"))]
    print("\nWithout a raw file, as the pages say:")
    for page in pages:
        for sentence in UNMARKED.findall(page.read_text()):
            print(f"  {page.relative_to(ROOT)}: {' '.join(sentence.split())[:150]}")
    print("\nNumbers in prose that are not compared:")
    for page in pages:
        prose = re.sub(r"<!-- begin:([\w-]+).*?<!-- end:\1 -->|```.*?```", "", page.read_text(), flags=re.S)
        name = str(page.relative_to(ROOT))
        print(f"  {len(NUMBER.findall(prose)) - compared.get(name, 0):4d} {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
