"""SJD-SV (arXiv 2609.13245) according to a note on the paper: drafts accepted in sequences of rising p, called runs.

Let t_i = p_i(x_i). The window is split into maximal runs b..e in which t does not fall. The shortest suffix g..e of a
run that holds the share `alpha` of the run's sum of t is tested:

    accept the run with probability min(1, r_g .. r_e), with r_i the acceptance ratio of draft i
    else, unless `retest` is off, test g..e-1, then g..e-2, and so on, until a part is accepted
    redraw the slot after the accepted part (slot g if no part is accepted) from the residual distribution

No code was found, the paper was not read, and the note leaves open the treatment of b..g-1 (`before`: accepted without
a test, or tested one by one), the random number for a shortened run (`coins`), and the failure of g alone (here: slot g
is redrawn). A run is tested only if the previous run was accepted completely. A draft with p = 0 is rejected. Lossy:
the run looks ahead, and part of it may not be tested.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.verification.grouped import Grouped
from specbench.decoding.verification.lantern import Lantern
from specbench.decoding.verification.ratio_tests import DraftTests, Exact, RatioTest, Verdict

_TIE = 1 - 1e-9  # Tolerance: with alpha = 1, rounding must not exclude a whole run


class RunTest(RatioTest):
    """Tests of runs; the subclass names in `ratios` the verifier whose acceptance ratios are used."""

    ratios: type[RatioTest]

    def __init__(
        self,
        context: Context,
        alpha: float,
        last: int,
        retest: bool,
        coins: Literal["one", "fresh"],
        before: Literal["accepted", "tested"],
        **options: Any,
    ):
        super().__init__(context)
        self._alpha, self._last, self._retest, self._one_coin = alpha, last, retest, coins == "one"
        self._one_by_one = before == "tested"
        self._length = context.layout.length
        self._ratio = self.ratios(context, **options)

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return self._ratio.acceptance(p, q, x, depth)

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        # Slots past the end hold no drafts: an image must not depend on the progress of other rows of its batch.
        exists = tests.drafted & (tests.position < self._length)
        t = torch.where(exists, tests.p.gather(-1, tests.draft[..., None]).squeeze(-1), 0.0).double()
        rises = torch.nn.functional.pad((t[:, 1:] >= t[:, :-1]) & exists[:, 1:] & exists[:, :-1], (1, 0))
        run = (~rises).cumsum(1) - 1
        place = torch.arange(t.shape[1], device=t.device).expand_as(run)
        end = _last_of_run(place, torch.ones_like(rises), run)
        sums = t.cumsum(1)
        rest = sums.gather(1, end) - sums + t  # sum over the run's tokens from this token on
        start = torch.full_like(run, t.shape[1]).scatter_reduce(1, run, place, "amin").gather(1, run)
        enough = rest >= self._alpha * rest.gather(1, start) * _TIE
        if self._last:
            enough = end - place >= self._last - 1
        tested = _last_of_run(place, enough | (place == start), run)
        # Products of ratios from the run's first tested token on, as sums of logarithms; 0 after any ratio of 0.
        ratio = torch.where(exists, self._ratio.of_drafts(tests).double(), 1.0)
        logs = ratio.clamp(1e-300, 1e300).log().cumsum(1)
        before = torch.nn.functional.pad(logs, (1, 0)).gather(1, tested)
        coin = tests.coin.gather(1, tested) if self._one_coin else tests.coin
        passed = (place >= tested) & (coin.log() < logs - before)
        if not self._retest:
            passed = passed & (place == end)
        passed_to = _last_of_run(place, passed, run)
        alone = tests.coin < ratio if self._one_by_one else True
        accepted = ((place < tested) & alone) | ((place >= tested) & (place <= passed_to))
        return Verdict(exists & (t > 0) & accepted, {})


def _last_of_run(place: Tensor, chosen: Tensor, run: Tensor) -> Tensor:
    """For each token of [B, K], the last `chosen` place of its run, -1 if there is none."""
    last = torch.full_like(run, -1).scatter_reduce(1, run, torch.where(chosen, place, -1), "amax")
    return last.gather(1, run)


class ExactRuns(RunTest):
    """`RunTest` with the acceptance ratio p/q."""

    ratios = Exact


class GroupedRuns(RunTest):
    """`RunTest` with GSD's acceptance ratio p(C)/q(C)."""

    ratios = Grouped


class LanternRuns(RunTest):
    """`RunTest` with LANTERN's acceptance ratio p(A)/q. A rejected token is redrawn from the chosen residual."""

    ratios = Lantern
