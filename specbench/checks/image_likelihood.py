"""Log likelihood of stored images under many sampling settings, computed in few teacher-forced passes, and a test
whether the images' tokens are samples of a given setting."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from specbench.checks.teacher_forced import EDGE, EDGES, Shift, Values, forced_logits, pieces
from specbench.checks.token_likelihood import Alternative, Held, SlotLogits
from specbench.decoding.sampling import Target, at
from specbench.models.interface import ImageModel, TokenLayout
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import FEWEST, LEVEL, Tokens, audit_tokens
from specbench.system.torch_state import PinnedTorch

ROUNDED = 0.1  # Share of the unfiltered distribution that explains tokens moved beyond filters by rounding
_MOST_EXCESS = 10.0  # Largest -log p counted for a token, in nats
_FAR = 5.0  # Number of standard errors at which a group counts as deviating
_STEPS = 9  # Number of values at which the likelihood of a setting is computed
_DROP = 1.92  # Drop of log likelihood at the ends of a 95 % interval: half the chi-square quantile


class _Slots(NamedTuple):
    """Piece of a teacher-forced pass: some slots of some images."""

    images: slice
    positions: Tensor  # [B, T]
    free: Tensor  # [B, T] bool
    chosen: Tensor  # [B, T] tokens
    at: Callable[[float], SlotLogits]  # function that returns the logits at a guidance scale

    def fill(self, wholes: Sequence[np.ndarray], parts: Sequence[Tensor]) -> None:
        """Copy values [B, T] of this piece to their places in the arrays `wholes` [K, N]."""
        for whole, part in zip(wholes, parts, strict=True):
            whole[self.images, self.positions[0].cpu()] = part.cpu().numpy()


class ImageLikelihood:
    """The log likelihood of images' free tokens, summed by image.

    Attributes:
        claim, loose: [K] log likelihood under the claimed sampling; `loose` allows as many tokens beyond filters as
            rounding causes.
        p, every, greatest, entropy: [K, N] p of each token, p without filters at temperature 1, whether no other token
            is likelier, and the entropy of p in the slot.
        rank: the largest rank of a token by p: no smaller top-k can have drawn all tokens.
        surprise: [K] standard errors by which an image is less likely than the model's own images on average.
    """

    @PinnedTorch()
    def __init__(self, model: ImageModel, rows: pd.DataFrame, sampling: Sampling, floor: float, few: int):
        """`floor`: share of the unfiltered distribution in the claim; `few`: the largest top-k of an alternative."""
        self.model, self.rows, self.sampling, self.way = model, rows, sampling, Alternative(sampling, floor=floor)
        self.tokens, self.free = np.stack(rows["tokens"]).astype(np.int64), ~np.stack(rows["forced"])
        self.texts = rows["prompt"].tolist()
        self._target = Target(model.layout, sampling, model.device)
        # Penalties lower the rank of tokens that the image already contains.
        self._few = max(few, sampling.top_k + min(self.tokens.shape[1], few)) if sampling.top_k else 0
        self.p, self.every, self.greatest, self.entropy, spread = np.zeros((5, *self.tokens.shape))
        self.rank = 1
        for slots in self._slots([sampling.guidance]):
            logits = slots.at(sampling.guidance)
            self.rank = max(self.rank, int(torch.where(slots.free, logits.rank, 1).max()))
            every = logits.every.nan_to_num(1 / model.layout.v_image)
            parts = (logits.p(self.way, logits.every), every, logits.likeliest, *logits.spread(self.way))
            slots.fill((self.p, self.every, self.greatest, self.entropy, spread), parts)
        self.claim, self.loose = self.mixed(0.0), self.mixed((ROUNDED - floor) / (1 - floor))
        excess = np.minimum(-np.log(np.maximum(self.p, 1e-30)), _MOST_EXCESS) - self.entropy
        self.surprise = self.sum(excess) / np.sqrt(np.maximum(self.sum(spread), 1.0))

    def under(self, **settings: Any) -> Alternative:
        """The claimed sampling with other settings."""
        return replace(self.way, sampling=replace(self.sampling, **settings))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[K] sums of `values` [K, N] over the free slots."""
        return np.where(self.free, values, 0.0).sum(1)

    def mixed(self, share: float, other: np.ndarray | float | None = None) -> np.ndarray:
        """[K] log likelihood if a share of the tokens is drawn with the probabilities `other`, by default `every`."""
        other = self.every if other is None else other
        return self.sum(np.log(np.maximum((1 - share) * self.p + share * other, 1e-30)))

    @PinnedTorch()
    def likelihoods(
        self,
        ways: Sequence[Alternative],
        texts: Sequence[str] | None = None,
        tokens: np.ndarray | None = None,
        shift: Shift = (),
    ) -> np.ndarray:
        """[ways, K] log likelihood of the images, optionally with other prompts, tokens or positions."""
        tokens = self.tokens if tokens is None else tokens
        total = np.zeros((len(ways), len(tokens)))
        for slots in self._slots({way.sampling.guidance for way in ways}, texts, tokens, shift):
            held = None
            for place, way in enumerate(ways):
                logits = slots.at(way.sampling.guidance)
                every = logits.every
                if way.penalises:
                    held = held or self._held(tokens[slots.images])
                    logits = logits.penalised(way, held, slots.positions)
                log_p = logits.p(way, every).clamp(min=1e-30).log()
                total[place, slots.images] += torch.where(slots.free, log_p, 0.0).sum(1).double().cpu().numpy()
        return total

    def _slots(
        self,
        scales: Collection[float],
        texts: Sequence[str] | None = None,
        tokens: np.ndarray | None = None,
        shift: Shift = (),
    ) -> Iterator[_Slots]:
        """Yield the images in pieces: a few slots of a few images at a time."""
        texts, tokens = texts or self.texts, self.tokens if tokens is None else tokens
        width, batch = pieces(self.model)
        for start in range(0, len(tokens), batch):
            some = slice(start, start + batch)
            for passes, positions in self._passes(texts[some], tokens[some], scales, width, shift):
                chosen = torch.from_numpy(tokens[some]).to(self.model.device)[:, positions[0]]
                logits = partial(self._sorted, passes, positions, chosen, {})
                yield _Slots(some, positions, self._target.forced_at(positions) < 0, chosen, logits)

    def _sorted(
        self, passes: Sequence[Tensor], positions: Tensor, chosen: Tensor, known: dict[float, SlotLogits], scale: float
    ) -> SlotLogits:
        """Sorted logits at a guidance scale. `known`: a cache, for the claimed scale and the latest other scale."""
        if scale not in known:
            if scale != self.sampling.guidance and (others := known.keys() - {self.sampling.guidance}):
                del known[others.pop()]
            logits = passes[0] if len(passes) == 1 or scale == 1 else torch.lerp(*passes, scale - 1)
            known[scale] = SlotLogits(self._target.of_grid(logits, positions).float(), chosen, self._few)
        return known[scale]

    @PinnedTorch()
    def _passes(
        self, texts: Sequence[str], tokens: np.ndarray, scales: Collection[float], width: int, shift: Shift
    ) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """Yield logits and their slots: logits at the only scale, or at scales 1 and 2, which determine all others."""
        every = scales if len(scales) == 1 else (1.0, 2.0)
        passes = (forced_logits(self.model, texts, tokens, scale, width, shift) for scale in every)
        for pieces_of_scale in zip(*passes, strict=True):
            yield [logits for logits, *_ in pieces_of_scale], pieces_of_scale[0][1]

    def _held(self, tokens: np.ndarray) -> Held:
        return Held(torch.from_numpy(tokens).to(self.model.device), self.model.layout.vocab)

    @PinnedTorch()
    def are_samples(
        self,
        way: Alternative | None = None,
        texts: Sequence[str] | None = None,
        tokens: np.ndarray | None = None,
        shift: Shift = (),
        kept: np.ndarray | None = None,
    ) -> bool | None:
        """Test whether the tokens are consistent with samples of a sampling setting, as the audit of a run does.
        `kept`: the tested images. Return None if there are too few tokens."""
        way, kept = way or self.way, np.ones(len(self.tokens), bool) if kept is None else kept
        if way.sampling.entropy_scale is not None or self.free[kept].sum() < FEWEST:
            return None
        tokens = self.tokens if tokens is None else tokens
        before, through, beyond = np.zeros((3, *tokens.shape))
        for slots in self._slots([way.sampling.guidance], texts, tokens, shift):
            logits = slots.at(way.sampling.guidance)
            if way.penalises:
                logits = logits.penalised(way, self._held(tokens[slots.images]), slots.positions)
            impossible = (logits.x + EDGE < logits.kept(way).least)[..., 0]
            slots.fill((before, through, beyond), (*logits.masses(way), impossible))
        # Seeded by the tokens: the same draw for all images of a shape would add the same error to all of their tests.
        u = before + np.random.default_rng(tokens[0]).random(before.shape) * (through - before)
        free = self.free[0]
        result = audit_tokens(Tokens({"u_p": u[kept][:, free]}, None, self.entropy[kept][:, free]), LEVEL)
        exact = way.floor < ROUNDED and not way.uniform
        return not result.deviates and not (exact and beyond[kept][:, free].mean() > EDGES * (way != self.way))

    def likeliest(self, name: str, start: float) -> tuple[float, float, float]:
        """Likeliest value near `start`, and the ends of its 95 % interval. Only tokens that the filters keep at `start`
        count, so that the likelihood has no jumps. The search is then repeated from the likeliest value."""
        low = high = start
        widest = 0.3 * max(start, 0.5)  # a spline through points that are too far apart has spurious maxima
        for reach in (widest, None):
            reach = min(max(2.5 * (high - low), 0.004), widest) if reach is None else reach
            grid = np.linspace(max(start - reach, 0.0 if name == "guidance" else 0.02), start + reach, _STEPS)
            totals = self._given(name, grid, self.under(**{name: start}))
            fine = np.linspace(grid[0], grid[-1], 2001)
            curve = CubicSpline(grid, totals)(fine)
            inside = fine[curve >= curve.max() - _DROP]
            start, low, high = float(fine[curve.argmax()]), float(inside[0]), float(inside[-1])
        return start, low, high

    def likeliest_within(self, name: str, low: float, high: float) -> float:
        """Likeliest value of three digits in an interval. The filters apply, so that some values have likelihood 0."""
        values = sorted({float(f"{value:.3g}") for value in np.linspace(low, high, 2 * _STEPS + 1)} - {0.0})
        ways = [self.under(**{name: value}) for value in values]
        return values[int(self.likelihoods(ways).sum(1).argmax())]

    @PinnedTorch()
    def _given(self, name: str, grid: np.ndarray, kept: Alternative) -> np.ndarray:
        """[values] log likelihood of each guidance or temperature in `grid`. Each token's p is conditional on the
        tokens that the filters of `kept` keep."""
        scale, totals = kept.sampling.guidance, np.zeros(len(grid))
        for slots in self._slots({scale} if name == "temperature" else {1.0, 2.0, scale}):
            logits = slots.at(scale)
            least = logits.kept(kept).least
            for place, value in enumerate(grid):
                if name == "temperature":
                    log_p = logits.given(least, float(value))
                else:
                    scaled = slots.at(float(value)).logits / kept.sampling.temperature
                    log_p = _within(logits.logits >= least, scaled, slots.chosen)
                totals[place] += float(torch.where(slots.free, log_p, 0.0).sum(dtype=torch.float64))
        return totals


def concentrated(layout: TokenLayout, values: Values, free: np.ndarray) -> str | None:
    """Describe where tokens [K, N] deviate if only a third of the images, grid rows or slots deviate, else None."""
    excess = np.where(values.possible & np.isfinite(values.logp), -values.logp - values.entropy, _MOST_EXCESS)
    excess = np.where(free, excess, np.nan)
    usual = float(np.nanstd(np.minimum(excess, _MOST_EXCESS / 2))) or 1.0
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


def _within(support: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    """Log p [B, T] of the tokens, given that they are in `support` [B, T, V]; 0 for tokens outside it."""
    inside = chosen.clamp(max=support.shape[-1] - 1)
    log_p = at(logits.masked_fill(~support, -torch.inf).log_softmax(-1), inside)
    return torch.where(at(support, inside) & (inside == chosen), log_p, 0.0)
