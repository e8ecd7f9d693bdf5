"""The roofline model of a forward: hand-computed parts, and what binds each."""

import pytest

from specbench.models.forward_time import Forward, Reached, forward_ms, forward_work, product_rate
from specbench.models.network_sizes import Size
from specbench.system.device_peaks import Peak

SIZE = Size(weights=4 * 16 * 16 + 3 * 16 * 8 + 10 * 16, kv=2 * 16, attention=16)
"""One layer of width 16 and inner width 8, with 10 outputs."""
PEAK = Peak("a device", {0: 1e6}, 1e9, "its data sheet")


def forward(columns=1, images=1, guided=True, context=100.0):
    return Forward(SIZE, 40 * 16 + 5 * 8, 10, 2, columns, images, guided, context)


def test_every_part_is_what_a_hand_counts():
    """Two rows of 3 columns after 100 tokens, 2 bytes a number."""
    work = forward_work(forward(columns=3))
    weights = 1024 + 384 + 160
    assert work["weights"] == (2 * weights, 2 * 2 * 3 * weights)
    assert work["attention"] == (2 * (2 * 103 * 32 + 2 * 3 * 32), 2 * 4 * 3 * 103 * 16)
    assert work["between"] == (2 * 2 * 3 * (40 * 16 + 5 * 8), 0)
    assert work["logits"] == (2 * 3 * 10 * (2 + 2 + 4 + 4 + 2), 0)


def test_weights_are_read_once_for_all_columns_rows_and_images():
    alone, many = (forward_work(forward(columns, images))["weights"] for columns, images in ((1, 1), (16, 8)))
    assert many.bytes == alone.bytes and many.flops == 128 * alone.flops


def test_a_window_costs_nothing_until_arithmetic_binds():
    """Memory takes 2 x weights / 1e6 s, arithmetic 4 x columns x weights / 1e9: they meet at 500 columns."""
    narrow, below, above = (forward_ms(forward(columns), PEAK, Reached())["weights"] for columns in (1, 499, 1000))
    assert narrow == below == pytest.approx(1e3 * 2 * 1568 / 1e6) and above == pytest.approx(2 * narrow)
    half = forward_ms(forward(), PEAK, Reached(bandwidth=0.5))["weights"]
    assert half == pytest.approx(2 * narrow)


def test_measured_products_take_the_place_of_both_peaks():
    peak = Peak("here", {0: 1e6}, 1e9, "measured", {1: 1e6, 4: 4e6})
    assert product_rate(peak.products, 2) == pytest.approx(2e6)
    assert product_rate(peak.products, 0.5) == 1e6 and product_rate(peak.products, 9) == 4e6
    assert forward_ms(forward(), peak, Reached())["weights"] == pytest.approx(1e3 * 4 * 1568 / 2e6)
