"""Which prompts of a set are decoded: all, the first, those of categories, or a random sample. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from specbench.errors import SpecbenchError, unknown_name
from specbench.prompts.prompt_set import Prompt, PromptSet, select

_SEED = 0


@dataclass(frozen=True)
class Drawing:
    """Selection of prompts, applied in the order of the attributes; the rest keep their order in the file.

    Attributes:
        ids: only the prompts with these ids; all if empty.
        categories: only those of these categories; all if empty.
        offset: without the first ones.
        per_category: the first ones of each category.
        sample: a random sample of this size. It depends on the ids alone, so it is the same for every decoder and
            order of the file, and a larger one contains a smaller one.
        limit: keep the first N after all other choices.
    """

    ids: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    offset: int = 0
    per_category: int | None = None
    sample: int | None = None
    limit: int | None = None

    def of(self, prompts: PromptSet) -> list[Prompt]:
        """The prompts that are drawn.

        Raises:
            SpecbenchError: an unknown id or category, no categories to draw by, or nothing is left.
        """
        self._check_categories(prompts)
        chosen = select(prompts, None, self.ids) if self.ids else prompts.prompts
        if self.categories:
            chosen = [one for one in chosen if one.category in self.categories]
        chosen = _first_of_each(chosen[self.offset :], self.per_category)
        chosen = list(_sampled(chosen, self.sample)[: self.limit])
        if not chosen:
            raise SpecbenchError(f"no prompt of '{prompts.name}' is left", "use a smaller --offset or other categories")
        return chosen

    def _check_categories(self, prompts: PromptSet) -> None:
        if self.per_category is None and not self.categories:
            return
        known = {prompt.category for prompt in prompts.prompts if prompt.category}
        if self.per_category is not None and not known:
            raise SpecbenchError(f"--per-category: prompts '{prompts.name}' have no categories", "use --limit")
        for name in self.categories:
            if name not in known:
                raise unknown_name(f"category of '{prompts.name}':", name, known)

    def text(self, prompts: PromptSet) -> str | None:
        """What is drawn, in words; None where it is the whole set."""
        parts = [f"ids {', '.join(self.ids)}"] if self.ids else []
        parts += [f"category {', '.join(self.categories)}"] if self.categories else []
        parts += [f"without the first {self.offset}"] if self.offset else []
        parts += [f"first {self.per_category} per category"] if self.per_category else []
        parts += [f"random sample of {self.sample} (seed {_SEED})"] if self.sample else []
        parts += [f"first {self.limit}"] if self.limit else []
        count, total = len(self.of(prompts)), len(prompts.prompts)
        return f"{count:,} of {total:,}: {', '.join(parts)}" if count < total else None


def _first_of_each(prompts: Sequence[Prompt], count: int | None) -> Sequence[Prompt]:
    if count is None:
        return prompts
    taken: defaultdict[str | None, int] = defaultdict(int)
    chosen = []
    for prompt in prompts:
        taken[prompt.category] += 1
        if taken[prompt.category] <= count:
            chosen.append(prompt)
    return chosen


def _sampled(prompts: Sequence[Prompt], count: int | None) -> Sequence[Prompt]:
    def place(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{_SEED}\n{prompt.id}".encode()).digest()

    if count is None:
        return prompts
    kept = {prompt.id for prompt in sorted(prompts, key=place)[:count]}
    return [prompt for prompt in prompts if prompt.id in kept]
