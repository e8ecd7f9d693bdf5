"""`check` tests decoders on thousands of tokens, in wide windows and refilled rows, in two dtypes: it finds the bugs
planted there, which the audit's models show hardly or not at all."""

import pytest
import torch
from planted_bugs import plant

from specbench.checks import decoder_contract
from specbench.checks.decoder_contract import ContractChecks, wide_faults
from specbench.decoding import sampling
from specbench.models.transformer.kv_cache import PositionLayer
from specbench.specs.presets import resolve

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
