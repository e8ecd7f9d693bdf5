"""Drafts of a vertical head and looked-up drafts: every q against a slow computation, from a full forward without a
cache or from a slow search of the image. It concerns several modules: the drafters lookup and vertical."""

import numpy as np
import pytest
import torch

from specbench.checks.audit_settings import AUDIT_SETTINGS, in_window
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableTransformer
from specbench.checks.losslessness import observe
from specbench.decoding.drafters.lookup import MATCHES, WORTH_A_LOOKUP, LookupJacobi
from specbench.decoding.drafters.vertical import Vertical
from specbench.decoding.loop import Decoding, begin, decode
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

CPU = torch.device("cpu")
LAYOUTS = {
    "row ends": TokenLayout.with_row_ends(4, 4, 2),
    "plain": TokenLayout.plain(4, 4, 2),
    "one column": TokenLayout.with_row_ends(6, 1, 2),
    "one column without row ends": TokenLayout.plain(6, 1, 2),
}


def slow_neighbours(layout, slot):
    """Slots around one slot, found on the grid: left, above, above to the right, above to the left, before the left."""
    free = layout.free_slots()
    places = {divmod(number, layout.width): slot for number, slot in enumerate(free)}
    place = next((place for place, free_slot in places.items() if free_slot == slot), None)
    grid = [(-1, 0), (-1, 1), (-1, -1)]
    above = [-1] * 3 if place is None else [places.get((place[0] + y, place[1] + x), -1) for y, x in grid]
    return [slot - 1, *above, slot - 2 if slot > 1 else -1]


def slow_find(layout, tokens, fed, committed, slot, refined):
    """The slot to look up a draft in, if any."""

    def at(stream, slots):
        return [-1 if slot < 0 else int(stream[slot]) for slot in slots]

    around = at(tokens, slow_neighbours(layout, slot))
    if refined and around == at(fed, slow_neighbours(layout, slot)):
        return None
    best, match = 0, None
    for past in range(committed):
        if layout.forced[past] >= 0:
            continue
        seen = at(tokens, slow_neighbours(layout, past))
        agree = sum(2 ** (4 - place) for place in range(5) if seen[place] == around[place])
        if seen[0] == around[0] and agree >= best:
            best, match = agree, past
    return match


def slow_match(layout, tokens, source, slot):
    """2 if the neighbours above agree, plus 1 if those above to the right do."""
    above, right = (
        [-1 if place < 0 else int(tokens[place]) for place in slow_neighbours(layout, at)[1:3]] for at in (source, slot)
    )
    return 2 * (above[0] == right[0]) + (above[1] == right[1])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_drafts_are_looked_up_where_a_slow_search_finds_them(layout, monkeypatch):
    """Every q of the looked-up drafts is the target's distribution at the slot found, and every other q is Jacobi's."""
    seen = {"looked up": 0, "kept": 0}
    fill = LookupJacobi._fill

    def checked(self, committed, positions, step):
        fed, kept_from = self._fed.clone(), self._drafted_to.clone()
        looked_up = self._lookups
        self._lookups, before = 0, self._batch.tokens.clone()
        jacobi = fill(self, committed, positions, step)  # draws the same fresh tokens as the second call
        self._batch.tokens.copy_(before)
        self._lookups, self._fed = looked_up, fed.clone()
        q = fill(self, committed, positions, step)
        for row, draft in np.ndindex(*positions.shape):
            slot, tokens = int(positions[row, draft]), self._batch.tokens[row]
            if slot >= layout.length or layout.forced[slot] >= 0:
                continue
            refined = slot < int(kept_from[row])
            source = slow_find(layout, tokens, fed[row], int(committed[row]), slot, refined)
            if source is not None and self._gain[row, slow_match(layout, tokens, source, slot)] < 0:
                source = None
            expected = jacobi[row, draft] if source is None else self._history[row, source]
            assert torch.equal(q[row, draft], expected)
            assert q[row, draft, tokens[slot]] > 0
            seen["kept" if source is None else "looked up"] += 1
        return q

    monkeypatch.setattr(LookupJacobi, "_fill", checked)
    model = EnumerableTransformer(layout, ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(6) for text in model.prompts]
    decode(model, requests, resolve("best-lossless", {"window": 6}), Sampling(2.0), 0, render=False)
    assert min(seen.values()) > 10


def test_lookups_stop_if_they_are_worse_than_the_drafts_they_replace():
    """`_gain` is the sum, over tested slots with a match, of the difference of the overlaps minus the margin."""
    model = EnumerableTransformer(TokenLayout.plain(4, 4, 2), ("a", "bb"))
    requests = [Request("a", "a", sample) for sample in range(4)]
    decoder = resolve("best-lossless", {"window": 4, "siblings": 1})
    loop = begin(Decoding(model, decoder, Sampling(2.0), 0), requests, Spans(CPU), rare=True)
    drafter, expected = loop._drafter, np.zeros((4, MATCHES))
    with torch.inference_mode():
        for _ in range(8):
            start, history = loop.committed.clone(), drafter._history.clone()
            loop.step(0)
            matched, source, match, q = drafter._candidates
            for row, draft in np.ndindex(*matched.shape):
                if not matched[row, draft] or start[row] + draft >= loop.committed[row]:
                    continue
                p = drafter._history[row, start[row] + draft].double().numpy()
                looked_up, jacobi = (x.double().numpy() for x in (history[row, source[row, draft]], q[row, draft]))
                better = np.minimum(p, looked_up).sum() - np.minimum(p, jacobi).sum() - WORTH_A_LOOKUP
                expected[row, match[row, draft]] += better
    np.testing.assert_allclose(drafter._gain.numpy(), expected, atol=1e-5)
    assert (expected < 0).any() and np.abs(expected).max() > 0.1


def slow_q(model, head, tokens, row, committed, slot):
    """The head's distribution for `slot`, given the tokens before it, `committed` of them with features."""
    prefix, features, guesses = model.encode(model.prompts), [], []
    embed = model.backbone.embed_tokens
    for start in (prefix.embeds[row], prefix.embeds[len(model.prompts)]):
        fed = torch.cat([start, embed(torch.tensor(tokens[: max(committed - 1, 0)]).long())])[None]
        hidden = model.backbone(inputs_embeds=fed, use_cache=False).last_hidden_state[0, len(start) - 1 :]
        features.append(hidden)
    above = slow_neighbours(model.layout, slot)[1]
    zero = torch.zeros(model.feature_size)
    for states in features:

        def feature(at, states=states):
            return states[at] if 0 <= at < committed else zero

        def token(at):
            return embed.weight[tokens[at]] if 0 <= at < slot else zero

        if above < 0:
            parts = [zero, zero, feature(committed - 1), token(slot - 1), zero, zero]
        else:
            pair = feature(above + 1), feature(above + 2)
            parts = [*pair, feature(committed - 1), token(slot - 1), token(above), token(above + 1)]
        guesses.append(head(torch.cat(parts)[None, None], torch.tensor([[slot - committed]]))[0])
    with_caption, without = (model.head(guess) for guess in guesses)
    logits = without + Sampling(2.0).guidance * (with_caption - without)
    return Target(model.layout, Sampling(2.0), model.device)(logits[None], torch.tensor([[slot]]))[0, 0]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "refine"), [("vertical", "restart"), ("vertical", "couple"), ("vertical-coupled", "couple")]
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_draft_is_drawn_from_the_distribution_written_out(layout, name, refine, monkeypatch):
    """A draft with the same neighbours as in the last forward keeps the target's q; all others have the head's q."""
    seen = {"drawn": 0, "kept": 0}
    honest = Vertical._draft

    def checked(self, committed, positions, step, q):
        fed = self._fed.clone()
        recorded = honest(self, committed, positions, step, q)
        for row in range(len(positions)):
            tokens = self._batch.tokens[row].tolist()
            for draft, slot in enumerate(positions[row].tolist()):
                if slot >= layout.length or layout.forced[slot] >= 0:
                    continue
                above = slow_neighbours(layout, slot)[1]
                looked_at = [slot - 1, *([] if above < 0 else [above, above + 1])]
                # With a single column the slot above right is the slot itself, which must not matter.
                same = all(tokens[at] == int(fed[row, at]) for at in looked_at if 0 <= at < slot)
                if slot < int(self._drafted_to[row]) and same:
                    seen["kept"] += 1
                    assert torch.equal(recorded[row, draft], q[row, draft])
                    continue
                seen["drawn"] += 1
                expected = slow_q(model, self._head, tokens, row % 2, int(committed[row]), slot)
                torch.testing.assert_close(recorded[row, draft], expected, atol=2e-4, rtol=1e-3)
                assert recorded[row, draft, tokens[slot]] > 0
        return recorded

    monkeypatch.setattr(Vertical, "_draft", checked)
    model = EnumerableTransformer(layout, ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(6) for text in model.prompts]
    decode(model, requests, resolve(name, {"window": 6, "refine": refine}), Sampling(2.0), 0, render=False)
    assert seen["drawn"] > 50 and (seen["kept"] > 0) == (refine == "couple")


@pytest.mark.parametrize("name", ["vertical", "vertical-coupled"])
def test_as_many_passes_as_drafts_draw_the_drafts_one_by_one_and_few_stay_exact(name):
    model = EnumerableTransformer(TokenLayout.plain(4, 4, 2), ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(40) for text in model.prompts]

    def tokens(passes):
        spec = resolve(name, {"window": 6, "passes": passes})
        return [image.tokens.tolist() for image in decode(model, requests, spec, Sampling(2.0), 0, render=False)]

    assert tokens(0) == tokens(5) != tokens(1)
    assert resolve(name).options.keys() & {"passes"} == set()  # ids of stored runs stay


def test_one_pass_keeps_the_joint_distribution():
    setting = AUDIT_SETTINGS[1]
    spec = in_window(resolve("vertical", {"passes": 1}), setting.window)
    assert p_value(observe(setting, spec, 20_000, seed=0)) > AUDIT_LEVEL
