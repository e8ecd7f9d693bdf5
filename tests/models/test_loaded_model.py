"""`specbench.decode` on networks of transformers that somebody has loaded, of kinds that specbench does not know: their
own distribution, or one line, without a catalogue and without a results folder. It concerns several modules:
models.loaded_model, models.network_head, models.forward_probe, models.families.base."""

import copy
import gc
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import any_causal_lm
import numpy as np
import pytest
import torch
from checkpoints.parts import randomise
from refusals import refused
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    masking_utils,
)

import specbench
from specbench.errors import SpecbenchError
from specbench.models import loaded_model
from specbench.models.catalog import ModelInfo, load_model
from specbench.models.interface import ImageModel, TokenLayout
from specbench.models.transformer import kv_cache

IDS = list(range(20, 36))
PROMPTS = ([1, 5, 7, 9, 11], [1, 5])
DECODERS = ("ar", "sjd:window=4", "sjd-pac:window=6")


def decoded_any(network, decoder, texts="a cup", **settings):
    settings = {"layout": (5, 6), "image_ids": IDS, "prompt_ids": lambda text: PROMPTS, "cfg": 2.0, **settings}
    return specbench.decode(network, texts, decoder, **settings)


@torch.no_grad()
def furthest(network, image, prompts=PROMPTS, ids=IDS, codes=16, temperature=1.0) -> float:
    """Largest difference of the image's log p from the network's own forward; `ids`: of the stream's tokens, of which
    `codes` are image tokens."""
    tokens, free, rows = torch.tensor(image.tokens).long(), torch.tensor(~image.forced), []
    for prompt in prompts:
        stream = torch.tensor([prompt + [ids[token] for token in tokens]])
        # Chameleon's class hides image logits, so its head is applied here.
        chameleon = isinstance(network, ChameleonForConditionalGeneration)
        logits = network.lm_head(network.model(stream).last_hidden_state) if chameleon else network(stream).logits
        rows.append(logits[0, len(prompt) - 1 : -1][free][:, ids[:codes]].float())
    logp = ((rows[1] + 2.0 * (rows[0] - rows[1])) / temperature).log_softmax(-1)
    return float((logp.gather(1, tokens[free, None])[:, 0] - torch.tensor(image.logp)[free]).abs().max())


def outcome(network) -> str:
    """The word "equal" if all decoders agree, or the line that refuses the network."""
    for decoder in DECODERS:
        try:
            image = decoded_any(network, decoder)
        except SpecbenchError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            return str(error)
        gap = furthest(network, image)
        assert gap < 0.01, f"{type(network).__name__}, {decoder}: {gap:.2g} nats from its own forward, without a word"
    return "equal"


# Scaled and capped logits, biases of the head, windows and chunks, learned positions, experts, attention sinks.
KINDS = [
    ("llama", "eager"), ("gemma2", "eager"), ("gemma3_text", "sdpa"), ("phi", "sdpa"), ("granite", "eager"),
    ("cohere2", "sdpa"), ("gpt2", "sdpa"), ("opt", "eager"), ("gpt_oss", "eager"), ("llama4_text", "sdpa"),
    ("mixtral", "sdpa"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attention"), KINDS)
def test_a_network_is_decoded_from_its_own_distribution(name, attention):
    network = any_causal_lm.build(name, attention)
    assert outcome(network) == "equal" and network.config._attn_implementation == attention


def test_what_slots_of_a_cache_cannot_hold_is_refused():
    assert "conv state" in outcome(any_causal_lm.build("jamba"))  # a state between tokens
    assert "when other tokens follow it" in outcome(any_causal_lm.build("xlnet"))  # looks ahead
    assert "differs from a forward of the whole sequence" in outcome(any_causal_lm.build("roberta"))  # other positions
    bloom = any_causal_lm.build("bloom")  # its bias by distance knows no draft tree
    assert furthest(bloom, decoded_any(bloom, "sjd:window=4")) < 0.01
    refused("log p in a draft tree differs", decoded_any, bloom, "sjd-pac:window=6")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_whole_library_is_equal_or_refused_in_one_line(attention):
    walked = {name: any_causal_lm.build(name, attention) for name in any_causal_lm.NAMES}
    outcomes = {name: outcome(network) for name, network in walked.items() if network is not None}
    equal = [name for name, text in outcomes.items() if text == "equal"]
    print(f"{attention}: {len(outcomes)} built, {len(equal)} equal")
    for name, text in outcomes.items():
        print(f"{name}: {text}")
    assert len(equal) >= {"eager": 100, "sdpa": 85}[attention]


def dynamic(**more):
    """A Llama whose positions depend on the length beyond 40 tokens."""
    kind = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=48, max_position_embeddings=40, rope_parameters=kind, **more)
    return any_causal_lm.randomise(LlamaForCausalLM(config).eval())


def test_a_longer_prompt_is_compared_too():
    long = ([1, *range(5, 19)] * 2, [1])
    network = dynamic()
    assert furthest(network, decoded_any(network, "sjd:window=4")) < 0.01
    for texts, ids in (("b", lambda text: long), (["a", "b"], lambda text: long if text == "b" else PROMPTS)):
        given = {"layout": (5, 6), "image_ids": IDS, "prompt_ids": ids}
        refused("when other tokens follow it", specbench.decode, network, texts, "ar", cfg=2.0, **given)


def test_a_plug_in_is_compared_when_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "users.json").write_text('{"network": {"codes": 16, "layers": 2}}')
    sizes = {"resolution": (5, 6), "tokens": 30, "licence": "MIT", "config": tmp_path / "users.json"}
    info = ModelInfo("users-lm", "a user's", target="users_lm:load", **sizes)
    prompts_of = {"llama": lambda text: PROMPTS, "gpt2": lambda text: {}[text], "mamba": lambda text: PROMPTS}
    for name, prompts in prompts_of.items():
        network = any_causal_lm.build(name, "eager").train()
        own = loaded_model.LoadedModel(network, (5, 6), IDS, prompts)
        monkeypatch.setitem(sys.modules, "users_lm", SimpleNamespace(load=lambda device, dtype, own=own: own))
        if name == "mamba":
            refused("users-lm: .*(differs from|cannot be decoded)", load_model, info)
            continue
        model = load_model(info)
        assert model.name == "users-lm" and model.weights_sha256 == info.weights_sha256() and not network.training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_network_with_a_plain_or_a_capped_head_can_be_compiled(name):
    model = loaded_model.LoadedModel(any_causal_lm.build(name), (5, 6), IDS, lambda text: PROMPTS)
    assert (model._matrix is None) is (name == "gemma2")
    eager = specbench.decode(model, "a cup", "sjd:window=4")
    model.compile()
    assert model.compiles
    compiled = specbench.decode(model, "a cup", "sjd:window=4")
    assert (compiled.tokens == eager.tokens).all() and compiled.nfe == eager.nfe


class Scaled(LlamaForCausalLM):
    """A user's class: `scale` changes the embeddings outside the base model, `late` the logits of later tokens."""

    scale, late = 1.0, 1.0

    def forward(self, input_ids=None, inputs_embeds=None, **options):
        embeds = self.get_input_embeddings()(input_ids) * self.scale
        output = super().forward(inputs_embeds=embeds, **options)
        output.logits = torch.cat([output.logits[:, :20], output.logits[:, 20:] * self.late], 1)
        return output


def scaled(**values):
    network = dynamic()
    network.__class__ = Scaled
    for name, value in values.items():
        setattr(network, name, value)
    return network


def test_a_network_that_has_changed_is_compared_again():
    network = scaled()
    assert decoded_any(network, "ar").facts["own_forward_gap"] < 1e-3
    network.scale = 2.0
    refused("differs from a forward of the whole sequence", decoded_any, network, "ar")


class Mixed(LlamaForCausalLM):
    """A user's class whose logits depend on the other rows of the batch."""

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits - output.logits.mean(0, keepdim=True) / 2
        return output


@pytest.mark.parametrize("settings", [{}, {"cfg": 1.0}, {"cfg": 1.0, "layout": (1, 2)}])
def test_a_network_that_mixes_the_rows_of_a_batch_is_refused_with_and_without_guidance(settings):
    network = dynamic()
    network.__class__ = Mixed
    refused("differs from a forward of the whole sequence", decoded_any, network, "ar", **settings)


def test_no_nan_and_no_infinity_hides_a_difference():
    refused("the forward of the whole sequence gives NaN", decoded_any, scaled(scale=2.0, late=torch.nan), "ar")
    refused("differs from a forward of the whole sequence", decoded_any, scaled(late=3.0), "ar")


@pytest.mark.parametrize("name", ["gemma2", "phi", "granite", "cohere2"])
def test_a_head_is_applied_as_it_is_in_bfloat16(name):
    network = any_causal_lm.build(name, "eager")
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(5.0)  # as trained norms may be: hidden states that a soft cap of 30 bends
    network.config.final_logit_softcapping = 30.0
    network.to(torch.bfloat16)
    image = decoded_any(network, "sjd:window=4")
    assert image.facts["own_forward_gap"] < 1.0 and furthest(network, image) < 1.5


def test_a_head_in_float32_over_layers_in_bfloat16():
    network = any_causal_lm.build("llama").to(torch.bfloat16)
    network.lm_head.float().register_forward_pre_hook(lambda module, hidden: (hidden[0].float(),))
    assert decoded_any(network, "sjd:window=4").facts["own_forward_gap"] < 1.0


def test_two_threads_and_other_forwards_do_not_disturb_each_other():
    networks = [any_causal_lm.build(name, "eager") for name in ("llama", "gemma2")]
    other, ids = any_causal_lm.build("mixtral", "eager"), torch.arange(3, 40)[None]
    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        expected = other(ids).logits
        running = [pool.submit(decoded_any, network, "sjd:window=4") for network in networks]
        while not all(future.done() for future in running):
            assert torch.equal(other(ids).logits, expected)
        for network, future in zip(networks, running, strict=True):
            assert furthest(network, future.result()) < 0.01
    assert not masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping


def test_a_network_is_freed():
    bloom = any_causal_lm.build("bloom")
    decoded_any(bloom, "ar")
    left = weakref.ref(bloom)
    del bloom
    gc.collect()
    assert left() is None


def test_training_mode_is_set_aside_for_the_call():
    network = any_causal_lm.build("llama")
    network.config.attention_dropout = 0.5
    for layer in network.model.layers:
        layer.self_attn.attention_dropout = 0.5
    network.train()
    network.model.norm.eval()
    tokens = [decoded_any(network, "sjd:window=4", seed=1).tokens.tolist() for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert network.training and network.model.layers[0].training and not network.model.norm.training


def _masks(change):
    """`slot_masks` whose masks a function of the mask functions by attention changes."""
    true = loaded_model.slot_masks

    @contextmanager
    def changed(*arguments):
        with true(*arguments):
            functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
            functions["eager"] = change(functions)
            yield

    return changed


def _causal_only(functions):
    make = functions["eager"]
    return lambda mask_function, **options: make(mask_function=masking_utils.causal_mask_function, **options)


def _never_overwritten(true):
    def update(self, keys, values, *more):
        before = self.keys.clone() if self.is_initialized else None
        true(self, keys, values)
        if before is not None:
            self.keys = torch.where(before.abs().sum((1, 3), keepdim=True) > 0, before, self.keys)
        visible = self._placement.visible
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    return update


_FORWARD, _UPDATE = loaded_model.Backbone.forward, kv_cache.PositionLayer.update
BUGS = {
    "a bool mask for eager attention": (loaded_model, "slot_masks", _masks(lambda functions: functions["sdpa"])),
    "no sliding window": (loaded_model, "slot_masks", _masks(_causal_only)),
    "no soft cap": (
        loaded_model.LoadedModel,
        "head",
        lambda self, hidden: hidden @ self.network.lm_head.weight[self._image_ids].T,
    ),
    "a rejected draft stays": (kv_cache.PositionLayer, "update", _never_overwritten(_UPDATE)),
    "an accepted branch is not moved": (kv_cache.PositionLayer, "move", lambda self, source, target: None),
    "half the positions": (
        loaded_model.Backbone,
        "forward",
        lambda self, inputs_embeds, position_ids, **more: _FORWARD(self, inputs_embeds, position_ids // 2, **more),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_refused(bug, dtype, monkeypatch):
    monkeypatch.setattr(*BUGS[bug])
    network = any_causal_lm.build("gemma2", "eager").to(dtype)
    refused("differs from a forward of the whole sequence by", decoded_any, network, "sjd-pac:window=6")


CODES = 24
LAYOUT = TokenLayout.with_row_ends(4, 4, CODES)
STREAM_IDS = [*range(4, 4 + CODES), 40]
"""Ids of the image tokens and of a row end."""
TEXTS = ["a red cup", "two dogs"]


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
    given = {"layout": LAYOUT, "image_ids": STREAM_IDS[:CODES], "forced_ids": STREAM_IDS[CODES:]}
    given |= {"prompt_ids": prompt_ids, "codebook": network.model.vqmodel.quantize.embedding.weight}
    return decoded_any(network, decoder, TEXTS, **given, **settings)


@pytest.mark.parametrize("decoder", ["ar", "sjd", "gsd:G=3"])
def test_any_decoder_draws_from_the_distribution_of_the_network(network, decoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attention = network.config._attn_implementation
    images = decoded(network, decoder, seed=3, temperature=0.7)
    for text, image in zip(TEXTS, images, strict=True):
        assert furthest(network, image, prompt_ids(text), STREAM_IDS, CODES, 0.7) < 1e-4
        assert image.facts["own_forward_slots"] == 20
        assert image.image is None and image.tokens[4] == CODES and image.nfe <= 20
    assert os.listdir() == [] and network.config._attn_implementation == attention


def test_a_window_of_drafts_takes_the_most_probable_tokens_and_pictures_are_the_users(network):
    def render(tokens):
        return torch.zeros(len(tokens), 3, 8, 8, dtype=torch.uint8)

    ar, sjd = (decoded(network, name, top_k=1, render=render) for name in ("ar", "sjd:window=4"))
    assert all((a.tokens == b.tokens).all() and a.image.shape == (3, 8, 8) for a, b in zip(ar, sjd, strict=True))
    assert sjd[0].nfe < ar[0].nfe


def test_what_does_not_fit_is_one_line(network):
    refused("a network needs layout", specbench.decode, network, "a cup")
    given, gpt2 = {"model": network, "prompts": "a cup"}, any_causal_lm.build("gpt2")
    given |= {"layout": (3, 3), "image_ids": range(4, 13), "prompt_ids": prompt_ids}
    for wrong, line in (
        ({"layout": LAYOUT, "image_ids": range(23)}, "23 image ids and 0 forced ids for a layout of 25"),
        ({"image_ids": range(10**6, 10**6 + 9)}, "image_ids: 1000000 is not one of the 64 words of Chameleon"),
        ({"image_ids": torch.tensor([4] * 9)}, "image_ids contains an id twice"),
        ({"image_ids": [[4]]}, "is not a list of whole numbers"),
        ({"image_ids": ()}, "image_ids is empty|layout of 0"),
        ({"image_ids": set(range(4, 13))}, "image_ids: .* is not a list of ids"),
        ({"image_ids": 9}, "image_ids: 9 is not a list of ids"),
        ({"codebook": torch.zeros(10, 2)}, "codebook has 10 rows for 9 image tokens"),
        ({"codebook": np.zeros(9)}, "codebook has 1 dimension, not 2"),
        ({"codebook": [[0.0, np.nan]] * 9}, "codebook contains NaN"),
        ({"codebook": "x"}, "codebook: "),
        ({"prompts": [1]}, "prompt 1 is not a text"),
        ({"prompt_ids": lambda text: {}[text]}, "prompt_ids of 'a cup' failed: KeyError"),
        ({"render": 5}, "render = 5 is not a function"),
        ({"render": lambda tokens: {}["x"]}, "render failed: KeyError"),
        ({"model": torch.nn.Linear(2, 2)}, "Linear is not a causal language model of transformers with a KV cache"),
        ({"model": copy.deepcopy(network).to("meta")}, "is on the meta device"),
        ({"model": gpt2, "prompt_ids": lambda text: ([1] * 5000, [1])}, "5009 tokens, but .* positions"),
        ({"layout": 5}, "layout 5"),
        ({"layout": (True, 9)}, "layout .True, 9."),
        ({"layout": (0, 3)}, "layout .0, 3."),
        ({"prompt_ids": lambda text: ([], [0])}, "a prompt without ids"),
        ({"prompt_ids": lambda text: [1, 2, 3]}, "must return two lists of ids"),
        ({"prompt_ids": lambda text: (torch.tensor([[1]]), [0])}, "prompt_ids: .* is not a list of whole numbers"),
        ({"prompt_ids": lambda text: ([64], [0])}, "prompt_ids: 64 is not one of the 64 words"),
    ):
        refused(line, specbench.decode, **given | wrong)
    for no_model in (None, "gpt2"):
        refused("is neither a network nor an ImageModel", specbench.decode, **given | {"model": no_model})
    refused("GG", decoded, network, "gsd", GG=3)
    refused("write a plug-in for this model, and train a head", decoded, network, "eagle")
    refused("several decoders", decoded, network, "ar,sjd")


def test_a_model_of_the_catalogue_needs_no_ids():
    image = specbench.decode(load_model("shapes"), "a red circle", "sjd", window=8, cfg=3.0, seed=5)
    other = specbench.generate("a red circle", decoder="sjd", window=8, cfg=3.0, seed=5, top_k=0, top_p=1.0)
    assert (image.tokens == other.tokens).all()


def test_a_class_derived_from_the_interface_sets_its_own_device_and_dtype():
    model = type("Users", (ImageModel,), {})()
    model.device, model.dtype = torch.device("cpu"), torch.float32
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
