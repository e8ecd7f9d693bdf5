"""ZipAR: number of forwards, slots that each column sees, and equality with AR for wide windows."""

import numpy as np
import pytest
import torch
from grouped_key_llama import TinyModel

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel
from specbench.checks.losslessness import observe
from specbench.decoding.loop import decode
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

LAYOUTS = [
    TokenLayout.plain(3, 2, 3),
    TokenLayout.plain(2, 3, 3),
    TokenLayout.with_row_ends(2, 2, 4),
    TokenLayout.with_row_ends(1, 4, 3),
]


def rows_of(layout, name, **options):
    model = EnumerableModel(layout)
    requests = [Request("", "prompt", sample) for sample in range(200)]
    return decode(model, requests, resolve(name, options), Sampling(2.0), 3, render=False)


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


def test_an_image_does_not_depend_on_its_batch():
    model = EnumerableModel(TokenLayout.plain(3, 2, 3))
    requests = [Request("", "prompt", sample) for sample in range(24)]
    spec = resolve("zipar", {"rows-window": 1, "adaptive": True})

    def decoded(size):
        parts = [requests[start : start + size] for start in range(0, 24, size)]
        return tokens([row for part in parts for row in decode(model, part, spec, Sampling(1.0), 3, render=False)])

    assert np.array_equal(decoded(24), decoded(1))


def test_a_grammar_it_cannot_read_is_refused():
    layout = TokenLayout(2, 2, 3, (-1, -1, 3, 3, -1, -1))
    with pytest.raises(SpecbenchError, match="grammar"):
        decode(EnumerableModel(layout), [Request("", "p")], resolve("zipar"), Sampling(1.0), 0)


@torch.inference_mode()
@pytest.mark.parametrize("kept", [False, True])
def test_released_stand_ins_stay_in_the_cache_until_the_true_token_comes(monkeypatch, kept):
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
    forwards = [([0, 1], []), ([2, 8], [8]), ([5, 3, 9], [5]), ([4, 10], [])]  # positions, and those of substitutes
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
