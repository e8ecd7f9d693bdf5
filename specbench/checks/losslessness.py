"""Audit of losslessness: decode enumerable models, and compare the images with the exact joint distribution.

The audit does not use the decoder's declaration: the real decode loop runs, and its images are counted.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from specbench.checks.audit_settings import AUDIT_SETTINGS, COMPILED_SETTINGS, AuditSetting, in_window, setting_model
from specbench.checks.divergence import (
    AUDIT_LEVEL,
    PAIRS,
    VIEWS,
    Counts,
    agreement,
    dependence,
    detectable_tv,
    p_value,
    total_variation,
)
from specbench.checks.enumerable_model import image_index
from specbench.decoding.build import build
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.generation import Generation
from specbench.decoding.loop import Decoding, decode_tokens
from specbench.errors import SpecbenchError, chosen
from specbench.models.interface import ImageModel, TokenLayout
from specbench.prompts import Request
from specbench.runs.decoder_args import labelled_decoders
from specbench.specs.presets import PRESETS, DecoderSpec, Preset, decoder_name, resolve
from specbench.specs.run_spec import Sampling
from specbench.system import plugins
from specbench.system.json_values import Word
from specbench.system.torch_state import PinnedTorch

AUDIT_SAMPLES = 290_000  # Images per decoder: about 19,300 per setting of share 1
_BATCH = 10_000
THOROUGH = 10  # A thorough audit decodes this many times the images in the less sensitive half of the settings
SMALL_ENOUGH = 0.05
"""An audit calls a decoder lossless only if its `detectable_tv` is at most this, which takes about 15,000 images."""


class Losslessness(Word):
    """Verdict of an audit (see `audit_verdict`), or declaration of a decoder."""

    LOSSLESS, LOSSY, UNSEEN = "lossless", "lossy", "no deviation seen"


LOSSLESS, LOSSY, UNSEEN = Losslessness

Decode = Callable[[ImageModel, Sequence[Request], Sampling, int], Sequence[Generation] | np.ndarray]
Auditable = str | DecoderSpec | Decode


def audit_decoders(
    decoders: Auditable | Sequence[Auditable] = (),
    samples: int | None = None,
    seed: int = 0,
    compiled: bool = False,
    thorough: bool = False,
    workers: int = 1,
    tell: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Measure whether decoders are lossless, on models small enough to enumerate.

    Args:
        decoders: names, optionally with inline options ("gsd:G=50"); all by default. Name your own as
            "package.module:Name": a `Preset`, a `DecoderSpec`, or a function `(model, requests, sampling, seed)` that
            returns one `Generation` per request, or all stream tokens [B, N]. The objects themselves also work.
        samples: images per decoder, divided among the audit's settings by their shares; None takes AUDIT_SAMPLES.
        seed: seed of the models and of the decoding noise.
        compiled: also audit compiled steps (COMPILED_SETTINGS), which takes a minute or more per decoder.
        thorough: decode THOROUGH times as many images in the less sensitive half of the settings.
        workers: processes that share the decoders, on Linux.
        tell: receives each dict as soon as this dict and all earlier dicts are complete.

    Returns:
        One dict per decoder: `decoder`, `verdict` ("lossless", "lossy" or "no deviation seen", see `audit_verdict`),
        `tv, tv_low, tv_high` (mean total variation over the settings, as `total_variation` defines it), `samples`,
        `p_value`, `detectable_tv` (a distance the test would have found with probability AUDIT_POWER), `models`,
        `declared` (by the spec; None for a user decoder), `worst_setting` (the setting with the smallest p-value),
        `dependent` (entries of PAIRS whose images are not independent), `alone_differ` (lower bound on the number of
        images that get other tokens in a batch than alone), `weakest_setting, weakest_tv` (the setting with the largest
        `detectable_tv`, and its value), and `refused` (settings whose model the decoder does not accept).

    Raises:
        SpecbenchError: an unknown decoder, a decoder that accepts no setting, or too few samples.
    """
    samples = samples or AUDIT_SAMPLES
    one = isinstance(decoders, str) or not isinstance(decoders, Sequence)
    asked: list[Any] = [decoders] if one else chosen("decoder", decoders)
    by_name = all(isinstance(decoder, str) for decoder in asked)
    named: Any = labelled_decoders(asked or list(PRESETS)) if by_name else [(None, decoder) for decoder in asked]
    if samples < 1000:
        raise SpecbenchError(f"--samples {samples}: must be at least 1000", f"default: {AUDIT_SAMPLES}")
    if seed < 0:
        raise SpecbenchError(f"--seed {seed}: must be at least 0")
    settings = (*AUDIT_SETTINGS, *COMPILED_SETTINGS) if compiled else AUDIT_SETTINGS
    loaded = ((label, *load_decoder(decoder)) for label, decoder in named)
    work = [(label or name, decoder, samples, seed, settings, thorough) for label, name, decoder in loaded]
    rows: list[dict[str, Any]] = []
    with ExitStack() as running:
        if (several := min(workers, len(work))) < 2 or sys.platform != "linux":
            results: Iterator[dict[str, Any]] = (audit_one(*job) for job in work)
        else:  # a forked process inherits plug-ins and imports
            context = multiprocessing.get_context("fork")
            pool = ProcessPoolExecutor(several, context, torch.set_num_threads, (1,))
            running.callback(pool.shutdown, cancel_futures=True)
            jobs = [pool.submit(audit_one, *job) for job in work]
            results = (job.result() for job in jobs)
        for row in results:
            rows.append(row)
            tell(row)
    return rows


@PinnedTorch(False)
def audit_one(
    name: str,
    decoder: DecoderSpec | Decode,
    samples: int,
    seed: int,
    settings: Sequence[AuditSetting] | None = None,
    thorough: bool = False,
) -> dict[str, Any]:
    """Audit a decoder from `load_decoder` on AUDIT_SETTINGS or other settings. The row is as in `audit_decoders`."""
    torch.set_num_threads(1)  # more threads are slower with such small tensors; `PinnedTorch` restores the number
    settings = settings or AUDIT_SETTINGS
    refused = _refused(decoder, settings, seed)
    accepted = [setting for setting in settings if setting.name not in refused]
    usual = samples / sum(setting.share for setting in settings)

    def counted(setting: AuditSetting, times: int = 1, batch: int | None = None) -> list[Counts]:
        return observe(setting, decoder, round(times * usual * setting.share / setting.tables), seed, batch)

    counts = {setting.name: counted(setting) for setting in accepted}
    seen = {setting.name: detectable_tv(counts[setting.name]) for setting in accepted if setting.batch != 1}
    if thorough:
        weak = sorted(seen, key=seen.__getitem__)[len(seen) // 2 :]
        counts |= {setting.name: counted(setting, THOROUGH) for setting in accepted if setting.name in weak}
        seen |= {name: detectable_tv(counts[name]) for name in weak}
    tables = [table for count in counts.values() for table in count]
    tv, low, high = total_variation(tables)
    p, detectable = p_value(tables), detectable_tv(tables)
    weakest = max(seen, key=seen.__getitem__, default=None)
    alone = 0
    if isinstance(decoder, DecoderSpec):  # a user's function may draw different noise in another batch
        lone = [setting for setting in accepted if setting.batch == 1]
        for setting in lone:
            pairs = zip(counts[setting.name], counted(setting, batch=_BATCH), strict=True)
            # Lower bound on the number of images that differ in a batch.
            alone += sum(int(np.abs(mine.total - other.total).sum()) // 2 for mine, other in pairs)
    lossless = getattr(decoder, "lossless", None)
    declared = None if lossless is None else (LOSSLESS if lossless else LOSSY)
    return {
        "decoder": name,
        "verdict": audit_verdict(p, detectable, declared, alone),
        "tv": tv,
        "tv_low": low,
        "tv_high": high,
        "samples": sum(int(table.total.sum()) for table in tables),
        "p_value": p,
        "detectable_tv": detectable,
        "models": len(tables),
        "declared": declared,
        "worst_setting": min(counts, key=lambda setting: p_value(counts[setting])),
        "dependent": [kind for kind, p in dependence(tables).items() if p * VIEWS * len(PAIRS) < AUDIT_LEVEL],
        "alone_differ": alone,
        "weakest_setting": weakest,
        "weakest_tv": seen[weakest] if weakest else None,
        "refused": refused,
    }


def audit_verdict(p: float, detectable: float, declared: Losslessness | None, alone: int = 0) -> Losslessness:
    """Verdict of an audit with p-value `p` that can detect a total variation of `detectable`.

    "lossy" if the test rejects at AUDIT_LEVEL, else "lossless". The verdict is only "no deviation seen" if the audit
    was too small, if images had other tokens in a batch (at least `alone` images), or if the decoder is declared lossy:
    its author knows why the decoder deviates, even if small models do not show the deviation.
    """
    if p < AUDIT_LEVEL:
        return LOSSY
    return UNSEEN if declared == LOSSY or detectable > SMALL_ENOUGH or alone else LOSSLESS


def verdict_line(row: Mapping[str, Any]) -> str:
    """Verdict of a row of `audit_decoders`, with its dependent images or its smallest detectable deviation."""
    if row["verdict"] == LOSSY:
        p = f"p {row['p_value']:.2g}" if row["p_value"] else "p < 1e-300"  # an underflow is not 0
        return f"{LOSSY} ({p})" + "".join(f"; images of other {kind} are not independent" for kind in row["dependent"])
    seen = f"detectable total variation: {row['detectable_tv']:.3f}"
    if row["weakest_tv"]:
        seen += f"; {row['weakest_tv']:.3f} in the least sensitive setting: {row['weakest_setting']}"
    other = f"; at least {row['alone_differ']} images have different tokens alone and in a batch" * (
        row["alone_differ"] > 0
    )
    return f"{row['verdict']} ({seen}){other}"


def _refused(decoder: DecoderSpec | Decode, settings: Sequence[AuditSetting], seed: int) -> list[str]:
    """List the settings whose model the decoder does not accept."""
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
    loaded = plugins.load_user_object(decoder, "decoder")
    if isinstance(loaded, Preset):
        return decoder, resolve(decoder_name(decoder))
    if not isinstance(loaded, DecoderSpec) and not callable(loaded):
        raise SpecbenchError(
            f"decoder '{decoder}' is a {type(loaded).__name__}",
            "name a Preset, a DecoderSpec or a function (model, requests, sampling, seed) -> tokens [B, N]",
        )
    return decoder, loaded


def observe(
    setting: AuditSetting, decoder: DecoderSpec | Decode, samples: int, seed: int, batch: int | None = None
) -> list[Counts]:
    """Decode at least `samples` images of each table of the setting, `batch` at a time (None: `setting.batch`), and
    count them. Images of two seeds and of two prompt ids share a table, so that pairs can be compared.
    """
    model, exact = setting_model(setting, seed)
    cells = []
    for noise in (2 * seed, 2 * seed + 1):
        requests, size = _requests(setting, model.prompts, max(2, -(-samples // 4))), batch or setting.batch or _BATCH
        parts = (requests[start : start + size] for start in range(0, len(requests), size))
        tokens = [stream_tokens(model, part, decoder, setting, noise) for part in parts]
        cells.append(_cells(np.concatenate(tokens), setting.layout).reshape(-1, 2, len(model.prompts)))
    by_table = np.stack(cells).transpose(3, 0, 2, 1)
    return [_counted(cells, truth, setting.layout) for cells, truth in zip(by_table, exact, strict=True)]


def _requests(setting: AuditSetting, texts: Sequence[str], samples: int) -> list[Request]:
    """Requests, ordered by sample, then by prompt id (two for each text), then by text."""
    return [
        Request(text, f"{setting.name} {text} {half}", sample)
        for sample in range(samples)
        for half in range(2)
        for text in texts
    ]


def _counted(cells: np.ndarray, exact: np.ndarray, layout: TokenLayout) -> Counts:
    """Count the images of one table; `cells` [2 seeds, 2 prompts, samples]: cell of each image."""
    halves = (cells[..., ::2], cells[..., 1::2])
    observed = np.stack([np.bincount(half.ravel(), minlength=len(exact) + 1) for half in halves])
    powers: np.ndarray = layout.v_image ** np.arange(len(layout.free_slots()) - 1, -1, -1)
    tokens = cells[..., None] // powers % layout.v_image
    even = tokens[:, :, : tokens.shape[2] // 2 * 2]
    pairs = {
        "prompts": (tokens[:, 0], tokens[:, 1]),
        "samples": (even[:, :, ::2], even[:, :, 1::2]),
        "seeds": (tokens[0], tokens[1]),
    }
    sides = ([side.reshape(-1, len(powers)) for side in pairs[kind]] for kind in PAIRS)
    gains = [agreement(one, other, layout.v_image) for one, other in sides]
    sums = np.array([[gain.sum(), (gain**2).sum()] for gain in gains])
    return Counts(observed, np.append(exact, 0.0), layout.v_image, sums)


def stream_tokens(
    model: ImageModel, requests: Sequence[Request], decoder: DecoderSpec | Decode, setting: AuditSetting, seed: int
) -> np.ndarray:
    """Stream tokens [B, N] of the requests, decoded according to the setting."""
    if not isinstance(decoder, DecoderSpec):
        return tokens_of(own_images(decoder, model, requests, setting.sampling, seed))
    spec = in_window(decoder, setting.window)
    if not setting.rows:
        return decode_tokens(Decoding(model, spec, setting.sampling, seed, setting.trace), requests).cpu().numpy()
    images = decode_each(model, requests, setting.rows, spec, setting.sampling, seed, setting.trace, measure=False)
    tokens = dict(images)
    return np.stack([tokens[request] for request in requests])


def own_images(
    decoder: Decode, model: ImageModel, requests: Sequence[Request], sampling: Sampling, seed: int
) -> Sequence[Any]:
    """Images, or stream tokens [B, N], of a user's function; a SpecbenchError if it fails or returns anything else."""
    name, shape = getattr(decoder, "__name__", type(decoder).__name__), (len(requests), model.layout.length)
    try:
        decoded: Any = decoder(model, requests, sampling, seed)
        decoded = list(decoded) if isinstance(decoded, Iterator) else decoded
    except SpecbenchError:
        raise
    except Exception as error:
        raise SpecbenchError(f"decoder '{name}' failed: {type(error).__name__}: {error}") from error
    images: Any = decoded.cpu().numpy() if isinstance(decoded, torch.Tensor) else decoded
    images = images if isinstance(images, Sequence | np.ndarray) else [images]
    returned = type(decoded).__name__
    try:
        tokens = tokens_of(without_errors(images))
        wrong = "" if np.issubdtype(tokens.dtype, np.integer) else f"{returned} of {tokens.dtype}, not of whole numbers"
        wrong = wrong if tokens.shape == shape else f"{returned} of shape {tokens.shape}"
    except (ValueError, TypeError):  # numpy cannot convert them to an array
        wrong = f"{returned} of images with different numbers of tokens, or of values that are no tokens"
    if wrong:
        hint = f"return one Generation per request, or tokens [{shape[0]}, {shape[1]}]"
        raise SpecbenchError(f"decoder '{name}' returned {wrong}", hint)
    return images


def without_errors(images: Sequence[Any]) -> Sequence[Any]:
    """Return images, or raise the first error among them."""
    if error := next((image for image in images if isinstance(image, SpecbenchError)), None):
        raise error
    return images


def tokens_of(images: Sequence[Any]) -> np.ndarray:
    """Stream tokens [B, N] of images, or of a user's function, which may return only tokens."""
    return np.asarray([getattr(image, "tokens", image) for image in images])


def _cells(tokens: np.ndarray, layout: TokenLayout) -> np.ndarray:
    """Cell of each stream [B, N] in the joint distribution; streams that break the grammar have the extra last cell."""
    free = layout.free_slots()
    forced = np.array(layout.forced)
    image = tokens[:, free]
    legal = (tokens == forced)[:, forced >= 0].all(1) & ((image >= 0) & (image < layout.v_image)).all(1)
    index = image_index(np.where(legal[:, None], image, 0), layout.v_image)
    return np.where(legal, index, layout.v_image ** len(free))
