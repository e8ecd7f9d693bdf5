"""Rewrite the generated blocks of the README from the code and from the results behind it.

A block stands between `<!-- begin:NAME -->` and `<!-- end:NAME -->`. `make docs` runs this.
"""

from __future__ import annotations

import re
from pathlib import Path

import typer

from specbench.cli import build_app
from specbench.decoding.presets import PRESETS, resolve

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "readme"


def refresh(text: str) -> str:
    """`text` with every block made anew."""
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- begin:{name} -->\n).*?(<!-- end:{name} -->)"
        text, found = re.subn(pattern, lambda match, make=make: match[1] + make() + match[2], text, flags=re.DOTALL)
        assert found == 1, f"README has {found} blocks called {name}"
    return text


def commands() -> str:
    """Every command with the first paragraph of its help."""
    group = typer.main.get_command(build_app())
    lines = []
    for name, command in group.commands.items():
        parts = [(f"{name} {sub}", found) for sub, found in getattr(command, "commands", {}).items()]
        for label, found in parts or [(name, command)]:
            lines.append(f"| `specbench {label}` | {found.help.split(chr(10))[0]} |")
    return "\n".join(["| command | what it does |", "| --- | --- |", *lines, ""])


def decoders() -> str:
    """Every preset with its choices' law, options and paper."""
    lines = ["| decoder | lossless | what it does | options and defaults | from |", "| --- | --- | --- | --- | --- |"]
    for name, preset in PRESETS.items():
        spec = resolve(name)
        options = ", ".join(f"{key}={value}" for key, value in spec.options) or "-"
        lossless = "yes" if spec.lossless else "no"
        lines.append(f"| `{name}` | {lossless} | {preset.summary} | {options} | {preset.paper} |")
    return "\n".join([*lines, ""])


def results() -> str:
    """The headline table of the runs committed under results/readme, and the picture made of them."""
    if not RESULTS.is_dir():
        return "(The table and the picture appear here once `results/readme` holds runs.)\n"
    import specbench

    rows = specbench.report(out=RESULTS)
    scores = list(
        dict.fromkeys(score["metric"] for row in rows for score in row["scores"] if ":" not in score["metric"])
    )
    columns = ["decoder", "lossless", "NFE", "step compression", "window cost", "overhead", "speed-up [95 %]", "gap"]
    columns += scores
    lines = [" | ".join(columns), " | ".join("---" for _ in columns), *(_headline(row, scores) for row in rows)]
    table = "\n".join(f"| {line} |" for line in lines)
    picture = RESULTS / "grid.png"
    image = (
        f"\n![One row per prompt, one column per decoder]({picture.relative_to(ROOT)})\n" if picture.exists() else ""
    )
    return f"{table}\n\n{rows[0]['n']} prompts; measured on {rows[0]['environment'][0]}.\n{image}"


def _headline(row: dict, scores: list[str]) -> str:
    found = {score["metric"]: f"{score['value']:.3f}" for score in row["scores"] if score["value"] is not None}
    speedup = "-"
    if row["speedup"] is not None:
        speedup = f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    cells = [row["label"], "yes" if row["lossless"] else "no", f"{row['nfe']:.1f}", f"{row['step_compression']:.2f}x"]
    cells += [f"{row[key]:.2f}x" if row[key] is not None else "-" for key in ("window_cost", "overhead")]
    cells += [speedup, f"{row['gap']:+.3f}", *(found.get(score, "-") for score in scores)]
    return " | ".join(cells)


BLOCKS = {"commands": commands, "decoders": decoders, "results": results}

if __name__ == "__main__":
    README.write_text(refresh(README.read_text()))
