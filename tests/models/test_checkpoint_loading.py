"""Checkpoint loading: every parameter comes from a file, every stored tensor is used or listed as unused; a removed,
added or reshaped tensor is rejected in one line that names it. Checkpoints other than the official ones have the
distribution of their configuration, or are one line. It concerns several modules: checkpoint_loading and
forward_probe."""

import json
import re
import shutil

import pytest
import torch
from checkpoints import EVERY, INFO, loaded, refusal, write
from checkpoints.parts import stored
from refusals import refused
from safetensors.torch import save_file

from specbench.models import forward_probe
from specbench.models.catalog import load_model
from specbench.models.checkpoint_files import INDEX
from specbench.models.facts import ModelChoice
from specbench.models.families.base import FamilyModel

JANUS, EMU3, ANOLE, LLAMAGEN = (f"{name} by its authors" for name in ("janus-7b", "emu3", "anole", "llamagen"))
PICKLED = {"llamagen": "t2i_XL_stage1_256.pt"}
NEEDED = {
    "lumina": "model.layers.1.self_attn.q_norm.bias", "anole": "model.layers.1.mlp.up_proj.weight",
    "llamagen": "layers.1.ffn_norm.weight", "janus": "model.generation_aligner.fc1.bias",
    "simplear": "model.layers.0.self_attn.k_proj.bias", "emu3": "text_model.model.layers.1.mlp.gate_proj.weight",
    "lumina2": "model.layers.0.self_attn.k_norm.weight", "x-omni": "model.layers.4.self_attn.q_proj.bias",
    "emu3.5": "model.layers.1.self_attn.q_norm.weight", "liquid": "model.layers.1.post_attention_layernorm.weight",
    "glm-image": "model.language_model.layers.1.post_mlp_layernorm.weight",
}  # fmt: skip


def change(name: str, folder, edit) -> None:
    """Rewrite the language model's tensors after `edit(tensors)`."""
    if name in PICKLED:
        content = torch.load(folder / PICKLED[name], weights_only=False)
        edit(content["model"])
        torch.save(content, folder / PICKLED[name])
        return
    folder = folder / "vision_language_encoder" if name == "glm-image" else folder
    tensors = stored(folder)
    edit(tensors)
    for path in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        path.unlink()
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", NEEDED)
def test_every_stored_tensor_is_used_and_one_that_misses_or_does_not_fit_is_refused_by_name(name, copied):
    folder = copied(name)
    before = logits(loaded(name, folder))
    change(name, folder, lambda tensors: tensors[NEEDED[name]].mul_(1.5))
    assert not torch.equal(before, logits(loaded(name, folder))), "the model computes with what the file holds"
    change(name, folder, lambda tensors: tensors.update({"model.surprise.weight": torch.zeros(2)}))
    assert "surprise" in refusal(name, folder).what
    change(name, folder, lambda tensors: tensors.pop("model.surprise.weight"))
    change(name, folder, lambda tensors: tensors.update({NEEDED[name]: tensors[NEEDED[name]][..., :3].clone()}))
    assert "shape" in refusal(name, folder).what
    change(name, folder, lambda tensors: tensors.pop(NEEDED[name]))
    error = refusal(name, folder)
    assert "lacks" in error.what and str(folder) in error.what and "specbench fetch " in error.try_this
    assert NEEDED[name].split(".")[-2] in error.what or "post_attention_layernorm" in error.what


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    session = model.begin(model.encode(["a cat"]), 2.0, 3)
    return session.forward(torch.tensor([[0, 1, 2]]), torch.arange(3)[None])


def test_tied_weights_that_differ_in_the_file_are_refused(copied):
    folder, tied = copied("simplear"), "model.embed_tokens.weight"
    change("simplear", folder, lambda tensors: tensors.update({"lm_head.weight": tensors[tied] + 1}))
    assert "ties lm_head.weight to" in refusal("simplear", folder).what


def test_the_other_published_vq_file_serves_too(copied):
    folder = copied("lumina")
    tensors = stored(folder / "Anole-7b-v0.1-vqvae-hf")
    codes = torch.arange(16)[None]
    expected = loaded("lumina", folder).render(codes)
    shutil.rmtree(folder / "Anole-7b-v0.1-vqvae-hf")
    content = {"state_dict": tensors | {"loss.perceptual_loss.lin0.weight": torch.zeros(1)}}
    torch.save(content, folder / "vqgan.ckpt")
    assert torch.equal(loaded("lumina", folder).render(codes), expected)


def test_an_incomplete_image_decoder_is_refused(copied):
    folder = copied("lumina")
    file = folder / "Anole-7b-v0.1-vqvae-hf" / "model.safetensors"
    tensors = stored(file.parent)
    del tensors["decoder.mid.attn_1.q.bias"]
    save_file(tensors, file)
    assert "decoder.mid.attn_1.q.bias" in refusal("lumina", folder).what


def half(content: bytes) -> bytes:
    return content[: len(content) // 2 // 7 * 7]


def swap(config: dict) -> None:
    words = config["vocabulary_map"]
    words["IMGIMGAZ"], words["IMGIMGBZ"] = words["IMGIMGBZ"], words["IMGIMGAZ"]


CONFIG, PARAMS, NONSENSE = "config.json", "models/7b/params.json", "not what it should be"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
DAMAGED = [
    ("anole", INDEX, "{}", INDEX), ("anole", INDEX, '{"weight_map": null}', INDEX),
    ("anole", "tokenizer.json", NONSENSE, "tokenizer.json"),
    ("anole", "model-00001-of-00002.safetensors", NONSENSE, "model-00001-of-00002"),
    ("llamagen", "t2i_XL_stage1_256.pt", NONSENSE, "t2i_XL_stage1_256.pt"),
    ("simplear", "decoder.jit", NONSENSE, "decoder.jit"), ("anole", CONFIG, "{}", CONFIG),
    ("anole", CONFIG, '{"hidden_size": 33}', CONFIG), ("emu3", CONFIG, "[]", CONFIG),
    ("emu3", CONFIG, '{"text_config": {"vocab_size": 4}}', CONFIG),
    ("simplear", CONFIG, '{"num_attention_heads": 0}', CONFIG),
    ("llamagen", "flan-t5-xl/config.json", '{"dense_act_fn": "none"}', CONFIG),
    ("janus", "tokenizer_config.json", '{"bos_token": null}', "tokenizer_config.json"),
    ("janus", "tokenizer_config.json", '{"bos_token": "<nowhere>", "pad_token": "<nowhere>"}', "has no token"),
    ("janus", "model.safetensors", POINTER, "Git LFS pointer.*model.safetensors|model.safetensors.*Git LFS pointer"),
    ("lumina", CONFIG, swap, "vocabulary_map"), ("emu3.5", CONFIG, {"rope_theta": None}, ""),
    (JANUS, CONFIG, lambda config: config["language_config"].update(num_hidden_layers=3), ""),
    (JANUS, CONFIG, lambda config: config["language_config"].update(num_hidden_layers=10**7), ""),
    (JANUS, CONFIG, {"language_config": 7}, ""),
    (JANUS, "pytorch_model-00001-of-00002.bin", half, "pytorch_model-00001-of-00002.bin"),
    (EMU3, CONFIG, {"hidden_size": 64}, ""), (EMU3, CONFIG, {"num_attention_heads": 0}, ""),
    (EMU3, "Emu3-VisionTokenizer/config.json", {"ch": 64}, ""),
    (EMU3, "model-00001-of-00002.safetensors", half, "model-00001-of-00002.safetensors"),
    (EMU3, "emu3.tiktoken", half, "emu3.tiktoken"),
    (ANOLE, PARAMS, lambda config: config["model"].update(n_layers=3), ""),
    (ANOLE, PARAMS, lambda config: config["model"].update(n_layers=10**7), ""),
    (ANOLE, PARAMS, lambda config: config["model"].pop("n_heads"), ""),
    (ANOLE, "tokenizer/text_tokenizer.json", {"model": 3}, ""),
    (ANOLE, "models/7b/consolidated.pth", half, "consolidated.pth"),
    (LLAMAGEN, "vq_ds16_t2i.pt", half, "vq_ds16_t2i.pt"),
    ("glm-image", "processor/chat_template.jinja", b"\xff", r"chat_template\.jinja is damaged"),
    ("glm-image", "processor/chat_template.jinja", "{%- for part in", r"chat_template\.jinja is damaged"),
    ("glm-image", "processor/chat_template.jinja", "{{ messages.none.none }}", r"chat_template\.jinja is damaged"),
    ("x-omni", CONFIG, {"use_sliding_window": True}, "sliding-window"),
    ("x-omni", CONFIG, {"mm_vocab_size": 40}, "has shape"),
    ("x-omni", CONFIG, {"image_vocab_size": 25}, "<MM-Token-24>"),
    ("x-omni", CONFIG, {"image_vocab_size": "x"}, r"config.json is damaged"),
    ("x-omni", CONFIG, {"mm_special_tokens": ["<SOM>"]}, "damaged: image_vocab_size 24, mm_special_tokens"),
    ("x-omni", CONFIG, {"mm_special_tokens": 5}, r"config.json is damaged"),
    ("x-omni", CONFIG, {"vocab_size": 260}, "<MM-Token-0>"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "file", "change", "problem"), DAMAGED)
def test_a_file_of_another_size_or_whose_content_makes_no_sense_is_one_line(kind, file, change, problem, copied):
    """`change`: the new content, or how the old one changes: entries or a function of its JSON, or `half` of it."""
    path = (folder := copied(kind)) / file
    if change is half:
        change = half(path.read_bytes())
    elif not isinstance(change, str | bytes):
        config = json.loads(path.read_text())
        config.update(change) if isinstance(change, dict) else change(config)
        change = json.dumps(config)
    path.write_bytes(change if isinstance(change, bytes) else change.encode())
    assert re.search(problem, refusal(EVERY[kind][0], folder).what)


def test_a_checkpoint_of_another_image_vocabulary_is_refused_at_full_size(written):
    for name in ("anole", "llamagen", "janus", "emu3"):
        model = INFO[name].configured(ModelChoice(weights=str(written(name))))
        refused("24 image tokens", load_model, model, "cpu", "float32")


def changed(name, folder, **settings):
    """A checkpoint whose language model's configuration has other settings."""
    write(name, folder)
    for path in folder.rglob("config.json"):
        content = json.loads(path.read_text())
        for part in (content, content.get("text_config"), content.get("language_config")):
            if isinstance(part, dict) and "num_hidden_layers" in part:
                part.update(settings)
        path.write_text(json.dumps(content))
    return loaded(name, folder)


@pytest.mark.parametrize(("name", "settings"), [
    ("simplear", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}), ("anole", {"rms_norm_eps": 0.3}),
    ("liquid", {"rms_norm_eps": 0.3}),
])  # fmt: skip
def test_what_a_configuration_switches_on_is_in_the_distribution(name, settings, tmp_path):
    official, other = (changed(name, tmp_path / part, **more) for part, more in (("a", {}), ("b", settings)))
    tokens = torch.arange(official.layout.length) % official.layout.v_image
    logits = [model.own_logits(model.encode(["a cup"]).take([0]), tokens) for model in (official, other)]
    assert (logits[0] - logits[1]).abs().max() > 0.05  # loading compared each with its own forward


@pytest.mark.parametrize(("name", "settings"), [
    ("simplear", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    ("lumina", {"attn_implementation": "eager"}), ("anole", {"head_dim": 32}), ("emu3", {"attention_bias": True}),
])  # fmt: skip
def test_what_a_family_does_not_apply_is_one_line(name, settings, tmp_path):
    assert refused("", changed, name, tmp_path, **settings).exit_code == 2


def test_a_family_that_forgets_something_after_its_layers_is_refused(tmp_path, monkeypatch):
    write("janus", tmp_path)
    true = FamilyModel.own_logits
    monkeypatch.setattr(FamilyModel, "own_logits", lambda *given: 0.5 * true(*given))
    refused("of single tokens differs from the model's own forward by", loaded, "janus", tmp_path)


def test_weights_of_a_narrower_format_are_no_rounding_of_a_wider_one():
    model = load_model("shapes")  # float32 values of float16 files
    reference = forward_probe.own_forward(model, model.encode(["a red circle"]))
    assert reference.rounding.largest < 0.005 and forward_probe.probe(model, reference).gap < 0.005
