"""Byte-pair encoding from tiktoken's files, with Qwen's split of a text into words, as Emu3's authors tokenize prompts.

tiktoken stores the rank of each byte string rather than a list of merges, so the tokenizers library cannot read it.
"""

from __future__ import annotations

import base64
import heapq
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of a text, from Qwen's tokenizer: one leading space or mark stays with a word, and every digit stands alone."""


def qwen_split() -> pre_tokenizers.PreTokenizer:
    """The split of a text into words that are encoded one by one."""
    return pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated")


def split_as_qwen(tokenizer: Tokenizer) -> None:
    """Let a byte-level tokenizer normalise and split texts as Qwen's does."""
    tokenizer.normalizer = normalizers.NFC()
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([qwen_split(), bytes_of_words])


@dataclass(frozen=True)
class Encoding:
    """Vocabulary ids of a text, as `tokenizers.Encoding` has them."""

    ids: list[int]


class RankedBpe:
    """A tokenizer from the ranks of byte strings; has what `FamilyModel` uses of `tokenizers.Tokenizer`.

    Args:
        ranks: token bytes to id; a lower id is merged first.
        specials: names of special tokens to ids; they are recognised anywhere in a text.
    """

    def __init__(self, ranks: Mapping[bytes, int], specials: Mapping[str, int]):
        self._ranks = ranks
        self._specials = specials
        self._split = qwen_split()
        self._special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Ids of a text in which special tokens are written by name; nothing is added to it."""
        return Encoding(list(self._ids(unicodedata.normalize("NFC", text))))

    def token_to_id(self, name: str) -> int | None:
        return self._specials.get(name)

    def _ids(self, text: str) -> Iterator[int]:
        start = 0
        for found in self._special.finditer(text):
            yield from self._ordinary(text[start : found.start()])
            yield self._specials[found[0]]
            start = found.end()
        yield from self._ordinary(text[start:])

    def _ordinary(self, text: str) -> Iterator[int]:
        for word, _ in self._split.pre_tokenize_str(text):
            yield from merge_word(word.encode(), self._ranks)


def merge_word(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Ids of one word: of all neighbours, the pair with the lowest rank is joined first, the leftmost of equals.

    A heap of the joins still possible keeps words of thousands of characters, as of languages without spaces, fast.
    """
    if word in ranks:
        return [ranks[word]]
    end = list(range(1, len(word) + 1))  # of the part that starts at each byte; 0 for bytes inside a part
    before = list(range(-1, len(word) - 1))  # start of the part before it
    joins: list[tuple[int, int, int]] = []

    def consider(start: int) -> None:
        middle = end[start]
        if middle < len(word) and (rank := ranks.get(word[start : end[middle]])) is not None:
            heapq.heappush(joins, (rank, start, end[middle]))

    for start in range(len(word)):
        consider(start)
    while joins:
        _, start, stop = heapq.heappop(joins)
        middle = end[start]
        if not 0 < middle < len(word) or end[middle] != stop:
            continue  # one of the two was joined with another
        end[start], end[middle] = stop, 0
        if stop < len(word):
            before[stop] = start
        consider(start)
        if before[start] >= 0:
            consider(before[start])
    return [ranks[word[start:stop]] for start, stop in enumerate(end) if stop]


def read_ranks(lines: bytes) -> dict[bytes, int]:
    """Token bytes to id from the lines of a `.tiktoken` file.

    Raises:
        ValueError: a line that is not base64 and a number, or a byte without a token.
    """
    ranks = {}
    for number, line in enumerate(lines.splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        if len(parts) != 2 or not parts[1].isdigit():
            raise ValueError(f"line {number} is not a token and its rank")
        ranks[base64.b64decode(parts[0], validate=True)] = int(parts[1])
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"no token for byte {missing[0]}")
    return ranks
