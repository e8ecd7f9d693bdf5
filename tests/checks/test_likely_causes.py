"""The usual faults, planted at three strengths: found, named, not mistaken for others; without a fault, no cause is
named. Log p from one sort of the logits is what `Target` and its filters give; kinds of log p are what they say."""

import re
from functools import cache, partial
from itertools import product

import numpy as np
import planted_causes as planted
import pytest
import tiny_llama
import torch
from checkpoints import random_tiny
from transformers import LlamaConfig, LlamaModel

from specbench.checks import token_likelihood
from specbench.checks.likely_causes import Cause, CauseKind, likely_causes, named
from specbench.checks.logp_kinds import kinds_of, log_p_of
from specbench.checks.token_likelihood import Alternative, Held, SlotLogits
from specbench.checks.token_orders import TOKEN_ORDERS
from specbench.decoding.sampling import at, truncate
from specbench.models.catalog import load_model
from specbench.models.interface import TokenLayout
from specbench.prompts import load_prompts
from specbench.specs.run_spec import FILTERS, SAMPLING, Sampling

CLAIMS = {"shapes": Sampling(3.0, 1.0, 100, 0.95), "wide": Sampling(3.0, 1.0, 1000, 1.0)}
SHARES = (0.25, 0.5, 1.0)
ORDERS = {
    "transposed": lambda grid: grid.T, "tokens are shifted": lambda grid: np.roll(grid.ravel(), -1).reshape(grid.shape),
    "row ends are shifted": lambda grid: np.stack([np.roll(row, -number) for number, row in enumerate(grid)]),
}  # fmt: skip


class Wide(tiny_llama.Tiny):
    """Rows of image tokens that are closed; prompt and tokens before matter."""

    name = "wide"

    def __init__(self, side: int = 16, codes: int = 4096):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=codes + 1, num_hidden_layers=1, pad_token_id=None, **tiny_llama.SIZES)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        self.backbone.embed_tokens.weight.mul_(40)
        self.layout = TokenLayout.with_row_ends(side, side, codes)
        self.codebook = None
        self.matrix = 1.5 * torch.randn(tiny_llama.WIDTH, codes)


@cache
def images(name):
    """A model, its prompts, and images that are what they claim."""
    shapes = [prompt.text for prompt in load_prompts("shapes").prompts[::19][:16]]
    texts = shapes if name == "shapes" else ["a", "a dog", "a cat on a mat", "two words"]
    model = load_model("shapes") if name == "shapes" else Wide()
    return model, texts, planted.drawn(model, texts, CLAIMS[name])


@cache
def in_format(name, dtype):
    if name == "shapes" and dtype != "int8wo":
        return load_model(name, "cpu", dtype)
    model = load_model(name) if name == "shapes" else Wide()
    planted.in_format(model.backbone, dtype)
    if name == "wide":
        model.matrix = model.matrix.to(model.backbone.dtype)
    return model


def cause(name, tokens, claimed="float32", **recorded):
    model, texts, _ = images(name)
    rows = planted.as_rows(model, texts, tokens).assign(**recorded)
    causes, seen = likely_causes(partial(in_format, name), rows, CLAIMS[name], claimed, True)
    return (named(causes, len(texts)) if causes else "none"), seen


def cause_of_format(name, true, claimed, recorded):
    """Return the causes named for images drawn in the format `true`, with or without their log p."""
    model, texts, _ = images(name)
    tokens = planted.drawn(in_format(name, true), texts, CLAIMS[name])
    rows = planted.as_rows(model, texts, tokens)
    columns = {"logp": planted.log_p(in_format(name, true), rows, CLAIMS[name])} if recorded else {}
    return cause(name, tokens, claimed, **columns)[0]


EACH = pytest.mark.parametrize("name", CLAIMS)


@EACH
@pytest.mark.slow
def test_samples_of_the_model_have_no_cause_and_intervals_that_hold_the_claim(name):
    text, seen = cause(name, images(name)[2])
    assert text == "none" and [text.partition(" ")[0] for text in seen] == ["temperature", "guidance"]


@EACH
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("share", SHARES)
def test_another_order_of_the_tokens_is_named(name, order, share):
    model, texts, tokens = images(name)
    some = round(share * len(texts))
    text, _ = cause(name, planted.reordered(model, tokens, ORDERS[order], some))
    assert order in text.partition(" or ")[0] and (f"in {some} of {len(texts)} images" in text) == (some < len(texts))


@EACH
@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_prompts_of_other_images_are_named(name, share):
    model, texts, tokens = images(name)
    some = round(share * len(texts))
    others = planted.drawn(model, [*texts[1:], texts[0]], CLAIMS[name])
    text, _ = cause(name, np.concatenate([others[:some], tokens[some:]]))
    assert "prompt" in text.partition(" or ")[0]


# In the random network of "wide" the prompt moves the first token alone, which shows no guidance.
GUIDED = ("guidance", "guidance had no effect")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "setting"),
    [
        (name, kind, setting)
        for name in CLAIMS
        for kind, settings in planted.SETTINGS.items()
        for setting in settings
        if name != "wide" or kind not in GUIDED
    ],
)
def test_another_sampling_is_named_with_its_value(name, kind, setting):
    model, texts, _ = images(name)
    text, _ = cause(name, planted.drawn(model, texts, planted.replace(CLAIMS[name], **setting)))
    assert kind in text


@EACH
@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("true", ["float16", "bfloat16", "int8wo"])
def test_another_number_format_is_named_if_it_is_seen(name, true, recorded):
    """float16 overflows on `shapes`. Tokens of `wide` alone are consistent with each format."""
    text = cause_of_format(name, true, "float32", recorded)
    assert text.startswith(f"another number format: {true}, not float32" if recorded or name == "shapes" else "none")


@pytest.mark.slow
@pytest.mark.parametrize(("true", "recorded", "expected"), [
    ("bfloat16", True, "none"), ("bfloat16", False, "none"),
    ("float32", True, "another number format: float32, not bfloat16"), ("float32", False, "none"),
    ("int8wo", False, "another number format: int8wo, not bfloat16"),
])  # fmt: skip
def test_rounding_of_a_claim_of_fewer_bits_is_no_cause(true, recorded, expected):
    """Tokens at the edge of top-p do not say that there is none, nor those likelier in float32 that it was that."""
    assert cause_of_format("shapes", true, "bfloat16", recorded).startswith(expected)


def named_for(model, texts, tokens, claim):
    """Return the causes named for images of a small model."""
    causes, _ = likely_causes(lambda dtype: model, planted.as_rows(model, texts, tokens), claim, "float32", True)
    return named(causes, len(texts))


def test_transposed_images_of_a_small_model_are_named():
    model, texts, claim = Wide(10, 64), ["a", "a dog"], Sampling(2.0)
    changed = planted.reordered(model, planted.drawn(model, texts, claim), ORDERS["transposed"], 2)
    assert "transposed" in named_for(model, texts, changed, claim).partition(" or ")[0]


def test_each_order_is_undone():
    grid = np.arange(24).reshape(4, 6)
    row_ends = {step: np.stack([np.roll(row, step * number) for number, row in enumerate(grid)]) for step in (-1, 1)}
    stored = (
        grid.T.reshape(4, 6), grid[:, ::-1], grid[::-1], np.roll(grid, -1), np.roll(grid, 1), row_ends[-1], row_ends[1],
    )  # fmt: skip
    whats = ("transposed", "mirrored", "reverse", "missing", "extra", "too short", "too long")
    for (what, undo), expected, order in zip(TOKEN_ORDERS, whats, stored, strict=True):
        assert expected in what and (undo(order) == grid).all(), what


def test_copies_are_named_and_the_other_images_alone_are_tested():
    model, texts, claim = Wide(7, 64), [f"{number} dogs" for number in range(7)], Sampling(2.0)
    tokens = planted.drawn(model, texts, claim)
    tokens[5:] = tokens[0]
    [copies, *_], _ = likely_causes(lambda dtype: model, planted.as_rows(model, texts, tokens), claim, "float32", True)
    assert copies.what.startswith("2 images of 7 are exact copies") and copies.explains


@pytest.mark.slow
def test_greedy_tokens_are_named_although_they_make_copies():
    model, texts, _ = images("shapes")
    texts, claim = [texts[1], *texts[1:]], CLAIMS["shapes"]
    rows = planted.as_rows(model, texts, planted.drawn(model, texts, planted.replace(claim, top_k=1)))
    causes, _ = likely_causes(partial(in_format, "shapes"), rows, claim, "float32", True)
    assert causes[0].explains and named(causes, len(texts)).startswith(("top-k 1,", "greedy in part: about 100 %"))
    assert any(cause.what == "1 image of 16 is an exact copy of another" for cause in causes)


def test_a_copy_does_not_hide_the_cause_of_the_other_images():
    model, texts = Wide(7, 64), [f"{number} dogs" for number in range(12)]
    tokens = planted.drawn(model, texts, Sampling(2.0, temperature=0.3))
    tokens[11] = tokens[0]
    text = named_for(model, texts, tokens, Sampling(2.0))
    assert re.fullmatch("temperature 0.*; besides, 1 image of 12 is an exact copy of another", text), text


@pytest.mark.parametrize("nats", [50.0, 5000.0])
def test_copies_are_named_once_beside_a_cause_and_never_as_its_alternative(nats):
    """Also if neither was tested, as with bfloat16, and whichever is likelier."""
    cause, copies = Cause(CauseKind.SETTING, "top-k 1", 300.0, 8), Cause(CauseKind.COPIES, "2 are copies", nats, 2)
    assert named([cause, copies], 16) == "top-k 1 (300 nats more likely than the claim); besides, 2 are copies"
    assert named([copies, cause], 16) == f"2 are copies ({nats:,.0f} nats more likely than the claim)"


@pytest.mark.parametrize(("claim", "true", "text"), [
    ({"temperature": 3.0, "top_k": 50}, {"top_k": 6}, "top-k 6, not 50 ("),
    ({"top_p": 0.9}, {"temperature": 1.15}, "temperature 1.05, not 1; or top-p 0.92, not 0.9 ("),
], ids=["a top-k that is not usual", "an interval that holds the claimed value"])  # fmt: skip
def test_a_setting_is_named_without_contradiction(claim, true, text):
    model, texts, claimed = Wide(9, 64), ["a", "a dog"], Sampling(1.0, **claim)
    tokens = planted.drawn(model, texts, planted.replace(claimed, **true))
    assert named_for(model, texts, tokens, claimed).startswith(text)


def replaced(tokens, every, codes):
    slots = slice(None, None, every)
    tokens[:, slots] = np.random.default_rng(0).integers(codes, size=tokens[:, slots].shape)
    return tokens


def test_random_tokens_are_named_and_not_the_filter_that_they_are_beyond():
    """The tokens after them were drawn of others before, so that more than a twentieth look random."""
    model, texts, claim = Wide(9, 64), ["a", "a dog", "a cat", "two words"], Sampling(2.0, top_p=0.8)
    tokens = replaced(planted.drawn(model, texts, claim), 20, 64)  # never the end of a row
    assert named_for(model, texts, tokens, claim).startswith("about 10 % of the tokens are random: replaced, or after")


@pytest.mark.slow
def test_one_random_token_in_a_hundred_is_named():
    """And those after it, which were drawn with another before them."""
    text, _ = cause("shapes", replaced(images("shapes")[2].copy(), 100, 512))
    assert text.startswith("about 5 % of the tokens are random: replaced, or after a replaced token (")


@pytest.mark.slow
def test_copies_are_named_before_the_prompts_that_they_look_exchanged_for():
    tokens = images("shapes")[2].copy()
    tokens[8:] = tokens[:8]
    assert cause("shapes", tokens)[0].startswith("8 images of 16 are exact copies of others")


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "what"), [((0, 1), "read one slot too short"), ((0, 0, 1), "written one slot")])
def test_a_cache_off_by_one_is_named(shift, what):
    model, texts, _ = images("shapes")
    tokens = planted.drawn_by(model, texts, planted.Alternative(CLAIMS["shapes"]), 5, shift)
    assert what in cause("shapes", tokens)[0]


@pytest.mark.slow
def test_weights_of_four_bits_are_explained_by_no_cause():
    model, texts, _ = images("shapes")
    rounded = load_model("shapes")
    planted.rounded(rounded.backbone, 7)
    rows = planted.as_rows(model, texts, planted.drawn(rounded, texts, CLAIMS["shapes"]))
    causes, _ = likely_causes(partial(in_format, "shapes"), rows, CLAIMS["shapes"], "float32", True)
    assert causes[0].explains is False


WAYS = [Sampling(1.0, *rest) for rest in product((1.0, 0.7), (0, 1, 40), (1.0, 0.9))]


@pytest.fixture
def as_if_wide(monkeypatch):
    monkeypatch.setattr(token_likelihood, "_ALL", 0)
    monkeypatch.setattr("specbench.decoding.sampling.WIDE", 0)


@pytest.mark.parametrize("few", [0, 60], ids=["all sorted", "candidates sorted"])
def test_p_masses_and_entropy_match_the_filters(few, as_if_wide):
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
def test_penalties_and_late_temperature_are_those_that_an_engine_applies(few, as_if_wide):
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


class OfWords(tiny_llama.Tiny):
    """A model whose image tokens are the last of its vocabulary's words."""

    def __init__(self):
        super().__init__()
        self.vocabulary = torch.cat([torch.randn(7, len(self.matrix)), self.matrix.T])

    def all_words(self, hidden):
        return hidden @ self.vocabulary.T


def test_each_kind_of_log_p_is_of_the_logits_that_it_names():
    model, sampling, texts = OfWords(), Sampling(2.0, 0.7, 2, 1.0), ["four", "five!"]
    tokens = planted.drawn(model, texts, sampling)
    assert kinds_of(model, Sampling(1.0)) == ["sampled", "raw-words"]
    found = log_p_of(model, planted.as_rows(model, texts, tokens), sampling, kinds_of(model, sampling))
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
    model = random_tiny(name)
    image = model.vocabulary[model.table_ids(torch.arange(model.layout.v_image))]
    assert torch.equal(image, model.output_matrix()[0]) and len(model.vocabulary) > len(image)
