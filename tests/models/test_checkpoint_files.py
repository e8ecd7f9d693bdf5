"""Wanted files are found in a folder or in the hub cache, at the requested revision, or are one line. Files that are
downloaded are the intended files: pinned revisions, digests of contents, no program that is run. It concerns
several modules: checkpoint_files, script_archive, downloads, and the weights of models and metrics."""

import hashlib
import json
import shutil
import ssl
import urllib.error
import urllib.request
from unittest.mock import Mock

import pytest
import torch
from authors_formats import save_openai_clip
from checkpoints import INFO
from refusals import refused

from specbench.metrics import openclip, published_weights
from specbench.metrics.published_weights import CHECKPOINTS, require_weights_file
from specbench.models import hub_downloads
from specbench.models.catalog import load_model
from specbench.models.checkpoint_files import CheckpointFiles, Source, WantedFiles, read_json
from specbench.models.facts import ModelChoice
from specbench.system import digests, downloads

SOURCE = Source("the model", "owner/name", ("config.json",), "MIT")


def test_a_model_in_the_hub_cache_is_found_and_loaded(written, hub_cache):
    info = INFO["simplear"].configured(ModelChoice(tiny=True))
    assert not info.ready
    hub_cache("Daniel0724/SimpleAR-0.5B-RL", source=written("simplear"))
    assert not info.ready, "the image decoder is still missing"
    hub_cache("nvidia/Cosmos-1.0-Tokenizer-DV8x16x16", source=written("simplear"))
    assert info.ready
    model = load_model(info, "cpu", "float32")
    assert model.weights_sha256 == info.weights_sha256()
    assert model.name == "simplear+tiny"


def test_the_revision_chooses_the_files(hub_cache):
    for commit, ref in (("1" * 40, "main"), ("2" * 40, "better")):
        (hub_cache("owner/name", commit, ref=ref) / "config.json").write_text(commit)
    texts = [
        WantedFiles(SOURCE, None, revision).find().named("config.json").read_text()
        for revision in (None, "better", "2" * 40)
    ]
    assert texts == ["1" * 40, "2" * 40, "2" * 40]
    error = refused("owner/name at worse is not on this disk", WantedFiles(SOURCE, None, "worse").find)
    assert error.try_this == "hf download owner/name --revision worse"


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused():
    for name in ("nowhere", "./a/b", "a/b/c", "/a/b"):
        refused("no such folder", WantedFiles(SOURCE, name).find)


def test_random_weights_are_the_same_every_time_and_said_in_the_name_and_in_the_digest():
    choices = (ModelChoice(random=True), ModelChoice(random=True, tiny=True))
    plain, tiny = (INFO["janus"].configured(choice) for choice in choices)
    assert (plain.name, tiny.name) == ("janus+random", "janus+random+tiny")
    assert plain.ready and plain.weights_sha256() != tiny.weights_sha256()
    model, again = (load_model(tiny, "cpu", "float32") for _ in range(2))
    assert model.name == tiny.name and model.weights_sha256 == tiny.weights_sha256()
    assert all(map(torch.equal, model.backbone.parameters(), again.backbone.parameters()))
    refused("--random-weights", INFO["janus"].configured, ModelChoice(random=True, weights="a/b"))


@pytest.mark.parametrize("config", [
    {"_attn_implementation": "kernels-community/flash-attn2"},
    {"text_config": {"attn_implementation": "paged|me/kernel@main:flash"}},
    {"vision": {"_experts_implementation": {"": "me/kernel"}}}, {"auto_map": {"AutoModel": "me/evil--modeling.Evil"}},
    {"auto_map": {"AutoTokenizer": ["me/evil--tokenization.Evil", None]}},
])  # fmt: skip
def test_a_configuration_that_names_code_of_a_hub_is_refused_and_code_next_to_it_ignored(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert refused("refers to code on a hub, which specbench never runs: ", read_json, SOURCE, path).exit_code == 2
    path.write_text('{"_attn_implementation": "sdpa", "auto_map": {"AutoModel": "modeling_emu3.Emu3ForCausalLM"}}')
    assert read_json(SOURCE, path)["_attn_implementation"] == "sdpa"


def test_a_link_named_like_a_digest_forges_nothing(tmp_path):
    blob = tmp_path / hashlib.sha256(b"the official weights").hexdigest()
    blob.write_bytes(b"other weights")
    (link := tmp_path / "model.safetensors").symlink_to(blob)
    (tmp_path / "plain").mkdir()
    shutil.copy(blob, tmp_path / "plain" / "model.safetensors")
    forged, honest = (CheckpointFiles(SOURCE, (path,)).sha256() for path in (link, tmp_path / "plain" / link.name))
    assert forged == honest


def test_a_large_file_is_read_and_reported_once_and_again_once_it_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SMALL_BYTES", 3)
    monkeypatch.setattr(digests, "_LARGE_BYTES", 3)
    path, reads, honest = tmp_path / "x", [], digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda path: reads.append(path) or honest(path))
    for content in (b"once", b"more"):
        path.write_bytes(content)
        for _ in range(3):
            assert digests.sha256_of(path) == hashlib.sha256(content).hexdigest()
    assert len(reads) == 2 and capsys.readouterr().err.count(f"the digest of {path} (0.0 GB), once") == 2


def test_no_program_is_loaded(tmp_path, monkeypatch):
    clip = save_openai_clip(tmp_path / "clip.pt")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the program was loaded"))
    assert openclip.load_openai(clip, "cpu").visual.image_size == (64, 64)


def test_if_only_pinned_commits_are_allowed_nothing_else_is_downloaded(monkeypatch):
    monkeypatch.setenv("SPECBENCH_PINNED_ONLY", "1")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    for attempt in (
        WantedFiles(SOURCE).fetch,
        WantedFiles(SOURCE, "me/tuned").fetch,
        lambda: WantedFiles(SOURCE, "me/tuned").folder(download=True),
        lambda: published_weights.hub_folder("owner/name"),
        INFO["emu3"].require_weights,
        INFO["simplear"].configured(ModelChoice(revision="1" * 40)).require_weights,  # its image decoder has none
        lambda: load_model(INFO["lumina-1024"]),
        lambda: require_weights_file("blip-vqa"),
    ):
        error = refused("--pinned-only (downloads|requires|excludes)", attempt)
        assert error.exit_code == 5 and len(str(error)) < 250
    INFO["emu3"].configured(ModelChoice(revision="1" * 40)).require_weights()


def test_a_malformed_revision_is_named(monkeypatch):
    monkeypatch.setenv("SPECBENCH_REVISIONS", "owner/name")
    refused("'owner/name' is not owner/name@revision", WantedFiles(SOURCE).fetch)


def test_a_certificate_that_cannot_be_verified_is_said_at_once(monkeypatch, tmp_path):
    def refuse(*_, **__):
        inner = ssl.SSLCertVerificationError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
        raise ConnectionError("connection failed") from inner

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    problem = r"huggingface\.co does not answer like a hub: .*CERTIFICATE_VERIFY"
    assert "SSL_CERT_FILE" in refused(problem, WantedFiles(SOURCE).fetch).try_this

    error = urllib.error.URLError(ssl.SSLCertVerificationError("certificate verify failed"))
    monkeypatch.setattr(downloads, "_open_url", asked := Mock(side_effect=error))
    remote = downloads.Remote("https://example.org/file", "")
    refused("certificate cannot be verified", downloads.fetch_file, remote, tmp_path / "file")
    assert asked.call_count == 1, "no further try"


@pytest.mark.parametrize("file", ["", "/bundle.pem"])
def test_a_python_without_certificates_takes_certifis_or_the_users(monkeypatch, file):
    monkeypatch.setenv("SSL_CERT_FILE", file)
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    handlers = downloads._opener.__wrapped__(False).handlers
    [handler] = [handler for handler in handlers if isinstance(handler, urllib.request.HTTPSHandler)]
    assert bool(handler._context.get_ca_certs()) == (file == "")


def test_files_of_metrics_on_the_hub_follow_its_mirror(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    places = {name: hub_downloads.on_hub_endpoint(checkpoint.remote).url for name, checkpoint in CHECKPOINTS.items()}
    for name in ("hpsv2-v2.1", "imagereward", "bert-vocabulary"):
        assert places[name].startswith("https://mirror.example/") and "huggingface.co" not in places[name]
    assert places["clip-b16"] == CHECKPOINTS["clip-b16"].remote.url
