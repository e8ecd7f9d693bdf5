"""Prompt files read by columns say the same as read by lines, or are left to reading by lines."""

from __future__ import annotations

import json
import random
import string

import pytest

from specbench.errors import SpecbenchError
from specbench.prompts import columns, content_sha256, load_prompts, readers, select
from specbench.prompts.columns import PromptColumns

CHARACTERS = "".join(sorted(set(string.printable[:95]) - set('\\"')))


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch):
    monkeypatch.setattr(columns, "LARGE_BYTES", 0)


def _rows(n: int, category: bool) -> list[dict]:
    draw = random.Random(n)

    def words(longest):
        return "".join(draw.choices(CHARACTERS, k=draw.randint(1, longest))).strip() or "x"

    rows = [{"id": f"{words(30)}{number}", "prompt": words(120)} for number in range(n)]
    return [row | ({"category": draw.choice(["", " a", "b,c", None])} if category else {}) for row in rows]


def _by_lines(path, monkeypatch) -> list:
    with monkeypatch.context() as patch:
        patch.setattr(columns, "LARGE_BYTES", 10**9)
        return list(readers.read_file(path))


@pytest.mark.parametrize("category", [False, True], ids=("plain", "categories"))
@pytest.mark.parametrize("n", [2, 300])
def test_jsonl_is_the_same_by_columns_as_by_lines(n, category, tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(n, category)))
    found, true = readers.read_file(path), _by_lines(path, monkeypatch)
    assert isinstance(found, PromptColumns) and not isinstance(true, PromptColumns)
    assert list(found) == true and [found[place] for place in range(-1, n - 1)] == [true[-1], *true[:-1]]
    assert list(found[1:]) == true[1:] and found.sha256() == content_sha256(true) == load_prompts(path).sha256


def test_csv_is_the_same_by_columns_as_by_lines(tmp_path, monkeypatch):
    path = tmp_path / "mine.csv"
    lines = [f"{row['id']},{row['prompt'].replace(',', '').strip() or 'x'},c{len(row['id'])}" for row in _rows(50, 0)]
    path.write_text("id,text,category\n" + "\n".join(line for line in lines if line.count(",") == 2))
    found, true = readers.read_file(path), _by_lines(path, monkeypatch)
    assert isinstance(found, PromptColumns) and len(found) > 10
    assert list(found) == true and found.sha256() == content_sha256(true)


def test_a_changed_line_changes_the_digest_and_the_order_does_not(tmp_path):
    rows = _rows(300, True)
    digests = set()
    changed = [row | {"prompt": "another"} if place == 150 else row for place, row in enumerate(rows)]
    other = [row | {"category": "z"} if place == 150 else row for place, row in enumerate(rows)]
    for kind, these in {"true": rows, "turned": rows[::-1], "text": changed, "category": other}.items():
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
        digests.add(load_prompts(tmp_path / f"{kind}.jsonl").sha256)
    assert len(digests) == 3


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "b", "text": "caf\u00e9"}',
        '{"id": "b", "text": "a \\" quote"}',
        '{"id": "b", "text": "a \\u0041"}',
        '{"id": "b", "text": " blanks "}',
        '{"id": "b ", "text": "blanks"}',
        '{"id": 3, "text": "a number"}',
        '{"id": null, "text": "nothing"}',
        '{"id": "", "text": "nothing"}',
        '{"text": "no id"}',
        '{"id": "b", "text": "more", "line": 4}',
        '{"id": "b", "text": "more", "meta": {}}',
        '{"id": "b", "text": "spaces"} ',
        ' {"id": "b", "text": "spaces"}',
        '{"id": "b", "text": "2026-11-22"}\n',
        '{"id": "b", "text": "long ' + "x" * 990_000 + '"}',
    ],
)
def test_what_is_not_plain_is_read_by_lines_with_the_same_result(line, tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n' + line + '\n{"id": "c", "text": "three"}\n', encoding="utf-8")
    found = readers.read_file(path)
    assert not isinstance(found, PromptColumns) and found == _by_lines(path, monkeypatch)


@pytest.mark.parametrize(
    "lines",
    [
        '{"id": "b", "text": "x"}\n{"id": "b", "text": "y"}',
        '{"id": "b", "id": "d", "text": "x"}',
        '{"id": "b", "text": ""}',
        '{"id": "b", "text": NaN}',
        '{"id": "b", "text": "x"} {"id": "d", "text": "y"}',
        '{"id": "b", "text": "x"}{"id": "d",\n"text": "y"}',
        '{"id": "b", "text": "}\n{"}',
        '["b", "x"]',
    ],
)
def test_what_is_refused_is_refused_by_lines(lines, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n' + lines + '\n{"id": "c", "text": "three"}\n')
    assert columns.read_columns(path, readers.TEXT_KEYS, readers.ID_KEYS, 10**9) is None
    with pytest.raises(SpecbenchError, match="mine"):
        load_prompts(path)


@pytest.mark.parametrize("lines", ['a,"x"', "a,x,y", "a", "a, x", ",x", "a,x\n\nb,y", "a,x\na,z"])
def test_csv_that_is_not_plain_is_read_by_lines(lines, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(f"id,text\nq,w\n{lines}\n")
    assert columns.read_columns(path, readers.TEXT_KEYS, readers.ID_KEYS, 10**9) is None


def test_prompts_are_chosen_by_id_in_file_order_and_an_unknown_id_is_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = _rows(300, True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_prompts(path)
    wanted = [rows[place]["id"] for place in (200, 7, 7, 31)]
    assert [prompt.text for prompt in select(found, None, wanted)] == [rows[place]["prompt"] for place in (7, 31, 200)]
    assert [prompt.id for prompt in select(found, 2)] == [row["id"] for row in rows[:2]]
    with pytest.raises(SpecbenchError, match="no id 'nope'"):
        select(found, None, [wanted[0], "nope"])
