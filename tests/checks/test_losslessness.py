"""Decoders that claim to keep the joint distribution of the image keep it; the others are shown to differ. Each planted
bug is caught, and without it the same decoder passes on the same setting. Every combination of components that calls
itself lossless is lossless, not the presets alone: `make audit-menu` audits all, these tests every SHARE-th."""

from dataclasses import replace

import menu_audit
import numpy as np
import pytest
import torch
from menu import described, lossless_decoders
from planted_bugs import BUGS, plant
from refusals import refused

from specbench.checks.audit_settings import (
    AUDIT_SETTINGS,
    COMPILED_SETTINGS,
    DEVICE_SETTINGS,
    LONE_SETTING,
    in_window,
    setting_model,
)
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer
from specbench.checks.losslessness import (
    AUDIT_SAMPLES,
    SMALL_ENOUGH,
    audit_decoders,
    audit_one,
    audit_verdict,
    observe,
    stream_tokens,
    verdict_line,
)
from specbench.decoding import loop
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.drafters import jacobi
from specbench.decoding.loop import decode
from specbench.decoding.noise import row_key
from specbench.decoding.sampling import draw, rows_at
from specbench.decoding.verification.ratio_tests import standard
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.models.network_sizes import whole_blocks
from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.model import TransformerSession
from specbench.prompts import Request
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling

IMAGES = 40_000
SPATIAL = ("left-repeat", "left-sample", "above-repeat", "above-sample", "left-top1")

LOSSLESS = [
    *((name, {}) for name in PRESETS if resolve(name).lossless), ("sjd", {"fresh-q": "onehot"}),
    *(("sjd", {"init": init}) for init in SPATIAL), ("sjd", {"residual": "optimal"}),
    ("scd-mc", {"init": "above-sample"}), ("sjd-pac", {"siblings": 2, "depth": 1}),
    ("sjd-pac", {"siblings": 5, "depth": 3, "fresh-q": "onehot"}), ("sjd-pac", {"refine": "gumbel", "depth": 2}),
    ("sjd-pac", {"refine": "resample", "init": "left-sample"}), ("eagle", {"tree": "chain"}),
    ("eagle", {"tree": "0 1 2 3 10 11 12 20 100", "verifier": "match", "refine": "resample"}),
    ("adt-tree", {"siblings": 3}), ("vertical", {"siblings": 1, "refine": "restart", "verifier": "block"}),
    ("eagle", {"drafter": "eagle-reduced", "head-ids": 2, "tree": "0 1 00 01 10"}),
    ("vertical-coupled", {"drafter": "vertical-reduced", "head-ids": 2}),
    ("best-lossless", {"siblings": 1}),
    ("best-lossless", {"verifier": "match", "refine": "gumbel", "init": "above-repeat"}),
]  # fmt: skip

SHOWN_WITH = {
    "sjd++": {"tau": 0.5}, "lantern": {"delta": 0.3}, "lantern-released": {"delta": 0.3}, "cool-sd": {"delta": 2.0},
    "zipar": {"rows-window": 1}, "zipar-released": {"rows-window": 1}, "zipar-adaptive": {"rows-window": 1},
    "cascade": {"tree": "0 1 00 01 10 11 000 001"}, "vvs": {"tree": "0 1", "interval": 2, "after": 1},
}  # fmt: skip
"""Options with which a small model shows that a preset is lossy."""
# Clusters of 14 tokens need a larger vocabulary than the audit's: tests/decoding/test_released_presets.py.
AUDITED_ELSEWHERE = {"gsd-released"}
SHOWN = [name for name in PRESETS if name not in AUDITED_ELSEWHERE and not resolve(name).lossless]
LOSSY = [(name, SHOWN_WITH.get(name, {})) for name in SHOWN]
LOSSY += [("sjd-sv", {"alpha": 1.0, "coins": "fresh"})]
LOSSY += [("sjd-sv", {"verifier": verifier}) for verifier in ("runs-grouped", "runs-lantern")]
HEAVY = ("eagle", "vertical")
"""Drafters whose networks make the settings with a transformer slow."""


def label(choice) -> str:
    return " ".join([choice[0], *map(str, choice[1].values())]) if isinstance(choice, tuple) else str(choice)


@pytest.mark.parametrize("name", [name for name, options in LOSSLESS if not options])
def test_a_lossless_preset_passes_a_small_audit(name):
    left_out = "transformer" if name.startswith(HEAVY) else None
    settings = [setting for setting in AUDIT_SETTINGS if setting.model != left_out]
    result = audit_one(name, resolve(name), 18_000, 0, settings)
    assert result["verdict"] == "lossless" and result["tv_low"] < 0.007, result


@pytest.mark.slow
@pytest.mark.parametrize("choice", LOSSLESS, ids=label)
def test_a_lossless_decoder_passes(choice):
    """Presets, also with other options; `make audit-menu` has every combination."""
    spec = resolve(*choice)
    assert spec.lossless
    [result] = audit_decoders([spec], samples=32_000)
    assert result["verdict"] == "lossless", result
    assert result["tv_low"] < 0.005 and result["detectable_tv"] < 0.042


@pytest.mark.parametrize("choice", LOSSY, ids=label)
def test_a_lossy_decoder_is_shown_to_differ(choice):
    spec = resolve(*choice)
    assert not spec.lossless
    # A kept draft matters most where many drafts wait for several steps.
    settings = AUDIT_SETTINGS[1:2] if spec.refine == "reuse" else AUDIT_SETTINGS[:3]
    for images in (IMAGES // 16, IMAGES // 4, IMAGES):  # as few as show it
        result = audit_one(spec.name, spec, images, seed=0, settings=settings)
        if result["verdict"] == "lossy" and result["tv_low"] > 0.005:
            break
    assert result["verdict"] == "lossy", result
    assert 0.005 < result["tv_low"] < result["tv"] < result["tv_high"] <= 1


@pytest.mark.parametrize("name", PRESETS)
def test_an_image_does_not_depend_on_the_batch_it_is_decoded_in(name):
    setting = AUDIT_SETTINGS[1]
    model = EnumerableModel(setting.layout, ("a", "b", "c"))
    requests = [Request("abc"[index % 3], "prompt", index) for index in range(96)]
    spec = in_window(resolve(name), setting.window)

    def tokens(batch, requests):
        parts = [requests[start : start + batch] for start in range(0, len(requests), batch)]
        rows = [row for part in parts for row in decode(model, part, spec, Sampling(1.0), 7, render=False)]
        return np.stack([row.tokens for row in rows])

    together = tokens(96, requests)
    assert np.array_equal(together[:12], tokens(4, requests[:12]))
    assert np.array_equal(together[:4], tokens(1, requests[:4]))


@pytest.mark.parametrize("name", ["adt-tree", "eagle"])
@pytest.mark.parametrize("model", [EnumerableModel, EnumerableTransformer])
def test_a_row_of_fewer_drafts_than_its_batch_has_the_image_that_it_has_alone(name, model):
    """The token after the last draft of a row was drawn from other noise if another row's tree went on there."""
    made = model(TokenLayout.with_row_ends(3, 3, 4), ("a", "b"))
    requests, spec = [Request("ab"[index % 2], "p", index) for index in range(50)], resolve(name)
    together = decode(made, requests, spec, Sampling(1.5), 0, render=False)
    some = [0, 4, 12, 29, 32, 36, 37, 43, 46]
    alone = [decode(made, [requests[index]], spec, Sampling(1.5), 0, render=False)[0] for index in some]
    assert [row.tokens.tolist() for row in alone] == [together[index].tokens.tolist() for index in some]


@pytest.mark.parametrize(
    ("name", "windows"), [("sjd", ["window"]), ("zipar", ["rows-window"]), ("pjd", ["window", "rows-window"])]
)
def test_an_audit_decodes_in_the_window_of_its_setting(name, windows):
    assert in_window(resolve(name), 3) == resolve(name, dict.fromkeys(windows, 3)) != resolve(name)
    assert in_window(resolve(name), None) == resolve(name)


def test_rows_of_a_batch_commit_at_their_own_pace():
    setting = AUDIT_SETTINGS[1]
    requests = [Request("", "prompt", index) for index in range(4)]
    rows = decode(EnumerableModel(setting.layout), requests, resolve("sjd"), setting.sampling, 1, render=False)
    assert len({tuple(row.committed_step) for row in rows}) > 1


@pytest.mark.parametrize("setting", AUDIT_SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", ["sjd", "sjd-pac", "eagle", "pjd"])
def test_the_audit_counts_the_tokens_of_measured_decodes(name, setting):
    spec = in_window(resolve(name), setting.window)
    model, _ = setting_model(setting, 0)
    requests = [Request(text, text, sample) for sample in range(7) for text in model.prompts]
    few = replace(setting, rows=min(setting.rows, 5))
    decoder = spec, few.sampling, 3
    try:
        if few.rows:
            measured = dict(decode_each(model, requests, few.rows, *decoder))
        else:
            measured = dict(zip(requests, decode(model, requests, *decoder), strict=True))
    except SpecbenchError:
        pytest.skip("the decoder refuses this model")
    tokens = stream_tokens(model, requests, spec, few, 3)
    assert (tokens == np.stack([measured[request].tokens for request in requests])).all()


def test_siblings_drawn_from_the_residual_are_caught(monkeypatch):
    def from_residual(q, uniform):
        return draw(standard(q, torch.full_like(q, 1 / q.shape[-1])), uniform)

    monkeypatch.setattr(jacobi, "draw", from_residual)
    [setting] = [setting for setting in AUDIT_SETTINGS if setting.name.startswith("1x3 of 6")]
    assert p_value(observe(setting, resolve("sjd-pac"), IMAGES, seed=0)) < AUDIT_LEVEL


USER_MODULE = """
import numpy as np
import torch
from specbench.specs.presets import resolve

mine = resolve("scd-mc", {"window": 5})
nonsense = 3

def sample(model, requests, sampling, seed, blur=0.0):
    rng = np.random.default_rng([seed, requests[0].sample])
    layout = model.layout
    state = model.begin(model.encode([request.text for request in requests]), sampling.guidance, 1)
    tokens = np.zeros((len(requests), layout.length + 1), dtype=int)
    for slot, forced in enumerate(layout.forced):
        fed = torch.from_numpy(tokens[:, slot - 1 : slot] if slot else tokens[:, :1])
        logits = state.forward(fed, torch.full_like(fed, slot))[:, 0].double().numpy()
        p = np.exp(logits / (1 + blur))
        p /= p.sum(1, keepdims=True)
        tokens[:, slot] = (p.cumsum(1) < rng.random((len(p), 1))).sum(1) if forced < 0 else forced
    return tokens[:, :-1]

def blurred(model, requests, sampling, seed):
    return sample(model, requests, sampling, seed, blur=0.1)
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "mydecoders.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("specbench.checks.losslessness.AUDIT_SETTINGS", AUDIT_SETTINGS[:2])


def test_a_user_s_decoder_is_judged_by_its_images(user_module):
    good, bad, spec = audit_decoders([f"mydecoders:{name}" for name in ("sample", "blurred", "mine")], samples=40_000)
    assert (good["verdict"], good["declared"]) == ("lossless", None) and bad["verdict"] == "lossy"
    assert spec["declared"] == "lossless" and spec["decoder"] == "mydecoders:mine"


@pytest.mark.parametrize(("decoder", "named"), [
    ("mydecoders:missing", "missing"), ("nowhere.at.all:Name", "nowhere"), ("mydecoders:nonsense", "int"),
    ("sjdd", "sjdd"),
])  # fmt: skip
def test_a_decoder_that_cannot_be_had_is_named(user_module, decoder, named):
    assert refused(named, audit_decoders, [decoder]).exit_code == 2


@pytest.mark.parametrize(("returned", "line"), [
    (lambda n, length: [[0] * (length - row % 2) for row in range(n)], "'mine' returned list of images with different"),
    (lambda n, length: np.zeros((n, length)), "'mine' returned ndarray of float64, not of whole numbers"),
    (lambda n, length: torch.zeros(n, length + 1, dtype=torch.long), r"'mine' returned Tensor of shape \(.*, 4\)"),
    (lambda n, length: None, "'mine' returned NoneType of shape"),
    (lambda n, length: ["a cup"] * n, "'mine' returned list of shape"),
    (lambda n, length: [SpecbenchError("no memory left")] * n, "no memory left"),
    (lambda n, length: (1 / 0 for _ in range(n)), "'mine' failed: ZeroDivisionError"),
])  # fmt: skip
def test_wrong_results_of_a_user_s_decoder_are_named_in_a_line(returned, line):
    def mine(model, requests, sampling, seed):
        return returned(len(requests), model.layout.length)

    with pytest.raises(SpecbenchError, match=line):
        audit_one("mine", mine, 1000, 0, AUDIT_SETTINGS[:1])


def test_a_small_audit_or_a_lossy_decoder_is_not_called_lossless_and_a_tiny_audit_is_refused():
    lossy, lossless = audit_decoders(["gsd", "ar"], samples=1000)
    assert lossy["verdict"] == lossless["verdict"] == "no deviation seen" and lossless["detectable_tv"] > SMALL_ENOUGH
    assert "lossless" not in verdict_line(lossy) and f"{lossy['detectable_tv']:.3f}" in verdict_line(lossy)
    refused("10", audit_decoders, ["ar"], samples=10)


@pytest.mark.parametrize(("p", "detectable", "declared", "verdict"), [
    (0.5, 0.01, "lossless", "lossless"), (0.5, 0.01, None, "lossless"), (0.5, 0.01, "lossy", "no deviation seen"),
    (0.5, 0.1, "lossless", "no deviation seen"), (0.5, 0.1, None, "no deviation seen"),
    (AUDIT_LEVEL / 2, 0.1, "lossless", "lossy"), (AUDIT_LEVEL / 2, 0.01, "lossy", "lossy"),
])  # fmt: skip
def test_the_verdict_claims_no_more_than_was_seen(p, detectable, declared, verdict):
    assert audit_verdict(p, detectable, declared) == verdict


def test_images_that_differ_alone_are_reported_if_their_distribution_shows_nothing(monkeypatch):
    plain = loop.noise_keys
    monkeypatch.setattr(loop, "noise_keys", lambda requests, seed: plain(requests, seed + 100 * (len(requests) == 1)))
    row = audit_one("sjd", resolve("sjd"), 40_000, 0, [*AUDIT_SETTINGS[:1], LONE_SETTING])
    assert row["verdict"] == "no deviation seen" and row["alone_differ"] > 5
    assert "have different tokens alone and in a batch" in verdict_line(row)


def test_a_thorough_audit_sees_more_if_least_is_seen():
    quick, thorough = (audit_one("ar", resolve("ar"), 20_000, 0, AUDIT_SETTINGS[:3], mode) for mode in (False, True))
    assert thorough["weakest_tv"] < 0.8 * quick["weakest_tv"] and thorough["weakest_setting"] in verdict_line(thorough)


def test_dependent_images_are_named_by_what_they_differ_in(monkeypatch):
    monkeypatch.setattr(loop, "row_key", lambda seed, prompt_id, sample: row_key(seed, "", sample))
    row = audit_one("ar", resolve("ar"), 5000, 0, AUDIT_SETTINGS[:1])
    assert row["verdict"] == "lossy" and row["dependent"] == ["prompts"]
    assert "images of other prompts are not independent" in verdict_line(row)


@pytest.mark.parametrize("planted", [False, True])
def test_the_audit_of_devices_sees_empty_slots_read_in_the_first_forward(planted, monkeypatch):
    """A GPU allocates whole blocks; a lone column without a mask must not read the empty part of them."""
    place, begun = PositionCache.place, set()

    def read_too_much(cache, slots, visible, run=None):
        if planted and run is not None and slots.shape[1] == 1 and id(cache) not in begun:
            visible = whole_blocks(visible)
            begun.add(id(cache))
        place(cache, slots, visible, run)

    monkeypatch.setattr(PositionCache, "place", read_too_much)
    monkeypatch.setattr(TransformerSession, "_room", lambda session, slots: whole_blocks(slots))
    [setting] = DEVICE_SETTINGS
    assert (p_value(observe(setting, resolve("ar"), 2000, seed=0)) < AUDIT_LEVEL) == planted


@pytest.mark.parametrize("name", ["eagle", "vertical-coupled"])
def test_a_reduced_vocabulary_of_a_head_is_lossless_and_of_every_id_the_same(name):
    drafter = f"{name.partition('-')[0]}-reduced"
    every, two = (resolve(name, {"drafter": drafter, "head-ids": ids}) for ids in (9, 2))
    settings = [setting for setting in AUDIT_SETTINGS if setting.model != "transformer"][:3]
    assert audit_one(name, in_window(two, 3), 18_000, 0, settings)["verdict"] == "lossless"
    setting = next(setting for setting in AUDIT_SETTINGS if setting.model == "transformer")
    model = setting_model(setting, 0)[0]
    requests = [Request(model.prompts[0], "prompt", index) for index in range(6)]
    specs = (in_window(spec, setting.window) for spec in (resolve(name), every))
    rows = [decode(model, requests, spec, setting.sampling, 1, render=False) for spec in specs]
    assert [row.tokens.tolist() for row in rows[0]] == [row.tokens.tolist() for row in rows[1]]


PER_SHARE = AUDIT_SAMPLES / sum(setting.share for setting in AUDIT_SETTINGS)


def measured(bug, part: int = 1) -> float:
    """P-value of the bug's decoder on its setting, at the number of images of a whole audit or a multiple of it, or at
    a `part`-th of them."""
    (setting,) = [setting for setting in AUDIT_SETTINGS if setting.name.startswith(bug.setting)]
    images = round(bug.times * PER_SHARE * setting.share / setting.tables / part)
    return p_value(observe(setting, resolve(bug.decoder, bug.options), images, seed=0))


def case(bug):
    """A bug that takes more images than a whole audit's, or the whole number in a setting with a transformer, is
    slow."""
    slow = bug.times > 1 or bug.what == "only the first token of an accepted branch is kept"
    return pytest.param(bug, marks=pytest.mark.slow) if slow else bug


@pytest.mark.parametrize("bug", [*map(case, BUGS)], ids=lambda bug: f"{bug.part}: {bug.what}")
def test_a_planted_bug_is_caught(bug, monkeypatch):
    plant(monkeypatch, bug.seam, bug.fault)
    # Far below the audit's level, whatever its other settings show; with as few images as show it.
    assert any(measured(bug, part) < AUDIT_LEVEL / 100 for part in (16, 4, 1))


SOUND = {(bug.setting, bug.decoder, tuple(bug.options.items())): bug for bug in BUGS}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SOUND.values(), ids=lambda bug: f"{bug.decoder} {bug.setting}")
def test_the_same_decoder_passes_without_the_bug(bug):
    assert measured(bug) > AUDIT_LEVEL


SHARE = 293
DECODERS = list(lossless_decoders())


@pytest.mark.parametrize("spec", DECODERS[::SHARE], ids=described)
def test_a_sample_of_the_combinations_is_lossless(spec):
    row = menu_audit.audit_combination(spec)
    assert row["verdict"] == row["declared"] == "lossless", row
    assert row["samples"] >= menu_audit.IMAGES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if resolve(name).lossless])
def test_every_lossless_preset_is_lossless_compiled(name):
    audit = audit_one(name, resolve(name), 20_000, 0, COMPILED_SETTINGS)
    assert audit["verdict"] == "lossless", audit


@pytest.mark.slow
def test_a_bug_in_compiled_steps_is_caught(monkeypatch):
    monkeypatch.setattr(jacobi, "rows_at", lambda rows, slots: rows_at(rows, slots).roll(1, dims=1))
    assert audit_one("sjd", resolve("sjd"), 20_000, 1, COMPILED_SETTINGS)["verdict"] == "lossy"


def test_all_lossless_components_and_extremes_are_in_the_menu():
    for kind, components in CHOICES.items():
        used = {getattr(spec, kind) for spec in DECODERS if kind not in DRAFTERS[spec.drafter].ignores}
        # LANTERN's residuals need LANTERN's verifiers, which are lossy.
        assert used == {name for name, part in components.items() if part.lossless and not part.only_with}
    options = {option for spec in DECODERS for option in spec.options.items()}
    assert options >= {("siblings", 1), ("siblings", 16), ("depth", 1), ("fresh-q", "onehot"), ("tree", "chain")}
    assert len(DECODERS) == len(set(DECODERS)) > 300
