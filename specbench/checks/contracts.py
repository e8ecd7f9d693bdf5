"""Conformance tests of whatever a plug-in may bring: of a prompt set here, and those of decoders, models and metrics,
each in a module of its own that brings what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specbench.checks.findings import Finding, finding, run_tests
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.prompts import PromptSet, load_prompts


def check_all(
    decoders: Sequence[str],
    model: str | None,
    metric: str | None,
    prompts: str | None,
    samples: int,
    announce: Callable[[str], None] | None = None,
) -> Iterator[dict[str, object]]:
    """Yield `name, kind, check, status, detail` of every test.

    Args:
        prompts: tested, and used for the tests of the model and the metric.
        samples: images for the losslessness test of decoders.
        announce: called with each name before its tests.

    Raises:
        SpecbenchError: a name that is unknown, or something that must be installed first.
    """
    announce = announce or (lambda name: None)
    if decoders:
        from specbench.checks.decoder_contract import check_named  # brings transformers and the decode loop

        for row in check_named(decoders, samples, announce):
            yield {"name": row["decoder"], "kind": "decoder", **row}
    if model:
        from specbench.checks.model_contract import model_findings  # brings torch

        announce(model)
        yield from ({"name": model, "kind": "model", **vars(one)} for one in model_findings(model, prompts))
    if metric:
        from specbench.checks.metric_contract import metric_findings  # brings pandas

        announce(metric)
        yield from ({"name": metric, "kind": "metric", **vars(one)} for one in metric_findings(metric, prompts))
    if prompts:
        announce(prompts)
        yield from ({"name": prompts, "kind": "prompts", **vars(one)} for one in prompt_findings(prompts, model))


def prompt_findings(name: str, model: str | None = None) -> list[Finding]:
    """Run every conformance test on a prompt set: ids, captions, and whether a model reads them.

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
