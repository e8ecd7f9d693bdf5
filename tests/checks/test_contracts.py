"""`check` tests models, metrics and decoders of a user, and finds what is planted in them: decoders on thousands of
tokens, in wide windows and refilled rows, in two dtypes, with bugs that the audit's models hardly show."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from planted_bugs import plant

from specbench.checks import decoder_contract
from specbench.checks.contracts import check_all
from specbench.checks.decoder_contract import ContractChecks, wide_faults
from specbench.checks.findings import finding, run_tests
from specbench.checks.metric_contract import MetricChecks, metric_findings
from specbench.checks.model_contract import ModelChecks, model_findings
from specbench.decoding import sampling
from specbench.metrics.base import PerImageMetric, Sample, Score
from specbench.models.catalog import models
from specbench.models.interface import TokenLayout
from specbench.models.transformer.kv_cache import PositionLayer
from specbench.specs.presets import resolve
from specbench.stats import Estimate
from specbench.system import console

PLUGIN = Path(__file__).parents[2] / "docs" / "examples" / "plugin"
TEXTS = ["a bright sky", "a dark sky"]


@pytest.fixture
def greys(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield "toy_plugin.greys:MODEL"
    for name in [name for name in sys.modules if name.startswith("toy_plugin")]:
        del sys.modules[name]
    models.cache_clear()


def failed(findings) -> set[str]:
    return {finding.check for finding in findings if finding.status == "failed"}


@pytest.mark.parametrize("bars", [True, False])
def test_a_terminal_shows_which_test_runs(monkeypatch, capsys, bars):
    monkeypatch.setattr(console, "has_bars", lambda screen: bars)
    run_tests([("counters", lambda: finding("counters", [], "fine")), ("batch", lambda: 1 / 0)])
    assert capsys.readouterr().err.split("\n")[:-1] == ["testing counters", "testing batch"] * bars


def test_the_examples_of_the_guide_and_the_embedded_parts_pass(greys):
    for findings in (
        model_findings(greys, "toy_plugin:PROMPTS"), metric_findings("toy_plugin.contrast:Contrast"),
        metric_findings("toy_plugin.variety:Variety"),
        model_findings("shapes"), metric_findings("shapes-detector"), metric_findings("diversity[shapes]"),
    ):  # fmt: skip
        assert not failed(findings) and findings, findings


def test_a_model_whose_logits_depend_on_the_cut_is_found(greys):
    import toy_plugin.greys as plugin

    def broken(change) -> set[str]:
        model = plugin.load(torch.device("cpu"), torch.float32)
        forward, session = plugin.GreysSession.forward, plugin.GreysSession
        changed = type("Changed", (session,), {"forward": lambda *arguments: change(forward, *arguments)})
        model.begin = lambda prefix, guidance, columns: changed(model, prefix, guidance)
        return failed(ModelChecks(plugin.MODEL, model, TEXTS).all_findings())

    def later(forward, session, tokens, positions, tree=None):
        return forward(session, tokens, positions) + tokens.sum(1)[:, None, None] * torch.arange(16.0)

    def others(forward, session, tokens, positions, tree=None):
        return forward(session, tokens, positions) + len(tokens) * torch.arange(16.0)

    def kept(forward, session, tokens, positions, tree=None):
        session.seen = getattr(session, "seen", 0.0) + tokens.shape[1]
        return forward(session, tokens, positions) + session.seen * torch.arange(16.0)

    assert {"window", "causality", "rejection"} <= broken(later) and "batch" not in broken(later)
    assert broken(others) == {"batch"} and {"window", "rejection", "refill"} <= broken(kept)


def test_a_model_that_declares_other_facts_or_no_row_ends_is_found(greys):
    import toy_plugin.greys as plugin

    info = dataclasses.replace(plugin.MODEL, tokens=32, resolution=(9, 9))
    checks = ModelChecks(info, plugin.load(torch.device("cpu"), torch.float32), TEXTS)
    assert failed(checks.all_findings()) == {"facts", "render"}
    model = plugin.load(torch.device("cpu"), torch.float32)
    model.layout = TokenLayout.with_row_ends(8, 8, plugin.CODES)
    declared = dataclasses.replace(plugin.MODEL, forced_slots=8)
    assert not failed(ModelChecks(declared, model, TEXTS).all_findings())
    checks = {finding.check: finding for finding in ModelChecks(plugin.MODEL, model, TEXTS).all_findings()}
    assert failed(checks.values()) == {"facts"} and "64 declared, 72 found" in checks["facts"].detail


class Ranked(PerImageMetric):
    """Depends on the other images, names a foreign column, changes what it is given, and has no number."""

    name = "ranked"
    summary = "planted"

    def identity(self):
        return {"made": str(id(self))}

    def features(self, samples):
        means = [float(sample.pixels.mean()) for sample in samples]
        samples[0].pixels[:] = 0
        return [{"value": mean - min(means), "extra": 1} for mean in means]

    def scores(self, statistics):
        return [Score(self.name, Estimate(float("nan"), None, None), len(statistics))]


def test_a_metric_that_breaks_its_promises_is_found_and_one_that_is_not_there_is_refused(cli):
    draw = np.random.default_rng(0)
    samples = [Sample(f"p{n}", 0, "x", None, {}, draw.integers(0, 256, (8, 8, 3), np.uint8)) for n in range(3)]
    checks = {finding.check: finding for finding in MetricChecks(Ranked(), Ranked, samples).all_findings()}
    assert failed(checks.values()) >= {"identity", "features", "batch", "scores"}
    assert "extra" in checks["features"].detail and "changes its input pixels" in checks["features"].detail
    assert Ranked.columns == {"value": pa.float32()}
    named = {row["name"] for row in check_all(metric=["shapes-detector", "shapes-clip"])}
    assert named == {"shapes-detector", "shapes-clip"}
    assert "repeat the option" in cli("check", "--metric", "tv,shapes-clip").err
    assert cli("check").code == 2 and cli("check", "--metric", "nowhere:Metric").code == 2


BUGS = {
    "wide vocabulary: the compacted weight belongs to the token before": (
        sampling.kept, lambda plain, p: (sparse := plain(p))._replace(
            mass=(sparse.mass > 0) * sparse.weights(p.roll(1, -1)))),
    "bfloat16: p is rounded to it": (
        sampling.Target.__call__, lambda plain, *args: plain(*args).bfloat16().float()),
    "wide window: the columns after the eighth have the keys of the eighth": (
        PositionLayer.update, lambda plain, self, keys, *rest: plain(
            self, keys[:, :, torch.arange(keys.shape[2]).clamp(max=7)], *rest)),
    "refilled rows: conditional and unconditional cache are swapped": (
        PositionLayer.put, lambda plain, self, rows, other: plain(self, rows.roll(len(rows) // 2), other)),
}  # fmt: skip


FEW = 96
"""Images of which half wait for a row; the check decodes 240."""


def wrong(decoder: str, dtype: str) -> list[str]:
    return wide_faults(ContractChecks(decoder, resolve(decoder), 0)._wide_images, dtype, 0)[0]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_wide_vocabularies_is_found(bug, monkeypatch):
    plant(monkeypatch, *BUGS[bug])
    with monkeypatch.context() as few:
        few.setattr(decoder_contract, "_IMAGES", FEW)
        findings = wrong("sjd", "float32")
    assert findings or wrong("sjd", "float32")


@pytest.mark.parametrize("images", [FEW, pytest.param(240, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decoder", ["ar", "sjd-pac"])
def test_exact_decoders_pass(decoder, dtype, images, monkeypatch):
    monkeypatch.setattr(decoder_contract, "_IMAGES", images)
    assert not wrong(decoder, dtype)


def test_a_lossy_decoder_fails_nothing_and_is_described(monkeypatch):
    monkeypatch.setattr(decoder_contract, "_IMAGES", FEW)
    monkeypatch.setattr(decoder_contract, "WIDE_DTYPES", {"float32": decoder_contract.WIDE_DTYPES["float32"]})
    finding = ContractChecks("amplify", resolve("amplify", {"k": 8}), 0).wide_vocabulary()
    assert finding.status == "ok" and "not declared lossless" in finding.detail
