"""`run --trace`: the recorded distances are correct, take no measured time and change no image."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import synthetic
import tiny

import specbench
from specbench import stats
from specbench.checks.enumerable_model import EnumerableModel, processed
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.loop import decode
from specbench.decoding.recorder import StepRecorder
from specbench.models.interface import TokenLayout
from specbench.prompts import Request, requests_for
from specbench.runs import runner
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.store.run_store import RunStore

SAMPLING = Sampling(guidance=2.0, temperature=0.9)


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
    name = "sibling_0_accepted" if decoder in ("sjd-pac", "eagle") else None
    if name:
        tested = sum(row.facts.get("sibling_0_tested", 0) for row in rows)
        accepted = sum(row.facts.get(name, 0) * row.facts.get("sibling_0_tested", 0) for row in rows)
    else:
        tested, accepted = (sum(getattr(row, field).sum() for row in rows) for field in ("tested", "accepted"))
    assert tested == len(distance) > 3000
    deviation = np.sqrt((distance * (1 - distance)).sum())
    assert abs(accepted - (1 - distance).sum()) < 4.5 * deviation
    assert distance.std() > 0.05, "distances that are all alike would prove little"


def test_where_nothing_is_drafted_nothing_is_noted():
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


def test_a_trace_of_an_image_that_was_redone_since_does_not_count(tmp_path):
    spec, executor = tiny.spec("sjd"), tiny.executor()
    runner.run(executor, [spec], requests_for(tiny.prompts(2)), tmp_path, trace=True)
    folder = tmp_path / spec.run_id
    next((folder / "images").iterdir()).unlink()
    assert runner.run(executor, [spec], requests_for(tiny.prompts(2)), tmp_path).done == 1
    assert len(RunStore(folder).traces()) == 1


def test_numbers_of_traces():
    nan = np.nan
    rows = pd.DataFrame(
        {
            "draft_tv": [[0.5, 0.25, nan, 0.75], [nan, 0.25, nan, nan]],
            "draft_top1": [[0.5, 0.5, nan, 0.2], [nan, 0.4, nan, nan]],
            "committed_step": [[1, 1, 1, 2], [1, 2, 2, 3]],
        }
    )
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
