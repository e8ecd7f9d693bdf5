"""Image rows that are decoded at once. ZipAR: number of forwards, slots that each column sees, and equality with AR for
wide windows. Jacobi windows in several rows: a slow reference of the rule, what is exact and what each part costs. It
concerns several modules: row_loop, zipar and row_jacobi."""

import itertools

import numpy as np
import pytest
import torch
from grouped_key_llama import TinyModel
from refusals import refused

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer
from specbench.checks.losslessness import observe
from specbench.decoding.loop import decode, noise_keys
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import draw
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

LAYOUTS = [
    TokenLayout.plain(3, 2, 3), TokenLayout.plain(2, 3, 3), TokenLayout.with_row_ends(2, 2, 4),
    TokenLayout.with_row_ends(1, 4, 3),
]  # fmt: skip


def rows_of(layout, name, samples=200, guidance=2.0, **options):
    requests = [Request("", "prompt", sample) for sample in range(samples)]
    return decode(EnumerableModel(layout), requests, resolve(name, options), Sampling(guidance), 3, render=False)


def tokens(rows) -> np.ndarray:
    return np.stack([row.tokens for row in rows])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_forwards_are_one_row_and_a_window_for_each_other(layout, window):
    lag = min(window, layout.width)
    rows = rows_of(layout, "zipar", **{"rows-window": window})
    assert {row.nfe for row in rows} == {layout.width + (layout.height - 1) * lag}
    forced = np.array(layout.forced)
    for row in rows:
        assert np.array_equal(row.tokens[forced >= 0], forced[forced >= 0])
        assert row.committed_step[forced < 0].max() == row.nfe


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_released_count_includes_the_row_end_or_lets_row_1_wait(layout, window):
    """With row ends a released window is smaller by one here; without, the first row is decoded alone."""
    released = rows_of(layout, "zipar-released", **{"rows-window": window})
    if layout.with_row_ends(layout.height, layout.width, layout.v_image) == layout:
        ours = rows_of(layout, "zipar", **{"rows-window": max(window - 1, 1)})
        assert np.array_equal(tokens(released), tokens(ours))
        return
    lag = min(window, layout.width)
    assert {row.nfe for row in released} == {2 * layout.width + (layout.height - 2) * lag}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_window_as_wide_as_the_row_is_ar(layout, adaptive):
    wide = rows_of(layout, "zipar", **{"rows-window": layout.width, "adaptive": adaptive})
    assert np.array_equal(tokens(wide), tokens(rows_of(layout, "ar")))
    narrow = rows_of(layout, "zipar", **{"rows-window": 1, "adaptive": adaptive})
    assert layout.height == 1 or adaptive or not np.array_equal(tokens(narrow), tokens(wide))


@pytest.mark.parametrize(("adaptive", "exact"), [(False, False), (True, True)])
def test_a_first_token_that_saw_its_whole_past_in_the_end_follows_it(adaptive, exact):
    setting = AuditSetting("zipar", TokenLayout.plain(2, 2, 3), tables=2)
    spec = resolve("zipar", {"rows-window": 1, "adaptive": adaptive})
    assert (p_value(observe(setting, spec, 20_000, seed=0)) > AUDIT_LEVEL) == exact


def test_a_grammar_it_cannot_read_is_refused():
    layout = TokenLayout(2, 2, 3, (-1, -1, 3, 3, -1, -1))
    refused("grammar", decode, EnumerableModel(layout), [Request("", "p")], resolve("zipar"), Sampling(1.0), 0)


@torch.inference_mode()
@pytest.mark.parametrize("kept", [False, True])
def test_released_substitutes_stay_in_the_cache_until_the_true_token_comes(monkeypatch, kept):
    """In a 3 x 3 image with window 1, slot 3 (6) is predicted in forward 2 (3) from a substitute for token 2 (5)."""
    calls, plain = [], TransformerSession.forward_scattered

    def forward(session, tokens, positions, fed, aside):
        calls.append([x.clone() for x in (tokens, positions, fed, aside)])
        return plain(session, tokens, positions, fed, aside)

    monkeypatch.setattr(TransformerSession, "forward_scattered", forward)
    model = TinyModel()
    model.layout = TokenLayout.plain(3, 3, model.layout.v_image)
    draw = torch.Generator().manual_seed(0)
    prefix = Prefix([torch.randn(n, 16, generator=draw) for n in (4, 2)], (torch.randn(2, 16, generator=draw),))
    model.encode = lambda texts: prefix
    options = {"rows-window": 1, "stand-ins": "kept" if kept else "dropped"}
    (row,) = decode(model, [Request("a", "a")], resolve("zipar", options), Sampling(1.0), 3, render=False)
    image = row.tokens.tolist()
    seen = [
        (step, place, token, bool(fed[0, place]), bool(alone))
        for step, (tokens, positions, fed, aside) in enumerate(calls)
        for token, place, alone in zip(tokens[0].tolist(), positions[0].tolist(), aside[0].tolist(), strict=True)
        if place in (3, 6)
    ]
    assert seen == [
        (1, 3, image[0], kept, not kept),
        (2, 6, image[1], kept, not kept),
        (3, 3, image[2], True, False),
        (4, 6, image[5], True, False),
    ]


@torch.inference_mode()
def test_columns_attend_to_what_was_fed_before_them_in_raster_order():
    model, lengths = TinyModel(), (4, 2)
    draw = torch.Generator().manual_seed(0)
    prefix = Prefix([torch.randn(n, 16, generator=draw) for n in lengths], (torch.randn(2, 16, generator=draw),))
    session = model.begin(prefix.take([0, 1, 0, 1]), 1.0, columns=4)
    forwards = [([0, 1], []), ([2, 8], [8]), ([5, 3, 9], [5]), ([4, 10], [])]  # positions, also of substitutes
    fed = torch.zeros(2, model.layout.length + 1, dtype=torch.bool)
    elements = []
    for number, (places, stand_ins) in enumerate(forwards):
        fed_now = torch.randint(11, (2, len(places)), generator=draw)
        positions = torch.tensor(places).expand(2, -1)
        aside = torch.tensor([place in stand_ins for place in places]).expand(2, -1)
        fed[:, [place for place in places if place not in stand_ins]] = True
        elements += [(place, number, place in stand_ins, fed_now[:, i]) for i, place in enumerate(places)]
        logits = session.forward_scattered(fed_now, positions, fed, aside)
        for row, length in enumerate(lengths):
            expected = uncached(model, prefix, row, length, elements)[-len(places) :]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def uncached(model, prefix, row, length, elements):
    """Logits of all elements (place, forward, substitute, token) in one forward with an explicit mask."""
    state = (prefix.state[0][row : row + 1],)
    embeds = [
        prefix.embeds[row][-1:] if place == 0 else model.embed(token[row].view(1, 1), None, state)[0]
        for place, _, _, token in elements
    ]
    inputs = torch.cat([prefix.embeds[row][:-1], *embeds])[None]
    marks = [(place - length + 1, -1, False) for place in range(length - 1)]
    marks += [(place, number, aside) for place, number, aside, _ in elements]
    mask = torch.tensor(
        [
            [i == j or (b <= a and m <= n and not s) for j, (b, m, s) in enumerate(marks)]
            for i, (a, n, _) in enumerate(marks)
        ]
    )
    places = torch.tensor([[place + length - 1 for place, _, _ in marks]])
    hidden = model.backbone(
        inputs_embeds=inputs, attention_mask=mask[None, None], position_ids=places, use_cache=False
    ).last_hidden_state[0]
    return model.head(hidden[length - 1 :])


THREE_ROWS = [TokenLayout.plain(3, 4, 3), TokenLayout.with_row_ends(3, 4, 3), TokenLayout.with_row_ends(1, 4, 3)]
PJD = ("pjd", "pjd-released", "pjd-residual")
V = 3


class SlowRows:
    """One image of `pjd` (or `pjd-released`), decoded column by column with the noise of the same addresses."""

    def __init__(self, model, request, window, lag, tau=None):
        self.model, self.layout, self.window, self.lag, self.tau = model, model.layout, window, lag, tau
        self.noise = Noise(noise_keys([request], 3), self.layout.vocab)
        free = self.layout.free_slots()
        width = self.layout.width
        self.slots = [free[row * width : (row + 1) * width] for row in range(self.layout.height)]
        self.committed = {slot: token for slot, token in enumerate(self.layout.forced) if token >= 0}
        self.count = [0] * self.layout.height
        self.drafts, self.steps = {}, 0

    def p(self, slot, context):
        code = sum(token * self.layout.vocab**at for at, token in context.items() if at < slot)
        logits = self.model.guided("", slot, np.array([code]), 1.0)[0]
        p = np.exp(logits - logits.max())
        return np.append(p / p.sum(), [0] * (self.layout.vocab - V))

    def uniform(self, slot, stream):
        return float(self.noise.uniform(torch.tensor([[slot]]), stream, self.steps))

    def race(self, weights, slot, stream, step):
        return int((weights / self.noise.race(torch.tensor([[slot]]), stream, step)[0, 0].numpy()).argmax())

    def run(self):
        width = self.layout.width
        while min(self.count) < width:
            self.steps += 1
            before, fixed = list(self.count), dict(self.committed)
            for row in range(self.layout.height):
                above = width if row == 0 else before[row - 1]
                room = min(self.window, above - before[row])
                if before[row] < width and room > 0 and (before[row] or above >= self.lag):
                    self.row(row, room, before, fixed, top=above == width)
        return [self.committed[slot] for slot in range(self.layout.length)]

    def context(self, row, before, fixed, first):
        """Committed tokens that a row's columns see, and the substitute before its first token."""
        start = self.slots[row][0]
        seen = {}
        for slot, token in fixed.items():
            owner = next((r for r, slots in enumerate(self.slots) if slot in slots), None)
            if owner is None:  # a row end is fed with the first column of the row below it
                seen |= {slot: token} if slot < start else {}
            elif owner <= row:
                seen[slot] = token
        if start and start - 1 not in fixed:
            newest = self.slots[max(row - 2, 0)][before[max(row - 2, 0)] - 1]
            return seen | ({start - 1: fixed[newest]} if first == start else {})
        return seen

    def row(self, row, room, before, fixed, top):
        slots = self.slots[row][before[row] : before[row] + room]
        for slot in slots[:-1]:
            if slot not in self.drafts:
                token = int(self.uniform(slot, Stream.FRESH) * V)
                self.drafts[slot] = (token, np.eye(self.layout.vocab)[token])
        targets, context = [], self.context(row, before, fixed, slots[0])
        for place, slot in enumerate(slots):
            # Only the first column sees a substitute.
            seen = {at: token for at, token in context.items() if place == 0 or at >= slots[0] or at in fixed}
            targets.append(self.p(slot, seen))
            context = context | {slot: self.drafts[slot][0]} if place < room - 1 else context
        accepted = 0
        for slot, p in zip(slots[:-1], targets, strict=False):
            token, q = self.drafts[slot]
            if not self.uniform(slot, Stream.COIN) < p[token] / q[token]:
                break
            accepted += 1
        slot, p, rejected = slots[accepted], targets[accepted], accepted < room - 1
        for k in range(accepted):
            self.committed[slots[k]] = self.drafts.pop(slots[k])[0]
        self.count[row] += accepted + top
        if top:
            weights = np.maximum(p - self.drafts[slot][1], 0) if rejected else p
            stream, step = (Stream.TOKEN, 0) if accepted == self.window - 1 else (Stream.RESIDUAL, self.steps)
            self.committed[slot] = self.race(weights if weights.sum() > 0 else p, slot, stream, step)
            self.drafts.pop(slot, None)
        else:
            self.drafts[slot] = (self.race(p, slot, Stream.REDRAW, self.steps), p)
        for slot, p in list(zip(slots, targets, strict=True))[accepted + 1 :]:
            old = self.drafts.get(slot) if slot != slots[-1] else None  # only drafts that were fed are kept
            if self.tau is not None and old is not None and p[old[0]] / old[1][old[0]] > self.tau:
                continue
            uniform = self.noise.uniform(torch.tensor([[slot]]), Stream.REDRAW, self.steps)
            self.drafts[slot] = (int(draw(torch.from_numpy(p).float()[None, None], uniform)), p)


@pytest.mark.parametrize(("name", "tau"), [("pjd", None), ("pjd-released", 0.5)])
@pytest.mark.parametrize("layout", THREE_ROWS, ids=str)
def test_tokens_and_forwards_match_the_rule(layout, name, tau):
    model = EnumerableModel(layout)
    images = rows_of(layout, name, 40, 1.0, **{"window": 3, "rows-window": 2})
    for sample, image in enumerate(images):
        slow = SlowRows(model, Request("", "prompt", sample), 3, 2, tau)
        assert list(image.tokens) == slow.run()
        assert image.nfe == slow.steps


EXACT = [
    *itertools.product((TokenLayout.plain(2, 4, 2), TokenLayout.with_row_ends(1, 4, 3)), PJD, ["tables"]),
    (TokenLayout.with_row_ends(2, 4, 2), "pjd-residual", "transformer"),  # over a cache
]


@pytest.mark.parametrize(("layout", "name", "model"), EXACT, ids=str)
def test_rows_that_wait_for_the_row_above_are_exact(layout, name, model):
    setting = AuditSetting(f"rows {layout}", layout, Sampling(2.0), tables=1, model=model)
    spec = resolve(name, {"window": 3, "rows-window": 4} | ({} if name != "pjd-released" else {"tau": 1e9}))
    assert p_value(observe(setting, spec, 5_000, seed=0)) > AUDIT_LEVEL


@torch.inference_mode()
def test_a_column_attends_to_the_given_slots():
    model = EnumerableTransformer(TokenLayout.plain(2, 3, 4), ("a",))
    prefix = model.encode(["a"])
    tokens, positions = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 3]])
    whole = torch.ones(1, 7, dtype=torch.bool)
    plain = model.begin(prefix, 1.0, 4).forward_scattered(tokens, positions, whole, torch.zeros(1, 4, dtype=torch.bool))
    seen = whole[:, None].repeat(1, 4, 1)
    aside = torch.zeros(1, 4, dtype=torch.bool)
    same = model.begin(prefix, 1.0, 4).forward_scattered(tokens, positions, seen, aside)
    torch.testing.assert_close(same, plain)
    seen[0, 3, 2] = False
    other = model.begin(prefix, 1.0, 4).forward_scattered(tokens, positions, seen, aside)
    torch.testing.assert_close(other[:, :3], plain[:, :3])
    assert (other[:, 3] - plain[:, 3]).abs().max() > 1e-3
