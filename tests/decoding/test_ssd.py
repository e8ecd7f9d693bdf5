"""SSD: whole images beside a slow decoder with full forwards and no cache, and its limits of no rounds and many."""

import pytest
import torch

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableTransformer
from specbench.checks.losslessness import observe
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, Stream, row_key
from specbench.decoding.sampling import Target, draw
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.models.ssd_heads import RIGHT, new_ssd_heads
from specbench.models.transformer.size import ssd_weights
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

LAYOUTS = {"row ends": TokenLayout.with_row_ends(4, 3, 4), "plain": TokenLayout.plain(5, 7, 4)}
GUIDED = Sampling(2.0, 1.3)


class Slow:
    """One image decoded in lists: rows as `layout` has them, tests one after another, every forward from the start."""

    def __init__(self, model, text, rounds, rows):
        self.model, self.text, self.rounds, self.rows = model, text, rounds, rows
        self.head, self.layout = model.own_ssd_heads(), model.layout
        self.noise = Noise([row_key(0, text, 0)], model.layout.vocab)
        self.target = Target(model.layout, GUIDED, model.device)
        self.row_width = model.layout.length // model.layout.height

    def features(self, tokens):
        """Hidden states that predict slots 0 to len(tokens), with the caption and without."""
        embed, found = self.model.backbone.embed_tokens, []
        prefix = self.model.encode([self.text])
        for start in prefix.embeds:
            fed = torch.cat([start, embed(torch.tensor(tokens).long())])[None]
            hidden = self.model.backbone(inputs_embeds=fed, use_cache=False).last_hidden_state[0]
            found.append(hidden[len(start) - 1 :])
        return found

    def distribution(self, pair, slot):
        with_caption, without = map(self.model.head, pair)
        logits = without + GUIDED.guidance * (with_caption - without)
        return self.target(logits[None, None], torch.tensor([[slot]]))[0, 0]

    def number(self, stream, slot, step):
        return self.noise.uniform(torch.tensor([[slot]]), stream, torch.tensor([[step]]))[0, 0]

    def raced(self, weights, stream, slot, step):
        return int(
            self.noise.run_race(weights[None, None], torch.tensor([[slot]]), stream, torch.tensor([[step]]))[0, 0]
        )

    def drafted(self, tokens, slot, step, opening, below):
        features, table = self.features(tokens), self.model.backbone.embed_tokens.weight
        at, head = slot - below * self.row_width, RIGHT - 1 + below
        if opening:
            at, head = len(tokens) - 1, slot - len(tokens)
        if not opening and self.layout.forced[slot] >= 0:
            at = 0
        pair = [self.head(torch.cat([known[at], table[tokens[at]]]))[head] for known in features]
        q = self.distribution(pair, slot)
        return int(draw(q[None], self.number(Stream.SIBLING, slot, step)[None])), q

    def image(self):
        tokens, drafts, step, block, tested, forwards = [], [], 0, None, 0, 0
        while len(tokens) < self.layout.length:
            step, row, start = step + 1, len(tokens) // self.row_width, len(tokens)
            first_row = 0 if row == 0 else (row - 1) // self.rows * self.rows + 1
            end = self.row_width if row == 0 else min((first_row + self.rows) * self.row_width, self.layout.length)
            if block != first_row or row == 0:
                last = end if row else min(end, start + RIGHT) if start else start
                drafts = [
                    self.drafted(tokens, slot, step, row == 0, slot // self.row_width - first_row + 1)
                    for slot in range(start, last)
                ]
                tested = 0 if block != first_row else tested
            block = first_row
            states = self.features(tokens + [token for token, _ in drafts])
            p = [
                self.distribution([known[slot] for known in states], slot)
                for slot in range(start, start + len(drafts) + 1)
            ]
            kept = []
            for place, (token, q) in enumerate(drafts):
                sure = row > 0 and tested == self.rounds
                kept.append(sure or bool(self.number(Stream.COIN, start + place, step) < p[place][token] / q[token]))
            first = kept.index(False) if False in kept else len(drafts)
            after = []
            for place in range(first, len(drafts)):
                slot, (token, q) = start + place, drafts[place]
                rest = (p[place] - q).clamp(min=0)
                if place == first:
                    token = self.raced(rest, Stream.RESIDUAL, slot, step)
                elif not kept[place]:
                    token = int(draw(rest[None], self.number(Stream.REDRAW, slot, step)[None]))
                after.append((token, p[place]))
            if first == len(drafts) and start + first < self.layout.length:
                # A slot without a draft counts as rejected, with p for its residual distribution.
                full = first == self.rows * self.row_width
                stream, draw_number = (Stream.TOKEN, 0) if full else (Stream.RESIDUAL, step)
                after = [(self.raced(p[first], stream, start + first, draw_number), p[first])]
            tokens += [token for token, _ in drafts[:first] + after[:1]]
            drafts, tested, forwards = after[1:], tested + 1, forwards + 1
        return tokens, forwards


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_images_are_those_of_a_slow_decoder(layout, rounds, rows):
    model = EnumerableTransformer(layout, ("a", "bb"))
    spec = resolve("ssd", {"rounds": rounds, "rows": rows})
    found = decode(model, [Request(text, text) for text in ("a", "bb")], spec, GUIDED, 0, render=False)
    for text, row in zip(("a", "bb"), found, strict=True):
        tokens, forwards = Slow(model, text, rounds, rows).image()
        assert row.tokens.tolist() == tokens
        assert row.nfe == forwards


@pytest.mark.parametrize("rows", [1, 2])
def test_only_enough_rounds_are_exact(rows):
    setting = AuditSetting("3x4 of 2", TokenLayout.with_row_ends(3, 4, 2), Sampling(2.0, 0.9))
    found = [p_value(observe(setting, resolve("ssd", {"rounds": n, "rows": rows}), 5_000, seed=0)) for n in (0, 1, 16)]
    assert max(found[:2]) < AUDIT_LEVEL < found[2]


def test_heads_of_another_kind_and_another_refinement_are_refused_in_one_line(cli):
    model, vertical = "shapes", "specbench/models/shapes/weights/vertical"
    refused = cli("run", "--decoder", "ssd", "--model", model, "--head", vertical, "--limit", "1")
    assert refused.code == 2 and "not a draft head of kind ssd" in refused.err and "Traceback" not in refused.err
    with pytest.raises(SpecbenchError, match="needs couple"):
        resolve("ssd", {"refine": "resample"})
    with pytest.raises(SpecbenchError, match="rows"):
        resolve("ssd", {"rows": 3})


def test_the_planned_weights_are_those_of_the_heads():
    heads = new_ssd_heads(128, 64, 0)
    assert sum(weights.numel() for weights in heads.parameters()) == ssd_weights(128)
