"""Dry run: the runs of plans, and how many of their images the results folder has (`specbench run --dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.runs.plan import Plan
from specbench.store.run_store import RunStore


def planned_runs(plans: Sequence[Plan]) -> list[dict[str, object]]:
    """List the distinct runs of `plans`; nothing is decoded.

    Returns:
        One dict per run: `run_id, model, decoder, options, lossless, prompts, images, done`. `run_id` and `done` are
        None while `--window auto` has not chosen a window.
    """
    rows = [row for plan in plans for row in _runs(plan)]
    return [row for place, row in enumerate(rows) if row not in rows[:place]]


def _runs(plan: Plan) -> list[dict[str, object]]:
    weights = plan.model.weights_sha256()
    wanted = {request.key for request in plan.requests}
    rows = []
    for planned in plan.decoders:
        run_id, done = None, None
        if not planned.auto_window:
            run_id = plan.spec(planned.spec, weights).run_id
            done = len(wanted & RunStore(plan.out / run_id).completed(plan.trace))
        rows.append(
            {
                "run_id": run_id,
                "model": plan.model.name,
                "decoder": planned.spec.name,
                "options": dict(planned.spec.options) | ({"window": "auto"} if planned.auto_window else {}),
                "lossless": planned.spec.lossless,
                "prompts": plan.prompts.name,
                "images": len(wanted),
                "done": done,
            }
        )
    return rows
