"""Find errors in LaTeX without an installed LaTeX: environments, braces, cells of a row, special signs,
rules of booktabs. It is strict: of LaTeX it knows what specbench writes."""

import re
from collections.abc import Iterator

_ROW = re.compile(r"(?<!\\)&")
_RULES = (r"\toprule", r"\midrule", r"\bottomrule")


def latex_problems(text: str) -> Iterator[str]:
    """Each problem in words; none in LaTeX that compiles."""
    open_ones: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{([\w*]+)\}", text):
        if kind == "begin":
            open_ones.append(name)
        elif not open_ones or open_ones.pop() != name:
            yield f"\\end{{{name}}} ends nothing"
    yield from (f"\\begin{{{name}}} has no end" for name in open_ones)
    bare = re.sub(r"\\[\\{}]", "", re.sub(r"(?<!\\)%.*", "", text))
    if bare.count("{") != bare.count("}") or bare.count("$") % 2 - bare.count(r"\$") % 2:
        yield "braces or dollar signs do not match"
    outside = re.sub(r"(?<!\\)\$[^$]*\$|\\(cite|label|ref|texttt|input|includegraphics)\{[^{}]*\}", "", bare)
    for sign in re.findall(r"(?<!\\)[#_^]|[^\x00-\x7f]", outside):
        yield f"'{sign}' is not escaped"
    for columns, body in re.findall(r"\\begin\{tabular\}\{@\{\}(\w+)@\{\}\}(.*?)\\end\{tabular\}", text, re.S):
        yield from _tabular(len(columns), body)


def _tabular(columns: int, body: str) -> Iterator[str]:
    lines = [line.strip() for line in body.strip().splitlines()]
    if lines[0] != _RULES[0] or lines[-1] != _RULES[2] or _RULES[1] not in lines:
        yield "a tabular needs \\toprule, \\midrule and \\bottomrule"
    for line in lines:
        if line in _RULES:
            continue
        spanned = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
        if len(_ROW.findall(line)) + 1 + spanned != columns or not line.endswith(r"\\"):
            yield f"no row of {columns} cells: {line}"
