"""Prompt sets: the shipped ones by name, the public ones, and a user's own file. No torch here."""

from specbench.prompts.loading import load_prompts, names, public_names
from specbench.prompts.prompt_set import Prompt, PromptSet, build, content_sha256, select, text_id

__all__ = [
    "Prompt",
    "PromptSet",
    "build",
    "content_sha256",
    "load_prompts",
    "names",
    "public_names",
    "select",
    "text_id",
]
