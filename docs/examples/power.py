"""A decoder in one file: SJD that accepts a draft with probability min(1, p/q)^power."""

from specbench.decoding.verification.ratio_tests import RatioTest, ratio
from specbench.specs.components import VERIFIERS, Component
from specbench.specs.options import Option
from specbench.specs.presets import Preset


class Power(RatioTest):
    def __init__(self, context, power):
        super().__init__(context)
        self._power = power

    def acceptance(self, p, q, x, depth=1):  # p, q: [..., V]; x: [..., candidates]; returns [..., candidates]
        return ratio(p, q, x) ** self._power


POWER = Option("power", 0.5, "exponent on p/q; 1 is exact", above=0.0, maximum=1.0)
VERIFIERS["power"] = Component("power:Power", "accept with min(1, p/q)^power", (POWER,), lossless=False)
DECODER = Preset(
    "power",
    "SJD with a softened test",
    paper="-",
    equation="-",
    choices={"drafter": "jacobi", "init": "uniform", "verifier": "power", "residual": "standard", "refine": "resample"},
)
