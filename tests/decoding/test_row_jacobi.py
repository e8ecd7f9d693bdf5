"""Jacobi windows in several image rows: a slow reference of the rule, what is exact and what each part costs."""

import numpy as np
import pytest
import torch

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer
from specbench.checks.losslessness import observe
from specbench.decoding.loop import decode, noise_keys
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import draw
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

LAYOUTS = [TokenLayout.plain(3, 4, 3), TokenLayout.with_row_ends(3, 4, 3), TokenLayout.with_row_ends(1, 4, 3)]
PRESETS = ("pjd", "pjd-released", "pjd-residual")
V = 3


def decoded(layout, name, samples=60, model=None, **options):
    model = model or EnumerableModel(layout)
    requests = [Request("", "prompt", sample) for sample in range(samples)]
    return decode(model, requests, resolve(name, options), Sampling(1.0), 3, render=False)


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
        race = self.noise.race(torch.tensor([[slot]]), stream, step)[0, 0].numpy()
        return int((weights / race).argmax())

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
            bonus = accepted == self.window - 1
            stream, step = (Stream.TOKEN, 0) if bonus else (Stream.RESIDUAL, self.steps)
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
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_and_forwards_are_those_of_the_rule(layout, name, tau):
    model = EnumerableModel(layout)
    images = decoded(layout, name, 40, model, **{"window": 3, "rows-window": 2})
    for sample, image in enumerate(images):
        slow = SlowRows(model, Request("", "prompt", sample), 3, 2, tau)
        assert list(image.tokens) == slow.run()
        assert image.nfe == slow.steps


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_that_wait_for_the_row_above_are_exact(layout, name):
    setting = AuditSetting(f"rows {layout}", layout, tables=1)
    if layout.height * layout.width > 8:
        setting = AuditSetting("rows", TokenLayout(2, 4, 2, None or TokenLayout.plain(2, 4, 2).forced))
    spec = resolve(name, {"window": 3, "rows-window": 4} | ({} if name != "pjd-released" else {"tau": 1e9}))
    assert p_value(observe(setting, spec, 5_000, seed=0)) > AUDIT_LEVEL


@pytest.mark.parametrize("name", PRESETS)
def test_rows_that_do_not_wait_are_lossy(name):
    setting = AuditSetting("3x4 of 2, rows", TokenLayout.plain(3, 4, 2), window=2)
    assert p_value(observe(setting, resolve(name, {"rows-window": 2}), 10_000, seed=0)) < AUDIT_LEVEL


@pytest.mark.parametrize("name", ["pjd", "pjd-residual"])
def test_a_single_row_is_exact(name):
    setting = AuditSetting("1x8 of 2, row", TokenLayout.plain(1, 8, 2), window=3)
    assert p_value(observe(setting, resolve(name), 8_000, seed=0)) > AUDIT_LEVEL


@pytest.mark.parametrize("name", PRESETS)
def test_an_image_does_not_depend_on_its_batch_and_grammar_is_kept(name):
    for layout in LAYOUTS:
        together = decoded(layout, name, 6, **{"window": 3, "rows-window": 2})
        model = EnumerableModel(layout)
        spec = resolve(name, {"window": 3, "rows-window": 2})
        for sample, image in enumerate(together):
            (alone,) = decode(model, [Request("", "prompt", sample)], spec, Sampling(1.0), 3, render=False)
            assert np.array_equal(image.tokens, alone.tokens)
            assert image.nfe == alone.nfe
            forced = np.array(layout.forced)
            assert np.array_equal(image.tokens[forced >= 0], forced[forced >= 0])


def test_a_transformer_sees_the_same_columns_as_a_table():
    """Rows that wait for the row above, over a cache: the exact joint distribution."""
    layout = TokenLayout.with_row_ends(2, 4, 2)
    setting = AuditSetting("rows, transformer", layout, Sampling(2.0), model="transformer")
    spec = resolve("pjd-residual", {"window": 3, "rows-window": 4})
    assert p_value(observe(setting, spec, 3_000, seed=0)) > AUDIT_LEVEL


@torch.inference_mode()
def test_a_column_attends_to_the_slots_it_is_told_to():
    layout = TokenLayout.plain(2, 3, 4)
    model = EnumerableTransformer(layout, ("a",))
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
