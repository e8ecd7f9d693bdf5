"""An extension of the API reference's reader: docstrings here describe `tokens, positions:` in one entry of `Args:`."""

import re

import griffe

_SHARED = re.compile(r"(\s+)(\w+(?:, \w+)+)(: .*)")


class SharedDescriptions(griffe.Extension):
    """Give each of several parameters that share a description an entry of its own."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        _split(func)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        _split(cls)


def _split(found: griffe.Function | griffe.Class) -> None:
    if found.docstring is not None:
        found.docstring.value = split_shared(found.docstring.value)


def split_shared(text: str) -> str:
    """`text` with every entry `a, b: description` as one for `a` and one for `b`."""
    lines, done = text.split("\n"), []
    while lines:
        found = _SHARED.fullmatch(lines[0])
        if found is None:
            done.append(lines.pop(0))
            continue
        lines.pop(0)
        more = []
        while lines and lines[0].startswith(found[1] + " "):
            more.append(lines.pop(0))
        for name in found[2].split(", "):
            done += [f"{found[1]}{name}{found[3]}", *more]
    return "\n".join(done)
