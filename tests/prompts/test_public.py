"""Public prompt sets: counts, texts and ids as published, for all file formats."""

import json
import os
from pathlib import Path

import published
import pytest
from refusals import refused

from specbench.errors import MISSING_PREREQUISITE
from specbench.prompts import load_prompts, public, text_id
from specbench.prompts.public_files import read_parti
from specbench.system.digests import digest_of

REAL = os.environ.get("PROMPT_DATA_FOLDER")
COUNTS = {"coco": 5000, "parti": 1632, "geneval": 553, "geneval2": 800, "dpg-bench": 1065, "t2i-compbench": 2400}
COUNTS |= {
    "coco-train": 118_287, "oneig": 1120, "longtext-bench": 160, "wise-verified": 1000, "wise-legacy": 1000,
    "coco-30k": 30_000, "tiif": 554, "cvtg-2k": 2000,
}  # fmt: skip
real_files = pytest.mark.skipif(not REAL, reason="PROMPT_DATA_FOLDER does not name a folder of the published files")


@pytest.fixture
def small(monkeypatch):
    """The manifest describes the small files instead of the real ones."""
    sets = {name: published.public_set(name) for name in COUNTS}
    monkeypatch.setattr(public, "public_sets", lambda: sets)
    return sets


def read(name: str, tmp_path: Path) -> list:
    published.write(name, tmp_path / name)
    public_set = published.public_set(name)
    public.adopt_set(public_set, tmp_path / name)
    return public.read_set(public_set)


@pytest.mark.parametrize("name", COUNTS)
def test_a_copy_that_is_a_pipe_is_refused_instead_of_waited_for(name, tmp_path, monkeypatch):
    public_set = public.public_sets()[name]
    monkeypatch.setattr("zipfile.is_zipfile", lambda _: pytest.fail("it was opened"))
    monkeypatch.setattr("pathlib.Path.open", lambda *_, **__: pytest.fail("it was opened"))
    os.mkfifo(tmp_path / "pipe")
    refused("is not a regular file", public.adopt_set, public_set, tmp_path / "pipe")


TEXT = "text"
FIRST_AND_LAST = {
    "coco": [("000000000002", " a cat,\nasleep ", None, {"annotation": 2}),  # the longest, with its white space
             ("000000000009", "the longest one.", None, {"annotation": 3, "image": "000000000009.jpg"})],
    "coco-train": [("000000000002", " a cat,\nasleep ", None, {"annotation": 2}),
                   ("000000000009", "the longest one.", None, {"annotation": 3})],
    "parti": [(TEXT, "bond", "Abstract", {"note": "several meanings"}), (TEXT, "word " * 100 + "end", "Arts", {})],
    "geneval2": [(None, "two metal toys", "3 atoms", {"skills": ["count", "attribute"]})] * 2,
    "oneig": [("Portrait-007", "a man, old", "Portrait", {"type": "NP", "prompt_length": "short"})] * 2,
    "longtext-bench": [("003", "a sign", "sign", {"text": ["OPEN"], "length": "short"})] * 2,
    **{f"wise-{release}": [("3", "a round pastry", "culture", {"line": 3, "wise": release, "explanation": "mooncakes"}),
                           ("12", "a ball falls", "physics", {"line": 12, "wise": release, "subcategory": "Festival"})]
       for release in ("verified", "legacy")},
    "coco-30k": [("000000000009", "a cat, asleep", None, {})] * 2,
    "tiif": [("action+2d-00-short", "a cat left", "action+2d", {"length": "short"}),
             ("action+2d-01-long", "a grey cat right", "action+2d", {"line": 1, "length": "long"})],
    "cvtg-2k": [("CVTG-2-000", "a sign 'OPEN' and a cup 'TEA'", "CVTG-2", {}),
                ("CVTG-Style-2-000", "a sign 'OPEN' and a cup 'TEA'", "CVTG-Style-2", {"line": 0})],
    "geneval": [(None, "a photo of a bench", "single_object", {"line": 0}),
                (None, "a photo of two cows", "counting", {"line": 1, "exclude": [{"class": "cow", "count": 3}]})],
    "t2i-compbench": [(None, "a color cup", "color", {"line": 0}), (None, "two cups", "complex", {"kind": "action"})],
    "dpg-bench": [("0", "a red, ripe cup", None, {"line": 0}),
                  ("partiprompts7", "two dogs near a cat", None, {"line": 1})],
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_ids_texts_categories_and_facts_are_as_published(name, tmp_path):
    prompts = read(name, tmp_path)
    for prompt, (named, text, category, meta) in zip((prompts[0], prompts[-1]), FIRST_AND_LAST[name], strict=True):
        assert prompt.id == (text_id(text) if named == TEXT else named or prompt.id) and prompt.text == text
        assert (category is None or prompt.category == category) and meta.items() <= prompt.meta.items()
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_what_the_benchmarks_ask_about_an_image_is_kept(tmp_path):
    cup, dogs = read("dpg-bench", tmp_path)
    assert [question["parents"] for question in dogs.meta["questions"]] == [[0], [0], [1, 2]]
    assert cup.meta["questions"][1]["question"] == "Is the cup, if any, red?"
    (toys,), (bench, cows) = read("geneval2", tmp_path), read("geneval", tmp_path)
    assert toys.meta["vqa_list"][0][1] == "two" and "exclude" not in bench.meta
    assert cows.meta["include"] == [{"class": "cow", "count": 2}]
    quoted = read("parti", tmp_path)[1]
    assert quoted.text == '"G I G G L E" painted on a wall' and "note" not in quoted.meta
    assert [prompt.meta.get("kind") for prompt in read("t2i-compbench", tmp_path)[-2:]] == ["spatial", "action"]
    (tmp_path / "file").write_bytes(b"hello")  # git hash-object
    assert digest_of(tmp_path / "file", "git") == "git:b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"


def test_ids_do_not_depend_on_the_order_of_the_file(tmp_path):
    folder = published.write("parti", tmp_path / "parti")
    before = {prompt.text: prompt.id for prompt in read_parti(folder)}
    head, *rows = published.PARTI.splitlines()
    (folder / "PartiPrompts.tsv").write_text("\n".join([head, *reversed(rows)]))
    assert before == {prompt.text: prompt.id for prompt in read_parti(folder)}


@pytest.mark.parametrize("name", COUNTS)
def test_fetch_from_a_copy_then_show(name, small, tmp_path, cli):
    fetched = cli("fetch", name, "--from", published.write(name, tmp_path / "copy"))
    assert fetched.code == 0 and fetched.out.strip() == str(small[name].folder)
    shown = cli("prompts", "show", name, "--limit", "1", "--json")
    assert [row["id"] for row in json.loads(shown.out)] == [load_prompts(name).prompts[0].id]


def test_show_prints_what_a_run_with_the_same_options_decodes(small, tmp_path, cli):
    public.adopt_set(small["t2i-compbench"], published.write("t2i-compbench", tmp_path / "copy"))

    def shown(*options: str) -> list[str]:
        return [row["category"] for row in json.loads(cli("prompts", "show", "t2i-compbench", *options, "--json").out)]

    assert len(shown()) == 16 and shown("--offset", "14") == ["complex"] * 2 and len(shown("--sample", "5")) == 5
    assert shown("--per-category", "1", "--limit", "3") == ["color", "shape", "texture"]
    assert shown("--category", "color,shape") == ["color", "color", "shape", "shape"]
    cli("prompts", "show", "t2i-compbench", "--category", "colour").refused("unknown category")


def test_a_copy_with_one_byte_changed_is_refused_and_a_file_changed_after_it_arrived(small, tmp_path, cli):
    public.adopt_set(small["parti"], published.write("parti", tmp_path / "parti"))
    (small["parti"].folder / "PartiPrompts.tsv").write_text("Prompt\n")
    refused("differs from the published file", load_prompts, "parti")
    folder = published.write("geneval", tmp_path / "copy")
    path = folder / "evaluation_metadata.jsonl"
    path.write_bytes(path.read_bytes().replace(b"cow", b"sow", 1))
    outcome = cli("fetch", "geneval", "--from", folder)
    assert outcome.code == 2 and "sha256" in outcome.err and not small["geneval"].folder.exists()


def test_a_set_that_was_not_fetched_names_the_command_and_offline_touches_no_network(cli, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was used"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli("fetch", "parti").code == MISSING_PREREQUISITE
    assert cli("fetch", "coco", "--images").code == MISSING_PREREQUISITE
    cli("prompts", "show", "parti").refused("specbench fetch parti", code=MISSING_PREREQUISITE)


def test_every_set_is_listed_with_its_numbers_of_prompts_before_it_is_fetched(cli):
    rows = {row["name"]: row for row in json.loads(cli("list", "prompts", "--json").out)}
    for name, count in COUNTS.items():
        assert rows[name]["prompts"] == count and rows[name]["on_disk"] is False and rows[name]["licence"]
    counts = [rows[name]["prompts"] for name in ("parti/Animals", "parti/Indoor Scenes", "geneval/single_object")]
    assert counts == [314, 40, 80]
    for public_set in public.public_sets().values():
        assert not public_set.categories or sum(public_set.categories.values()) == public_set.prompts, public_set.name


@pytest.mark.parametrize(("typed", "rows", "note"), [
    ("OneIG", 6, "Not on this disk: specbench fetch oneig"), ("shapes", 1, "specbench prompts show shapes"),
])  # fmt: skip
def test_a_set_is_listed_alone_with_its_categories_and_the_next_command(typed, rows, note, cli):
    outcome = cli("list", "prompts", typed)
    assert outcome.code == 0 and outcome.out.count("\n") == 2 + rows and note in outcome.err


@pytest.mark.parametrize("command", ["list prompts", "prompts show", "fetch"])
def test_every_command_explains_a_name_that_is_no_set(command, cli):
    assert "did you mean 'tiif'" in cli(*command.split(), "tif").err
    assert "--prompts meta_data.json" in cli(*command.split(), "MJHQ-30K").err
    for name in ("wise", "WISE"):  # two releases with other prompts: neither is taken for the other
        cli(*command.split(), name).refused("wise-legacy", "wise-verified")


@real_files
@pytest.mark.parametrize("name", COUNTS)
def test_the_real_files_have_the_published_counts_categories_and_digests(name):
    public_set = public.public_sets()[name]
    public.adopt_set(public_set, Path(REAL) / name)
    prompts = load_prompts(name).prompts
    assert len(prompts) == len({prompt.id for prompt in prompts}) == COUNTS[name] == public_set.prompts
    assert not any("\r" in prompt.text for prompt in prompts)
    parts = public_set.categories
    assert {part: len(load_prompts(f"{name}/{part}").prompts) for part in parts} == parts
    if name == "t2i-compbench":
        kinds = [prompt.meta["kind"] for prompt in load_prompts("t2i-compbench/complex").prompts]
        assert [kinds.count(kind) for kind in ("spatial", "action", "spatialaction")] == [58, 212, 30]
    if name == "coco":
        theirs = json.loads((Path(REAL) / "coco" / "captions_val2017_longest.json").read_text())
        assert sorted(prompt.text for prompt in prompts) == sorted(theirs), "the 5,000 of the papers"


@pytest.mark.parametrize("name", ["parti/animal-kingdom", "geneval/count"])
def test_an_unknown_part_of_a_set_is_answered_with_the_parts(name):
    error = refused("unknown prompt set", load_prompts, name)
    whole = name.partition("/")[0]
    assert f"{whole}/" in error.try_this and "coco" not in error.try_this
