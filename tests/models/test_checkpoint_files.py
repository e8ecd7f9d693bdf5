"""WantedFiles files are found in a folder or in the hub cache, at the requested revision; errors are one line."""

import json
import shutil

import pytest
import torch
from checkpoints import INFO, write

from specbench.errors import SpecbenchError
from specbench.models.catalog import load_model
from specbench.models.checkpoint_files import Source, WantedFiles, read_json
from specbench.models.facts import ModelChoice

SOURCE = Source("the model", "owner/name", ("config.json",), "MIT")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache; `put(repo, commit, files, refs)` fills it in the hub's own layout."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(repo: str, commit: str, source, refs=("main",)):
        home = folder / f"models--{repo.replace('/', '--')}"
        snapshot = home / "snapshots" / commit
        shutil.copytree(source, snapshot)
        (home / "refs").mkdir(exist_ok=True)
        for ref in refs:
            (home / "refs" / ref).write_text(commit)
        return snapshot

    return put


def test_a_model_in_the_hub_cache_is_found_and_loaded(tmp_path, cache):
    folder = tmp_path / "made"
    folder.mkdir()
    write("simplear", folder)
    info = INFO["simplear"].configured(ModelChoice(tiny=True))
    assert not info.ready
    cache("Daniel0724/SimpleAR-0.5B-RL", "a" * 40, folder)
    assert not info.ready, "the image decoder is still missing"
    cache("nvidia/Cosmos-1.0-Tokenizer-DV8x16x16", "b" * 40, folder)
    assert info.ready
    model = load_model(info, "cpu", "float32")
    assert model.weights_sha256 == info.weights_sha256()
    assert model.name == "simplear+tiny"


def test_the_revision_chooses_the_files(tmp_path, cache):
    for commit, refs in (("1" * 40, ("main",)), ("2" * 40, ("better",))):
        made = tmp_path / commit
        made.mkdir()
        (made / "config.json").write_text(commit)
        cache("owner/name", commit, made, refs)
    texts = [
        WantedFiles(SOURCE, None, revision).find().named("config.json").read_text()
        for revision in (None, "better", "2" * 40)
    ]
    assert texts == ["1" * 40, "2" * 40, "2" * 40]
    with pytest.raises(SpecbenchError, match="owner/name at worse is not on this disk") as raised:
        WantedFiles(SOURCE, None, "worse").find()
    assert raised.value.try_this == "hf download owner/name --revision worse"


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused():
    for name in ("nowhere", "./a/b", "a/b/c", "/a/b"):
        with pytest.raises(SpecbenchError, match="no such folder"):
            WantedFiles(SOURCE, name).find()


def test_random_weights_are_said_in_the_name_and_in_the_digest():
    plain, tiny = (
        INFO["janus"].configured(ModelChoice(random=True)),
        INFO["janus"].configured(ModelChoice(random=True, tiny=True)),
    )
    assert (plain.name, tiny.name) == ("janus+random", "janus+random+tiny")
    assert plain.ready and plain.weights_sha256() != tiny.weights_sha256()
    model = load_model(tiny, "cpu", "float32")
    assert model.name == tiny.name and model.weights_sha256 == tiny.weights_sha256()
    with pytest.raises(SpecbenchError, match="--random-weights"):
        INFO["janus"].configured(ModelChoice(random=True, weights="a/b"))


def test_random_weights_are_the_same_every_time():
    info = INFO["anole"].configured(ModelChoice(random=True, tiny=True))
    models = [load_model(info, "cpu", "float32") for _ in range(2)]
    weights = [dict(model.backbone.named_parameters()) for model in models]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "config",
    [
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"text_config": {"attn_implementation": "paged|me/kernel@main:flash"}},
        {"vision": {"_experts_implementation": {"": "me/kernel"}}},
        {"auto_map": {"AutoModel": "me/evil--modeling.Evil"}},
        {"auto_map": {"AutoTokenizer": ["me/evil--tokenization.Evil", None]}},
    ],
)
def test_a_configuration_that_names_code_of_a_hub_is_refused_and_one_with_code_beside_it_read(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(SpecbenchError, match="names code of a hub, which is never run: ") as refused:
        read_json(SOURCE, path)
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    path.write_text('{"_attn_implementation": "sdpa", "auto_map": {"AutoModel": "modeling_emu3.Emu3ForCausalLM"}}')
    assert read_json(SOURCE, path)["_attn_implementation"] == "sdpa"
