"""Results of WISE's and OneIG-Bench's programs: counted as they count, and no result of another form is a score."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic

from specbench.metrics.official_results import OfficialWise
from specbench.prompts import Prompt
from specbench.prompts.public_files import ONEIG_CATEGORIES
from specbench.system.images import read_picture

MARKS = {"verified": {"score": 1.0}, "legacy": {"consistency": 2.0, "realism": 1.0, "aesthetic_quality": 0.0}}


def wise(number: int, release: str, category: str = "time") -> Prompt:
    about = {"line": number, "wise": release, "subcategory": "Festival"}
    return Prompt(str(number), f"text {number}", category, about)


def marks(folder: Path, *rows: dict) -> None:
    path = folder / "Results" / "natural_science_scores_results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


def scores(outcome) -> dict[str, float]:
    assert outcome.code == 0, outcome.err
    return {row["metric"]: row["value"] for row in json.loads(outcome.out)}


@pytest.mark.parametrize(("release", "value"), [("verified", 1.0), ("legacy", (0.7 * 2 + 0.2) / 2)])
def test_wise_goes_out_in_its_layout_and_its_two_protocols_come_back_under_two_names(release, value, tmp_path, cli):
    to, name = tmp_path / "out", f"wise-{release}"
    run = synthetic.pictured(tmp_path / "results", [wise(401, release), wise(402, release)], samples=2)
    assert cli("export", name, run, "--to", to).code == 0
    assert {path.relative_to(to).as_posix() for path in to.rglob("*.png")} == {
        f"sample-{sample}/{number}.png" for sample in (0, 1) for number in (401, 402)
    }
    row = {"prompt_id": 401, "Subcategory": "Festival", **MARKS[release]}
    zero = row | dict.fromkeys(MARKS[release], 0) | {"prompt_id": 402}
    marks(to / "sample-0", row, zero)
    cli("import", name, run, "--from", to).refused("has no score of sample-1/401.png", alone=True)
    marks(to / "sample-1", row, zero | MARKS[release])
    imported = scores(cli("import", name, run, "--from", to, "--json"))
    assert imported == {f"wise[{release}]:time": pytest.approx(3 * value / 4)}, "no overall score of some prompts"
    other = "legacy" if release == "verified" else "verified"
    cli("import", f"wise-{other}", run, "--from", to).refused(f"not a result of WISE's {other} evaluator", alone=True)
    cli("export", f"wise-{other}", run, "--to", tmp_path / "o").refused(f"no images of WISE ({other})", alone=True)
    mark = next(iter(MARKS[release]))
    for change, problem in [
        ({mark: 3}, "0 to"), ({mark: True}, "0 to"), ({mark: "1"}, "0 to"), ({"prompt_id": "401"}, "needs prompt_id"),
        ({mark: None}, "0 to"), ({mark: 0.5}, "0 to"),
        ({"prompt_id": 402}, "contradicts itself"),
    ]:  # fmt: skip
        marks(to / "sample-1", zero, row | change)
        cli("import", name, run, "--from", to).refused(problem, alone=True)


def test_the_overall_score_of_wise_has_its_programs_weights(tmp_path):
    marks(tmp_path / "sample-0", {"prompt_id": 1, **MARKS["legacy"]})
    fields = {"culture": 400, "time": 167, "space": 133, "biology": 100, "physics": 100, "chemistry": 100}
    weights = dict(zip(fields, (0.4, 0.167, 0.133, 0.1, 0.1, 0.1), strict=True))
    right = np.random.default_rng(0).integers(0, 2, 1000)
    table = pd.DataFrame({"category": np.repeat([*fields], [*fields.values()]), "value": right.astype("float32")})
    table["prompt_id"] = table.index.astype(str)
    overall, *parts = OfficialWise("legacy", tmp_path).scores(table)
    values = {part.name.rpartition(":")[2]: part.estimate.value for part in parts}
    assert overall.name == "wise[legacy]" and {*values} == {*fields}
    assert overall.estimate.value == pytest.approx(sum(weight * values[name] for name, weight in weights.items()))


RUN = "RUN"
TABLES = {
    "alignment_prompt_score_EN_2026-01-01_00-00-00.csv": ",RUN,x\nanime_000,0.5,0\nhuman_000,1.0,0\nobject_001,,1\n",
    "diversity_prompt_score_EN_2026-01-01_00-00-00.csv": ",RUN\nanime_000,0.25\ntext_000,0.75\nreasoning_000,0.5\n",
    "style_prompt_score_EN_2026-01-01_00-00-00.csv": ",RUN\n000,0.5\n",
    "reasoning_prompt_score_EN_2026-01-01_00-00-00.csv": ",RUN\n000,-0.25\n",
    "text_prompt_score_EN_2026-01-01_00-00-00.csv": ',RUN\n000,"[12.0, 0.5, 0.25]"\n',
    "text_score_EN_2026-01-01_00-00-00.csv": ",ED,CR,WAC,text score\nRUN,12.0,0.5,0.25,0.955\nx,0,1,1,1.0\n",
}


@pytest.fixture
def oneig(tmp_path):
    """A run of OneIG-Bench's prompts, and the folder of its program's tables."""
    prompts = [Prompt(f"{name}-000", f"{name} 0", name) for name in ONEIG_CATEGORIES.values()]
    prompts += [Prompt("General_Object-001", "a black image", "General_Object")]
    run, tables = synthetic.pictured(tmp_path / "results", prompts, samples=2), tmp_path / "tables"
    tables.mkdir()
    for file, text in TABLES.items():
        (tables / file).write_text(text.replace(RUN, run.name))
    return run, tables


def test_oneig_goes_out_as_grids_and_its_tables_come_back_as_its_program_counts_them(oneig, tmp_path, cli):
    run, tables = oneig
    assert cli("export", "oneig", run, "--to", tmp_path / "out").code == 0
    grids = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*.png")}
    assert {*grids} == {f"{folder}/{run.name}/000.png" for folder in ONEIG_CATEGORIES} | {f"object/{run.name}/001.png"}
    grid = read_picture(grids[f"human/{run.name}/000.png"])
    assert grid.shape == (8, 16, 3) and grid[0, 0, 0] + 1 == grid[0, 8, 0], "samples from left to right"
    assert scores(cli("import", "oneig", run, "--from", tables, "--json")) == {
        "oneig[official]:alignment": pytest.approx(0.75), "oneig[official]:diversity": pytest.approx(0.5),
        "oneig[official]:style": pytest.approx(0.5), "oneig[official]:reasoning": pytest.approx(-0.25),
        "oneig[official]:text": pytest.approx(0.955),
    }  # fmt: skip


FAULTY_TABLES = [
    ("alignment_prompt", "anime_000", "anime_009", "contain 'Anime_Stylization-009', which the run does not have"),
    ("alignment_prompt", "anime_000", "places_000", "is not a file of OneIG-Bench's program"),
    ("alignment_prompt", "human_000", "anime_000", "is not a file of OneIG-Bench's program"),
    ("alignment_prompt", "0.5", "inf", "inf is not a number from -1 to 1"),
    ("alignment_prompt", "1.0", "7.5", "7.5 is not a number from -1 to 1"),
    ("style_prompt", RUN, "other", "about other, not about"),
    ("style_prompt", TABLES["style_prompt_score_EN_2026-01-01_00-00-00.csv"], "", "about no model"),
    ("alignment_prompt", "0.5,0", "0.5", "is not a file of OneIG-Bench's program"),
    ("alignment_prompt", RUN, "y", "about y, x, not about"),
    ("alignment_prompt", None, None, "there are 2 such files"),
    ("style_prompt", "0.5", "good", "is not a file of OneIG-Bench's program"),
    ("text_score", "text score", "score", "is not a file of OneIG-Bench's program"),
    ("text_score", None, "", "text_score_EN*.csv is not a file of OneIG-Bench's program: about no model"),
]  # fmt: skip


def test_tables_of_oneig_of_another_form_are_refused(oneig, tmp_path, cli):
    run, right = oneig
    for number, (file, old, new, problem) in enumerate(FAULTY_TABLES):
        tables = shutil.copytree(right, tmp_path / str(number))
        [path] = tables.glob(f"{file}_score*" if "prompt" in file else f"{file}*")
        if new is None:
            (tables / f"{file}_score_EN_2026-02-02_00-00-00.csv").touch()
        elif old is None:
            path.unlink()
        else:
            assert old in TABLES[path.name]
            path.write_text(TABLES[path.name].replace(old, new).replace(RUN, run.name))
        cli("import", "oneig", run, "--from", tables).refused(problem, alone=True)


WORDS = {"text": ["OPEN 24h,", "open!"], "length": "short"}  # open, 24h, open
ANSWERS = [
    ("Open 24h Open", 3, 3), ("24H ÇA open closed", 2, 2), ("No text recognized.", 0, 0), ("", 0, 0),
    ("open addCriterion open", 2, 2), ("OPENaddCriterion 24h", 2, 1), ("open\n2-4h, O.P.E.N", 3, 3),
    ("No text recognized24h", 1, 0),
]  # fmt: skip


FAULTS = [
    ({"image": "x.png"}, "is not a result of LongText-Bench's program"), ({"ocr_results": None}, "is not a result of"),
    ({"image": "0003_2.png"}, "is about 'no prompt'"), ({"prompt": "a cup"}, "not 'a sign'"),
]  # fmt: skip


def test_longtext_bench_counts_the_words_to_write_that_were_read_and_refuses_other_answers(tmp_path, cli):
    prompts, to = [Prompt("003", "a sign", "sign", WORDS), Prompt("7", "a cup", "cup", WORDS)], tmp_path / "out"
    run, path = synthetic.pictured(tmp_path / "results", prompts), tmp_path / "results.jsonl"
    assert cli("export", "longtext-bench", run, "--to", to).code == 0
    assert {path.name for path in to.iterdir()} == {"0003_1.png", "0007_1.png"}
    row = {"image": "x/0003_1.png", "prompt": "a sign", "ocr_gt": WORDS["text"], "ocr_results": "open"}
    other = row | {"image": "x/0007_1.png", "prompt": "a cup", "ocr_results": "24h"}
    for answer, found, released in ANSWERS:
        path.write_text("\n".join(map(json.dumps, (row | {"ocr_results": answer}, other))))
        counted = scores(cli("import", "longtext-bench", run, "--from", path, "--json"))
        assert counted == pytest.approx(
            {"longtext-bench": (found + 1) / 6, "longtext-bench[released]": (released + 1) / 6}
        ), answer
    for change, problem in FAULTS:
        path.write_text("\n".join(map(json.dumps, (row | change, other))))
        cli("import", "longtext-bench", run, "--from", path).refused(problem, alone=True)
