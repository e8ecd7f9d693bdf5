"""Likely causes of tokens that are no samples of the model: the usual faults, each as a distribution of its own.

A cause is compared with the claim by the likelihood of the tokens. Under the claim the ratio of the two is above x
with probability 1/x at most, whatever the number of images (Ville's inequality), so that a ratio beyond the number of
all alternatives over `LEVEL` is no chance. A parameter is estimated by maximum likelihood.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from specbench.checks.teacher_forced import Values, forced_logits, pieces, teacher_forced_values
from specbench.decoding.sampling import Target, at
from specbench.errors import SpecbenchError
from specbench.models.facts import DTYPES
from specbench.models.interface import ImageModel, TokenLayout
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import LEVEL
from specbench.system import console
from specbench.system.torch_state import PinnedTorch

_STUDIED, _STUDIED_TOKENS = 16, 4096
_FLOOR, _ROUNDED_FLOOR = {"float32": 1e-6}, 0.1
"""Share of the unfiltered distribution in each alternative, so that a token beyond a filter costs a finite ratio: by
number format, as rounding puts tokens at the edge of a filter on either side (on `shapes`, a tenth of those beyond)."""
_ROUNDING = 0.002  # Nats per token that rounding may make: p of the same model in other shapes
_DIGITS = 1e-5  # Nats that other shapes move log p in float32
_GUIDANCE = (0.0, 0.5, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.5, 10.0, 12.0, 15.0)
_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4, 1.6, 2.0, 3.0)
_TOP_K = (1, 5, 10, 20, 50, 100, 500, 1000, 2000, 0)
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
_RANDOM = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # Shares of tokens drawn uniformly
_STEPS, _ONE = 9, 0.05  # Points of a likelihood, and the distance from a guidance of 1 that is none
_DROP = 1.92  # Of log likelihood at the ends of a 95 % interval: half the quantile of chi-square
_FAR, _IMPOSSIBLE = 5.0, 10.0  # Standard errors of a group that deviates, and nats that a token of probability 0 counts
_CLOSE = 5.0  # Nats within which another cause is named, too
_PASSES = 30  # Times that all causes take that of the claim alone, on `shapes`
_ORDERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "the image is transposed: tokens are in the order of columns": lambda grid: grid.reshape(grid.shape[::-1]).T,
    "the rows are mirrored": lambda grid: grid[:, ::-1],
    "the rows are in the order from the bottom": lambda grid: grid[::-1],
    "the tokens are shifted: the first one is missing": lambda grid: np.roll(grid.ravel(), 1).reshape(grid.shape),
    "the tokens are shifted: one too many at the start": lambda grid: np.roll(grid.ravel(), -1).reshape(grid.shape),
    "row ends are shifted: rows are one token too short": lambda grid: _skewed(grid, 1),
    "row ends are shifted: rows are one token too long": lambda grid: _skewed(grid, -1),
}
"""By cause, the grid of indices of the tokens to be read, so that they stand where the model drew them."""


@dataclass(frozen=True)
class Cause:
    """An alternative to the claim that explains the tokens better."""

    what: str  # the cause in words, with the estimated parameter
    nats: float  # log likelihood ratio to the claim
    images: int  # how many of the images it explains better than the claim
    # setting, value, low, high: of the sampling, with the likeliest value and its 95 % interval
    setting: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def exactly(self) -> float | int | None:
        """The value as `Sampling` has it."""
        return int(self.value) if self.setting == "top_k" else self.value


def likely_causes(
    load: Callable[[str], ImageModel], rows: pd.DataFrame, sampling: Sampling, dtype: str, guided: bool
) -> tuple[list[Cause], list[str]]:
    """The causes that explain `rows` better than the claim, the likeliest first, and what would have been seen.

    Args:
        load: the model in a number format of `DTYPES`.
        rows: K images: `prompt`, `tokens`, `logp` as recorded, NaN where unknown.
        guided: whether the model has unconditional rows.
    """
    rows = rows.iloc[np.linspace(0, len(rows) - 1, studied(rows)).astype(int)]
    model, began = load(dtype), time.monotonic()
    study = _Study(model, rows, sampling, _FLOOR.get(dtype, _ROUNDED_FLOOR), guided)
    if console.progress_shown():
        about = console.duration(_PASSES * (time.monotonic() - began))
        console.say(f"likely causes are sought in {console.counted(len(rows), 'image')}: about {about}")
    options = study.alternatives()
    ratios = study.likelihoods([setting for _, setting in options]) - study.claim
    exact = study if dtype == "float32" else study.of_format(load, "float32")
    others = study.prompts() | study.orders() | study.formats(load, dtype, exact) | study.random(exact)
    least = math.log((len(options) + len(others) + len(_RANDOM) - 1) / LEVEL)
    least += 0 if dtype == "float32" else _ROUNDING * (~np.stack(rows["forced"])).sum()
    causes = [Cause(what, _of_some(ratio), int((ratio > 0).sum())) for what, ratio in others.items()]
    for name in dict.fromkeys(name for name, _ in options):
        places = [place for place, (option, _) in enumerate(options) if option == name]
        best = max(places, key=lambda place: ratios[place].sum())
        causes.append(study.setting(name, getattr(options[best][1], name), ratios[best]))
    causes = sorted((cause for cause in causes if cause.nats > least), key=lambda cause: -cause.nats)
    near = [study.estimated(cause) for cause in causes if cause.nats > causes[0].nats - _CLOSE]
    return near + causes[len(near) :], [] if causes else study.seen()


def studied(rows: pd.DataFrame) -> int:
    """Number of images that causes are sought in: 16, or more of small ones."""
    return min(len(rows), max(_STUDIED, _STUDIED_TOKENS // len(rows["tokens"].iloc[0])))


def concentrated(layout: TokenLayout, values: Values, free: np.ndarray) -> str | None:
    """Where the tokens [K, N] deviate, in words, if in a third at most of the images, rows of the grid or slots."""
    excess = np.where(values.possible & np.isfinite(values.logp), -values.logp - values.entropy, _IMPOSSIBLE)
    excess = np.where(free, excess, np.nan)
    usual = float(np.nanstd(np.minimum(excess, _IMPOSSIBLE / 2))) or 1.0
    rows = [slots for grid in layout.rows for slots in grid]
    groups = {
        "image": [excess[number] for number in range(len(excess))],
        "row": [excess[:, slots] for slots in rows],
        "slot": [excess[:, slot] for slot in layout.free_slots()],
    }
    best, text = 0.0, None
    for kind, parts in groups.items():
        z = np.array([np.nansum(image) / usual / math.sqrt(max(1, (~np.isnan(image)).sum())) for image in parts])
        far = np.flatnonzero(np.abs(z) > _FAR)
        if 0 < len(far) <= max(1, len(z) // 3) and np.abs(z).max() > best:
            best, shown = float(np.abs(z).max()), ", ".join(str(number + 1) for number in far[:3])
            text = f"{kind}{'s' * (len(far) > 1)} {shown}" + (f" and {len(far) - 3} more" if len(far) > 3 else "")
    return text


def named(causes: Sequence[Cause], images: int) -> str:
    """The likeliest causes in words: more than one where the tokens do not tell them apart."""
    close = [cause for cause in causes if cause.nats > causes[0].nats - _CLOSE]
    some = [cause.setting is None and cause.images < images for cause in close]
    counts = [f" in {cause.images} of {images} images" * part for cause, part in zip(close, some, strict=True)]
    parts = [cause.what + count for cause, count in zip(close, counts, strict=True)]
    return f"{' or '.join(parts)} ({causes[0].nats:,.0f} nats more likely than the claim)"


def _of_some(ratio: np.ndarray) -> float:
    """Log likelihood ratio where every image may be of the claim or of the other one."""
    return float(np.logaddexp(ratio.sum(), np.logaddexp(0, ratio).sum() - len(ratio) * math.log(2)) - math.log(2))


class _Study:
    """The log likelihood of images' free tokens under alternatives, summed by image."""

    def __init__(self, model: ImageModel, rows: pd.DataFrame, sampling: Sampling, floor: float, guided: bool):
        self.model, self.rows, self.sampling, self._floor, self._guided = model, rows, sampling, floor, guided
        self.tokens = np.stack(rows["tokens"]).astype(np.int64)
        self.texts = rows["prompt"].tolist()
        self.claim = self.likelihoods([sampling])[0]

    def alternatives(self) -> list[tuple[str, Sampling]]:
        """Other settings than those claimed, each with the name of the one that differs."""
        claimed = self.sampling
        values = {
            "guidance": [*_GUIDANCE, 0.85 * claimed.guidance, 1.15 * claimed.guidance] if self._guided else [],
            "temperature": [claimed.temperature * factor for factor in _FACTORS],
            "top_k": [k for k in _TOP_K if k < self.model.layout.v_image],
            "top_p": list(_TOP_P),
        }
        pairs = ((name, value) for name, others in values.items() for value in others if value != self._claimed(name))
        return [(name, replace(claimed, **{name: value})) for name, value in pairs]

    def likelihoods(
        self,
        options: Sequence[Sampling],
        texts: Sequence[str] | None = None,
        tokens: np.ndarray | None = None,
        kept: Sampling | None = None,
        random: Sequence[float] = (),
    ) -> np.ndarray:
        """[options, K] log likelihood of the images under each sampling, perhaps of other prompts or tokens. `kept`:
        condition on the tokens that this one's filters keep, in the place of the filters of `options`; `random`: by
        option, the share of the tokens that is drawn uniformly."""
        texts, tokens = texts or self.texts, self.tokens if tokens is None else tokens
        width, batch = pieces(self.model)
        scales = {option.guidance for option in (*options, *([kept] if kept else []))}
        mask = kept and Target(self.model.layout, kept, self.model.device)
        targets = [Target(self.model.layout, option, self.model.device) for option in options]
        total = np.zeros((len(options), len(tokens)))
        for start in range(0, len(tokens), batch):
            some = slice(start, start + batch)
            for logits, positions in self._logits(texts[some], tokens[some], scales, width):
                chosen = torch.from_numpy(tokens[some]).to(self.model.device)[:, positions[0]]
                support = mask and mask(logits(kept.guidance), positions)[..., : self.model.layout.v_image] > 0
                each = zip(options, targets, random or [0.0] * len(options), strict=True)
                for place, (option, target, share) in enumerate(each):
                    if support is None:
                        log_p = self._log_p(target, logits(option.guidance), positions, chosen, share)
                    else:
                        log_p = _within(support, logits(option.guidance) / option.temperature, chosen)
                    total[place, some] += log_p.sum(1).double().cpu().numpy()
        return total

    @PinnedTorch()
    def _logits(
        self, texts: Sequence[str], tokens: np.ndarray, scales: set[float], width: int
    ) -> Iterator[tuple[Callable[[float], Tensor], Tensor]]:
        """Logits by guidance scale, and their slots: any scale follows from those of 1 and of 2."""
        if len(scales) == 1:
            for logits, positions in forced_logits(self.model, texts, tokens, *scales, width):
                yield lambda _, logits=logits: logits, positions
            return
        pair = (forced_logits(self.model, texts, tokens, scale, width) for scale in (1.0, 2.0))
        for (one, positions), (two, _) in zip(*pair, strict=True):
            yield lambda scale, one=one, two=two: one if scale == 1 else torch.lerp(one, two, scale - 1), positions

    @PinnedTorch()
    def _log_p(self, target: Target, logits: Tensor, positions: Tensor, chosen: Tensor, share: float) -> Tensor:
        p = at(target(logits, positions), chosen)
        inside = chosen.clamp(max=logits.shape[-1] - 1)
        every = (at(logits, inside) - logits.logsumexp(-1)).exp()
        mixed = (1 - self._floor) * p + self._floor * every
        mixed = mixed.nan_to_num(1 / logits.shape[-1])  # float16 overflows: any token may have been drawn
        mixed = (1 - share) * mixed + share / logits.shape[-1]
        return torch.where(target.forced_at(positions) < 0, mixed.clamp(min=1e-30).log(), 0.0)

    def setting(self, name: str, value: float, ratio: np.ndarray) -> Cause:
        """The cause that a setting had another value."""
        off, label = {"top_k": 0, "top_p": 1.0}.get(name), name.replace("_", "-")
        texts = [f"no {label}" if number == off else f"{label} {number:g}" for number in (value, self._claimed(name))]
        return Cause(", not ".join(texts), float(ratio.sum()), int((ratio > 0).sum()), name, float(value))

    def estimated(self, cause: Cause) -> Cause:
        """The cause with the likeliest value of its setting, where that is one of guidance and temperature."""
        if cause.setting not in ("guidance", "temperature"):
            return cause
        name, claimed = cause.setting, self._claimed(cause.setting)
        value, low, high = self._likeliest(name, cause.value)
        what = f"{name} {value:.3g} [{low:.3g}, {high:.3g}], not {claimed:g}"
        if name == "guidance" and claimed != 1 and low - _ONE <= 1 <= high + _ONE:
            what = f"no unconditional row: {what}"
        if name == "guidance" and value < 0.5:
            what = f"the prompt did not reach the model: {what}"
        return replace(cause, what=what, value=value, low=low, high=high)

    def _claimed(self, name: str) -> float:
        return getattr(self.sampling, name)

    def _likeliest(self, name: str, start: float) -> tuple[float, float, float]:
        """Likeliest value near `start`, and the ends of its 95 % interval: of the tokens that the filters keep at
        `start`, and then once more at the likeliest value, so that filters do not make the likelihood jump."""
        low = high = start
        for reach in (0.3 * max(start, 0.5), None):
            reach = max(2.5 * (high - low), 0.004) if reach is None else reach
            grid = np.linspace(max(start - reach, 0.0 if name == "guidance" else 0.02), start + reach, _STEPS)
            support = replace(self.sampling, **{name: start})
            totals = self.likelihoods([replace(self.sampling, **{name: float(x)}) for x in grid], kept=support).sum(1)
            fine = np.linspace(grid[0], grid[-1], 2001)
            curve = CubicSpline(grid, totals)(fine)
            inside = fine[curve >= curve.max() - _DROP]
            start, low, high = float(fine[curve.argmax()]), float(inside[0]), float(inside[-1])
        return start, low, high

    def prompts(self) -> dict[str, np.ndarray]:
        """Log likelihood ratios of other prompts than the images' own."""
        others = {"the prompt is missing: p under the empty prompt is higher": [""] * len(self.texts)}
        if len(set(self.texts)) > 1:
            others["prompts are mixed up: p under the next image's prompt is higher"] = [*self.texts[1:], self.texts[0]]
        halves = [" ".join(text.split()[: max(1, len(text.split()) // 2)]) for text in self.texts]
        others["the prompt is cut: p under its first half is higher"] = halves
        ratios = {}
        for what, texts in others.items():
            with suppress(SpecbenchError, ValueError, IndexError):  # not every model encodes any text
                ratios[what] = self.likelihoods([self.sampling], texts)[0] - self.claim
        return ratios

    def orders(self) -> dict[str, np.ndarray]:
        """Log likelihood ratios of other orders of the tokens."""
        read = {what: self.tokens[:, _places(self.model.layout, order)] for what, order in _ORDERS.items()}
        return {what: self.likelihoods([self.sampling], None, tokens)[0] - self.claim for what, tokens in read.items()}

    def random(self, exact: _Study) -> dict[str, np.ndarray]:
        """Log likelihood ratios of the likeliest share of tokens that are drawn uniformly and not from p, to the
        likelier of the claim and float32, `exact`: rounding, too, makes single tokens unlikely."""
        claim = np.maximum(self.claim, exact.claim)
        ratios = self.likelihoods([self.sampling] * len(_RANDOM), random=_RANDOM) - claim
        best = max(range(len(_RANDOM)), key=lambda place: _of_some(ratios[place]))
        what = f"tokens are replaced at random: about {100 * _RANDOM[best]:g} % are, or follow one that is"
        return {what: ratios[best]}

    def of_format(self, load: Callable[[str], ImageModel], dtype: str) -> _Study:
        """The same images under the model in another number format."""
        floor = _FLOOR.get(dtype, _ROUNDED_FLOOR)
        return _Study(load(dtype), self.rows, self.sampling, floor, self._guided)

    def formats(self, load: Callable[[str], ImageModel], dtype: str, exact: _Study) -> dict[str, np.ndarray]:
        """Log likelihood ratios of other number formats: of the tokens, and of log p where it is recorded.

        Kernels of one format round in other places, so that float32, amid all of them, is often likelier than one's
        own: tokens tell a format only if it is likelier than float32, too.
        """
        studies = {dtype: self, "float32": exact}
        for other in DTYPES:
            if other not in studies:
                with suppress(SpecbenchError):  # of eight bits: an extra, and not of every model
                    studies[other] = self.of_format(load, other)
        claimed = self.error()
        ratios = {}
        for other in [name for name in studies if name != dtype]:
            study = studies[other]
            tokens = study.claim - max(self.claim, exact.claim, key=np.sum)
            by_logp = 0.0 if claimed is None else _nearer(claimed, study.error())
            ratios[f"another number format: {other}, not {dtype}"] = tokens + by_logp
        return ratios

    def error(self) -> np.ndarray | None:
        """[K, N] distance of the recorded log p from this model's, NaN where unknown; None where none is recorded."""
        recorded = self.rows.get("logp")
        if recorded is None or recorded.isna().any():
            return None
        logp = teacher_forced_values(self.model, self.rows, self.sampling).logp
        with np.errstate(invalid="ignore"):
            return np.where(np.stack(self.rows["forced"]), np.nan, np.abs(np.stack(recorded) - logp))

    def seen(self) -> list[str]:
        """What the tokens rule out: the intervals of guidance and temperature, in words."""
        names = ["temperature", *(["guidance"] if self._guided and self.sampling.guidance != 1 else [])]
        intervals = []
        for name in names:
            value, low, high = self._likeliest(name, self._claimed(name))
            intervals.append(f"{name} by the tokens: {value:.3g} [{low:.3g}, {high:.3g}]")
        return intervals


def _nearer(claimed: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[K] log likelihood ratio of two errors of log p by Laplace; 0 unless the claimed one's scale is far larger."""
    both = np.isfinite(claimed) & np.isfinite(other)
    errors = [np.where(both, error, 0.0) for error in (claimed, other)]
    mine, theirs = (error.sum() / max(1, both.sum()) + _DIGITS for error in errors)
    if mine < 2 * theirs:
        return np.zeros(len(both))
    return (errors[0] / mine - errors[1] / theirs + math.log(mine / theirs) * both).sum(1)


def _within(support: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    """Log p [B, T] of the tokens given that they are among those `support` [B, T, V]; 0 for those that are not."""
    inside = chosen.clamp(max=support.shape[-1] - 1)
    log_p = at(logits.masked_fill(~support, -torch.inf).log_softmax(-1), inside)
    return torch.where(at(support, inside) & (inside == chosen), log_p, 0.0)


def _skewed(grid: np.ndarray, step: int) -> np.ndarray:
    return np.stack([np.roll(row, step * number) for number, row in enumerate(grid)])


def _places(layout: TokenLayout, order: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[N] slot whose token is read at each slot, each grid in another order."""
    places = np.arange(layout.length)
    for rows in layout.rows:
        grid = np.array(rows)
        places[grid.ravel()] = grid.ravel()[order(np.arange(grid.size).reshape(grid.shape)).ravel()]
    return places
