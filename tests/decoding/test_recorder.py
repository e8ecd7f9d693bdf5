"""The u_i recorded while decoding: right, uniform for lossless decoders, not uniform with a planted bug. `run --trace`:
the recorded distances are correct, take no measured time and change no image. It concerns several modules: recorder and
uniforms."""

import time

import numpy as np
import pandas as pd
import pytest
import synthetic
import tiny
import torch
from planted_bugs import BUGS, plant

import specbench
from specbench import stats
from specbench.checks.enumerable_model import EnumerableModel, processed
from specbench.decoding import recorder, uniforms
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, row_key
from specbench.decoding.recorder import StepRecorder
from specbench.models.interface import TokenLayout
from specbench.prompts import Request, requests_for
from specbench.runs import runner
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import Tokens, audit_tokens
from specbench.store.run_store import RunStore

LAYOUT = TokenLayout.with_row_ends(2, 4, 3)
SAMPLING = Sampling(guidance=2.0, temperature=0.9)
MODEL = EnumerableModel(LAYOUT, sharpness=1.0)


def images(name, count=6000, model=MODEL, **options):
    spec = resolve(name, options)
    return decode(model, [Request("", "prompt", n) for n in range(count)], spec, SAMPLING, 0, render=False)


def audited(decoded):
    free = LAYOUT.free_slots()
    orders = [name for name in uniforms.ORDERS if all(name in image.uniforms for image in decoded)]
    u = {name: np.stack([image.uniforms[name][free] for image in decoded]).astype(float) for name in orders}
    steps = np.stack([image.committed_step for image in decoded])
    place = np.arange(steps.shape[1]) - np.stack([np.searchsorted(row, row) for row in steps])
    return audit_tokens(Tokens(u, place[:, free], np.stack([image.entropy[free] for image in decoded])), 0.001)


def windowed(name, window):
    return {"window": window} if "window" in resolve(name).options else {}


def test_values_match_the_model_given_the_true_prefix():
    decoded = images("sjd", 20, window=3)
    for sample, image in enumerate(decoded):
        v = Noise([row_key(0, "prompt", sample)], LAYOUT.vocab).tie_break(torch.arange(LAYOUT.length)[None])[0].numpy()
        for slot in LAYOUT.free_slots():
            p, token = target(MODEL, image.tokens, slot), image.tokens[slot]
            by_id, by_p = (p[others].sum() + v[slot] * p[token] for others in (np.arange(len(p)) < token, p > p[token]))
            assert image.uniforms["u_id"][slot] == pytest.approx(by_id, abs=1e-5)
            assert image.uniforms["u_p"][slot] == pytest.approx(by_p, abs=1e-5)


def test_slots_without_a_tested_draft_have_no_value_in_the_orders_of_drafts():
    assert set(images("ar", 3)[0].uniforms) == {"u_id", "u_p"}
    image = images("sjd", 3, window=3)[0]
    first = image.committed_step == 1
    assert np.isnan(image.uniforms["u_qq"][first]).all()  # every draft is new in the first step
    assert not np.isnan(image.uniforms["u_pq"][0])
    for u in image.uniforms.values():
        values = u[~np.isnan(u)]
        assert ((values >= 0) & (values <= 1)).all()


@pytest.mark.parametrize("siblings", [1, 2])
def test_a_draft_that_only_other_images_of_the_batch_have_is_not_counted(siblings):
    spec = resolve("adt-tree", {"window": 5, "siblings": siblings})
    for sample, image in enumerate(images("adt-tree", 12, window=5, siblings=siblings)):
        [alone] = decode(MODEL, [Request("", "prompt", sample)], spec, SAMPLING, 0, render=False)
        for counts in ("drafted", "tested", "accepted"):
            assert (getattr(image, counts) == getattr(alone, counts)).all(), counts


@pytest.mark.parametrize(("name", "orders"), [("ar", 2), ("sjd", 4), ("sjd-norefine", 3), ("sjd-pac", 4), ("eagle", 3)])
def test_steps_computed_together_have_the_values_of_single_ones(monkeypatch, name, orders):
    options = windowed(name, 4)
    together = images(name, 5, **options)
    monkeypatch.setattr(recorder, "WAITING", 0)
    for image, single in zip(together, images(name, 5, **options), strict=True):
        assert len(image.uniforms) == orders
        for order, u in single.uniforms.items():
            np.testing.assert_array_equal(image.uniforms[order], u)


LOSSLESS = [name for name in PRESETS if resolve(name).lossless]
OWN_Q = ({"fresh-q": "onehot"}, {"init": "left-sample"}, {"init": "above-repeat"})
UNIFORM = [(name, 2500, windowed(name, 3 + number % 2)) for number, name in enumerate(LOSSLESS)]
UNIFORM += [(name, 4000, {"window": 4} | change) for change in OWN_Q for name in ("sjd", "scd-mc", "scd-gs")]


@pytest.mark.parametrize(("name", "count", "options"), UNIFORM, ids=str)
def test_lossless_decoders_give_independent_uniform_values(name, count, options):
    result = audited(images(name, count, **options))
    assert not result.deviates, result.tests[0]


@pytest.mark.parametrize(("name", "count", "options"), [
    ("amplify", 3000, {"window": 4, "k": 1.5}), ("gsd", 8000, {"window": 4, "G": 2, "delta": 0.5}),
    pytest.param("sjd++", 8000, {"window": 4, "tau": 0.1}, marks=pytest.mark.slow), ("cool-sd", 2000, {}),
    pytest.param("lantern", 8000, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_lossy_decoders_are_flagged(name, count, options):
    result = audited(images(name, count, **options))
    assert result.deviates
    assert result.deviation.low > 0


def in_an_order_that_knows_the_outcome(plain, self, seen):
    """Ranks by p over the empirical distribution of the draft itself: such an order is not a function of the past."""
    plain(self, seen._replace(q=torch.nn.functional.one_hot(seen.tokens, seen.p.shape[-1]).float()))


FAULTS = {
    "a coupled slot without a draft is drawn from [p - q]+ with a stale q": ({"window": 2}, 6000),
    "q is that of the slot before": ({"window": 4}, 6000), "the images of a prompt share their noise": ({}, 2000),
}  # fmt: skip
FLAGGED = [(bug.decoder, bug.seam, bug.fault, *FAULTS[bug.what]) for bug in BUGS if bug.what in FAULTS]
FLAGGED += [
    ("ar", Noise.run_race, lambda plain, self, weights, *where: plain(self, weights**1.15, *where), {}, 6000),
    ("sjd", uniforms.UniformsRecorder.note, in_an_order_that_knows_the_outcome, {"window": 4}, 2000),
]


@pytest.mark.parametrize(("decoder", "seam", "fault", "options", "count"), FLAGGED)
def test_a_planted_bug_is_flagged(decoder, seam, fault, options, count, monkeypatch):
    plant(monkeypatch, seam, fault)
    assert audited(images(decoder, count, **options)).deviates and len(FLAGGED) == 5


def traced(decoder: str, images: int, layout: TokenLayout, **options):
    model = EnumerableModel(layout)
    requests = [Request("", "p", sample) for sample in range(images)]
    return model, decode(model, requests, resolve(decoder, options), SAMPLING, 0, render=False, trace=True)


def target(model: EnumerableModel, tokens: np.ndarray, slot: int) -> np.ndarray:
    row = model.offsets[slot] + sum(int(token) * model.layout.vocab**place for place, token in enumerate(tokens[:slot]))
    conditional, unconditional = (table[0, row].double().numpy() for table in (model.conditional, model.unconditional))
    return processed(unconditional + SAMPLING.guidance * (conditional - unconditional), SAMPLING)


def test_fresh_drafts_are_as_far_as_the_uniform_distribution():
    layout = TokenLayout.with_row_ends(2, 2, 4)
    model, rows = traced("sjd-norefine", 50, layout, window=3)
    for row in rows:
        starts = np.flatnonzero(np.diff(row.committed_step, prepend=0))
        for slot in range(layout.length):
            last_of_window = slot - starts[starts <= slot].max() == 2
            past_the_end = slot == layout.length - 1 and slot in starts and row.forced[slot]
            if row.forced[slot] or last_of_window or past_the_end:
                assert np.isnan(row.draft_tv[slot]) and np.isnan(row.draft_top1[slot])
                continue
            uniform = np.full(4, 1 / 4)
            expected = np.abs(target(model, row.tokens, slot) - uniform).sum() / 2
            assert row.draft_tv[slot] == pytest.approx(expected, abs=1e-5)
            assert row.draft_top1[slot] == pytest.approx(1 / 4)


@pytest.mark.parametrize("decoder", ["sjd", "scd-mc", "sjd-pac", "eagle"])
def test_an_exact_test_accepts_as_often_as_the_distributions_overlap(decoder):
    _, rows = traced(decoder, 3000, TokenLayout.plain(1, 5, 5), **({} if decoder == "eagle" else {"window": 4}))
    distance = np.concatenate([row.draft_tv for row in rows])
    distance = distance[~np.isnan(distance)]
    if decoder in ("sjd-pac", "eagle"):
        first = np.array([[row.facts.get(f"sibling_0_{name}", 0) for name in ("tested", "accepted")] for row in rows])
        tested, accepted = first[:, 0].sum(), first.prod(1).sum()  # the share of the tested that is accepted
    else:
        tested, accepted = (sum(getattr(row, field).sum() for row in rows) for field in ("tested", "accepted"))
    assert tested == len(distance) > 3000
    deviation = np.sqrt((distance * (1 - distance)).sum())
    assert abs(accepted - (1 - distance).sum()) < 4.5 * deviation
    assert distance.std() > 0.05, "distances that are all alike would prove little"


def test_if_nothing_is_drafted_nothing_is_noted():
    for decoder in ("ar", "zipar"):
        _, rows = traced(decoder, 2, TokenLayout.plain(2, 2, 3))
        assert all(np.isnan(row.draft_tv).all() for row in rows)


def test_tracing_changes_no_token_and_its_time_is_in_no_span(monkeypatch):
    model, requests = tiny.tiny_model(), [Request(text, text) for text in tiny.TEXTS]
    plain = decode(model, requests, tiny.spec("gsd").decoder, tiny.SAMPLING, 0)
    noted, nap = StepRecorder._trace, 0.1

    def slow(*arguments):
        time.sleep(nap)
        noted(*arguments)

    monkeypatch.setattr(StepRecorder, "_trace", slow)
    watched = decode(model, requests, tiny.spec("gsd").decoder, tiny.SAMPLING, 0, trace=True)
    steps = max(row.nfe for row in watched)
    assert sum(watched[0].spans_ms.values()) < 1000 * nap * (steps - 1)
    for mine, theirs in zip(watched, plain, strict=True):
        assert (mine.tokens == theirs.tokens).all() and mine.facts == theirs.facts
        assert theirs.draft_tv is None and mine.draft_tv.shape == mine.tokens.shape


def test_a_traced_run_redoes_only_what_has_no_trace(tmp_path):
    spec, executor = tiny.spec("sjd"), tiny.executor()
    runner.run(executor, [spec], requests_for(tiny.prompts(2)), tmp_path)
    before = RunStore(tmp_path / spec.run_id).samples()
    assert RunStore(tmp_path / spec.run_id).traces().empty
    assert runner.run(executor, [spec], requests_for(tiny.prompts(3)), tmp_path, trace=True).done == 3
    assert runner.run(executor, [spec], requests_for(tiny.prompts(3)), tmp_path, trace=True).done == 0
    assert runner.run(executor, [spec], requests_for(tiny.prompts(4)), tmp_path).done == 1
    rows = specbench.load(spec.run_id, tmp_path).set_index("prompt_id")
    assert rows["draft_tv"].notna().sum() == 3 and len(rows) == 4 and rows["run_id"].eq(spec.run_id).all()
    for old in before.itertuples():
        assert list(rows.loc[old.prompt_id, "tokens"]) == list(old.tokens)
        assert len(rows.loc[old.prompt_id, "draft_tv"]) == len(old.tokens)
        (tmp_path / spec.run_id / rows.loc[old.prompt_id, "image"]).unlink()
    assert runner.run(executor, [spec], requests_for(tiny.prompts(4)), tmp_path).done == 2
    assert len(RunStore(tmp_path / spec.run_id).traces()) == 1, "a trace of an image that was redone does not count"


def test_numbers_of_traces():
    nan = np.nan
    rows = pd.DataFrame({
        "draft_tv": [[0.5, 0.25, nan, 0.75], [nan, 0.25, nan, nan]],
        "draft_top1": [[0.5, 0.5, nan, 0.2], [nan, 0.4, nan, nan]], "committed_step": [[1, 1, 1, 2], [1, 2, 2, 3]],
    })  # fmt: skip
    assert stats.draft_tv(rows) == pytest.approx(1.75 / 4)
    assert stats.draft_top1(rows) == pytest.approx(1.6 / 4)
    assert stats.draft_tv_by_offset(rows) == [pytest.approx(0.5), 0.25, None]
    shown = synthetic.generation(4, 40.0)
    shown.top1 = np.array([0.2, 0.4, 1.0, 0.6])
    assert stats.top1(synthetic.frame([shown, shown])) == pytest.approx(0.4), "the third token is forced"


def test_the_command_line_traces_and_reports(cli, tmp_path):
    asked = ("--model", "llamagen", "--random-weights", "--scale", "tiny", "--window", "4", "--limit", "2")
    asked = (*asked, "--prompts", "shapes")
    assert cli("run", "--decoder", "sjd", "--trace", *asked, "--out", str(tmp_path), "-q").code == 0
    assert "TV(p, q): total variation" in cli("report", "--all", "--explain", "--out", str(tmp_path)).out
    row = specbench.report(out=tmp_path).squeeze()
    assert 0 < row["draft_tv"] < 1 and row["draft_top1"] > 0 and len(row["draft_tv_by_offset"]) > 1
    image = specbench.generate("a cup", "llamagen", random_weights=True, scale="tiny", trace=True)
    assert 0 < np.nanmean(image.draft_tv) < 1


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("decoder", ["ar", "sjd"])
def test_the_time_of_recording_counts_as_verification_whenever_steps_are_recorded(monkeypatch, decoder, rows):
    """Eager steps on a CPU are recorded together, the last steps when the image is complete."""
    honest, slept = StepRecorder._record, []

    def slow(recorder, *arguments):
        time.sleep(0.02)
        slept.append(20)
        honest(recorder, *arguments)

    monkeypatch.setattr(StepRecorder, "_record", slow)
    requests = [Request("", "p", sample) for sample in range(2 * rows)]
    model = EnumerableModel(TokenLayout.plain(2, 3, 4))
    images = [image for _, image in decode_each(model, requests, rows, resolve(decoder), SAMPLING, 0)]
    images += decode(model, requests, resolve(decoder), SAMPLING, 0)
    spans = [{name: ms / image.batch for name, ms in image.spans_ms.items()} for image in images]
    assert sum(times["verify"] for times in spans) >= sum(slept) > 0
    assert all(times["host"] < 15 for times in spans)
