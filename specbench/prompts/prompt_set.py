"""Prompts, validated prompt sets, selection of prompts, and requests of single images. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from specbench.errors import SpecbenchError, listed, unknown_name

_MAX_PROMPT_CHARS = 10_000
_MAX_ID_CHARS = 200
_DRAWING_SEED = 0
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


@dataclass(frozen=True)
class Prompt:
    """A prompt. `id`: stable name within the set, not a position; `text`: stripped, except in public sets published
    with white space; `category`: the tested ability; `meta`: further facts, such as a caption's scene."""

    id: str
    text: str
    category: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order. `sha256` is the digest of their content, independent of order."""

    name: str
    prompts: Sequence[Prompt]
    sha256: str


@dataclass(frozen=True)
class Drawing:
    """Selection of prompts, applied in the order of the attributes (empty: all). Selected prompts keep the order of the
    file. `sample`: size of a random sample. It depends only on the ids, so that it is the same for all decoders and
    orders of the file. A larger sample contains all smaller samples."""

    ids: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    offset: int = 0
    per_category: int | None = None
    sample: int | None = None
    limit: int | None = None

    def of(self, prompts: PromptSet) -> list[Prompt]:
        """Return the selected prompts."""
        categories = {prompt.category for prompt in prompts.prompts if prompt.category}
        if self.per_category is not None and not categories:
            raise SpecbenchError(f"--per-category: prompts '{prompts.name}' have no categories", "use --limit")
        if unknown := [name for name in self.categories if name not in categories]:
            raise unknown_name(f"category of '{prompts.name}':", unknown[0], categories)
        chosen = select(prompts, None, self.ids)
        if self.categories:
            chosen = [prompt for prompt in chosen if prompt.category in self.categories]
        chosen = chosen[self.offset :]
        if self.per_category is not None:
            firsts: defaultdict[str | None, list[Prompt]] = defaultdict(list)
            for prompt in chosen:
                firsts[prompt.category].append(prompt)
            first = {prompt.id for mine in firsts.values() for prompt in mine[: self.per_category]}
            chosen = [prompt for prompt in chosen if prompt.id in first]
        if self.sample is not None:
            drawn = {prompt.id for prompt in sorted(chosen, key=_draw)[: self.sample]}
            chosen = [prompt for prompt in chosen if prompt.id in drawn]
        chosen = chosen[: self.limit]
        if not chosen:
            raise SpecbenchError(
                f"no prompt of '{prompts.name}' is selected", "use a smaller --offset or other categories"
            )
        return chosen

    def text(self, prompts: PromptSet) -> str | None:
        """Describe the selection in words; None for the whole set."""
        parts = [f"ids {listed(self.ids)}"] if self.ids else []
        parts += [f"category {listed(self.categories)}"] if self.categories else []
        parts += [f"without the first {self.offset}"] if self.offset else []
        parts += [f"first {self.per_category} per category"] if self.per_category else []
        parts += [f"random sample of {self.sample} (seed {_DRAWING_SEED})"] if self.sample else []
        parts += [f"first {self.limit}"] if self.limit else []
        count, total = len(self.of(prompts)), len(prompts.prompts)
        return f"{count:,} of {total:,}: {', '.join(parts)}" if count < total else None


@dataclass(frozen=True)
class Request:
    """An image to decode. `text`, `category`, `meta`: from the prompt. `sample`: the image's number among the images of
    the prompt. `prompt_id`, `sample` and the run's seed determine the noise."""

    text: str
    prompt_id: str
    sample: int = 0
    category: str | None = field(default=None, compare=False)
    meta: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, prompt: Prompt, sample: int = 0) -> Request:
        return cls(prompt.text, prompt.id, sample, prompt.category, prompt.meta)

    @property
    def key(self) -> tuple[str, int]:
        """Prompt id and sample, which identify an image within a run."""
        return self.prompt_id, self.sample


def second_stage_id(prompt_id: str, sample: int) -> str:
    """Return the prompt id of an image whose codes are the prompt of a second stage."""
    return f"{prompt_id}#{sample} (stage 2)"


def build_prompt_set(name: str, prompts: Sequence[Prompt]) -> PromptSet:
    """Build a validated prompt set."""
    if not prompts:
        raise SpecbenchError(f"prompts '{name}': it has no prompts")
    seen: set[str] = set()
    for prompt in prompts:
        _check(name, prompt)
        if prompt.id in seen:
            raise SpecbenchError(f"prompts '{name}': two prompts have the id '{prompt.id}'", "ids must be unique")
        seen.add(prompt.id)
    return PromptSet(name, tuple(prompts), content_sha256(prompts))


def requests_for(prompts: Iterable[Prompt], samples: int = 1) -> list[Request]:
    """Return the requests for `samples` images of each prompt, prompt by prompt."""
    return [Request.of(prompt, sample) for prompt in prompts for sample in range(samples)]


def select(prompts: PromptSet, limit: int | None = None, ids: Sequence[str] = ()) -> list[Prompt]:
    """Select the prompts with these ids (all if empty), at most `limit`, in file order."""
    if not ids:
        return list(prompts.prompts[:limit])
    unique, every = set(ids), prompts.prompts
    chosen = [prompt for prompt in every if prompt.id in unique]
    if len(chosen) < len(unique):
        there = {prompt.id for prompt in chosen}
        unknown, valid = next(name for name in ids if name not in there), {prompt.id for prompt in every}
        if len(valid) <= 20:
            raise unknown_name(f"prompt id in '{prompts.name}':", unknown, valid)
        raise SpecbenchError(f"prompts '{prompts.name}' have no id '{unknown}'", f"ids look like '{min(valid)}'")
    return chosen[:limit]


def content_sha256(prompts: Sequence[Prompt]) -> str:
    """Digest of ids, texts, categories and metadata, sorted by id, so that the order in the file does not matter."""
    digest = hashlib.sha256()
    for prompt in sorted(prompts, key=attrgetter("id")):
        digest.update(f"{_encode([prompt.id, prompt.text, prompt.category, prompt.meta])}\n".encode())
    return digest.hexdigest()


def text_id(text: str) -> str:
    """Compute an id for a prompt without id, as a hash of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check(name: str, prompt: Prompt) -> None:
    shown = prompt.id[:40]
    if not prompt.text.strip():
        raise SpecbenchError(f"prompts '{name}': prompt '{shown}' has no text")
    if len(prompt.text) > _MAX_PROMPT_CHARS:
        what = f"prompt '{shown}' has {len(prompt.text):,} characters, more than {_MAX_PROMPT_CHARS:,}"
        raise SpecbenchError(f"prompts '{name}': {what}", "write one prompt per line")
    if not prompt.id or len(prompt.id) > _MAX_ID_CHARS or not prompt.id.isprintable():
        advice = f"use 1 to {_MAX_ID_CHARS} printable characters"
        raise SpecbenchError(f"prompts '{name}': {shown!r} cannot be an id", advice)


def _draw(prompt: Prompt) -> bytes:
    """Return a random sort key that depends only on the prompt's id."""
    return hashlib.sha256(f"{_DRAWING_SEED}\n{prompt.id}".encode()).digest()
