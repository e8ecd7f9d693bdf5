"""Growth of the network keeps its function: the grown one gives the logits of the one it was grown from."""

import pytest
import torch

from specbench.models.shapes import captions
from specbench.models.shapes.network import ShapesNetwork
from specbench.training.shapes.grow import grow


def small_network():
    torch.manual_seed(0)
    network = ShapesNetwork(codes=32, width=32, layers=2, heads=2, inner=48)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3)
    return network.eval()


def test_a_grown_network_computes_the_same_and_all_of_it_learns():
    network = small_network()
    grown = grow(network, width=48, layers=3, inner=96).eval()
    ids = torch.tensor([captions.encode("a red circle left of a blue square")])
    tokens = torch.randint(32, (1, 256), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(grown(ids, tokens), network(ids, tokens), rtol=1e-4, atol=1e-3)
    torch.nn.functional.cross_entropy(grown(ids, tokens)[0], tokens[0]).backward()
    written = grown.llama.layers[2].mlp.down_proj.weight.grad, grown.llama.layers[0].self_attn.o_proj.weight.grad[32:]
    assert all(gradient.abs().max() > 0 for gradient in written)


def test_a_network_cannot_shrink():
    with pytest.raises(ValueError, match="cannot grow"):
        grow(small_network(), width=32, layers=1, inner=48)
