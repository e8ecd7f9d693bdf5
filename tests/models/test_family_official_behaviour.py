"""Grammar, prompts, guidance and defaults equal the official ones, token ids equal the authors' tokenizers; facts shown
without loading are correct. It concerns several modules: every model family."""

import json
import subprocess
import sys
import unicodedata
from dataclasses import replace

import pytest
import torch
from checkpoints import INFO, baai, chameleon, configured, emu3, janus
from refusals import refused
from tokenizers import Tokenizer
from transformers import JanusConfig

from specbench.decoding.loop import decode
from specbench.decoding.sampling import Target
from specbench.models import checkpoint_loading
from specbench.models.catalog import load_model, recorded_model
from specbench.models.facts import ModelChoice
from specbench.models.families import base, cosmos, vq_decoder
from specbench.models.families.emu3 import ranked_bpe, read_ranks, split_as_qwen
from specbench.models.families.llamagen import CAPTION, clean_caption
from specbench.prompts import Request as ImageRequest
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.store.run_store import RunStore

CPU = torch.device("cpu")


def full_layout(name: str):
    info = INFO[name]
    return base.LoadRequest(info, (), "", "cpu", torch.float32).layout(info.v_image)


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
def test_row_ends_are_where_the_official_stream_has_them(name, free, stream, row):
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
    refused("--prompt-form released", INFO["lumina"].configured, ModelChoice(prompt_form="released"))
    both = {"weights": str(tiny.folder), "tiny": True, "guidance_rows": "released", "prompt_form": "released"}
    name = INFO["anole"].configured(ModelChoice(**both)).name
    assert recorded_model(name, str(tiny.folder)) == INFO["anole"].configured(ModelChoice(**both))


@pytest.mark.parametrize("name", ["lumina", "anole"])
def test_released_guidance_rows_keep_the_prompts_last_token(name, tiny_of):
    """As SJD's and GSD's released code feeds them; the model says so in its name, hence in every record."""
    tiny, official = tiny_of(name)
    info = configured(name, tiny.folder, guidance_rows="released")
    assert info.name == f"{name}+tiny+released-rows"
    conditional, unconditional = load_model(info, "cpu", "float32").prompt_ids("a cat")
    assert conditional == official.prompt_ids("a cat")[0]
    image = conditional[conditional.index(chameleon.BEGIN_IMAGE) :]
    assert unconditional == [chameleon.RESERVED["<reserved08706>"], *image]
    refused("--guidance-rows released", INFO["janus"].configured, ModelChoice(guidance_rows="released"))


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


def cfg(c, u, scale):
    return u + scale * (c - u)


def cfg_of_logs(c, u, scale):
    return cfg(c.log_softmax(-1), u.log_softmax(-1), scale)


def filtered(scores, ids=slice(None), k=0, mass=1.0):
    """p of scores, most of the whole vocabulary: only the image words `ids`, then top-k, then top-p."""
    kept = torch.full_like(scores, -torch.inf)
    kept[ids.start : ids.stop] = scores[ids.start : ids.stop]
    if k:
        kept = torch.where(kept < kept.topk(min(k, len(kept))).values[-1], -torch.inf, kept)
    ranked, order = kept.softmax(-1).sort(descending=True)
    kept[order[ranked.cumsum(-1) - ranked >= mass]] = -torch.inf
    return kept.softmax(-1)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "official"),
    [
        ("lumina", lambda c, u, ids, k: filtered(cfg(c, u, 3.0), ids, k)),
        ("lumina2", lambda c, u, ids, k: filtered(cfg(c, u, 4.0), ids, k)),
        ("liquid", lambda c, u, ids, k: filtered(cfg(c, u, 7.0) / 0.99, ids, k, 0.96)),
        ("tar-1.5b", lambda c, u, ids, k: filtered(c, ids, k, 0.95)),
        ("tar-dtok-256", lambda c, u, ids, k: filtered(cfg(c, u, 4.0))),
        ("anole", lambda c, u, ids, k: filtered(cfg(c, u, 3.0) / 0.7, ids, 0, 0.9)),
        ("llamagen", lambda c, u, ids, k: filtered(cfg(c, u, 7.5), k=k)),
        ("janus", lambda c, u, ids, k: filtered(cfg(c, u, 5.0))),
        ("simplear", lambda c, u, ids, k: filtered(cfg_of_logs(c, u, 6.0), ids)),  # whose text words are left out here
        ("emu3", lambda c, u, ids, k: filtered(cfg_of_logs(c, u, 3.0), ids, k)),
        ("emu3.5", lambda c, u, ids, k: filtered(cfg_of_logs(c, u, 5.0), ids, k)),
    ],
)
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
    mode = {"generation_mode": "image", "do_sample": False}
    native = network.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **mode)
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


EMU3_TEXTS = (
    "a close-up of a cat", "close -up", "a cat's hat, don't", "It'S HERE. THEY'LL", "the end. A start.Again",
    "12 cats, 3.5 dogs", "  two  spaces ", "a line\n\nand another \n one", "(a) [b] -- c...", "tail   ",
)  # fmt: skip


def test_texts_are_composed_before_they_are_split():
    decomposed = unicodedata.normalize("NFD", "café")
    assert decomposed != "café"
    tokenizer = ranked_bpe(baai.RANKS, {})
    assert tokenizer.encode(decomposed).ids == tokenizer.encode("café").ids == list("café".encode())


def test_special_tokens_are_found_anywhere_in_a_text():
    tokenizer = ranked_bpe(baai.RANKS, {"<|a|>": 700, "<|a b|>": 701})
    assert tokenizer.encode("x<|a|>y<|a b|>z<|").ids == [120, 700, 121, 701, 122, 60, 124]
    assert tokenizer.token_to_id("<|a|>") == 700


@pytest.mark.parametrize(("lines", "problem"), [
    (b"YQ== 0\n", "no token for byte 0"), (b"YQ==\n", "line 1"), (b"!!! 3\n", "base64|Only|discard|Non"),
    (b"YQ== x\n", "line 1"),
])  # fmt: skip
def test_a_file_of_ranks_that_makes_no_sense_is_an_error(lines, problem):
    with pytest.raises(ValueError, match=problem):
        read_ranks(lines)


def test_the_authors_layout_gives_the_authors_ids(tiny_of):
    """The ids of a scanner that is written out."""
    _, model = tiny_of("emu3 by its authors")
    for text in EMU3_TEXTS:
        assert model.tokenizer.encode(text).ids == baai.slow_ids(text)
        ids, expected = model.prompt_ids(text)[0], baai.slow_ids(f"{text} masterpiece, film grained, best quality.")
        assert ids[1 : 1 + len(expected)] == expected
        assert ids[0] == baai.SPECIALS["<|extra_203|>"] and ids[-1] == baai.SPECIALS["<|image token|>"]


def test_the_converted_layout_gives_the_authors_ids_and_warns_of_its_own_split(copied, capsys):
    content = json.loads((path := copied("emu3") / "tokenizer.json").read_text())
    # Merges that only another split allows or forbids.
    content["model"]["vocab"]["-u"] = content["model"]["vocab"]["<|visual token 000023|>"] + 1
    content["model"]["merges"] = [["-", "u"]]
    path.write_text(json.dumps(content))
    info = configured("emu3", path.parent)
    ids = load_model(info, "cpu", "float32").tokenizer.encode("close-up").ids
    assert content["model"]["vocab"]["-u"] in ids, "Qwen keeps a hyphen with the letters after it"
    assert "splits prompts differently from Emu3's authors" in " ".join(capsys.readouterr().err.split())
    tokenizer = Tokenizer.from_file(str(path))
    assert content["model"]["vocab"]["-u"] not in tokenizer.encode("close-up").ids
    split_as_qwen(tokenizer)
    tokenizer.save(str(path))
    load_model(info, "cpu", "float32")
    assert "splits prompts differently" not in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "cleaned"), [
    ("A Red Cat", "a red cat"), ("  a \t cat\n", "a cat"), ("a cat,a dog", "a cat, a dog"),
    ("a 1.5 m pole", "a 1.5 m pole"), ("a cat. A dog.", "a cat. a dog."),
    ("a “quiet” cat‘s tail", 'a "quiet" cat\'s tail'), ("“all of it”", "all of it"),
    ("a cat — asleep", "a cat - asleep"), ("a black-and-white T-shirt", "a black-and-white t-shirt"),
    ("this-is-my-very-own_cat", "this is my very own cat"), ("a%20cat+and+a%20dog", "a cat and a dog"),
    ("<person> with a cat", "person with a cat"), ("<b>a cat</b> &eacute;", "a cat é"),
    ("a cat &amp; a dog", "a cat a dog"), ("a cat <script>alert()</script>asleep", "a cat asleep"),
    ("a cat at https://cats.com/red and www.cats.co", "a cat at and"), ("a cat by @cat_lover", "a cat by"),
    ("a cat 猫 asleep", "a cat asleep"), ("a cat from 192.168.0.1", "a cat from"),
    ("cat #12, cat #12345, cat #1234", "cat , cat , cat 1234"), ("a cat 1234567", "a cat"),
    ("a cat my_cat.jpg", "a cat"), ("*** a cat!!! ***", "a cat!!!"), ("a cat... asleep", "a cat asleep"),
    ("a cat (asleep) [again] {or} not/", "a cat asleep again or not"),
    ("a cat jc6640 jc6640vc 6640vc231 j2d1a2a asleep", "a cat asleep"),
    ("a cat, free shipping, free download", "a cat,"), ("a cat, click for more", "a cat"),
    ("png images of a cat, page 3", "of a cat"), ("a cat 30x40 and 2.5×3", "a cat and"),
    ("a cat : asleep", "a cat: asleep"), ("- a cat -", "a cat"), ("ﬁve ｃats", "five cats"), ("", ""), ("***", ""),
    ("%3Cb%253E a cat", "a cat"),  # a second pass takes what the first uncovered
])  # fmt: skip
def test_captions_are_cleaned_as_documented(typed, cleaned):
    assert clean_caption(typed) == cleaned


def test_captions_that_are_cut_are_counted_stored_and_said(cli, run_tiny, tmp_path):
    """A token a byte, and one for the end."""
    texts = ("a" * (CAPTION - 1), "b" * (CAPTION + 4), "c")
    run = ("llamagen", "--random-weights", "--decoder", "ar", "--device", "cpu", "--threads", "1")
    cut = "reads at most 120 tokens of a caption; 1 of 3 are cut"
    assert cut in run_tiny(*run, "--dry-run", texts=texts).out
    ran = run_tiny(*run, texts=texts)
    assert ran.code == 0 and cut in ran.err
    (folder,) = (tmp_path / "results").iterdir()
    facts = [json.loads(text)["caption_tokens_cut"] for text in RunStore(folder).samples(["facts"])["facts"]]
    assert sorted(facts) == [0, 0, 5]
    note = "llamagen+random+tiny truncated the captions of 1 of 3 images"
    for more in ((), ("--all",)):
        assert note in cli("report", "--out", folder.parent, *more).out.replace("\n", " ")
