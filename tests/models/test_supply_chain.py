"""What is downloaded is what was meant: pinned revisions, digests of contents, no program that is run.

It concerns several modules: checkpoint_files, script_archive, downloads, and the weights of models and metrics.
"""

import hashlib
import ssl
import urllib.error
import urllib.request

import pytest
import torch
from authors_formats import save_openai_clip
from checkpoints import INFO, loaded, write

from specbench.errors import SpecbenchError
from specbench.metrics import openclip, published_weights
from specbench.metrics.published_weights import CHECKPOINTS, require_weights_file
from specbench.models import hub_downloads
from specbench.models.catalog import load_model
from specbench.models.checkpoint_files import CheckpointFiles, Source, WantedFiles
from specbench.models.facts import ModelChoice
from specbench.system import digests, downloads

SOURCE = Source("the model", "owner/name", ("config.json",), "MIT")


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
    monkeypatch.setattr(digests, "_SMALL_BYTES", 3)
    path, reads, honest = tmp_path / "x", [], digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda path: reads.append(path) or honest(path))
    for content in (b"once", b"more"):
        path.write_bytes(content)
        for _ in range(3):
            assert digests.sha256_of(path) == hashlib.sha256(content).hexdigest()
    assert len(reads) == 2


def test_no_program_is_loaded(tmp_path, monkeypatch):
    write("simplear", tmp_path)
    clip = save_openai_clip(tmp_path / "clip.pt")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the program was loaded"))
    loaded("simplear", tmp_path)
    assert openclip.load_openai(clip, "cpu").visual.image_size == (64, 64)


def test_where_only_pinned_commits_are_allowed_nothing_else_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_PINNED_ONLY", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    for attempt in (
        lambda: WantedFiles(SOURCE).fetch(),
        lambda: WantedFiles(SOURCE, "me/tuned").fetch(),
        lambda: WantedFiles(SOURCE, "me/tuned").folder(download=True),
        lambda: published_weights.hub_folder("owner/name"),
        lambda: INFO["emu3"].require_weights(),
        lambda: (
            INFO["simplear"].configured(ModelChoice(revision="1" * 40)).require_weights()
        ),  # its image decoder has none
        lambda: load_model(INFO["lumina-1024"]),
        lambda: require_weights_file("blip-vqa"),
    ):
        with pytest.raises(SpecbenchError, match="--pinned-only allows no") as caught:
            attempt()
        assert caught.value.exit_code == 5 and len(str(caught.value)) < 250
    INFO["emu3"].configured(ModelChoice(revision="1" * 40)).require_weights()


def test_a_malformed_revision_is_named(monkeypatch):
    monkeypatch.setenv("SPECBENCH_REVISIONS", "owner/name")
    with pytest.raises(SpecbenchError, match="'owner/name' is not owner/name@revision"):
        WantedFiles(SOURCE).fetch()


def test_a_certificate_that_cannot_be_verified_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def refuse(*_, **__):
        inner = ssl.SSLCertVerificationError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
        raise ConnectionError("connection failed") from inner

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(
        SpecbenchError, match=r"no answer of a hub from huggingface\.co: .*CERTIFICATE_VERIFY"
    ) as caught:
        WantedFiles(SOURCE).fetch()
    assert "SSL_CERT_FILE" in caught.value.try_this

    error = urllib.error.URLError(ssl.SSLCertVerificationError("certificate verify failed"))
    asked = []
    monkeypatch.setattr(downloads, "_open_url", lambda *_: asked.append(1) or _raise(error))
    with pytest.raises(SpecbenchError, match="certificate cannot be verified"):
        downloads.fetch_file(downloads.Remote("https://example.org/file", ""), tmp_path / "file")
    assert len(asked) == 1, "no further try"


def _raise(error):
    raise error


@pytest.mark.parametrize("file", ["", "/bundle.pem"])
def test_a_python_that_knows_no_certificates_takes_those_of_certifi_or_of_the_user(monkeypatch, file):
    monkeypatch.setenv("SSL_CERT_FILE", file)
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    [handler] = [
        handler
        for handler in downloads._opener.__wrapped__().handlers
        if isinstance(handler, urllib.request.HTTPSHandler)
    ]
    assert bool(handler._context.get_ca_certs()) == (file == "")


def test_files_of_metrics_on_the_hub_follow_its_mirror(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    places = {name: hub_downloads.on_hub_endpoint(checkpoint.remote).url for name, checkpoint in CHECKPOINTS.items()}
    for name in ("hpsv2-v2.1", "imagereward", "bert-vocabulary"):
        assert places[name].startswith("https://mirror.example/") and "huggingface.co" not in places[name]
    assert places["clip-b16"] == CHECKPOINTS["clip-b16"].remote.url
