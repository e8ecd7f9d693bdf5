"""Likely causes of tokens that are not samples of the model: the usual faults, each as a separate distribution.

A cause is compared with the claim by the likelihood of the tokens. If the claim is true, the likelihood ratio exceeds x
with probability 1/x at most, for any number of images (Ville's inequality). A ratio above (number of all alternatives /
`LEVEL`) is therefore significant. Parameters are maximum likelihood estimates. The log likelihood ratio of a cause that
may affect only some images is reduced by log 2 per image. A test then decides if the tokens are samples of the cause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specbench.checks.image_likelihood import ROUNDED, ImageLikelihood
from specbench.checks.logp_kinds import SAMPLED, log_p_of, nearer
from specbench.checks.teacher_forced import Shift
from specbench.checks.token_likelihood import Alternative
from specbench.checks.token_orders import TOKEN_ORDERS, places_of
from specbench.errors import SpecbenchError
from specbench.models.facts import DTYPES
from specbench.models.interface import ImageModel
from specbench.models.transformer.model import TransformerModel
from specbench.specs.run_spec import FILTERS, OFF_IF_NONE, SAMPLING, Sampling
from specbench.stats.rosenblatt import LEVEL
from specbench.stats.tokens import copies_among
from specbench.system import console
from specbench.system.json_values import Word

_STUDIED, _STUDIED_TOKENS = 16, 4096
_FLOOR = {"float32": 1e-6}
"""By number format, the share of the unfiltered distribution in each alternative: a token beyond a filter then has a
finite cost. Rounding moves tokens beyond a filter: on `shapes`, a tenth as many as without the filter."""
_ROUNDING = 0.002  # Nats per token that rounding may cause if p is computed with other tensor shapes
_GUIDANCE = (0.0, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 7.5, 8.0, 10.0, 12.0, 15.0)
_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4, 1.6, 2.0, 3.0)
_TEMPERATURE = tuple(number / 20 for number in range(8, 31))
_REPETITION = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
_FREQUENCY = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Candidate values, as people type them. With a value that is only similar, a filter would exclude some tokens."""
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # Shares of uniform or greedy tokens
_ONE = 0.05  # A guidance this close to 1 is no guidance
_PASSES = 20  # Time to test all causes, relative to the time to test the claim: 15 to 27
_SUSPECT = 2.0  # If an image is unlikely under its own prompt by this many standard errors, other prompts are tried
_GLANCE = 48  # This many first slots (but at least a quarter of the image) suffice to exclude unlikely causes
_HOPELESS = -10.0  # Log likelihood ratio in nats below which a cause is excluded
_OTHERS = 32  # Number of prompts tried for each image that is unlikely under its own prompt
_CLEARLY = 12.0  # Nats by which a cause must be likelier than a mixture of p with the unfiltered distribution
_CLOSE = 5.0  # Nats within which another cause is also named


class CauseKind(Word):
    """Kind of a cause; `SETTING` is another value of a sampling setting."""

    SETTING, EARLY, REPETITION, FREQUENCY = "setting", "early", "repetition", "frequency"
    PROMPTS, ORDER, POSITIONS, CACHE, FORMAT = "prompts", "order", "positions", "cache", "format"
    UNIFORM, GREEDY, COPIES = "uniform", "greedy", "copies"


_OF_SOME = (CauseKind.PROMPTS, CauseKind.ORDER, CauseKind.UNIFORM, CauseKind.GREEDY)
"""Kinds of causes that may affect only some images."""
SINGLE_TOKENS = (CauseKind.UNIFORM, CauseKind.GREEDY, CauseKind.COPIES)
"""Kinds of causes that change tokens but leave the logits unchanged."""
_MIXTURES = {
    CauseKind.UNIFORM: "about {:g} % of the tokens are random: replaced, or after a replaced token",
    CauseKind.GREEDY: "greedy in part: about {:g} % of the tokens were chosen as the most probable token",
}
_SHIFTS: Sequence[tuple[CauseKind, str, Shift]] = (
    (CauseKind.POSITIONS, "positions of the image are one too far from the prompt", (1,)),
    (CauseKind.POSITIONS, "positions of the image are one too near to the prompt", (-1,)),
    (CauseKind.CACHE, "the cache is read one slot too short: no token attends to itself", (0, 1)),
    (CauseKind.CACHE, "the cache is written one slot too early, over the prompt", (0, 0, 1)),
)
"""Kind of each cause, the cause in words, and the argument for `TransformerSession.move`."""


@dataclass(frozen=True)
class Cause:
    """An alternative to the claim that explains the tokens better."""

    kind: CauseKind
    what: str  # the cause in words, with the estimated parameter
    nats: float  # log likelihood ratio to the claim
    images: int  # number of images that the cause explains better than the claim
    # setting, value, low, high: only for a setting of the sampling: its name, likeliest value and 95 % interval
    setting: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    explains: bool | None = None  # whether the studied tokens are samples of this cause; None if not tested

    @property
    def exactly(self) -> float | int | None:
        """The value, converted to the type of the field in `Sampling`."""
        return self.value if self.setting is None or self.value is None else SAMPLING[self.setting].type(self.value)

    def round_values(self) -> list[float]:
        """Return the estimate rounded to 0 and to 1 decimals, each if it is in the estimate's 95 % interval."""
        if self.value is None or self.low is None or self.high is None:
            return []
        return [value for digits in (0, 1) if self.low <= (value := round(self.value, digits)) <= self.high]

    @property
    def label(self) -> str:
        """The setting and its value in words."""
        return _label(str(self.setting), self.exactly)


def likely_causes(
    load: Callable[[str], ImageModel],
    rows: pd.DataFrame,
    sampling: Sampling,
    dtype: str,
    guided: bool,
    logp_kind: str | None = SAMPLED,
) -> tuple[list[Cause], list[str]]:
    """Return the causes that explain `rows` better than the claim, likeliest first, and if there are none, `seen()`.

    Args:
        load: loads the model in a number format of `DTYPES`.
        rows: K images with `prompt`, `tokens`, and `logp` as recorded (NaN if unknown).
        guided: whether the model has unconditional rows.
        logp_kind: kind of log p, one of `LOGP_KINDS` of `specbench.checks.logp_kinds`; None if unknown.
    """
    every, rows = rows, rows.iloc[np.linspace(0, len(rows) - 1, studied(rows)).astype(int)]
    model, began = load(dtype), time.monotonic()
    study = _Study(model, rows, sampling, dtype, guided, logp_kind)
    if console.progress_shown():
        about = console.duration(_PASSES * (time.monotonic() - began))
        console.say(f"searching for likely causes in {console.counted(len(rows), 'image')}: takes about {about}")
    ways = study.alternatives()
    ratios = study.ratios(ways)
    exact = study if dtype == "float32" else study.of_format(load, "float32")
    some = study.prompts(every["prompt"]) + study.orders() + study.positions() + study.mixtures(exact)
    found = some + study.formats(load, dtype, exact) + study.copies(every)
    least = math.log((len(ways) + len(found) + 2 * len(_SHARES) - 2) / LEVEL)
    least += 0 if dtype == "float32" else _ROUNDING * (~np.stack(rows["forced"])).sum()
    for difference in dict.fromkeys(way[:2] for way in ways):
        places = [place for place, way in enumerate(ways) if way[:2] == difference]
        best = max(places, key=lambda place: ratios[place].sum())
        found.append(_Found(study.of_way(ways[best], ratios[best]), partial(study.are_samples, ways[best].sampled)))
    found.sort(key=lambda each: -each.cause.nats)
    if found[0].cause.nats <= least:
        return [], study.seen()
    copies = [each for each in found if each.cause.kind == CauseKind.COPIES and each.cause.nats > least]
    alone = ~every["tokens"].map(tuple).duplicated(keep=False)
    if copies and alone.any():  # a cause of the other images explains more than the copies
        loaded = {"float32": exact.model, dtype: model}
        causes, _ = likely_causes(
            lambda name: loaded.get(name) or load(name), every[alone], sampling, dtype, guided, logp_kind
        )
        if causes:
            return [*causes, copies[0].cause], []
    rest = [each for each in found if each.cause.nats > least and each not in copies]
    # Keep all causes that the tokens do not distinguish from the likeliest cause.
    near = [each for each in rest if each.cause.nats > rest[0].cause.nats - _CLOSE]
    rest = [each for each in rest if each not in near]
    # With fewer bits, exact samples do not match p recomputed with other tensor shapes.
    estimated = [study.estimated(each) for each in copies or near]
    first = [replace(cause, explains=test() if dtype == "float32" else None) for cause, test in estimated]
    first = [cause for cause in first if cause.explains is not False] or first
    return first + [each.cause for each in (near if copies else []) + rest], []


def studied(rows: pd.DataFrame) -> int:
    """Number of images in which causes are sought: 16, or more if images are small."""
    return min(len(rows), max(_STUDIED, _STUDIED_TOKENS // len(rows["tokens"].iloc[0])))


def alike(causes: Sequence[Cause]) -> list[Cause]:
    """Return the first cause, and the causes that the tokens do not distinguish from it. Copies are a fact, and
    explain what else seems likely of them."""
    first, *others = causes
    if first.kind == CauseKind.COPIES:
        return [first]
    near = (cause for cause in others if cause.nats > first.nats - _CLOSE and cause.explains == first.explains)
    return [first, *(cause for cause in near if cause.kind != CauseKind.COPIES)]


def named(causes: Sequence[Cause], images: int) -> str:
    """Describe the likeliest causes: several if the tokens do not distinguish them."""
    close = alike(causes)
    some = [cause.kind in _OF_SOME and cause.images < images for cause in close]
    counts = [f" in {cause.images} of {images} images" * part for cause, part in zip(close, some, strict=True)]
    parts = [cause.what + count for cause, count in zip(close, counts, strict=True)]
    besides = "".join(f"; besides, {cause.what}" for cause in causes[1:] if cause.kind == CauseKind.COPIES)
    if len(parts) > 2:
        return f"one of these, which the tokens do not distinguish: {'; '.join(parts)}{besides}"
    return f"{'; or '.join(parts)} ({causes[0].nats:,.0f} nats more likely than the claim){besides}"


def _label(setting: str, value: float | None) -> str:
    """A setting and its value in words."""
    label = setting.replace("_", "-")
    return f"no {label}" if _is_off(setting, value) else f"{label} {value:g}"


def _is_off(setting: str, value: float | None) -> bool:
    return setting in FILTERS and value in (None, SAMPLING[setting].default)


def _of_some(ratio: np.ndarray) -> float:
    """Log likelihood ratio of all images if each image comes from the claim or from the alternative."""
    return float(np.logaddexp(ratio.sum(), np.logaddexp(0, ratio).sum() - len(ratio) * math.log(2)) - math.log(2))


class _Way(NamedTuple):
    """A sampling other than the claim. `setting`: the setting that differs, if the kind is `SETTING`."""

    kind: CauseKind
    setting: str | None
    sampled: Alternative


class _Found(NamedTuple):
    """A cause, and a test whether the tokens are samples of it."""

    cause: Cause
    test: Callable[[], bool | None]


class _Study(ImageLikelihood):
    """Search for the usual faults that explain the images' tokens."""

    def __init__(
        self, model: ImageModel, rows: pd.DataFrame, sampling: Sampling, dtype: str, guided: bool, logp_kind: str | None
    ):
        super().__init__(model, rows, sampling, _FLOOR.get(dtype, ROUNDED), int(max(SAMPLING["top_k"].typed)))
        self._guided, self._logp_kind, typed = guided, logp_kind, SAMPLING["top_k"].typed
        # The likeliest top-k, if it is small and not tried anyway
        self._top_k = None if self.rank in typed or self.rank > max(typed) else self.rank

    def alternatives(self) -> list[_Way]:
        """Samplings other than the claim."""
        claimed = self.sampling
        values: dict[str, list[Any]] = {
            "guidance": [*_GUIDANCE, 0.85 * claimed.guidance, 1.15 * claimed.guidance] if self._guided else [],
            "temperature": [*_TEMPERATURE, *(claimed.temperature * factor for factor in _FACTORS)],
        }
        for name in FILTERS:
            off = None if name in OFF_IF_NONE else SAMPLING[name].default
            typed = (x for x in SAMPLING[name].typed if name != "top_k" or x < self.model.layout.v_image)
            values[name] = [*typed, off] if SAMPLING[name].typed else []
        values["top_k"] += [self._top_k] if self._top_k else []
        pairs = ((name, value) for name, others in values.items() for value in others if value != self._claimed(name))
        ways = [_Way(CauseKind.SETTING, name, self.under(**{name: value})) for name, value in pairs]
        if claimed.temperature != 1 and claimed.entropy_scale is None and {*claimed.filters} - {"top_k", "top_n_sigma"}:
            ways.append(_Way(CauseKind.EARLY, None, replace(self.way, early=True)))
        ways += [_Way(CauseKind.REPETITION, None, replace(self.way, repetition=value)) for value in _REPETITION]
        return ways + [_Way(CauseKind.FREQUENCY, None, replace(self.way, frequency=value)) for value in _FREQUENCY]

    def ratios(self, ways: Sequence[_Way]) -> np.ndarray:
        """[ways, K] log likelihood ratios to the claim. An estimated top-k k has the prior 1 / (k (k + 1))."""
        estimated = np.array([[way.setting == "top_k" and way.sampled.sampling.top_k == self._top_k] for way in ways])
        paid = math.log(self.rank * (self.rank + 1)) / len(self.tokens)
        return self.likelihoods([way.sampled for way in ways]) - self.claim - estimated * paid

    def of_way(self, way: _Way, ratio: np.ndarray) -> Cause:
        """Describe a sampling as a possible cause."""
        (kind, setting, sampled), evidence = way, (float(ratio.sum()), int((ratio > 0).sum()))
        if kind == CauseKind.EARLY:
            return Cause(kind, "top-p is applied before the temperature", *evidence)
        if setting is None:
            return Cause(kind, f"a {kind} penalty of about {getattr(sampled, kind):g}", *evidence)
        value, claimed = getattr(sampled.sampling, setting), self._claimed(setting)
        what = f"{_label(setting, value)}, not {'claimed' if _is_off(setting, claimed) else f'{claimed:g}'}"
        return Cause(kind, what, *evidence, setting, None if value is None else float(value))

    def estimated(self, found: _Found) -> _Found:
        """The cause with the likeliest value of its setting, for guidance and temperature."""
        cause = found.cause
        if cause.setting not in ("guidance", "temperature") or cause.value is None:
            return found
        name, claimed = cause.setting, self._claimed(cause.setting)
        _, low, high = self.likeliest(name, cause.value)
        value = self.likeliest_within(name, low, high)
        # The interval ignores tokens beyond the filters. If only these tokens contradict the claim, it holds the claim.
        interval = "" if low <= claimed <= high else f" [{low:.3g}, {high:.3g}]"
        what = f"{name} {value:.3g}{interval}, not {claimed:g}"
        if name == "guidance" and claimed != 1 and low - _ONE <= 1 <= high + _ONE:
            what = f"guidance had no effect: {what}"
        if name == "guidance" and value < 0.5:
            what = f"the prompt had no effect: {what}"
        cause = replace(cause, what=what, value=value, low=low, high=high)
        return _Found(cause, partial(self.are_samples, self.under(**{name: value})))

    def _claimed(self, name: str) -> Any:
        return getattr(self.sampling, name)

    def prompts(self, every: Sequence[str]) -> list[_Found]:
        """Causes with another prompt: the empty prompt, half of the prompt, or another prompt of the set."""
        halves = [" ".join(text.split()[: max(2, len(text.split()) // 2)]) for text in self.texts]
        others = (
            ("the prompt is missing: the tokens are more likely under the empty prompt", [""] * len(self.texts)),
            ("the prompt is cut: the tokens are more likely under its first half", halves),
        )
        found = []
        for what, texts in others:
            with suppress(SpecbenchError, ValueError, IndexError):  # some models cannot encode every text
                found.append(self._compared(CauseKind.PROMPTS, what, texts=texts))
        return found + self._exchanged(every)

    def _exchanged(self, every: Sequence[str]) -> list[_Found]:
        """Another prompt for each image: the next image's prompt, or, if an image is unlikely under its own prompt, the
        likeliest of many prompts. Then the log of the number of these prompts is subtracted from the log ratio."""
        distinct = list(dict.fromkeys([*self.texts, *every]))[:_OTHERS]
        if len(distinct) < 2:
            return []
        texts, paid = [*self.texts[1:], self.texts[0]], np.zeros(len(self.texts))
        suspects = np.flatnonzero(self.surprise > _SUSPECT).tolist()
        pairs = [(image, text) for image in suspects for text in distinct if text != self.texts[image]]
        if pairs:
            images = np.array([image for image, _ in pairs])
            scores = self._of_prompts(pairs, self._glance())
            best = {image: scores[images == image].max() for image in suspects}
            few = [pair for pair, score in zip(pairs, scores, strict=True) if score > best[pair[0]] + _HOPELESS]
            # In ascending order, so that the likeliest prompt of an image is written last.
            for place in self._of_prompts(few, self.tokens.shape[1]).argsort():
                image, texts[few[place][0]] = few[place]
                paid[image] = math.log((images == image).sum())
        what = "prompts are mixed up: the tokens are more likely under another image's prompt"
        return [self._compared(CauseKind.PROMPTS, what, paid, texts=texts)]

    def _of_prompts(self, pairs: Sequence[tuple[int, str]], slots: int) -> np.ndarray:
        """Log likelihood of the first slots of images, each under a prompt."""
        return self.likelihoods([self.way], [text for _, text in pairs], self.tokens[[i for i, _ in pairs], :slots])[0]

    def _glance(self) -> int:
        return max(_GLANCE, self.tokens.shape[1] // 4)

    def orders(self) -> list[_Found]:
        """Causes in which the tokens are in another order."""
        read = [(what, self.tokens[:, places_of(self.model.layout, order)]) for what, order in TOKEN_ORDERS]
        return [self._compared(CauseKind.ORDER, what, tokens=tokens) for what, tokens in read]

    def positions(self) -> list[_Found]:
        """Causes in which image tokens have other positions, or a slot of the cache is missing."""
        known = isinstance(self.model, TransformerModel)
        return [self._compared(kind, what, shift=shift) for kind, what, shift in _SHIFTS if known]

    def _compared(
        self,
        kind: CauseKind,
        what: str,
        paid: np.ndarray | float = 0.0,
        texts: Sequence[str] | None = None,
        tokens: np.ndarray | None = None,
        shift: Shift = (),
    ) -> _Found:
        """Compute a cause and its log likelihood ratio minus `paid`; skip the last slots if the first slots exclude it.
        Without `shift`, the test assumes the cause only for images that are likelier under the cause than the claim."""
        texts, tokens, few = texts or self.texts, self.tokens if tokens is None else tokens, self._glance()
        claim = np.where(self.free, np.log(np.maximum(self.p, 1e-30)), 0.0)
        ratio = self.likelihoods([self.way], texts, tokens[:, :few], shift)[0] - claim[:, :few].sum(1) - paid
        rest = np.flatnonzero((ratio > _HOPELESS) & (few < tokens.shape[1]))
        if len(rest):
            whole = self.likelihoods([self.way], [texts[image] for image in rest.tolist()], tokens[rest], shift)[0]
            ratio[rest] = whole - self.claim[rest] - np.broadcast_to(paid, len(ratio))[rest]
        # A shift affects either all images of a program or none.
        better, together = (ratio > 0, _of_some(ratio)) if not shift else (ratio < math.inf, float(ratio.sum()))

        def test() -> bool | None:
            read = [other if part else own for part, other, own in zip(better, texts, self.texts, strict=True)]
            return self.are_samples(None, read, np.where(better[:, None], tokens, self.tokens), shift)

        return _Found(Cause(kind, what, together, int(better.sum())), test)

    def mixtures(self, exact: _Study) -> list[_Found]:
        """Likeliest shares of tokens drawn uniformly, or greedily, instead of from p. Each mixture is compared with the
        likelier of the claim and float32 (`exact`), because rounding also makes single tokens unlikely. Other weights
        look similar, so that a mixture must also be likelier than a mixture with the unfiltered distribution."""
        found, claim = [], np.maximum(self.claim, exact.claim)
        beyond = np.maximum(claim, max((self.mixed(share) for share in _SHARES), key=np.sum))
        for kind, what in _MIXTURES.items():
            other = self.greatest if kind == CauseKind.GREEDY else 1 / self.model.layout.v_image
            mixed = [self.mixed(share, other) for share in _SHARES]
            best = max(range(len(_SHARES)), key=lambda place: _of_some(mixed[place] - claim))
            drawn: dict[str, Any] = {kind: _SHARES[best]}
            way, ratio = replace(self.way, **drawn), mixed[best] - claim
            above = _of_some(mixed[best] - beyond)
            nats = _of_some(ratio) if above > _CLEARLY else above
            cause = Cause(kind, what.format(100 * _SHARES[best]), nats, int((ratio > 0).sum()))
            found.append(_Found(cause, partial(self.are_samples, way)))
        return found

    def copies(self, every: pd.DataFrame) -> list[_Found]:
        """Images that are exact copies of other images, which sampling from p almost never produces."""
        copies = copies_among(every["tokens"])
        if not copies:
            return []
        known = list(copies_among(self.tokens))
        # A copy outside the studied images counts like the likeliest studied image.
        surely = -self.claim[known].sum() - (len(copies) - len(known)) * self.claim.max()
        are = "are exact copies of others" if len(copies) > 1 else "is an exact copy of another"
        what = f"{console.counted(len(copies), 'image')} of {len(every)} {are}"
        first = ~np.isin(np.arange(len(self.tokens)), known)
        cause = Cause(CauseKind.COPIES, what, float(surely - len(copies) * math.log(len(every))), len(known))
        return [_Found(cause, lambda: self.are_samples(kept=first))]

    def of_format(self, load: Callable[[str], ImageModel], dtype: str, images: np.ndarray | None = None) -> _Study:
        """Study the same images, or the subset `images`, under the model in another number format."""
        rows = self.rows if images is None else self.rows.iloc[images]
        return _Study(load(dtype), rows, self.sampling, dtype, self._guided, self._logp_kind)

    def formats(self, load: Callable[[str], ImageModel], dtype: str, exact: _Study) -> list[_Found]:
        """Other number formats of all images. They are compared by the tokens, and by log p if recorded.

        Kernels of the same format round differently, so that float32, which is between all of them, is often likelier
        than the true format. Tokens identify a format only if it is likelier than float32 even after float32 is allowed
        as many tokens beyond its filters as rounding causes.
        """
        found = []
        for other in [name for name in dict.fromkeys(("float32", *DTYPES)) if name != dtype]:
            with suppress(SpecbenchError):  # eight bits need an extra, and some models have no eight bits
                # A quarter of the images suffices to exclude a format.
                for step in (4, 1):
                    images = np.arange(0, len(self.tokens), step)
                    study = exact if other == "float32" else self.of_format(load, other, images)
                    ratio = self._to_format(study, exact, images if study is not exact else np.arange(len(self.tokens)))
                    if study is exact or ratio.sum() < 0:
                        break
                what = f"another number format: {other}, not {dtype}"
                cause = Cause(CauseKind.FORMAT, what, float(ratio.sum()), int((ratio > 0).sum()))
                found.append(_Found(cause, study.are_samples))
        return found

    def _to_format(self, study: _Study, exact: _Study, images: np.ndarray) -> np.ndarray:
        """Log likelihood ratio of some images in another number format."""
        tokens = study.claim - max((one[images] for one in (self.claim, exact.claim)), key=np.sum)
        loose = study.claim - exact.loose[images]
        tokens = tokens if loose.sum() > _CLEARLY else np.minimum(tokens, loose)
        if self.error is None or study.error is None:
            return tokens
        return tokens + nearer(self.error[images], study.error)

    @cached_property
    def error(self) -> np.ndarray | None:
        """[K, N] distance of the recorded log p from this model's, NaN if unknown; None if no log p is recorded."""
        recorded = self.rows.get("logp")
        if self._logp_kind is None or recorded is None or recorded.isna().any():
            return None
        logp = log_p_of(self.model, self.rows, self.sampling, [self._logp_kind])[self._logp_kind]
        with np.errstate(invalid="ignore"):
            return np.where(self.free, np.abs(np.stack(recorded) - logp), np.nan)

    def seen(self) -> list[str]:
        """Describe the values that the tokens allow: the intervals of guidance and temperature."""
        names = ["temperature", *(["guidance"] if self._guided and self.sampling.guidance != 1 else [])]
        intervals = []
        for name in names:
            value, low, high = self.likeliest(name, claimed := self._claimed(name))
            text = f"{name} estimated from the tokens: {value:.3g} [{low:.3g}, {high:.3g}]"
            outside = f", which excludes {claimed:g} (as in 5 % of correct runs): audit more images"
            intervals.append(text if low <= claimed <= high else text + outside)
        return intervals
