"""Bugs to plant into the decoding code: source replacements that a good audit must notice."""

import importlib
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_DECODING = "specbench.decoding."
_VERIFY = _DECODING + "verification."
_CHAIN = _VERIFY + "chain_verification:"
_TREE = _VERIFY + "tree_verification:"
_JACOBI = _DECODING + "drafters.jacobi:"
_LOOKUP = _DECODING + "drafters.lookup:"
_GREEDY = _DECODING + "greedy_paths:"
_CACHE = "specbench.models.transformer.kv_cache:PositionLayer."


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which must occur once in the source of `function` ("module:Class.method"), with `new`."""

    function: str
    old: str
    new: str


@dataclass(frozen=True)
class PlantedBug:
    """One bug and what catches it.

    Attributes:
        part: of the decoder, as the docs group them.
        what: the bug, in words.
        edits: how to plant it.
        decoder, options: the decoder that shows it.
        setting: first words of the audit setting that shows it.
        times: how many times the audit's own number of images it takes to see it.
    """

    part: str
    what: str
    edits: tuple[Edit, ...]
    decoder: str
    setting: str
    options: Mapping[str, object] = field(default_factory=dict)
    times: int = 1


def plant(edits: Iterable[Edit], monkeypatch) -> None:
    """Swap the code of the edited functions until `monkeypatch` is undone.

    Raises:
        LookupError: a place no longer exists as it was; say where the bug can be made now.
    """
    sources: dict[str, list[Edit]] = {}
    for edit in edits:
        sources.setdefault(edit.function, []).append(edit)
    for place, own in sources.items():
        module, _, path = place.partition(":")
        owner = importlib.import_module(module)
        for name in path.split("."):
            owner = getattr(owner, name)
        function = inspect.unwrap(owner)
        source = textwrap.dedent(inspect.getsource(function))
        for edit in own:
            if source.count(edit.old) != 1:
                raise LookupError(f"{place}: {source.count(edit.old)} times {edit.old!r}; update the planted bug")
            source = source.replace(edit.old, edit.new)
        body = source[source.index("def ") :]
        made: dict[str, object] = {}
        exec("from __future__ import annotations\n" + body, dict(function.__globals__), made)
        code = made[function.__name__].__code__
        # Code rather than the name, since other modules have imported the function itself.
        monkeypatch.setattr(function, "__code__", code)


def _bug(part: str, what: str, function: str, old: str, new: str, decoder: str, setting: str, **options) -> PlantedBug:
    return PlantedBug(part, what, (Edit(function, old, new),), decoder, setting, options)


WIDE, EIGHT, GUIDED, GRAMMAR, REFILL = "1x3 of 6", "2x4 of 2, window", "2x4 of 3 with row ends", "3x4 of 2", "4x4 of 2"
FOUR, SEVERAL_DRAFTS = "1x5 of 4", "2x4 of 2 with a row end"
STEADY, TOP_P_TIES, LONE, LONG_WINDOW, FILTERS = "1x4 of 8", "2x2 of 4", "2x3 of 2", "1x10 of 2", "1x4 of 5"
TIES, TOP_P, TRANSFORMER = "2x4 of 3, guided, T 0.7", "4x3 of 2", "2x4 of 2 with row ends, transformer"

BUGS = (
    # Loop and windows
    _bug("loop", "one token too many is committed", _DECODING + "loop:Loop._verify",
         "verified.first + 1", "verified.first + 2", "sjd", GRAMMAR),
    _bug("loop", "q is aligned to the window's far end once the window narrows near the end of the image",
         _JACOBI + "Jacobi._fill", "+ self._shift[:, None]", "+ self._shift[:, None] + self._p.shape[1] - drafts - 1",
         "sjd", EIGHT),
    _bug("loop", "an accepted branch is not kept in the cache", _DECODING + "loop:Loop._commit",
         "if tables is not None:", "if False:", "sjd-pac", WIDE),
    # q of the drafts
    _bug("q", "a coupled slot without a draft is drawn from [p - q]+ with a stale q",
         _VERIFY + "refinement:Couple.refine",
         "torch.cat([residual, held.mass[:, drafts:]], dim=1)",
         "torch.cat([residual, standard(held.mass[:, drafts:], held.weights(tests.q[:, -1:], slice(drafts, None)))], "
         "dim=1)",
         "scd-mc", GRAMMAR),
    PlantedBug("q", "q is not replaced after a kept draft", (
        Edit(_JACOBI + "Jacobi._expand", "return trunk",
             "self._old = [torch.nn.functional.pad(trunk.tokens[:, 1:], (0, 1), value=-1)]\n"
             "    self._old.append(torch.nn.functional.pad(trunk.q, (0, 0, 0, 1)))\n    return trunk"),
        Edit(_JACOBI + "Jacobi.observe",
             "self._p, self._shift = verification.p if refined_from is None else refined_from, shift",
             "self._p = torch.where((self._old[0] == verification.tokens)[..., None], self._old[1], verification.p)\n"
             "    self._shift = shift"),
    ), "scd-mc", EIGHT),
    _bug("q", "q is that of the slot before", _JACOBI + "Jacobi._fill",
         "+ self._shift[:, None]", "+ self._shift[:, None] - 1", "sjd", GRAMMAR),
    _bug("q", "drafts after the eighth have its q", _JACOBI + "Jacobi._fill", "max=known - 1", "max=7",
         "sjd", LONG_WINDOW),
    _bug("q", "a fresh token drawn from its neighbour's distribution is recorded as uniform",
         _DECODING + "drafters.token_init:Spatial.fill", "has_source[..., None], ", "has_source[..., None] & False, ",
         "sjd", GUIDED, init="left-sample"),
    _bug("q", "fresh tokens are drawn from all but the last token", _DECODING + "drafters.token_init:Uniform.fill",
         "* v_image).long()", "* (v_image - 1)).long()", "sjd", GUIDED),
    _bug("q", "the draft head's q is recorded at another temperature",
         _DECODING + "drafters.eagle:Eagle._draw_children", "(p / race)", "(p.square() / race)",
         "eagle", WIDE, tree="chain"),
    _bug("q", "a vertical head's draft is recorded with the q of the draft it replaces",
         _DECODING + "drafters.vertical:Vertical._draft",
         "torch.where(torch.cat(keeps, 1)[..., None], q, torch.cat(recorded, 1))", "q", "vertical", WIDE),
    _bug("q", "a vertical head's draft is kept by what it is", _DECODING + "drafters.vertical:Vertical._draft_run",
         "same_above[:, own] & (token == fed_before[:, own])", "(refined_tokens[:, own] > 0)", "vertical",
         WIDE),
    _bug("q", "a vertical head's draft that is not kept is drawn from q instead of the residual distribution",
         _DECODING + "drafters.vertical:Vertical._draft_run", "standard(proposed, shared[:, own])", "proposed",
         "vertical-coupled", EIGHT),
    _bug("q", "a vertical head's draft is coupled by the coin that made it what it is",
         _DECODING + "drafters.vertical:CoupledVertical._coupled", "Stream.FRESH, step)", "Stream.COIN, step - 1)",
         "vertical-coupled", EIGHT),
    _bug("q", "a copy of a random fresh token is recorded as uniform", _DECODING + "drafters.token_init:Spatial.fill",
         "has_source | (root != torch.arange(root.shape[1], device=root.device))", "has_source", "sjd", WIDE,
         init="left-repeat"),
    _bug("q", "what remains of q without a sibling is not normalised", _DECODING + "sampling:without",
         "rest / rest.sum(-1, keepdim=True).clamp(min=tiny)", "rest", "sjd-pac", WIDE),
    # Noise
    _bug("noise", "a coin is tossed once per slot and reused in every step", _CHAIN + "verify_chain",
         "Stream.COIN, step", "Stream.COIN, 0 * step", "scd-mc", EIGHT),
    _bug("noise", "all slots of a window are redrawn with the same number", _VERIFY + "refinement:Resample.refine",
         "noise.uniform(positions,", "noise.uniform(positions[:, :1].expand_as(positions),", "sjd", EIGHT),
    _bug("noise", "two neighbouring slots share their frozen noise", _VERIFY + "refinement:Gumbel.refine",
         "positions, Stream.TOKEN", "positions - positions % 2, Stream.TOKEN", "predictive", GRAMMAR),
    PlantedBug("noise", "coin, redraw and fresh token of a slot are the same number", (
        Edit(_DECODING + "noise:Noise._base", "draw * _STREAMS + stream", "draw * _STREAMS"),
        Edit(_DECODING + "noise:Noise.hash_together", "self._bits(_column_of", "0 * self._bits(_column_of"),
    ), "sjd", GUIDED),
    _bug("noise", "the images of a prompt share their noise", _DECODING + "noise:row_key",
         "\\0{sample}", "\\0{sample // 8}", "ar", EIGHT),
    _bug("noise", "a coupled slot is redrawn with the number of its coin", _VERIFY + "refinement:Couple.refine",
         "Stream.REDRAW", "Stream.COIN", "scd-mc", STEADY),
    _bug("noise", "the noise of an image does not depend on its prompt", _DECODING + "noise:row_key",
         "{prompt_id}", "", "sjd", EIGHT),
    _bug("noise", "the noise of an image does not depend on the seed", _DECODING + "noise:row_key",
         "{seed}", "", "sjd", EIGHT),
    _bug("noise", "siblings are drawn with the same number", _JACOBI + "JacobiTree._expand",
         "step * self._siblings + sibling", "step * self._siblings", "sjd-pac", WIDE, siblings=5),
    PlantedBug("noise", "a replacement is drawn with the noise of the rejected draft", (
        Edit(_VERIFY + "ratio_tests:draw_after_drafts", "int(Stream.RESIDUAL)", "int(Stream.TOKEN)"),
        Edit(_VERIFY + "ratio_tests:draw_after_drafts", "step * rejected", "0 * step"),
    ), "scd-gs", WIDE, times=10),
    # Verifiers, residuals, refinements
    _bug("verifier", "a draft is accepted with q/p instead of p/q", _VERIFY + "ratio_tests:_ratio",
         "px / qx", "qx / px", "sjd", GUIDED),
    _bug("verifier", "a mismatch commits a second draw instead of the one compared",
         _VERIFY + "ratio_tests:draw_after_drafts",
         "(rejected, refined, noise", "(False & rejected, refined, noise", "jacobi", GUIDED),
    _bug("residual", "a rejected draft is replaced by a draw from p", _VERIFY + "ratio_tests:standard",
         "(p - q)", "p.clone()", "sjd", GUIDED),
    _bug("residual", "residuals of several tokens are too flat", _VERIFY + "ratio_tests:standard",
         "(p - q).clamp_(min=0)", "(p - q).clamp_(min=0).sqrt()", "sjd", FOUR),
    _bug("residual", "the optimal residual subtracts more than what was accepted", _VERIFY + "ratio_tests:optimal",
         ".clamp(max=1)", ".clamp(min=0)", "sjd", GUIDED, residual="optimal"),
    _bug("residual", "an unnormalised residual is drawn from as if it summed to 1", _DECODING + "sampling:draw",
         "(uniform * total)", "(uniform)", "scd-mc", WIDE),
    _bug("refinement", "maximal coupling keeps every draft with p > q/2", _VERIFY + "refinement:Couple.refine",
         "tests.coin < tests.ratio", "0.5 < tests.ratio", "scd-mc", EIGHT),
    _bug("refinement", "a tail that should be thrown away is drafted again", _JACOBI + "Jacobi.observe",
         "if keep_tail else", "if True else", "sjd-norefine", GRAMMAR),
    # Verification of chains and trees
    _bug("chain", "a rejected draft is replaced from the residual of the window's first column",
         _CHAIN + "verify_chain", "verdict.failed(tests, first.clamp(max=drafts.shape[1] - 1))", "tests.at(0 * first)",
         "sjd", GRAMMAR),
    _bug("chain", "the bonus is drawn from the column before", _CHAIN + "verify_chain",
         "rows_at(p, first)", "rows_at(p, (first - 1).clamp(min=0))", "sjd", GRAMMAR),
    _bug("tree", "drafts after a rejected one are accepted", _TREE + "_TreeVerifier.verify",
         "rejected @ tables.ancestors[:, 1:].T", "torch.nn.functional.pad(rejected, (1, 0))", "sjd-pac", GRAMMAR),
    _bug("tree", "a sibling is tested against p instead of the residual", _TREE + "_TreeVerifier._tests",
         "p / p.sum(-1, keepdim=True)", "self._p[:, tables.parent[level.earlier]]", "sjd-pac", WIDE),
    _bug("tree", "a rejected draft is replaced from the residual of the sibling before the last",
         _TREE + "_TreeVerifier._after_the_drafts", "tests.at(self._tables.last_test[column])",
         "tests.at(self._tables.test[self._tables.before[self._tables.tested[self._tables.last_test[column]] - 1]"
         ".argmax(-1)])", "sjd-pac", WIDE, siblings=2),
    _bug("tree", "drafts on a branch are tested with the q of the slot before", _JACOBI + "JacobiTree._expand",
         ".device).depth.clamp(", ".device).depth.sub(1).clamp(min=0).clamp(", "sjd-pac", WIDE),
    _bug("tree", "siblings are tested in the reverse of the order they were drawn in",
         _DECODING + "drafters.eagle:Eagle._draw_children",
         "level.drawn]", "level.drawn // level.most * level.most + level.most - 1 - level.drawn % level.most]", "eagle",
         WIDE),
    _bug("tree", "a rejected draft is replaced from the residual of another parent",
         _TREE + "_TreeVerifier._after_the_drafts", "self._tables.last_test[column]",
         "0 * self._tables.last_test[column]", "eagle", WIDE),
    _bug("tree", "the drafts after an accepted sibling are those of the trunk",
         _TREE + "_TreeVerifier.verify", "self._refined.gather(1, columns)",
         "self._refined[:, :columns.shape[1]]", "sjd-pac", WIDE),
    PlantedBug("tree", "a draft is coupled by the coin that tested the draft before it", (
        Edit(_TREE + "_TreeVerifier._following", "coin[:, tables.next]", "coin"),
    ), "sjd-pac", STEADY),
    # A batch of one
    _bug("batch of one", "one row too far is picked where a distribution of a lone image is",
         _DECODING + "sampling:rows_at", "index_select(1, slots[0])",
         "index_select(1, (slots[0] + 1).clamp(max=distributions.shape[1] - 1))", "sjd", LONE),
    # The best of several paths
    _bug("q", "the best of several paths is recorded with the q of any path", _GREEDY + "GreedyPathLoop._best_chain",
         "best_path_q(p, q, drafts, paths)", "q", "eagle-gbv", FOUR),
    _bug("q", "paths equal to the best one count as worse", _GREEDY + "best_path_q",
         ".flip(-1) - ranked", ".flip(-1)", "eagle-gbv", FOUR),
    _bug("q", "after the first draft the best path is taken for one of K as good ones", _GREEDY + "best_path_q",
         "(reach * at(worse, drafts)).cumsum(1)", "(0 * reach * at(worse, drafts)).cumsum(1)", "eagle-gbv", FOUR),
    _bug("tree", "paths that parted are compared at later drafts too", _GREEDY + "best_path",
         "(differ.cumsum(-1) == 1)", "(differ.cumsum(-1) >= 1)", "eagle-gbv", FOUR),
    # Looked-up drafts
    _bug("q", "a looked-up draft is recorded with the q of the draft that it replaced",
         _LOOKUP + "LookupJacobi._look_up",
         "torch.where(taken[..., None], rows_at(self._history, source), q[:, :drafts])", "q[:, :drafts]",
         "best-lossless", EIGHT),
    _bug("q", "whether a draft is looked up depends on the draft itself", _LOOKUP + "LookupJacobi._look_up",
         "(own != fed[:, draft]).any(-1, keepdim=True)", "(tokens.gather(1, slots[:, draft : draft + 1]) == 0)",
         "best-lossless", EIGHT),
    # Cache
    _bug("cache", "keys are written into the neighbour's row", _CACHE + "update",
         "self.keys[self._rows,", "self.keys[self._rows.roll(1, 0),", "sjd", TRANSFORMER),
    _bug("cache", "a branch is kept from the neighbour's row", _CACHE + "move",
         "= buffer[self._rows,", "= buffer[self._rows.roll(1, 0),", "sjd-pac", TRANSFORMER),
    _bug("cache", "a column attends to the slot after its own", "specbench.models.transformer.forward:run_step",
         "<= inputs.slots[..., None]", "<= inputs.slots[..., None] + 1", "sjd", TRANSFORMER),
    _bug("cache", "columns after the second do not attend to the first draft",
         "specbench.models.transformer.forward:run_step", "mask = inputs.index <= inputs.slots[..., None]",
         "mask = (inputs.index <= inputs.slots[..., None]) & ~((torch.arange(inputs.slots.shape[1])[:, None] > 1)"
         " & (inputs.index == inputs.slots[:, :1, None] + 1))", "sjd", SEVERAL_DRAFTS),
    _bug("cache", "only the first token of an accepted branch is kept", _DECODING + "loop:Loop._commit",
         "keep(verified.columns[:, 1:], positions[:, 1:])", "keep(verified.columns[:, 1:2], positions[:, 1:2])",
         "vertical", SEVERAL_DRAFTS),
    _bug("cache", "a refilled row gets the prompt of its neighbour", _CACHE + "put",
         ":slots] = other.keys", ":slots] = other.keys.roll(1, 0)", "ar", TRANSFORMER),
    _bug("cache", "a refilled row keeps the last prompt element of the image before",
         "specbench.models.transformer.model:TransformerSession.refill",
         "fresh._shift, fresh._start", "fresh._shift, self._start[rows]", "ar", TRANSFORMER),
    # Continuous batching
    _bug("continuous batching", "the first slot of a refilled row counts as drafted", _JACOBI + "Jacobi.restart",
         "self._drafted_to[rows] = 0", "self._drafted_to[rows] = 1", "sjd", REFILL),
    _bug("continuous batching", "a refilled row goes on with the noise of the image before",
         _DECODING + "noise:Noise.rekey", "= self._column(keys)", "= self._keys[rows]", "sjd", REFILL),
    # Grammar and sampling
    _bug("grammar", "forced tokens are expected one slot early", _DECODING + "sampling:Target.__call__",
         "self.forced_at(positions)", "self.forced_at(positions + 1)", "sjd", GRAMMAR),
    _bug("sampling", "min-p is a share of the smallest probability", _DECODING + "sampling:truncate",
         "logits.amax(-1, keepdim=True) + math", "logits.amin(-1, keepdim=True) + math", "ar", FILTERS),
    _bug("sampling", "top-n-sigma is counted from the mean", _DECODING + "sampling:truncate",
         "logits.amax(-1, keepdim=True) - sampling", "mean - sampling", "ar", FILTERS),
    _bug("sampling", "the temperature by entropy multiplies", _DECODING + "sampling:truncate",
         "logits / (sampling.temperature * entropy_factor", "logits * (sampling.temperature * entropy_factor", "ar",
         FILTERS),
    _bug("sampling", "ties at top-k are dropped", _DECODING + "sampling:truncate",
         "logits < kth_largest(logits, sampling.top_k)",
         "~torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(sampling.top_k).indices, True)",
         "ar", TIES),
    _bug("sampling", "tokens tied with the last one that top-p keeps are dropped", _DECODING + "sampling:truncate",
         "probabilities < least_of_mass(probabilities, sampling.top_p)",
         "probabilities - torch.arange(logits.shape[-1]) * 1e-6 < least_of_mass(probabilities - "
         "torch.arange(logits.shape[-1]) * 1e-6, sampling.top_p)", "ar", TOP_P_TIES),
    _bug("sampling", "top-p is measured before the temperature", _DECODING + "sampling:truncate",
         "logits.softmax(-1)", "(logits * sampling.temperature).softmax(-1)", "ar", TOP_P),
    _bug("sampling", "guidance points the other way", "specbench.models.transformer.forward:guide",
         "torch.lerp(unconditional, conditional,", "torch.lerp(conditional, unconditional,", "ar", TRANSFORMER),
)  # fmt: skip


_TARGET, _FORWARD = _DECODING + "sampling:Target.__call__", "specbench.models.transformer.forward:"
_SAMPLED = "truncate(logits.float(), self.sampling)"
RECORDING_FAULTS = {
    "temperature in drafted columns": Edit(
        _TARGET, _SAMPLED, "truncate(torch.cat([logits[:, :1], logits[:, 1:] / 1.05], 1).float(), self.sampling)"
    ),
    "top-k": Edit(_TARGET, _SAMPLED, "truncate(logits.float(), Sampling(**{**vars(self.sampling), 'top_k': 50}))"),
    "top-p in drafted columns": Edit(
        _TARGET,
        _SAMPLED,
        "torch.cat([truncate(logits[:, :1].float(), self.sampling), "
        "truncate(logits[:, 1:].float(), Sampling(**{**vars(self.sampling), 'top_p': 0.93}))], 1)",
    ),
    "guidance": Edit(_FORWARD + "guide", "conditional, guidance)", "conditional, guidance * 1.4 / 1.5)"),
    "cache": Edit(_FORWARD + "run_step", "<= inputs.slots[..., None]", "< inputs.slots[..., None]"),
    "prompt": Edit(
        "specbench.models.shapes.network:ShapesNetwork.encode", "for text in prompts", "for text in prompts[::-1]"
    ),
}
"""Faults after which a run records, and draws from, another p than its model's."""
