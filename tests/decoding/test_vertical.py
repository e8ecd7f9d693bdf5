"""Drafts of a vertical head: every q against a slow computation from a full forward without a cache."""

import pytest
import torch

from specbench.checks.audit_settings import AUDIT_SETTINGS, in_window
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableTransformer
from specbench.checks.losslessness import observe
from specbench.decoding.drafters.vertical import Vertical
from specbench.decoding.loop import decode
from specbench.decoding.sampling import Target
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

LAYOUTS = {
    "row ends": TokenLayout.with_row_ends(4, 4, 2),
    "plain": TokenLayout.plain(4, 4, 2),
    "one column": TokenLayout.with_row_ends(6, 1, 2),
    "one column without row ends": TokenLayout.plain(6, 1, 2),
}
GUIDED = Sampling(2.0)


def grid_above(layout, slot):
    """Slot of the image token above, if any, found on the grid."""
    free = layout.free_slots()
    if slot not in free or free.index(slot) < layout.width:
        return None
    return free[free.index(slot) - layout.width]


def slow_q(model, head, tokens, row, committed, slot):
    """The head's distribution for `slot`, given the tokens before it, `committed` of them with features."""
    prefix, features, guesses = model.encode(model.prompts), [], []
    embed = model.backbone.embed_tokens
    for start in (prefix.embeds[row], prefix.embeds[len(model.prompts)]):
        fed = torch.cat([start, embed(torch.tensor(tokens[: max(committed - 1, 0)]).long())])[None]
        hidden = model.backbone(inputs_embeds=fed, use_cache=False).last_hidden_state[0, len(start) - 1 :]
        features.append(hidden)
    above = grid_above(model.layout, slot)
    zero = torch.zeros(model.feature_size)
    for states in features:

        def feature(at, states=states):
            return states[at] if 0 <= at < committed else zero

        def token(at):
            return embed.weight[tokens[at]] if 0 <= at < slot else zero

        if above is None:
            parts = [zero, zero, feature(committed - 1), token(slot - 1), zero, zero]
        else:
            pair = feature(above + 1), feature(above + 2)
            parts = [*pair, feature(committed - 1), token(slot - 1), token(above), token(above + 1)]
        guesses.append(head(torch.cat(parts)[None, None], torch.tensor([[slot - committed]]))[0])
    with_caption, without = (model.head(guess) for guess in guesses)
    logits = without + GUIDED.guidance * (with_caption - without)
    return Target(model.layout, GUIDED, model.device)(logits[None], torch.tensor([[slot]]))[0, 0]


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
                above = grid_above(layout, slot)
                looked_at = [slot - 1, *([] if above is None else [above, above + 1])]
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
    decode(model, requests, resolve(name, {"window": 6, "refine": refine}), GUIDED, 0, render=False)
    assert seen["drawn"] > 50 and (seen["kept"] > 0) == (refine == "couple")


@pytest.mark.parametrize("name", ["vertical", "vertical-coupled"])
def test_as_many_passes_as_drafts_draw_the_drafts_one_by_one_and_few_stay_exact(name):
    layout = TokenLayout.plain(4, 4, 2)
    model = EnumerableTransformer(layout, ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(40) for text in model.prompts]

    def tokens(passes):
        spec = resolve(name, {"window": 6, "passes": passes})
        return [image.tokens.tolist() for image in decode(model, requests, spec, GUIDED, 0, render=False)]

    assert tokens(0) == tokens(5) != tokens(1)
    assert resolve(name).options.keys() & {"passes"} == set()  # ids of stored runs stay


def test_one_pass_keeps_the_joint_distribution():
    setting = AUDIT_SETTINGS[1]
    spec = in_window(resolve("vertical", {"passes": 1}), setting.window)
    assert p_value(observe(setting, spec, 20_000, seed=0)) > AUDIT_LEVEL
