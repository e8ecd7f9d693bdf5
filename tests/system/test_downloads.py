"""Downloads from a misbehaving server: a file under its final name is complete and correct."""

import errno
import io
import random
import threading
import time
import urllib.error
import zipfile
from dataclasses import replace

import published
import pytest
from loopback_hub import loopback_hub
from refusals import refused

from specbench.errors import FAILURE
from specbench.prompts import public
from specbench.prompts.public import PublishedImages
from specbench.system import downloads
from specbench.system.downloads import Remote, fetch_file

CONTENT = bytes(range(256)) * 2000


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)
    with loopback_hub() as hub:
        hub.content = CONTENT
        yield hub


@pytest.fixture
def remote(server):
    return Remote(f"{server.address}/file", published.digest(CONTENT), len(CONTENT))


@pytest.mark.parametrize(("part", "server_does", "asked"), [
    (None, {"cuts": [100_000, 50_000]}, [None, "bytes=100000-", "bytes=150000-"]),  # it continues after the cut
    (CONTENT[:1000], {}, ["bytes=1000-"]),  # and after the part of an earlier call
    (b"x" * 1000, {}, ["bytes=1000-", None]),  # a part of something else is thrown away
    (CONTENT, {}, []),  # a complete one needs no request
    (None, {"ranges": False, "cuts": [100_000]}, [None, "bytes=100000-"]),
    (None, {"statuses": [503, 429]}, [None] * 3),
])  # fmt: skip
def test_what_is_there_in_the_end_is_what_was_published(server, remote, tmp_path, part, server_does, asked):
    vars(server).update(server_does)
    if part is not None:
        (tmp_path / "file.part").write_bytes(part)
    seen = []
    assert fetch_file(remote, tmp_path / "file", lambda *done: seen.append(done)).read_bytes() == CONTENT
    assert server.parts == asked and (not asked or seen[-1] == (len(CONTENT), len(CONTENT)))
    assert not (tmp_path / "file.part").exists()
    fetch_file(remote, tmp_path / "file")
    assert server.parts == asked, "the right file is never fetched again"
    (tmp_path / "file").write_bytes(CONTENT[:-1] + b"x")
    assert fetch_file(remote, tmp_path / "file").read_bytes() == CONTENT, "a wrong one is"


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_wrong_digest_keeps_nothing(server, remote, tmp_path, size):
    server.content = b"y" * len(CONTENT)
    error = refused("not the expected file", fetch_file, replace(remote, size=size), tmp_path / "file")
    assert error.exit_code == FAILURE and "sha256" in error.what
    assert [path.name for path in tmp_path.iterdir()] == [".file.lock"]


def test_not_found_is_said_at_once(server, remote, tmp_path):
    server.statuses = [404, 404]
    refused("404", fetch_file, remote, tmp_path / "file")
    assert len(server.parts) == 1


@pytest.mark.parametrize(("headers", "wait"), [
    ({}, ("", False)), ({"Retry-After": "3"}, ("; it asks to wait 3 s", False)),
    ({"Retry-After": "3600"}, ("; it asks to wait 3600 s", True)),
    ({"Retry-After": "9" * 5000}, ("; it asks to wait 999999999 s", True)),
    ({"Retry-After": "Fri, 27 Nov"}, ("; it asks to wait until Fri, 27 Nov", True)),
    ({"RateLimit": '"api";r=0;t=55'}, ("; it asks to wait 55 s", True)),
])  # fmt: skip
def test_a_long_wait_is_no_reason_to_ask_again(headers, wait):
    assert downloads.asked_wait(headers) == wait
    if headers and wait[1]:
        error = urllib.error.HTTPError("", 429, "Too Many Requests", headers, None)
        refused(wait[0], downloads._transient_reason, downloads.Remote("https://x/y", ""), error)


def test_a_page_to_log_in_is_no_file_and_a_length_that_is_text_none(server, tmp_path):
    server.refusals["/file"] = (200, {"Content-Length": "x"})
    remote = Remote(f"{server.address}/file", "")
    assert fetch_file(remote, tmp_path / "file").read_bytes() == b'{"error": "refused"}'
    server.refusals["/file"] = (200, {"Content-Type": "text/html; charset=utf-8"})
    refused(r"file of 127.*: a web page came instead", fetch_file, remote, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_silent_server_is_given_up(server, remote, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(downloads, "DOWNLOAD_ATTEMPTS", 2)
    server.stall_s = 0.3
    refused("timed out", fetch_file, remote, tmp_path / "file")


def test_a_full_disk_keeps_what_arrived(server, remote, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, chunk):
            if self.tell() >= 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(chunk)

    monkeypatch.setattr(downloads, "_CHUNK", 60_000)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", lambda path, mode="r": Full(path, mode.replace("b", "")))
        error = refused("No space left", fetch_file, remote, tmp_path / "file")
    assert "to resume" in error.try_this and (tmp_path / "file.part").stat().st_size >= 100_000
    assert fetch_file(remote, tmp_path / "file").read_bytes() == CONTENT


def test_two_downloads_of_one_file_do_not_mix(server, remote, tmp_path):
    server.stall_s = 0.5
    first = threading.Thread(target=fetch_file, args=(remote, tmp_path / "file"))
    first.start()
    while not server.parts:
        assert first.is_alive()
        time.sleep(0.01)
    assert fetch_file(remote, tmp_path / "file").read_bytes() == CONTENT
    first.join()
    assert len(server.parts) == 1, "the second waits for the first"


def _archive(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return sink.getvalue()


@pytest.fixture
def captions(server, tmp_path, monkeypatch):
    """A set whose file of captions is a small part of a large published archive."""
    content = published.files("coco")["captions_val2017.json"]
    others = {f"annotations/{name}.json": random.Random(name).randbytes(500_000) for name in ("a", "b")}
    server.content = _archive({**others, "annotations/captions_val2017.json": content, "z.json": others.popitem()[1]})
    archive = Remote(f"{server.address}/a.zip", published.digest(server.content), len(server.content))
    member = Remote("annotations/captions_val2017.json", published.digest(content), len(content))
    return replace(published.public_set("coco"), archive=archive, files={"captions_val2017.json": member})


def test_the_wanted_file_of_an_archive_is_kept(server, captions):
    seen = []
    public.fetch_set(captions, lambda done, total: seen.append(done))
    assert captions.download_size == seen[-1] == len(server.content)
    assert len(public.read_set(captions)) == 2 and [path.name for path in captions.folder.glob("[!.]*.zip*")] == []
    server.parts.clear()
    public.fetch_set(captions)
    assert server.parts == []


def test_another_archive_under_the_address_is_refused_as_a_whole(server, captions):
    server.content += b"x"
    refused("larger than the expected", public.fetch_set, captions)
    assert not (captions.folder / "captions_val2017.json").exists()
    server.content = server.content[:-1]
    wrong = replace(captions.files["captions_val2017.json"], digest=published.digest(b"other"))
    refused("not as published", public.fetch_set, replace(captions, files={"captions_val2017.json": wrong}))
    assert not (captions.folder / "captions_val2017.json").exists()


def test_a_mirror_takes_the_place_of_the_publishers(server, captions, monkeypatch):
    monkeypatch.setenv("SPECBENCH_PROMPTS_MIRROR", f"{server.address}/mirror/")
    server.content = published.files("coco")["captions_val2017.json"]
    public.fetch_set(captions)
    assert server.asked == ["GET /mirror/coco/captions_val2017.json"] and len(public.read_set(captions)) == 2
    server.content = _archive({"val2017/1.jpg": b"one"})
    remote = Remote("https://example.org/zips/val2017.zip", published.digest(server.content), len(server.content))
    public.fetch_images(replace(captions, images=PublishedImages(remote, 1, "Flickr")))
    assert server.asked[1:] == ["GET /mirror/coco/val2017.zip"]
    monkeypatch.setenv("SPECBENCH_PROMPTS_MIRROR", "http://example.org")
    refused("not an https address", public.fetch_set, published.public_set("parti"))


def test_reference_images_are_all_there_or_an_error(server, tmp_path, monkeypatch):
    server.content = _archive({"val2017/": b"", "val2017/1.jpg": b"one", "val2017/2.jpg": b"two", "../evil.sh": b"x"})
    archive = Remote(f"{server.address}/val.zip", published.digest(server.content), len(server.content))
    coco = replace(published.public_set("coco"), images=PublishedImages(archive, 2, "Flickr"))
    folder = public.fetch_images(coco)
    assert sorted(path.name for path in folder.iterdir()) == ["1.jpg", "2.jpg"]
    short = replace(coco, images=PublishedImages(archive, 3, "Flickr"))
    refused("2 images instead of 3", public.fetch_images, short)


@pytest.mark.parametrize("is_known", [True, False])
def test_more_than_there_should_be_ends_the_download(server, tmp_path, monkeypatch, is_known):
    monkeypatch.setattr(downloads, "_CHUNK", 1000)
    monkeypatch.setattr(downloads, "_MAX_BYTES", 5000)
    remote = Remote(f"{server.address}/file", published.digest(CONTENT), 5000 if is_known else None)
    refused("larger than the expected 5,000 bytes", fetch_file, remote, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == [".file.lock"]


@pytest.mark.parametrize("url", ["http://example.org/file", "ftp://example.org/file", "file:///etc/passwd"])
def test_addresses_without_tls_are_refused(url, tmp_path, server):
    refused("not an https address", fetch_file, Remote(url, ""), tmp_path / "file")
    server.refusals["/moved"] = (302, {"Location": url})
    refused(
        r"not an https address|is not allowed", fetch_file, Remote(f"{server.address}/moved", ""), tmp_path / "file"
    )
    assert not (tmp_path / "file").exists()
