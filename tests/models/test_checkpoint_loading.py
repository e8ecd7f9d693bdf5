"""Checkpoint loading: every parameter comes from a file, every stored tensor is used or listed as unused; a removed,
added or reshaped tensor is rejected in one line that names it."""

import json
import shutil

import pytest
import torch
from checkpoints import ALIKE, INFO, WRITERS, configured, loaded, write
from checkpoints.parts import stored
from safetensors.torch import save_file

from specbench.errors import SpecbenchError
from specbench.models.catalog import check_model, load_model
from specbench.models.checkpoint_files import INDEX
from specbench.models.facts import ModelChoice

FAMILIES = (
    "lumina",
    "anole",
    "llamagen",
    "janus",
    "simplear",
    "emu3",
    "lumina2",
    "liquid",
    "glm-image",
    "emu3.5",
    "x-omni",
)
PICKLED = {"llamagen": "t2i_XL_stage1_256.pt"}
NEEDED = {
    "lumina": "model.layers.1.self_attn.q_norm.bias",
    "anole": "model.layers.1.mlp.up_proj.weight",
    "llamagen": "layers.1.ffn_norm.weight",
    "janus": "model.generation_aligner.fc1.bias",
    "simplear": "model.layers.0.self_attn.k_proj.bias",
    "emu3": "text_model.model.layers.1.mlp.gate_proj.weight",
    "lumina2": "model.layers.0.self_attn.k_norm.weight",
    "x-omni": "model.layers.4.self_attn.q_proj.bias",
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


def refusal(name: str, folder) -> SpecbenchError:
    with pytest.raises(SpecbenchError) as raised:
        loaded(name, folder)
    assert "\n" not in raised.value.what + raised.value.try_this
    if raised.value.exit_code == 2:
        with pytest.raises(SpecbenchError) as checked:
            check_model(configured(name, folder))
        assert checked.value.what == raised.value.what
    return raised.value


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stored_tensor_is_used_and_one_that_misses_or_does_not_fit_is_refused_by_name(name, folder_of):
    folder = folder_of(name)
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


def test_tied_weights_that_differ_in_the_file_are_refused(folder_of):
    folder = folder_of("simplear")

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    change("simplear", folder, untie)
    assert "lm_head.weight differs" in refusal("simplear", folder).what


def test_the_other_published_vq_file_serves_too(folder_of):
    folder = folder_of("lumina")
    tensors = stored(folder / "Anole-7b-v0.1-vqvae-hf")
    codes = torch.arange(16)[None]
    expected = loaded("lumina", folder).render(codes)
    shutil.rmtree(folder / "Anole-7b-v0.1-vqvae-hf")
    content = {"state_dict": tensors | {"loss.perceptual_loss.lin0.weight": torch.zeros(1)}}
    torch.save(content, folder / "vqgan.ckpt")
    assert torch.equal(loaded("lumina", folder).render(codes), expected)


def test_an_incomplete_image_decoder_is_refused(folder_of):
    folder = folder_of("lumina")
    file = folder / "Anole-7b-v0.1-vqvae-hf" / "model.safetensors"
    tensors = stored(file.parent)
    del tensors["decoder.mid.attn_1.q.bias"]
    save_file(tensors, file)
    assert "decoder.mid.attn_1.q.bias" in refusal("lumina", folder).what


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("anole", INDEX, "{}"),
        ("anole", "tokenizer.json", "not what it should be"),
        ("anole", "model-00001-of-00002.safetensors", "not what it should be"),
        ("llamagen", "t2i_XL_stage1_256.pt", "not what it should be"),
        ("simplear", "decoder.jit", "not what it should be"),
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


@pytest.mark.parametrize("name", sorted(set(WRITERS) - set(ALIKE)))
def test_an_empty_folder_is_refused_and_a_whole_checkpoint_passes_the_check_without_being_loaded(name, tmp_path):
    with pytest.raises(SpecbenchError, match="no such folder"):
        load_model(INFO[name].configured(ModelChoice(weights=str(tmp_path / "absent"))), "cpu", "float32")
    error = refusal(name, tmp_path)
    assert str(tmp_path) in error.what and "specbench fetch" in error.try_this
    write(name, tmp_path)
    check_model(configured(name, tmp_path))
