"""Prompts, validated prompt sets, and stable prompt ids. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring_ascii as _quoted
from operator import attrgetter

from specbench.errors import SpecbenchError, unknown_name
from specbench.prompts.prompt import MAX_ID_CHARS, MAX_PROMPT_CHARS, Prompt


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order. `sha256` is the digest of their content, independent of order."""

    name: str
    prompts: Sequence[Prompt]
    sha256: str


def build_prompt_set(name: str, prompts: Sequence[Prompt]) -> PromptSet:
    """Build a validated prompt set.

    Raises:
        SpecbenchError: no prompts, an invalid id or text, or a duplicate id.
    """
    if not prompts:
        raise SpecbenchError(f"prompts '{name}': no prompts in it")
    seen: set[str] = set()
    for prompt in prompts:
        _check(name, prompt)
        if prompt.id in seen:
            raise SpecbenchError(
                f"prompts '{name}': two prompts have the id '{prompt.id}'",
                "ids must be unique; a plain text line's id is the hash of its text, so remove the repeated line",
            )
        seen.add(prompt.id)
    return PromptSet(name, tuple(prompts), content_sha256(prompts))


def text_id(text: str) -> str:
    """Compute the id of a prompt without one: a hash of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_DIGESTED_AT_ONCE = 1000


def content_sha256(prompts: Sequence[Prompt]) -> str:
    """Digest of ids, texts, categories and metadata, sorted by id, so that the order in the file does not matter."""
    digest = hashlib.sha256()
    rows = map(_row_json, sorted(prompts, key=attrgetter("id")))
    while chunk := list(islice(rows, _DIGESTED_AT_ONCE)):
        digest.update("".join(f"{row}\n" for row in chunk).encode())
    return digest.hexdigest()


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


def _row_json(prompt: Prompt) -> str:
    """`[id, text, category, meta]` as JSON."""
    if prompt.meta or not isinstance(prompt.category, str | None):
        return _encode([prompt.id, prompt.text, prompt.category, prompt.meta])
    # A million encoders of one row each take most of the time that reading a large file takes.
    words = (prompt.id, prompt.text) if prompt.category is None else (prompt.id, prompt.text, prompt.category)
    return f"[{','.join(map(_quoted, words))}{',null' if prompt.category is None else ''},{{}}]"


def select(prompts: PromptSet, limit: int | None = None, ids: Sequence[str] = ()) -> list[Prompt]:
    """Select the prompts with these ids (all if empty), at most `limit`, in file order.

    Raises:
        SpecbenchError: an id that is not in the set.
    """
    if not ids:
        return list(prompts.prompts[:limit])
    wanted, every = set(ids), prompts.prompts
    found = [prompt for prompt in every if prompt.id in wanted]
    if len(found) < len(wanted):
        there = {prompt.id for prompt in found}
        raise _unknown_id(prompts.name, next(name for name in ids if name not in there), {p.id for p in every})
    return found[:limit]


def _unknown_id(name: str, wanted: str, known: set[str]) -> SpecbenchError:
    if len(known) <= 20:
        return unknown_name(f"prompt id in '{name}':", wanted, known)
    return SpecbenchError(f"prompts '{name}' have no id '{wanted}'", f"ids look like '{min(known)}'")


def _check(name: str, prompt: Prompt) -> None:
    shown = prompt.id[:40]
    if not prompt.text.strip():
        raise SpecbenchError(f"prompts '{name}': prompt '{shown}' has no text")
    if len(prompt.text) > MAX_PROMPT_CHARS:
        raise SpecbenchError(
            f"prompts '{name}': prompt '{shown}' has {len(prompt.text):,} characters, more than {MAX_PROMPT_CHARS:,}",
            "write one prompt per line",
        )
    if not prompt.id or len(prompt.id) > MAX_ID_CHARS or not prompt.id.isprintable():
        raise SpecbenchError(
            f"prompts '{name}': {shown!r} cannot be an id", f"use 1 to {MAX_ID_CHARS} printable characters"
        )
