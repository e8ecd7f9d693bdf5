"""Small checkpoints of every kind, each written once; who changes one takes a copy."""

import shutil

import pytest
from checkpoints import EVERY, loaded


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(kind)`: the folder of a kind of checkpoint, see `EVERY`, and what its writer gave."""
    folders = {}

    def get(kind: str):
        if kind not in folders:
            folder = tmp_path_factory.mktemp("made") / kind.replace(" ", "-")
            folder.mkdir()
            folders[kind] = folder, EVERY[kind][1](folder)
        return folders[kind]

    return get


@pytest.fixture(scope="session")
def written(made):
    """`written(kind)`: its folder."""
    return lambda kind: made(kind)[0]


@pytest.fixture(scope="module")
def tiny_of(made):
    """`tiny_of(kind)`: the `Tiny`, and the model loaded from it once a module."""
    models = {}

    def get(kind: str):
        folder, tiny = made(kind)
        if kind not in models:
            models[kind] = loaded(EVERY[kind][0], folder)
        return tiny, models[kind]

    return get


@pytest.fixture
def copied(written, tmp_path):
    """`copied(kind)`: a folder of the test's own."""
    return lambda kind: shutil.copytree(written(kind), tmp_path / written(kind).name)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """`hub_cache(repo, commit, source)`: the snapshot of a hub repository in an own cache, without a network; `source`:
    the folder to copy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(repo: str, commit: str = 40 * "c", source=None, ref: str = "main"):
        home = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        snapshot = home / "snapshots" / commit
        shutil.copytree(source, snapshot) if source else snapshot.mkdir(parents=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
        return snapshot

    return put


@pytest.fixture
def run_tiny(cli, tmp_path):
    """`run_tiny(model, ...)`: the outcome of `run` with a tiny network in float32; its runs are in `results`."""

    def call(model: str, *arguments, texts=("a red circle",)):
        (tmp_path / "prompts.txt").write_text("\n".join(texts))
        files = ("--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "results")
        return cli("run", "--model", model, "--scale", "tiny", "--dtype", "float32", *files, *arguments)

    return call
