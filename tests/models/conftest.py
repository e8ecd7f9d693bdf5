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
