"""An image decoded in a refilled row equals the image decoded alone, for any batch, order and neighbours."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tiny
import torch
from grouped_key_llama import WIDTH, TinyModel

from specbench.checks.enumerable_model import EnumerableModel
from specbench.decoding import continuous_batching
from specbench.decoding.build import build
from specbench.decoding.loop import Decoding, decode
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix
from specbench.prompts import Request
from specbench.runs.runner import run
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling
from specbench.store.run_store import RunStore

SAMPLING = Sampling(guidance=2.0)
REQUESTS = [Request(text, text, sample) for text in ("a", "b", "c") for sample in range(5)]
MODEL = EnumerableModel(TokenLayout.with_row_ends(2, 3, 3), ("a", "b", "c"), seed=5)
WHOLE_BATCHES = {name for name in PRESETS if not continuous_batching.refills(build(resolve(name), MODEL))}


CASES = [
    *((name, {}) for name in PRESETS), ("zipar", {"rows-window": 1, "adaptive": True}),
    *(("sjd", {"init": init, "window": 6}) for init in ("above-sample", "left-repeat")),  # drafts from neighbours
]  # fmt: skip


def facts(image) -> list:
    counts = (image.committed_step, image.drafted, image.tested, image.accepted)
    arrays = (image.tokens, *counts, image.logp, image.entropy)
    return [*(np.asarray(array).tolist() for array in arrays), image.nfe, image.facts]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_decoder_in_any_order(name, options):
    decoder = resolve(name, options)
    expected = {request: decode(MODEL, [request], decoder, SAMPLING, 3, trace=True)[0] for request in REQUESTS}
    for rows in (2, 5):
        shuffled = random.Random(rows).sample(REQUESTS, len(REQUESTS))
        images = dict(continuous_batching.decode_each(MODEL, shuffled, rows, decoder, SAMPLING, 3, trace=True))
        assert set(images) == set(REQUESTS)
        for request, image in images.items():
            assert facts(image)[0] == facts(expected[request])[0], (name, rows, request)
            if name not in WHOLE_BATCHES:
                assert facts(image)[:-1] == facts(expected[request])[:-1]
                # The rounding of a head's products depends on the batch size.
                assert image.facts == pytest.approx(expected[request].facts, rel=1e-5, nan_ok=True)
                assert np.array_equal(image.image, expected[request].image)
                assert np.allclose(image.draft_tv, expected[request].draft_tv, atol=1e-5, equal_nan=True)
                for order, u in expected[request].uniforms.items():
                    assert np.array_equal(u, image.uniforms[order], equal_nan=True)


def test_which_decoders_refill():
    refilled = {resolve(name).drafter for name in PRESETS if name not in WHOLE_BATCHES}
    jacobi = {"jacobi", "jacobi-tree", "jacobi-lookup", "jacobi-kary"}
    assert refilled >= jacobi | {"none", "replace", "vertical", "vertical-coupled"}
    assert not refilled & {"eagle", "eagle3", "eagle-cascade", "zipar", "row-jacobi", "jacobi-paths"}


def test_a_free_row_does_not_wait_for_its_neighbours():
    """Rows start new images while others continue, which saves the time."""
    taken, at_work, refilled = iter(REQUESTS), set(), 0

    def requests():
        for request in taken:
            at_work.add(request)
            yield request

    for request, _ in continuous_batching.decode_each(MODEL, requests(), 3, resolve("sjd"), SAMPLING, 3):
        at_work.remove(request)
        refilled += bool(at_work)
    assert refilled > len(REQUESTS) // 2


def test_the_images_shares_add_up_to_the_time_spent():
    how = Decoding(MODEL, resolve("sjd"), SAMPLING, 3, trace=True)
    batch = continuous_batching.ContinuousBatch(how, iter(REQUESTS), 4)
    images = [image for _, image in batch.run()]
    assert all(image.batch == 4 and min(image.spans_ms.values()) >= 0 for image in images)
    spent = batch._spans.totals_ms()
    spent["verify"] -= spent.pop("trace")
    for name, ms in spent.items():
        assert sum(image.spans_ms[name] for image in images) / 4 == pytest.approx(ms)


class Prompted(TinyModel):
    """A network with a real cache whose prompts are as long as their texts."""

    def encode(self, prompts):
        drawn = [torch.Generator().manual_seed(len(text)) for text in (*prompts, *("?" * len(prompts)))]
        lengths = [*map(len, prompts), *[1] * len(prompts)]
        embeds = [torch.randn(length, WIDTH, generator=draw) for length, draw in zip(lengths, drawn, strict=True)]
        return Prefix(embeds, (torch.stack([row.mean(0) for row in embeds]),))

    def render(self, image_tokens, prompts=(), seeds=()):
        return torch.zeros(len(image_tokens), 3, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("name", ["ar", "scd-mc", "sjd-pac"])
def test_the_cache_holds_prompts_of_any_length(name, guidance):
    texts = ["a", "a much longer prompt than the first one", "two words"]
    requests = [Request(texts[number % 3], f"p{number}", number) for number in range(9)]
    network, decoder = Prompted(), resolve(name)
    expected = {r: decode(network, [r], decoder, Sampling(guidance), 1)[0] for r in requests}
    for request, image in continuous_batching.decode_each(network, requests, 2, decoder, Sampling(guidance), 1):
        assert image.tokens.tolist() == expected[request].tokens.tolist()
        assert np.allclose(image.logp, expected[request].logp, atol=1e-4)


def test_rows_are_durable_one_by_one_and_a_bad_image_leaves_its_neighbours(tmp_path, monkeypatch):
    healthy = EnumerableModel.encode

    def failing(self, prompts):
        if tiny.TEXTS[2] in prompts:
            raise RuntimeError("no luck")
        return healthy(self, prompts)

    monkeypatch.setattr(EnumerableModel, "encode", failing)

    def check(seen):
        assert len(RunStore(next(tmp_path.iterdir())).samples(["status"])) == seen

    summary = run(tiny.executor(), [tiny.spec("sjd", batch=3)], tiny.REQUESTS, tmp_path, tiny.OnRow(check))
    assert (summary.done, summary.failed) == (9, 3)


def test_an_error_of_the_model_is_the_image_s_row(tmp_path):
    broken = tiny.tiny_model()
    broken.conditional[broken.prompts.index("two | cats")] = float("nan")
    requests = [Request(text, text) for text in tiny.TEXTS]
    outcomes = continuous_batching.decode_each(broken, requests, 2, resolve("sjd"), tiny.SAMPLING, 0)
    assert [isinstance(outcome, SpecbenchError) for _, outcome in outcomes].count(True) == 1
