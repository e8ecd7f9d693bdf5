"""Rewrite the generated blocks of the README from the code and from the results behind it.

A block stands between `<!-- begin:NAME -->` and `<!-- end:NAME -->`. `make docs` runs this.
"""

from __future__ import annotations

import re
from pathlib import Path

import typer

from specbench.cli import build_app
from specbench.specs.options import plain
from specbench.specs.presets import PRESETS, resolve

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "readme"
REFERENCE = ROOT / "results" / "reference"


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
        options = ", ".join(f"{key}={plain(value)}" if value != "" else key for key, value in spec.options) or "-"
        lossless = "yes" if spec.lossless else "no"
        lines.append(f"| `{name}` | {lossless} | {preset.summary} | {options} | {preset.paper} |")
    return "\n".join([*lines, ""])


def results() -> str:
    """The headline table of the runs committed under results/readme, and the picture made of them."""
    if not RESULTS.is_dir():
        return "(The table and the picture appear here once `results/readme` holds runs.)\n"
    from specbench.api import report
    from specbench.cli.demo import PICTURE, headline

    rows = report(out=RESULTS)
    cells = headline(rows)
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    picture = RESULTS / PICTURE
    shown = f"\n![One row per prompt, one column per decoder]({picture.relative_to(ROOT)})\n"
    image = shown if picture.exists() else ""
    said = f"{rows[0]['n']} prompts show speed and are far too few to compare scores."
    return f"{table}\n\n{said} Measured on {rows[0]['environment'][0]}.\n{image}"


def reference() -> str:
    """The table of all decoders over many images, as `collect.py` left it, and a part of the picture."""
    picture = REFERENCE / "gallery.png"
    shown = f"\n![Five captions by some of the decoders]({picture.relative_to(ROOT)})\n"
    return (REFERENCE / "headline.md").read_text() + shown


BLOCKS = {"commands": commands, "decoders": decoders, "reference": reference, "results": results}

if __name__ == "__main__":
    README.write_text(refresh(README.read_text()))
