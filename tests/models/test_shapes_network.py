"""Network of the `shapes` model: stock transformers weights, and the same inputs for every decoder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaModel

from dev.shapes.data import save
from specbench.models.shapes import captions
from specbench.models.shapes import network as shapes
from specbench.models.shapes.adapter import ShapesModel
from specbench.models.shapes.tokenizer import TOKENS, ShapesTokenizer

CAPTIONS = ["a red circle left of a blue square", "three crosses"]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return shapes.ShapesNetwork(codes=32, width=32, layers=2, heads=2, inner=48).eval()


@torch.inference_mode()
def test_cached_steps_give_the_logits_of_the_whole_image(network):
    tokens = torch.randint(32, (2, TOKENS))
    model = ShapesModel(network, ShapesTokenizer(codes=32, encoder=16, decoder=16, fine=8), "")
    session, steps = model.begin(model.encode(CAPTIONS), 1.0, columns=37), []
    fed = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    for start in range(0, TOKENS, 37):
        slots = torch.arange(start, min(start + 37, TOKENS)).expand(2, -1)
        steps.append(session.forward(fed.gather(1, slots), slots))
    whole = network(network.encode(CAPTIONS), tokens)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)


def test_a_word_has_its_role_wherever_it_stands():
    texts = [
        "a cross on a grainy background", "three red circles on a grainy background",
        "a red circle left of a blue square and above a green cross",
        "a red circle below a blue square and right of a green cross", "a circle and a square",
    ]  # fmt: skip
    ids = torch.tensor([captions.encode(text) for text in texts])
    roles = [
        {(captions.VOCABULARY[word], int(role)) for word, role in zip(row, roles, strict=True) if word > 1}
        for row, roles in zip(ids.tolist(), shapes.roles(ids), strict=True)
    ]
    assert roles == [
        {("cross", 1), ("on", 13), ("grainy", 14)},
        {("three", 11), ("red", 0), ("circle", 1), ("on", 13), ("grainy", 14)},
        {("red", 0), ("circle", 1), ("left", 2), ("blue", 3), ("square", 4), ("and", 5), ("above", 5),
         ("green", 6), ("cross", 7)},
        {("blue", 0), ("square", 1), ("above", 2), ("and", 2), ("green", 3), ("cross", 4), ("left", 5),
         ("red", 6), ("circle", 7)},
        {("circle", 1), ("and", 2), ("square", 4)},
    ]  # fmt: skip
    assert shapes.objects_before(ids)[2, :9].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert (shapes.roles(torch.tensor([captions.null_caption()])) == torch.arange(16)).all()


def test_weights_are_read_strictly_and_survive_the_file(network, tmp_path):
    tokenizer = ShapesTokenizer(codes=32, encoder=16, decoder=16, fine=8)
    save(network, tokenizer, {"sampling": {"guidance": 3.0}}, tmp_path)
    again = shapes.load_network(folder=tmp_path)
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(network.parameters(), again.parameters(), strict=True))
    assert shapes.load_tokenizer(folder=tmp_path).config == tokenizer.config
    state = load_file(tmp_path / "network.safetensors")
    of_llama = {k.removeprefix("llama."): v for k, v in state.items() if k.startswith("llama.")}
    LlamaModel(network.llama.config).load_state_dict(of_llama, strict=True)
    for broken in (state | {"surplus": torch.zeros(1)}, {k: v for k, v in state.items() if k != "row.weight"}):
        save_file(broken, tmp_path / "network.safetensors")
        with pytest.raises(RuntimeError, match=r"surplus|row\.weight"):
            shapes.load_network(folder=tmp_path)


def test_the_shipped_weights_are_small_half_precision_and_complete():
    files = [f for f in shapes.WEIGHTS.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 30e6
    for name, module in (("network", shapes.load_network()), ("tokenizer", shapes.load_tokenizer())):
        state = load_file(shapes.WEIGHTS / f"{name}.safetensors")
        assert set(state) == set(module.state_dict())
        assert {t.dtype for t in state.values()} == {torch.float16}
        assert all(t.isfinite().all() for t in state.values())
    sampling = json.loads((shapes.WEIGHTS / "config.json").read_text())["sampling"]
    assert set(sampling) == {"guidance", "top_k", "temperature", "top_p"}
