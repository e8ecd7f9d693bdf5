"""Bugs to plant into the decoding code, each a fault at a seam between its parts, that a good audit must notice."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import NamedTuple

import torch

from specbench.checks.audit_settings import AUDIT_SETTINGS
from specbench.checks.enumerable_model import EnumerableSession
from specbench.decoding import greedy_paths, noise, sampling
from specbench.decoding.draft_tree import routes
from specbench.decoding.drafters import jacobi, lookup, token_init, vertical
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.verification import chain_verification, ratio_tests, tree_verification
from specbench.decoding.verification.refinement import Couple, refined_from
from specbench.models.shapes.network import ShapesNetwork
from specbench.models.transformer.forward import run_step
from specbench.models.transformer.kv_cache import PositionLayer
from specbench.models.transformer.model import TransformerModel, TransformerSession
from specbench.specs.run_spec import FILTERS, OFF_IF_NONE, SAMPLING

Seam = Callable | tuple[object, str]  # a function or method; or a module and a name in it, which others keep
Fault = Callable  # called in the place of a seam: `fault(plain, *args)`, `plain` being the seam itself


class Bug(NamedTuple):
    """One bug, how to plant it, and what catches it."""

    part: str  # of the decoder, as the docs group them
    what: str  # the bug, in words
    decoder: str  # that shows it, with `options`
    setting: str  # first words of the audit setting that shows it
    seam: Seam
    fault: Fault
    options: Mapping[str, object] = {}
    times: int = 1  # how many times the audit's own number of images it takes to see it


def plant(monkeypatch, seam: Seam, fault: Fault) -> None:
    """Put `fault` in the place of `seam`, in its class or in every module that imports it, until `monkeypatch` is
    undone."""
    if isinstance(seam, tuple):
        owners, name = [seam[0]], seam[1]
    else:
        *owner, name = seam.__qualname__.split(".")
        package = [module for key, module in sys.modules.items() if key.startswith("specbench")]
        module = sys.modules[seam.__module__]
        owners = [getattr(module, *owner)] if owner else [user for user in package if vars(user).get(name) is seam]
    plain = getattr(owners[0], name)
    for owner in owners:
        monkeypatch.setattr(owner, name, wraps(plain)(lambda *args, **kwargs: fault(plain, *args, **kwargs)))


def _changed(change: Callable) -> Fault:
    """The seam's result, changed."""
    return lambda plain, *args: change(plain(*args))


def _given(place: int, change: Callable) -> Fault:
    """The seam called with its argument at `place` changed; of a method, self is at 0."""
    return lambda plain, *args: plain(*args[:place], change(args[place]), *args[place + 1 :])


def _q(change: Callable) -> Fault:
    """A proposal with another q [B, D, V]."""
    return _changed(lambda proposal: proposal._replace(q=change(proposal.q)))


def _numbers(stream: Stream, change: Callable) -> Fault:
    """Random numbers of `stream` from another address (positions, stream, draw)."""
    return lambda plain, self, positions, asked, draw=0: plain(
        self, *(change(positions, asked, draw) if asked is stream else (positions, asked, draw))
    )


def _tables(change: Callable) -> Fault:
    """Verification of a tree with other tables."""
    return _given(2, lambda tables: SimpleNamespace(**vars(tables) | change(tables)))


def _stale_q_of_kept(plain, refinement, p, tests):
    kept, drafts = tests.drafted & (tests.coin < tests.ratio), tests.draft.shape[1]
    return torch.cat([torch.where(kept[..., None], tests.q, p[:, :drafts]), p[:, drafts:]], 1)


def _stale_q_of_none(plain, self, p, tests, *rest):
    drafts = tests.draft.shape[1]
    tail = ratio_tests.standard(p[:, drafts:], tests.q[:, -1:])
    return plain(self, torch.cat([p[:, :drafts], tail], 1), tests, *rest)


def _drafter(kind: type) -> Fault:
    """A drafter of the class `kind`, which is given the drafter's own class as a base."""
    return lambda plain, *args, **options: type(plain.__name__, (kind, plain), {})(*args, **options)


class _RefinedDrafts:
    """A Jacobi drafter that knows of each draft which refined one it replaced, and the q of that."""

    def begin(self, batch):
        super().begin(batch)
        self.stream, self.latest = batch.tokens, None

    def observe(self, verification, positions, shift, keep_tail):
        super().observe(verification, positions, shift, keep_tail)
        p = verification.p if verification.refined_from is None else verification.refined_from
        self.latest = p, shift[:, None]

    def propose(self, committed, width, step):
        before = self.stream.clone()
        proposal = super().propose(committed, width, step)
        if self.latest is None:
            return proposal
        p, shift = self.latest
        positions = proposal.positions[:, : proposal.q.shape[1]]
        slots = positions - committed[:, None] + shift
        refined, q = slots < p.shape[1], sampling.rows_at(p, slots.clamp(max=p.shape[1] - 1))
        return self.replaced(proposal, refined, before.gather(1, positions), q)


class _QOfReplaced(_RefinedDrafts):
    def replaced(self, proposal, refined, drafts, q):
        return proposal._replace(q=torch.where(refined[..., None], q, proposal.q))


class _KeptByToken(_RefinedDrafts):
    """Of a chain."""

    def replaced(self, proposal, refined, drafts, q):
        kept, positions = refined & (drafts > 0), proposal.positions[:, : proposal.q.shape[1]]
        self.stream.scatter_(1, positions, torch.where(kept, drafts, self.stream.gather(1, positions)))
        tokens = torch.cat([proposal.tokens[:, :1], self.stream.gather(1, positions)], 1)
        return proposal._replace(tokens=tokens, q=torch.where(kept[..., None], q, proposal.q))


def _siblings_reversed(proposal):
    parents, order = proposal.tree.parents, list(range(len(proposal.tree.parents)))
    for parent in set(parents):
        siblings = [column for column in order if parents[column] == parent]
        for column, other in zip(siblings, siblings[::-1], strict=True):
            order[column] = other
    return proposal._replace(tokens=proposal.tokens[:, order])


def _recorded_as_uniform(plain, self, slots, noise):
    past = slots._replace(positions=torch.full_like(slots.positions, 10**6), fresh=torch.ones_like(slots.fresh))
    return plain(self, slots, noise)[0], plain(self, past, noise)[1]  # no slot past the image has a neighbour


def _restarted_with_a_draft(plain, self, rows):
    plain(self, rows)  # nothing public says which slots of a row have drafts
    self._drafted_to[rows] = 1


def _last_element_kept(plain, self, rows, prefix):
    start = self._start.clone()  # nothing public has the prompts that the rows had
    plain(self, rows, prefix)
    self._start.copy_(start)


def _first_draft_unseen(inputs):
    if inputs.index is None:
        return inputs
    later, slots = torch.arange(inputs.slots.shape[1])[:, None] > 1, inputs.slots[..., None]
    return inputs._replace(mask=(inputs.index <= slots) & ~(later & (inputs.index == slots[:, :1] + 1)))


def _attends(further: int) -> Fault:
    """Forwards whose columns attend to so many slots more."""
    return _given(3, lambda inputs: inputs._replace(index=None if inputs.index is None else inputs.index - further))


_TIES_BROKEN = _given(0, lambda logits: logits - torch.arange(logits.shape[-1]) * 1e-6)
WIDE, EIGHT, GUIDED, GRAMMAR, REFILL = "1x3 of 6", "2x4 of 2, window", "2x4 of 3 with row ends", "3x4 of 2", "4x4 of 2"
FOUR, SEVERAL_DRAFTS = "1x5 of 4", "2x4 of 2 with a row end"
STEADY, TOP_P_TIES, LONE, LONG_WINDOW, ENTROPY = "1x4 of 8", "2x2 of 4", "2x3 of 2", "1x10 of 2", "1x4 of 5, T"
TIES, TOP_P, TRANSFORMER = "2x4 of 3, guided, T 0.7", "4x3 of 2", "2x4 of 2 with row ends, transformer"

BUGS = (
    # Loop and windows
    Bug("loop", "one token too many is committed", "sjd", GRAMMAR, chain_verification.verify_chain, _changed(
        lambda outcome: outcome._replace(first=(outcome.first + 1).clamp(max=outcome.tokens.shape[1] - 1)))),
    Bug("loop", "q is that of the slot after once the window narrows near the end of the image", "sjd", EIGHT,
        jacobi.Jacobi.propose, _q(lambda q: q if q.shape[1] == 11 else q.roll(-1, 1))),
    Bug("loop", "an accepted branch is not kept in the cache", "sjd-pac", WIDE,
        EnumerableSession.keep, lambda *_: None),
    # q of the drafts
    Bug("q", "a coupled slot without a draft is drawn from [p - q]+ with a stale q", "scd-mc", GRAMMAR,
        Couple.refine, _stale_q_of_none),
    Bug("q", "q is not replaced after a kept draft", "scd-mc", EIGHT, refined_from, _stale_q_of_kept),
    Bug("q", "q is that of the slot before", "sjd", GRAMMAR, jacobi.Jacobi.propose,
        _q(lambda q: torch.cat([q[:, :1], q[:, :-1]], 1))),
    Bug("q", "drafts after the fourth have its q", "sjd", LONG_WINDOW, jacobi.Jacobi.propose,
        _q(lambda q: q[:, torch.arange(q.shape[1]).clamp(max=3)])),
    Bug("q", "a fresh token drawn from its neighbour's distribution is recorded as uniform", "sjd", GUIDED,
        token_init.Spatial.fill, _recorded_as_uniform, {"init": "left-sample"}),
    Bug("q", "fresh tokens are drawn from all but the last token", "sjd", GUIDED, token_init.Uniform.fill,
        _changed(lambda drawn: (drawn[0].minimum(drawn[1].count_nonzero(-1) - 2), drawn[1]))),
    Bug("q", "the draft head's q is recorded at another temperature", "eagle", WIDE,
        Eagle.propose, _q(lambda q: torch.nn.functional.normalize(q.sqrt(), p=1, dim=-1)), {"tree": "chain"}),
    Bug("q", "a vertical head's draft is recorded with the q of the draft it replaces", "vertical", WIDE,
        (vertical, "Vertical"), _drafter(_QOfReplaced)),
    Bug("q", "a vertical head's draft is kept by what it is", "vertical", STEADY,
        (vertical, "Vertical"), _drafter(_KeptByToken), {"siblings": 1}),
    Bug("q", "a vertical head's draft that is not kept is drawn from q instead of the residual distribution",
        "vertical-coupled", EIGHT, (vertical, "standard"), lambda plain, p, q: p),
    Bug("q", "a vertical head's draft is coupled by the coin that made it what it is", "vertical-coupled", EIGHT,
        Noise.uniform, _numbers(Stream.FRESH, lambda positions, stream, draw: (positions, Stream.COIN, draw - 1))),
    Bug("q", "what remains of q without a sibling is not normalised", "sjd-pac", WIDE,
        sampling.without, lambda plain, weights, tokens: weights.scatter(-1, tokens[..., None], 0.0)),
    # Noise
    Bug("noise", "a coin is tossed once per slot and reused in every step", "scd-mc", EIGHT,
        Noise.uniform, _numbers(Stream.COIN, lambda positions, stream, draw: (positions, stream, 0))),
    Bug("noise", "all slots of a window are redrawn with the same number", "sjd", EIGHT, Noise.uniform, _numbers(
        Stream.REDRAW, lambda positions, stream, draw: (positions[:, :1].expand_as(positions), stream, draw))),
    Bug("noise", "two neighbouring slots share their frozen noise", "predictive", GRAMMAR, Noise.run_race,
        _given(2, lambda positions: positions - positions % 2)),
    Bug("noise", "coin, redraw and fresh token of a slot are the same number", "sjd", GUIDED, Noise.uniform,
        lambda plain, self, positions, stream, draw=0: plain(self, positions, Stream.TOKEN, draw)),
    Bug("noise", "the images of a prompt share their noise", "ar", EIGHT,
        noise.row_key, _given(2, lambda sample: sample // 8)),
    Bug("noise", "the noise of an image does not depend on its prompt", "sjd", EIGHT,
        noise.row_key, _given(1, lambda prompt: "")),
    Bug("noise", "the noise of an image does not depend on the seed", "sjd", EIGHT,
        noise.row_key, _given(0, lambda seed: 0)),
    Bug("noise", "a coupled slot is redrawn with the number of its coin", "scd-mc", STEADY, Noise.uniform,
        _numbers(Stream.REDRAW, lambda positions, stream, draw: (positions, Stream.COIN, draw))),
    Bug("noise", "siblings are drawn with the same number", "sjd-pac", WIDE, Noise.uniform,
        _numbers(Stream.SIBLING, lambda positions, stream, draw: (positions, stream, draw // 5)), {"siblings": 5}),
    Bug("noise", "a replacement is drawn with the noise of the rejected draft", "scd-gs", WIDE, Noise.run_race,
        lambda plain, self, weights, positions, *_: plain(self, weights, positions, Stream.TOKEN), times=10),
    # Verifiers, residuals, refinements
    Bug("verifier", "a draft is accepted with q/p instead of p/q", "sjd", GUIDED,
        ratio_tests.Exact.of_drafts, _changed(lambda ratio: 1 / ratio)),
    Bug("verifier", "a mismatch commits a second draw instead of the one compared", "jacobi", GUIDED,
        ratio_tests.draw_after_drafts, _given(2, torch.zeros_like)),
    Bug("residual", "a rejected draft is replaced by a draw from p", "sjd", GUIDED,
        ratio_tests.standard, lambda plain, p, *_: p),
    Bug("residual", "the optimal residual subtracts more than what was accepted", "sjd", GUIDED,
        ratio_tests.optimal, lambda plain, p, q, a: plain(p, 2 * q, lambda p, q, x: a(p, q / 2, x)),
        {"residual": "optimal"}),
    Bug("residual", "an unnormalised residual is drawn from as if it summed to 1", "scd-mc", WIDE,
        sampling.draw, lambda plain, weights, uniform: plain(weights, uniform / weights.sum(-1))),
    Bug("refinement", "maximal coupling keeps every draft with p > q/2", "scd-mc", EIGHT, Couple.refine,
        _given(2, lambda tests: tests._replace(coin=0 * tests.coin + 0.5))),
    Bug("refinement", "a tail that should be thrown away is drafted again", "sjd-norefine", GRAMMAR,
        jacobi.Jacobi.observe, _given(4, lambda keep_tail: True)),
    # Verification of chains and trees
    Bug("chain", "a rejected draft is replaced from the residual of the window's first column", "sjd", GRAMMAR,
        ratio_tests.Verdict.failed, _given(2, torch.zeros_like)),
    Bug("chain", "the bonus is drawn from the column before", "sjd", GRAMMAR, (chain_verification, "rows_at"),
        _given(1, lambda first: (first - 1).clamp(min=0))),
    Bug("tree", "drafts after a rejected one are accepted", "sjd-pac", GRAMMAR, tree_verification.verify_tree,
        _tables(lambda tables: {"ancestors": torch.eye(len(tables.ancestors))})),
    Bug("tree", "a sibling is tested against p instead of the residual", "sjd-pac", WIDE,
        (tree_verification, "residual_weights"), lambda plain, verifier, failed: failed.p),
    Bug("tree", "a rejected draft is replaced from the residual of the sibling before the last", "sjd-pac", WIDE,
        tree_verification.verify_tree, _tables(lambda tables: {
            "last_test": tables.test[tables.before[tables.tested[tables.last_test] - 1].argmax(-1)]
        }), {"siblings": 2}),
    Bug("tree", "drafts on a branch are tested with the q of the slot before", "sjd-pac", WIDE,
        jacobi.Jacobi.propose, _changed(lambda proposal: proposal if proposal.tree.is_chain else proposal._replace(
            q=proposal.q[:, routes(proposal.tree, proposal.q.device).parent]))),
    Bug("tree", "siblings are tested in the reverse of the order they were drawn in", "eagle", WIDE,
        Eagle.propose, _changed(_siblings_reversed)),
    Bug("tree", "a rejected draft is replaced from the residual of another parent", "eagle", WIDE,
        tree_verification.verify_tree, _tables(lambda tables: {"last_test": 0 * tables.last_test})),
    Bug("tree", "the drafts after an accepted sibling are those of the trunk", "sjd-pac", WIDE, Couple.refine,
        lambda plain, self, p, tests, *rest: plain(self, p, tests, *rest)[:, tests.depth - 1]),
    Bug("tree", "a draft is coupled by the coin that tested the draft before it", "sjd-pac", STEADY,
        Couple.refine, _given(2, lambda tests: tests._replace(coin=tests.coin.roll(1, 1)))),
    # A batch of one
    Bug("batch of one", "one row too far is picked where a distribution of a lone image is", "sjd", LONE,
        sampling.rows_at, lambda plain, rows, slots: plain(
            rows, (slots + (len(rows) == 1)).clamp(max=rows.shape[1] - 1))),
    # The best of several paths
    Bug("q", "the best of several paths is recorded with the q of any path", "eagle-gbv", FOUR,
        greedy_paths.best_path_q, lambda plain, p, q, *_: q),
    Bug("tree", "paths are compared from their last drafts", "eagle-gbv", FOUR,
        greedy_paths.best_path, lambda plain, ratio, drafts: plain(ratio.flip(-1), drafts.flip(-1))),
    # Looked-up drafts
    Bug("q", "a looked-up draft is recorded with the q of the draft that it replaced", "best-lossless", EIGHT,
        (lookup, "LookupJacobi"), _drafter(_QOfReplaced)),
    Bug("q", "whether a draft is looked up depends on the draft itself", "best-lossless", EIGHT,
        (lookup, "LookupJacobi"), _drafter(_KeptByToken), {"siblings": 1}),
    # Cache
    Bug("cache", "keys are written into the neighbour's row", "sjd", TRANSFORMER,
        PositionLayer.update, _given(1, lambda keys: keys.roll(1, 0))),
    Bug("cache", "a branch is kept from the slots of the neighbour's row", "sjd-pac", TRANSFORMER,
        PositionLayer.move, _given(1, lambda source: source.roll(1, 0))),
    Bug("cache", "a column attends to the slot after its own", "sjd", TRANSFORMER, run_step, _attends(1)),
    Bug("cache", "columns after the second do not attend to the first draft", "sjd", SEVERAL_DRAFTS,
        run_step, _given(3, _first_draft_unseen)),
    Bug("cache", "only the first token of an accepted branch is kept", "vertical", SEVERAL_DRAFTS,
        TransformerSession.keep, lambda plain, self, columns, slots: plain(self, columns[:, :1], slots[:, :1])),
    Bug("cache", "a refilled row gets the prompt of its neighbour", "ar", TRANSFORMER,
        PositionLayer.put, _given(1, lambda rows: rows.roll(1, 0))),
    Bug("cache", "a refilled row keeps the last prompt element of the image before", "ar", TRANSFORMER,
        TransformerSession.refill, _last_element_kept),
    # Continuous batching
    Bug("continuous batching", "the first slot of a refilled row counts as drafted", "sjd", REFILL,
        jacobi.Jacobi.restart, _restarted_with_a_draft),
    Bug("continuous batching", "a refilled row goes on with the noise of the image before", "sjd", REFILL,
        Noise.rekey, lambda *_: None),
    # Grammar and sampling
    Bug("grammar", "forced tokens are expected one slot early", "sjd", GRAMMAR,
        sampling.Target.forced_at, _given(1, lambda positions: positions + 1)),
    *(Bug("sampling", f"{SAMPLING[name].name} is left out", "ar",
        next(setting.name for setting in AUDIT_SETTINGS if name in setting.sampling.filters),
        sampling.truncate, _given(1, lambda settings, name=name: replace(settings, **{name: None})))
      for name in FILTERS if name in OFF_IF_NONE),
    Bug("sampling", "the temperature by entropy multiplies", "ar", ENTROPY,
        sampling.entropy_factor, _changed(lambda factor: 1 / factor)),
    Bug("sampling", "ties at top-k are dropped", "ar", TIES, sampling.truncate, _TIES_BROKEN),
    Bug("sampling", "tokens tied with the last one that top-p keeps are dropped", "ar", TOP_P_TIES,
        sampling.truncate, _TIES_BROKEN),
    Bug("sampling", "top-p is measured before the temperature", "ar", TOP_P, sampling.truncate,
        lambda plain, logits, by: plain(plain(logits, replace(by, temperature=1.0)), replace(by, top_p=1.0))),
    Bug("sampling", "guidance points the other way", "ar", TRANSFORMER, TransformerModel.guide,
        _given(1, lambda logits: logits.roll(len(logits) // 2, 0))),
)  # fmt: skip

RECORDING_FAULTS = {
    "temperature in drafted columns": (sampling.truncate, _given(
        0, lambda logits: torch.cat([logits[:, :1], logits[:, 1:] / 1.05], 1))),
    "top-k": (sampling.truncate, _given(1, lambda settings: replace(settings, top_k=50))),
    "top-p in drafted columns": (sampling.truncate, lambda plain, logits, by: torch.cat(
        [plain(logits[:, :1], by), plain(logits[:, 1:], replace(by, top_p=0.93))], 1)),
    "guidance": (TransformerModel.guide, _given(2, lambda guidance: guidance * 1.4 / 1.5)),
    "cache": (run_step, _attends(-1)),
    "prompt": (ShapesNetwork.encode, _given(1, lambda prompts: prompts[::-1])),
}  # fmt: skip
"""Seam and fault after which a run records, and draws from, another p than its model's."""
