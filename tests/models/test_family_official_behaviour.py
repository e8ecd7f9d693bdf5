"""Grammar, prompts, guidance and defaults equal the official ones; facts shown without loading are correct.

It concerns several modules: every model family.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import INFO, WRITERS, chameleon, configured, emu3, janus, loaded, write
from transformers import JanusConfig

from specbench.decoding.loop import decode
from specbench.decoding.sampling import Target
from specbench.errors import SpecbenchError
from specbench.models import checkpoint_loading
from specbench.models.catalog import load_model, recorded_model
from specbench.models.facts import ModelChoice
from specbench.models.families import base, cosmos, vq_decoder
from specbench.prompts import Request as ImageRequest
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

CPU = torch.device("cpu")


def full_layout(name: str):
    info = INFO[name]
    return base.LoadRequest(info, (), "", "cpu", torch.float32).layout(info.v_image)


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory):
    """Name to (tiny checkpoint, loaded model), each written once."""
    written = {}

    def get(name: str):
        if name not in written:
            folder = tmp_path_factory.mktemp(name)
            tiny = write(name, folder)
            written[name] = tiny, loaded(name, folder)
        return written[name]

    return get


@pytest.mark.parametrize(
    ("name", "free", "stream", "row"),
    [
        ("lumina-512", 1024, 1056, 33), ("lumina", 2304, 2352, 49), ("lumina-1024", 4096, 4160, 65),
        ("lumina-34b", 1024, 1056, 33), ("lumina2", 9216, 9312, 97), ("anole", 1024, 1024, None),
        ("llamagen", 256, 256, None), ("llamagen-512", 1024, 1024, None), ("janus", 576, 576, None),
        ("liquid", 1024, 1024, None), ("glm-image", 1280, 1280, None), ("simplear", 4096, 4096, None),
        ("tar-1.5b", 729, 729, None), ("tar-dtok-512", 1024, 1024, None), ("emu3", 8100, 8190, 91),
        ("emu3.5", 4015, 4070, 74), ("x-omni", 5184, 5184, None),
    ],
)  # fmt: skip
def test_row_ends_stand_where_the_official_stream_has_them(name, free, stream, row):
    layout, info = full_layout(name), INFO[name]
    assert (len(layout.free_slots()), layout.length) == (info.tokens, info.stream) == (free, stream)
    ends = [slot for slot, token in enumerate(layout.forced) if token >= 0]
    assert ends == ([] if row is None else list(range(row - 1, stream, row)))
    assert {layout.forced[slot] for slot in ends} <= {layout.v_image}


@pytest.mark.parametrize(("name", "side"), [("lumina-512", 32), ("lumina", 48), ("lumina-1024", 64)])
def test_lumina_stream_is_the_official_one(name, side, tiny_of):
    """Begin of image, height, width, rows with line ends; the official stream goes on with end of image and turn."""
    _, model = tiny_of("lumina")
    layout, names = full_layout(name), chameleon.RESERVED
    whole = type(model).prompt_ids(_with_layout(model, layout), "a cat")
    size = names[f"<reserved{8800 + side // 2:05d}>"]
    assert whole[1] == [chameleon.BEGIN_IMAGE, size, size]
    assert whole[0][-3:] == whole[1] and whole[0][-4] == names["<reserved08706>"] and whole[0][0] == 0
    text = model.tokenizer.decode(whole[0], skip_special_tokens=True)
    assert text == f"Generate an image of {16 * side}x{16 * side} according to the following prompt:\na cat"
    official = ([7] * side + [names["<reserved08799>"]]) * side + [chameleon.END_IMAGE, names["<reserved08706>"]]
    stream = [3 if token < 0 else chameleon.CODES for token in layout.forced]
    assert model._stream_ids[torch.tensor(stream)].tolist() == official[:-2]


def _with_layout(model, layout):
    other = object.__new__(type(model))
    other.__dict__.update(model.__dict__ | {"layout": layout})
    return other


def test_the_released_prompt_of_anole_has_the_scripts_words_before_it(tiny_of):
    tiny, official = tiny_of("anole")
    info = configured("anole", tiny.folder, prompt_form="released")
    assert info.name == "anole+tiny+released-prompt"
    asked = load_model(info, "cpu", "float32").prompt_ids("a cat")
    assert asked == official.prompt_ids("Generate an image of a cat")
    with pytest.raises(SpecbenchError, match="--prompt-form released"):
        INFO["lumina"].configured(ModelChoice(prompt_form="released"))
    both = {"weights": str(tiny.folder), "tiny": True, "guidance_rows": "released", "prompt_form": "released"}
    name = INFO["anole"].configured(ModelChoice(**both)).name
    assert recorded_model(name, str(tiny.folder)) == INFO["anole"].configured(ModelChoice(**both))


@pytest.mark.parametrize("name", ["lumina", "anole"])
def test_released_guidance_rows_keep_the_prompts_last_token(name, tiny_of):
    """As SJD's and GSD's released code feeds them; the model says so in its name, hence in every record."""
    tiny, official = tiny_of(name)
    info = configured(name, tiny.folder, guidance_rows="released")
    assert info.name == f"{name}+tiny+released-rows"
    model = load_model(info, "cpu", "float32")
    conditional, unconditional = model.prompt_ids("a cat")
    assert conditional == official.prompt_ids("a cat")[0]
    image = conditional[conditional.index(chameleon.BEGIN_IMAGE) :]
    assert unconditional == [chameleon.RESERVED["<reserved08706>"], *image]
    with pytest.raises(SpecbenchError, match="--guidance-rows released"):
        INFO["janus"].configured(ModelChoice(guidance_rows="released"))


def test_emu3_stream_is_the_official_one(tiny_of):
    _, model = tiny_of("emu3")
    layout = full_layout("emu3")
    conditional, unconditional = type(model).prompt_ids(_with_layout(model, layout), "a cat")
    suffix = model.tokenizer.encode("<|image start|>90*90<|image token|>").ids
    assert conditional[-len(suffix) :] == unconditional[-len(suffix) :] == suffix
    assert conditional[0] == unconditional[0] == emu3.SPECIALS["<|extra_203|>"]
    assert len(conditional) != len(unconditional)
    official = ([emu3.FIRST + 3] * 90 + [emu3.SPECIALS["<|extra_200|>"]]) * 90
    stream = [3 if token < 0 else emu3.CODES for token in layout.forced]
    assert model._stream_ids[torch.tensor(stream)].tolist() == official


def official_lumina(c, u, ids, k):
    """Guidance on all words, then only image words, then top-k, then temperature 1."""
    return _top_k(_only(u + 3.0 * (c - u), ids), k).softmax(-1)


def official_lumina2(c, u, ids, k):
    return _top_k(_only(u + 4.0 * (c - u), ids), k).softmax(-1)


def official_liquid(c, u, ids, k):
    """Temperature, only image words, top-k, top-p."""
    return _top_p(_top_k(_only((u + (c - u) * 7.0) / 0.99, ids), k), 0.96)


def _top_p(scores, mass):
    ranked, order = scores.softmax(-1).sort(descending=True)
    above = ranked.cumsum(-1) > mass
    above[1:], above[0] = above[:-1].clone(), False
    scores[order[above]] = -torch.inf
    return scores.softmax(-1)


def official_anole(c, u, ids, k):
    scores = _only(u + 3.0 * (c - u), ids) / 0.7
    ranked, order = scores.softmax(-1).sort(descending=True)
    dropped = ranked.cumsum(-1) - ranked >= 0.9
    scores[order[dropped]] = -torch.inf
    return scores.softmax(-1)


def official_llamagen(c, u, ids, k):
    return _top_k(u + (c - u) * 7.5, k).softmax(-1)


def official_janus(c, u, ids, k):
    return (u + 5.0 * (c - u)).softmax(-1)


def official_simplear(c, u, ids, k):
    """Guidance on log-probabilities of the whole vocabulary; its text words are left out here."""
    mixed = u.log_softmax(-1) + 6.0 * (c.log_softmax(-1) - u.log_softmax(-1))
    return _only(mixed, ids).softmax(-1)


def official_emu3(c, u, ids, k):
    return _top_k(_only(_mixed(c, u, 3.0), ids), k).softmax(-1)


def _mixed(c, u, scale):
    return scale * (c.log_softmax(-1) - u.log_softmax(-1)) + u.log_softmax(-1)


def _only(scores, ids):
    kept = torch.full_like(scores, -torch.inf)
    kept[ids.start : ids.stop] = scores[ids.start : ids.stop]
    return kept


def _top_k(scores, k):
    return torch.where(scores < scores.topk(min(k, len(scores))).values[-1], -torch.inf, scores)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "official"),
    [
        ("lumina", official_lumina), ("lumina2", official_lumina2), ("liquid", official_liquid),
        ("tar-1.5b", lambda c, u, ids, k: _top_p(_top_k(_only(c, ids), k), 0.95)),
        ("tar-dtok-256", lambda c, u, ids, k: (u + (c - u) * 4.0).softmax(-1)), ("anole", official_anole),
        ("llamagen", official_llamagen), ("janus", official_janus), ("simplear", official_simplear),
        ("emu3", official_emu3), ("emu3.5", lambda c, u, ids, k: _top_k(_only(_mixed(c, u, 5.0), ids), k).softmax(-1)),
    ],
)  # fmt: skip
def test_the_default_target_is_the_official_distribution(name, official, tiny_of):
    """From whole-vocabulary logits in the official order of operations, against mixed raw logits of image rows."""
    tiny, model = tiny_of(name)
    stream, sampling = [1, 2, 3], INFO[name].sampling()
    # The tiny vocabularies are smaller than the official top-k.
    sampling = replace(sampling, top_k=min(sampling.top_k, 7))
    session = model.begin(model.encode(["a cat"]), sampling.guidance, 4)
    positions = torch.arange(4)[None]
    logits = session.forward(torch.tensor([[0, *stream]]), positions)
    p = Target(model.layout, sampling, CPU)(logits, positions)[0, :, : model.layout.v_image]
    for slot, (c, u) in enumerate(zip(*(tiny.logits("a cat", stream, half) for half in (True, False)), strict=True)):
        expected = official(c, u, tiny.image_ids, sampling.top_k)[tiny.image_ids.start : tiny.image_ids.stop]
        torch.testing.assert_close(p[slot], expected, atol=1e-5, rtol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("text", ["", "a", "two  dogs, and a cat " * 20], ids=["empty", "one letter", "too long"])
def test_llamagen_captions_of_any_length(text, tiny_of):
    tiny, model = tiny_of("llamagen")
    logits = model.begin(model.encode([text]), 1.0, 2).forward(torch.tensor([[0, 3]]), torch.arange(2)[None])
    expected = tiny.logits(" ".join(text.split()), [3], True)
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_janus_equals_its_native_greedy_generation(tiny_of):
    _, model = tiny_of("janus")
    network = janus.network_of(JanusConfig)
    ids = torch.tensor([janus.prompt_ids("a red cat")])
    native = network.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=False
    )
    greedy = Sampling(guidance=5.0, top_k=1)
    for decoder, options in (("ar", {}), ("sjd", {"window": 5})):
        image = decode(model, [ImageRequest("a red cat", "a")], resolve(decoder, options), greedy, seed=0)[0]
        assert list(image.tokens) == native[0].tolist()


def test_official_sampling_is_the_default():
    samplings = {name: info.sampling() for name, info in INFO.items()}
    assert {name: sampling.guidance for name, sampling in samplings.items()} == {
        "lumina-512": 3.0, "lumina": 3.0, "lumina-1024": 3.0, "lumina-34b": 3.0, "anole": 3.0, "llamagen": 7.5,
        "llamagen-512": 7.5, "janus": 5.0, "janus-7b": 5.0, "simplear": 6.0, "simplear-1.5b": 6.0, "emu3": 3.0,
        "lumina2": 4.0, "liquid": 7.0, "glm-image": 1.0, "emu3.5": 5.0, "x-omni": 1.0,
        "llamagen-c2i-b": 2.0, "llamagen-c2i-b-256": 2.0, "llamagen-c2i-l": 2.0, "llamagen-c2i-l-256": 2.0,
        "tar-1.5b": 1.0, "tar-7b": 1.0, "tar-dtok-256": 4.0, "tar-dtok-512": 4.0, "tar-dtok-1024": 4.0,
        "llamagen-c2i-xl": 1.75, "llamagen-c2i-xxl": 1.75, "llamagen-c2i-3b": 1.65,
    }  # fmt: skip
    assert {name: sampling.top_k for name, sampling in samplings.items() if sampling.top_k} == {
        "lumina-512": 2000, "lumina": 2000, "lumina-1024": 2000, "lumina-34b": 2000, "llamagen": 1000,
        "llamagen-512": 1000, "emu3": 2048, "lumina2": 4096, "liquid": 4096,
        "glm-image": 50, "x-omni": 50, "emu3.5": 5120, "tar-1.5b": 1200, "tar-7b": 1200,
    }  # fmt: skip
    assert samplings["x-omni"].min_p == 0.03
    assert (samplings["anole"].temperature, samplings["anole"].top_p) == (0.7, 0.9)


def test_pixels_are_rounded_and_clamped():
    image = torch.tensor([-3.0, -1.0, -0.999, 0.0, 0.5, 1.0, 2.0])
    assert vq_decoder.to_pixels(image).tolist() == [0, 0, 0, 128, 191, 255, 255]


def test_codebooks_are_what_the_decoders_see(tiny_of):
    for name in WRITERS:
        if name.partition("-")[2]:
            continue
        _, model = tiny_of(name)
        assert model.codebook.shape[0] == model.layout.v_image and model.codebook.dtype == torch.float32
        unit = torch.allclose(model.codebook.norm(dim=-1), torch.ones(model.layout.v_image), atol=1e-5)
        assert unit == (name in ("llamagen", "janus")), name


def test_the_fsq_codebook_is_the_grid_of_its_levels():
    codebook = cosmos.fsq_codebook()
    assert codebook.shape == (64_000, 6) and len(codebook.unique(dim=0)) == 64_000
    assert codebook.min() == -1 and sorted(codebook[:, 3].unique().tolist()) == [-1, -0.5, 0, 0.5, 1]
    assert sorted(codebook[:, 0].unique().tolist()) == [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75]
    assert codebook[1].tolist() == [-0.75, -1, -1, -1, -1, -1]
    assert codebook[8].tolist() == [-1, -0.75, -1, -1, -1, -1]


@pytest.mark.parametrize("name", [name for name in INFO if name not in ("lumina-512", "lumina-1024", "llamagen-512")])
def test_facts_agree_with_the_architecture(name, monkeypatch):
    """Parameters, bytes of a step and of a cached token, counted on the full-size networks without memory."""
    networks = []

    def without_memory(network, device, dtype, seed=0, eight_bits=False):
        checkpoint_loading.renew_rotary(network)
        getattr(network, "tie_weights", lambda: None)()
        networks.append(network)
        return network

    for owner in (checkpoint_loading, vq_decoder, cosmos, base):
        monkeypatch.setattr(owner, "randomise", without_memory)
    info = INFO[name].configured(ModelChoice(random=True))
    model = load_model(info, "cpu", "bfloat16")
    language = networks[0]
    count = sum(weights.numel() for part, weights in language.named_parameters() if not part.startswith("vqmodel."))
    assert info.parameters == count
    config = model.backbone.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert info.layers == config.num_hidden_layers
    assert info.network.kv_numbers == 2 * config.num_hidden_layers * config.num_key_value_heads * width
    trunk = sum(weights.numel() for weights in model.backbone.parameters())
    trunk += model._head.numel() - model.backbone.embed_tokens.weight.numel()
    if name.startswith("janus"):
        parts = (model._network.generation_head, model._network.generation_aligner)
        trunk += sum(weights.numel() for part in parts for weights in part.parameters()) - model._head.numel()
    assert info.network.step_parameters(info.v_image) == trunk
    assert model.layout.length == info.stream


def test_facts_need_no_torch():
    script = (
        "import json, sys; from specbench.models.hub_model import MODELS;"
        "from specbench.runs.memory_estimate import single_image_bytes as memory;"
        "facts = [[m.name, m.resolution, m.tokens, memory(m), m.source.repo, m.ready] for m in MODELS];"
        "print(json.dumps([facts, sorted({'torch', 'transformers'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    facts, heavy = json.loads(done.stdout)
    assert heavy == [] and len(facts) == 29
    sizes = {name: tuple(resolution) for name, resolution, *_ in facts}
    assert sizes["lumina"] == (768, 768) and sizes["emu3"] == (720, 720) and sizes["simplear"] == (1024, 1024)
    gib = {name: memory / 2**30 for name, _, _, memory, *_ in facts}
    assert 18 < gib["lumina-1024"] < 20 and gib["janus"] < 4
