"""Requests: one image to decode each. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specbench.prompts.prompt_set import Prompt


@dataclass(frozen=True)
class Request:
    """One image to decode.

    Attributes:
        text: of the prompt.
        prompt_id: of the prompt; with `sample` and the seed of the run it determines the image's noise.
        sample: number of this image among those of its prompt.
        category, meta: the prompt's, for the image's row; they have no effect on decoding.
    """

    text: str
    prompt_id: str
    sample: int = 0
    category: str | None = field(default=None, compare=False)
    meta: dict = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, prompt: Prompt, sample: int = 0) -> Request:
        return cls(prompt.text, prompt.id, sample, prompt.category, prompt.meta)

    @property
    def key(self) -> tuple[str, int]:
        """Prompt id and sample: identifies the image among those of a run."""
        return self.prompt_id, self.sample


def requests_for(prompts: Iterable[Prompt], samples: int = 1) -> list[Request]:
    """Return the requests for `samples` images of each prompt, prompt by prompt."""
    return [Request.of(prompt, sample) for prompt in prompts for sample in range(samples)]
