"""Stored pictures: read only if they are what was stored, regular files inside their folder, of four plain formats.
It concerns several modules: run_store, system.images and whatever reads pictures."""

import os
import struct
import zlib
from pathlib import Path

import pytest
from drawn import drawn_run
from PIL import Image
from refusals import refused
from stored_rows import rewritten

from specbench.metrics import scoring
from specbench.reporting import report_rows
from specbench.reporting.html import page_charts, write_page
from specbench.reporting.picture_figures import write_pictures
from specbench.store.merge_shards import merge_runs
from specbench.store.run_store import RunStore
from specbench.system.images import read_picture

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"


READERS = {
    "score": lambda folder, out: scoring.score([folder], ["shapes-detector"]).check(),
    "page": lambda folder, out: write_page([folder], out / "page.html"),
    "sheet": lambda folder, out: write_pictures({"run": folder}, out / "sheet.png"),
    "merge": lambda folder, out: merge_runs([folder], out / "merged"),
}
every_reader = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


def forget_digests(folder: Path) -> None:
    """Turn the rows into rows of schema version 3."""
    older = {b"specbench.schema": b"3"}
    rewritten(folder, lambda table: table.drop_columns("image_sha256").replace_schema_metadata(older))


def bomb(side: int) -> bytes:
    """A PNG of a single colour whose header speaks of side x side pixels, and whose data are a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (side // 8 + 1) * 64)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path) -> Path:
    return drawn_run(tmp_path / "results", n=2)


@every_reader
def test_swapped_pictures_are_refused(folder, tmp_path, reader):
    first, other = (folder / "images" / f"s{n}-0.png" for n in (0, 1))
    first.rename(folder / "images" / "x.png")
    other.rename(first)
    (folder / "images" / "x.png").rename(other)
    refused(r"s0-0\.png is damaged or replaced: its SHA-256", reader, folder, tmp_path)


def test_charts_do_not_read_pictures(folder):
    for picture in (folder / "images").iterdir():
        picture.write_bytes(EPS)
    assert [chart["title"] for chart in page_charts(report_rows([folder]))]


@every_reader
def test_runs_without_digests_are_read_as_before(folder, tmp_path, reader):
    forget_digests(folder)
    assert RunStore(folder).samples(["image_sha256"])["image_sha256"].isna().all()
    reader(folder, tmp_path)


def link_out(picture: Path) -> None:
    secret = picture.parents[3] / "secret"
    picture.rename(secret)
    picture.symlink_to(secret)


def pipe(picture: Path) -> None:
    picture.unlink()
    os.mkfifo(picture)


@every_reader
@pytest.mark.parametrize(("replace", "problem"), [(link_out, "leads out of"), (pipe, "is not a regular file")])
def test_what_is_no_file_of_the_folder_is_refused_and_copied_nowhere(folder, tmp_path, reader, replace, problem):
    forget_digests(folder)
    replace(folder / "images" / "s0-0.png")
    refused(problem, reader, folder, tmp_path)
    assert not list((tmp_path / "merged").glob("**/*.png"))


def test_no_format_but_the_four_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    path = tmp_path / "x.png"
    path.write_bytes(EPS)
    refused("not a PNG, JPEG, WebP or BMP image", read_picture, path)
    for kind in ("gif", "tiff", "ppm", "ico"):
        Image.new("RGB", (16, 16)).save(path, format=kind)
        refused("not a PNG, JPEG, WebP or BMP image", read_picture, path)
    for kind in ("png", "jpeg", "webp", "bmp"):
        Image.new("RGB", (16, 16)).save(path, format=kind)
        assert read_picture(path).shape == (16, 16, 3)


@pytest.mark.parametrize("side", [13_000, 20_000])
def test_a_bomb_is_refused_by_its_header(tmp_path, side, monkeypatch):
    path = tmp_path / "x.png"
    path.write_bytes(bomb(side))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    refused(r"more than 67,108,864", read_picture, path)
