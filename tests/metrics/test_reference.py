"""Stored feature vectors: unusable ones are refused in one line, whichever metric reads them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from specbench.errors import SpecbenchError
from specbench.metrics.cmmd import Cmmd
from specbench.metrics.fid import Gaussian, fid_difference
from specbench.metrics.reference import feature_matrix
from specbench.metrics.shapes import ShapesFrechet

GOOD = [np.arange(4.0, dtype=np.float32), np.ones(4, np.float32)]
BAD = {
    "unequal": np.ones(3, np.float32),
    "missing": None,
    "nested": np.array([np.ones(2), None], object),
    "infinite": np.array([0, 1, 2, np.inf], np.float32),
}


def table(vectors: list, **more: object) -> pd.DataFrame:
    numbers = range(len(vectors))
    return pd.DataFrame({"prompt_id": [f"p/{n}" for n in numbers], "sample": 0, "feature": vectors, **more})


def test_vectors_become_a_matrix():
    assert feature_matrix(pd.Series(GOOD), 4).tolist() == [[0, 1, 2, 3], [1, 1, 1, 1]]
    assert feature_matrix(pd.Series([], dtype=object), 4).shape == (0, 4)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_no_metric_computes_with_damaged_vectors(bad):
    rows = table([*GOOD, bad])
    cmmd = Cmmd("l14-336")
    cmmd.__dict__["reference_features"] = np.eye(4, dtype=np.float32)
    scene = '{"objects": [{"shape": "circle"}]}'
    for attempt in (
        lambda: cmmd.scores(rows),
        lambda: cmmd.difference(rows, table([*GOOD, GOOD[0]])),
        lambda: fid_difference(rows, rows, Gaussian(np.eye(4))),
        lambda: ShapesFrechet().scores(rows.assign(scene=scene)),
    ):
        with pytest.raises(SpecbenchError, match="stored features are damaged"):
            attempt()


@pytest.mark.parametrize("scene", [None, "{", "[]", '{"objects": []}', '{"objects": [{"shape": "dragon"}]}', "[" * 999])
def test_damaged_scenes_of_renders_are_refused(scene):
    with pytest.raises(SpecbenchError, match="a scene is malformed"):
        ShapesFrechet().reference_features(table(GOOD, scene=scene))
