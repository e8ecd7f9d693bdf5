"""Every option of a decoder is a flag; it reaches the decoders that know it and is refused when none does."""

import json

import pytest
from refusals import refused

from specbench.runs.decoder_args import parse_decoders, plan_decoders
from specbench.runs.settings import merge, run_settings
from specbench.specs.presets import PRESETS, options_of, resolve

SETTINGS = run_settings()


def plan(*decoders: str, **options: object):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    return plan_decoders(merge(SETTINGS, flags | {"decoder": list(decoders)}, env={}))


PLANS = [
    (["gsd:G=50,window=16,sjd,gsd:G=3"], {}, [("gsd", {"G": 50, "window": 16}), ("sjd", {}), ("gsd", {"G": 3})]),
    (["ar,sjd,gsd"], {"window": 8, "G": 4}, [("ar", {}), ("sjd", {"window": 8}), ("gsd", {"window": 8, "G": 4})]),
    (["gsd:G=50", "gsd"], {"G": 4}, [("gsd", {"G": 50}), ("gsd", {"G": 4})]),  # an inline option beats a flag
    (["sjd"], {"verifier": "grouped", "G": 7}, [("sjd", {"verifier": "grouped", "G": 7})]),
    (["sjd:verifier=grouped,G=7"], {}, [("sjd", {"verifier": "grouped", "G": 7})]),
    (["ar,sjd"], {"refine": "couple"}, [("ar", {}), ("sjd", {"refine": "couple"})]),
    (["amplify:k=1.5,lantern"], {"k": 5}, [("amplify", {"k": 1.5}), ("lantern", {"k": 5})]),
    (["amplify"], {"k": 1.5}, [("amplify", {"k": 1.5})]),
    (["sjd,eagle"], {"init": "left-repeat"}, [("sjd", {"init": "left-repeat"}), ("eagle", {})]),  # eagle has none
    (["sjd", "sjd", "sjd:window=32"], {"window": 32}, [("sjd", {"window": 32})]),
    (["eagle"], {"tree": "0 1 00"}, [("eagle", {"tree": "0 1 00"})]),
    (["sjd-block"], {"refine": "couple", "any_tail": True}, [("sjd-block", {"refine": "couple", "any-tail": True})]),
]


@pytest.mark.parametrize(("decoders", "flags", "expected"), PLANS, ids=map(str, range(len(PLANS))))
def test_an_option_reaches_every_decoder_that_knows_it_and_an_inline_one_its_own(decoders, flags, expected):
    planned = plan(*decoders, **flags)
    assert [each.spec for each in planned] == [resolve(name, options) for name, options in expected]
    kinds = ["inline"] * any("=" in text for text in decoders) + ["flag"] * bool(flags)
    assert all(origin.source in kinds for each in planned for origin in each.origins.values())


REFUSED = [
    ("ar", {"window": 3}, "--window: not an option of the chosen decoders"),
    ("ar,jacobi", {"G": 3}, "--G: not an option of the chosen decoders"), ("ar", {"refine": "couple"}, "--refine"),
    ("gsd:GG=3", {}, "GG.*'G'"), ("gsd:G", {}, "an option without a value"),
    ("G=50", {}, "an option without a decoder"), ("gsd:G=5,G=6", {}, "two values of G"),
    ("ar,gsd:G=5,window=8,G=5", {}, "two values of G"),
    ("amplify,lantern", {"k": 1.5}, r"--k 1\.5: expected a whole number"),
    ("sjd:window=8", {"window": "abc"}, "--window abc: expected a whole number"),  # also if an inline value replaces it
    ("sjd-block", {"refine": "couple"}, "--any-tail to accept biased"), ("eagle", {"tree": "chn"}, "not a draft tree"),
    ("eagle", {"tree": ""}, "not a draft tree"), ("eagle", {"tree": "00"}, "no parent 0"),
    ("eagle", {"tree": "0 2"}, "no preceding sibling 1"), ("eagle", {"tree": "0 -1"}, "not a"),
    *((malformed, {}, "") for malformed in ("=3", "gsd:=3", "gsd:", ":", "nowhere.at.all:Name", "")),
]  # fmt: skip


@pytest.mark.parametrize(("decoder", "flags", "problem"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_an_option_that_fits_nothing_is_refused_before_anything_runs(decoder, flags, problem):
    refused(problem, plan, decoder, **flags)


def test_every_option_is_a_setting_and_window_auto_is_left_for_the_model_to_decide():
    ar, sjd, gsd = plan("ar,sjd,gsd:window=16", window="auto")
    assert (ar.auto_window, sjd.auto_window, gsd.auto_window) == (False, True, False)
    assert plan("gsd:window=auto,G=3")[0].auto_window and parse_decoders(["gsd:PRESET"]) == [("gsd:PRESET", {})]
    names = {setting.name for setting in SETTINGS}
    for preset in PRESETS.values():
        assert set(options_of(preset)) <= names


@pytest.mark.parametrize(
    ("typed", "zero_p"),
    [([], True), (["--zero-p"], True), (["--no-zero-p"], False)]
    + [([flag], value) for flag, value in (("--zero-p=FALSE", False), ("--zero-p=true", True))]
    + [(["--zero-p", word], value) for word, value in (("false", False), ("true", True), ("0", False))],
)
def test_a_switch_of_a_decoder_takes_every_form(cli, tmp_path, typed, zero_p):
    shown = cli("run", "--decoder", "gsd-released", *typed, "--limit", "1", "--out", tmp_path, "--dry-run", "--json")
    assert json.loads(shown.out)[0]["options"]["zero-p"] is zero_p
