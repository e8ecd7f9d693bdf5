"""Audit of a combination of components, and the order in which to audit many."""

import random
from collections.abc import Iterable
from itertools import combinations_with_replacement

from menu import ELSEWHERE, described

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.losslessness import audit_one
from specbench.models.interface import TokenLayout
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import Sampling

IMAGES = 20_000
SETTINGS = (
    AuditSetting("2x4 of 2, window wider than the image", TokenLayout.plain(2, 4, 2), window=12),
    AuditSetting("2x6 of 2 with row ends, window 3", TokenLayout.with_row_ends(2, 6, 2), Sampling(2.0), window=3),
    AuditSetting("4x4 of 2, window 4", TokenLayout.plain(4, 4, 2), window=4),
    AuditSetting("8x1 of 3, one-token rows, T by entropy, window 2", TokenLayout.with_row_ends(8, 1, 3),
     Sampling(1.0, entropy_scale=2.0), window=2),
    AuditSetting("2x2 of 4, window 1", TokenLayout.plain(2, 2, 4), Sampling(1.0, 0.8, 3), window=1),
)  # fmt: skip


def audit_combination(spec: DecoderSpec) -> dict[str, object]:
    """The row of `specbench.checks.losslessness.audit_decoders` of a combination, on SETTINGS."""
    return audit_one(described(spec), spec, IMAGES, seed=1, settings=SETTINGS)


def component_values(spec: DecoderSpec) -> set[str]:
    """Components and options of a decoder, each as "kind value"."""
    kinds = {f"{kind} {getattr(spec, kind)}" for kind in CHOICES if kind not in DRAFTERS[spec.drafter].ignores}
    return kinds | {f"{name} {value}" for name, value in spec.options.items() if name not in ELSEWHERE}


def value_pairs(spec: DecoderSpec) -> set[tuple[str, str]]:
    """Every one and every two of a decoder's `component_values`."""
    return set(combinations_with_replacement(sorted(component_values(spec)), 2))


def widest_first(decoders: Iterable[DecoderSpec], seed: int = 0) -> list[DecoderSpec]:
    """`decoders` so that few of them show every value and every pair of values; the others follow, shuffled."""
    left = list(decoders)
    random.Random(seed).shuffle(left)
    unseen = set().union(*map(value_pairs, left))
    chosen = []
    while unseen:
        best = max(left, key=lambda spec: len(value_pairs(spec) & unseen))
        left.remove(best)
        chosen.append(best)
        unseen -= value_pairs(best)
    return chosen + left
