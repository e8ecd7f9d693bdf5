"""Checkpoint loading: every parameter comes from a file, every stored tensor is used or listed as unused; a removed,
added or reshaped tensor is rejected in one line that names it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import WRITERS, write
from checkpoints.parts import stored
from safetensors.torch import save_file

from specbench.errors import SpecbenchError
from specbench.models.catalog import check_model, load_model
from specbench.models.checkpoint_files import INDEX
from specbench.models.facts import ModelChoice
from specbench.models.families.model_specs import MODELS

INFO = {info.name: info for info in MODELS}
FAMILIES = ("lumina", "anole", "llamagen", "janus", "simplear", "emu3", "lumina2", "liquid", "glm-image", "emu3.5")
PICKLED = {"llamagen": "t2i_XL_stage1_256.pt"}
NEEDED = {
    "lumina": "model.layers.1.self_attn.q_norm.bias",
    "anole": "model.layers.1.mlp.up_proj.weight",
    "llamagen": "layers.1.ffn_norm.weight",
    "janus": "model.generation_aligner.fc1.bias",
    "simplear": "model.layers.0.self_attn.k_proj.bias",
    "emu3": "text_model.model.layers.1.mlp.gate_proj.weight",
    "lumina2": "model.layers.0.self_attn.k_norm.weight",
    "emu3.5": "model.layers.1.self_attn.q_norm.weight",
    "liquid": "model.layers.1.post_attention_layernorm.weight",
    "glm-image": "model.language_model.layers.1.post_mlp_layernorm.weight",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folders = {}
    for name in FAMILIES:
        folders[name] = tmp_path_factory.mktemp(name)
        write(name, folders[name])
    return folders


@pytest.fixture
def folder_of(written, tmp_path):
    def copy(name: str):
        folder = tmp_path / name
        shutil.copytree(written[name], folder)
        return folder

    return copy


def load(name: str, folder):
    return load_model(INFO[name].configured(ModelChoice(weights=str(folder), tiny=True)), "cpu", "float32")


def change(name: str, folder, edit) -> None:
    """Rewrite the language model's tensors after `edit(tensors)`."""
    if name in PICKLED:
        held = torch.load(folder / PICKLED[name], weights_only=False)
        edit(held["model"])
        torch.save(held, folder / PICKLED[name])
        return
    folder = folder / "vision_language_encoder" if name == "glm-image" else folder
    tensors = stored(folder)
    edit(tensors)
    for path in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        path.unlink()
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / "model.safetensors")


def refusal(name: str, folder) -> SpecbenchError:
    with pytest.raises(SpecbenchError) as raised:
        load(name, folder)
    assert "\n" not in raised.value.what + raised.value.try_this
    if raised.value.exit_code == 2:
        with pytest.raises(SpecbenchError) as checked:
            check_model(INFO[name].configured(ModelChoice(weights=str(folder), tiny=True)))
        assert checked.value.what == raised.value.what
    return raised.value


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stored_tensor_is_used_and_one_that_misses_or_does_not_fit_is_refused_by_name(name, folder_of):
    folder = folder_of(name)
    before = logits(load(name, folder))
    change(name, folder, lambda tensors: tensors[NEEDED[name]].mul_(1.5))
    assert not torch.equal(before, logits(load(name, folder))), "the model computes with what the file holds"
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


def test_tied_weights_that_differ_in_the_file_are_refused(folder_of):
    folder = folder_of("simplear")

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    change("simplear", folder, untie)
    assert "lm_head.weight differs" in refusal("simplear", folder).what


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("lumina", "Anole-7b-v0.1-vqvae-hf"),
        ("lumina", "config.json"),
        ("lumina", "model-00002-of-00002.safetensors"),
        ("llamagen", "vq_ds16_t2i.pt"),
        ("llamagen", "flan-t5-xl/tokenizer.json"),
        ("simplear", "decoder.jit"),
        ("janus", "tokenizer_config.json"),
    ],
)
def test_a_missing_file_is_named_with_the_command_that_gets_it(name, missing, folder_of, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = folder_of(name)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    error = refusal(name, folder)
    assert error.exit_code == 5
    assert error.try_this.startswith("specbench fetch ") and len(str(error)) < 200 + len(str(tmp_path))
    assert missing.split("/")[-1] in error.what + error.try_this


def test_the_other_published_vq_file_serves_too(folder_of):
    folder = folder_of("lumina")
    tensors = stored(folder / "Anole-7b-v0.1-vqvae-hf")
    codes = torch.arange(16)[None]
    expected = load("lumina", folder).render(codes)
    shutil.rmtree(folder / "Anole-7b-v0.1-vqvae-hf")
    held = {"state_dict": tensors | {"loss.perceptual_loss.lin0.weight": torch.zeros(1)}}
    torch.save(held, folder / "vqgan.ckpt")
    assert torch.equal(load("lumina", folder).render(codes), expected)


def test_an_incomplete_image_decoder_is_refused(folder_of):
    folder = folder_of("lumina")
    file = folder / "Anole-7b-v0.1-vqvae-hf" / "model.safetensors"
    tensors = stored(file.parent)
    del tensors["decoder.mid.attn_1.q.bias"]
    save_file(tensors, file)
    assert "decoder.mid.attn_1.q.bias" in refusal("lumina", folder).what


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("anole", "model-00001-of-00002.safetensors"),
        ("anole", "tokenizer.json"),
        ("llamagen", "t2i_XL_stage1_256.pt"),
        ("simplear", "decoder.jit"),
    ],
)
def test_a_damaged_file_is_named(name, file, folder_of):
    folder = folder_of(name)
    (folder / file).write_bytes(b"not what it should be")
    assert file in refusal(name, folder).what


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("anole", INDEX, "{}"),
        ("anole", INDEX, '{"weight_map": null}'),
        ("anole", "config.json", "{}"),
        ("anole", "config.json", '{"hidden_size": 33}'),
        ("emu3", "config.json", "[]"),
        ("emu3", "config.json", '{"text_config": {"vocab_size": 4}}'),
        ("simplear", "config.json", '{"num_attention_heads": 0}'),
        ("llamagen", "flan-t5-xl/config.json", '{"dense_act_fn": "none"}'),
        ("janus", "tokenizer_config.json", '{"bos_token": null}'),
        ("janus", "tokenizer_config.json", '{"bos_token": "<nowhere>", "pad_token": "<nowhere>"}'),
    ],
)
def test_a_file_whose_content_makes_no_sense_is_one_line(name, file, content, folder_of):
    folder = folder_of(name)
    (folder / file).write_text(content)
    error = refusal(name, folder)
    assert file.split("/")[-1] in error.what or "tokenizer has no token" in error.what


def test_image_tokens_out_of_order_are_refused(folder_of):
    folder = folder_of("lumina")
    config = json.loads((folder / "config.json").read_text())
    words = config["vocabulary_map"]
    words["IMGIMGAZ"], words["IMGIMGBZ"] = words["IMGIMGBZ"], words["IMGIMGAZ"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "vocabulary_map" in refusal("lumina", folder).what


def test_a_checkpoint_of_another_image_vocabulary_is_refused_at_full_size(written):
    for name in ("anole", "llamagen", "janus", "emu3"):
        with pytest.raises(SpecbenchError, match="24 image tokens"):
            load_model(INFO[name].configured(ModelChoice(weights=str(written[name]))), "cpu", "float32")


@pytest.mark.parametrize("name", WRITERS)
def test_an_empty_folder_is_refused_and_a_whole_checkpoint_passes_the_check_without_being_loaded(name, tmp_path):
    with pytest.raises(SpecbenchError, match="no such folder"):
        load_model(INFO[name].configured(ModelChoice(weights=str(tmp_path / "absent"))), "cpu", "float32")
    error = refusal(name, tmp_path)
    assert str(tmp_path) in error.what and "specbench fetch" in error.try_this
    write(name, tmp_path)
    check_model(INFO[name].configured(ModelChoice(weights=str(tmp_path), tiny=True)))
