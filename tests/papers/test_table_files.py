"""A table's file either says something that can be run, or is refused in one line naming the file and the field."""

import json

import pytest
from refusals import refused

from specbench.papers.table_files import conventions, load_table, load_tables, papers, read_table, table_names
from specbench.runs.settings import RunSettings
from specbench.stats import NUMBERS

GOOD = {
    "name": '"mine"', "paper": '"gsd"', "source": '"Table 1"', "title": '"a table"',
    "columns": '[{ key = "nfe", header = "NFE" }, { key = "score:fid", header = "FID" }]',
    "defaults": '{ model = "shapes", protocol = "sjd", options = { window = 8 } }',
    "rows": '[{ label = "AR", decoder = "ar" }, { label = "GSD", decoder = "gsd", paper = { nfe = 3 } }]',
}  # fmt: skip
ROW = 'label = "GSD", decoder = "gsd"'


def written(folder, **changed: str | None):
    path = folder / "mine.toml"
    fields = {name: value for name, value in {**GOOD, **changed}.items() if value is not None}
    path.write_text("".join(f"{name} = {value}\n" for name, value in fields.items()), encoding="utf-8")
    return path


def test_a_good_file_is_read(tmp_path):
    table = read_table(written(tmp_path))
    plain, grouped = table.all_settings()
    assert (plain.decoder, plain.options) == (("ar",), {}), "a default option counts if the decoder takes it"
    assert (grouped.decoder, grouped.options) == (("gsd",), {"fresh-q": "onehot", "window": 8}), "as SJD's code has it"
    assert table.rows[1].paper == {"nfe": 3} and table.metrics() == ["fid[pytorch-fid]"], "the protocol's variant"


def test_the_released_code_s_convention_counts_if_a_row_takes_it():
    rows = [row.settings.options for row in load_table("sjd-fig14").rows if str(row.decoder).startswith("sjd")]
    by_init = {options.get("init"): options.get("fresh-q") for options in rows}
    assert by_init.pop(None) == by_init.pop("uniform") == "onehot" and by_init and set(by_init.values()) == {None}
    (reason,) = conventions()["chosen"].values()
    chosen = {name: [text for row in load_table(name).rows for text in row.chosen] for name in ("gsd-1", "cool-sd-1")}
    assert f"Chosen: fresh-q = onehot: {reason}." in chosen["gsd-1"]
    assert not any(reason in text for text in chosen["cool-sd-1"])


def test_each_choice_appears_with_its_value_and_reason_if_it_counts(tmp_path):
    reasons = '{ window = "a", top_k = "b", tree = "c", batch = "f" }, readings = { batch = "one or four" }'
    defaults = f'{{ model = "shapes", options = {{ window = 8 }}, protocol = "sjd", chosen = {reasons} }}'
    sjd = 'label = "S", decoder = "sjd", seed = 7, chosen = { seed = "d", window = "e" }'
    rows = f'[{{ label = "A", decoder = "ar" }}, {{ {sjd} }}]'
    table = read_table(written(tmp_path, defaults=defaults, rows=rows))
    ar, sjd = (row.chosen for row in table.rows)
    assert ar == ("Chosen: top-k = the model's own: b.", "Chosen: batch = one or four: f."), "AR has no window"
    assert ar[0] in sjd and {"Chosen: seed = 7: d.", "Chosen: window = 8: e."} < set(sjd)
    assert not any("tree" in text for text in sjd) and table.shared_choices() == ar


def test_the_tables_run_what_the_papers_ran():
    def rows(name: str) -> dict[str, tuple[RunSettings, str]]:
        return {f"{row.group} {row.label}": (row.settings, " ".join(row.chosen)) for row in load_table(name).rows}

    for name in ("sjd-1", "sjd-7", "gsd-1", "sjdpp-5"):
        for settings, text in rows(name).values():
            if settings.model in ("lumina", "anole"):
                assert settings.guidance_rows == "released" and "Chosen: guidance-rows = released: " in text
    for settings, text in rows("sjd-4").values():
        assert settings.prompt_form == "released" and "Chosen: prompt-form = released: " in text
    for name in ("sjdpp-1", "sjdpp-2", "sjdpp-3", "sjdpp-4", "sjdpp-5", "sjdpp-6", "sjdpp-7", "sjdpp-10"):
        reused = [both for both in rows(name).values() if both[0].decoder == ("sjd++",)]
        assert reused and all(settings.options["init"] == "left-sample" for settings, _ in reused)
        assert all("Chosen: init = left-sample: section 4.2" in text for _, text in reused)
    ours = [both for label, both in rows("sjd-7").items() if label.startswith("Ours")]
    assert ours and all("Chosen: init = left-sample: the paper does not say whether 'ours'" in text for _, text in ours)
    grouped = [case.options for case in load_table("sjd-sv-1").all_settings() if "verifier" in case.options]
    assert [options["G"] for options in grouped] == [3], "an option of a component that the row chooses"
    for table in (table for table in load_tables() if table.paper == "cool-sd"):
        for row in table.rows:
            text = any("of equation 16 and nu = 0.7 are reconstructed" in text for text in row.chosen)
            assert text == (row.decoder == "cool-sd"), (table.name, row.label)


def test_columns_have_the_direction_of_their_number_or_metric_if_the_file_states_none(tmp_path):
    numbers = {name: number.better for name, number in NUMBERS.items() if not number.type.startswith("list")}
    keys = {**numbers, "score:fid": "lower", "score:clip[b16+299]": "higher", "score:shapes-detector/color": "higher"}
    texts = [f'{{ key = "{key}", header = "H" }}' for key in keys]
    own = written(tmp_path, columns=f"[{', '.join(texts)}]", rows=f"[{{ {ROW} }}]")
    assert {column.key: column.better for column in read_table(own).columns} == keys
    none = written(tmp_path, columns='[{ key = "nfe", header = "N", better = "none" }]')
    assert [column.better for column in read_table(none).columns] == [None]
    for column in (column for table in load_tables() for column in table.columns if not column.score):
        assert not column.measurable or numbers[column.key] in (None, column.better) or column.better is None


@pytest.mark.parametrize(("changed", "problem"), [
    ({"source": None}, "source: missing"),
    ({"colums": "[]"}, "colums: unknown field 'colums'"),
    ({"name": '"other"'}, "name: 'other' differs from the name of the file"),
    ({"paper": '"gds"'}, "paper: unknown paper 'gds' (did you mean 'gsd'?"),
    ({"title": "3"}, "title: 3 is not text"),
    ({"rows": "[]"}, "rows: empty"),
    ({"columns": "[]", "rows": '[{ label = "AR", decoder = "ar" }]'}, "columns: empty"),
    ({"notes": "[1]"}, "notes: not text"),
    ({"axes": '{ x = "nfe" }'}, "axes: must have exactly x and y"),
    ({"maps": '["top2"]'}, "maps: unknown map 'top2' (valid: "),
    ({"axes": '{ x = "nfe", y = "nef" }'}, "axes.y: unknown column 'nef'"),
    ({"axes": '{ x = "setting:K", y = "nfe" }'}, "axes.x: unknown axis 'setting:K'"),
    ({"defaults": '{ model = "shapes", seeds = 1 }'}, "defaults: unknown field 'seeds'"),
    ({"defaults": '{ model = "shapes", protocol = "sdj" }'}, "columns[1].key: unknown protocol 'sdj'"),
    ({"defaults": '{ model = "shapes", sampling = { top_k = "all" } }'}, "defaults.sampling.top_k: --top-k all: exp"),
    ({"rows": f'[{{ {ROW}, seed = [1, "x"] }}]'}, "rows[0].seed: --seed x: expected a whole number"),
    ({"rows": f"[{{ {ROW}, seed = [] }}]"}, "rows[0].seed: --seed []: expected one value"),
    ({"rows": f"[{{ {ROW}, limit = 0 }}]"}, "rows[0].limit: --limit 0: must be at least 1"),
    ({"rows": f"[{{ {ROW}, batch = [1, 2] }}]"}, "rows[0].batch: --batch [1, 2]: expected one value"),
    ({"rows": f"[{{ {ROW}, options = {{ seed = 3 }} }}]"}, "rows[0].options: unknown option 'seed'"),
    ({"rows": f"[{{ {ROW}, options = {{ verifier = 'grup' }} }}]"}, "rows[0].options: unknown verifier 'grup'"),
    ({"columns": '[{ key = "nfe", header = "N", options = { cfg = 3 } }]'}, "columns[0].options: unknown option 'cfg'"),
    ({"columns": '[{ key = "nfe", header = "N", dtype = "fp33" }]'}, "columns[0].dtype: --dtype fp33: not a valid"),
    ({"columns": '[{ key = "nef", header = "NFE" }]'}, "columns[0].key: unknown key 'nef' (did you mean 'nfe'?"),
    ({"columns": '[{ key = "score:fdi[x]", header = "F" }]'}, "columns[0].key: unknown metric 'fdi[x]'"),
    ({"columns": '[{ key = "nfe", header = "N", better = "up" }]'}, "columns[0].better: unknown value 'up'"),
    ({"columns": '[{ key = "nfe", header = "N", better = "higher" }]'}, "columns[0].better: 'higher', but lower"),
    ({"columns": '[{ key = "score:fid", header = "F", better = "higher" }]'}, "columns[0].better: 'higher', but lower"),
    ({"columns": '[{ key = "acceptance_by_offset", header = "A" }]'}, "columns[0].key: unknown key 'acceptance_by_o"),
    (
        {"columns": '[{ key = "nfe", header = "N", precision = 1.5 }]'},
        "columns[0].precision: 1.5 is not a whole number",
    ),
    (
        {"columns": '[{ key = "nfe", header = "A" }, { key = "nfe", header = "B" }]'},
        "columns: two columns are called 'nfe'",
    ),
    ({"rows": '[{ decoder = "ar" }]'}, "rows[0].label: missing"),
    ({"rows": '[{ label = "AR" }]'}, "rows[0].decoder: missing here and in [defaults]"),
    ({"rows": f"[{{ {ROW}, runnable = false }}]"}, "rows[0].why: `why` is required with `runnable = false`"),
    ({"rows": f"[{{ {ROW}, paper = {{ nef = 3 }} }}]"}, "rows[0].paper: unknown column 'nef'"),
    ({"rows": f'[{{ {ROW}, paper = {{ nfe = "3" }} }}]'}, "rows[0].paper.nfe: '3' is not a number"),
    ({"rows": f"[{{ {ROW}, notes = {{ nfe = 3 }} }}]"}, "rows[0].notes.nfe: 3 is not text"),
    ({"rows": f"[{{ {ROW}, chosen = {{ windw = 'x' }} }}]"}, "rows[0].chosen: unknown setting 'windw' (did you"),
    ({"rows": '["AR"]'}, "rows[0]: is not a table of fields"),
], ids=lambda value: value if isinstance(value, str) else None)  # fmt: skip
def test_a_bad_one_is_refused_by_file_and_field(tmp_path, changed, problem):
    assert str(refused("", read_table, written(tmp_path, **changed))).startswith(f"mine.toml: {problem}")


def test_what_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    for content in (b"name = ", b"\xff\xfe", b"a = " + b"[" * 5000):
        path.write_bytes(content)
        refused(r"mine\.toml: not a TOML file", read_table, path)
    refused(r"absent\.toml: No such file", read_table, tmp_path / "absent.toml")


def test_tables_are_called_by_name_and_listed(cli):
    assert load_table("sjd-fig6").source == "Figure 6"
    refused("unknown table 'gsd-3'", load_table, "gsd-3")
    rows = {row["name"]: row for row in json.loads(cli("list", "tables", "--json").out)}
    assert list(rows) == table_names() and len(rows) == 60
    assert list(rows).index("sjd-2") < list(rows).index("sjd-10") < list(rows).index("sjd-fig6")
    assert rows["gsd-1"]["rows"] == 20 and rows["gsd-1"]["prompts"] == ["coco", "parti"]
    assert rows["gsd-1"]["paper"] == papers()["gsd"]["title"]
