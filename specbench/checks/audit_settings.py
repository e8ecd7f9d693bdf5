"""Audit settings: models whose images can be enumerated, and how they are decoded.

A draft enters at the end of the window. In an image of several windows, a draft is refined for several steps before its
test, so seven settings use images of at least four windows. In four settings, the window is wider than the image.
"""

import zlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np

from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer, joint
from specbench.models.interface import TokenLayout
from specbench.specs.options import Options
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import FILTERS, SAMPLING, Sampling


@dataclass(frozen=True)
class AuditSetting:
    """One setting of the audit."""

    name: str  # printed; also part of the random model's seed
    # layout: grammar of the stream; sampling: guidance, temperature, top-k, top-p
    layout: TokenLayout
    sampling: Sampling = field(default_factory=lambda: Sampling(guidance=1.0))
    window: int | None = None  # value for the decoder's window option, if it has this option; None: unchanged
    tables: int = 1  # number of random models, one per prompt of a batch
    # "tables": a random table per prefix; "transformer": small, with a KV cache
    model: Literal["tables", "transformer"] = "tables"
    sharpness: float = 1.5  # standard deviation of the tables' logits
    # standard deviation of the part of a slot's logits that all prefixes share. If it is large, drafts drawn after
    # another prefix are often kept for several steps, as with real models
    shared: float = 0.0
    grain: float = 0.0  # round the tables' logits to multiples of this value, to cause ties; 0: not rounded
    share: float = 1.0  # number of images, as a multiple of the usual number
    batch: int = 0  # maximum number of images decoded together; 0: the audit chooses
    rows: int = 0  # decode this many images at a time with continuous batching; 0: whole batches
    trace: bool = False  # record per-token traces, as `specbench run --trace` does
    compiled: bool = False  # compile the steps, as `specbench run --compile on` does; only for the transformer


_plain, _row_ends = TokenLayout.plain, TokenLayout.with_row_ends
_TRANSFORMER = AuditSetting(
    "2x4 of 2 with row ends, transformer, guided, window 2, continuous batching", _row_ends(2, 4, 2), Sampling(2.0), 2,
    # rows is odd: if all rows end in the same step, as with AR, each row continues with an image of the other prompt.
    tables=2, model="transformer", rows=511,
)  # fmt: skip
LONE_SETTING = AuditSetting(
    "2x3 of 2 with row ends, guided, window 3, one image at a time", _row_ends(2, 3, 2), Sampling(2.0), 3, share=0.015,
    batch=1,
)  # fmt: skip
"""Tests the code for batches of one image. The tokens must also equal the tokens of these images in larger batches."""
_KEPT_8 = "1x4 of 8, drafts kept for several steps, window 8"
_KEPT_10 = "1x10 of 2, drafts kept for several steps, window 12"
_MID_ROWS = TokenLayout(3, 4, 2, (-1, -1, 3, -1, -1, 2) * 3)
_PREVIEW = TokenLayout.plain(2, 3, 2, before=((1, 2),))
_WIDE_ROW = replace(
    _TRANSFORMER,
    name="2x4 of 2 with a row end, transformer, guided, window 4, continuous batching",
    layout=TokenLayout(2, 4, 2, (-1,) * 4 + (2,) + (-1,) * 4),
    window=4,
)
AUDIT_SETTINGS: tuple[AuditSetting, ...] = (
    AuditSetting("1x3 of 6, window wider than the image", _plain(1, 3, 6), window=8),
    AuditSetting("2x4 of 2, window wider than the image", _plain(2, 4, 2), window=12),
    AuditSetting("2x4 of 3 with row ends, guided, window 2", _row_ends(2, 4, 3), Sampling(2.0), 2),
    AuditSetting("3x4 of 2, grammar tokens within and after rows, window 3", _MID_ROWS, window=3),
    AuditSetting(
        "4x4 of 2 with row ends, T 0.8, window 4, continuous batching",
        _row_ends(4, 4, 2),
        Sampling(1.0, 0.8),
        4,
        rows=1024,
    ),
    AuditSetting(
        "2x4 of 3, guided, T 0.7, ties at top-k 2, window 2", _plain(2, 4, 3), Sampling(2.0, 0.7, 2), 2, grain=1.0
    ),
    AuditSetting(
        "4x3 of 2, guided, T 0.8, top-p 0.8, window 3, traced",
        _plain(4, 3, 2),
        Sampling(1.5, 0.8, 0, 0.8),
        3,
        trace=True,
    ),
    AuditSetting("1x5 of 4, window 3", _plain(1, 5, 4), window=3),
    AuditSetting(_KEPT_8, _plain(1, 4, 8), window=8, sharpness=0.5, shared=1.0, share=2.0),
    AuditSetting(_KEPT_10, _plain(1, 10, 2), window=12, sharpness=0.8, shared=1.0, share=0.5),
    AuditSetting(
        "2x2 of 4, ties at top-p 0.6, window 2",
        _plain(2, 2, 4),
        Sampling(1.0, top_p=0.6),
        2,
        sharpness=1.0,
        grain=1.0,
        share=0.5,
    ),
    AuditSetting(
        "1x4 of 5, T by entropy, top-n-sigma 1.2, min-p 0.4, window 2",
        _plain(1, 4, 5),
        Sampling(1.0, entropy_scale=0.5, min_p=0.4, top_n_sigma=1.2),
        2,
        share=0.5,
    ),
    LONE_SETTING,
    AuditSetting("8x1 of 3, one-token rows, window 2", _row_ends(8, 1, 3), window=2),
    _TRANSFORMER,
    _WIDE_ROW,
    AuditSetting("1x2 preview, then 2x3 of 2, window 3", _PREVIEW, window=3, shared=1.0, share=0.5),
)
_audited = {name for setting in AUDIT_SETTINGS for name in setting.sampling.filters}
AUDIT_SETTINGS += tuple(
    AuditSetting(
        f"1x4 of 5, {SAMPLING[name].name} {SAMPLING[name].audited:g}, window 2",
        _plain(1, 4, 5),
        replace(Sampling(1.0), **{name: cast(Any, SAMPLING[name].audited)}),
        2,
        share=0.5,
    )
    for name in FILTERS
    if name not in _audited
)

DEVICE_SETTINGS = (
    replace(
        _TRANSFORMER,
        name="2x4 of 2 with row ends, transformer, window 2, one prompt",
        sampling=Sampling(guidance=1.0),
        tables=1,
        rows=0,
    ),
)
"""Audited by `make gpu`. With rows of equal length, a single column needs no mask; a GPU also reads unfilled slots."""

COMPILED_SETTINGS = (
    replace(
        _TRANSFORMER,
        name="2x4 of 2 with row ends, transformer, guided, window 3, continuous batching, compiled",
        window=3,
        compiled=True,
    ),
)
"""Audited only on request, because a decoder's steps take up to a minute to compile."""


@lru_cache(maxsize=32)
def setting_model(setting: AuditSetting, seed: int) -> tuple[EnumerableModel | EnumerableTransformer, list[np.ndarray]]:
    """Return the setting's model, and the exact joint distribution [cells] of each table of the model."""
    names = tuple(f"table {number}" for number in range(setting.tables))
    seed = zlib.crc32(setting.name.encode()) + seed
    if setting.model == "transformer":
        transformer = EnumerableTransformer(setting.layout, names, seed)
        if setting.compiled:
            transformer.compile()
        return transformer, [transformer.joint(setting.sampling, name) for name in names]
    model = EnumerableModel(setting.layout, names, setting.sharpness, seed, setting.grain, setting.shared)
    return model, [joint(model, setting.sampling, name) for name in names]


def in_window(spec: DecoderSpec, window: int | None) -> DecoderSpec:
    """Return the decoder with another window, if it has a window. ZipAR's window is in tokens of an image row."""
    changed = {"window", "rows-window"} & spec.options.keys()
    if window is None or not changed:
        return spec
    return replace(spec, options=Options(spec.options | dict.fromkeys(changed, window)))
