"""Conformance tests for decoders, models and metrics of plug-ins. The module for each kind is imported only if it is
needed."""

from collections.abc import Callable, Sequence


def check_all(
    decoders: Sequence[str] | str = (),
    samples: int | None = None,
    model: Sequence[str] | str | None = None,
    metric: Sequence[str] | str | None = None,
    prompts: str | None = None,
    announce: Callable[[str], None] = lambda name: None,
) -> list[dict[str, object]]:
    """Run the conformance tests on decoders, models and metrics.

    Args:
        decoders: names, optionally with inline options, or "package.module:NAME" for your own.
        samples: images for the losslessness test of decoders; None takes the default of `specbench check`.
        model, metric: names, or "package.module:NAME" for your own.
        prompts: prompt set or file for the tests of the models and the metrics.
        announce: called with each name before its tests.

    Returns:
        One dict per name and test: `name, kind, check, status, detail`, and for decoders also `decoder`.

    Raises:
        SpecbenchError: an unknown name, or a missing package or file.
    """
    rows: list[dict[str, object]] = []
    if decoders:
        from specbench.checks.decoder_contract import check_named  # imports transformers and the decode loop

        named = check_named([decoders] if isinstance(decoders, str) else decoders, samples, announce)
        rows += [{"name": row["decoder"], "kind": "decoder", **row} for row in named]
    for name in [model] if isinstance(model, str) else model or ():
        from specbench.checks.model_contract import model_findings  # imports torch

        announce(name)
        rows += [{"name": name, "kind": "model", **vars(finding)} for finding in model_findings(name, prompts)]
    for name in [metric] if isinstance(metric, str) else metric or ():
        from specbench.checks.metric_contract import metric_findings  # imports pandas

        announce(name)
        rows += [{"name": name, "kind": "metric", **vars(finding)} for finding in metric_findings(name, prompts)]
    return rows
