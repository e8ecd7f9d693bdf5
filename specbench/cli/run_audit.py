"""`specbench audit --run`: the audit of stored runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.cli.options import print_json, print_table
from specbench.errors import GATE, SpecbenchError
from specbench.reporting.columns import number, with_interval
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.


def audit_runs(
    runs: Sequence[str],
    out: str,
    recompute: bool,
    weights: str | None,
    revision: str | None,
    device: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Audit stored runs, print the table, and fail where a decoder that claims to be lossless deviates.

    Raises:
        SpecbenchError: exit code 4 where a lossless claim failed; whatever `audit_run` raises.
    """
    from specbench import api

    rows = api.audit_runs(runs, out, recompute, weights, revision, device)
    if as_json:
        print_json(rows)
    else:
        print_table([_cells(row) for row in rows], _HEADINGS)
        if not quiet:
            for row in rows:
                for line in notes(row):
                    console.say(f"{row['run_id']}: {line}")
    failed = [str(row["run_id"]) for row in rows if row["failed"]]
    if failed:
        raise SpecbenchError(
            f"declared lossless, but the tokens deviate from the model's distribution: {', '.join(failed)}",
            "the table has the order, place and entropy that deviate most",
            GATE,
        )


_HEADINGS = (
    "run",
    "declared",
    "verdict",
    "tv at least",
    "p_value",
    "order",
    "place",
    "entropy",
    "detectable",
    "images",
)


def _cells(row: Mapping) -> dict[str, object]:
    deviates = row["deviates"]
    return {
        "run": row["run_id"],
        "declared": row["declared"],
        "verdict": row["verdict"],
        "tv at least": with_interval(row["tv"], row["tv_low"], row["tv_high"], 4),
        "p_value": f"{row['p_value']:.2g}",
        "order": row["order"] if deviates else "-",
        "place": row["place"] or "-",
        "entropy": row["entropy"] or "-",
        "detectable": number(row["detectable"], 4),
        "images": row["images"],
    }


def notes(row: Mapping) -> list[str]:
    """Results that have no column in the table, one line each."""
    lines = []
    if row["recomputed"]:
        lines.append(f"p recomputed in float32; orders that need q are unavailable: {', '.join(row['unavailable'])}")
        lines += [
            f"recorded against recomputed values ({order}): {held['mean']:.2g} apart on average, "
            f"{held['beyond']:.2%} of the tokens by more than 0.01"
            for order, held in row["agreement"].items()
        ]
    if row["kind"] in ("serial", "images") and row["deviates"]:
        before = f"token {row['group']} tokens before" if row["kind"] == "serial" else "same token of the image before"
        lines.append(f"the values depend on those of the {before}")
    if not row["deviates"]:
        lines.append(
            f"no deviation at level {row['level']:g}; one of {row['detectable']:.3f} per token in one of these orders "
            "would have been found with probability 0.95"
        )
    return lines
