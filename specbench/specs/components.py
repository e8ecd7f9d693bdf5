"""The menu of orthogonal choices a decoder is made of, as data. Importing this never imports torch.

Each choice (drafter, init, verifier, residual, refine) has a few values; a value names the code that implements it, the
options it adds to the command line, and whether it keeps the joint distribution of the image intact.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.specs.options import Option
from specbench.specs.tree_paths import node_paths


@dataclass(frozen=True)
class Component:
    """One value of one choice.

    Attributes:
        target: "module:attribute" of its implementation, imported only when a decoder is built.
        summary: one line for `specbench list`.
        options: the knobs it adds.
        lossless: whether it leaves the joint distribution of the image equal to AR sampling.
        ignores: choices that have no effect beside it.
        only_with: values of other choices it depends on; empty if it goes with all.
    """

    target: str
    summary: str
    options: tuple[Option, ...] = ()
    lossless: bool = True
    only_with: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


WINDOW = Option(
    "window", 16, "tokens fed per target forward: the last committed one and window-1 drafts", minimum=1, maximum=65536
)
FRESH_Q = Option(
    "fresh-q",
    "uniform",
    "q recorded for a uniformly drawn fresh token: its true law, or one-hot as the released SJD code does",
    choices=("uniform", "onehot"),
)

_CLUSTER = (
    Option("G", 10, "cluster size", minimum=1, maximum=65536),
    Option(
        "d", 0.5, "members lie at most this far in squared codebook distance; inf switches the filter off", above=0.0
    ),
    Option("delta", 0.15, "members' probability differs from the draft's by at most this", above=0.0),
    Option("cluster", "target", "what ranks the tokens", choices=("target", "draft", "embedding")),
    Option("order", "ascending", "rank order in which the window of G is cut", choices=("ascending", "descending")),
    Option("bounds", "half-open", "slice convention around the draft", choices=("half-open", "inclusive")),
)

_CODES = Option(
    "neighbours",
    "normalised",
    "codebook rows are scaled to length 1 before distances, or raw as in the released LANTERN code",
    choices=("normalised", "raw"),
)
_OMEGA = (
    Option("schedule", "uniform", "how the weight falls with depth", choices=("uniform", "exponential", "linear")),
    Option("delta", 1.1, "relaxation budget: the mean weight over the depths", above=0.0),
    Option("nu", 0.7, "decay per depth of the exponential schedule", minimum=0.0),
    Option("slope", 0.5, "fall of the linear schedule, as a share of delta", minimum=0.0, maximum=1.0),
    Option("floor", 0.0, "lift every weight to at least this; 1 never rejects more than the exact rule", minimum=0.0),
)

DRAFTERS = {
    "none": Component(
        "specbench.decoding.drafters.jacobi:NoDraft",
        "no drafts: one token per forward (AR)",
        ignores=("init", "verifier", "residual", "refine"),
    ),
    "jacobi": Component(
        "specbench.decoding.drafters.jacobi:Jacobi", "the previous iteration's tail, then fresh tokens", (WINDOW,)
    ),
    "jacobi-tree": Component(
        "specbench.decoding.drafters.jacobi:JacobiTree",
        "the jacobi window plus sibling branches at its first slot",
        (
            WINDOW,
            Option("siblings", 3, "candidates for the first draft slot", minimum=1, maximum=16),
            Option("depth", 4, "slots each sibling branch covers", minimum=1),
        ),
    ),
    "eagle": Component(
        "specbench.decoding.drafters.eagle:Eagle",
        "a trained head extrapolates the target's features along a static tree",
        (
            Option(
                "tree",
                "mc_sim_7b_63",
                "chain, mc_sim_7b_63, naive_extend_57, or paths such as '0 1 00 01 10'",
                check=node_paths,
            ),
            Option("head", "", "folder of a draft head; the model's own if empty"),
        ),
        ignores=("init",),
    ),
    "zipar": Component(
        "specbench.decoding.zipar:ZipAR",
        "no drafts: several image rows grow side by side",
        (
            Option("rows-window", 8, "a row starts once the one above has this many tokens", minimum=1),
            Option("adaptive", False, "let a row wait until its first token survives one more token above"),
        ),
        lossless=False,
        ignores=("init", "verifier", "residual", "refine"),
    ),
}

INITS = {
    "uniform": Component(
        "specbench.decoding.drafters.token_init:Uniform", "a uniformly random image token", (FRESH_Q,)
    ),
    "left-repeat": Component(
        "specbench.decoding.drafters.token_init:left_repeat", "copy of the left neighbour, q one-hot"
    ),
    "left-sample": Component(
        "specbench.decoding.drafters.token_init:left_sample", "a draw from the left neighbour's distribution"
    ),
    "above-repeat": Component(
        "specbench.decoding.drafters.token_init:above_repeat", "copy of the neighbour above, q one-hot"
    ),
    "above-sample": Component(
        "specbench.decoding.drafters.token_init:above_sample", "a draw from the upper neighbour's distribution"
    ),
}

VERIFIERS = {
    "exact": Component("specbench.decoding.verification.ratio_tests:Exact", "accept with min(1, p/q)"),
    "match": Component(
        "specbench.decoding.verification.ratio_tests:Match", "accept iff the slot's new draw equals the draft"
    ),
    "grouped": Component(
        "specbench.decoding.verification.grouped:Grouped",
        "accept with min(1, p(C)/q(C)) over a cluster C",
        _CLUSTER,
        False,
    ),
    "amplify": Component(
        "specbench.decoding.verification.ratio_tests:Amplify",
        "accept with min(1, k p/q)",
        (Option("k", 2.0, "factor on the acceptance ratio", minimum=1.0),),
        False,
    ),
    "add": Component(
        "specbench.decoding.verification.ratio_tests:Add",
        "accept with min(1, (p + eps)/q)",
        (Option("eps", 0.1, "mass added to p before the ratio", minimum=0.0, maximum=1.0),),
        False,
    ),
    "omega": Component(
        "specbench.decoding.verification.cool_sd:DepthWeighted",
        "accept with min(1, w p/q), w by draft depth",
        _OMEGA,
        False,
    ),
    "lantern": Component(
        "specbench.decoding.verification.lantern:Lantern",
        "accept with min(1, p(A)/q), A the nearest neighbours of total mass delta",
        (
            Option("k", 1000, "neighbours looked at", minimum=1, maximum=1000),
            Option("delta", 0.1, "neighbours' mass that may be counted in", minimum=0.0, maximum=1.0),
            _CODES,
        ),
        False,
    ),
    "lantern++": Component(
        "specbench.decoding.verification.lantern:LanternPlusPlus",
        "accept with min(1, p(A)/q), A the nearest neighbours with p(A) <= lambda p",
        (
            Option("k", 10, "neighbours looked at", minimum=1, maximum=1000),
            Option("lambda", 2.0, "acceptance may grow by at most this factor", minimum=1.0),
            _CODES,
        ),
        False,
    ),
}

_LANTERN = ("lantern", "lantern++")

RESIDUALS = {
    "standard": Component("specbench.decoding.verification.residuals:standard", "[p - q]+ normalised"),
    "optimal": Component(
        "specbench.decoding.verification.residuals:optimal", "[p - a q]+ normalised, for any acceptance a"
    ),
    "lantern": Component(
        "specbench.decoding.verification.lantern:paper",
        "LANTERN's papers: p with A's mass on the draft, less q",
        only_with=_LANTERN,
    ),
    "lantern-release-q": Component(
        "specbench.decoding.verification.lantern:release_q",
        "released LlamaGen and Anole code: p less a q without the neighbours",
        only_with=_LANTERN,
    ),
    "lantern-release-p": Component(
        "specbench.decoding.verification.lantern:release_p",
        "released Lumina code: p without the neighbours, less q",
        only_with=_LANTERN,
    ),
}

REFINES = {
    "resample": Component(
        "specbench.decoding.verification.refinement:Resample", "every unverified slot is drawn afresh from p"
    ),
    "reuse": Component(
        "specbench.decoding.verification.refinement:Reuse",
        "keep the draft where p/q > tau, else draw afresh",
        (Option("tau", 0.5, "confidence above which an unverified draft is kept; inf is SJD", minimum=0.0),),
        False,
    ),
    "restart": Component(
        "specbench.decoding.verification.refinement:Restart", "throw the tail away and initialise it afresh"
    ),
    "couple": Component(
        "specbench.decoding.verification.refinement:Couple", "maximal coupling of each slot with its old draft"
    ),
    "gumbel": Component(
        "specbench.decoding.verification.refinement:Gumbel", "race with noise frozen per absolute position"
    ),
}

CHOICES = {"drafter": DRAFTERS, "init": INITS, "verifier": VERIFIERS, "residual": RESIDUALS, "refine": REFINES}
