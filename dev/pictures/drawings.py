"""Drawings of README and docs as SVG, which follow the reader's light or dark setting."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from specbench.reporting.marks import mark_of
from specbench.reporting.row import ReportRow

STYLE = """
  text { font: 14px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .small { font-size: 12px; fill: #59636e } .mid { text-anchor: middle } .end { text-anchor: end }
  .ground { fill: #ffffff } .line { stroke: #8c959f; fill: none } .grid { stroke: #d1d9e0 }
  .done { fill: #d1d9e0 } .draft { fill: #ffffff; stroke: #0072b2; stroke-dasharray: 4 3 }
  .yes { fill: #cfe8f7; stroke: #0072b2 } .no { fill: #fbe3d2; stroke: #d55e00 } .new { fill: #d5f0e3; stroke: #009e73 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .ground { fill: #151b23 } .grid { stroke: #3d444d }
    .done { fill: #3d444d } .draft { fill: #151b23; stroke: #56b4e9 } .yes { fill: #12384f; stroke: #56b4e9 }
    .no { fill: #50290f; stroke: #f0883e } .new { fill: #0f3b2c; stroke: #2fbf8f }
  }
"""
CELL, GAP, LEFT = 54, 8, 196


def speedups(path: Path, rows: Iterable[ReportRow]) -> None:
    """Speed-up over AR of each run with its 95 % interval, lossless decoders above lossy ones."""
    rows = [row for row in rows if row.decoder != "ar"]
    groups = [(name, [row for row in rows if row.lossless == (name == "lossless")]) for name in ("lossless", "lossy")]
    scale, start, height = 300, 210, 26

    def x(value: float) -> float:
        return start + (value - 0.25) * scale

    bottom = 78 + height * len(rows) + 30 * len(groups)
    parts = [_text(16, 28, "Speed-up over compiled AR with 95 % interval: images of shapes on one CPU core")]
    for mark in (0.25, 0.5, 0.75, 1):
        parts.append(f'<path class="{"line" if mark == 1 else "grid"}" d="M{x(mark)} 44V{bottom - 26}"/>')
        parts.append(_text(x(mark), bottom - 8, "AR" if mark == 1 else f"{mark:g} times", "small mid"))
    parts += [_text(540, 62, "speed-up", "small end"), _text(664, 62, "tokens per step", "small end")]
    y = 62
    for name, members in groups:
        parts.append(_text(16, y, "lossless: AR's distribution" if name == "lossless" else "lossy", "small"))
        for row in sorted(members, key=lambda row: -row.over_ar.speedup.value):
            y += height
            mark = mark_of(row.decoder)
            speed = row.over_ar.speedup
            low, middle, high = x(speed.low), x(speed.value), x(speed.high)
            parts += [
                _text(start - 12, y + 5, row.label.split(",")[0], "end"),
                f'<path stroke="{mark.colour}" stroke-width="2" d="M{low:.1f} {y}H{high:.1f}"/>',
                f'<text style="fill:{mark.colour}" text-anchor="middle" x="{middle:.1f}" y="{y + 5}">'
                f"{mark.glyph}</text>",
                _text(540, y + 5, f"{speed.value:.2f}", "end"),
                _text(664, y + 5, f"{row.number('tokens_per_step').value:.1f}", "end"),
            ]
        y += 30
    _write(path, 680, bottom, parts, "Speed-up of each decoder over AR, with 95 % intervals; lossless and lossy apart")


def one_step(path: Path) -> None:
    """One step of a speculative decoder: window, verification, and what is committed."""
    drafts = [f"x{number}" for number in range(1, 6)]
    rows = [
        ("1  draft", "a window of 6 tokens", [("done", "…"), ("done", "x0"), *(("draft", x) for x in drafts)]),
        ("2  forward", "p of every slot, at once", [("", ""), ("", ""), *(("", f"p{n}") for n in range(1, 6))]),
        (
            "3  verify",
            "from the left, p against q",
            [
                ("done", "…"),
                ("done", "x0"),
                ("yes", "x1"),
                ("yes", "x2"),
                ("no", "x3"),
                ("draft", "x4"),
                ("draft", "x5"),
            ],
        ),
        (
            "4  commit",
            "3 tokens from 1 forward",
            [
                ("done", "…"),
                ("done", "x0"),
                ("done", "x1"),
                ("done", "x2"),
                ("new", "y3"),
                ("draft", "x4'"),
                ("draft", "x5'"),
            ],
        ),
    ]
    parts = []
    for number, (name, text, cells) in enumerate(rows):
        y = 30 + number * 84
        parts += [_text(16, y + 22, name), _text(16, y + 41, text, "small")]
        for place, (kind, label) in enumerate(cells):
            left = LEFT + place * (CELL + GAP)
            if kind:
                parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{CELL}" height="44" rx="6"/>')
            parts.append(_text(left + CELL / 2, y + 27, label, "mid"))
    at = [LEFT + place * (CELL + GAP) + CELL / 2 for place in range(8)]
    for place in range(2, 7):  # arrows: the window is the network's input, the distributions are its output
        parts.append(_arrow(at[place], 78, 124))
    parts += [
        f'<path class="line" d="M{at[1] - 27} 20v-6H{at[6] + 27}v6"/>',
        _text(at[2], 262, "accepted", "small mid"),
        _text(at[3], 262, "accepted", "small mid"),
        _text(at[4], 262, "rejected", "small mid"),
        _text(at[5] + 31, 262, "not tested", "small mid"),
        _text(at[4], 346, "from the", "small mid"),
        _text(at[4], 362, "residual", "small mid"),
        _text(at[5] + 31, 346, "refined: drafts", "small mid"),
        _text(at[5] + 31, 362, "of the next step", "small mid"),
    ]
    title = "One step: five drafts in one forward; two are accepted, the third is replaced, the others drafted again"
    _write(path, 650, 380, parts, title)


FLOORS = (
    "cli, api", "papers, checks", "reporting, training", "runs", "metrics, stats", "store", "decoding", "models",
    "specs, prompts", "system",
)  # fmt: skip
STOPS = (
    ("cli, api", "run"), ("runs", "merge"), ("runs", "make_plan"), ("runs", "run"), ("runs", "open_executor"),
    ("runs", "decode_chunk"), ("decoding", "Loop.step"), ("models", "forward"), ("decoding", "verify_chain"),
    ("store", "append"),
)  # fmt: skip
ABOVE = (2, 4, 8, 9)  # stops whose name is above the path


def one_image(path: Path) -> None:
    """Path of an image through the packages, from the command to its row on disk."""
    left, wide, floor = 180, 72, 38

    def at(stop: int) -> tuple[int, int]:
        return left + 30 + stop * wide, 36 + FLOORS.index(STOPS[stop][0]) * floor

    parts = []
    for number, name in enumerate(FLOORS):
        y = 18 + number * floor
        used = name in dict(STOPS)
        parts.append(f'<rect class="{"yes" if used else "done"}" x="16" y="{y}" width="150" height="30" rx="5"/>')
        parts.append(_text(91, y + 20, name, "mid"))
    (x, y), *others = map(at, range(len(STOPS)))
    parts.append(f'<path class="line" d="M{x} {y}{"".join(f"H{x}V{y}" for x, y in others)}"/>')
    for stop, (_, function) in enumerate(STOPS):
        x, y = at(stop)
        parts += [f'<circle class="new" cx="{x}" cy="{y}" r="12"/>', _text(x, y + 5, str(stop + 1), "mid")]
        parts.append(_text(x, y + (-17 if stop in ABOVE else 27), function, "small mid"))
    title = "One image from the command to the parquet file: ten stops on the floors of the package"
    _write(path, 930, 404, parts, title)


def _arrow(x: float, top: float, bottom: float) -> str:
    return f'<path class="line" d="M{x} {top}V{bottom}m-4 -6l4 6l4 -6"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def _write(path: Path, width: int, height: int, parts: Iterable[str], title: str) -> None:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    ground = f'<rect class="ground" width="{width}" height="{height}" rx="8"/>'
    path.write_text("\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>", ""]), encoding="utf-8")
