"""Audit of losslessness: decode enumerable models, and compare the images with the exact joint distribution.

What the decoder declares is not used: the real decode loop runs and its images are counted.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch

from specbench.checks.audit_settings import AUDIT_SETTINGS, COMPILED_SETTINGS, AuditSetting, in_window, setting_model
from specbench.checks.divergence import AUDIT_LEVEL, Counts, detectable_tv, p_value, total_variation
from specbench.checks.enumerable_model import image_index
from specbench.decoding.build import build
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.generation import Generation
from specbench.decoding.loop import decode_tokens
from specbench.errors import SpecbenchError
from specbench.models.interface import ImageModel, TokenLayout
from specbench.prompts import Request
from specbench.runs.decoder_args import labelled_decoders
from specbench.specs.presets import PRESETS, DecoderSpec, Preset, decoder_name, resolve
from specbench.specs.run_spec import Sampling
from specbench.system import plugins

AUDIT_SAMPLES = 220_000
"""Images per decoder: 20,000 of each setting."""
_BATCH = 8192
SMALL_ENOUGH = 0.05
"""An audit calls a decoder lossless only where its `detectable_tv` is at most this, which takes some 15,000 images."""
LOSSLESS, LOSSY, UNSEEN = "lossless", "lossy", "no deviation seen"

Decode = Callable[[ImageModel, Sequence[Request], Sampling, int], Sequence[Generation] | np.ndarray]
Auditable = str | DecoderSpec | Decode


def audit_decoders(
    decoders: Sequence[Auditable], samples: int = AUDIT_SAMPLES, seed: int = 0, workers: int = 1, compiled: bool = False
) -> list[dict[str, object]]:
    """Decode `samples` images of enumerable models with each decoder and judge whether it keeps their joint
    distribution.

    Args:
        decoders: preset names, resolved specs, or a user's decoder, also as "package.module:Name". That is a
            `Preset`, a `DecoderSpec`, or a function `(model, requests, sampling, seed)` that returns one
            `Generation` per request, or all stream tokens as an array [B, N].
        samples: images per decoder, spread evenly over the audit's settings.
        seed: of the models and of the noise.
        workers: processes that share the decoders, on Linux.
        compiled: also audit compiled steps (COMPILED_SETTINGS).

    Returns:
        One dict per decoder: `decoder`, `verdict` (see `audit_verdict`), `tv, tv_low, tv_high` (mean total variation
        over the settings, as `total_variation` defines it), `samples`, `p_value`, `detectable_tv` (a distance the test
        would have found with probability AUDIT_POWER), `models`, `declared` (what the spec says of itself; None for a
        user decoder), `worst_setting` (the one with the smallest p-value), and `refused` (settings whose model the
        decoder does not accept).

    Raises:
        SpecbenchError: an unknown decoder, one that accepts no setting, or too few samples.
    """
    if samples < 1000:
        raise SpecbenchError(f"--samples {samples}: must be at least 1000", f"default: {AUDIT_SAMPLES}")
    return list(audit_each(decoders, samples, seed, workers, compiled))


def audit_each(
    decoders: Sequence[Auditable], samples: int, seed: int, workers: int, compiled: bool = False
) -> Iterator[dict[str, object]]:
    """Yield the rows of `audit_decoders` in order, each as soon as it and the rows before it are complete."""
    settings = (*AUDIT_SETTINGS, *COMPILED_SETTINGS) if compiled else AUDIT_SETTINGS
    work = [(*load_decoder(decoder), samples, seed, settings) for decoder in decoders]
    # A forked process inherits plug-ins and imports.
    if min(workers, len(work)) < 2 or sys.platform != "linux":
        yield from (audit_one(*one) for one in work)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(workers, len(work)), context, torch.set_num_threads, (1,)) as pool:
        jobs = [pool.submit(audit_one, *one) for one in work]
        try:
            yield from (job.result() for job in jobs)
        finally:
            for job in jobs:
                job.cancel()


def audit_named(
    names: Sequence[str] = (), samples: int = AUDIT_SAMPLES, seed: int = 0, workers: int = 1, compiled: bool = False
) -> Iterator[dict[str, object]]:
    """Yield the rows of `audit_decoders` for decoders named as on the command line, under those names; all if empty.

    Raises:
        SpecbenchError: what `audit_decoders` raises, or a number out of range.
    """
    named = labelled_decoders(names or list(PRESETS))
    if samples < 1000:
        raise SpecbenchError(f"--samples {samples}: must be at least 1000", f"default: {AUDIT_SAMPLES}")
    if seed < 0:
        raise SpecbenchError(f"--seed {seed}: must be at least 0")
    rows = audit_each([decoder for _, decoder in named], samples, seed, workers, compiled)
    for (label, _), row in zip(named, rows, strict=True):
        yield row | {"decoder": label}


def audit_one(
    name: str,
    decoder: DecoderSpec | Decode,
    samples: int,
    seed: int,
    settings: Sequence[AuditSetting] | None = None,
) -> dict[str, object]:
    """Audit a decoder of `load_decoder` on AUDIT_SETTINGS or other settings; see `audit_decoders` for the row."""
    settings = settings or AUDIT_SETTINGS
    refused = _refused(decoder, settings, seed)
    counts = {
        setting.name: observe(setting, decoder, samples // len(settings) // setting.tables, seed)
        for setting in settings
        if setting.name not in refused
    }
    tables = [table for own in counts.values() for table in own]
    tv, low, high = total_variation(tables)
    p, detectable = p_value(tables), detectable_tv(tables)
    lossless = getattr(decoder, "lossless", None)
    declared = None if lossless is None else (LOSSLESS if lossless else LOSSY)
    return {
        "decoder": name,
        "verdict": audit_verdict(p, detectable, declared),
        "tv": tv,
        "tv_low": low,
        "tv_high": high,
        "samples": sum(int(table.total.sum()) for table in tables),
        "p_value": p,
        "detectable_tv": detectable,
        "models": len(tables),
        "declared": declared,
        "worst_setting": min(counts, key=lambda setting: p_value(counts[setting])),
        "refused": refused,
    }


def audit_verdict(p: float, detectable: float, declared: str | None) -> str:
    """Verdict of an audit with p-value `p` that could see a total variation of `detectable`.

    "lossy" if the test rejects at AUDIT_LEVEL. Elsewhere "lossless", but only "no deviation seen" where the audit was
    too small to say so or the decoder is declared lossy: whoever made it knows why it deviates, even where small models
    do not show it.
    """
    if p < AUDIT_LEVEL:
        return LOSSY
    return UNSEEN if declared == LOSSY or detectable > SMALL_ENOUGH else LOSSLESS


def verdict_line(row: Mapping) -> str:
    """The verdict of a row of `audit_decoders`, with the deviation it would have seen where it saw none."""
    seen = f" (would have seen a total variation of {row['detectable_tv']:.3f})"
    return str(row["verdict"]) + seen * (row["verdict"] != LOSSY)


def _refused(decoder: DecoderSpec | Decode, settings: Sequence[AuditSetting], seed: int) -> list[str]:
    """Settings whose model the decoder does not accept."""
    if not isinstance(decoder, DecoderSpec):
        return []
    refused = {}
    for setting in settings:
        try:
            build(in_window(decoder, setting.window), setting_model(setting, seed)[0])
        except SpecbenchError as error:
            refused[setting.name] = error
    if len(refused) == len(settings):
        raise next(iter(refused.values()))
    return list(refused)


def load_decoder(decoder: Auditable) -> tuple[str, DecoderSpec | Decode]:
    """Return the printed name of a decoder, and its spec or function."""
    if isinstance(decoder, DecoderSpec):
        return decoder.name, decoder
    if not isinstance(decoder, str):
        return getattr(decoder, "__name__", type(decoder).__name__), decoder
    if ":" not in decoder:
        return decoder, resolve(decoder)
    found = plugins.load_user_object(decoder, "decoder")
    if isinstance(found, Preset):
        return decoder, resolve(decoder_name(decoder))
    if not isinstance(found, DecoderSpec) and not callable(found):
        raise SpecbenchError(
            f"decoder '{decoder}' is a {type(found).__name__}",
            "name a Preset, a DecoderSpec or a function (model, requests, sampling, seed) -> tokens [B, N]",
        )
    return decoder, found


def observe(
    setting: AuditSetting, decoder: DecoderSpec | Decode, samples: int, seed: int, batch: int = _BATCH
) -> list[Counts]:
    """Decode `samples` images of each of the setting's tables, `batch` at a time, and count them."""
    model, exact = setting_model(setting, seed)
    names = model.prompts
    requests = [Request(name, f"{setting.name} {name}", sample) for sample in range(samples) for name in names]
    observed = np.zeros((len(names), 2, len(exact[0]) + 1), dtype=np.int64)
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        cell = _cells(stream_tokens(model, part, decoder, setting, seed), setting.layout)
        number = np.arange(start, start + len(part))
        np.add.at(observed, (number % len(names), number // len(names) % 2, cell), 1)
    return [
        Counts(seen, np.append(truth, 0.0), setting.layout.v_image) for seen, truth in zip(observed, exact, strict=True)
    ]


def stream_tokens(
    model: ImageModel, requests: Sequence[Request], decoder: DecoderSpec | Decode, setting: AuditSetting, seed: int
) -> np.ndarray:
    """Stream tokens [B, N] of the requests, decoded as the setting says.

    Raises:
        SpecbenchError: the decoder refuses the model, or an image failed.
    """
    if not isinstance(decoder, DecoderSpec):
        return _own_tokens(decoder, model, requests, setting.sampling, seed)
    spec = in_window(decoder, setting.window)
    if not setting.rows:
        return decode_tokens(model, requests, spec, setting.sampling, seed, setting.trace).cpu().numpy()
    found = dict(decode_each(model, requests, setting.rows, spec, setting.sampling, seed, setting.trace, measure=False))
    return np.stack([found[request] for request in requests])


def _own_tokens(
    decoder: Decode, model: ImageModel, requests: Sequence[Request], sampling: Sampling, seed: int
) -> np.ndarray:
    """Tokens [B, N] of a user's function; a SpecbenchError if it fails or returns something else than promised."""
    name = getattr(decoder, "__name__", type(decoder).__name__)
    try:
        decoded = decoder(model, requests, sampling, seed)
    except SpecbenchError:
        raise
    except Exception as error:
        raise SpecbenchError(f"decoder '{name}' failed: {type(error).__name__}: {error}") from error
    if len(requests) and isinstance(decoded, Sequence) and all(isinstance(one, Generation) for one in decoded):
        shape: tuple[int, ...] = (len(decoded), model.layout.length)
    else:
        shape = np.shape(decoded)
    if shape != (len(requests), model.layout.length):
        raise SpecbenchError(
            f"decoder '{name}' returned {type(decoded).__name__} of shape {shape}",
            f"return one Generation per request, or tokens [{len(requests)}, {model.layout.length}]",
        )
    if len(requests) and isinstance(decoded[0], Generation):
        return np.stack([generation.tokens for generation in decoded])
    return np.asarray(decoded)


def _cells(tokens: np.ndarray, layout: TokenLayout) -> np.ndarray:
    """Joint cell of each stream [B, N]; a stream that breaks the grammar falls into the extra last cell."""
    free = layout.free_slots()
    forced = np.array(layout.forced)
    image = tokens[:, free]
    legal = (tokens == forced)[:, forced >= 0].all(1) & ((image >= 0) & (image < layout.v_image)).all(1)
    index = image_index(np.where(legal[:, None], image, 0), layout.v_image)
    return np.where(legal, index, layout.v_image ** len(free))
