"""What is downloaded is what was meant: pinned revisions, digests of contents, no program that is run.

It concerns several modules: checkpoint_files, script_archive, downloads, and the weights of models and metrics.
"""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch
from authors_formats import save_openai_clip
from checkpoints import write
from huggingface_hub.errors import LocalEntryNotFoundError

from specbench.errors import SpecbenchError
from specbench.metrics import openclip, published_weights
from specbench.metrics.published_weights import CHECKPOINTS, require_weights_file
from specbench.models.catalog import load_model
from specbench.models.checkpoint_files import DIGESTS, REVISIONS, CheckpointFiles, Source, fetch_checkpoint
from specbench.models.checkpoint_layouts import find_marks
from specbench.models.facts import ModelChoice
from specbench.models.families.model_specs import MODELS
from specbench.system import downloads

INFO = {info.name: info for info in MODELS}
SOURCE = Source("the model", "owner/name", ("config.json",), "MIT")
OWL = "google/owlv2-base-patch16-ensemble"


def test_a_link_named_like_a_digest_forges_nothing(tmp_path):
    blob = tmp_path / hashlib.sha256(b"the official weights").hexdigest()
    blob.write_bytes(b"other weights")
    (tmp_path / "model.safetensors").symlink_to(blob)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"other weights")
    forged, honest = (
        CheckpointFiles(SOURCE, (folder / "model.safetensors",)).sha256() for folder in (tmp_path, tmp_path / "plain")
    )
    assert forged == honest


def test_a_large_file_is_read_once_and_again_once_it_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "_SMALL_BYTES", 3)
    path, reads, honest = tmp_path / "x", [], downloads.digest_of
    monkeypatch.setattr(downloads, "digest_of", lambda path: reads.append(path) or honest(path))
    for content in (b"once", b"more"):
        path.write_bytes(content)
        for _ in range(3):
            assert downloads.sha256_of(path) == hashlib.sha256(content).hexdigest()
    assert len(reads) == 2


def test_no_program_is_loaded(tmp_path, monkeypatch):
    write("simplear", tmp_path)
    clip = save_openai_clip(tmp_path / "clip.pt")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the program was loaded"))
    load_model(INFO["simplear"].configured(ModelChoice(weights=str(tmp_path), tiny=True)), "cpu", "float32")
    assert openclip.load_openai(clip, "cpu").visual.image_size == (64, 64)


def test_pinned_repositories_are_asked_for_at_their_revision(tmp_path, monkeypatch):
    asked = {}

    def record(repo, revision=None, **_):
        asked[repo] = revision
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"x")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", record)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for repo in REVISIONS:
        source = Source("it", repo, ("config.json",), "MIT")
        fetch_checkpoint(source)
        assert asked[repo] == REVISIONS[repo] and REVISIONS[repo] in source.how_to_get()
        fetch_checkpoint(source, None, "other")
        assert asked[repo] == "other"
    with pytest.raises(SpecbenchError, match="is not the published file"):
        published_weights.hub_folder(OWL)
    assert asked[OWL] == REVISIONS[OWL]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub cache; the list of (repository, revision) that are downloaded, each with a config.json."""
    asked = []

    def record(repo, revision=None, local_files_only=False, **_):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        asked.append((repo, revision))
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"x")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", record)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "SPECBENCH_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_where_only_pinned_commits_are_allowed_nothing_else_is_downloaded(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_PINNED_ONLY", "1")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    for attempt in (
        lambda: fetch_checkpoint(SOURCE),
        lambda: fetch_checkpoint(SOURCE, "me/tuned"),
        lambda: find_marks(SOURCE, "me/tuned", None, download=True),
        lambda: published_weights.hub_folder("owner/name"),
        lambda: INFO["emu3"].require_weights(),
        lambda: (
            INFO["simplear"].configured(ModelChoice(revision="1" * 40)).require_weights()
        ),  # its image decoder has none
        lambda: load_model(INFO["lumina-1024"]),
    ):
        with pytest.raises(SpecbenchError) as caught:
            attempt()
        assert caught.value.exit_code == 5 and "SPECBENCH_REVISIONS=" in caught.value.try_this
        assert "--pinned-only allows no" in caught.value.what
    assert hub == []
    INFO["emu3"].configured(ModelChoice(revision="1" * 40)).require_weights()
    monkeypatch.setenv("SPECBENCH_REVISIONS", "owner/name@abc, me/tuned@main")
    fetch_checkpoint(SOURCE), fetch_checkpoint(SOURCE, "me/tuned"), published_weights.hub_folder("owner/name")
    assert hub == [("owner/name", "abc"), ("me/tuned", "main"), ("owner/name", "abc")]


def test_a_malformed_revision_is_named(monkeypatch):
    monkeypatch.setenv("SPECBENCH_REVISIONS", "owner/name")
    with pytest.raises(SpecbenchError, match="'owner/name' is not owner/name@revision"):
        fetch_checkpoint(SOURCE)


def test_weights_without_a_published_digest_are_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("specbench.system.downloads._stream", lambda *_: pytest.fail("it was downloaded"))
    for name, checkpoint in CHECKPOINTS.items():
        if not checkpoint.digest:
            with pytest.raises(SpecbenchError, match="is not on this disk") as caught:
                require_weights_file(name)
            assert checkpoint.remote.url in caught.value.try_this and caught.value.exit_code == 5


def test_commits_are_those_of_the_cache(tmp_path):
    path = tmp_path / "models--owner--name" / "snapshots" / "abc" / "models" / "7b" / "params.json"
    assert CheckpointFiles(SOURCE, (path, tmp_path / "other.json")).commits == {"owner/name": "abc"}


def test_pins_are_commits_and_digests():
    on_hub = [one.remote.url for one in CHECKPOINTS.values() if "huggingface.co" in one.remote.url]
    assert on_hub and all(re.search(r"/resolve/[0-9a-f]{40}/", url) for url in on_hub)
    assert all(re.fullmatch(r"[0-9a-f]{40}", revision) for revision in REVISIONS.values())
    assert DIGESTS.keys() <= REVISIONS.keys() and "main" not in json.dumps(REVISIONS)
