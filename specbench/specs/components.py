"""Components of a decoder, as data: drafters, token initialisations, verifiers, residuals, refinements.

A component names the code that implements it, the options it adds to the command line, and whether it is lossless (the
joint distribution of the image tokens equals AR sampling). Importing this module never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.specs.options import Component, Option
from specbench.specs.tree_paths import node_paths

_WINDOW = Option(
    "window", 16, "tokens per target forward: the last committed token and window - 1 drafts", minimum=1, maximum=65536
)
FRESH_Q = Option(
    "fresh-q",
    "uniform",
    "draft distribution q of a uniformly drawn token: uniform (correct), or onehot as in the released SJD code",
    choices=("uniform", "onehot"),
)

DRAFT_HEAD = Option(
    "head", "", "folder or hub id of a draft head; empty for the one that comes with the model or is published for it"
)
_SIBLINGS = Option("siblings", 3, "candidates for the first draft token", minimum=1, maximum=16)
_DEPTH = Option("depth", 4, "length of each sibling branch, in tokens", minimum=1)
TAU = Option("tau", 0.5, "threshold on p/q above which an unverified draft token is kept; inf is SJD", minimum=0.0)
ANY_TAIL = Option(
    "any-tail", False, "combine with couple, gumbel or reuse too, which biases the images: the decoder is then lossy"
)

_CLUSTER = (
    Option("G", 10, "cluster size", minimum=1, maximum=65536),
    Option(
        "d",
        0.5,
        "maximum squared codebook distance to the draft token within a cluster; inf disables the filter",
        above=0.0,
    ),
    Option("delta", 0.15, "maximum probability difference to the draft token within a cluster", above=0.0),
    Option(
        "cluster",
        "target",
        "ranking of the tokens before clustering: probability under target or draft, or embedding distance",
        choices=("target", "draft", "embedding"),
    ),
    Option(
        "order",
        "ascending",
        "rank order in which the cluster of G tokens is cut out",
        choices=("ascending", "descending"),
    ),
    Option(
        "bounds", "half-open", "bounds of the cluster around the draft token's rank", choices=("half-open", "inclusive")
    ),
    Option(
        "cluster-q",
        "whole",
        "tokens that q(C) sums over: whole = the cluster (the paper); support = its tokens with p > 0 (accepts more "
        "near the top-k cut-off)",
        choices=("whole", "support"),
    ),
)
_RELEASED_CLUSTER = (
    Option(
        "d", 0.5, "maximum squared distance of input embeddings within a cluster; inf disables the filter", above=0.0
    ),
    Option("delta", 0.15, "maximum probability difference to the draft token within a cluster", above=0.0),
    Option("zero-p", True, "accept drafts with p = 0 for their cluster, as the released code does"),
)

_CODES = Option(
    "neighbours",
    "normalised",
    "codebook vectors for distances: normalised to length 1, or raw as in the released LANTERN code",
    choices=("normalised", "raw"),
)
_OMEGA = (
    Option("schedule", "uniform", "decay of the weight with draft depth", choices=("uniform", "exponential", "linear")),
    Option("delta", 1.1, "mean weight over the draft depths (relaxation budget)", above=0.0),
    Option("nu", 0.7, "decay rate per depth of the exponential schedule", minimum=0.0),
    Option(
        "slope",
        0.5,
        "linear schedule: weights fall from (1 + slope) delta to (1 - slope) delta",
        minimum=0.0,
        maximum=1.0,
    ),
    Option("floor", 0.0, "lower bound on the weights; 1 never rejects more often than the exact rule", minimum=0.0),
)

_TREE = Option(
    "tree",
    "mc_sim_7b_63",
    "draft tree: chain, mc_sim_7b_63, naive_extend_57, or node paths such as '0 1 00 01 10'",
    check=node_paths,
)
_IDS = Option(
    "head-ids",
    2048,
    "image ids that a draft may have: those with most probability in the slots committed last",
    minimum=1,
)
_PASSES = Option(
    "passes", 0, "passes that draw all drafts of a row at once; 0 draws them one by one", minimum=0, later=True
)
_VERTICAL = Component(
    "specbench.decoding.drafters.vertical:Vertical",
    "trained head that drafts a chain from the image row above and the token before",
    (_WINDOW, _SIBLINGS, _DEPTH, DRAFT_HEAD, _PASSES),
    ignores=("init",),
    is_chain=lambda values: values["siblings"] == 1,
)

DRAFTERS = {
    "none": Component(
        "specbench.decoding.drafters.jacobi:NoDraft",
        "no drafts: one token per target forward (AR)",
        ignores=("init", "verifier", "residual", "refine"),
    ),
    "replace": Component(
        "specbench.decoding.replacement:Replacement",
        "no drafts: AR, a share of whose tokens is replaced by likely ones at random",
        (
            Option("share", 0.5, "share of the tokens that is replaced; 0 is AR", minimum=0.0, maximum=1.0),
            Option("top", 100, "most probable tokens of which a replacement is drawn uniformly", minimum=1),
        ),
        lossless=False,
        ignores=("init", "verifier", "residual", "refine"),
        loop="specbench.decoding.replacement:ReplacementLoop",
    ),
    "jacobi": Component(
        "specbench.decoding.drafters.jacobi:Jacobi",
        "unverified tokens of the previous iteration, then fresh tokens",
        (_WINDOW,),
    ),
    "jacobi-tree": Component(
        "specbench.decoding.drafters.jacobi:JacobiTree",
        "jacobi window plus sibling branches at its first draft token",
        (_WINDOW, _SIBLINGS, _DEPTH),
        is_chain=lambda values: values["siblings"] == 1,
    ),
    "jacobi-lookup": Component(
        "specbench.decoding.drafters.lookup:LookupJacobi",
        "jacobi-tree whose drafts are looked up in the image where the tokens around them have changed",
        (
            _WINDOW,
            Option("lookups", 32, "drafts of a window that may be looked up, from the first", minimum=0, maximum=65536),
            _SIBLINGS,
            _DEPTH,
        ),
        is_chain=lambda values: values["siblings"] == 1,
    ),
    "jacobi-paths": Component(
        "specbench.decoding.path_jacobi:PathJacobi",
        "several independent jacobi windows, of which the one with most accepted drafts is committed",
        (_WINDOW, Option("paths", 2, "number of independent windows; 1 is jacobi", minimum=1, maximum=16)),
        lossless=False,
        loop="specbench.decoding.path_jacobi:PathLoop",
        is_chain=lambda values: values["paths"] == 1,
    ),
    "eagle": Component(
        "specbench.decoding.drafters.eagle:Eagle",
        "trained draft head that extrapolates the target's features along a static draft tree",
        (_TREE, DRAFT_HEAD),
        ignores=("init",),
        is_chain=lambda values: not set("".join(node_paths(str(values["tree"])))) - {"0"},
    ),
    "eagle-skips": Component(
        "specbench.decoding.skipped_verification:EagleSkips",
        "trained draft head some of whose drafts are committed without a target forward",
        (
            _TREE,
            Option("interval", 5, "rounds from one skipped verification to the next", minimum=2),
            Option("after", 6, "rounds before the first skipped one; at least as many as it commits tokens", minimum=1),
            DRAFT_HEAD,
        ),
        lossless=False,
        ignores=("init",),
        loop="specbench.decoding.skipped_verification:SkippingLoop",
        head_kind="eagle",
        is_chain=lambda values: not set("".join(node_paths(str(values["tree"])))) - {"0"},
    ),
    "eagle-paths": Component(
        "specbench.decoding.greedy_paths:EaglePaths",
        "trained draft head that draws several independent chains, of which the best one by p/q is verified",
        (
            _WINDOW,
            Option("paths", 3, "number of independent chains; 1 is a chain of eagle", minimum=1, maximum=16),
            DRAFT_HEAD,
        ),
        ignores=("init",),
        loop="specbench.decoding.greedy_paths:GreedyPathLoop",
        head_kind="eagle",
    ),
    "vertical": _VERTICAL,
    "vertical-coupled": replace(
        _VERTICAL,
        target="specbench.decoding.drafters.vertical:CoupledVertical",
        summary="vertical, with each redrawn draft coupled to the draft of the step before",
        head_kind="vertical",
    ),
    "eagle-reduced": Component(
        "specbench.decoding.drafters.reduced_head:ReducedEagle",
        "eagle whose head computes logits of a few image ids",
        (_TREE, DRAFT_HEAD, _IDS),
        ignores=("init",),
        head_kind="eagle",
        is_chain=lambda values: not set("".join(node_paths(str(values["tree"])))) - {"0"},
    ),
    "vertical-reduced": replace(
        _VERTICAL,
        target="specbench.decoding.drafters.reduced_head:ReducedVertical",
        summary="vertical-coupled whose head computes logits of a few image ids",
        options=(*_VERTICAL.options, _IDS),
        head_kind="vertical",
    ),
    "ssd": Component(
        "specbench.decoding.drafters.ssd:Ssd",
        "trained heads that draft an image row from the row above, committed after some rounds of tests",
        (
            Option(
                "rounds", 2, "tested forwards of a row before it is committed as it stands", minimum=0, maximum=65536
            ),
            Option("rows", 1, "image rows drafted together", minimum=1, maximum=2),
            DRAFT_HEAD,
        ),
        lossless=False,
        only_with=("couple",),
        ignores=("init",),
    ),
    "zipar": Component(
        "specbench.decoding.zipar:ZipAR",
        "no drafts: decodes several image rows in parallel",
        (
            Option(
                "rows-window",
                8,
                "start a row once the row above has this many tokens, counted as --rows-count says",
                minimum=1,
            ),
            Option(
                "rows-count",
                "tokens",
                "what counts in the row above: tokens = image tokens; released = as in the released code (row "
                "ends too; without row ends, row 1 waits for all of row 0)",
                choices=("tokens", "released"),
            ),
            Option(
                "stand-ins",
                "dropped",
                "token that stands in for a row's missing predecessor in models without row ends: dropped = seen by "
                "one column; kept = seen by all later ones until the true token replaces it, as in the released code",
                choices=("dropped", "kept"),
            ),
            Option(
                "adaptive",
                False,
                "start a row only after its first token is re-verified with one more token of the row above",
            ),
        ),
        lossless=False,
        ignores=("init", "verifier", "residual", "refine"),
        loop="specbench.decoding.zipar:ZipARLoop",
    ),
    "row-jacobi": Component(
        "specbench.decoding.row_jacobi:RowJacobi",
        "a Jacobi window in each of several image rows, which see committed tokens of the rows above",
        (
            Option("window", 8, "tokens per image row and target forward", minimum=1, maximum=65536),
            Option("rows-window", 8, "start a row once the row above has this many tokens", minimum=1),
            Option(
                "lower-rows",
                "draft",
                "after a rejection below the first incomplete row: draft = commit nothing, draft from p (the paper); "
                "commit = commit a token of the residual distribution",
                choices=("draft", "commit"),
            ),
            FRESH_Q,
        ),
        lossless=False,
        ignores=("init",),
        loop="specbench.decoding.row_jacobi:RowJacobiLoop",
    ),
}

INITS = {
    "uniform": Component("specbench.decoding.drafters.token_init:Uniform", "uniformly random image token", (FRESH_Q,)),
    "left-repeat": Component(
        "specbench.decoding.drafters.token_init:left_repeat", "copy of the left neighbour, q one-hot"
    ),
    "left-sample": Component(
        "specbench.decoding.drafters.token_init:left_sample", "sample from the left neighbour's distribution"
    ),
    "left-top1": Component(
        "specbench.decoding.drafters.token_init:left_top1",
        "most probable token of the left neighbour's distribution, q one-hot: sample_horizon of the released SJD code",
    ),
    "above-repeat": Component(
        "specbench.decoding.drafters.token_init:above_repeat", "copy of the neighbour above, q one-hot"
    ),
    "above-sample": Component(
        "specbench.decoding.drafters.token_init:above_sample", "sample from the distribution of the neighbour above"
    ),
    "preview": Component(
        "specbench.decoding.drafters.token_init:Preview",
        "token of the preview grid at the same place, mixed with a uniform one; uniform in models without a preview",
        (
            Option(
                "preview-weight",
                0.5,
                "probability that a draft is the preview's token; the rest of q is uniform",
                minimum=0.0,
                maximum=1.0,
            ),
        ),
    ),
}

VERIFIERS = {
    "exact": Component("specbench.decoding.verification.ratio_tests:Exact", "accept with min(1, p/q)"),
    "block": Component(
        "specbench.decoding.verification.block:Block",
        "block verification: accept a chain of drafts by the product of their p/q",
        (ANY_TAIL,),
        looks_ahead=True,
    ),
    "match": Component(
        "specbench.decoding.verification.ratio_tests:Match", "accept if a fresh sample from p equals the draft token"
    ),
    "grouped": Component(
        "specbench.decoding.verification.grouped:Grouped",
        "accept with min(1, p(C)/q(C)) over a cluster C",
        _CLUSTER,
        False,
    ),
    "grouped-released": Component(
        "specbench.decoding.verification.grouped:ReleasedGrouped",
        "accept with min(1, p(C)/q(C)) over 14 tokens, as the released GSD code",
        _RELEASED_CLUSTER,
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
        "accept with min(1, (p + eps)/q): may commit tokens outside top-k and top-p",
        (Option("eps", 0.1, "probability added to p before the ratio", minimum=0.0, maximum=1.0),),
        False,
    ),
    "omega": Component(
        "specbench.decoding.verification.cool_sd:DepthWeighted",
        "accept with min(1, w p/q), w by draft depth",
        _OMEGA,
        False,
    ),
    "segments": Component(
        "specbench.decoding.verification.segments:Segments",
        "accept segments of rising p(x) by one test of the product of p/q over their end",
        (
            Option(
                "alpha",
                0.8,
                "share of a segment's sum of p(x) that the tested end must hold; 1 tests whole segments",
                above=0.0,
                maximum=1.0,
            ),
            ANY_TAIL,
        ),
        False,
        looks_ahead=True,
    ),
    "lantern": Component(
        "specbench.decoding.verification.lantern:Lantern",
        "accept with min(1, p(A)/q), A the nearest neighbours with total probability <= delta",
        (
            Option("k", 1000, "nearest codebook neighbours considered", minimum=1, maximum=1000),
            Option(
                "delta",
                0.1,
                "upper bound on the neighbours' total probability added to the acceptance numerator",
                minimum=0.0,
                maximum=1.0,
            ),
            _CODES,
        ),
        False,
    ),
    "lantern++": Component(
        "specbench.decoding.verification.lantern:LanternPlusPlus",
        "accept with min(1, p(A)/q), A the nearest neighbours with p(A) <= lambda p",
        (
            Option("k", 10, "nearest codebook neighbours considered", minimum=1, maximum=1000),
            Option("lambda", 2.0, "upper bound on p(A)/p, the factor on the acceptance probability", minimum=1.0),
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
        "as in the LANTERN papers: p - q, with the probability of A moved to the draft token in p",
        only_with=_LANTERN,
    ),
    "lantern-release": Component(
        "specbench.decoding.verification.lantern:release",
        "released code: lantern-release-p for models with row ends (Lumina), else lantern-release-q",
        only_with=_LANTERN,
    ),
    "lantern-release-q": Component(
        "specbench.decoding.verification.lantern:release_q",
        "as in the released LlamaGen and Anole code: p - q, with q = 0 on the neighbours",
        only_with=_LANTERN,
    ),
    "lantern-release-p": Component(
        "specbench.decoding.verification.lantern:release_p",
        "as in the released Lumina code: p - q, with p = 0 on the neighbours",
        only_with=_LANTERN,
    ),
}

REFINES = {
    "resample": Component(
        "specbench.decoding.verification.refinement:Resample", "resample every unverified token from p", redraws=True
    ),
    "reuse": Component(
        "specbench.decoding.verification.refinement:Reuse",
        "keep the draft token where p/q > tau, otherwise resample",
        (TAU,),
        False,
    ),
    "reuse-stale-q": Component(
        "specbench.decoding.verification.refinement:StaleReuse",
        "as reuse, and a kept draft keeps its old q, as in the released PJD code",
        (TAU,),
        False,
    ),
    "restart": Component(
        "specbench.decoding.verification.refinement:Restart",
        "discard the unverified tokens and initialise new ones",
        redraws=True,
    ),
    "couple": Component(
        "specbench.decoding.verification.refinement:Couple",
        "maximal coupling of each new token with its previous draft",
    ),
    "gumbel": Component(
        "specbench.decoding.verification.refinement:Gumbel",
        "Gumbel-max sampling with noise fixed per absolute position",
    ),
}

CHOICES = {"drafter": DRAFTERS, "init": INITS, "verifier": VERIFIERS, "residual": RESIDUALS, "refine": REFINES}
COMPONENT_KINDS = {
    "drafter": "drafter",
    "init": "initialisation of fresh draft tokens",
    "verifier": "acceptance test",
    "residual": "residual distribution after a rejection",
    "refine": "refinement of unverified draft tokens",
}
"""Description of each kind of component, for help texts."""
