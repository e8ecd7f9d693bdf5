"""Options default to what a decoder's paper, or its authors' code, states for the model; papers' tables agree with it.
It concerns several modules: `specs/presets.py` and `specs/published.toml`, `runs/decoder_args.py`, `papers/listing.py`.
"""

import json
import tomllib
from pathlib import Path

import pytest
from refusals import refused

import specbench
from specbench.models.hub_model import MODELS
from specbench.papers.planned_cells import resolve_cells
from specbench.papers.table_files import load_tables
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.settings import merge, run_settings
from specbench.specs import presets
from specbench.specs.components import CHOICES
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import SAMPLING

SETTINGS = run_settings()
ENTRIES = tomllib.loads(Path(presets.__file__).with_name("published.toml").read_text())["entry"]
STATED = [(decoder, model, entry) for entry in ENTRIES for decoder in entry["decoders"] for model in entry["models"]]
SWEPT = {
    "sjd-9": {"window"}, "sjd-fig8": {"window"}, "sjdpp-10": {"window"}, "gsd-1": {"G", "k", "eps"},
    "gsd-2": {"G", "cluster", "d", "delta"}, "gsd-fig10": {"G", "k", "eps"}, "cool-sd-1": {"delta"},
    "cool-sd-2": {"delta"}, "cool-sd-3": {"tree"}, "cool-sd-fig3": {"delta", "lambda"}, "cool-sd-fig4": {"k"},
    "cool-sd-fig5": {"delta"}, "sjd-pac-1": {"G", "siblings", "window"},
    "sjd-sv-1": {"verifier", "G", "d", "delta", "order", "bounds", "cluster", "cluster-q"},
    "sjd-sv-2": {"alpha", "last", "retest"}, "scd-1": {"fresh-q"}, "pjd-1": {"rows-window"},
}  # fmt: skip
"""Options that a table varies from row to row; of Cool-SD's table 3, how the paper measured is not said; of SJD-PAC's
results, siblings as its README has them, its programs other ones, and fresh drafts as in every table; of
SJD-SV's, also the row that has GSD's grouping."""
INITIALISED = {
    *("sjd-7", "sjd-8", "sjd-9", "sjd-10", "sjd-11", "sjd-fig6", "sjd-fig7", "sjd-fig8", "sjd-fig9", "sjd-fig14"),
    *("sjdpp-1", "sjdpp-2", "sjdpp-3", "sjdpp-4", "sjdpp-6", "sjdpp-7", "sjdpp-8", "sjdpp-9"),
    *("sjdpp-fig5", "sjdpp-fig6", "sjdpp-fig12", "sjdpp-fig13"),
}
"""Tables whose rows give `sjd` or `sjd-norefine`, random by definition, a spatial initialisation, as `sjd-isp` has."""
OTHER_PAPER = {"sjdpp-1", "sjdpp-2", "sjdpp-3", "sjdpp-4"}
"""Tables in which SJD++ decodes LlamaGen by SJD in its own window, 32; the released code of SJD has 16."""


def planned(values):
    (decoder,) = plan_decoders(values)
    origins = {name: str(origin) for name, origin in decoder.origins.items()}
    return {kind: getattr(decoder.spec, kind) for kind in CHOICES} | decoder.spec.options, origins


def run(decoder: str, model: str, **flags: object):
    settings = {name.replace("_", "-"): str(value) for name, value in flags.items()}
    return planned(merge(SETTINGS, settings | {"decoder": [decoder], "model": model}, env={}))


def excepted(table: str, decoder: str, model: str) -> set[str]:
    """Names of the values of a row that may differ from what a run takes."""
    names = set(SWEPT.get(table, ()))
    if table in INITIALISED and decoder in ("sjd", "sjd-norefine"):
        names |= {"init", "fresh-q"}
    return names | ({"window"} if table in OTHER_PAPER and (decoder, model) == ("sjd", "llamagen-512") else set())


@pytest.mark.parametrize(("decoder", "model"), [("cascade", "lumina"), ("sjd-pac-released", "lumina")])
def test_the_defaults_of_a_released_decoder_are_published_settings_of_the_model_of_its_code(decoder, model):
    stated = next(entry for name, on, entry in STATED if (name, on) == (decoder, model) and "options" in entry)
    assert stated["options"].items() <= resolve(decoder).options.items() and len(stated["options"]) == 4


@pytest.mark.parametrize("table", load_tables(), ids=lambda table: table.name)
def test_bench_and_run_take_the_same_values_for_every_row_of_a_paper(table):
    differ: set[str] = set()
    for cell in resolve_cells(table, {}, env={}):
        decoder, model = cell.settings.decoder[0], cell.settings.model
        benched, ran = planned(cell.values)[0], run(decoder, model)[0]
        names = {name for name in benched.keys() | ran.keys() if benched.get(name) != ran.get(name)}
        assert names <= excepted(table.name, decoder, model), (decoder, model)
        differ |= names
    assert SWEPT.get(table.name, set()) <= differ, "an exception that nothing needs"


def test_each_value_is_stated_once_for_a_decoder_and_a_model_that_exist():
    names = [(decoder, model, kind, name) for decoder, model, entry in STATED
             for kind in ("options", "shared") for name in entry.get(kind, {})]  # fmt: skip
    assert len(names) == len(set(names)) and {decoder for decoder, *_ in STATED} <= set(PRESETS)
    assert {model for _, model, _ in STATED} <= {model.name for model in MODELS}
    fields = {"source", "decoders", "models", "options", "shared"}
    assert all(set(entry) <= fields and entry["source"] for entry in ENTRIES)
    shared = {name for *_, kind, name in names if kind == "shared"}
    assert shared <= {*(setting.name for setting in SAMPLING.values()), "prompts"}


@pytest.mark.parametrize(("decoder", "model"), sorted({(decoder, model) for decoder, model, _ in STATED}))
def test_a_run_takes_what_is_published_and_records_its_source(decoder, model):
    values, origins = run(decoder, model)
    for name, (value, source) in presets.published(decoder, model).items():
        if name != "fresh-q" or values["init"] == "uniform":
            assert (values[name], origins[name]) == (value, source)


@pytest.mark.parametrize(
    ("model", "window"), [("lumina", 96), ("emu3", 96), ("simplear", 32), ("llamagen-512", 32), ("janus", 250)]
)
def test_sjdpp_has_the_windows_of_its_section_5(model, window):
    assert run("sjd++", model)[0]["window"] == window


def test_whatever_the_user_gives_wins_over_the_paper_whose_values_are_of_its_components():
    assert run("sjd++:window=8", "lumina")[0]["window"] == 8
    assert run("sjd++:window=8", "lumina")[1]["window"] == "inline"
    values, origins = run("sjd++", "lumina", window=9, init="uniform")
    assert (values["window"], values["init"], values["fresh-q"]) == (9, "uniform", "onehot")
    assert (origins["window"], origins["init"]) == ("flag --window", "flag --init")
    env = merge(SETTINGS, {"decoder": ["sjd++"], "model": "lumina"}, env={"SPECBENCH_WINDOW": "7"})
    assert planned(env)[0]["window"] == 7 and run("lantern", "lumina")[0]["k"] == 1000
    assert run("lantern", "lumina", verifier="amplify", residual="standard")[0]["k"] == 2
    assert run("sjd", "lumina", drafter="row-jacobi")[0]["window"] == 8


@pytest.mark.parametrize("decoder", ["sjd++:window=32,init=uniform,fresh-q=uniform", "sjd:fresh-q=uniform"])
def test_the_flags_that_the_changelog_names_are_the_earlier_runs(decoder):
    (now,) = plan_decoders(merge(SETTINGS, {"decoder": decoder, "model": "lumina"}, env={}))
    assert now.spec == resolve(decoder.partition(":")[0])


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_published_for_shapes_or_for_a_model_of_a_plug_in(name):
    for model in ("shapes", "someone-elses"):
        assert not presets.published(name, model) and run(name, model)[1] == {}
        (decoder,) = plan_decoders(merge(SETTINGS, {"decoder": name, "model": model}, env={}))
        assert decoder.spec == resolve(name)


def test_list_shows_each_value_with_its_source_and_keeps_the_models_sampling(cli):
    listed = json.loads(cli("list", "decoders", "sjd++", "--model", "llamagen-512", "--json").out)
    rows = {row["name"]: row for row in listed}
    assert rows["window"] == {"name": "window", "value": 32, "source": "SJD++, section 5.2", "published": None}
    assert rows["cfg"]["value"] == 7.5 and rows["cfg"]["published"] == "3 (SJD++, section 5.1)"
    ours = {row["name"]: row["source"] for row in specbench.available("decoders", name="sjd", model="shapes")}
    assert ours["window"] == "ours" and ours["cfg"] == "default of shapes"
    assert "96" in cli("list", "decoders", "sjd++", "--model", "lumina").out
    refused("unknown metric 'fid'", specbench.available, "metrics", name="fid")
