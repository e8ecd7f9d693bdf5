"""Joined products: the same tokens with half of the matrix products, in every family. It concerns several modules:
`system.matrix_products`, and the modules of the families."""

import pytest
import torch
from checkpoints import INFO, random_tiny
from compilable import needs_compiler
from torch import nn

from specbench.decoding.loop import decode
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.system.matrix_products import join_products

FAMILIES = {model.target: name for name, model in INFO.items()}
REQUESTS = [Request("7", "a"), Request("12", "b")]  # captions, or classes if a model takes classes


def tokens(model, sampling, decoder="sjd"):
    return [image.tokens.tolist() for image in decode(model, REQUESTS, resolve(decoder), sampling, 0, render=False)]


@pytest.mark.parametrize("name", FAMILIES.values())
def test_joined_products_give_the_same_tokens(name):
    model, sampling = random_tiny(name), INFO[name].sampling()
    before, layers = tokens(model, sampling), sum(hasattr(part, "q_proj") for part in model.backbone.modules())
    weights = {name: value.clone() for name, value in model.backbone.named_parameters()}
    join_products(model.backbone)
    [(_, product), *_] = [(name, part) for name, part in model.backbone.named_modules() if name.endswith(".q_proj")]
    assert type(product) is not nn.Linear and layers > 0
    for path, part in model.backbone.named_modules():
        if path.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            assert torch.equal(part.weight, weights[f"{path}.weight"])
    assert tokens(model, sampling) == before
    assert product.joined.latest.hidden is None  # nothing keeps the states


def test_one_product_replaces_three_and_another_replaces_two(monkeypatch):
    model, made = random_tiny("lumina"), []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *arguments: made.append(1) or linear(*arguments))
    counts = []
    for _ in range(2):
        made.clear()
        tokens(model, INFO["lumina"].sampling(), "ar")
        counts.append(len(made))
        join_products(model.backbone)
    forwards = model.layout.length + 1  # with the prefill
    assert counts[0] - counts[1] == 3 * len(model.backbone.layers) * forwards


@needs_compiler
@pytest.mark.slow
def test_compiled_steps_of_joined_products_draw_the_same_tokens():
    model, sampling = random_tiny("lumina"), INFO["lumina"].sampling()
    before = tokens(model, sampling)
    join_products(model.backbone)
    model.compile()
    assert tokens(model, sampling) == before


def test_traced_code_has_one_product_and_leaves_nothing_behind():
    network, graphs = nn.Module(), []
    for name in ("q_proj", "k_proj", "v_proj"):
        network.add_module(name, nn.Linear(4, 4))
    join_products(network)

    def traced(graph, inputs):
        graphs.append([node for node in graph.graph.nodes if node.target is nn.functional.linear])
        return graph.forward

    call = torch.compile(lambda x: network.q_proj(x) + network.k_proj(x) + network.v_proj(x), backend=traced)
    hidden = torch.randn(1, 2, 4)
    expected = network.q_proj(hidden) + network.k_proj(hidden) + network.v_proj(hidden)
    assert torch.equal(call(hidden), expected) and [len(products) for products in graphs] == [1]
    assert network.q_proj.joined.latest.hidden is None
