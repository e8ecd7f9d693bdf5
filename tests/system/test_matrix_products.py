"""Products with few hidden states, eager and compiled, against float64."""

import pytest
import torch
from compilable import needs_compiler
from torch import nn

from specbench.system import matrix_products
from specbench.system.matrix_products import FEW_STATES, linear_output, product

VIEWS = {
    "whole": lambda made: made[:2, :1], "one row": lambda made: made[:1, -1:], "last rows": lambda made: made[1:, 3:4],
    "transposed": lambda made: made.transpose(0, 1).contiguous()[2:4, :1],
    "every second": lambda made: made.repeat(1, 1, 2)[:2, 1:2, ::2],
    "expanded": lambda made: made[:1, :1].expand(2, 1, 48),
    "heads": lambda made: (made @ torch.eye(48)).view(3, 5, 6, 8).transpose(2, 3).reshape(3, 5, 48)[1:, 4:],
}  # fmt: skip


def compiled_error(view, dtype=torch.float32):
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
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@torch.inference_mode()
def test_a_compiled_product_reads_the_states_of_any_view(view):
    assert compiled_error(view) < 1e-6


@pytest.mark.slow
@needs_compiler
@torch.inference_mode()
def test_a_compiled_product_in_bfloat16_is_as_exact_as_its_format():
    assert compiled_error(VIEWS["whole"], torch.bfloat16) < 2**-8


@torch.inference_mode()
def test_a_bias_is_added_and_another_layer_called(monkeypatch):
    layer, hidden = nn.Linear(48, 80), torch.randn(2, 1, 48)
    for large in (0, matrix_products.LARGE):
        monkeypatch.setattr(matrix_products, "LARGE", large)
        torch.testing.assert_close(linear_output(layer, hidden), layer(hidden))
    assert linear_output(nn.Identity(), hidden) is hidden
