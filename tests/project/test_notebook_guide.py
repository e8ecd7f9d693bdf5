"""It concerns several modules: the guide that is a notebook, run in a fresh kernel."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
SECONDS_A_CELL = 600
"""A cell that takes so long hangs: each takes seconds."""


def test_the_stored_notebook_has_an_output_wherever_a_cell_shows_something():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output.get("output_type") for cell in code for output in cell["outputs"]]
    assert len(kinds) >= 6 and "error" not in kinds and "stream" not in kinds and NOTEBOOK.stat().st_size < 400_000


@pytest.mark.slow
def test_every_cell_runs_in_a_fresh_kernel(tmp_path):
    reason = "nbclient or ipykernel is missing: make test installs them"
    nbformat, nbclient = pytest.importorskip("nbformat", reason=reason), pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS_A_CELL, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells], ensure_ascii=False).replace("\xa0", " ")
    assert "speed-up ↑" in shown and "no deviation seen" in shown and "image/png" in shown
