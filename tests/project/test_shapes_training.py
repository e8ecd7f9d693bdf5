"""Training of the `shapes` network is seeded: an interrupted training ends with the same weights.

It concerns several modules: shapes.train_ar, train_tokenizer, muon and the command.
"""

import json
import sys

import pytest
import torch

from dev.shapes import __main__ as command
from dev.shapes import data, train_ar
from dev.shapes.train_ar import Trainer, TrainingPlan
from specbench.errors import INTERRUPTED
from specbench.models.shapes.tokenizer import ShapesTokenizer

PLAN = TrainingPlan(samples=32, batch=4, warmup=8, evaluate_every=1 << 30, prompts=6)


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """`trainer("a")` opens a tiny run in the folder a."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    tokenizer = ShapesTokenizer(codes=16, encoder=8, decoder=8, fine=8).eval()
    tokenizer.codebook.normal_()
    monkeypatch.setattr(train_ar, "SHARD", 16)
    make_shard = data.make_shard
    monkeypatch.setattr(data, "make_shard", lambda *a, **k: make_shard(*a, size=16, **k))
    monkeypatch.setattr(train_ar.ShapesNetwork.__init__, "__defaults__", (16, 16, 5, 2, 24))
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {})
    return lambda name, **more: Trainer(tmp_path / name, tokenizer, PLAN, compiled=False, **more)


def test_an_interrupted_run_ends_like_an_uninterrupted_one(trainer, tmp_path):
    whole = trainer("whole")
    assert whole.run()
    first = trainer("parts")
    for _ in range(3):
        first.step()
    first.checkpoint()
    second = trainer("parts")
    assert second.samples == 12
    assert second.run()
    for weight, other in zip(whole.averaged.parameters(), second.averaged.parameters(), strict=True):
        assert torch.allclose(weight, other, atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "parts" / "ar.jsonl").read_text().splitlines()]
    assert rows[-1]["samples"] == PLAN.samples


def test_an_interrupted_training_leaves_the_weights_alone(trainer, monkeypatch, tmp_path):
    opened = trainer("cut")
    monkeypatch.setattr(command, "train_tokenizer", lambda *_, **__: opened.tokenizer)
    monkeypatch.setattr(command, "Trainer", lambda *_, **__: opened)
    monkeypatch.setattr(opened, "run", lambda: False)
    arguments = ["train", "--out", str(tmp_path / "cut"), "--weights", str(tmp_path / "weights")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == INTERRUPTED and not (tmp_path / "weights").exists()
    monkeypatch.setattr(sys, "argv", [*arguments, "--export-only"])
    command.main()
    assert (tmp_path / "weights" / "network.safetensors").exists()


def test_a_run_goes_on_from_its_exported_state(trainer, tmp_path):
    first = trainer("first")
    for _ in range(3):
        first.step()
    first.export_state(tmp_path / "state")
    assert {file.suffix for file in (tmp_path / "state").iterdir()} == {".safetensors", ".json"}
    second = trainer("second", resume_from=tmp_path / "state")
    assert second.samples == first.samples == 12
    for name, tolerance in (("network", 1e-2), ("averaged", 1e-3), ("auxiliary", 1e-3)):
        pairs = zip(getattr(first, name).parameters(), getattr(second, name).parameters(), strict=True)
        assert all(torch.allclose(weight, other, rtol=tolerance, atol=1e-4) for weight, other in pairs)
    assert second.rate() == PLAN.batch / PLAN.warmup  # warm-up, as the optimizers start anew
    assert second.run() and second.samples == PLAN.samples
