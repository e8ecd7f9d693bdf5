"""Scores as DataFrames: one row per run, or per run and score."""

import math
import re

import brightness
import pyarrow as pa
import pyarrow.parquet as pq
import synthetic
from drawn import drawn_run
from refusals import refused

import specbench
from specbench.cli.score import _print_scores
from specbench.metrics import scoring
from specbench.metrics.score_store import read_scores, score_frame
from specbench.prompts import Prompt
from specbench.store.schema import RUN_SCORES


def test_scores_are_a_row_per_run_or_per_score(tmp_path, capsys):
    drawn_run(tmp_path, n=3)
    wide = specbench.score(metrics="shapes-clip", out=tmp_path)
    scores = [f"shapes-clip{end}" for end in ("", "_low", "_high", "_n")]
    assert [*wide.columns][:7] == ["run_id", "model", "decoder", *scores]
    capsys.readouterr()
    long = specbench.score([*wide["run_id"]], ["shapes-clip"], tmp_path, long=True, progress=False)
    assert capsys.readouterr().err == ""
    assert {*RUN_SCORES.names} <= {*long.columns} and long["value"][0] == wide["shapes-clip"][0]
    assert long.attrs["units"]["images"] == wide.attrs["units"]["shapes-clip_n"] == "images"
    assert bool(long["too_few"][0]) and wide["shapes-clip_low"].isna().all()
    refused("unknown metric 'shapes-clop'", specbench.score, metrics="shapes-clop", out=tmp_path)
    for none in ((), None, []):
        refused("metric", specbench.differences, wide["run_id"][0], metrics=none, out=tmp_path)


def test_a_metric_that_scored_a_run_in_two_ways_has_two_columns():
    row = {"run_id": "a", "model": "m", "decoder": "ar", "metric": "clip", "value": 1.0, "low": None, "high": None}
    row["n"] = 1
    frame = score_frame([row | {"fingerprint": "x"}, row | {"fingerprint": "y", "value": 2.0}], long=False)
    assert frame.loc[0, ["clip (x)", "clip (y)"]].tolist() == [1.0, 2.0] and len(frame) == 1
    other = row | {"run_id": "b", "fingerprint": "y", "value": 2.0}
    frame = score_frame([row | {"fingerprint": "x"}, other], long=False).set_index("run_id")
    assert frame["clip (x)"].notna().tolist() == [True, False] and frame["clip (y)"].notna().tolist() == [False, True]
    assert len(score_frame([], long=True)) == len(score_frame([], long=False)) == 0


def test_images_scored_in_two_ways_do_not_share_a_column(tmp_path, monkeypatch):
    """Runs that were scored before and after a change of a metric's code."""
    prompts = [Prompt(f"p{n}", f"prompt {n}", None, {}) for n in range(2)]
    runs = [synthetic.pictured(tmp_path, prompts, spec=spec) for spec in (synthetic.AR, synthetic.SJD)]
    brightness.register(monkeypatch, "brightness", "brightness:Brightness")
    scoring.score(runs[:1], ["brightness"]).check()
    monkeypatch.setattr(brightness.Brightness, "version", "2")
    scoring.score(runs[1:], ["brightness"]).check()
    of_one = specbench.samples(runs[:1])
    assert of_one["brightness"].tolist() == [0, 1]
    columns = specbench.samples(runs).filter(like="brightness (")
    assert columns.shape == (4, 2) and columns.notna().sum().tolist() == [2, 2]
    monkeypatch.setattr(brightness.Brightness, "name", "nfe")
    brightness.register(monkeypatch, "nfe", "brightness:Brightness")
    scoring.score(runs[:1], ["nfe"]).check()
    images = specbench.samples(runs[:1])
    assert images["nfe"].tolist() == [4, 4] and images.filter(like="nfe (").squeeze().tolist() == [0, 1]


def test_scores_and_notes_of_several_references_carry_their_fingerprints(capsys):
    """KID of images is shown next to a distance to statistics, which has none: its reference is another."""
    row = {"run_id": "r", "value": 1.0, "low": None, "high": None, "n": 2}
    rows = [
        row | {"metric": metric, "fingerprint": made, "note": f"as {made}"}
        for metric, made in (("fid", "a"), ("kid", "a"), ("fid", "b"), ("other", "c"))
    ]
    _print_scores(rows, False, False)
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["fid (a), kid (a): as a", "fid (b): as b", "other: as c"]
    names = [line.split(" | ")[1].strip() for line in printed.out.splitlines()[2:]]
    assert names == ["fid (a)", "kid (a)", "fid (b)", "other"]
    _print_scores([rows[0], rows[2] | {"run_id": "s"}, rows[3]], False, False)
    names = [line.split(" | ")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["fid (a)", "fid (b)", "other"], "values of two runs that are not comparable"


NAN = """
from specbench.metrics.base import Metric, Score
from specbench.stats import Estimate

class Undefined(Metric):
    name, columns = "undefined", {}
    def identity(self): return {}
    def features_of(self, sample): return {}
    def scores(self, statistics): return [Score(self.name, Estimate(float("nan"), float("nan")), len(statistics))]
"""


def test_a_score_that_is_nan_is_missing_and_only_one_of_earlier_versions_is_computed_again(tmp_path, cli, monkeypatch):
    run, place = drawn_run(tmp_path / "out", 10), tmp_path / "undefined_metric.py"
    place.write_text(NAN)
    monkeypatch.syspath_prepend(tmp_path)
    score = ("score", "--out", tmp_path / "out", "--metric", "shapes-clip", "--metric", "undefined_metric:Undefined")
    assert cli(*score).code == 0
    [clip], [undefined] = ([*run.glob(f"scores/{name}-*.parquet")] for name in ("shapes-clip", "undefined"))
    honest, written = read_scores(run), undefined.stat().st_mtime_ns
    assert pq.read_table(undefined)["value"].to_pylist() == pq.read_table(undefined)["low"].to_pylist() == [None]

    older = pq.read_table(clip)
    for column in ("value", "low", "high"):
        older = older.set_column(older.column_names.index(column), column, [pa.array([math.nan] * len(older))])
    pq.write_table(older, clip)
    assert [row["value"] for row in read_scores(run)] == [None, None]
    for form in ("markdown", "csv"):
        shown = cli("report", "--out", tmp_path / "out", "--format", form)
        assert shown.code == 0 and not re.search(r"\bnan\b", shown.out)
    assert cli(*score).code == 0
    assert read_scores(run) == honest and undefined.stat().st_mtime_ns == written
    lists = pa.array([[10]] * len(older))
    pq.write_table(older.set_column(older.column_names.index("images"), "images", lists), clip)
    assert cli(*score).code == 0 and read_scores(run) == honest
    times = []
    for _ in range(2):  # its entry in the catalogue declares what it does not judge
        assert cli("score", "--out", tmp_path / "out", "--metric", "shapes-detector").code == 0
        times += [path.stat().st_mtime_ns for path in run.glob("scores/shapes-detector-*.parquet")]
    assert times[0] == times[1]
    (path,) = run.glob("scores/shapes-detector-*.parquet")
    honest, older = read_scores(run), pq.read_table(path)
    other = pa.array([0.5] * len(older))  # versions before 0.5 computed other bounds
    pq.write_table(older.set_column(older.column_names.index("low"), "low", other), path)
    assert read_scores(run) != honest
    assert cli("score", "--out", tmp_path / "out", "--metric", "shapes-detector").code == 0
    assert read_scores(run) == honest
