"""Raw measurements of one decoded image. Derived numbers are defined in `specbench.stats`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specbench.system.files import write_output
from specbench.system.images import png_bytes

SPANS = ("encode", "prefill", "target", "draft", "verify", "host", "render")
"""Names of the time spans in reporting order; `Generation.spans_ms` holds milliseconds.

encode: prompt to embeddings. prefill: prompt into the cache. target: target forwards with guidance. draft: filling the
window. verify: sampling, verification, refinement, commit, and the recording of every step, also of those that are
recorded together after the last one. host: host time between steps. render: tokens to pixels.
"""


ORDERS = ("u_id", "u_p", "u_pq", "u_qq")
"""Orders of the vocabulary in the Rosenblatt transform: token id; p descending; p / q descending, q being the
distribution of the tested draft; q / q' descending, q' being the distribution of the same slot's draft one step before.
The last two are NaN in slots without a tested draft, `u_qq` also where the draft is new in the step that tests it."""


@dataclass
class Generation:
    """One decoded image and its measurements. N stream slots, window W.

    Attributes:
        tokens: [N] int32 stream tokens, forced grammar tokens included.
        forced: [N] bool, True where the grammar forces the token; such slots are left out of statistics.
        logp: [N] float32 log p of the committed token under the processed target distribution (guidance, temperature,
            top-k, top-p) given its final prefix; -inf if a lossy decoder committed a token outside its support.
        entropy: [N] float32 entropy of that distribution, in nats.
        top1: [N] float32 its largest probability.
        committed_step: [N] int32, 1-based target forward that committed the slot.
        nfe: target forwards after prefill (a guidance pair counts once).
        prefills: prefill forwards.
        drafted, tested, accepted: [W] int64, by window offset: drafts that existed, that were tested (all earlier ones
            accepted), that were accepted. Forced slots are not counted.
        facts: extra per-image numbers. `rounds`: target forwards that had drafts to verify. `draft_tv_d`: total
            variation between p and q at depth d of a step, estimated from the first drafts tested there.
            `theorem2_bound`: Cool-SD's bound on the distance to the exact image distribution, summed over the image,
            assuming the optimal residual. `sibling_j_tested`, `sibling_j_accepted`: number of j-th siblings tested, and
            the share accepted. `stage2_nfe`, `stage2_ms`, `stage2_tested`, `stage2_accepted`: of a second stage, see
            `specbench.decoding.loop.second_stage_facts`. `caption_tokens_cut`: tokens of the caption that the model did
            not read. Others are means over the drafts tested, for example of the cluster size.
        spans_ms: milliseconds by span name; when `batch` > 1, each is divided by `batch`.
        batch: rows decoded together.
        uniforms: [N] float32 u_i of the Rosenblatt transform (`specbench.decoding.uniforms`) by order, see `ORDERS`;
            an order is absent where no slot has it.
        draft_tv: [N] float32 total variation between p and the q of the draft tested in the slot, NaN where none was;
            None unless traced.
        draft_top1: [N] float32 largest probability of that q, likewise.
        image: uint8 [3, H, W] pixels, once rendered.
    """

    tokens: np.ndarray = field(repr=False)
    forced: np.ndarray = field(repr=False)
    logp: np.ndarray = field(repr=False)
    entropy: np.ndarray = field(repr=False)
    top1: np.ndarray = field(repr=False)
    committed_step: np.ndarray = field(repr=False)
    nfe: int
    prefills: int
    drafted: np.ndarray = field(repr=False)
    tested: np.ndarray = field(repr=False)
    accepted: np.ndarray = field(repr=False)
    spans_ms: dict[str, float]
    batch: int
    facts: dict[str, float] = field(default_factory=dict)
    uniforms: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    draft_tv: np.ndarray | None = field(default=None, repr=False)
    draft_top1: np.ndarray | None = field(default=None, repr=False)
    image: np.ndarray | None = field(default=None, repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the picture as a PNG file, and return its path."""
        write_output(Path(path), png_bytes(self.image.transpose(1, 2, 0)))
        return Path(path)

    @property
    def committed(self) -> int:
        """Stream tokens committed, forced ones included."""
        return len(self.tokens)
