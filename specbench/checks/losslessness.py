"""Is a decoder lossless? Decode models small enough to enumerate; compare the images with the exact joint.

Nothing here trusts what a decoder says of itself: the real loop runs and its images are counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specbench.checks.divergence import LEVEL, Counts, chi_square, detectable_tv, p_value, total_variation
from specbench.checks.enumerable_model import EnumerableModel, image_index, joint
from specbench.decoding.generation import Generation
from specbench.decoding.loop import Request, decode
from specbench.errors import SpecbenchError
from specbench.models.interface import ImageModel, TokenLayout
from specbench.specs import plugin_decoders
from specbench.specs.presets import DecoderSpec, Preset, resolve
from specbench.specs.run_spec import Sampling
from specbench.system import plugins

SAMPLES = 200_000
BATCH = 16_384


@dataclass(frozen=True)
class Case:
    """One setting of the audit: `tables` random models of one layout, decoded under one sampling.

    `window` replaces the decoder's own where it has that option; None keeps it.
    """

    name: str
    layout: TokenLayout
    sampling: Sampling = field(default_factory=lambda: Sampling(guidance=1.0))
    window: int | None = None
    tables: int = 1


CASES = (
    Case("1x3 of 6, window 3", TokenLayout.plain(1, 3, 6), window=3),
    Case("2x2 of 3 with row ends", TokenLayout.with_row_ends(2, 2, 3), tables=2),
    Case(
        "1x5 of 3 with row end, guided, top-p, window 4",
        TokenLayout.with_row_ends(1, 5, 3),
        Sampling(2.0, 1.0, 0, 0.9),
        window=4,
    ),
    Case("2x2 of 4 with row ends, T 0.8, top-k 3", TokenLayout.with_row_ends(2, 2, 4), Sampling(1.0, 0.8, 3)),
)


Decode = Callable[[ImageModel, Sequence[Request], Sampling, int], Sequence[Generation] | np.ndarray]
Auditable = str | DecoderSpec | Decode


def audit(decoders: Sequence[Auditable], samples: int = SAMPLES, seed: int = 0) -> list[dict[str, object]]:
    """Decode `samples` images of enumerable models with each decoder and judge whether it keeps their joint.

    Args:
        decoders: preset names, resolved specs, or a user's decoder, also as "package.module:Name". That is a
            `Preset`, a `DecoderSpec`, or a function `(model, requests, sampling, seed)` that returns one
            `Generation` per request, or all stream tokens as an array [B, N].
        samples: images per decoder, spread evenly over the audit's models.
        seed: of the models and of the noise.

    Returns:
        One dict per decoder: `decoder`, `verdict` ("lossless" unless the test rejects at LEVEL, then
        "lossy"), `tv, tv_low, tv_high` (mean total variation over the models, as `total_variation` defines
        it), `samples`, `p_value`, `detectable_tv` (a distance the test would have found with probability
        POWER), `models`, and `declared` (what the spec says of itself; None for a user decoder).

    Raises:
        SpecbenchError: an unknown decoder, or too few samples to say anything.
    """
    if samples < 1000:
        raise SpecbenchError(f"--samples {samples}: an audit needs at least 1000", f"default: {SAMPLES}")
    return [audit_one(*load_decoder(decoder), samples, seed) for decoder in decoders]


def audit_one(name: str, decoder: DecoderSpec | Decode, samples: int, seed: int) -> dict[str, object]:
    """The same for one decoder as `load_decoder` gives it."""
    models = sum(case.tables for case in CASES)
    tables = [counts for case in CASES for counts in observe(case, decoder, samples // models, seed)]
    tv, low, high = total_variation(tables)
    seen = sum(int(counts.total.sum()) for counts in tables)
    p = p_value(tables)
    declared = getattr(decoder, "lossless", None)
    return {
        "decoder": name,
        "verdict": "lossy" if p < LEVEL else "lossless",
        "tv": tv,
        "tv_low": low,
        "tv_high": high,
        "samples": seen,
        "p_value": p,
        "detectable_tv": detectable_tv(sum(chi_square(counts)[1] for counts in tables), seen),
        "models": models,
        "declared": None if declared is None else ("lossless" if declared else "lossy"),
    }


def load_decoder(decoder: Auditable) -> tuple[str, DecoderSpec | Decode]:
    """The decoder's printed name and what to run."""
    if isinstance(decoder, DecoderSpec):
        return decoder.name, decoder
    if not isinstance(decoder, str):
        return getattr(decoder, "__name__", type(decoder).__name__), decoder
    if ":" not in decoder:
        return decoder, resolve(decoder)
    found = plugins.load_user_object(decoder, "decoder")
    if isinstance(found, Preset):
        return decoder, resolve(plugin_decoders.decoder_name(decoder))
    if not isinstance(found, DecoderSpec) and not callable(found):
        raise SpecbenchError(
            f"decoder '{decoder}' is a {type(found).__name__}",
            "name a Preset, a DecoderSpec or a function (model, requests, sampling, seed) -> tokens [B, N]",
        )
    return decoder, found


def observe(case: Case, decoder: DecoderSpec | Decode, samples: int, seed: int, batch: int = BATCH) -> list[Counts]:
    """Decode `samples` images of each of the case's tables, `batch` rows at a time, and count them."""
    names = tuple(f"table {number}" for number in range(case.tables))
    model = EnumerableModel(case.layout, names, seed=zlib.crc32(case.name.encode()) + seed)
    requests = [Request(name, f"{case.name} {name}", sample) for sample in range(samples) for name in names]
    cells = case.layout.v_image ** len(case.layout.free_slots())
    observed = np.zeros((case.tables, 2, cells + 1), dtype=np.int64)
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        cell = _cells(_tokens(model, part, decoder, case, seed), case.layout)
        number = np.arange(start, start + len(part))
        np.add.at(observed, (number % case.tables, number // case.tables % 2, cell), 1)
    exact = [np.append(joint(model, case.sampling, name), 0.0) for name in names]
    return [Counts(seen, truth) for seen, truth in zip(observed, exact, strict=True)]


def _tokens(model, requests, decoder: DecoderSpec | Decode, case: Case, seed: int) -> np.ndarray:
    """Stream tokens [B, N] of the requests."""
    if isinstance(decoder, DecoderSpec):
        spec = with_window(decoder, case.window)
        decoded = decode(model, requests, spec, case.sampling, seed, render=False)
    else:
        decoded = decoder(model, requests, case.sampling, seed)
    for row in decoded:
        if isinstance(row, SpecbenchError):
            raise row
    if len(decoded) and isinstance(decoded[0], Generation):
        decoded = np.stack([generation.tokens for generation in decoded])
    return np.asarray(decoded)


def with_window(spec: DecoderSpec, window: int | None) -> DecoderSpec:
    """The same decoder with another window, where it has one."""
    options = dict(spec.options)
    if window is None or "window" not in options:
        return spec
    return replace(spec, options=tuple(sorted((options | {"window": window}).items())))


def _cells(tokens: np.ndarray, layout: TokenLayout) -> np.ndarray:
    """Joint cell of each stream [B, N]; a stream that breaks the grammar falls into the extra last cell."""
    free = layout.free_slots()
    forced = np.array(layout.forced)
    image = tokens[:, free]
    legal = (tokens == forced)[:, forced >= 0].all(1) & ((image >= 0) & (image < layout.v_image)).all(1)
    index = image_index(np.where(legal[:, None], image, 0), layout.v_image)
    return np.where(legal, index, layout.v_image ** len(free))
