"""Every option of a decoder is a flag; it reaches the decoders that know it and is refused when none does."""

import json

import pytest

from specbench.errors import SpecbenchError
from specbench.runs.decoder_args import parse_decoders, plan_decoders
from specbench.runs.settings import merge, run_settings
from specbench.specs.presets import PRESETS, options_of, resolve

SETTINGS = run_settings()


def plan(*decoders: str, **options: object):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    values = merge(SETTINGS, flags | {"decoder": list(decoders)}, env={})
    return plan_decoders(values["decoder"].value, values)


def option(planned, name):
    return dict(planned.spec.options)[name]


def test_every_option_of_every_decoder_is_a_setting():
    names = {setting.name for setting in SETTINGS}
    for preset in PRESETS.values():
        assert set(options_of(preset)) <= names


def test_an_inline_option_binds_to_its_decoder_only():
    first, second, third = plan("gsd:G=50,window=16,sjd,gsd:G=3")
    assert (option(first, "G"), option(first, "window")) == (50, 16)
    assert second.spec == resolve("sjd")
    assert third.spec == resolve("gsd", {"G": 3})
    assert first.origins == {"G": "inline", "window": "inline"}


def test_a_plain_flag_reaches_every_decoder_that_knows_it():
    ar, sjd, gsd = plan("ar,sjd,gsd", window=8, G=4)
    assert ar.spec == resolve("ar")
    assert sjd.spec == resolve("sjd", {"window": 8})
    assert gsd.spec == resolve("gsd", {"window": 8, "G": 4})
    assert gsd.origins["G"] == "flag --G"


def test_an_inline_option_beats_a_plain_flag():
    assert option(plan("gsd:G=50", "gsd", G=4)[0], "G") == 50
    assert option(plan("gsd:G=50", "gsd", G=4)[1], "G") == 4


@pytest.mark.parametrize(("decoder", "option"), [("ar", "window"), ("sjd", "tau"), ("ar,jacobi", "G")])
def test_a_flag_that_no_chosen_decoder_knows_is_refused(decoder, option):
    with pytest.raises(SpecbenchError, match=f"--{option}: none of the chosen decoders"):
        plan(decoder, **{option: 3})


def test_an_unknown_inline_option_is_refused_with_the_nearest():
    with pytest.raises(SpecbenchError, match="GG") as error:
        plan("gsd:GG=3")
    assert "'G'" in error.value.try_this


@pytest.mark.parametrize(
    ("decoder", "what"),
    [
        ("gsd:G", "an option without a value"),
        ("G=50", "an option without a decoder"),
        ("gsd:G=5,G=6", "two values of G"),
        ("ar,gsd:G=5,window=8,G=5", "two values of G"),
    ],
)
def test_an_inline_option_has_one_decoder_and_one_value(decoder, what):
    with pytest.raises(SpecbenchError, match=what):
        plan(decoder)
    assert parse_decoders(["gsd:PRESET"]) == [("gsd:PRESET", {})]


def test_another_choice_brings_its_options():
    assert option(plan("sjd", verifier="grouped", G=7)[0], "G") == 7
    assert plan("sjd:verifier=grouped,G=7")[0].spec.verifier == "grouped"


def test_choices_leave_ar_alone():
    ar, sjd = plan("ar,sjd", refine="couple")
    assert ar.spec == resolve("ar")
    assert sjd.spec.refine == "couple"
    with pytest.raises(SpecbenchError, match="--refine"):
        plan("ar", refine="couple")


def test_an_option_of_two_decoders_is_read_by_each_as_its_own():
    amplify, lantern = plan("amplify:k=1.5,lantern", k=5)
    assert (option(amplify, "k"), option(lantern, "k")) == (1.5, 5)
    assert option(plan("amplify", k=1.5)[0], "k") == 1.5
    with pytest.raises(SpecbenchError, match=r"--k 1\.5: expected a whole number"):
        plan("amplify,lantern", k=1.5)


def test_a_choice_reaches_only_decoders_it_has_an_effect_on():
    sjd, eagle = plan("sjd,eagle", init="left-repeat")
    assert sjd.spec.init == "left-repeat" and eagle.spec == resolve("eagle")


def test_window_auto_is_left_for_the_model_to_decide():
    ar, sjd, gsd = plan("ar,sjd,gsd:window=16", window="auto")
    assert (ar.auto_window, sjd.auto_window, gsd.auto_window) == (False, True, False)
    assert plan("gsd:window=auto,G=3")[0].auto_window


def test_the_same_decoder_twice_is_done_once():
    default = option(plan("sjd")[0], "window")
    assert len(plan("sjd", "sjd", f"sjd:window={default}")) == 1


@pytest.mark.parametrize("pieces", [["=3"], ["G=3"], ["gsd:=3"], ["gsd:"], [":"], ["nowhere.at.all:Name"], [""]])
def test_malformed_decoders_are_refused(pieces):
    with pytest.raises(SpecbenchError):
        plan(*pieces)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ("chn", "not a draft tree"),
        ("", "not a draft tree"),
        ("00", "no parent 0"),
        ("0 2", "no preceding sibling 1"),
        ("0 -1", "not a"),
    ],
)
def test_a_tree_that_hangs_together_nowhere_is_refused_before_anything_runs(tree, why):
    with pytest.raises(SpecbenchError, match=why):
        plan("eagle", tree=tree)
    assert option(plan("eagle", tree="0 1 00")[0], "tree") == "0 1 00"


@pytest.mark.parametrize(
    ("typed", "zero_p"),
    [([], True), (["--zero-p"], True), (["--no-zero-p"], False)]
    + [([flag], value) for flag, value in (("--zero-p=FALSE", False), ("--zero-p=true", True))]
    + [(["--zero-p", word], value) for word, value in (("false", False), ("true", True), ("0", False))],
)
def test_a_switch_of_a_decoder_takes_every_form(cli, tmp_path, typed, zero_p):
    shown = cli("run", "--decoder", "gsd-released", *typed, "--limit", "1", "--out", tmp_path, "--dry-run", "--json")
    assert json.loads(shown.out)[0]["options"]["zero-p"] is zero_p


def test_a_switch_admits_the_component_that_needs_it():
    (planned,) = plan("sjd-block", refine="couple", any_tail=True)
    assert not planned.spec.lossless and option(planned, "any-tail") is True
    with pytest.raises(SpecbenchError, match="--any-tail for biased images"):
        plan("sjd-block", refine="couple")
