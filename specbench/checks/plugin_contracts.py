"""Conformance tests of whatever a plug-in may bring: decoders, a model, a metric, a prompt set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


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
        from specbench.checks.decoder_contract import check_named  # brings torch

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
        from specbench.checks.prompt_contract import prompt_findings  # only for prompt sets

        announce(prompts)
        yield from ({"name": prompts, "kind": "prompts", **vars(one)} for one in prompt_findings(prompts, model))
