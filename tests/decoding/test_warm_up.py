"""Warm-up: a few steps cover every input shape of an image's steps, so that nothing compiles while an image is timed;
it reports its progress. It concerns several modules: loop, row_loop, and the compiled steps of a model."""

import itertools
from dataclasses import replace

import pytest
import tiny
import tiny_llama
import torch
from compilable import needs_compiler
from one_of_each import presets
from torch.utils._pytree import tree_leaves

from specbench.decoding.loop import WARM_UP_STEPS, Decoding, decode, warm_up_steps
from specbench.models.interface import TokenLayout
from specbench.models.transformer.compiled_forward import CompiledStep
from specbench.models.transformer.kv_cache import whole_parts
from specbench.models.transformer.model import TransformerSession
from specbench.prompts import Request
from specbench.runs.executors.local import warm_up
from specbench.specs.components import DRAFTERS
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

SAMPLING = Sampling(guidance=2.0, temperature=0.9, top_k=4, top_p=0.95)
PROMPTS = ("a fox", "two hens", "a much longer prompt than those before")


class Tall(tiny_llama.Tiny):
    """Images of 156 slots, many times the steps of a warm-up."""

    def __init__(self):
        super().__init__()
        self.layout = TokenLayout.with_row_ends(12, 12, tiny_llama.VOCAB)


@pytest.fixture
def shapes(monkeypatch) -> set:
    """The shapes that functions to be compiled are called with; a session reads and pads as on a GPU."""
    seen: set = set()

    def compile_nothing(function, **_):
        def call(*args):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if function.__name__ == "prefill":  # one form serves every length
                tensors = []
            # A single form serves every length of an index of slots, except slots that the target reads.
            read = args[1].index.shape if function.__name__ == "step" else None
            seen.add((function.__name__, read, *(x.shape if x.ndim > 1 else x.ndim for x in tensors)))
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(TransformerSession, "_room", lambda session, slots: -(-slots // 32) * 32)
    monkeypatch.setattr(TransformerSession, "_readable", lambda session, end: whole_parts(end, len(session._index)))
    return seen


@pytest.mark.parametrize("name", presets("drafter"))
def test_no_image_has_a_step_of_a_shape_that_the_warm_up_has_not_met(shapes, name):
    model, decoder = Tall(), resolve(name)
    model.compile()
    for each in (model, model.tapped((0,))):  # the second for eagle3
        each._compiled_steps = {SAMPLING.guidance: CompiledStep(each, SAMPLING.guidance, {})}
    for text in (PROMPTS[-1], PROMPTS[0]):
        steps = list(warm_up_steps(Decoding(model, decoder, SAMPLING, 0), [Request(text, "warm-up")]))
        assert len(steps) <= WARM_UP_STEPS < model.layout.length and steps == list(range(1, len(steps) + 1))
    met = set(shapes)
    assert ("prefill", None) in met
    assert {shape[1] for shape in met} > {None} or "image_rows" in DRAFTERS[decoder.drafter].memory
    for text in PROMPTS[1:]:
        decode(model, [Request(text, text)], decoder, SAMPLING, 0)
    assert shapes == met


@needs_compiler
@pytest.mark.slow
def test_no_image_compiles_anything_after_the_warm_up():
    model = Tall()
    model.compile()
    decoders = resolve("eagle", {"tree": "0 1 00 01"}), resolve("vertical", {"window": 4, "siblings": 1})
    specs = [replace(tiny.spec("ar"), decoder=decoder) for decoder in decoders]
    calls = []
    facts = warm_up(model, specs, PROMPTS[2:] + PROMPTS[:1], lambda *progress: calls.append(progress) or True)
    assert facts["compiled_forms"] == sum(part.forms for part in model.compiled) > 4 and facts["compile_s"] > 0
    assert facts["compile_options"]["forward"] == {"aot_inductor": True} and "sampling" in facts["compile_options"]
    assert calls[0][:2] == ("forms compiled (the first takes longest)", 0) and calls[-1][0] == "forms compiled"
    assert all(done < most for _, done, most in calls)
    for spec, text in itertools.product(specs, PROMPTS):
        decode(model, [Request(text, text)], spec.decoder, spec.sampling, 0)
    assert facts["compiled_forms"] == sum(part.forms for part in model.compiled)
