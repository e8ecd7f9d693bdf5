"""One prompt. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_PROMPT_CHARS = 10_000
MAX_ID_CHARS = 200


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: stable name within its set; never a position.
        text: prompt text; stripped of surrounding white space, except in public sets published with it.
        category: tested ability, if the set names one.
        meta: further facts, for example the scene of a caption.
    """

    id: str
    text: str
    category: str | None = None
    meta: dict = field(default_factory=dict)
