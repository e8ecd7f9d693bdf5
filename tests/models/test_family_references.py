"""The contract of every model family, on files in each published layout: cached windows give the logits of the full
forward, windows of any width give the AR tokens, image decoding equals the reference, the loader compared the steps
with the network's own forward, and sizes known before loading fit the network. It concerns several modules: every model
family."""

import pytest
import torch
from checkpoints import EVERY, INFO, KINDS, refusal
from ragged import PLAN, ragged_windows

from specbench.decoding.loop import Decoding, decode_tokens
from specbench.models import forward_probe
from specbench.models.catalog import check_model
from specbench.models.facts import ModelChoice
from specbench.models.families import vq_decoder
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

TEXTS, CLASSES = ("A red cat, sleeping.", "two dogs"), ("7", "12")


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def probed(kind, tiny_of, tmp_path_factory):
    """Results of the loader when it compared the model with its own forward."""
    found, true = [], forward_probe.probe
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))  # else a comparison is remembered
        patch.setattr(forward_probe, "probe", lambda *given: found.append(true(*given)) or found[-1])
        tiny_of(kind)
    return found


@pytest.fixture
def loaded(kind, probed, tiny_of):
    """Tiny checkpoint, and the model loaded from it."""
    return tiny_of(kind)


@pytest.fixture(scope="module")
def texts(kind):
    return CLASSES if INFO[EVERY[kind][0]].classes else TEXTS


def guided(tiny, text: str, stream: list[int], scale: float) -> torch.Tensor:
    """[len(stream) + 1, v_image] guided logits by the reference, every row from its own forward."""
    conditional, unconditional = (
        tiny.logits(text, stream, half)[:, tiny.image_ids.start : tiny.image_ids.stop] for half in (True, False)
    )
    return unconditional + scale * (conditional - unconditional)


def test_a_family_decodes_by_the_forward_of_its_network(probed, loaded):
    [result] = probed
    assert result.gap < 1e-3 and result.slots == loaded[1].layout.length and result.no_trees is None


@torch.inference_mode()
def test_ragged_windows_with_rollback_equal_the_uncached_forward(loaded, texts):
    (tiny, model), scale = loaded, 3.0
    session = model.begin(model.encode(texts), scale, columns=8)
    fed = ragged_windows(session.forward, model.layout.v_image, PLAN[:5], model.layout.forced)
    for row, stream, drafts, logits in fed:
        expected = guided(tiny, texts[row], (stream + drafts)[: model.layout.length - 1], scale)[len(stream) :]
        within = slice(model.layout.length - len(stream))
        torch.testing.assert_close(logits[within], expected[within], atol=1e-4, rtol=1e-4)


def greedy(model, texts, decoder: str, **options) -> list[list[int]]:
    requests = [Request(text, text) for text in texts]
    how = Decoding(model, resolve(decoder, options), Sampling(guidance=3.0, top_k=1), 0)
    return decode_tokens(how, requests).tolist()


def test_greedy_windows_give_the_ar_tokens(loaded, texts):
    tiny, model = loaded
    expected = greedy(model, texts, "ar")
    forced = [token for token in model.layout.forced if token >= 0]
    for row, text in zip(expected, texts, strict=True):
        ranked = guided(tiny, text, row[:-1], 3.0).argmax(-1).tolist()
        chosen = [slot for slot, token in enumerate(model.layout.forced) if token < 0]
        assert [row[slot] for slot in chosen] == [ranked[slot] for slot in chosen]
        assert [token for token in row if token >= model.layout.v_image] == forced
    for window in (2, 5, 8):
        assert greedy(model, texts, "sjd", window=window) == expected


def test_images_are_decoded_as_by_the_reference(loaded):
    tiny, model = loaded
    assert model.codebook.shape[0] == model.layout.v_image and model.codebook.dtype == torch.float32
    unit = torch.allclose(model.codebook.norm(dim=-1), torch.ones(model.layout.v_image), atol=1e-5)
    assert unit == model.name.startswith(("llamagen", "janus", "tar"))
    if not getattr(model, "draws", True):
        pytest.skip("its pictures are drawn by a diffusion model that is not here")
    codes = torch.randint(model.layout.v_image, (2, 16), generator=torch.Generator().manual_seed(4))
    expected = torch.cat([vq_decoder.to_pixels(tiny.pixels(row[None]).detach()) for row in codes])
    pixels = model.render(codes)
    assert pixels.shape == expected.shape
    assert (pixels.int() - expected.int()).abs().max() <= 1
    assert len(pixels.unique()) > 3


def test_the_size_is_the_one_of_the_loaded_network(kind, loaded):
    """If it covers a language model alone: X-Omni has two tables, and a de-tokenizer has no other size."""
    (tiny, model), name = loaded, EVERY[kind][0]
    if name.startswith(("x-omni", "tar-dtok")):
        pytest.skip("planned with its official size")
    info, config = INFO[name].configured(ModelChoice(weights=str(tiny.folder))), model.backbone.config
    assert info.network != INFO[name].network and info.layers == config.num_hidden_layers
    if kind == "anole by its authors":
        # Meta derives the width of feed-forward layers, which is not a multiple of 256 in so small a network.
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert info.network.kv_numbers == 2 * config.num_hidden_layers * config.num_key_value_heads * width
    trunk = sum(weights.numel() for weights in model.backbone.parameters())
    assert info.network.trunk == trunk - model.backbone.embed_tokens.weight.numel()
    assert info.fixed_bytes() < INFO[name].fixed_bytes() and info.step_bytes() < INFO[name].step_bytes()


def test_an_empty_folder_is_refused_and_a_whole_checkpoint_passes_the_check(kind, loaded, tmp_path):
    name = EVERY[kind][0]
    error = refusal(name, tmp_path)
    assert str(tmp_path) in error.what and "specbench fetch" in error.try_this
    check_model(INFO[name].configured(ModelChoice(weights=str(loaded[0].folder), tiny=True)))
