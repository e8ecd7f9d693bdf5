"""Names as users type them: normalisation, synonyms, and guesses for misspelt names.

Case, accents, spaces, punctuation, and words such as "decoding" in a decoder's name are ignored. Synonyms of models
come from the model catalogue, other synonyms from `names.toml`. Callers receive the catalogue's name, so the typed
spelling is never stored.
"""

import functools
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _by_each(meant: Mapping[str, str]) -> dict[str, str]:
    """Convert {meaning: "name, name"} to {name: meaning}."""
    return {name: meaning for meaning, names in meant.items() for name in names.split(", ")}


SYNONYMS: Mapping[str, Mapping[str, str]] = {kind: _by_each(meant) for kind, meant in _TABLES["synonyms"].items()}
"""{kind: {synonym: catalogue name}}, except synonyms of models, which are in the model catalogue."""
OPTIONS: Mapping[str, tuple[str, ...]] = {name: tuple(text.split(", ")) for name, text in _TABLES["options"].items()}
"""{option of specbench: names of the same option in other programs}."""
ADVICE: Mapping[str, str] = _by_each(_TABLES["advice"])  # {option that specbench lacks: hint}
COMMANDS: Mapping[str, str] = _by_each(_TABLES["commands"])  # {typed words: command that was probably meant}


_FILLING = {
    "decoder": r"decod(ing|er)",
    "prompt set": r"(prompts?|captions|dataset|val|validation)$",
    "metric": r"(score|metric)$",
}
"""{kind of name: words that users may add to a name or omit}."""


def composed(name: str) -> str:
    """A name in Unicode's composed form (NFC), because macOS decomposes file names."""
    return unicodedata.normalize("NFC", name)


def encodable(name: str) -> str:
    r"""Replace bytes of a name that are not UTF-8 (from old systems' archives) by escapes such as "\udcff"."""
    return name.encode("utf-8", "backslashreplace").decode()


@functools.lru_cache(maxsize=10_000)
def folded(name: str) -> str:
    """Normalise a name: "EAGLE (v1)" becomes "eagle1"."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    plain = re.sub(r"[\W_]", lambda mark: {"+": "plus", "&": "and"}.get(mark[0], ""), plain)
    return re.sub(r"v(?=\d)", "", plain)


def _spellings(name: str) -> list[str]:
    """Normalised spellings of a name: for "lantern++" also "lantern-pp"."""
    return list({folded(name), folded(name.replace("++", "pp"))})


def fitting(
    name: str, valid: Iterable[str], kind: str = "", also: Mapping[str, Iterable[str]] | None = None
) -> list[str]:
    """Return the names of `valid` that a typed name may mean: the name itself, or names with the same normalised
    spelling; empty for an unknown name. `also`: {valid name: synonyms}."""
    valid = list(valid)
    if name in valid:
        return [name]
    if not (typed := folded(name)):
        return []
    synonym = {folded(other): entry for other, entry in SYNONYMS.get(kind, {}).items()}.get(typed)
    meant = [entry for entry in valid if typed in _spellings(entry)] or [entry for entry in valid if entry == synonym]
    shorter = re.sub(_FILLING.get(kind, "$"), "", typed)
    meant = meant or (fitting(shorter, valid, kind) if shorter not in ("", typed) else [])
    return meant or [
        entry for entry, names in (also or {}).items() if any(typed in _spellings(spelt) for spelt in names)
    ]


def by_words(name: str, facts: Mapping[str, Sequence[str]], families: Mapping[str, str]) -> list[str]:
    """Return the names whose facts contain all words of a typed name ("LlamaGen-XL"). If one of these names is a prefix
    of all names of its family, return only this name. `facts`: texts about each name, title first. Names whose title
    contains no other words, except sizes, have priority."""
    words = set(_words(name))
    meant = [
        entry
        for entry, texts in facts.items()
        # Single words and joined neighbours, so that "LuminamGPT" matches "Lumina-mGPT".
        if words and words <= {word for row in map(_words, texts) for word in (*row, *map("".join, pairwise(row)))}
    ]
    bare = words - _sizes(words)
    meant = [entry for entry in meant if (title := set(_words(facts[entry][0]))) - _sizes(title) == bare] or meant
    kept = []
    for family in dict.fromkeys(families[entry] for entry in meant):
        members = [entry for entry in meant if families[entry] == family]
        base = min(members, key=len)
        kept += [base] if all(entry.startswith(base) for entry in members) else members
    return kept


def _sizes(words: Iterable[str]) -> set[str]:
    return {word for word in words if re.fullmatch(r"[\d.]+b|\d{3,4}(px)?", word)}


def _words(text: str) -> list[str]:
    """Split a name into words and numbers; 2.0 becomes 2, and "7b" is a single word."""
    words = re.findall(r"\d+(?:\.\d+)?b?(?![a-z])|[a-z]+|\d+", text.casefold())
    return [word.removesuffix(".0") for word in words]


def option(typed: str, options: Iterable[str]) -> str | None:
    """Return the option of `options` that a user meant with another spelling, or with its name in another program."""
    options = list(options)
    if typed in options:
        return typed
    by_plain = {entry.replace("_", "-").casefold(): entry for entry in options}
    plain = typed.lstrip("-").replace("_", "-").casefold()
    short = {folded(entry): entry for entry in options}
    for text in (plain, "" if plain in ADVICE else _bare(plain)):
        for meant in (text, *(entry for entry, names in OPTIONS.items() if text in names)):
            if flag := by_plain.get(meant) or by_plain.get(f"--{meant}"):
                return flag
    return short.get(folded(typed)) if len(plain) > 1 else None


def _bare(option: str) -> str:
    """Drop a suffix such as "-path" or "-file" from an option: "prompts-path" gives "prompts"; "" without a suffix."""
    bare, dash, _ = option.rpartition("-")
    return bare if option[len(bare) + 1 :] in ("path", "file", "dir", "folder", "name") and dash else ""


def size(text: str) -> str:
    """Write an image size such as "512", "768*512" or "(768, 512)" as WIDTHxHEIGHT; other text is unchanged."""
    sides = re.fullmatch(r"(\d+)\s*(?:px)?(?:\s*[x×X*, ]\s*(\d+)\s*(?:px)?)?", text.strip(" ()[]"))
    return f"{sides[1]}x{sides[2] or sides[1]}" if sides else text


def command(words: Sequence[str], commands: Iterable[str]) -> str | None:
    """Find the command for typed words such as "models", "list-models" or "model list"; None for unknown words and for
    names of `commands`."""
    first = words[0].casefold()
    bare = re.sub(r"^(list|ls|show)[-_]|[-_](list|ls)$", "", first)
    kinds = {kind: kind for kind in ("models", "decoders", "metrics", "prompts", "tables", "runs")}
    kinds |= SYNONYMS["thing to list"]
    thing = kinds.get(bare) or kinds.get(f"{bare}s")
    if thing and (bare != first or [word.casefold() for word in words[1:2]] in (["list"], ["ls"])):
        return f"list {thing}"
    if fitting(first, commands):
        return None
    return COMMANDS.get(first) or (f"list {thing}" if thing else None)


def advice(typed: str) -> str | None:
    """Return a hint for an option that no command has."""
    plain = typed.lstrip("-").replace("_", "-").casefold()
    return ADVICE.get(typed) or ADVICE.get(plain) or ADVICE.get(_bare(plain))


def guess(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to a misspelt name, if one is similar enough.

    Names below seven letters may have one slip, longer names two. Swapping two neighbouring letters is one slip; digits
    must be the same. A name is also returned if it is the only name that begins with the typed three or more letters.
    """
    typed, spellings = folded(name), {}
    for entry in sorted(valid, reverse=True):
        spellings[folded(entry.partition("[")[0])] = entry
        spellings[folded(entry)] = entry
    if not typed or not spellings:
        return None
    ranked = sorted((_slips(typed, entry), entry) for entry in spellings)
    least, best = ranked[0]
    allowed = 0 if len(typed) < 2 else 1 if len(typed) < 7 else 2
    if least <= allowed and _digits(typed) == _digits(best) and _likely(typed, best):
        return spellings[best]
    begun = {entry.partition("[")[0]: entry for spelt, entry in spellings.items() if spelt.startswith(typed)}
    return next(iter(begun.values())) if len(begun) == 1 and len(typed) > 2 else None


def _digits(text: str) -> list[str]:
    return sorted(filter(str.isdigit, text))


def _likely(typed: str, other: str) -> bool:
    """For a short name, return whether `other` differs only by swapped or doubled letters; True for longer names."""
    if min(len(typed), len(other)) > 4:
        return True
    return sorted(typed) == sorted(other) or re.sub(r"(.)\1", r"\1", typed) == re.sub(r"(.)\1", r"\1", other)


def _slips(typed: str, other: str) -> int:
    """Count letters to insert, omit, replace or swap with a neighbour (optimal string alignment distance)."""
    if abs(len(typed) - len(other)) > 2:
        return 9
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(typed, 1):
        above, before, row = before, row, [i]
        for j, target in enumerate(other, 1):
            cost = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != target))
            if i > 1 and j > 1 and letter == other[j - 2] and typed[i - 2] == target:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]
