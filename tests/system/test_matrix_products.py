"""Products with the hidden states of few rows against float64."""

import pytest
import torch
from torch import nn

from specbench.system.matrix_products import FEW_STATES, linear_output, product


@pytest.mark.parametrize("rows", range(1, 7))
@pytest.mark.parametrize("columns", [1, 2, 3])
@torch.inference_mode()
def test_every_number_of_rows_gives_the_product(rows, columns):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, columns, 48), torch.randn(80, 48)
    found, exact = product(hidden, weight), hidden.double() @ weight.double().T
    assert found.shape == (rows, columns, 80) and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    if not 1 < rows * columns <= FEW_STATES:
        assert torch.equal(found, nn.functional.linear(hidden, weight))


@torch.inference_mode()
def test_a_bias_and_another_layer_are_left_to_the_layer():
    layer, hidden = nn.Linear(48, 80), torch.randn(2, 1, 48)
    torch.testing.assert_close(linear_output(layer, hidden), layer(hidden))
    assert linear_output(nn.Identity(), hidden) is hidden
