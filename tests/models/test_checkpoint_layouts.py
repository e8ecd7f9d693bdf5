"""Folders in the authors' layouts are recognised; of another family, half downloaded or damaged they are one line."""

import json
import shutil

import pytest
import torch
from checkpoints import AUTHORS, INFO, WRITERS, configured, llamagen
from checkpoints.parts import in_pickled_shards, stored

from specbench.errors import SpecbenchError
from specbench.models import checkpoint_layouts
from specbench.models.catalog import check_model, load_model
from specbench.models.checkpoint_files import INDEX
from specbench.models.checkpoint_layouts import LAYOUTS, recognise
from specbench.models.facts import ModelChoice
from specbench.models.hub_downloads import REVISIONS

KINDS = {
    "lumina": ("lumina", WRITERS["lumina"]),
    "anole": ("anole", WRITERS["anole"]),
    "anole-meta": ("anole", AUTHORS["anole"]),
    "llamagen": ("llamagen", AUTHORS["llamagen"]),
    "janus": ("janus", WRITERS["janus"]),
    "janus-deepseek": ("janus", AUTHORS["janus-7b"]),
    "simplear": ("simplear", WRITERS["simplear"]),
    "emu3": ("emu3", WRITERS["emu3"]),
    "emu3-baai": ("emu3", AUTHORS["emu3"]),
    "lumina2": ("lumina2", WRITERS["lumina2"]),
    "liquid": ("liquid", WRITERS["liquid"]),
    "tar": ("tar-7b", WRITERS["tar-7b"]),
    "tar-dtok": ("tar-dtok-256", WRITERS["tar-dtok-256"]),
    "emu3.5": ("emu3.5", WRITERS["emu3.5"]),
    "glm": ("glm-image", WRITERS["glm-image"]),
    "x-omni": ("x-omni", WRITERS["x-omni"]),
    "llamagen-c2i": ("llamagen-c2i-b", lambda folder: llamagen.write_by_class(folder, "c2i_B_384.pt")),
}
"""Layout to the model and the writer of a small checkpoint."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Layout to a folder, each written once."""
    folders = {}

    def get(layout: str):
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp(layout)
            KINDS[layout][1](folders[layout])
        return folders[layout]

    return get


@pytest.fixture
def copied(written, tmp_path):
    def copy(layout: str):
        return shutil.copytree(written(layout), tmp_path / layout)

    return copy


def refusal(layout: str, folder, model: str | None = None) -> SpecbenchError:
    """What checking and loading a folder say, which must be the same single line."""
    info = configured(model or KINDS[layout][0], folder)
    with pytest.raises(SpecbenchError) as checked:
        check_model(info)
    with pytest.raises(SpecbenchError) as loaded:
        load_model(info, "cpu", "float32")
    assert checked.value.what == loaded.value.what
    assert "\n" not in loaded.value.what + loaded.value.try_this and loaded.value.exit_code in (2, 5)
    return loaded.value


@pytest.mark.parametrize("layout", KINDS)
def test_every_layout_is_recognised_in_any_order(layout, written, monkeypatch):
    assert recognise(written(layout)) == layout
    monkeypatch.setattr(checkpoint_layouts, "LAYOUTS", dict(reversed(LAYOUTS.items())))
    assert recognise(written(layout)) == layout
    assert set(LAYOUTS) == set(KINDS)


@pytest.mark.parametrize("layout", KINDS)
def test_a_folder_of_another_family_says_which_model_it_is(layout, written):
    model = "simplear" if layout != "simplear" else "janus"
    error = refusal(layout, written(layout), model)
    assert error.exit_code == 2 and LAYOUTS[layout].what in error.what
    assert f"--model {LAYOUTS[layout].models}" in error.try_this


def test_lumina_and_anole_are_told_apart(written):
    assert "not 'lumina'" in refusal("anole", written("anole"), "lumina").what.replace("+tiny", "")
    assert "not 'anole'" in refusal("lumina", written("lumina"), "anole").what.replace("+tiny", "")


@pytest.mark.parametrize(
    ("files", "problem", "fix"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "is a LoRA adapter", "merge_and_unload"),
        (("config.json", "model-Q4_K_M.gguf"), "holds GGUF", "safetensors"),
        (("params.json", "consolidated.00.pth"), "Meta's layout", "convert"),
    ],
)
def test_what_other_programs_keep_is_refused_as_what_it_is(files, problem, fix, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    error = refusal("janus", tmp_path)
    assert error.exit_code == 2 and problem in error.what and fix in error.try_this
    with pytest.raises(SpecbenchError, match="is a file"):
        INFO["janus"].configured(ModelChoice(weights=str(tmp_path / files[-1])))


def test_a_folder_of_the_hubs_cache_is_read_at_its_snapshot(written, tmp_path):
    cached = tmp_path / "models--me--mine"
    shutil.copytree(written("janus"), cached / "snapshots" / "abc")
    (cached / "snapshots" / "older").mkdir()
    info = configured("janus", cached)
    with pytest.raises(SpecbenchError, match="needs exactly one snapshot"):
        info.files()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert info.file_facts("")["commits"] == {"me/mine": "abc"}


def test_the_user_is_believed_where_two_families_look_alike(copied):
    """Tar's configuration without its own entry is that of any Qwen2, and its image decoder is LlamaGen's."""
    config = json.loads((path := copied("tar") / "config.json").read_text())
    del config["num_scale_tokens"]
    path.write_text(json.dumps(config))
    assert recognise(path.parent) == "llamagen"
    info = configured("tar-7b", path.parent)
    assert path in info.files()
    (path.parent / "vq_ds16_t2i.pt").unlink()
    assert recognise(path.parent) == "simplear"
    with pytest.raises(SpecbenchError, match="the image decoder"):
        info.files()


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("janus-deepseek", "pytorch_model-00002-of-00002.bin"),
        ("emu3-baai", INDEX),
        ("emu3-baai", "emu3_vision_tokens.txt"),
        ("emu3-baai", "Emu3-VisionTokenizer/model.safetensors"),
        ("anole-meta", "models/7b/params.json"),
        ("anole-meta", "models/7b/consolidated.pth"),
        ("anole-meta", "tokenizer/vqgan.ckpt"),
        ("llamagen", "t5-ckpt/flan-t5-xl/config.json"),
        ("lumina", "Anole-7b-v0.1-vqvae-hf"),
        ("lumina", "config.json"),
        ("lumina", "model-00002-of-00002.safetensors"),
        ("simplear", "decoder.jit"),
        ("janus", "tokenizer_config.json"),
    ],
)
def test_a_half_downloaded_checkpoint_names_what_is_missing(layout, file, copied, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = copied(layout)
    shutil.rmtree(folder / file) if (folder / file).is_dir() else (folder / file).unlink()
    error = refusal(layout, folder)
    named = file.rpartition("/")[2]
    assert error.exit_code == 5 and "specbench fetch" in error.try_this
    # Without its mark a folder is of no known layout, and the official one is asked for.
    text = error.what + error.try_this
    assert named in text or (named == "params.json" and "config.json" in text) or "*" in error.what


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("emu3-baai", "model-00001-of-00002.safetensors"),
        ("emu3-baai", "emu3.tiktoken"),
        ("janus-deepseek", "pytorch_model-00001-of-00002.bin"),
        ("anole-meta", "models/7b/consolidated.pth"),
        ("llamagen", "vq_ds16_t2i.pt"),
    ],
)
def test_a_truncated_file_is_named(layout, file, copied):
    folder = copied(layout)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2 // 7 * 7])
    error = refusal(layout, folder)
    assert file.rpartition("/")[2] in error.what


@pytest.mark.parametrize("layout", sorted(set(KINDS) - {"anole-meta", "janus-deepseek", "llamagen-c2i", "tar-dtok"}))
def test_a_file_cut_off_after_its_index_is_named(layout, copied):
    """The index of a safetensors file, its header, is whole and names tensors that are not there any more."""
    folder = copied(layout)
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    for path in files:
        whole = path.read_bytes()
        data = 8 + int.from_bytes(whole[:8], "little")
        path.write_bytes(whole[: data + (len(whole) - data) // 2])
        assert path.name in refusal(layout, folder).what
        path.write_bytes(whole)


def test_a_git_lfs_pointer_is_called_so(copied):
    folder = copied("janus")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
    (folder / "model.safetensors").write_text(pointer)
    error = refusal("janus", folder)
    assert error.exit_code == 5 and "Git LFS pointer" in error.what and "model.safetensors" in error.what


def test_a_browser_download_in_progress_is_no_checkpoint(copied):
    folder = copied("janus")
    (folder / "model.safetensors").rename(folder / "model.safetensors.crdownload")
    error = refusal("janus", folder)
    assert error.exit_code == 5 and "has no *.safetensors*" in error.what


@pytest.mark.parametrize(
    ("layout", "file", "change"),
    [
        ("janus-deepseek", "config.json", lambda config: config["language_config"].update(num_hidden_layers=3)),
        ("janus-deepseek", "config.json", lambda config: config["language_config"].update(num_hidden_layers=10**7)),
        ("anole-meta", "models/7b/params.json", lambda config: config["model"].update(n_layers=10**7)),
        ("janus-deepseek", "config.json", lambda config: config.update(language_config=7)),
        ("emu3-baai", "config.json", lambda config: config.update(hidden_size=64)),
        ("emu3-baai", "config.json", lambda config: config.update(num_attention_heads=0)),
        ("emu3.5", "config.json", lambda config: config.update(rope_theta=None)),
        ("emu3-baai", "Emu3-VisionTokenizer/config.json", lambda config: config.update(ch=64)),
        ("anole-meta", "models/7b/params.json", lambda config: config["model"].update(n_layers=3)),
        ("anole-meta", "models/7b/params.json", lambda config: config["model"].pop("n_heads")),
        ("anole-meta", "tokenizer/text_tokenizer.json", lambda config: config.update(model=3)),
    ],
)
def test_a_configuration_of_another_size_or_without_sense_is_one_line(layout, file, change, copied):
    folder = copied(layout)
    config = json.loads((folder / file).read_text())
    change(config)
    (folder / file).write_text(json.dumps(config))
    refusal(layout, folder)


def test_several_model_parallel_shards_in_metas_layout_are_refused(copied):
    folder = copied("anole-meta")
    models = folder / "models" / "7b"
    (models / "consolidated.pth").rename(models / "consolidated.00.pth")
    shutil.copy(models / "consolidated.00.pth", models / "consolidated.01.pth")
    assert refusal("anole-meta", folder).exit_code == 2


@pytest.mark.parametrize("layout", ["janus-deepseek", "anole-meta"])
def test_pickles_that_would_run_code_are_refused(layout, copied):
    folder = copied(layout)
    path = next(folder.rglob("*.pth" if layout == "anole-meta" else "*.bin"))
    torch.save({"a": Payload()}, path)
    assert path.name in refusal(layout, folder).what and not Payload.ran


class Payload:
    ran = False

    def __reduce__(self):
        return (setattr, (Payload, "ran", True))


def test_companions_are_found_in_a_folder_beside_the_weights(copied):
    folder = copied("emu3-baai")
    shutil.move(folder / "Emu3-VisionTokenizer", folder.parent / "Emu3-VisionTokenizer")
    info = configured("emu3", folder)
    assert info.ready
    check_model(info)


def test_anole_in_metas_layout_may_lie_flat(copied):
    folder = copied("anole-meta")
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        shutil.move(path, folder / path.name)
    check_model(configured("anole", folder))


def test_safetensors_of_the_authors_names_serve_as_well(copied):
    from safetensors.torch import save_file

    folder = copied("janus-deepseek")
    tensors = {}
    for path in folder.glob("*.bin"):
        tensors |= torch.load(path, weights_only=True)
        path.unlink()
    (folder / "pytorch_model.bin.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    check_model(configured("janus", folder))


def test_the_authors_hub_ids_take_the_authors_layout(copied, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for repo, layout in (("deepseek-ai/Janus-Pro-7B", "janus-deepseek"), ("me/tuned", "janus-deepseek")):
        home = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        commit = REVISIONS.get(repo, "1" * 40)
        folder = tmp_path / layout if (tmp_path / layout).exists() else copied(layout)
        shutil.copytree(folder, home / "snapshots" / commit)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(commit)
        check_model(configured("janus-7b", repo))
    error = refusal("janus", "deepseek-ai/Janus-Pro-1B")
    assert error.exit_code == 5 and error.try_this == "specbench fetch deepseek-ai/Janus-Pro-1B"


def test_pickled_shards_serve_where_safetensors_are_absent(copied):
    folder = copied("llamagen") / "t5-ckpt" / "flan-t5-xl"
    tensors = stored(folder)
    (folder / "model.safetensors").unlink()
    in_pickled_shards(folder, tensors)
    check_model(configured("llamagen", folder.parents[1]))
