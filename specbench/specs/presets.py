"""Presets of the papers' methods: one value per component kind, the paper, and option defaults.

`resolve("gsd", {"G": 50})` merges a preset with the caller's options into a frozen `DecoderSpec` and rejects unknown
options by name. Presets of plug-ins and of user modules join them. Importing this never imports torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbench.errors import SpecbenchError, unknown_name
from specbench.specs.components import ANY_TAIL, CHOICES, DRAFTERS, Component
from specbench.specs.options import Option
from specbench.system.plugins import load_plugin, load_user_object, plugins

SJD = "Teng et al., Speculative Jacobi Decoding, ICLR 2025 (arXiv 2410.01699)"
SJDPP = "Teng et al., SJD++: Improved Speculative Jacobi Decoding"
GSD = "So et al., Grouped Speculative Decoding, ICCV 2025"
SCD = "So et al., Speculative Coupled Decoding, ICML 2026 (arXiv 2510.24211)"
EAGLE = "Li et al., EAGLE, ICML 2024 (arXiv 2401.15077)"
LANTERN = "Jang et al., LANTERN, ICLR 2025 (arXiv 2410.03355)"
LANTERNPP = "Park et al., LANTERN++ (arXiv 2502.06352)"
ZIPAR = "He et al., ZipAR, ICML 2025 (arXiv 2412.04062)"
BLOCK = "Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025 (arXiv 2403.10444)"
GBV = "Greedy Multi-Path Block Verification (arXiv 2602.16961), after a summary of its text"
SJD_SV = "SJD-SV, ICML 2026 (arXiv 2609.13245), after a summary of its text; no code was found"
PJD = "PJD, Parallel Jacobi Decoding, CVPR 2026 (arXiv 2606.05703), after a summary of its text"
PATHSPEC = "PathSpec (arXiv 2606.10492), released code, Haodong-Lei-Ray/PathSpec, commit 8a3df48"
PJD_CODE = "released code of PJD, boyaliao/PJD, commit e7b93ad, Lumina's scheduler, read in part"
OWN = "this project; a relative of {}, whose formula was not read here"
SSD = "SSD, Spatially Speculative Decoding (arXiv 2606.20543), after notes on its text; no code was found"
OWN_HEAD = "this project, after FlashAR (arXiv 2605.09430) and SSD (arXiv 2606.20543), whose heads run unverified"
SJD_CODE = "released code of SJD, tyshiwo1/Accelerating-T2I-AR-with-SJD, commit b389cfb"
GSD_CODE = "released code of GSD, junhyukso/GSD, commit 4216c7c"
LANTERN_CODE = "released code of LANTERN and LANTERN++, jadohu/LANTERN, commit 3a56e45"
ZIPAR_CODE = "released code of ZipAR, ThisisBillhe/ZipAR, commit 2a5695c"
COOLSD = "Annealed Relaxation of Speculative Decoding (Cool-SD), AAAI 2026 (arXiv 2601.09212)"


@dataclass(frozen=True)
class Preset:
    """Named combination of components.

    Attributes:
        choices: value of each choice (drafter, init, verifier, residual, refine).
        defaults: option defaults that differ from the components' own.
        paper, equation: source of the method.
    """

    name: str
    summary: str
    paper: str
    equation: str
    choices: Mapping[str, str]
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class DecoderSpec:
    """Fully resolved decoder with every option explicit.

    `options` maps option name to value, sorted by name; `lossless` holds when every chosen component is lossless.
    """

    name: str
    drafter: str
    init: str
    verifier: str
    residual: str
    refine: str
    options: tuple[tuple[str, object], ...]
    lossless: bool

    @property
    def full_name(self) -> str:
        """The preset's name, followed by the components that stand in for its own: "sjd+grouped"."""
        usual = PRESETS[self.name].choices if self.name in PRESETS else vars(self)
        return "+".join(
            [
                self.name,
                *(value for kind, own in usual.items() if kind in CHOICES and (value := getattr(self, kind)) != own),
            ]
        )

    @property
    def head_kind(self) -> str:
        """Kind of the draft head that the decoder would use."""
        return DRAFTERS[self.drafter].head_kind or self.drafter


def _jacobi(**changed: str) -> dict[str, str]:
    base = {"drafter": "jacobi", "init": "uniform", "verifier": "exact", "residual": "standard", "refine": "resample"}
    return base | changed


def _eagle(**changed: str) -> dict[str, str]:
    return _jacobi(drafter="eagle", refine="restart") | changed


_PRESETS = (
    Preset("ar", "plain autoregressive sampling, one token per forward", "-", "-", _jacobi(drafter="none")),
    Preset(
        "jacobi",
        "Jacobi decoding: accept a draft that a fresh sample repeats",
        SJD,
        "sec. 3.2",
        _jacobi(verifier="match"),
    ),
    Preset("sjd", "speculative Jacobi decoding, random initialisation", SJD, "eqs. 1-3", _jacobi()),
    Preset(
        "sjd-isp",
        "SJD with spatial-prior token initialisation",
        SJD,
        "sec. 4.2",
        _jacobi(init="above-repeat"),
    ),
    Preset(
        "preview",
        "SJD whose fresh drafts come from the image's own preview, which GLM-Image decodes first",
        "this project",
        "each fresh draft is the nearest preview token, mixed with a uniform one",
        _jacobi(init="preview"),
    ),
    Preset(
        "sjd-norefine",
        "SJD without refinement: the unverified tail is thrown away",
        SJD,
        "fig. 14",
        _jacobi(refine="restart"),
    ),
    Preset(
        "sjd++",
        "SJD that keeps unverified drafts of high confidence",
        SJDPP,
        "eqs. 4-5",
        _jacobi(refine="reuse"),
        {"window": 32},
    ),
    Preset("gsd", "SJD that accepts a cluster of similar tokens", GSD, "algorithm 3", _jacobi(verifier="grouped")),
    Preset(
        "sjd-released",
        "SJD as its released code decodes one image: fresh drafts with one-hot q",
        SJD_CODE,
        "random initialisation; left out: a stale q at batch > 1, spatial initialisations that crash",
        _jacobi(),
        {"fresh-q": "onehot"},
    ),
    Preset(
        "gsd-released",
        "GSD as its released code decodes: 14 tokens per cluster, q of the whole cluster, p = 0 accepted",
        GSD_CODE,
        "window 16 and G 14 are hard-wired there; left out: the order of ties among tokens outside top-k",
        _jacobi(verifier="grouped-released"),
        {"fresh-q": "onehot"},
    ),
    Preset("amplify", "lossy baseline: acceptance ratio times k", GSD, "table 1", _jacobi(verifier="amplify")),
    Preset(
        "add",
        "lossy baseline: eps added to the target probability; may commit tokens outside top-k and top-p",
        GSD,
        "table 1",
        _jacobi(verifier="add"),
    ),
    Preset(
        "scd-mc",
        "maximal coupling on the whole window",
        SCD,
        "maximal coupling",
        _jacobi(refine="couple"),
        {"window": 64},
    ),
    Preset(
        "scd-gs",
        "Gumbel noise frozen per position, ratio test",
        SCD,
        "Gumbel sharing",
        _jacobi(refine="gumbel"),
        {"window": 64},
    ),
    Preset(
        "predictive",
        "Gumbel noise frozen per position, exact match: AR's own image of the same seed",
        "Wiggers and Hoogeboom, Predictive Sampling, ICML 2020 (arXiv 2002.09928)",
        "alg. 1",
        _jacobi(verifier="match", refine="gumbel"),
        {"window": 64},
    ),
    Preset(
        "sjd-pac",
        "maximal coupling plus corrected siblings at the first slot",
        "SJD-PAC, CVPR 2026 (arXiv 2603.18599), with siblings drawn so that the result stays exact",
        "PD and AC",
        _jacobi(drafter="jacobi-tree", refine="couple"),
        {"window": 64},
    ),
    Preset(
        "best-lossless",
        "maximal coupling, siblings, and drafts looked up in the image where the tokens around them have changed",
        "this project; the training-free lossless decoder of fewest steps in docs/notes/best-lossless.md",
        "-",
        _jacobi(drafter="jacobi-lookup", refine="couple"),
        {"window": 64},
    ),
    Preset("eagle", "speculative decoding with an EAGLE-1 head on a static tree", EAGLE, "sec. 4", _eagle()),
    Preset(
        "lantern",
        "adds the probability of codebook neighbours to the acceptance, up to delta",
        LANTERN,
        "eqs. 3-5, on EAGLE-1's static tree",
        _eagle(verifier="lantern", residual="lantern"),
    ),
    Preset(
        "lantern++",
        "adds the probability of codebook neighbours to the acceptance, up to lambda p",
        LANTERNPP,
        "eqs. 3-6 of Cool-SD",
        _eagle(verifier="lantern++", residual="lantern"),
    ),
    Preset(
        "lantern-released",
        "LANTERN's acceptance with its released code's residual, raw codebook and tree",
        LANTERN_CODE,
        "residual on p (Lumina) or q (others); Lumina's tree there is mc_sim_7b_63; left out: bfloat16 softmax",
        _eagle(verifier="lantern", residual="lantern-release"),
        {"neighbours": "raw", "tree": "naive_extend_57"},
    ),
    Preset(
        "lantern++-released",
        "LANTERN++'s acceptance with its released code's residual, raw codebook and tree",
        LANTERN_CODE,
        "k and lambda of its own sweep; residual on p (Lumina) or q (LlamaGen, Anole); left out: bfloat16 softmax",
        _eagle(verifier="lantern++", residual="lantern-release"),
        {"neighbours": "raw", "tree": "naive_extend_57", "k": 10, "lambda": 5.0},
    ),
    Preset(
        "lantern++-optimal",
        "LANTERN++ with the residual that minimises the bound",
        COOLSD,
        "sec. 5.2",
        _eagle(verifier="lantern++", residual="optimal"),
    ),
    Preset(
        "uniform-rsd",
        "acceptance ratio times the same weight at every depth",
        COOLSD,
        "eqs. 10, 12-13",
        _eagle(verifier="omega", residual="optimal"),
    ),
    Preset(
        "cool-sd",
        "acceptance ratio times a weight that decays exponentially with depth",
        COOLSD,
        "eqs. 10, 12, 16",
        _eagle(verifier="omega", residual="optimal"),
        {"schedule": "exponential"},
    ),
    Preset(
        "cool-sd-linear",
        "acceptance ratio times a weight that falls linearly with depth",
        COOLSD,
        "eqs. 10, 12, 17",
        _eagle(verifier="omega", residual="optimal"),
        {"schedule": "linear"},
    ),
    Preset(
        "sjd-block",
        "SJD with block verification: drafts are accepted together",
        BLOCK,
        "algorithm 2; on a Jacobi window, whose tail is resampled in every step",
        _jacobi(verifier="block"),
    ),
    Preset(
        "eagle-block",
        "a chain of an EAGLE-1 head's drafts with block verification",
        BLOCK,
        "algorithm 2, on EAGLE-1's chain",
        _eagle(verifier="block"),
        {"tree": "chain"},
    ),
    Preset(
        "eagle-gbv",
        "several chains of an EAGLE-1 head's drafts, the best one by p/q verified as a block",
        GBV,
        "greedy multi-path block verification; its order of paths is not in the summary, here p/q of their tokens",
        _eagle(drafter="eagle-paths", verifier="block"),
        {"window": 9},
    ),
    Preset(
        "vertical",
        "drafts of a trained head that looks at the image row above, maximal coupling, siblings",
        OWN_HEAD,
        "-",
        _jacobi(drafter="vertical", refine="couple"),
        {"window": 32},
    ),
    Preset(
        "vertical-coupled",
        "vertical, with each draft that its head draws anew coupled to the draft of the step before",
        OWN_HEAD,
        "-",
        _jacobi(drafter="vertical-coupled", refine="couple"),
        {"window": 32},
    ),
    Preset(
        "ssd",
        "image rows drafted from the row above by trained heads, two rounds of tests, then committed as they are",
        SSD,
        "as the text is summarised; left out: states before the last norm; not stated: q of the second round",
        _jacobi(drafter="ssd", refine="couple"),
    ),
    Preset(
        "pathexplore",
        "two independent SJD windows, the one with most accepted drafts committed",
        PATHSPEC,
        "PathExplore; its length of a path comes from a file of the code, here --window; PathRelax left out",
        _jacobi(drafter="jacobi-paths"),
        {"fresh-q": "onehot"},
    ),
    Preset(
        "sjd-sv",
        "SJD that accepts segments of rising probability by one test of their end",
        SJD_SV,
        "segment verification; a shortened segment is tested with the same random number",
        _jacobi(verifier="segments"),
    ),
    Preset(
        "sjd-pairs",
        "SJD that accepts chains of token pairs from a table by one test",
        OWN.format("SJD-PV (arXiv 2603.06666)"),
        "the phrase library of SJD-PV was not read; here, pairs from --pairs, or equal neighbours",
        _jacobi(verifier="pair-segments"),
    ),
    Preset(
        "sjd-tilt",
        "SJD whose tail is resampled from p tilted towards tokens whose probability rose",
        OWN.format("SJD-VP (arXiv 2603.27115)"),
        "the weight of SJD-VP was not read; here, clip(p/q)^tilt, recorded as q",
        _jacobi(refine="tilt"),
    ),
    Preset(
        "sjd-relax",
        "SJD that accepts more where the target is certain",
        OWN.format("CSD (arXiv 2606.27829)"),
        "the weight of CSD was not read; here, 1 + delta exp(-H/relax-scale)",
        _jacobi(verifier="relax", residual="optimal"),
    ),
    Preset(
        "zipar",
        "image rows decoded side by side, without verification",
        ZIPAR,
        "sec. 3",
        _jacobi(drafter="zipar"),
    ),
    Preset(
        "zipar-released",
        "ZipAR with its released code's count of the window, first row alone for models without row ends",
        ZIPAR_CODE,
        "left out: empty cache slots that are attended to; by option: stand-ins that stay visible (stand-ins=kept)",
        _jacobi(drafter="zipar"),
        {"rows-count": "released", "rows-window": 16},
    ),
    Preset(
        "pjd",
        "Jacobi windows in several image rows; rows below the first incomplete one commit accepted drafts only",
        PJD,
        "not stated in what was read: the window (here 8, as in the code); what leads a row in models without row ends",
        _jacobi(drafter="row-jacobi"),
        {"fresh-q": "onehot", "rows-window": 16},
    ),
    Preset(
        "pjd-released",
        "PJD as its released code decodes: drafts with p/q > 0.5 are kept with their old q",
        PJD_CODE,
        "left out: a mask shifted from the third open row on, fresh ids off by four",
        _jacobi(drafter="row-jacobi", refine="reuse-stale-q"),
        {"fresh-q": "onehot"},
    ),
    Preset(
        "pjd-residual",
        "PJD whose rows all commit from the residual distribution, with a coupled tail: what the mask alone costs",
        "this project; PJD (arXiv 2606.05703) with an exact test in every row",
        "-",
        _jacobi(drafter="row-jacobi", refine="couple"),
        {"lower-rows": "commit", "rows-window": 16},
    ),
    Preset(
        "zipar-adaptive",
        "ZipAR that starts a row once its first token passes a test with one more token of the row above",
        ZIPAR,
        "version 3, adaptive window, after its abstract; not read: the least window, whether one pass is enough",
        _jacobi(drafter="zipar"),
        {"adaptive": True},
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


def resolve(name: str, given: Mapping[str, object] | None = None) -> DecoderSpec:
    """Resolve the preset `name` with the caller's choices and options.

    Raises:
        SpecbenchError: unknown preset, choice value or option, or a value out of range.
    """
    if name not in PRESETS:
        raise unknown_name("decoder", name, PRESETS)
    preset = PRESETS[name]
    given = dict(given or {})
    choices = choices_of(preset, given)
    _check_fit(name, choices)
    known = options_of(preset, choices)
    for option in given:
        if option not in known and option not in _kinds(choices):
            raise unknown_name(f"option of decoder '{name}'", option, [*known, *_kinds(choices)])
    values = {option: known[option].parse(given.get(option, known[option].default)) for option in known}
    _check_look_ahead(name, choices, values)
    lossless = _lossless(choices)
    return DecoderSpec(name, **choices, options=tuple(sorted(values.items())), lossless=lossless)


def choices_of(preset: Preset, given: Mapping[str, object]) -> dict[str, str]:
    """The preset's components with those among `given` in their place.

    Raises:
        SpecbenchError: an unknown component, or a drafter for a decoder that drafts nothing.
    """
    choices = dict(preset.choices)
    for kind in CHOICES.keys() & given.keys():
        if given[kind] not in CHOICES[kind]:
            raise unknown_name(kind, str(given[kind]), CHOICES[kind])
        choices[kind] = str(given[kind])
    if preset.choices["drafter"] == "none" != choices["drafter"]:
        raise SpecbenchError(
            f"decoder '{preset.name}' drafts nothing: --drafter {choices['drafter']} contradicts it",
            "start from a preset that drafts, such as sjd",
        )
    return choices


def options_of(preset: Preset, choices: Mapping[str, str] | None = None) -> dict[str, Option]:
    """Options of the preset (with `choices` applied) and their defaults."""
    options = {option.name: option for part in _components(choices or preset.choices) for option in part.options}
    return {
        name: Option(**{**vars(option), "default": preset.defaults.get(name, option.default)})
        for name, option in options.items()
    }


_imported: dict[str, str] = {}
"""Names of the decoders of the user's own modules, by reference; a module may be called as its decoder is."""


def decoder_name(reference: str) -> str:
    """Name of a decoder for `resolve`; "package.module:NAME" imports and registers that preset first."""
    if ":" not in reference:
        return reference
    if _imported.get(reference) in PRESETS:
        return _imported[reference]
    name, _, given = reference.partition(":")
    if name in PRESETS and name not in sys.modules:  # a file's decoder may have the file's name
        meant = f"did you mean {name}:{given.replace(':', '=')}?" if ":" in given else f"for example {name}:window=16"
        raise SpecbenchError(f"decoder '{reference}': an option is written NAME=VALUE", meant)
    preset = load_user_object(reference, "decoder")
    if not isinstance(preset, Preset):
        raise SpecbenchError(f"decoder '{reference}' is a {type(preset).__name__}, not a specbench Preset")
    for kind, choice in preset.choices.items():
        if choice not in CHOICES.get(kind, ()):
            raise SpecbenchError(f"decoder '{reference}': there is no {kind} '{choice}'", "specbench list components")
    if PRESETS.setdefault(preset.name, preset) is not preset:
        raise SpecbenchError(f"decoder '{reference}' is called '{preset.name}', a name already taken")
    return _imported.setdefault(reference, preset.name)


def require_decoders(pieces: Sequence[str]) -> None:
    """Refuse misspelt names of decoders before anything else is loaded; the rest of a piece is read with its options.

    Raises:
        SpecbenchError: an unknown name.
    """
    for piece in pieces:
        name, colon, rest = piece.split(",")[0].partition(":")
        plain = not colon or ("=" in rest and ":" not in rest)  # not a plug-in as package.module:NAME
        if plain and name not in PRESETS:
            raise unknown_name("decoder", name, PRESETS)


@functools.cache
def add_plugin_decoders() -> None:
    """Register the presets of installed plug-ins; built-in names take precedence."""
    for name in plugins("decoders"):
        preset = load_plugin("decoders", name, lambda found: isinstance(found, Preset), "a Preset")
        if preset is not None:
            PRESETS.setdefault(preset.name, preset)


def _kinds(choices: Mapping[str, str]) -> list[str]:
    """Component kinds in effect: some drafters ignore others."""
    return [kind for kind in CHOICES if kind not in DRAFTERS[choices["drafter"]].ignores]


def _components(choices: Mapping[str, str]) -> list[Component]:
    return [CHOICES[kind][choices[kind]] for kind in _kinds(choices)]


def _check_fit(name: str, choices: Mapping[str, str]) -> None:
    """Reject a component without the one it requires."""
    for kind in _kinds(choices):
        part = CHOICES[kind][choices[kind]]
        needed = part.only_with
        others = {choices[other] for other in _kinds(choices) if other != kind}
        if refused := others & set(part.excludes):
            raise SpecbenchError(
                f"decoder '{name}': --{kind} {choices[kind]} cannot be combined with {', '.join(sorted(refused))}"
            )
        if needed and not others & set(needed):
            raise SpecbenchError(
                f"decoder '{name}': --{kind} {choices[kind]} cannot be combined with {_named(choices)}",
                f"it needs {' or '.join(needed)}",
            )


def _named(choices: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {value}" for kind, value in choices.items() if kind in ("drafter", "verifier"))


def _check_look_ahead(name: str, choices: Mapping[str, str], values: Mapping[str, object]) -> None:
    """Reject a verifier that looks at later drafts where one of these outlives the step, or where drafts branch."""
    if not _looks_ahead(choices):
        return
    verifier, refine = choices["verifier"], choices["refine"]
    if not DRAFTERS[choices["drafter"]].is_chain(values):
        raise SpecbenchError(
            f"decoder '{name}': --verifier {verifier} verifies a chain of drafts, and this drafter's branch",
            "use --drafter jacobi, or eagle with --tree chain",
        )
    if not CHOICES["refine"][refine].redraws and not values.get(ANY_TAIL.name):
        raise SpecbenchError(
            f"decoder '{name}': --verifier {verifier} looks at later drafts, which --refine {refine} keeps",
            f"use --refine {' or '.join(refine for refine, part in CHOICES['refine'].items() if part.redraws)}, or "
            "--any-tail for biased images (lossy)",
        )


def _looks_ahead(choices: Mapping[str, str]) -> bool:
    return "verifier" in _kinds(choices) and CHOICES["verifier"][choices["verifier"]].looks_ahead


def _lossless(choices: Mapping[str, str]) -> bool:
    """Whether every component is, and no verifier looks at drafts that outlive the step."""
    biased = _looks_ahead(choices) and not CHOICES["refine"][choices["refine"]].redraws
    return all(part.lossless for part in _components(choices)) and not biased
