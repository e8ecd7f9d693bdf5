"""`specbench bench` and `run --sweep`: every table can be asked for, what is there is not done again, rows take turns,
what cannot run is named, and nothing but what was asked for runs."""

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from refusals import refused

import specbench
from specbench.decoding.generation import SPANS
from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics.base import Settings
from specbench.papers import planned_cells, reproduce
from specbench.papers.planned_cells import find_measured, wanted_fields, with_bundled_scores
from specbench.papers.render import render_tables
from specbench.papers.reproduce import estimate, measured_table, total
from specbench.papers.table_files import load_table, table_names
from specbench.reporting.comparability import mismatched_fields
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.run_progress import Reporter
from specbench.store.run_info import read_info

TINY = {"random-weights": True, "scale": "tiny", "dtype": "float32", "threads": "1"}
"""The table's own model, small and untrained."""


class Listener(Reporter):
    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        self.rows.append((run_id, str(row["prompt_id"])))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, object]:
    """Flags for two prompts and a results folder that holds GSD's second table."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "two.txt").write_text("a red circle\na blue square\n")
    flags = TINY | {"prompts": str(folder / "two.txt"), "out": str(folder / "results")}
    listener = Listener()
    done = reproduce.run_table(reproduce.plan_table(load_table("gsd-2"), flags, env={}), listener)
    return {"flags": flags, "done": done, "rows": listener.rows, "folder": folder}


def command(flags: Mapping[str, object]) -> list[str]:
    return [
        part for name, value in flags.items() for part in ([f"--{name}"] if value is True else [f"--{name}", value])
    ]


@pytest.mark.parametrize("name", [name for name in table_names() if load_table(name).all_settings()])
def test_every_table_can_be_asked_for(name, tmp_path):
    """Unchanged, every row has a plan, or says what must be installed; in small every row has a plan."""
    table = load_table(name)
    for entry in reproduce.plan_table(table, {"out": str(tmp_path)}, env={}):
        assert entry.plan or entry.problem.exit_code == MISSING_PREREQUISITE, str(entry.problem)
    planned = reproduce.plan_table(table, {"model": "shapes", "limit": "16", "out": str(tmp_path)}, env={})
    rows = estimate(table, planned)
    assert len({row["run_id"] for row in rows}) == len(rows), "a run is listed once"
    assert {row["decoder"] for row in rows} == {entry.settings.decoder[0] for entry in planned}
    for row in rows:
        assert row["problem"] is None and (row["model"], row["done"]) == ("shapes", 0), row
        assert row["images"] % 16 == 0 and row["seconds"] is None
    images = sum({row["run_id"]: row["images"] for row in rows}.values())
    assert total(rows).startswith(f"{images} images to decode, time unknown before the first image, at most ")


def test_what_the_table_says_is_what_runs_and_rows_take_turns_prompt_by_prompt(two):
    for row in reproduce.plan_table(load_table("gsd-2"), two["flags"], env={"SPECBENCH_DECODER": "ar"}):
        options = row.plan.decoders[0].spec.options
        assert row.settings.options.items() <= options.items() and options["window"] == 16
        assert row.plan.sampling.guidance == 3.0 and row.plan.sampling.top_k == 2000
    prompts = [prompt for _, prompt in two["rows"]]
    runs = len(set(two["done"].folders.values()))
    assert runs == 5 and len(prompts) == 2 * runs
    assert len(set(prompts[:runs])) == len(set(prompts[runs:])) == 1, "every decoder does one prompt before the next"


def test_traces_are_kept_and_a_draft_head_is_given_if_they_are_needed(tmp_path):
    def traced(name: str) -> set[bool]:
        planned = reproduce.plan_table(load_table(name), {"model": "shapes", "out": str(tmp_path)}, env={})
        return {row.plan.settings.trace for row in planned}

    assert traced("gsd-fig5") == traced("cool-sd-3") == {True} and traced("gsd-fig2") == {False}
    cells = reproduce.resolve_cells(load_table("cool-sd-1"), {"head": "mine", "out": str(tmp_path)}, env={})
    heads = {cell.settings.decoder[0]: cell.values.value("head") for cell in cells if not cell.problem}
    assert heads.pop("ar") in (None, "") and set(heads.values()) == {"mine"}


def test_what_is_there_is_not_done_again_and_an_estimate_is_the_pace_of_the_recorded_rows(two, cli):
    listener = Listener()
    reproduce.run_table(reproduce.plan_table(load_table("gsd-2"), two["flags"], env={}), listener)
    assert listener.rows == []
    dry = cli("bench", "gsd-2", *command(two["flags"]), "--dry-run", "--json")
    rows = json.loads(dry.out)
    assert dry.code == 0 and all((row["images"], row["done"], row["seconds"]) == (2, 2, 0) for row in rows)
    more = cli("bench", "gsd-2", *command(two["flags"]), "--samples", "3", "--dry-run")
    assert more.code == 0 and "20 images to decode, about" in more.err, "the time of the recorded rows"
    table = load_table("gsd-2")
    rows = estimate(table, reproduce.plan_table(table, two["flags"] | {"samples": "3"}, env={}))
    for row, folder in zip(rows, two["done"].folders.values(), strict=True):
        spans = specbench.load(folder.name, folder.parent)[[f"{span}_ms" for span in SPANS]]
        assert row["run_id"] == folder.name and row["seconds"] == pytest.approx(4 * spans.sum(axis=1).mean() / 1e3)


def test_a_table_that_a_signal_stopped_is_shown_without_being_scored(two, monkeypatch):
    stopped = replace(two["done"], trouble=SpecbenchError("stopped by SIGTERM", "", 143))
    monkeypatch.setattr(reproduce, "run_table", lambda *_: stopped)
    monkeypatch.setattr(reproduce, "score_table", lambda *_: pytest.fail("scored"))
    settings = Settings(offline=True)
    table = reproduce.bench_table(load_table("gsd-2"), two["flags"], two["flags"]["out"], settings, env={})
    assert table.problem is stopped.trouble


def test_a_report_only_prints(two, cli):
    out = Path(str(two["flags"]["out"]))
    before = sorted(path.name for path in out.rglob("*"))
    (out / "ignored").mkdir()
    outcome = cli("report", "gsd-2", "--prompts", two["flags"]["prompts"], "--out", out, "--format", "csv")
    (out / "ignored").rmdir()
    assert outcome.code == 0 and sorted(path.name for path in out.rglob("*")) == before
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert [row["nfe paper"] for row in rows][-1] == "636.75" and all(row["nfe measured"] == "" for row in rows), (
        "an untrained model in the place of the table's is another model"
    )


def test_nothing_that_can_run_is_5_and_names_each_reason_once(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_OFFLINE", "1")
    outcome = cli("bench", "gsd-1", "--out", tmp_path / "results")
    assert outcome.code == 5 and outcome.out == "" and not (tmp_path / "results").exists()
    assert len(outcome.err.splitlines()) == 2, "COCO is missing, PartiPrompts is missing"
    assert "prompts parti (run on a machine with" in outcome.err and "specbench fetch lumina coco" in outcome.err
    done = cli("bench", "mulo-sd-1", "--dry-run")
    assert done.code == 2 and "no row of mulo-sd-1 can be run" in done.err and not done.out


def test_a_row_that_cannot_run_does_not_keep_the_others(two):
    planned = reproduce.plan_table(load_table("gsd-2"), two["flags"], env={})
    broken = replace(planned[0], plan=None, problem=SpecbenchError("its head is lost", "", MISSING_PREREQUISITE))
    warnings: list[str] = []
    done = reproduce.run_table([broken, *planned[1:]], warn=warnings.append)
    assert len(done.folders) == len(planned) - 1 and done.found[broken.settings] == "its head is lost"
    assert warnings == ["lumina (sjd) not run: its head is lost"]


def test_a_sweep_decodes_every_combination_once(two, tmp_path, cli):
    flags = TINY | {"model": "lumina", "prompts": two["flags"]["prompts"], "limit": "1", "out": str(tmp_path)}
    sweep = ("run", *command(flags), "--decoder", "ar,gsd", "--sweep", "G=3,10", "--sweep", "window=4,8", "--quiet")
    outcome = cli(*sweep)
    specs = [json.loads((folder / "run.json").read_text())["spec"] for folder in tmp_path.iterdir()]
    values = sorted((spec["decoder"]["options"]["G"], spec["decoder"]["options"]["window"])
                   for spec in specs if spec["decoder"]["name"] == "gsd")  # fmt: skip
    assert outcome.code == 0 and values == [(3, 4), (3, 8), (10, 4), (10, 8)] and len(specs) == 5, "AR is one run"
    assert len(outcome.out.splitlines()) == 5
    rows = specbench.report(out=tmp_path).to_dict("records")
    assert all(row["n"] == 1 and row["speedup"] > 0 for row in rows)
    read = {row["run_id"]: read_info(tmp_path / row["run_id"]) for row in rows}
    assert not any(mismatched_fields(read[row["run_id"]], read[row["baseline"]]) for row in rows)


def test_of_two_measurements_the_one_with_more_decoded_images_is_shown(tmp_path, two):
    planned = reproduce.plan_table(load_table("gsd-2"), two["flags"] | {"threads": None}, env={})[:1]
    spec = planned[0].plan.spec(planned[0].plan.decoders[0].spec, "w" * 64)
    synthetic.folder(tmp_path, replace(spec, threads=1), [*synthetic.sjd(1), None, None])
    more = synthetic.folder(tmp_path, replace(spec, threads=2), synthetic.sjd(2))
    assert find_measured(planned, tmp_path) == {planned[0].settings: more}


def test_a_report_of_a_table_plans_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(planned_cells, "make_plan", lambda _: pytest.fail("a report must not plan"))
    joined = specbench.report_table("gsd-1", out=tmp_path)
    assert not any(line.runs for line in joined.lines)
    refused("did you mean 'shapes'", specbench.report_table, "gsd-1", model="shaps", out=tmp_path)
    refused("nowhere", specbench.report_table, "gsd-1", prompts="nowhere.txt", out=tmp_path)


def test_prompts_of_released_code_reach_the_run_unless_the_model_is_replaced(tmp_path):
    def settings(flags: dict) -> set[tuple]:
        cells = reproduce.resolve_cells(load_table("sjd-1"), flags | {"out": str(tmp_path)}, env={})
        names = ("model", "guidance-rows", "prompt-form")
        return {tuple(cell.values.value(name) for name in names) for cell in cells}

    assert settings({}) == {("lumina", "released", "official"), ("anole", "released", "released")}
    assert settings({"model": "shapes"}) == {("shapes", "official", "official")}
    assert settings({"model": "lumina"}) == {("lumina", "released", "official"), ("lumina", "official", "official")}


def test_scores_of_a_swept_row_are_in_each_of_its_columns_and_a_figure_has_a_panel_of_them(tmp_path):
    """Of runs of every row of sjd-6 at every K in the place of Lumina-mGPT, each with a different score."""
    cells = reproduce.resolve_cells(load_table("sjd-6"), {"model": "shapes", "out": str(tmp_path)}, env={})
    for place, cell in enumerate(cells):
        stated = wanted_fields(cell.values)
        (planned,) = plan_decoders(cell.values)
        fields = {name: stated[name] for name in ("model", "prompts", "seed", "batch", "sampling")}
        spec = replace(synthetic.SJD, decoder=planned.spec, **fields)
        run = synthetic.folder(tmp_path, spec, synthetic.sjd(2))
        score = {"metric": "shapes-clip", "value": place / 10, "low": None, "high": None, "n": 2, "images": 2}
        (run / "scores").mkdir()
        score |= {"fingerprint": "aaaaaaaa", "identity": "{}"}
        pq.write_table(pa.Table.from_pylist([score]), run / "scores" / "shapes-clip-aaaaaaaa.parquet")
    done = measured_table(load_table("sjd-6"), model="shapes", out=tmp_path)
    runs = sorted(tmp_path.iterdir())
    figure, distance = (with_bundled_scores(load_table(name), runs) for name in ("gsd-fig10", "cool-sd-fig4"))
    assert figure.axes == ({"x": "nfe", "y": "score:clip"}, {"x": "nfe", "y": "score:shapes-clip"})
    assert distance.axes[1:] == (), "a distance has none here"
    headers = [column.header for column in done.table.columns]
    assert headers[-3:] == ["shapes clip, K = 10", "shapes clip, K = 100", "shapes clip, K = 2000"]
    cells = [line.cells[column.name] for line in done.lines for column in done.table.columns]
    assert all(cell.why is None and cell.value is not None for cell in cells)


def test_a_substituted_model_appears_once_and_under_its_own_name(tmp_path):
    table = load_table("sjdpp-1")
    done = measured_table(table, model="shapes", out=tmp_path)
    assert {line.group for line in done.lines} == {None} and len(done.lines) < len(table.rows)
    assert len({line.label for line in done.lines}) == len(done.lines)
    assert done.lines[0].label == "ar" and all(cell.paper is None for cell in done.lines[0].cells.values())
    assert any("rows of the paper become" in note for note in done.table.notes)
    joined = measured_table(table, out=tmp_path)
    assert len(joined.lines) == len(table.rows) and "**" in re.sub(r"\| \*\*", "", render_tables([joined]))
    left_over = measured_table(load_table("gsd-1"), model="shapes", out=tmp_path)
    assert all(cell.paper is None for line in left_over.lines for cell in line.cells.values())
    labels = [line.label for line in left_over.lines]
    assert labels[-5:] == ["gsd G=3", "gsd", *(f"gsd G={G}" for G in (25, 50, 100))], "rows of two groups in one order"


@pytest.mark.parametrize(
    ("model", "flags", "scales"), [("tar-1.5b", {}, {None}), ("tar-1.5b", {"cfg": 2.0}, {2.0}), ("janus", {}, {3.0})]
)
def test_a_substituted_model_without_guidance_leaves_out_the_table_s(tmp_path, model, flags, scales):
    """The user's choice stays, and is refused when the run is planned."""
    flags |= {"model": model, "out": str(tmp_path)}
    cells = reproduce.resolve_cells(load_table("gsd-1"), flags, env={})
    assert {cell.values.value("cfg") for cell in cells} == scales


def test_valid_headings_are_kept_and_no_row_appears_under_another_model(tmp_path):
    """Two models run Cool-SD and UniformRSD in a figure; in a table, Anole's rows run Lumina-mGPT."""
    figure = measured_table(load_table("cool-sd-fig5"), model="shapes", out=tmp_path)
    decoders = ["cool-sd", "cool-sd-linear", "uniform-rsd"]
    assert list(dict.fromkeys(line.group for line in figure.lines)) == decoders, "separate curves"
    lines = measured_table(load_table("sjd-1"), model="lumina", out=tmp_path).lines
    assert [line.group for line in lines] == ["Lumina-mGPT"] * 4 + [None] * 2
    assert lines[3].label == "D w. SJD (ISP)" and lines[4].label.startswith("ar guidance-rows=official")
    (map_,) = measured_table(load_table("gsd-fig2"), model="shapes", out=tmp_path).lines
    assert map_.label == "ar"


def test_a_mistyped_column_is_refused_before_the_first_image(cli, tmp_path):
    bench = ("bench", "gsd-1", "--model", "shapes", "--limit", "1", "--out", tmp_path, "--columns")
    refusal = cli(*bench, "NFE,steps savd")
    assert refusal.code == 2 and "did you mean 'steps saved'" in refusal.err and not any(tmp_path.iterdir())
    assert cli(*bench, "nfe,CLIP-Score,shapes-clip,Shapes detector", "--dry-run").code == 0, "scores may be added"


def test_a_dry_run_says_what_was_chosen_and_only_where_it_was_used(cli, tmp_path):
    shown = cli("bench", "sjd-7", "--model", "shapes", "--limit", "1", "--dry-run", "--out", tmp_path).out
    assert "Chosen: init = left-sample: the paper does not say" in shown
    row = next(line for line in shown.splitlines() if "jacobi top-k=10" in line)
    numbers = [int(number) for number in row.rstrip().rpartition("  ")[2].split()]
    assert all(f"\n{number}. Chosen: " in shown for number in numbers) and numbers == sorted(numbers) != []
    assert "Chosen: init = left-sample: the paper does not say" in cli("report", "sjd-7", "--out", tmp_path).out
    report, prompts = ("report", "sjd-7", "--out", tmp_path), "Chosen: prompts = parti: not named"
    assert prompts in cli(*report).out
    (tmp_path / "one.txt").write_text("a red circle\n")
    for flags in (("--model", "shapes"), ("--prompts", tmp_path / "one.txt")):
        assert "Chosen: prompts" not in cli(*report, *flags).out
        assert "Chosen: prompts" not in cli("bench", *report[1:], *flags, "--dry-run").out
    assert "Chosen: prompts = parti" in cli("bench", *report[1:], "--dry-run").out
    report = ("report", "cool-sd-1", "--out", tmp_path)
    heads = ["Chosen: head" in cli(*report, *flags).out for flags in ((), ("--model", "shapes"))]
    assert heads == [True, False], "shapes comes with a head"


def test_the_run_lines_of_a_dry_run_decode_the_same_runs_and_shards_share_them(cli, tmp_path):
    bench = ("bench", "gsd-1", "--model", "shapes", "--limit", "2", "--threads", "1")
    bench = (*bench, "--dry-run", "--out", str(tmp_path))
    rows = json.loads(cli(*bench, "--json").out)
    lines = cli(*bench).out.partition("without scores and table:\n")[2].splitlines()
    typed = [cli(*line.split()[1:], "--dry-run", "--json") for line in lines if line]
    run_ids = {row["run_id"] for outcome in typed for row in json.loads(outcome.out)}
    assert run_ids == {row["run_id"] for row in rows} and len(run_ids) > 10
    part = json.loads(cli(*bench, "--shard", "2/2", "--json").out)
    assert {row["run_id"] for row in part} == run_ids and {row["images"] for row in part} == {1}


def test_a_users_decoder_is_in_each_group_with_the_papers_settings(cli, tmp_path):
    bench = ["bench", "gsd-1", "--with", "scd-mc:refine=gumbel", "--limit", "2", "--dry-run", "--json", "--out"]
    rows = json.loads(cli(*bench, tmp_path).out)
    added, sjd = ([row for row in rows if row["decoder"] == name] for name in ("scd-mc", "sjd"))
    assert [row["prompts"] for row in added] == ["parti", "coco"] == [row["prompts"] for row in sjd]
    assert added[0]["options"] == {"refine": "gumbel"} | sjd[0]["options"] and added[0]["top_k"] == 2000
    bench[1] = "sjd-1"  # a group of this table has no row of SJD
    by_group = [row for row in json.loads(cli(*bench, tmp_path, "--model", "shapes").out) if row["decoder"] == "scd-mc"]
    assert {row["options"]["fresh-q"] for row in by_group} == {"onehot"}, "as in the group with a row of SJD"
    bench[1] = "gsd-1"
    labels = [row["rows"] for row in json.loads(cli(*bench, tmp_path, "--model", "shapes").out)]
    assert "scd-mc:refine=gumbel" in labels and "sjd" in labels, "its name as typed, and a decoder's"


def test_the_seeds_of_a_paper_are_runs_of_one_line_and_a_flag_chooses_one_of_them(cli, tmp_path):
    bench = (
        "bench", "cool-sd-2", "--model", "shapes", "--limit", "2", "--threads", "1", "--out", tmp_path, "--dry-run",
    )  # fmt: skip
    rows = json.loads(cli(*bench, "--json").out)
    assert {row["seed"] for row in rows} == {42, 43, 44, 45, 46} and len({row["run_id"] for row in rows}) == len(rows)
    shown = cli(*bench).out
    assert "42, 43, 44, 45, 46" in shown and "Chosen: seed = 42, 43, 44, 45, 46: " in shown
    (line,) = shown.partition("without scores and table:\n")[2].splitlines()
    assert line.endswith("--sweep seed=42,43,44,45,46")
    typed = json.loads(cli(*line.split()[1:], "--dry-run", "--json").out)
    assert {row["run_id"] for row in typed} == {row["run_id"] for row in rows}
    (seed,) = {row["seed"] for row in json.loads(cli(*bench, "--seed", "44", "--json").out)}
    assert seed == 44 and "Chosen: seed" not in cli(*bench, "--seed", "44").out
