"""Model families from files in the published layout: cached windows give the logits of the library's full forward,
windows of any width give the AR tokens, and image decoding equals the reference.

It concerns several modules: every model family.
"""

import pytest
import torch
from checkpoints import ALIKE, AUTHORS, WRITERS

from specbench.decoding.loop import Decoding, decode_tokens
from specbench.models.catalog import load_model
from specbench.models.facts import ModelChoice
from specbench.models.families import vq_decoder
from specbench.models.hub_model import MODELS
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

TEXTS = ("A red cat, sleeping.", "two dogs")
INFO = {info.name: info for info in MODELS}


LAYOUTS = {name: (name, writer) for name, writer in WRITERS.items() if name not in ALIKE}
LAYOUTS |= {f"{name} by its authors": (name, writer) for name, writer in AUTHORS.items()}


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def loaded(request, tmp_path_factory):
    """Info, tiny checkpoint and the model loaded from it."""
    name, writer = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(name)
    tiny = writer(folder)
    info = INFO[name].configured(ModelChoice(weights=str(folder), tiny=True))
    return info, tiny, load_model(info, "cpu", "float32")


def guided(tiny, text: str, stream: list[int], scale: float) -> torch.Tensor:
    """[len(stream) + 1, v_image] guided logits by the reference, every row from its own forward."""
    conditional, unconditional = (
        tiny.logits(text, stream, half)[:, tiny.image_ids.start : tiny.image_ids.stop] for half in (True, False)
    )
    return unconditional + scale * (conditional - unconditional)


@torch.inference_mode()
def test_ragged_windows_with_rollback_equal_the_uncached_forward(loaded):
    _, tiny, model = loaded
    scale = 3.0
    generator = torch.Generator().manual_seed(2)
    forced = [*model.layout.forced, *[-1] * 16]
    session = model.begin(model.encode(TEXTS), scale, columns=8)
    committed = [[], []]
    for width, accepted in [(1, (1, 1)), (6, (2, 5)), (6, (6, 1)), (8, (3, 7)), (3, (1, 1))]:
        windows = torch.randint(model.layout.v_image, (2, width), generator=generator)
        starts = torch.tensor([len(row) for row in committed])
        for row, stream in enumerate(committed):
            for column in range(1, width):
                if forced[len(stream) + column - 1] >= 0:
                    windows[row, column] = forced[len(stream) + column - 1]
            if stream:
                windows[row, 0] = stream[-1]
        logits = session.forward(windows, starts[:, None] + torch.arange(width))
        for row, stream in enumerate(committed):
            drafts = windows[row, 1:].tolist()
            within = min(width, model.layout.length - len(stream))
            expected = guided(tiny, TEXTS[row], (stream + drafts)[: model.layout.length - 1], scale)[len(stream) :]
            torch.testing.assert_close(logits[row, :within], expected[:within], atol=1e-4, rtol=1e-4)
            filler = forced[len(stream) + width - 1]
            stream += [*drafts, max(filler, 0)][: accepted[row]]


def greedy(model, decoder: str, **options) -> list[list[int]]:
    requests = [Request(text, text) for text in TEXTS]
    how = Decoding(model, resolve(decoder, options), Sampling(guidance=3.0, top_k=1), 0)
    return decode_tokens(how, requests).tolist()


def test_greedy_windows_give_the_ar_tokens(loaded):
    _, tiny, model = loaded
    expected = greedy(model, "ar")
    forced = [token for token in model.layout.forced if token >= 0]
    for row, text in zip(expected, TEXTS, strict=True):
        ranked = guided(tiny, text, row[:-1], 3.0).argmax(-1).tolist()
        chosen = [slot for slot, token in enumerate(model.layout.forced) if token < 0]
        assert [row[slot] for slot in chosen] == [ranked[slot] for slot in chosen]
        assert [token for token in row if token >= model.layout.v_image] == forced
    for window in (2, 5, 8):
        assert greedy(model, "sjd", window=window) == expected


def test_images_are_decoded_as_by_the_reference(loaded):
    _, tiny, model = loaded
    if not getattr(model, "draws", True):
        pytest.skip("its pictures are drawn by a diffusion model that is not here")
    codes = torch.randint(model.layout.v_image, (2, 16), generator=torch.Generator().manual_seed(4))
    expected = torch.cat([vq_decoder.to_pixels(tiny.pixels(row[None]).detach()) for row in codes])
    pixels = model.render(codes)
    assert pixels.shape == expected.shape
    assert (pixels.int() - expected.int()).abs().max() <= 1
    assert len(pixels.unique()) > 3
