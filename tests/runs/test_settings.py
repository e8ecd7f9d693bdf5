"""A value comes from its flag, else the environment, else the config file, else its default, and says which."""

import pandas as pd
import pytest
from refusals import refused
from synthetic import SJD, folder, sjd

import specbench
from specbench import api
from specbench.runs.settings import (
    check_environment,
    decoder_settings,
    merge,
    names_with,
    read_config,
    run_settings,
)
from specbench.specs.options import SettingOrigin, SettingSource, Use
from specbench.specs.run_spec import SAMPLING

SETTINGS = run_settings()
NAMES = [setting.name for setting in SETTINGS]


def resolve(flags=None, env=None, config=None):
    return merge(SETTINGS, flags or {}, env or {}, config, "my.toml")


def test_flag_beats_environment_beats_file_beats_default():
    flag, env, config = {"seed": "3"}, {"SPECBENCH_SEED": "2"}, {"seed": 1}
    expected = [
        ((flag, env, config), 3, "flag --seed"), (({}, env, config), 2, "environment SPECBENCH_SEED"),
        (({}, {}, config), 1, "file my.toml"), (({}, {}, {}), 0, "default"),
    ]  # fmt: skip
    for sources, value, origin in expected:
        assert (resolve(*sources).seed, str(resolve(*sources).origins["seed"])) == (value, origin)


def test_unset_values_are_left_to_who_knows_and_lists_and_large_seeds_are_read():
    values = resolve()
    assert values.value("top-k") is None and str(values.origins["top-k"]) == "left to the model"
    assert not values.is_given("top-k") and not values.is_given("seed") and values.limit is None
    assert merge(run_settings(), {"ids": ()}, env={}).ids == values.ids, "() means all"
    assert resolve({"decoder": ["ar,sjd", "gsd"]}).decoder == ("ar", "sjd", "gsd")
    assert resolve(env={"SPECBENCH_DECODER": "ar,sjd"}).decoder == ("ar", "sjd")
    assert resolve(config={"decoder": ["ar", "sjd"]}).decoder == ("ar", "sjd")
    assert resolve({"seed": str(2**63 - 1)}).seed == 2**63 - 1
    refused("", resolve, {"seed": str(2**63)})


def test_a_changed_record_keeps_its_other_values_and_knows_where_the_new_ones_are_from():
    read = resolve({"top-k": "50", "cfg": 3, "G": "4", "limit": 2})
    assert (read.sampling, read.options, read.limit) == ({"guidance": 3.0, "top_k": 50}, {"G": 4}, 2)
    swept = SettingOrigin(SettingSource.SWEEP)
    changed = read.changed({"top-k": 7, "G": 5, "seed": 3}, {name: swept for name in ("top-k", "G", "seed")})
    assert changed.given == {"limit": 2, "seed": 3, "cfg": 3.0, "top-k": 7, "G": 5}
    assert read.given == {"limit": 2, "cfg": 3.0, "top-k": 50, "G": 4} and changed.origins["seed"] == swept
    assert changed.by_name.keys() == set(NAMES)
    assert len(set(NAMES)) == len({each.env for each in SETTINGS}) == len(NAMES)


def test_the_uses_of_settings_agree_with_each_other():
    of = {use: {*names_with(use)} for use in Use}
    assert of[Use.RUN] | of[Use.DRAWING] < of[Use.REPEAT] and of[Use.TOKENS] < of[Use.ENGINES]
    assert {setting.name for setting in SAMPLING.values()} < of[Use.RUN] & of[Use.TOKENS] & of[Use.IMAGES]
    assert not of[Use.RUN] & {setting.name for setting in decoder_settings()}, "a decoder's origins are its own"


@pytest.mark.parametrize("sources", [({"seed": "-1"},), ({}, {"SPECBENCH_SEED": "-1"}), ({}, {}, {"seed": -1})])
def test_a_bad_value_is_refused_wherever_it_comes_from(sources):
    assert refused("--seed -1: must be at least 0", resolve, *sources).exit_code == 2


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    (tmp_path / "c.toml").write_text("seeds = [3]\n")
    assert "seed" in refused("sede", resolve, {"sede": 1}).try_this
    assert "--sweep" in refused("seeds", read_config, tmp_path / "c.toml", NAMES).try_this
    misspelt = {"SPECBENCH_SEEED": "1", "HOME": "/"}
    assert "SPECBENCH_SEED" in refused("SPECBENCH_SEEED", check_environment, misspelt).try_this


@pytest.mark.parametrize("content", [b"seed = ", b"\xff\xfe", b"\x00", b"[a" * 50])
def test_a_broken_config_file_is_named(tmp_path, content):
    (tmp_path / "c.toml").write_bytes(content)
    for name in ("c", "absent"):
        refused(rf"{name}\.toml", read_config, tmp_path / f"{name}.toml", NAMES)


@pytest.mark.parametrize("name", ["ids", "category", "decoder"])
@pytest.mark.parametrize("empty", ["", " , ", [], [""]])
def test_a_list_of_nothing_is_not_everything(name, empty):
    """As of a variable of a script that is not set."""
    sources = [{"flags": {name: empty}}, {"config": {name: empty}}]
    sources += [{"env": {f"SPECBENCH_{name.upper()}": empty}}] if isinstance(empty, str) else []
    for source in sources:
        refused(rf"no {name} given.*omit --{name}", resolve, **source)
    assert not resolve(flags={"ids": None}, env={}).is_given("ids")


@pytest.mark.parametrize(("call", "what"), [
    (lambda nothing, _: api.show_prompts("shapes", ids=nothing), "ids"),
    (lambda nothing, _: api.show_prompts("shapes", categories=nothing), "categories"),
    (lambda nothing, folder: api.score([folder], metrics=nothing), "metric"),
    (lambda nothing, _: specbench.audit(nothing), "decoder"),
    (lambda nothing, folder: specbench.report(nothing, folder.parent), "run"),
    (lambda nothing, _: specbench.dry_run(ids=tuple(nothing)), "ids"),
])  # fmt: skip
def test_an_empty_choice_in_python_is_not_everything(tmp_path, call, what):
    assert len(api.show_prompts("shapes", limit=2, ids=None, categories=())) == 2
    refused(f"no {what} given", call, [], folder(tmp_path, SJD, sjd(1)))


def test_in_python_one_name_and_any_iterable_of_names_are_a_choice(tmp_path):
    for ids in (known := api.show_prompts("shapes", 1)[0]["id"], [known], iter([known]), pd.Series([known])):
        assert len(api.show_prompts("shapes", ids=ids)) == 1
    for ids in (known, iter([known]), pd.Series([known])):
        assert [row["images"] for row in api.dry_run(decoder=pd.Series(["sjd", "ar"]), ids=ids, out=tmp_path)] == [1, 1]
    folder(tmp_path / "parts", SJD, sjd(1))
    assert len(specbench.merge_runs(str(tmp_path / "parts"), tmp_path / "all")) == 1
    refused("no-such", specbench.fetch, "no-such")


@pytest.mark.parametrize(
    "numbers", [{"limit": -1}, {"limit": 2.5}, {"offset": -3}, {"sample": -2}, {"per_category": 0}]
)
def test_shown_prompts_have_the_bounds_of_a_run(numbers):
    """A slice takes them: the last 3, or all but the last."""
    refused(rf"--{next(iter(numbers)).replace('_', '-')} ", api.show_prompts, "shapes", **numbers)
