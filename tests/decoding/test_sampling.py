"""On a CPU a step passes only over the tokens of a wide vocabulary that p keeps; the tokens it makes are the same."""

from itertools import product

import numpy as np
import pytest
import torch
from tiny_llama import Tiny

from specbench.decoding import sampling
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import kept, kth_largest, ranked_around, run_race, without
from specbench.errors import SpecbenchError
from specbench.models.transformer.forward import guide
from specbench.prompts import Request
from specbench.runs.settings import run_settings
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

REQUESTS = [Request("four", "p"), Request("five!", "q", 1)]


def images(name: str, wide: int, monkeypatch) -> list:
    monkeypatch.setattr(sampling, "WIDE", wide)
    return decode(Tiny(), REQUESTS, resolve(name), Sampling(guidance=2.0, top_k=3), 5, render=False)


@pytest.mark.parametrize("name", ["ar", "sjd", "gsd", "scd-mc", "scd-gs", "sjd-pac", "predictive", "zipar"])
def test_every_decoder_makes_the_same_image_either_way(name, monkeypatch):
    for narrow, wide in zip(images(name, 99, monkeypatch), images(name, 0, monkeypatch), strict=True):
        assert np.array_equal(narrow.tokens, wide.tokens) and narrow.nfe == wide.nfe
        assert np.allclose(narrow.entropy, wide.entropy, atol=1e-6) and np.array_equal(narrow.top1, wide.top1)


def test_only_tokens_of_positive_weight_run_the_race():
    draws = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 8, 5000, generator=draws) * (torch.rand(2, 8, 5000, generator=draws) < 0.02)
    weights[0, 0] = 0
    weights[0, 0, 4321] = 0.5
    noise, positions = Noise([1, -2], 5000), torch.arange(8).repeat(2, 1)
    sparse = kept(weights)
    assert sparse.ids.shape[-1] == (weights > 0).sum(-1).max() < 200
    assert torch.equal(torch.zeros_like(weights).scatter_add_(-1, sparse.ids, sparse.mass), weights)
    everyone = run_race(weights, noise.race(positions, Stream.TOKEN))
    assert torch.equal(noise.run_race(weights, positions, Stream.TOKEN), everyone)


def test_a_draw_reaches_any_of_many_tokens():
    # 16-bit numbers would miss most of them, which tests of uniformity do not show.
    tokens = torch.arange(0, 8192, 15)
    weights = torch.full((1, 8192), 2.0**-13).expand(len(tokens), -1)
    assert torch.equal(sampling.draw(weights, (tokens.double() + 0.5) / 8192), tokens)


def test_the_kth_largest_of_many_matches_a_sort():
    values = torch.randn(2, 5, 8192, generator=torch.Generator().manual_seed(0))
    values[0, 0] = 1.5
    values[0, 1, ::8] = values[0, 1, ::8] + 9  # a sample of every eighth value overestimates the number of large values
    values[0, 2, 100:] = -torch.inf
    values[0, 3] = values[0, 3].round()
    values[0, 4] = torch.arange(8192)
    for rows in (values, values[1:], values[:1, :1], values[:1, 2:3]):
        for k in (1, 7, 1000, 2048, 5000, 8191):
            assert torch.equal(kth_largest(rows, k), rows.sort(-1).values[..., -k, None])


@pytest.mark.parametrize("settings", [*product((1.0, 0.7), (0, 1, 25, 60), (1.0, 0.95, 0.5), (0.0, 0.2))])
def test_p_of_a_wide_vocabulary_equals_every_filter_in_turn_to_the_bit(settings, monkeypatch):
    temperature, top_k, top_p, min_p = settings
    filters = Sampling(1.0, temperature, top_k, top_p, min_p=min_p)
    logits = 3 * torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(0))
    logits[0, 0] = logits[0, 0].round()
    logits[0, 1, 20:], logits[0, 2, ::8] = -torch.inf, 9.0  # fewer than k, and ties beyond k
    logits[0, 3], logits[1, 1, 3], logits[1, 2, :255] = logits[0, 3] * 40, torch.nan, -torch.inf
    p = []
    for wide in (999, 0):
        monkeypatch.setattr(sampling, "WIDE", wide)
        p.append(sampling.truncate(logits, filters).softmax(-1))
    assert np.array_equal(*p, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("wide", [99, 0])
def test_the_tokens_around_a_token_match_the_whole_ranking(wide, descending, monkeypatch):
    monkeypatch.setattr(sampling, "WIDE", wide)
    draws = torch.Generator().manual_seed(0)
    # Few different values, so that most are tied; many are 0; some rows keep all tokens, others a single token.
    p = torch.randint(1, 4, (60, 12), generator=draws) / 4
    p *= torch.rand(60, 12, generator=draws) < torch.linspace(0, 1, 60)[:, None]
    x = torch.randint(12, (60, 1), generator=draws)
    p.scatter_(1, x, 0.5)
    for before, after in ((3, 2), (0, 0), (1, 20)):
        ids, exists, p_of_x = ranked_around(p, x, before, after, descending)
        assert torch.equal(p_of_x, p.gather(1, x))
        for row, token, tokens, there in zip(p.tolist(), x[:, 0].tolist(), ids.tolist(), exists.tolist(), strict=True):
            order = sorted(range(12), key=lambda v, row=row: (-row[v] if descending else row[v], v))
            place = order.index(token)
            around = order[max(place - before, 0) : place + after + 1]
            assert [v for v, is_there in zip(tokens, there, strict=True) if is_there] == around
            assert all(v == token for v, is_there in zip(tokens, there, strict=True) if not is_there)


def test_a_nan_distribution_still_fails_its_image(monkeypatch):
    class Broken(Tiny):
        def head(self, hidden):
            return super().head(hidden) * torch.nan

    monkeypatch.setattr(sampling, "WIDE", 0)
    made = decode(Broken(), REQUESTS[:1], resolve("scd-gs"), Sampling(top_k=3), 0, render=False)
    assert isinstance(made[0], SpecbenchError) and "NaN" in made[0].what


def test_what_remains_of_a_sharp_distribution_is_normalised_however_small():
    q = torch.tensor([[1.0, 3e-42, 1e-42], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    rest = without(q, torch.tensor([0, 0, 0]))
    torch.testing.assert_close(rest.sum(-1), torch.tensor([1.0, 1.0, 0.0]))
    assert rest[0, 1] == pytest.approx(0.75, rel=0.01)


def test_no_settings_that_are_accepted_overflow():
    """Guidance, temperature and every filter at their bounds, on the largest logits of float16."""
    logits = torch.stack([scale * torch.randn(256, generator=torch.Generator().manual_seed(1)) for scale in (0, 1, 30)])
    logits = torch.cat([logits, torch.full((1, 256), 65504.0)])
    logits[1, :3], logits[2, 0] = torch.tensor([65504.0, -65504, 65504]), 65504
    bounds = {setting.name: (setting.minimum, setting.maximum) for setting in run_settings()}
    for cfg, temperature in product(bounds["cfg"], bounds["temperature"]):
        guided = guide(torch.cat([logits, -logits.roll(1)]), cfg)
        for top_k, top_p, scale, sigma in product((0, 1, 50), (5e-324, 1.0), (None, 5e-324, 1e4), (None, 5e-324, 1e4)):
            for min_p in (None, 5e-324, 1.0):
                filters = Sampling(cfg, temperature, top_k, top_p, scale, min_p, sigma)
                assert sampling.truncate(guided, filters).softmax(-1).isfinite().all(), filters
