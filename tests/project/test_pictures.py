"""`make pictures` draws every picture that the documents show."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

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
