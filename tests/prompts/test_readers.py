"""Prompt files of supported formats give stable ids; others are rejected in one line."""

import csv
import gzip
import hashlib
import io
import json
import os
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from refusals import refused

from specbench.metrics import official_results
from specbench.papers import table_files
from specbench.prompts import Prompt, PromptSet, content_sha256, load_prompts, readers, select
from specbench.prompts.prompt_set import Drawing
from specbench.runs import token_files
from specbench.runs.settings import read_config
from specbench.specs.options import split_list

ROWS = [
    {"id": "first", "text": "a red circle", "category": "colors", "n": 1},
    {"id": "second", "text": 'a "blue", square', "category": "colors", "n": 2},
]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def parquet_of(raw: bytes, *names: str) -> bytes:
    """A file whose only text in its columns is these bytes."""
    text = pyarrow.array([raw]).view(pyarrow.string())
    table = pyarrow.Table.from_arrays([text] * len(names or "1"), names=names or ["text"])
    pyarrow.parquet.write_table(table, sink := pyarrow.BufferOutputStream())
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_format_reads_the_same_prompts(tmp_path, suffix):
    prompts = load_prompts(write(tmp_path / f"p{suffix}", ROWS)).prompts
    assert [(prompt.id, prompt.text, prompt.category) for prompt in prompts] == [
        ("first", "a red circle", "colors"), ("second", 'a "blue", square', "colors"),
    ]  # fmt: skip
    assert [str(prompt.meta["n"]) for prompt in prompts] == ["1", "2"]


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"], ids=["CR", "LF", "CRLF"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_every_line_end_and_delimiter_gives_the_same_prompts(tmp_path, end, delimiter):
    text, table = tmp_path / "p.txt", tmp_path / "p.csv"
    text.write_bytes(end.join(["a red circle", "a blue square", ""]).encode())
    lines = (("id", "prompt", "category"), ("1", "a red circle", f'"red{delimiter} round"'), ("2", "a blue square", ""))
    table.write_bytes((end.join(map(delimiter.join, lines)) + end).encode())
    for path in (text, table):
        assert [prompt.text for prompt in load_prompts(path).prompts] == ["a red circle", "a blue square"]
    assert load_prompts(table).prompts[0].category == f"red{delimiter} round"


def test_a_name_with_a_comma_is_selected_and_quoted(tmp_path):
    (tmp_path / "p.csv").write_text('id,prompt,category\n"1,a",a red circle,"red, round"\n2,a blue square,blue\n')
    prompts = load_prompts(tmp_path / "p.csv")
    assert split_list('"red, round",blue') == ["red, round", "blue"]
    assert [prompt.id for prompt in Drawing(categories=("red, round",)).of(prompts)] == ["1,a"]
    assert 'category "red, round"' in Drawing(categories=("red, round",)).text(prompts)
    assert refused("round", select, prompts, None, ["round"]).try_this == 'valid: "1,a", 2'


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be with mark", "utf-16-le", "utf-16-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_text_file_of_a_user_is_read_in_the_encoding_that_its_first_bytes_say(encoding, tmp_path):
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(("\ufeff" + text).encode("utf-16-be") if "mark" in encoding else text.encode(encoding))
        return path

    for name, text in (
        ("p.txt", "un caf\xe9\r\n"),
        ("p.csv", "id,prompt\r\n1,un caf\xe9\r\n"),
        ("p.tsv", "id\tprompt\n1\tun caf\xe9\n"),
        ("p.json", '[{"prompt": "un caf\xe9"}]'),
        ("p.jsonl", '{"prompt": "un caf\xe9"}\n'),
    ):
        assert [prompt.text for prompt in load_prompts(written(name, text)).prompts] == ["un caf\xe9"], name
    assert read_config(written("c.toml", 'prompts = "caf\xe9"'), ["prompts"]) == {"prompts": "caf\xe9"}
    assert table_files._read_toml(written("t.toml", 'source = "caf\xe9"\n')) == {"source": "caf\xe9"}
    assert official_results.read_results(written("r.json", "caf\xe9")) == "caf\xe9"
    tokens = token_files._json_lines(written("t.jsonl", '{"prompt": "caf\xe9"}\r\n{"prompt": "b"}\r\n'))
    assert tokens == {"prompt": ["caf\xe9", "b"]}


@pytest.mark.parametrize("content", [b"a red circle\n", b'{"prompt": "a red circle"}\n'], ids=["text", "jsonl"])
def test_prompts_are_read_from_stdin(monkeypatch, content):
    readers._stdin.cache_clear()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert [prompt.text for _ in range(2) for prompt in load_prompts("-").prompts] == ["a red circle"] * 2
    readers._stdin.cache_clear()


def test_a_plain_line_is_named_by_its_content_not_its_place(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red circle\r\n\r\n  a blue square  \n".encode())
    first = load_prompts(path)
    assert [prompt.text for prompt in first.prompts] == ["a red circle", "a blue square"]
    path.write_text("a blue square\na red circle\n")
    second = load_prompts(path)
    assert [prompt.id for prompt in second.prompts] == [prompt.id for prompt in reversed(first.prompts)]
    assert second.sha256 == first.sha256


def test_limit_and_ids_select_in_file_order_and_the_digest_sees_every_field(tmp_path):
    prompts = load_prompts(write(tmp_path / "p.jsonl", ROWS))
    assert [prompt.id for prompt in select(prompts, 1)] == ["first"]
    assert [prompt.id for prompt in select(prompts, None, ["second", "first"])] == ["first", "second"]
    assert "second" in refused("secnd", select, prompts, None, ["secnd"]).try_this
    digests = set()
    for changed in ({}, {"id": "x"}, {"text": "x"}, {"category": "x"}, {"n": 9}):
        digests.add(load_prompts(write(tmp_path / "p.jsonl", [ROWS[0] | changed, ROWS[1]])).sha256)
    assert len(digests) == 5


BAD = {
    "empty": ("p.txt", b"", "no prompts"),
    "blank": ("p.txt", b" \n\n", "no prompts"),
    "binary": ("p.txt", b"abc\x00def\n", "binary"),
    "png": ("p.txt", b"\x89PNG\r\n\x1a\n", "not UTF-8"),
    "latin-1": ("p.txt", b"a caf\xe9\n", "line 1 is not UTF-8"),
    "one line of 50 MB": ("p.txt", b"x" * 50_000_000, "line 1 is longer"),
    "one long prompt": ("p.txt", b"x" * 20_000, "20,000 characters"),
    "the same line twice": ("p.txt", b"a red circle\na red circle\n", "lines 1 and 2 are both .a red circle."),
    "the same id twice": (
        "p.jsonl", b'{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}\n', "both have the id '1'",
    ),
    "not JSON": ("p.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    "two objects in a line": ("p.jsonl", b'{"text": "x"} {"text": "y"}\n', "line 1 is not JSON"),
    "an empty text": ("p.jsonl", b'{"text": "a"}\n{"text": ""}\n', "line 2 has no text"),
    "not an object": ("p.jsonl", b"[1]\n", "line 1 is not a JSON object"),
    "deep JSON": ("p.jsonl", b"[" * 200_000, "line 1 is not JSON"),
    "no text": ("p.jsonl", b'{"id": "a"}\n', "line 1 has no text"),
    "a lone surrogate": ("p.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate"),
    "an id that is a list": ("p.jsonl", b'{"id": [1], "text": "a"}\n', "the id must be"),
    "an id with a line end": ("p.jsonl", b'{"id": "a\\nb", "text": "a"}\n', "cannot be an id"),
    "a long id": ("p.jsonl", json.dumps({"id": "i" * 4096, "text": "a"}).encode(), "cannot be an id"),
    "csv without text": ("p.csv", b"id,words\n1,a\n", "has no text"),
    "csv with a field too many": ("p.csv", b"id,text\n1,a,b\n", "more fields"),
    "csv with an open quote": ("p.csv", b'id,text\n1,"a\n', "unexpected end"),
    "csv in one line of 50 MB": ("p.csv", b"text\n" + b"x" * 50_000_000, "line 2 is longer"),
    "parquet in name only": ("p.parquet", b"PAR1 no PAR1", "is not a parquet file"),
    "empty parquet": ("p.parquet", b"", "is not a parquet file"),
    "another suffix": ("p.yaml", b"- text: a red circle\n", "unknown suffix .yaml"),
    "another suffix, of a binary format": ("p.xlsx", b"- text: a red circle\n", "unknown suffix .xlsx"),
    "a pointer of Git LFS": ("p.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "a cut archive": ("p.txt.gz", gzip.compress(b"a\nb\n")[:-9], "cannot be read"),
    "a wrong line after Excel's": ("p.csv", b"\nsep=;\n\nprompt;n\na;1\n;2\n", "line 6 has no text"),
    "a column twice": ("p.csv", b"text,text\na,b\n", "two columns 'text'"),
    "a column twice, with a space": ("p.csv", b"text, text \na,b\n", "two columns 'text'"),
    "an id twice": ("p.tsv", b"text\tid\tid\na\tb\tc\n", "two columns 'id'"),
    "a column of parquet twice": ("p.parquet", parquet_of(b"a", "text", "text"), "two columns 'text'"),
    "two ids": ("p.csv", b"text,id,prompt_id\na,b,c\n", "both 'id' and 'prompt_id'"),
    "a key twice": ("p.jsonl", b'{"text": "a", "text": "b"}\n', "key 'text' is repeated"),
    "a deep value": ("p.jsonl", b'{"text": "a", "x": ' + b"[" * 1000 + b"]" * 1000 + b"}\n", "nested"),
    **{f"{value} as metadata": ("p.jsonl", f'{{"text": "a", "score": [{value}]}}\n'.encode(),
                                "line 1: metadata has NaN or infinity") for value in ("NaN", "-Infinity", "1e999")},
    **{f"json {text[:4]}": ("p.json", text.encode(), r"p\.json' (is not|must be)")
       for text in ('{"a": 1}', "[1]", "[", '[{"text": "a", "text": "b"}]', "[" * 1000 + "]" * 1000)},
    "parquet of other bytes than UTF-8": ("p.parquet", parquet_of(b"\xe8\x01"), "is not a parquet file: .*utf-8"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    error = refused(message, load_prompts, path)
    assert name in error.what and error.exit_code == 2


def test_absent_files_folders_and_unknown_sets_are_refused(tmp_path):
    for path, message in ((tmp_path / "absent.txt", "does not exist"), (tmp_path, "is a folder")):
        refused(message, load_prompts, path)
    for name in ("no-such-set", "x" * 5000, "a\0b"):
        refused("", load_prompts, name)
    refused("--prompts shapes --category colors", load_prompts, "shapes/colors")
    refused("file 'shapes/mine.txt' does not exist", load_prompts, "shapes/mine.txt")


def test_a_json_file_is_a_list_of_objects_or_of_texts(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(ROWS, indent=2))
    read = [(prompt.id, prompt.meta) for prompt in load_prompts(path).prompts]
    assert read == [("first", {"n": 1}), ("second", {"n": 2})]
    path.write_text('["a red circle", "a blue square"]')
    assert [prompt.text for prompt in load_prompts(path).prompts] == ["a red circle", "a blue square"]
    path.write_text('{"126c": {"category": "plants", "prompt": "a garden"}}')  # meta_data.json of MJHQ-30K
    (garden,) = load_prompts(path).prompts
    assert (garden.id, garden.text, garden.category) == ("126c", "a garden", "plants")


def test_far_too_many_rows_are_refused_before_any_is_read(tmp_path, monkeypatch):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(20_000_000, pyarrow.string())}), path)
    started = time.monotonic()
    refused("more than 1,000,000 prompts", load_prompts, path)
    assert time.monotonic() - started < 5
    monkeypatch.setattr("specbench.prompts.readers.MAX_PROMPTS", 2)
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    refused("more than 2 prompts", load_prompts, tmp_path / "p.txt")


def test_many_ids_of_many_prompts_are_found_at_once():
    prompts = PromptSet("many", tuple(Prompt(f"p{n}", "x") for n in range(200_000)), "0" * 64)
    ids = [f"p{n}" for n in range(199_999, 0, -19)]
    started = time.monotonic()
    assert {prompt.id for prompt in select(prompts, ids=ids)} == set(ids) and time.monotonic() - started < 5


def test_the_digest_matches_sorted_lines_of_json():
    """Run ids depend on it, so it never changes."""
    prompts = [Prompt(f"{number * 7919 % 2503}", f"a \u00e9 {number}", None, {}) for number in range(2503)]
    rows = [[prompt.id, prompt.text, None, {}] for prompt in prompts]
    lines = sorted((row[0], json.dumps(row, separators=(",", ":"))) for row in rows)
    assert content_sha256(prompts) == hashlib.sha256("".join(f"{line}\n" for _, line in lines).encode()).hexdigest()


@pytest.mark.parametrize("suffix", ["txt", "json", "jsonl", "csv", "parquet"])
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, suffix, monkeypatch):
    os.mkfifo(path := tmp_path / f"prompts.{suffix}")
    opened = Path.open

    def opener(self, *mode, **how):
        return pytest.fail("it was opened") if self == path else opened(self, *mode, **how)

    monkeypatch.setattr(Path, "open", opener)
    refused("is not a regular file", load_prompts, path)


DPG = "item_id,text,keywords,proposition_id,dependency,category_broad,tuple,question_natural_language\n"
PUBLISHED = [
    ("p.jsonl", '{"Prompt": "a", "Category": "x"}\n', [("a", "x")], ""),
    ("p.json", '[{"Captions": "a"}]', [("a", None)], ""),
    ("p.csv", "Prompts,Categories\na,x\nb,y\n", [("a", "x"), ("b", "y")], ""),
    ("p.json", '{"first": "a", "second": {"prompt": "b", "category": "y"}}', [("a", None), ("b", "y")], ""),
    ("p.json", '{"version": 1, "prompts": ["a", "b"]}', [("a", None), ("b", None)], "the list 'prompts'"),
    ("p.csv", "text,prompt\na,b\n", [("b", None)], "texts are read from 'prompt', not from 'text'"),
    ("p.csv", "Prompt,prompts\na,b\n", [("a", None)], "texts are read from 'prompt', not from 'prompts'"),
    ("p.csv", "caption,Captions\na,b\n", [("a", None)], "texts are read from 'caption', not from 'Captions'"),
    ("p.json", '[{"Text": "a", "texts": "b"}]', [("a", None)], "texts are read from 'Text', not from 'texts'"),
    ("p.json", '[{"Text": "a", "texts": "a"}]', [("a", None)], ""),
    ("p.csv", "text,category\na,\nb,NA\nc, \n", [("a", None), ("b", "NA"), ("c", None)], ""),
    ("p.csv", "Prompts;Category\na, c;x\n", [("a, c", "x")], ""),
    ("p.csv", "id, prompt, category\n1, a red circle, red\n", [("a red circle", "red")], ""),
    ("p.csv", "sep=;\r\nid;prompt;category\r\n1;a, b;x\r\n", [("a, b", "x")], ""),
    ("p.csv", "sep=;;;\r\nid;prompt;category\r\n1;a, b;x\r\n", [("a, b", "x")], ""),
    ("p.csv", "sep=;\r\n\r\n \r\nprompt;category\r\na, b;x\r\n", [("a, b", "x")], ""),
    ("p.csv", "\n\nprompt;category\na, b;x\n", [("a, b", "x")], ""),
    ("p.csv", '"sep=,"\nprompt,category\na;b,x\n', [("a;b", "x")], ""),
    ("p.tsv", "SEP=\t\nprompt\tcategory\na\tx\n", [("a", "x")], ""),
    ("p.csv", f'prompt,note\na,"{"x" * 400_000}\n{"y" * 400_000}"\n', [("a", None)], ""),
    ("p.json", '{"prompt": "a"}', [("a", None)], ""),
    ("p.csv", "text,caption\na,a\nb,\n", [("a", None), ("b", None)], ""),  # two equal columns are no question
    ("p.jsonl", '{"text": "a", "Category": "x"}\n', [("a", None)], ""),  # an exact heading leaves the others
    ("p.txt", "\ufeffa red circle\n\ufeffb\r\n\x1a", [("a red circle", None), ("b", None)], ""),  # joined; DOS
    ("p.json", '[{"text": ["a", "b"]}]', [("a", None)], "'text' has lists"),
    ("p.csv", "id,text,question\n1,a,Is it?\n1,a,red?\n2,b,Is it?\n", [("a", None), ("b", None)], "3 rows"),
    ("p.csv", f"{DPG}p0,a,,1,0,entity,,Is it?\np0,a,,2,1,entity,,red?\n", [("a", None)], "one row per question"),
]


@pytest.mark.parametrize(("name", "content", "rows", "note"), PUBLISHED)
@pytest.mark.parametrize("packed", [False, True])
def test_files_are_read_as_they_are_published_and_decisions_are_said(
    tmp_path, capsys, name, content, rows, note, packed
):
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert [(prompt.text, prompt.category) for prompt in load_prompts(path).prompts] == rows
    assert note in (notes := capsys.readouterr().err) and bool(note) == bool(notes)


def test_binary_columns_of_parquet_files_are_left_out_with_a_note(tmp_path, capsys):
    """Datasets of the hub have pictures as bytes and sounds in lists."""
    picture, deep = {"bytes": b"\x89PNG", "path": "a.png"}, [{"a": [b"x"]}]
    columns = {"Prompt": ["a"], "image": [picture], "raw": [b"x"], "deep": [deep], "binary": [{"binary": 3}]}
    table = pyarrow.table(columns)
    table = table.append_column("fixed", pyarrow.array([b"ab"], pyarrow.binary(2)))
    table = table.append_column("large", pyarrow.array([b"ab"], pyarrow.large_binary()))
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    (prompt,) = load_prompts(tmp_path / "p.parquet").prompts
    assert (prompt.text, prompt.meta) == ("a", {"binary": {"binary": 3}})
    assert "p.parquet: binary columns are not read: image, raw, deep, fixed, large" in capsys.readouterr().err
    table = table.drop_columns(["Prompt", "binary"]).rename_columns([*"abcd", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert "not read: a, b, c, d, text;" in refused("row 1 has no text", load_prompts, tmp_path / "p.parquet").try_this
    refused("column 'text' is binary", load_prompts, tmp_path / "p.parquet", "text")


def test_a_file_of_a_public_set_says_what_the_set_has(tmp_path, capsys):
    (tmp_path / "evaluation_metadata.jsonl").write_text('{"tag": "two_object", "prompt": "a", "include": []}\n')
    assert load_prompts(tmp_path / "evaluation_metadata.jsonl").prompts[0].text == "a"
    assert "a file of geneval" in (notes := capsys.readouterr().err) and "fetch geneval --from" in notes


def test_the_longest_caption_of_each_image_of_coco_is_read(tmp_path, capsys):
    captions = [(1, 7, "a cat"), (1, 8, "a red cat"), (2, 9, "a dog")]
    rows = [{"image_id": image, "id": number, "caption": text} for image, number, text in captions]
    images = [{"id": 2, "file_name": "COCO_val2014_000000000002.jpg"}]
    (tmp_path / "captions.json").write_text(json.dumps({"images": images, "annotations": rows}))
    prompts = load_prompts(tmp_path / "captions.json").prompts
    read = [(prompt.id, prompt.text) for prompt in prompts]
    assert read == [("000000000001", "a red cat"), ("COCO_val2014_000000000002", "a dog")]
    assert "longest caption" in capsys.readouterr().err


def test_another_column_is_named_and_the_refusal_names_those_that_are_there(tmp_path, cli):
    path = tmp_path / "p.csv"
    path.write_text("Sentence,topic\na red square,x\n")
    assert load_prompts(path, "Sentence").prompts[0].text == "a red square"
    cli("prompts", "show", path).refused("columns: Sentence, topic; --prompt-column NAME")
    assert "a red square" in cli("prompts", "show", path, "--prompt-column", "Sentence").out
    assert "prompt set" in cli("prompts", "show", "shapes", "--prompt-column", "x").err
    assert "has no column 'x'" in cli("prompts", "show", path, "--prompt-column", "x").err
    path.write_text("Sentence;topic\na, b;x\n")
    assert load_prompts(path, "Sentence").prompts[0].text == "a, b"
