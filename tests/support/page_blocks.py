"""Code blocks of the pages, each with the mark that says what a test does with it, and what its commands print. A mark
is an invisible comment before the block: `<!-- run -->` (typed unchanged, in the page's order, in a folder of the
page's own), `<!-- run slow -->` (the same, by `make test-commands`), `<!-- dry-run -->` (what decodes gets `--dry-run`,
the rest is parsed: it needs a GPU, weights or a network) and `<!-- shown -->` (parsed)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARKS = ("run", "run slow", "dry-run", "shown")
_MARK = re.compile(r"<!-- ([a-z -]+?) -->")


@dataclass(frozen=True)
class Block:
    """A code block: its mark or None, its language, its text and the number of its first line."""

    mark: str | None
    language: str
    text: str
    line: int

    def commands(self) -> list[tuple[str, list[str]]]:
        """Commands of the block, with the lines that the page shows below each."""
        commands: list[tuple[str, list[str]]] = []
        prompted = any(line.startswith("$ ") for line in self.text.splitlines())
        for line in re.sub(r"(?<!\\)\\\n", " ", self.text).splitlines():
            if prompted and not line.startswith("$ "):
                commands[-1][1].append(line)
            elif line.strip() and not line.startswith("#"):
                commands.append((line.removeprefix("$ "), []))
        return commands


def blocks(page: Path) -> list[Block]:
    """The fenced and indented blocks of a page, without those that are generated."""
    lines = re.sub(
        r"<!-- begin:([a-z-]+).*?<!-- end:\1 -->",
        lambda match: "\n" * match[0].count("\n"),
        page.read_text(),
        flags=re.S,
    ).splitlines()
    return list(_blocks(lines))


def _blocks(lines: Sequence[str]) -> Iterator[Block]:
    place, before = 0, ""
    while place < len(lines):
        line, start = lines[place], place
        if line.startswith("```"):
            place = lines.index("```", place + 1)
            yield Block(_mark(before), line[3:], "\n".join(lines[start + 1 : place]), start + 1)
        elif line.startswith("    ") and not lines[place - 1].strip():
            while place < len(lines) and (lines[place].startswith("    ") or not lines[place].strip()):
                place += 1
            text = "\n".join(each[4:] for each in lines[start:place]).rstrip()
            yield Block(_mark(before), "console" if "$ " in text else "sh", text, start + 1)
            place -= 1
        before = lines[place] if lines[place].strip() else before
        place += 1


def _mark(before: str) -> str | None:
    match = _MARK.fullmatch(before.strip())
    return match[1] if match and match[1] in MARKS else None


def missing_lines(shown: Sequence[str], out: str, err: str) -> list[str]:
    """Lines that a page shows and a command did not print: on stdout in their order, on stderr anywhere. Numbers may be
    others and columns wider. Measured statements ("- The best is ...", with their indented lines) are not compared,
    because they depend on how busy the machine is; a line that ends in "..." is compared up to there."""
    there, errors = [_settled(line) for line in out.splitlines()], [_settled(line) for line in err.splitlines()]
    lost, measured = [], False
    for line in shown:
        start, cut, _ = _settled(line).partition("...")
        measured = line.startswith("- ") or (measured and line.startswith("  "))
        if not start.strip() or measured:
            continue

        def fits(printed: str, start: str = start, cut: str = cut) -> bool:
            return printed.startswith(start.rstrip()) if cut else printed == start

        place = next((place for place, printed in enumerate(there) if fits(printed)), None)
        if place is not None:
            there = there[place + 1 :]
        elif not any(map(fits, errors)):
            lost.append(line)
    return lost


def _settled(line: str) -> str:
    """A line without what varies: numbers, widths of columns, bold cells of LaTeX (a measured difference is real)."""
    plain = re.sub(r"\\textbf\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1", line)
    text = re.sub(r"\d+(?:[.,]\d+)*", "#", plain)
    return " ".join(re.sub(r"-{2,}", "--", re.sub(r"─+", "─", text)).split())
