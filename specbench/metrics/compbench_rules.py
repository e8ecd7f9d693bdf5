"""T2I-CompBench++'s rules (Huang et al. 2025): the noun phrases of prompts by spaCy's small English model, as in the
paper's programs, and the 3-in-1 score of complex prompts, which none of the programs computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from types import MappingProxyType

THREE_IN_ONE: Mapping[str, tuple[str, ...]] = {
    "spatial": ("spatial", "blip"),
    "action": ("clip", "blip"),
    "spatialaction": ("spatial", "clip", "blip"),
}
"""By kind of complex prompt: the scores whose mean is the prompt's score."""
SPACY_MODEL = "en_core_web_sm"
SPACY_PACKAGES = MappingProxyType(
    {
        "spacy": "pip install spacy",
        SPACY_MODEL: f"python -m spacy download {SPACY_MODEL} (the paper's programs use its version 3.5.0)",
    }
)


class Grammar:
    """spaCy model, loaded on first use."""

    @cached_property
    def _parse(self):
        import spacy  # an extra

        return spacy.load(SPACY_MODEL)

    def noun_phrases(self, text: str) -> list[str]:
        return [chunk.text for chunk in self._parse(text).noun_chunks]


def spacy_versions() -> Mapping[str, str]:
    """Versions of spaCy and its model; they are part of a metric's identity."""
    return {"phrases": f"{SPACY_MODEL} {version(SPACY_MODEL)}", "spacy": version("spacy")}


def three_in_one(kind: str, parts: Mapping[str, float]) -> float:
    """Average an image's answers to the parts of a complex prompt."""
    needed = THREE_IN_ONE[kind]
    return sum(parts[part] for part in needed) / len(needed)
