"""A network of transformers that somebody has loaded, decoded without a catalogue and without a results folder.

It concerns several modules: models.families.base, and those that decode.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from checkpoints.parts import randomise
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

import specbench
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout

CODES, ROW_END = 24, 40
LAYOUT = TokenLayout.with_row_ends(4, 4, CODES)


@pytest.fixture(scope="module")
def network() -> ChameleonForConditionalGeneration:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {f"IMGIMG{chr(65 + code)}Z": 4 + code for code in range(CODES)} | {"<image>": 41}
    config = ChameleonConfig(**sizes, num_key_value_heads=4, vocab_size=64, vocabulary_map=words)
    config.vq_config.num_embeddings, config.vq_config.base_channels = CODES, 32
    return randomise(ChameleonForConditionalGeneration(config)).eval()


def prompt_ids(text: str) -> tuple[list[int], list[int]]:
    return [0, *(50 + len(word) % 10 for word in text.split()), 5], [0, 5]


def decoded(network, decoder: str, **settings):
    arguments = {"layout": LAYOUT, "image_ids": range(4, 4 + CODES), "forced_ids": [ROW_END], "prompt_ids": prompt_ids}
    arguments["codebook"] = network.model.vqmodel.quantize.embedding.weight
    return specbench.decode(network, ["a red cup", "two dogs"], decoder, **arguments, **settings)


@torch.no_grad()
def library_logits(network, text: str, tokens: np.ndarray, guidance: float) -> torch.Tensor:
    """Guided logits of every slot by the library's own full forwards."""
    ids = [*range(4, 4 + CODES), ROW_END]
    stream = [ids[token] for token in tokens]

    def rows(start: list[int]) -> torch.Tensor:
        hidden = network.model(torch.tensor([start + stream])).last_hidden_state[0, len(start) - 1 : -1]
        return network.lm_head(hidden)[:, 4 : 4 + CODES]

    conditional, unconditional = map(rows, prompt_ids(text))
    return unconditional + guidance * (conditional - unconditional)


@pytest.mark.parametrize("decoder", ["ar", "sjd", "gsd:G=3"])
def test_any_decoder_draws_from_the_distribution_of_the_network(network, decoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attention = network.config._attn_implementation
    images = decoded(network, decoder, seed=3, cfg=2.0, temperature=0.7)
    for text, image in zip(("a red cup", "two dogs"), images, strict=True):
        free = ~image.forced
        expected = torch.log_softmax(library_logits(network, text, image.tokens, 2.0)[free] / 0.7, dim=-1)
        logp = expected.gather(1, torch.tensor(image.tokens[free]).long()[:, None])[:, 0]
        assert image.logp[free] == pytest.approx(logp.numpy(), abs=1e-4)
        assert image.image is None and image.tokens[4] == CODES and image.nfe <= 20
    assert os.listdir() == [] and network.config._attn_implementation == attention


def test_a_window_of_drafts_takes_the_most_probable_tokens_and_pictures_are_the_users(network):
    def render(tokens):
        return torch.zeros(len(tokens), 3, 8, 8, dtype=torch.uint8)

    ar, sjd = (decoded(network, name, top_k=1, render=render) for name in ("ar", "sjd:window=4"))
    assert all((a.tokens == b.tokens).all() and a.image.shape == (3, 8, 8) for a, b in zip(ar, sjd, strict=True))
    assert sjd[0].nfe < ar[0].nfe


def test_what_does_not_fit_is_one_line(network):
    with pytest.raises(SpecbenchError, match="a network needs layout"):
        specbench.decode(network, "a cup")
    with pytest.raises(SpecbenchError, match="23 image ids and 0 forced ids for a layout of 25"):
        specbench.decode(network, "a cup", layout=LAYOUT, image_ids=range(23), prompt_ids=prompt_ids)
    given = {"layout": (3, 3), "image_ids": range(4, 13), "prompt_ids": prompt_ids}
    for wrong, line in (
        ({"image_ids": range(10**6, 10**6 + 9)}, "image_ids: 1000000 is not one of the 64 words of Chameleon"),
        ({"image_ids": torch.tensor([4] * 9)}, "image_ids names a word twice"),
        ({"image_ids": [[4]]}, "is not a list of whole numbers"),
        ({"image_ids": ()}, "image_ids is empty|layout of 0"),
        ({"layout": 5}, "layout 5"),
        ({"layout": (0, 3)}, "layout .0, 3."),
        ({"prompt_ids": lambda text: ([], [0])}, "a prompt without ids"),
        ({"prompt_ids": lambda text: [1, 2, 3]}, "must return two lists of ids"),
        ({"prompt_ids": lambda text: (torch.tensor([[1]]), [0])}, "prompt_ids: .* is not a list of whole numbers"),
        ({"prompt_ids": lambda text: ([64], [0])}, "prompt_ids: 64 is not one of the 64 words"),
    ):
        with pytest.raises(SpecbenchError, match=line):
            specbench.decode(network, "a cup", **given | wrong)
    for no_model in (None, "gpt2"):
        with pytest.raises(SpecbenchError, match="is neither a network nor an ImageModel"):
            specbench.decode(no_model, "a cup", **given)
    with pytest.raises(SpecbenchError, match="GG"):
        decoded(network, "gsd", GG=3)


def test_a_model_of_the_catalogue_needs_no_ids():
    from specbench.models.catalog import load_model

    image = specbench.decode(load_model("shapes"), "a red circle", "sjd", window=8, cfg=3.0, seed=5)
    other = specbench.generate("a red circle", decoder="sjd", window=8, cfg=3.0, seed=5, top_k=0, top_p=1.0)
    assert (image.tokens == other.tokens).all()
