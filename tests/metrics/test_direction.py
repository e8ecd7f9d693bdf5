"""A plug-in metric declares facts; several modules: scores, reports, Pareto front, comparisons, downloads."""

import importlib
import json
import os
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import synthetic
from drawn import drawn_run
from forked import forked_command
from loopback_hub import loopback_hub
from PIL import Image

import specbench
from specbench.checks.contracts import check_all
from specbench.errors import SpecbenchError
from specbench.metrics import catalog
from specbench.metrics.score_store import read_scores, scores_to_show
from specbench.reporting import report_rows
from specbench.reporting.columns import score_columns
from specbench.reporting.compare import compare_runs, reasons, scores_beside, verdict
from specbench.reporting.plot_data import pareto
from specbench.reporting.row import OverAR
from specbench.reporting.terminal import image_card
from specbench.reporting.text_formats import long_rows
from specbench.stats import Estimate
from specbench.store.run_store import RunStore

PLUGIN = """
from specbench.metrics.base import PerImageMetric

class Mine(PerImageMetric):
    name, summary = "mine", "standard deviation of the pixels"
    better, kind, unit, unjudged = "{better}", "{kind}", "levels", "the sky"
    def identity(self): return {{}}
    def features_of(self, sample): return {{"value": float(sample.pixels.std())}}
"""


def test_the_catalogue_and_the_classes_state_the_same_directions():
    for name, entry in catalog.METRICS.items():
        module, _, cls = entry.target.partition(":")
        declared = getattr(importlib.import_module(module), cls)
        assert catalog.direction(name) == declared.better, name
        assert (name.partition("[")[0] in catalog.DISTANCES) == (declared.kind == "distance"), name


@pytest.fixture
def scored(tmp_path, cli, monkeypatch):
    """Scores AR and SJD, whose images are flat, by a plug-in that is gone afterwards; returns their folder."""

    def run(better: str, kind: str = "plain"):
        name = f"mine_{better}_{kind}"
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(better=better, kind=kind))
        with monkeypatch.context() as context:
            context.syspath_prepend(tmp_path)
            out = tmp_path / name
            for spec, wrong in ((synthetic.AR, ()), (synthetic.SJD, range(12))):
                drawn_run(out, 12, wrong, spec)
            assert cli("score", "--out", out, "--metric", f"{name}:Mine").code == 0
        (tmp_path / f"{name}.py").unlink()
        sys.modules.pop(name)
        return out

    return run


def test_a_mean_over_images_is_not_averaged_over_categories_whatever_its_class_declares(scored, cli):
    out = scored("higher", "proportions")
    stored = [score for run in out.iterdir() for score in read_scores(run)]
    assert [score["kind"] for score in stored] == ["plain"] * 2, "kind decides how scores are pooled and subtracted"
    assert "Wilson" not in cli("report", "--out", out, "--explain").out


def test_what_a_metric_does_not_judge_is_stated_once_for_all_parts():
    scores = [{"metric": name, "unjudged": text} for name, text in (("m", "skies"), ("m:a", "skies"), ("m:b", None))]
    assert catalog.unjudged(scores) == ["m does not judge skies."]


@pytest.mark.parametrize("better, arrow, best", [("lower", "↓", "sjd"), ("higher", "↑", "ar")])
def test_reports_follow_what_a_plug_in_declares_without_it(scored, cli, tmp_path, better, arrow, best):
    out = scored(better)
    ar, sjd = sorted(report_rows([*out.iterdir()]), key=lambda row: row.decoder)
    assert cli("report", "--out", out, "--html", page := tmp_path / "page.html").code == 0
    printed = [("report", "--out", out, *more) for more in ((), ("--format", "markdown"))]
    printed = [cli(*command).out for command in (*printed, ("compare", ar.folder, sjd.folder))]
    assert all(f"mine {arrow}" in text for text in (*printed, page.read_text()))
    assert "mine does not judge the sky." in page.read_text()
    assert f"mine: {better} values are better, levels, defined by" in cli("report", "--out", out, "--explain").out
    card = image_card(ar.folder, RunStore(ar.folder).samples()["prompt_id"][0])
    assert card["scores"].keys() == {"mine"} and card["unjudged"] == ["mine does not judge the sky."]
    [column], values = score_columns([ar, sjd]), {row.decoder: row.scores[0].estimate.value for row in (ar, sjd)}
    assert column.best([ar, sjd]) == pytest.approx(values[best], abs=1e-3)  # is printed in bold

    assert [row["unit"] for row in long_rows([ar]) if row["number"] == "mine"] == ["levels"]
    fast = replace(sjd, over_ar=OverAR(Estimate(2.0, 1.9, 2.1)))
    dominated = pareto([replace(ar, over_ar=OverAR(Estimate(1.0, 1.0, 1.0))), fast], "mine", ar.scores[0].fingerprint)
    assert [point.dominated_by for point in dominated] == [sjd.label if best == "sjd" else None, None]


def test_the_stored_name_of_a_plug_ins_metric_is_answered_with_its_class(scored, cli, monkeypatch):
    out = scored("lower")
    for more in ((), ("--against", "ar")):
        answer = cli("score", "--out", out, "--metric", "mine", *more)
        assert answer.code == 2 and "--metric mine_lower_plain:Mine" in answer.err
    with pytest.raises(SpecbenchError, match="mine_lower_plain:Mine"):
        specbench.differences("ar", (), "mine", out)
    (out.parent / "mine_lower_plain.py").write_text(PLUGIN.format(better="lower", kind="plain"))
    monkeypatch.syspath_prepend(out.parent)
    [row] = json.loads(cli("score", "--out", out, "--metric", "mine_lower_plain:Mine", "--against", "ar", "--json").out)
    values = {score["metric"]: score["value"] for score in read_scores(out / row["run_id"])}
    ar = read_scores(out / row["baseline"])[0]["value"]
    assert row["difference"] == pytest.approx(values["mine"] - ar, abs=1e-4) and row["n"] == 12
    assert cli("score", "--out", out, "--metric", "mein").err.startswith("error: unknown metric 'mein'")


TABLE = """title = "scores"
columns = [{{ key = "{key}", header = "mine"{more} }}]
rows = [{{ label = "AR", decoder = "ar", model = "shapes", prompts = "shapes" }}]
"""


@pytest.mark.parametrize("better, arrow, other", [("lower", "↓", "higher"), ("higher", "↑", "lower")])
def test_a_table_has_the_direction_of_a_score_without_its_plug_in(
    scored, cli, tmp_path, monkeypatch, better, arrow, other
):
    out, table, code = scored(better), tmp_path / "own.toml", tmp_path / f"mine_{better}_plain.py"

    def report(key: str, more: str = "", out=out):
        table.write_text(TABLE.format(key=key, more=more))
        return cli(
            "report", table, "--out", out, *(word for run in sorted(out.glob("*-*")) for word in ("--with", run))
        )

    for key in ("score:mine", f"score:{code.stem}:Mine"):
        values = [f"| {read_scores(run)[0]['value']:.2f} [" for run in out.iterdir()]
        shown = report(key).out.replace("\xa0", " ")
        assert all(text in shown.replace("**", "") for text in (f"| mine {arrow} |", *values))
        assert ("| **" in shown) == (better == "lower"), "SJD's is lower; AR's is never bold"
        contradiction = f"own.toml: columns[0].better: '{other}', but {better} values of mine are better"
        report(key, f', better = "{other}"').refused(contradiction)
        code.write_text(PLUGIN.format(better=better, kind="plain"))
        monkeypatch.syspath_prepend(tmp_path)
    report("score:mien").refused("columns[0].key: unknown metric 'mien'")
    report("score:mine", out=tmp_path / "empty").refused("columns[0].key: unknown metric 'mine'")


def test_a_distance_of_a_plug_in_is_not_compared_in_a_report(scored):
    plain, distance = (sorted(scored("lower", kind).iterdir()) for kind in ("plain", "distance"))
    assert [row.name for row in scores_beside(*plain)] == ["mine"] and scores_beside(*distance) == []


def test_a_difference_that_a_distance_does_not_define_is_said(scored, cli, monkeypatch):
    out = scored("lower", "distance")
    undefined = "    def difference(self, features, baseline): return None\n"
    (out.parent / "mine_lower_distance.py").write_text(PLUGIN.format(better="lower", kind="distance") + undefined)
    monkeypatch.syspath_prepend(out.parent)
    said = cli("score", "--out", out, "--metric", "mine_lower_distance:Mine", "--against", "ar").err
    assert "mine: no paired difference of enumerable-sjd" in said, said


def test_networks_that_a_plug_in_declares_are_downloaded_and_part_of_its_identity(tmp_path):
    (tmp_path / "judge").mkdir()
    for name in ("config.json", "words.txt", "other.md"):
        (tmp_path / "judge" / name).write_text("{}")
    declared = 'repositories, files = {"judge": "owner/judge"}, ("config.json", "*.txt")'
    text = PLUGIN.format(better="higher", kind="plain")
    (tmp_path / "judged.py").write_text(text.replace("    def identity", f"    {declared}\n    def identity"))
    folder = drawn_run(tmp_path / "out", 2)
    with loopback_hub() as hub:
        hub.put("owner/judge", "a" * 40, tmp_path / "judge")
        where = {"env": {**os.environ, **hub.env(tmp_path)}, "path": [tmp_path]}
        command = ["score", "--out", tmp_path / "out", "--metric", "judged:Mine"]
        offline = forked_command([*command, "--offline"], **where)
        assert offline.returncode == 5 and "owner/judge is not on this disk" in offline.stderr
        done = forked_command(command, **where)
        assert done.returncode == 0 and not any("other.md" in path for path in hub.asked), done.stderr
    [score] = read_scores(folder)
    assert json.loads(score["identity"])["judge"].endswith(f" at {'a' * 40}")


OLDER = [
    ("fid[clean]", "lower", "distance"), ("kid[tf1]", "lower", "distance"), ("recall[clean]", "higher", "plain"),
    ("shapes-frechet", "lower", "distance"), ("shapes-detector:color", "higher", "proportions"),
    ("geneval[official]", "higher", "proportions"), ("geneval2[qwen3-vl-8b]", "higher", "plain"),
    ("other", "higher", "plain"),
]  # fmt: skip


def test_scores_of_older_files_have_the_direction_of_specbench_s_metrics(tmp_path, cli):
    folder = drawn_run(tmp_path, 10, samples=2)
    assert cli("score", "--out", tmp_path, "--metric", "shapes-detector").code == 0
    [file] = (folder / "scores").glob("*.parquet")
    assert {score["prompts"] for score in read_scores(folder)} == {5, 10}
    shown = scores_to_show(folder, RunStore(folder).samples()["prompt_id"])
    older = pq.read_table(file).drop_columns(["better", "kind", "prompts", "unit", "unjudged"])
    for metric, *declared in OLDER:
        pq.write_table(older.set_column(0, "metric", [[metric] * len(older)]), file)
        assert {(score["better"], score["kind"]) for score in read_scores(folder)} == {(*declared,)}, metric
        again = scores_to_show(folder, RunStore(folder).samples()["prompt_id"])
        assert [row["prompts_needed"] for row in again] == [row["prompts_needed"] for row in shown]


DISTANCE = """
from PIL import Image
from specbench.metrics.base import Metric, Score
from specbench.stats import Estimate
import pyarrow as pa

class Apart(Metric):
    name, summary, better, kind = "apart", "distance to the largest mean of a reference image", "lower", "distance"
    columns = {"mean": pa.float32()}
    def identity(self): return {}
    def features_of(self, sample): return {"mean": float(sample.pixels.mean())}
    def scores(self, statistics):
        largest = max(Image.open(path).convert("L").getpixel((0, 0)) for path in self.settings.reference.iterdir())
        return [Score(self.name, Estimate(largest - statistics["mean"].mean(), None, None), len(statistics))]
"""


def test_scores_of_a_plug_in_depend_on_the_reference_images_even_if_its_identity_lacks_them(tmp_path, cli, monkeypatch):
    (tmp_path / "distance.py").write_text(DISTANCE)
    monkeypatch.syspath_prepend(tmp_path)
    runs = [drawn_run(tmp_path / "out", 10, (), spec) for spec in (synthetic.AR, synthetic.SJD)]
    command = ("score", "--out", tmp_path / "out", "--metric", "distance:Apart")
    assert "--reference DIR" in cli(*command).err
    for level in (100, 200):
        (folder := tmp_path / str(level)).mkdir()
        Image.new("L", (8, 8), level).save(folder / "a.png")
        assert cli(*command, "--reference", folder).code == 0
    assert not any(row["status"] == "failed" for row in check_all(metric="distance:Apart"))
    names = [f"apart ({digest})" for digest in sorted(row["fingerprint"] for row in read_scores(runs[0]))]
    compared = compare_runs(*runs)
    assert [row.name for row in compared if "apart" in row.name] == names and f"Not tested: {names[0]} (" in verdict(
        compared
    )
    assert "the stored scores have no interval (scored with a different reference" in reasons(compared)[-1]
    assert all(name in cli("report", "--out", tmp_path / "out").out for name in names)
    failed = [cli("compare", *runs, "--fail-if", f"{name}<1").code for name in (*names, "apart")]
    assert failed == [4, 4, 4]


WIDTH = """
from random import Random
from specbench.metrics.base import Metric, Score, column_difference
from specbench.stats import Estimate
import pyarrow as pa

DRAW = Random(0)  # both runs have the same pictures

class Bare(Metric):
    name, summary, better, kind = "bare", "distance of brightness from 0", "lower", "distance"
    columns = {"mean": pa.float32()}
    def identity(self): return {}
    def features(self, samples): return [{"mean": sample.pixels.mean() + DRAW.random()} for sample in samples]
    def scores(self, statistics):
        return [Score(self.name, Estimate(statistics["mean"].mean(), None, None), len(statistics))]

class Wide(Bare):
    name = "wide"
    def difference(self, features, baseline): return column_difference(features, baseline, "mean")
"""


def test_compare_uses_the_difference_that_a_plug_ins_distance_defines(tmp_path, cli, monkeypatch):
    (tmp_path / "widths.py").write_text(WIDTH)
    monkeypatch.syspath_prepend(tmp_path)
    runs = [drawn_run(tmp_path / "out", 10, (), spec) for spec in (synthetic.AR, synthetic.SJD)]
    named = ("--metric", "widths:Wide", "--metric", "widths:Bare")
    assert cli("score", "--out", tmp_path / "out", *named).code == 0
    rows = {row.name: row for row in compare_runs(*runs)}
    assert rows["bare"].estimate.low is None and rows["bare"].note == "its metric defines no interval"
    assert rows["wide"].estimate.low <= rows["bare"].value <= rows["wide"].estimate.high and rows["wide"].p is not None
