"""Folders in the authors' layouts are recognised; of another family, half downloaded or damaged they are one line."""

import json
import shutil

import pytest
import torch
from checkpoints import EVERY, INFO, configured, refusal
from checkpoints.parts import in_two_shards, stored
from refusals import refused
from safetensors.torch import save_file

from specbench.models import checkpoint_layouts
from specbench.models.catalog import check_model
from specbench.models.checkpoint_files import INDEX
from specbench.models.checkpoint_layouts import LAYOUTS, recognise
from specbench.models.facts import ModelChoice
from specbench.models.hub_downloads import REVISIONS

JANUS, EMU3, ANOLE, LLAMAGEN = (f"{name} by its authors" for name in ("janus-7b", "emu3", "anole", "llamagen"))
KIND_OF = {
    "janus-deepseek": JANUS, "emu3-baai": EMU3, "anole-meta": ANOLE, "tar": "tar-7b", "tar-dtok": "tar-dtok-256",
    "glm": "glm-image", "llamagen-c2i": "llamagen-c2i-b",
}  # fmt: skip
"""Kind of a small checkpoint by layout, unless both have one name."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognised_in_any_order(layout, written, monkeypatch):
    folder = written(KIND_OF.get(layout, layout))
    assert recognise(folder) == layout
    monkeypatch.setattr(checkpoint_layouts, "LAYOUTS", dict(reversed(LAYOUTS.items())))
    assert recognise(folder) == layout


ASKED = {"simplear": "janus", "lumina": "anole", "anole": "lumina"}
"""Model that a folder in a layout is taken for, unless it is SimpleAR; Lumina and Anole share a network."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_another_family_says_which_model_it_is(layout, written):
    asked = ASKED.get(layout, "simplear")
    error = refusal(asked, written(KIND_OF.get(layout, layout)))
    assert error.exit_code == 2 and LAYOUTS[layout].what in error.what and f"not '{asked}+tiny'" in error.what
    assert f"--model {LAYOUTS[layout].models}" in error.try_this


@pytest.mark.parametrize(("files", "problem", "fix"), [
    (("adapter_config.json", "adapter_model.safetensors"), "is a LoRA adapter", "merge_and_unload"),
    (("config.json", "model-Q4_K_M.gguf"), "contains GGUF", "safetensors"),
    (("params.json", "consolidated.00.pth"), "Meta's layout", "convert"),
])  # fmt: skip
def test_what_other_programs_keep_is_refused_as_what_it_is(files, problem, fix, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    error = refusal("janus", tmp_path)
    assert error.exit_code == 2 and problem in error.what and fix in error.try_this
    refused("is a file", INFO["janus"].configured, ModelChoice(weights=str(tmp_path / files[-1])))


def test_a_folder_of_the_hubs_cache_is_read_at_its_snapshot(written, tmp_path):
    cached = tmp_path / "models--me--mine"
    shutil.copytree(written("janus"), cached / "snapshots" / "abc")
    (cached / "snapshots" / "older").mkdir()
    info = configured("janus", cached)
    refused("has no snapshot, or several", info.files)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert info.file_facts("")["commits"] == {"me/mine": "abc"}


def test_the_user_is_believed_if_two_families_look_alike(copied):
    """Tar's configuration without its own entry looks like any Qwen2, and its image decoder is LlamaGen's."""
    config = json.loads((path := copied("tar-7b") / "config.json").read_text())
    del config["num_scale_tokens"]
    path.write_text(json.dumps(config))
    assert recognise(path.parent) == "llamagen"
    info = configured("tar-7b", path.parent)
    assert path in info.files()
    (path.parent / "vq_ds16_t2i.pt").unlink()
    assert recognise(path.parent) == "simplear"
    refused("the image decoder", info.files)


@pytest.mark.parametrize(("kind", "file"), [
    (JANUS, "pytorch_model-00002-of-00002.bin"), (EMU3, INDEX), (EMU3, "emu3_vision_tokens.txt"),
    (EMU3, "Emu3-VisionTokenizer/model.safetensors"), (ANOLE, "models/7b/params.json"),
    (ANOLE, "models/7b/consolidated.pth"), (ANOLE, "tokenizer/vqgan.ckpt"),
    (LLAMAGEN, "t5-ckpt/flan-t5-xl/config.json"), ("lumina", "Anole-7b-v0.1-vqvae-hf"), ("lumina", "config.json"),
    ("lumina", "model-00002-of-00002.safetensors"), ("simplear", "decoder.jit"), ("janus", "tokenizer_config.json"),
])  # fmt: skip
def test_a_half_downloaded_checkpoint_names_what_is_missing(kind, file, copied, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = copied(kind)
    shutil.rmtree(folder / file) if (folder / file).is_dir() else (folder / file).unlink()
    error = refusal(EVERY[kind][0], folder)
    named = file.rpartition("/")[2]
    assert error.exit_code == 5 and "specbench fetch" in error.try_this
    # Without its mark a folder is of no known layout, and the official one is asked for.
    text = error.what + error.try_this
    assert named in text or (named == "params.json" and "config.json" in text) or "*" in error.what


@pytest.mark.parametrize(
    "kind",
    ["lumina", "anole", "janus", "simplear", "emu3", "lumina2", "liquid", "tar-7b", "emu3.5", "glm-image", "x-omni",
     EMU3, LLAMAGEN],
)  # fmt: skip
def test_a_file_cut_off_after_its_index_is_named(kind, copied):
    """The index of a safetensors file, its header, is whole and names tensors that are not there any more."""
    folder = copied(kind)
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    for path in files:
        whole = path.read_bytes()
        data = 8 + int.from_bytes(whole[:8], "little")
        path.write_bytes(whole[: data + (len(whole) - data) // 2])
        assert path.name in refusal(EVERY[kind][0], folder).what
        path.write_bytes(whole)


@pytest.mark.parametrize(("kind", "file", "names", "code", "problem"), [
    ("janus", "model.safetensors", ["model.safetensors.crdownload"], 5, "has no *.safetensors*"),  # being downloaded
    (ANOLE, "models/7b/consolidated.pth", ["consolidated.00.pth", "consolidated.01.pth"], 2, ""),  # model-parallel
])  # fmt: skip
def test_weights_under_names_that_no_layout_has_are_refused(kind, file, names, code, problem, copied):
    folder = copied(kind)
    for name in names:
        shutil.copy(folder / file, (folder / file).with_name(name))
    (folder / file).unlink()
    error = refusal(EVERY[kind][0], folder)
    assert error.exit_code == code and problem in error.what


@pytest.mark.parametrize("kind", [JANUS, ANOLE])
def test_pickles_that_would_run_code_are_refused(kind, copied):
    folder = copied(kind)
    path = next(folder.rglob("*.pth" if kind == ANOLE else "*.bin"))
    torch.save({"a": Payload()}, path)
    assert path.name in refusal(EVERY[kind][0], folder).what and not Payload.ran


class Payload:
    ran = False

    def __reduce__(self):
        return (setattr, (Payload, "ran", True))


def companions_next_to_the_weights(folder):
    shutil.move(folder / "Emu3-VisionTokenizer", folder.parent / "Emu3-VisionTokenizer")


def flat(folder):
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        shutil.move(path, folder / path.name)


def safetensors_of_the_authors_names(folder):
    tensors = {}
    for path in folder.glob("*.bin"):
        tensors |= torch.load(path, weights_only=True)
        path.unlink()
    (folder / "pytorch_model.bin.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")


def pickled_shards_alone(folder):
    text = folder / "t5-ckpt" / "flan-t5-xl"
    in_two_shards(text, stored(text), pickled=True)


@pytest.mark.parametrize(("kind", "change"), [
    (EMU3, companions_next_to_the_weights), (ANOLE, flat), (JANUS, safetensors_of_the_authors_names),
    (LLAMAGEN, pickled_shards_alone),
])  # fmt: skip
def test_the_authors_layouts_may_be_changed(kind, change, copied):
    change(folder := copied(kind))
    info = configured(EVERY[kind][0], folder)
    assert info.ready
    check_model(info)


def test_the_authors_hub_ids_take_the_authors_layout(written, hub_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for repo in ("deepseek-ai/Janus-Pro-7B", "me/tuned"):
        hub_cache(repo, REVISIONS.get(repo, "1" * 40), written(JANUS))
        check_model(configured("janus-7b", repo))
    error = refusal("janus", "deepseek-ai/Janus-Pro-1B")
    assert error.exit_code == 5 and error.try_this == "specbench fetch deepseek-ai/Janus-Pro-1B"
