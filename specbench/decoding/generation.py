"""Raw measurements of a decoded image. Derived numbers are defined in `specbench.stats`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from specbench.errors import SpecbenchError
from specbench.system.files import write_output
from specbench.system.images import png_bytes

SPANS = ("encode", "prefill", "target", "draft", "verify", "host", "render")
"""Names of the time spans in reporting order; `Generation.spans_ms` holds milliseconds.

encode: prompt to embeddings. prefill: prompt into the cache. target: target forwards with guidance. draft: filling the
window. verify: sampling, verification, refinement, commit, and recording, also of steps that are recorded together
after the last step. host: host time between steps. render: tokens to pixels.
"""


Order = Literal["u_id", "u_p", "u_pq", "u_qq"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Orders of the vocabulary in the Rosenblatt transform: token id; descending p; descending p / q; descending q / q'. q
is the distribution of the tested draft, q' the distribution of the same slot's draft one step before. `u_pq` and `u_qq`
are NaN in slots without a tested draft; `u_qq` also if the draft is new in the step that tests it."""


@dataclass
class Generation:
    """One decoded image and its measurements. The fields are columns of its row; docs/results-format.md explains them.
    N stream slots, window W."""

    # tokens, forced, logp, entropy, top1, committed_step: [N]
    tokens: np.ndarray = field(repr=False)
    forced: np.ndarray = field(repr=False)
    logp: np.ndarray = field(repr=False)
    entropy: np.ndarray = field(repr=False)
    top1: np.ndarray = field(repr=False)
    committed_step: np.ndarray = field(repr=False)
    nfe: int
    prefills: int
    # drafted, tested, accepted: [W]
    drafted: np.ndarray = field(repr=False)
    tested: np.ndarray = field(repr=False)
    accepted: np.ndarray = field(repr=False)
    spans_ms: dict[str, float]  # milliseconds by span name; an image's share is the number divided by `batch`
    batch: int
    facts: dict[str, float] = field(default_factory=dict)
    # [N] u_i of the Rosenblatt transform by order, see `ORDERS`; an order is absent if no slot has it
    uniforms: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    # draft_tv, draft_top1: [N] total variation between p and the q of the draft tested in the slot, and the largest
    # probability of that q; NaN in slots without a tested draft; None unless traced
    draft_tv: np.ndarray | None = field(default=None, repr=False)
    draft_top1: np.ndarray | None = field(default=None, repr=False)
    image: np.ndarray | None = field(default=None, repr=False)  # uint8 [3, H, W] pixels, once rendered

    def save(self, path: str | Path) -> Path:
        """Write the picture as a PNG file, and return its path."""
        if self.image is None:
            raise SpecbenchError("this image was not rendered", "decode it with render=True")
        write_output(Path(path), png_bytes(self.image.transpose(1, 2, 0)))
        return Path(path)

    @property
    def committed(self) -> int:
        """Number of committed stream tokens, including forced tokens."""
        return len(self.tokens)
