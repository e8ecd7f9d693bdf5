"""The size that a model is planned with is the one of the checkpoint it loads, whatever layout that is in."""

import json

import pytest
from checkpoints import AUTHORS, INFO, WRITERS, loaded

from specbench.errors import SpecbenchError
from specbench.models import hub_model
from specbench.models.checkpoint_layouts import stored_size
from specbench.models.facts import ModelChoice

NAMES = ("lumina-34b", "lumina2", "anole", "llamagen", "janus", "simplear", "emu3", "liquid", "glm-image", "emu3.5")
NAMES += ("tar-1.5b", "tar-7b")
KINDS = {name: (name, WRITERS[name]) for name in NAMES}
KINDS |= {f"{name} by its authors": (name, AUTHORS[name]) for name in ("janus-7b", "emu3", "anole")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_the_one_of_the_loaded_network(kind, tmp_path):
    name, writer = KINDS[kind]
    writer(tmp_path)
    info = INFO[name].configured(ModelChoice(weights=str(tmp_path)))
    assert info.network != INFO[name].network
    if name == "anole" and "authors" in kind:
        # Meta derives the width of feed-forward layers, which is not a multiple of 256 in so small a network.
        assert info.layers == 2
        return
    model = loaded(name, tmp_path)
    config = model.backbone.config
    assert info.layers == config.num_hidden_layers
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert info.network.kv_numbers == 2 * config.num_hidden_layers * config.num_key_value_heads * width
    trunk = sum(weights.numel() for weights in model.backbone.parameters())
    assert info.network.trunk == trunk - model.backbone.embed_tokens.weight.numel()
    assert info.fixed_bytes() < INFO[name].fixed_bytes() and info.step_bytes() < INFO[name].step_bytes()


def test_official_configurations_give_the_official_sizes(tmp_path):
    llama = {"num_hidden_layers": 30, "vocab_size": 102_400}
    published = {
        "janus-7b": {"language_config": llama},
        "simplear-1.5b": INFO["simplear-1.5b"].network.config(),
        "emu3": {"model_type": "Emu3"},
        "anole": {},
    }
    for name, config in published.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert stored_size(INFO[name].family, INFO[name].network, tmp_path) == INFO[name].network
    params = {"model": {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "config.json").unlink()
    assert stored_size("anole", INFO["anole"].network, tmp_path) == INFO["anole"].network


@pytest.fixture
def in_cache(tmp_path, monkeypatch):
    """`in_cache(repo)`: the folder of a hub repository's snapshot in an own cache, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def snapshot(repo: str, commit: str = 40 * "c"):
        repository = tmp_path / f"models--{repo.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        return folder

    return snapshot


def test_a_hub_repository_is_planned_and_recorded_as_what_it_holds(in_cache):
    WRITERS["janus"](in_cache("me/small"))
    info = INFO["janus"].configured(ModelChoice(weights="me/small"))
    assert info.layers == 2 and info.size.weights < INFO["janus"].size.weights
    facts = info.file_facts("5678")
    assert facts["commits"] == {"me/small": 40 * "c"} and "me/small/config.json" in facts["file_digests"]
    assert facts["source"] == {"weights": "me/small", "revision": 40 * "c", "layout": "janus", "sha256": "5678"}
    at_commit = INFO["janus"].configured(ModelChoice(weights="me/small", revision=40 * "c"))
    assert at_commit.file_facts("5678") == facts and at_commit.network == info.network
    WRITERS["janus"](in_cache("deepseek-community/Janus-Pro-1B", 40 * "d"))
    official = INFO["janus"].configured(ModelChoice(weights="deepseek-community/Janus-Pro-1B"))
    assert official.file_facts("5678")["source"] is None
    assert INFO["janus"].configured(ModelChoice(revision=40 * "d")).layers == 2


def test_a_hub_repository_that_tells_no_size_is_said_to_be_of_unknown_size(in_cache, monkeypatch):
    monkeypatch.setattr("specbench.models.checkpoint_files.WantedFiles.folder", lambda *_: None)
    info = INFO["llamagen"].configured(ModelChoice(weights="me/llamagen-3b"), download=True)
    assert info.network == INFO["llamagen"].network and "size of me/llamagen-3b is unknown" in info.size_note
    folder = in_cache("me/llamagen-3b")
    monkeypatch.setattr("specbench.models.checkpoint_files.WantedFiles.folder", lambda *_: folder)
    assert "unknown" in info.as_stored().size_note, "an empty snapshot tells nothing"
    WRITERS["llamagen"](folder)
    stored = info.as_stored()
    assert stored.size_note is None and stored.layers == 2 != info.layers
    assert INFO["llamagen"].size_note is INFO["llamagen"].configured(ModelChoice(random=True)).size_note is None


def test_a_published_size_under_another_name_says_which_model_it_is(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"language_config": {"num_hidden_layers": 30, "vocab_size": 102_400}})
    )
    with pytest.raises(SpecbenchError, match="has the size of 'janus-7b'") as raised:
        INFO["janus"].configured(ModelChoice(weights=str(tmp_path)))
    assert raised.value.exit_code == 2 and "--model janus-7b" in raised.value.try_this


@pytest.mark.parametrize(
    "text", ["", "[]", '{"text_config": 3}', '{"hidden_size": "wide"}', '{"num_attention_heads": 0}']
)
@pytest.mark.parametrize("name", ["lumina", "janus", "simplear", "emu3", "llamagen"])
def test_files_that_do_not_tell_leave_the_official_size(text, name, tmp_path):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "t2i_XL_stage1_256.pt").write_text(text)
    assert INFO[name].configured(ModelChoice(weights=str(tmp_path))).network == INFO[name].network


def test_a_model_may_be_like_one_that_is_like_a_third(monkeypatch):
    read, by_name = hub_model.tomllib.loads, {model.name: model for model in hub_model.MODELS}

    def with_third(text):
        content = read(text)
        near = next(name for name, entry in content["model"].items() if entry.get("like") == "lumina-512")
        return content | {"model": content["model"] | {"third": {"like": near}}}

    monkeypatch.setattr(hub_model.tomllib, "loads", with_third)
    third = hub_model._read()[-1]
    assert (third.name, third.network) == ("third", by_name["lumina-512"].network)
