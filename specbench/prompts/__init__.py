"""Prompt sets: shipped, public, from plug-ins, or from a file. Imports no torch."""

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
