"""The u_i recorded while decoding: right, uniform for lossless decoders, not uniform with a planted bug."""

import numpy as np
import pytest
import torch
from planted_bugs import plant

from specbench.checks.enumerable_model import EnumerableModel, processed
from specbench.decoding import loop, recorder, uniforms
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, Stream, row_key
from specbench.decoding.sampling import draw, kept
from specbench.decoding.verification.ratio_tests import standard
from specbench.decoding.verification.refinement import Couple
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import Tokens, audit_tokens

LAYOUT = TokenLayout.with_row_ends(2, 4, 3)
SAMPLING = Sampling(guidance=2.0, temperature=0.9)
FREE = np.array(LAYOUT.forced) < 0
MODEL = EnumerableModel(LAYOUT, sharpness=1.0)


def images(name, count=6000, model=MODEL, **options):
    spec = resolve(name, options)
    return decode(model, [Request("", "prompt", n) for n in range(count)], spec, SAMPLING, 0, render=False)


def audited(decoded, level=0.001):
    orders = [name for name in uniforms.ORDERS if all(name in image.uniforms for image in decoded)]
    u = {name: np.stack([image.uniforms[name][FREE] for image in decoded]).astype(float) for name in orders}
    steps = np.stack([image.committed_step for image in decoded])
    first = np.stack([np.searchsorted(row, row) for row in steps])
    place = (np.arange(steps.shape[1]) - first)[:, FREE]
    return audit_tokens(Tokens(u, place, np.stack([image.entropy[FREE] for image in decoded])), level)


def windowed(name, window):
    return {"window": window} if "window" in resolve(name).options else {}


def test_values_are_those_of_the_model_given_the_true_prefix():
    decoded = images("sjd", 20, window=3)
    for sample, image in enumerate(decoded):
        v = Noise([row_key(0, "prompt", sample)], LAYOUT.vocab).tie_break(torch.arange(LAYOUT.length)[None])[0].numpy()
        code = 0
        for slot, token in enumerate(image.tokens.tolist()):
            if FREE[slot]:
                row = MODEL.offsets[slot] + code
                tables = (table[0, row].numpy().astype(float) for table in (MODEL.conditional, MODEL.unconditional))
                conditional, unconditional = tables
                p = processed(unconditional + 2.0 * (conditional - unconditional), SAMPLING)
                by_id = p[:token].sum() + v[slot] * p[token]
                by_p = p[p > p[token]].sum() + v[slot] * p[token]
                assert image.uniforms["u_id"][slot] == pytest.approx(by_id, abs=1e-5)
                assert image.uniforms["u_p"][slot] == pytest.approx(by_p, abs=1e-5)
            code += token * LAYOUT.vocab**slot


def test_tokens_of_equal_rank_are_one_block():
    p = torch.tensor([0.1, 0.3, 0.3, 0.3])
    before, through = uniforms.mass_before(p, p, torch.tensor(2))
    assert (before.item(), through.item()) == pytest.approx((0.0, 0.9))
    u = uniforms.uniforms(before.numpy(), through.numpy(), np.float64(0.5))
    assert u == pytest.approx(0.45)


def test_a_token_outside_the_support_of_p_ranks_behind_all_others():
    p, q = torch.tensor([0.0, 0.4, 0.6]), torch.tensor([0.5, 0.5, 0.0])
    for score in (p, uniforms.ratio_score(p, q)):
        before, through = uniforms.mass_before(score, p, torch.tensor(0))
        assert (before.item(), through.item()) == pytest.approx((1.0, 1.0))


def test_slots_without_a_tested_draft_have_no_value_in_the_orders_of_drafts():
    assert set(images("ar", 3)[0].uniforms) == {"u_id", "u_p"}
    image = images("sjd", 3, window=3)[0]
    first = image.committed_step == 1
    assert np.isnan(image.uniforms["u_qq"][first]).all()  # every draft is new in the first step
    assert not np.isnan(image.uniforms["u_pq"][0])
    for u in image.uniforms.values():
        values = u[~np.isnan(u)]
        assert ((values >= 0) & (values <= 1)).all()


def test_values_do_not_depend_on_the_batch_or_on_refilled_rows():
    requests = [Request("", "prompt", n) for n in range(9)]
    for name in ("sjd", "scd-mc", "sjd-pac"):
        spec = resolve(name, {"window": 4})
        alone = [decode(MODEL, [request], spec, SAMPLING, 0, render=False)[0] for request in requests]
        refilled = {request.sample: image for request, image in decode_each(MODEL, requests, 3, spec, SAMPLING, 0)}
        for number, image in enumerate(alone):
            assert image.uniforms.keys() <= refilled[number].uniforms.keys()
            for order, u in image.uniforms.items():
                np.testing.assert_array_equal(u, refilled[number].uniforms[order])


@pytest.mark.parametrize(("name", "orders"), [("ar", 2), ("sjd", 4), ("sjd-norefine", 3), ("sjd-pac", 4), ("eagle", 3)])
def test_steps_computed_together_have_the_values_of_single_ones(monkeypatch, name, orders):
    options = windowed(name, 4)
    together = images(name, 5, **options)
    monkeypatch.setattr(recorder, "WAITING", 0)
    for image, single in zip(together, images(name, 5, **options), strict=True):
        assert len(image.uniforms) == orders
        for order, u in single.uniforms.items():
            np.testing.assert_array_equal(image.uniforms[order], u)


def test_the_noise_that_breaks_ties_is_used_for_nothing_else():
    noise, slots = Noise([5], 4), torch.arange(50)[None]
    tie_break = noise.tie_break(slots)
    for stream in Stream:
        for number in range(40):
            assert not (noise.uniform(slots, stream, number) == tie_break).any()


LOSSLESS = [name for name in PRESETS if resolve(name).lossless]


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_decoders_give_independent_uniform_values(name):
    result = audited(images(name, 2500, **windowed(name, 3 + LOSSLESS.index(name) % 2)))
    assert not result.deviates, result.tests[0]


@pytest.mark.parametrize("change", [{"fresh-q": "onehot"}, {"init": "left-sample"}, {"init": "above-repeat"}])
def test_initialisations_with_their_own_q_give_uniform_values(change):
    for name in ("sjd", "scd-mc", "scd-gs"):
        result = audited(images(name, 4000, window=4, **change))
        assert not result.deviates, (name, result.tests[0])


@pytest.mark.parametrize(
    ("name", "count", "options"),
    [
        ("amplify", 3000, {"window": 4, "k": 1.5}),
        ("gsd", 8000, {"window": 4, "G": 2, "delta": 0.5}),
        pytest.param("sjd++", 8000, {"window": 4, "tau": 0.1}, marks=pytest.mark.slow),
        ("cool-sd", 2000, {}),
        pytest.param("lantern", 8000, {}, marks=pytest.mark.slow),
    ],
)
def test_lossy_decoders_are_flagged(name, count, options):
    result = audited(images(name, count, **options))
    assert result.deviates
    assert result.deviation.low > 0


def test_sampling_from_a_sharpened_p_is_flagged(monkeypatch):
    plain = Noise.run_race
    monkeypatch.setattr(Noise, "run_race", lambda self, weights, *where: plain(self, weights**1.15, *where))
    result = audited(images("ar"))
    assert result.deviates
    assert result.tests[0].order == "u_p"


def test_a_coupled_slot_drawn_from_the_residual_of_a_stale_q_is_flagged(monkeypatch):
    def refine(self, p, tests, noise, positions, step):
        last = tests.draft.shape[1] - 1
        keep = tests.coin < tests.ratio
        stale = torch.cat([tests.q, tests.q[:, last:]], dim=1)  # a slot without a draft has the q of the previous slot
        sparse = kept(p)
        weights = standard(sparse.mass, sparse.weights(stale))
        other = sparse.token(draw(weights, noise.uniform(positions, Stream.REDRAW, step)))
        kept_drafts = torch.where(keep & tests.drafted, tests.draft, other[:, : last + 1])
        return torch.cat([kept_drafts, other[:, last + 1 :]], dim=1)

    monkeypatch.setattr(Couple, "refine", refine)
    assert audited(images("scd-mc", window=2)).deviates


def test_a_q_of_the_next_column_is_flagged(monkeypatch):
    def propose(plain, *arguments):
        proposal = plain(*arguments)
        return proposal._replace(q=proposal.q.roll(1, dims=1))

    plant(monkeypatch, Jacobi.propose, propose)
    assert audited(images("sjd", window=4)).deviates


def test_recording_in_an_order_that_knows_the_outcome_is_flagged(monkeypatch):
    """Ranks by p over the empirical distribution of the draft itself: such an order is not a function of the past."""
    plain = uniforms.UniformsRecorder.note

    def note(self, seen):
        point_mass = torch.nn.functional.one_hot(seen.tokens, seen.p.shape[-1]).float()
        plain(self, seen._replace(q=point_mass))

    monkeypatch.setattr(uniforms.UniformsRecorder, "note", note)
    assert audited(images("sjd", 2000, window=4)).deviates


def test_reused_noise_between_images_is_flagged(monkeypatch):
    monkeypatch.setattr(loop, "row_key", lambda seed, prompt_id, sample: row_key(seed, prompt_id, sample // 2))
    result = audited(images("sjd", 2000, window=4))
    assert result.deviates
    assert result.tests[0].kind == "images"
