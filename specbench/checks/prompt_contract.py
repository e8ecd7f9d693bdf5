"""Conformance tests for prompt sets: ids, captions, and whether a model reads them."""

from __future__ import annotations

from collections.abc import Callable

from specbench.checks.findings import Finding, finding, run_tests
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.prompts import PromptSet, load_prompts


def prompt_findings(name: str, model: str | None = None) -> list[Finding]:
    """Run every conformance test on a prompt set.

    Args:
        name: of a set, a file, or "package.module:NAME".
        model: that must be able to read them; none if None.

    Raises:
        SpecbenchError: no such set or model, or an unreadable file.
    """
    found = load_prompts(name)
    tests: list[tuple[str, Callable[[], Finding]]] = [
        ("file", lambda: finding("file", [], f"{len(found.prompts):,} prompts with ids of their own")),
        ("captions", lambda: _captions(found)),
    ]
    if model:
        info = find_model(model)
        tests.append(("model", lambda: _read_by(info, found)))
    return run_tests(tests)


def _captions(found: PromptSet) -> Finding:
    """No caption stands twice: its images would count as those of two independent prompts."""
    texts = [prompt.text for prompt in found.prompts]
    repeated = len(texts) - len(set(texts))
    wrong = [f"{repeated:,} captions stand more than once: they count as independent prompts"] * bool(repeated)
    names = [prompt.category for prompt in found.prompts if prompt.category]
    fine = f"every caption once; {len(names):,} of {len(texts):,} prompts in {len(set(names))} categories"
    return finding("captions", wrong, fine)


def _read_by(info, found: PromptSet) -> Finding:
    try:
        info.check_prompts(found.prompts)
    except SpecbenchError as error:
        return finding("model", [error.what], "")
    return finding("model", [], f"{info.name} reads every prompt")
