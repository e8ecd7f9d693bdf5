"""Noun phrases of prompts by spaCy's small English model, as in T2I-CompBench++'s programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from types import MappingProxyType

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

    def nouns(self, text: str) -> list[str]:
        return [token.text for token in self._parse(text) if token.pos_ == "NOUN"]

    def words(self, text: str) -> list[tuple[str, str]]:
        """Tag the words of a text with their parts of speech."""
        return [(token.text, token.pos_) for token in self._parse(text)]

    def without_adjectives(self, text: str) -> str:
        return " ".join(token.text for token in self._parse(text) if token.pos_ != "ADJ")


def identity() -> Mapping[str, str]:
    """Versions of spaCy and its model, for identities."""
    return {"phrases": f"{SPACY_MODEL} {version(SPACY_MODEL)}", "spacy": version("spacy")}
