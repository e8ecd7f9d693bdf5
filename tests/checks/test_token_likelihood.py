"""Log p from one sort of the logits is what `Target` and its filters give; kinds of log p are what they say."""

from itertools import product

import pytest
import torch
from planted_causes import as_rows, drawn
from tiny_llama import Tiny

from specbench.checks import token_likelihood
from specbench.checks.logp_kinds import kinds_of, log_p_of
from specbench.checks.token_likelihood import Alternative, Held, SlotLogits
from specbench.decoding.sampling import at, truncate
from specbench.models.catalog import find_model, load_model
from specbench.models.facts import ModelChoice
from specbench.specs.run_spec import FILTERS, SAMPLING, Sampling

WAYS = [Sampling(1.0, *rest) for rest in product((1.0, 0.7), (0, 1, 40), (1.0, 0.9))]


@pytest.mark.parametrize("few", [0, 60], ids=["all sorted", "candidates sorted"])
def test_p_masses_and_entropy_match_the_filters(few, monkeypatch):
    monkeypatch.setattr(token_likelihood, "_ALL", 0)
    monkeypatch.setattr("specbench.decoding.sampling.WIDE", 0)
    draws = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 9, 512, generator=draws)
    logits[0], logits[1, 0, 20:] = logits[0].round(), -torch.inf  # ties, and fewer than top-k
    chosen = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=draws).view(2, 9)
    filters = [Sampling(1.0, 1.2, **{name: SAMPLING[name].audited}) for name in FILTERS]
    for sampling in [*WAYS, Sampling(1.0, 0.8, 40, 0.9, min_p=0.05), *filters]:
        slots, way, p = SlotLogits(logits, chosen, few), Alternative(sampling), truncate(logits, sampling).softmax(-1)
        torch.testing.assert_close(slots.p(way, slots.every), at(p, chosen), atol=1e-5, rtol=1e-3)
        kept = at(p, chosen) > 0
        masses = (torch.where(p > at(p, chosen)[..., None], p, 0.0), torch.where(p >= at(p, chosen)[..., None], p, 0.0))
        for mass, whole in zip(slots.masses(way), masses, strict=True):
            torch.testing.assert_close(mass[kept], whole.sum(-1)[kept], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("few", [0, 120])
def test_penalties_and_late_temperature_are_those_that_an_engine_applies(few, monkeypatch):
    monkeypatch.setattr(token_likelihood, "_ALL", 0)
    monkeypatch.setattr("specbench.decoding.sampling.WIDE", 0)
    draws = torch.Generator().manual_seed(0)
    logits, tokens = 2 * torch.randn(2, 20, 512, generator=draws), torch.randint(30, (2, 20), generator=draws)
    positions, sampling = torch.arange(20).expand(2, -1), Sampling(1.0, 0.8, 40, 0.9)
    count = torch.nn.functional.one_hot(tokens, 512).cumsum(1).roll(1, 1)
    count[:, 0] = 0
    changed = torch.where(count > 0, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits) - 0.2 * count
    way = Alternative(sampling, repetition=1.3, frequency=0.2)
    found = SlotLogits(logits, tokens, few).penalised(way, Held(tokens, 512), positions)
    want = at(truncate(changed, sampling).softmax(-1), tokens)
    torch.testing.assert_close(found.p(way, found.every), want, atol=1e-5, rtol=1e-3)
    early = truncate(logits, Sampling(1.0, 1.0, 40, 0.9)) / 0.8
    slots = SlotLogits(logits, tokens, few)
    p = slots.p(Alternative(sampling, early=True), slots.every)
    torch.testing.assert_close(p, at(early.softmax(-1), tokens), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("way", "mass"), [("uniform", 1 / 512), ("greedy", None)])
def test_tokens_that_are_all_random_or_all_greedy_have_masses(way, mass):
    logits = torch.randn(1, 4, 512, generator=torch.Generator().manual_seed(0))
    slots = SlotLogits(logits, logits.argmax(-1), 0)
    before, through = slots.masses(Alternative(Sampling(1.0, 1.0, 0, 1.0), **{way: 1.0}))
    torch.testing.assert_close(before, torch.zeros(1, 4))
    torch.testing.assert_close(through, torch.full((1, 4), mass or 1.0))


class OfWords(Tiny):
    """A model whose image tokens are the last of its vocabulary's words."""

    def __init__(self):
        super().__init__()
        self.vocabulary = torch.cat([torch.randn(7, len(self.matrix)), self.matrix.T])

    def all_words(self, hidden):
        return hidden @ self.vocabulary.T


def test_each_kind_of_log_p_is_of_the_logits_that_it_names():
    model, sampling, texts = OfWords(), Sampling(2.0, 0.7, 2, 1.0), ["four", "five!"]
    tokens = drawn(model, texts, sampling)
    assert kinds_of(model, Sampling(1.0)) == ["sampled", "raw-words"]
    found = log_p_of(model, as_rows(model, texts, tokens), sampling, kinds_of(model, sampling))
    assert len(found) == 10
    stream = torch.from_numpy(tokens)
    with torch.inference_mode():
        for alone, scale in (("", 2.0), ("conditional-", 1.0)):
            session = model.begin(model.encode(texts), scale, tokens.shape[1])
            logits = session.forward(stream.roll(1, 1), torch.arange(tokens.shape[1]).expand(2, -1))
            words = model.guide(model.all_words(session.features), scale, None)
            free, token = stream < 5, stream.clamp(max=4)
            for kind, over, temperature in (("raw", logits, 1.0), ("tempered-words", words, 0.7)):
                want = at(logits, token) / temperature - (over / temperature).logsumexp(-1)
                torch.testing.assert_close(
                    torch.from_numpy(found[alone + kind])[free], want[free], atol=1e-5, rtol=1e-4
                )


@pytest.mark.parametrize("name", ["tar-1.5b", "emu3", "lumina", "lumina2", "anole"])
def test_families_whose_image_tokens_are_words_keep_the_other_words_for_log_p(name):
    model = load_model(find_model(name).configured(ModelChoice(random=True, tiny=True)), "cpu", "float32")
    image = model.vocabulary[model.table_ids(torch.arange(model.layout.v_image))]
    assert torch.equal(image, model.output_matrix()[0]) and len(model.vocabulary) > len(image)
