"""Scoring: images -> features -> statistics -> scores; only missing scores are computed."""

import os
import re
import signal
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
import tiny
from brightness import Brightness, register
from drawn import drawn_run
from forked import forked
from refusals import refused

from specbench import api
from specbench.checks.verify import verify
from specbench.errors import BAD_INPUT, PARTIAL, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics import scoring
from specbench.metrics.base import Settings, made_features, made_score
from specbench.metrics.score_store import feature_parts, read_scores, scores_to_show, stored_difference, writing
from specbench.metrics.shapes import ShapesDetector
from specbench.reporting import html, report_rows
from specbench.reporting import render as render_tables
from specbench.reporting.columns import score_columns
from specbench.reporting.compare import compare_runs
from specbench.store.run_store import RunStore, read_image
from specbench.system.plugins import PluginError

DETECTOR = ["shapes-detector"]


def values(folder: Path) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in read_scores(folder)}


def test_renders_score_one_and_blanks_score_zero(tmp_path):
    folder = drawn_run(tmp_path, wrong=(0,))
    (outcome,) = scoring.score([folder], DETECTOR)
    assert (outcome.computed, outcome.reused, outcome.problem) == (6, 0, None)
    names = ("shapes-detector", "shapes-detector:colors", "shapes-detector:counting")
    assert values(folder) == pytest.approx(dict(zip(names, (5 / 6, 2 / 3, 1.0), strict=True)))
    for row in read_scores(folder):
        assert row["low"] < row["value"] <= row["high"] <= 1 and row["images"] == 6
        assert row["fingerprint"] == made_score(ShapesDetector()).fingerprint and "detector" in row["identity"]


def test_a_reference_that_no_chosen_metric_uses_is_refused(tmp_path):
    folder, settings = drawn_run(tmp_path, n=2), Settings(reference=tmp_path)
    refused("--reference: no chosen metric uses reference images", scoring.score, [folder], DETECTOR, settings)
    assert values(folder) == {}
    scoring.score([folder], [*DETECTOR, "shapes-frechet"], Settings(reference=folder / "images"))
    assert "shapes-detector" in values(folder)


def test_only_missing_images_are_looked_at(tmp_path, monkeypatch):
    folder = drawn_run(tmp_path, n=3)
    scoring.score([folder], DETECTOR)
    assert "(n=3)" not in render_tables(report_rows([folder]))
    drawn_run(tmp_path, n=5)
    assert "(n=3)" in render_tables(report_rows([folder])), "scores of a part of the images"
    looked = []
    honest = scoring.read_image
    monkeypatch.setattr(scoring, "read_image", lambda *row: looked.append(Path(row[1]).name) or honest(*row))
    (outcome,) = scoring.score([folder], DETECTOR)
    assert (outcome.computed, outcome.reused) == (2, 3) and looked == ["s3-0.png", "s4-0.png"]
    assert {row["n"] for row in read_scores(folder) if row["metric"] == "shapes-detector"} == {5}
    kept = folder / "image_scores" / f"shapes-detector-{made_score(ShapesDetector()).fingerprint}"
    assert len(pd.read_parquet(kept)) == 5


class Mean(Brightness):
    """A metric of a user's own: mean of the pixels, through `preprocess`, of all images or of the images of a
    category."""

    name, summary, batch, variant = "brightness", "mean pixel value", 2, "a"
    loaded: ClassVar[list[int]] = []
    """Threads that loaded the network."""

    def __init__(self, settings=None, name="brightness", batch=2, category=None):
        super().__init__(settings)
        self.name, self.batch, self.category = name, batch, category
        self.batches: list[int] = []

    def accepts(self, category, meta):
        return self.category in (None, category)

    def identity(self):
        return {"of": self.name, "variant": self.variant}

    @cached_property
    def network(self):
        self.loaded.append(threading.get_ident())
        return np.mean

    def preprocess(self, pixels):
        return self.network(pixels)

    def features(self, samples):
        self.batches.append(len(samples))
        return [{"value": float(sample.preprocessed)} for sample in samples]


class ShortSighted(Mean):
    """Reads three letters of a caption."""

    def captions_cut(self, captions):
        return sum(len(caption) > 3 for caption in captions), 3


class Gaps(Brightness):
    """Number of the prompt, without a value for some images."""

    name, lacking = "gaps", ("s3",)

    def features_of(self, sample):
        return {"value": None if sample.prompt_id in self.lacking else float(sample.prompt_id[1:])}


def test_images_without_a_value_are_left_out_of_a_mean_and_of_differences_and_counted(tmp_path, monkeypatch):
    register(monkeypatch, "gaps", f"{__name__}:Gaps")
    runs = [drawn_run(tmp_path, n=10), drawn_run(tmp_path, n=10, spec=tiny.spec("gsd"))]
    for run, lacking in zip(runs, (("s3",), ("s5",)), strict=True):
        monkeypatch.setattr(Gaps, "lacking", lacking)
        scoring.score([run], ["gaps"]).check()
    [score] = read_scores(runs[0])
    assert score["value"] == pytest.approx((45 - 3) / 9) and score["low"] < score["value"] < score["high"]
    assert score["n"] == 9 and score["note"] == "1 of 10 images have no value"
    [compared] = [row for row in compare_runs(*runs) if row.name == "gaps"]
    assert compared.value == 0 and compared.n == 8
    monkeypatch.setattr(Gaps, "lacking", {f"s{number}" for number in range(10)})
    refused("no image has a value of gaps", scoring.score([drawn_run(tmp_path / "b", n=10)], ["gaps"]).check)


def test_an_image_is_decoded_once_for_all_metrics(tmp_path, monkeypatch):
    folder = drawn_run(tmp_path, n=9)
    looked = []
    honest = scoring.read_image
    monkeypatch.setattr(scoring, "read_image", lambda *row: looked.append(Path(row[1]).name) or honest(*row))
    scoring.score([folder], Mean(name="early", batch=4))
    drawn_run(tmp_path, n=12)
    looked.clear()
    metrics = [Mean(name="early", batch=4), Mean(name="late", batch=5), Mean(name="counts", category="counting")]
    outcomes = scoring.score([folder], metrics)
    assert sorted(looked) == sorted(f"s{number}-0.png" for number in range(12)), "each once"
    assert [(outcome.metric, outcome.computed, outcome.reused, bool(outcome.problem)) for outcome in outcomes] == [
        ("early", 3, 9, False), ("late", 12, 0, False), ("counts", 6, 0, False)
    ]  # fmt: skip
    assert all(max(metric.batches) <= metric.batch for metric in metrics)
    read = {str(row.image): honest(folder, row.image, None) for row in RunStore(folder).samples().itertuples()}
    for metric, n in zip(metrics, (12, 12, 6), strict=True):
        kept = feature_parts(folder, metric).read().to_pylist()
        expected = {row["prompt_id"]: read[f"images/{row['prompt_id']}-0.png"].mean() for row in kept}
        assert {row["prompt_id"]: row["value"] for row in kept} == pytest.approx(expected) and len(kept) == n
    assert values(folder)["early"] == pytest.approx(values(folder)["late"])


def test_a_network_is_loaded_by_the_main_thread_and_once_for_all_runs(tmp_path, monkeypatch):
    """Also for a metric that lacks only images in the middle."""
    monkeypatch.setattr(Mean, "loaded", [])
    folders = [drawn_run(tmp_path / name, n=n) for name, n in (("a", 12), ("b", 3))]
    scoring.score(folders[:1], [Mean(name="all", batch=4), Mean(name="some", batch=4, category="counting")])
    assert Mean.loaded == [threading.get_ident()] * 2
    register(monkeypatch, "brightness", f"{__name__}:Mean")
    outcomes = scoring.score(folders, ["brightness", "shapes-detector"])
    assert [(outcome.metric, outcome.computed) for outcome in outcomes] == [
        ("brightness", 12), ("shapes-detector", 12), ("brightness", 3), ("shapes-detector", 3)]  # fmt: skip
    assert len(Mean.loaded) == 3


def test_a_redone_image_is_scored_again(tmp_path, monkeypatch):
    folder = drawn_run(tmp_path, n=2)
    scoring.score([folder], DETECTOR)
    monkeypatch.setitem(synthetic.INVOCATION, "started_at", "2027-01-01T00:00:00.000+00:00")
    drawn_run(tmp_path, n=1, wrong=(0,))
    (outcome,) = scoring.score([folder], DETECTOR)
    assert (outcome.computed, outcome.reused) == (1, 1) and values(folder)["shapes-detector:colors"] == 0.0


def test_a_scorer_killed_half_way_goes_on_where_it_was(tmp_path):
    folder = drawn_run(tmp_path, n=40)
    seen = []

    class Stop(scoring.ScoreReporter):
        def image(self, *_):
            seen.append(1)
            if len(seen) == 20:
                os.kill(os.getpid(), signal.SIGKILL)

    assert forked(lambda: scoring.score([folder], DETECTOR, reporter=Stop())).returncode == -signal.SIGKILL
    (outcome,) = scoring.score([folder], DETECTOR)
    assert outcome.reused == 32 and outcome.computed == 8, "images are kept sixteen at a time"
    assert values(folder)["shapes-detector"] == 1.0


def test_two_scorers_do_not_mix(tmp_path):
    folder = drawn_run(tmp_path, n=2)
    metric = ShapesDetector()
    with writing(folder, [feature_parts(folder, metric)]), pytest.raises(SpecbenchError, match="being scored"):
        scoring.score([folder], DETECTOR).check()
    with writing(folder, [feature_parts(folder, metric)]):
        assert report_rows([folder])[0].scores == [], "reading needs no lock"


def test_prompts_without_a_scene_are_left_out_or_refused_by_name(tmp_path):
    folder = synthetic.folder(tmp_path, synthetic.SJD, synthetic.sjd())
    assert not [*scoring.score([folder], bundled_only=True)] and not (folder / "scores").exists()
    assert refused("'shapes-detector' cannot score", scoring.score, [folder], DETECTOR).exit_code == BAD_INPUT
    drawn = drawn_run(tmp_path / "drawn", n=3)
    refused(r"'geneval\[hf-m2f\]' cannot score", scoring.score, [drawn], ["shapes-detector", "geneval[hf-m2f]"])
    assert not (drawn / "scores").exists(), "refused before another metric computes"


@pytest.mark.parametrize("n, low, few", [(1, None, True), (2, 0.1, True), (40, 0.1, False), (40, None, False)])
def test_a_score_of_one_image_is_marked_as_one_of_few(monkeypatch, tmp_path, n, low, few):
    high = None if low is None else 0.9
    row = {"metric": "m:part", "value": 0.5, "low": low, "high": high, "n": n, "prompts": None, "identity": "{}"}
    monkeypatch.setattr("specbench.metrics.score_store.read_scores", lambda folder: [row])
    (shown,) = scores_to_show(tmp_path, pd.Series([str(place) for place in range(n)]))
    assert shown["too_few"] == few and (shown["low"] is None or not few)


FOREIGN = """
import sys
from dataclasses import replace
import pyarrow as pa, torch
from specbench.metrics.base import PerImageMetric, Score

class Sound(PerImageMetric):
    name, summary = "mine", "a number"
    def identity(self): return {"version": "1"}
    def accepts(self, category, meta): return True
    def features(self, samples): return [{"value": 1.0} for _ in samples]

class Exit(Sound):
    def features(self, samples): sys.exit(0)
class Unmade(Sound):
    def __init__(self, *_): sys.exit(0)
class Pipe(Sound):
    def features(self, samples): raise BrokenPipeError
class Memory(Sound):
    def features(self, samples): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
class Shape(Sound):
    def features(self, samples): return [{"value": [1.0, 2.0]} for _ in samples]
class Few(Sound):
    def features(self, samples): return []
class Picture(Sound):
    def preprocess(self, pixels): return 1 / 0
class Identity(Sound):
    def identity(self): return 5
class Missing(Sound):
    def missing_packages(self): return 1 / 0
class Downloads(Sound):
    def downloads(self): return None
class Batch(Sound): batch = 0
class Count(Sound):
    def scores(self, statistics): return [Score(self.name, one.estimate, "x") for one in super().scores(statistics)]
class Part(Sound):
    def scores(self, statistics): return [Score("shapes-clip", one.estimate, 1) for one in super().scores(statistics)]
class Up(Sound):
    def scores(self, statistics): return [replace(one, better="up") for one in super().scores(statistics)]
class Key(Sound): columns = {"prompt_id": pa.string(), "value": pa.float32()}
class Odd(Sound):
    def features(self, samples): raise GeneratorExit
class Late(Sound):
    def __init__(self, settings=None):
        super().__init__(settings)
        self.name = "../../../outside"
class Nameless(Sound): name = None
class Less(Sound): better = "less"
class Outside(Sound): name = "../../../outside"
class Builtin(Sound): name = "shapes-detector"
class Bare:
    name, features, scores, identity, columns = "bare", Sound.features, Sound.scores, Sound.identity, Sound.columns
class Own(Sound):
    def __init__(self, settings=None): self.own = 1
"""


def test_a_foreign_metric_is_named_for_its_faults_and_others_go_on(tmp_path, monkeypatch, cli):
    drawn_run(tmp_path / "out")
    (tmp_path / "foreign.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    before, named = {"Unmade", "Missing", "Batch", "Less"}, {"Outside", "Late", "Nameless", "Builtin"}
    while_scoring = set(re.findall(r"^class (\w+)", FOREIGN, re.MULTILINE)) - {"Sound", "Own", "Bare"} - before - named
    for fault in sorted(while_scoring | before):
        answer = cli("score", "--out", tmp_path / "out", "--metric", f"foreign:{fault}", *("--metric", DETECTOR[0]))
        assert answer.code == PARTIAL and "metric '" in answer.err and "a bug" not in answer.err, (fault, answer.err)
        assert ("shapes-detector" in answer.out) == (fault not in before)
        assert fault != "Up" or "better of the score mine is 'up', not lower or higher" in answer.err
    for fault in sorted(named):
        cli("score", "--out", tmp_path / "out", "--metric", f"foreign:{fault}").refused("is called")
    cli("score", "--out", tmp_path / "out", "--metric", "foreign:Bare").refused("subclass specbench.metrics.base")
    for sound in ("Sound", "Own"):
        assert cli("score", "--out", tmp_path / "out", "--metric", f"foreign:{sound}").code == 0
    assert not list(tmp_path.glob("outside*"))


def test_what_one_metric_cannot_compute_leaves_the_others_alone(tmp_path, cli):
    folder = drawn_run(tmp_path / "a", n=2)  # one sample a prompt
    outcome = cli("score", folder, "--metric", "diversity[shapes]", "--metric", "shapes-detector", "--device", "cpu")
    refused = "needs 2 samples per prompt (all other scores are stored; run with --samples 2"
    assert outcome.code == PARTIAL and refused in " ".join(outcome.err.split())
    assert not [*(folder / "image_scores").glob("diversity*")] and values(folder)["shapes-detector"] == 1


@pytest.mark.parametrize("lack", ["picture", "rows"])
def test_one_run_without_images_does_not_keep_others_from_being_scored(tmp_path, lack, cli):
    whole = [drawn_run(tmp_path / name, n=2) for name in ("a", "b")]
    if lack == "picture":
        lacking = drawn_run(tmp_path / "c", n=2)
        (lacking / "images" / "s1-0.png").unlink()
    else:
        lacking = drawn_run(tmp_path / "c", n=0)
    outcome = cli("score", whole[0], lacking, whole[1], "--metric", "shapes-detector", "--json", "--device", "cpu")
    assert outcome.code == PARTIAL and outcome.err.count("error:") == 1
    assert ("s1-0.png is missing" if lack == "picture" else "it has no images") in outcome.err.splitlines()[-1]
    assert "all other scores are stored" in outcome.err
    assert [values(folder)["shapes-detector"] for folder in whole] == [1, 1] and not read_scores(lacking)
    error = refused("", lambda: scoring.score([lacking], DETECTOR).check())
    assert error.exit_code == BAD_INPUT and "others" not in str(error)


def test_damaged_scores_are_named_or_computed_again(tmp_path):
    folder = drawn_run(tmp_path, n=2)
    scoring.score([folder], DETECTOR)
    path = next((folder / "scores").glob("*.parquet"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns("images"), path)
    scoring.score([folder], DETECTOR).check()
    score = read_scores(folder)[0]
    assert score["images"] == 2 and stored_difference(folder, folder, score)[0].value == 0
    (part,) = (folder / "image_scores").glob("*/*.parquet")
    table = pq.read_table(part)
    words = pa.array([["a", "b"]] * len(table))
    pq.write_table(table.set_column(table.schema.get_field_index("value"), "value", words), part)
    assert stored_difference(folder, folder, score) is None, "values that are no numbers"
    path.write_bytes(path.read_bytes()[:-9])
    assert path.name in refused("damaged", report_rows, [folder]).what


def test_an_edited_metric_is_another_score_named_in_words_and_paired_without_its_class(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    runs, notes = [drawn_run(tmp_path / "o", n=8), drawn_run(tmp_path / "o", n=8, spec=tiny.spec("gsd"))], []
    reporter = scoring.ScoreReporter()
    reporter.note = notes.append
    for hour, factor in ((14, 1), (15, 2)):
        (tmp_path / "edited_metric.py").write_text(FOREIGN.partition("class Exit")[0].replace("1.0", "value()"))
        with (tmp_path / "edited_metric.py").open("a") as file:
            file.write(f"def value(): return {factor}.0\n")
        os.utime(tmp_path / "edited_metric.py", (hour * 3600, hour * 3600))
        sys.modules.pop("edited_metric", None)
        scoring.score(runs, ["edited_metric:Sound"], reporter=reporter)
    assert [note for note in notes if "has changed" in note] == [
        "the code of mine has changed: images are scored again; earlier scores keep a separate column"
    ]
    headings = [column.heading for column in score_columns(report_rows(runs))]
    assert len(headings) == 2 and all(re.fullmatch(r"mine \([0-9a-f]{8}\)", text) for text in headings)
    page = html.page(report_rows(runs))
    assert all(page.count(heading) >= 2 and f"{heading}: edited 01 Jan " in page for heading in headings)
    sys.modules.pop("edited_metric")
    (tmp_path / "edited_metric.py").unlink()
    differences = [row for row in compare_runs(*runs) if row.name in headings]
    assert [row.value for row in differences] == [0, 0] and {row.n for row in differences} == {8}
    assert all(row.note.startswith("edited 01 Jan ") for row in differences)
    checked = [row for row in verify(tmp_path / "o") if row["check"] == "score"]
    assert len(checked) == 4 and {row["status"] for row in checked} == {"ok"}
    assert {row["detail"].partition(")")[0] + ")" for row in checked} == set(headings)


def test_captions_that_a_metric_cuts_are_stored_and_said(tmp_path, monkeypatch):
    folder = drawn_run(tmp_path, n=4)
    register(monkeypatch, "brightness", f"{__name__}:ShortSighted")
    scoring.score([folder], ["brightness"])
    [score] = (row for row in read_scores(folder) if row["metric"] == "brightness")
    assert score["cut"] == 1.0 and score["note"] == "4 of 4 captions are truncated, to 3 tokens"
    assert f"brightness: {score['note']}." in render_tables(report_rows([folder]), everything=True)
    [file] = (folder / "scores").glob("brightness*.parquet")
    pq.write_table(pq.read_table(file).drop_columns("cut"), file)
    assert read_scores(folder)[0]["cut"] is None, "of a version that did not count"
    scoring.score([folder], ["brightness"])
    assert 1.0 in [row["cut"] for row in read_scores(folder)]


def test_metrics_of_any_sequence_are_scored_alone_and_an_empty_one_scores_nothing(tmp_path):
    folder = drawn_run(tmp_path, n=1)
    assert not scoring.score([folder], ()).outcomes and not values(folder), "of a table whose metrics lack weights"
    for names in (np.array, pd.Series, tuple, list, set, iter):
        scored = api.score([folder], names(DETECTOR), long=True)["metric"]
        assert {*scored.str.partition(":")[0]} == {*DETECTOR}, names
    assert {*DETECTOR} < {*api.score([folder], (), bundled_only=True, long=True)["metric"]}


def test_metrics_and_a_protocol_read_each_picture_once(tmp_path, monkeypatch):
    register(monkeypatch, "brightness", f"{__name__}:Mean")
    monkeypatch.setattr("specbench.metrics.catalog.find_protocol", lambda name: ("shapes-detector", "geneval[hf-m2f]"))
    reads = []
    monkeypatch.setattr(scoring, "read_image", lambda *image: reads.append(image[1]) or read_image(*image))
    drawn_run(tmp_path, n=3)
    rows = api.score(metrics=["brightness"], out=tmp_path, protocol="sjd")
    assert len(reads) == len(set(reads)) == 3
    assert {"brightness", "shapes-detector"} <= {*rows.columns} and len(rows) == 1


def test_scores_of_features_computed_on_a_gpu_say_that_float32_was_not_tf32():
    cpu, cuda = (metric_catalog.metric("shapes-detector")(Settings(device)) for device in ("cpu", "cuda:1"))
    assert made_score(cpu).facts == dict(cpu.identity())
    assert made_score(cuda).facts == {**cpu.identity(), "float32": "without TF32"}
    assert all(made(cpu).fingerprint != made(cuda).fingerprint for made in (made_score, made_features))


def test_a_metric_that_raises_is_named_before_runs_that_cannot_be_scored():
    nothing, broken = SpecbenchError("no images"), PluginError("metric 'mine'", ValueError("no"), "mine")
    joint = scoring.Scoring([scoring.ScoreOutcome("a", problem=problem) for problem in (nothing, broken)], []).problem()
    assert joint.exit_code == PARTIAL and "mine" in joint.what and "1 more problem" in joint.what
