"""Conformance tests of whatever a plug-in may bring: of a prompt set here, and those of decoders, models and metrics,
each in a module of its own that brings what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbench.checks.findings import Finding, finding, run_tests
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.prompts import PromptSet, load_prompts


def check_all(
    decoders: Sequence[str] | str = (),
    samples: int | None = None,
    model: str | None = None,
    metric: str | None = None,
    prompts: str | None = None,
    announce: Callable[[str], None] = lambda name: None,
) -> list[dict[str, object]]:
    """Run the conformance tests on decoders, a model, a metric or a prompt set.

    Args:
        decoders: names with inline options if wanted, or your own as "package.module:NAME".
        samples: images for the losslessness test of decoders; None takes the default of `specbench check`.
        model, metric: names, or your own as "package.module:NAME".
        prompts: likewise; tested, and used for the tests of the model and the metric.
        announce: called with each name before its tests.

    Returns:
        One dict per name and test: `name, kind, check, status, detail`, and `decoder` of a decoder.

    Raises:
        SpecbenchError: a name that is unknown, or something that must be installed first.
    """
    rows: list[dict[str, object]] = []
    if decoders:
        from specbench.checks.decoder_contract import check_named  # brings transformers and the decode loop

        named = check_named([decoders] if isinstance(decoders, str) else decoders, samples, announce)
        rows += [{"name": row["decoder"], "kind": "decoder", **row} for row in named]
    if model:
        from specbench.checks.model_contract import model_findings  # brings torch

        announce(model)
        rows += [{"name": model, "kind": "model", **vars(finding)} for finding in model_findings(model, prompts)]
    if metric:
        from specbench.checks.metric_contract import metric_findings  # brings pandas

        announce(metric)
        rows += [{"name": metric, "kind": "metric", **vars(finding)} for finding in metric_findings(metric, prompts)]
    if prompts:
        announce(prompts)
        rows += [{"name": prompts, "kind": "prompts", **vars(finding)} for finding in prompt_findings(prompts, model)]
    return rows


def prompt_findings(name: str, model: str | None = None) -> list[Finding]:
    """Run every conformance test on a prompt set: ids, captions, and whether a model reads them. `name`: of a set, a
    file, or "package.module:NAME". `model`: that must be able to read them; none if None."""
    prompt_set = load_prompts(name)
    tests: list[tuple[str, Callable[[], Finding]]] = [
        ("file", lambda: finding("file", [], f"{len(prompt_set.prompts):,} prompts with ids of their own")),
        ("captions", lambda: _captions(prompt_set)),
    ]
    if model:
        info = find_model(model)
        tests.append(("model", lambda: _read_by(info, prompt_set)))
    return run_tests(tests)


def _captions(prompt_set: PromptSet) -> Finding:
    """No caption stands twice: its images would count as those of two independent prompts."""
    texts = [prompt.text for prompt in prompt_set.prompts]
    repeated = len(texts) - len(set(texts))
    wrong = [f"{repeated:,} captions stand more than once: they count as independent prompts"] * bool(repeated)
    names = [prompt.category for prompt in prompt_set.prompts if prompt.category]
    fine = f"every caption once; {len(names):,} of {len(texts):,} prompts in {len(set(names))} categories"
    return finding("captions", wrong, fine)


def _read_by(info, prompt_set: PromptSet) -> Finding:
    try:
        info.check_prompts(prompt_set.prompts)
    except SpecbenchError as error:
        return finding("model", [error.what], "")
    return finding("model", [], f"{info.name} reads every prompt")
