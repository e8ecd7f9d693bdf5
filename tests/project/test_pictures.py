"""`make pictures` draws every picture that the documents show."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("results/*/README.md"), *ROOT.glob("specbench/**/*.md"),
]  # fmt: skip
_SHOWN = re.compile(r"!\[[^]]*\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")


def shown(document: Path) -> set[Path]:
    """Pictures that a document shows, by their path in the repository."""
    targets = (target for groups in _SHOWN.findall(document.read_text(encoding="utf-8")) for target in groups if target)
    return {Path(os.path.normpath(document.parent / target)).relative_to(ROOT) for target in targets}


@pytest.fixture(scope="module")
def drawn() -> dict:
    sys.path.insert(0, str(ROOT / "dev" / "pictures"))
    return runpy.run_path(str(ROOT / "dev" / "pictures" / "draw.py"))["PICTURES"]


def test_every_picture_in_the_documents_is_drawn_by_one_command(drawn):
    pictures_of = {document: shown(document) for document in DOCUMENTS}
    assert len(set().union(*pictures_of.values())) >= 5, "the documents show pictures"
    for document, pictures in pictures_of.items():
        assert pictures <= set(drawn), f"{document} shows what `make pictures` does not draw"
    assert all((ROOT / place).is_file() for place in drawn)


def test_a_sheet_that_needs_no_run_is_drawn_as_it_is_committed(drawn, tmp_path):
    sheet = Path("results/readme/grid.png")
    drawn[sheet](tmp_path / "grid.png")
    assert Image.open(tmp_path / "grid.png").tobytes() == Image.open(ROOT / sheet).tobytes()


@pytest.mark.parametrize("name", ["speedups", "step", "field", "image"])
def test_a_drawing_is_drawn_as_it_is_committed(drawn, tmp_path, name):
    drawings = {place.stem: place for place in drawn if place.suffix == ".svg"}
    assert len(drawings) == 4, "each is a case of this test"
    drawn[drawings[name]](tmp_path / f"{name}.svg")
    assert (tmp_path / f"{name}.svg").read_text() == (ROOT / drawings[name]).read_text()
