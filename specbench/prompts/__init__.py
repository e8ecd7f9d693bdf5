"""Prompt sets: shipped, public, from plug-ins, or from a file. Imports no torch."""

from specbench.prompts.loading import (
    downloadable,
    fetch_prompts,
    fetched_prompts,
    load_prompts,
    prompt_set_names,
    set_name,
)
from specbench.prompts.prompt_set import (
    Prompt,
    PromptSet,
    Request,
    build_prompt_set,
    content_sha256,
    requests_for,
    select,
    text_id,
)
from specbench.prompts.public import public_names
