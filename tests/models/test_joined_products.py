"""Joined products: the same tokens with half of the matrix products, in every family. Products with few hidden states,
eager and compiled, against float64. It concerns several modules: `system.matrix_products`, and every family."""

import pytest
import torch
from checkpoints import INFO, random_tiny
from compilable import needs_compiler
from torch import nn

from specbench.decoding.loop import decode
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.system import matrix_products
from specbench.system.matrix_products import FEW_STATES, join_products, linear_output, product

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
    first, *_ = (part for name, part in model.backbone.named_modules() if name.endswith(".q_proj"))
    assert type(first) is not nn.Linear and layers > 0
    for path, part in model.backbone.named_modules():
        if path.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            assert torch.equal(part.weight, weights[f"{path}.weight"])
    assert tokens(model, sampling) == before
    assert first.joined.latest.hidden is None  # nothing keeps the states


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


VIEWS = {
    "whole": lambda made: made[:2, :1], "one row": lambda made: made[:1, -1:], "last rows": lambda made: made[1:, 3:4],
    "transposed": lambda made: made.transpose(0, 1).contiguous()[2:4, :1],
    "every second": lambda made: made.repeat(1, 1, 2)[:2, 1:2, ::2],
    "expanded": lambda made: made[:1, :1].expand(2, 1, 48),
    "heads": lambda made: (made @ torch.eye(48)).view(3, 5, 6, 8).transpose(2, 3).reshape(3, 5, 48)[1:, 4:],
}  # fmt: skip


def compiled_error(view, dtype):
    """Largest relative error of a compiled product of a view of states that the compiled code makes itself, with the
    inner columns of a wider matrix, and a bias."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, wide, bias = (torch.randn(*size, dtype=dtype) for size in ((3, 5, 48), (80, 96), (80,)))

    def multiplied(hidden, wide, bias):
        return product(view(hidden * 2), wide[:, 24:72], bias)

    computed = torch.compile(multiplied, fullgraph=True, options={"cpp_wrapper": True})(made, wide, bias).double()
    exact = view(made * 2).double() @ wide[:, 24:72].double().T + bias.double()
    return ((computed - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("large", [0, matrix_products.LARGE])
@pytest.mark.parametrize("rows", range(1, 7))
@pytest.mark.parametrize("columns", [1, 2, 3])
@torch.inference_mode()
def test_every_number_of_rows_gives_the_product(rows, columns, large, monkeypatch):
    monkeypatch.setattr(matrix_products, "LARGE", large)
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, columns, 48), torch.randn(80, 48)
    computed, exact = product(hidden, weight), hidden.double() @ weight.double().T
    assert computed.shape == (rows, columns, 80) and computed.is_contiguous()
    torch.testing.assert_close(computed.double(), exact, rtol=1e-5, atol=1e-5)
    if large or not 1 < rows * columns <= FEW_STATES:
        assert torch.equal(computed, nn.functional.linear(hidden, weight))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("view", "dtype", "error"), [
    *((view, torch.float32, 1e-6) for view in VIEWS), ("whole", torch.bfloat16, 2**-8),
])  # fmt: skip
@torch.inference_mode()
def test_a_compiled_product_reads_the_states_of_any_view_and_is_as_exact_as_its_format(view, dtype, error):
    assert compiled_error(VIEWS[view], dtype) < error


@torch.inference_mode()
def test_a_bias_is_added_and_another_layer_called(monkeypatch):
    layer, hidden = nn.Linear(48, 80), torch.randn(2, 1, 48)
    for large in (0, matrix_products.LARGE):
        monkeypatch.setattr(matrix_products, "LARGE", large)
        torch.testing.assert_close(linear_output(layer, hidden), layer(hidden))
    assert linear_output(nn.Identity(), hidden) is hidden
