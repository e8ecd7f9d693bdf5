"""Training of the `shapes` network is seeded: an interrupted training ends with the same weights."""

import json
import os
import signal
import sys

import pytest
import torch

from specbench.errors import INTERRUPTED
from specbench.models.shapes.tokenizer import TOKENS, ShapesTokenizer
from specbench.training.shapes import __main__ as command
from specbench.training.shapes import data, train_ar, train_tokenizer
from specbench.training.shapes.muon import orthogonalize
from specbench.training.shapes.train_ar import NOTHING, Plan, Trainer, auxiliary_targets, context_weights

PLAN = Plan(samples=32, batch=4, warmup=8, shards=2, easy_shards=1, evaluate_every=1 << 30, prompts=6)


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """`trainer("a")` opens a tiny run in the folder a."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    tokenizer = ShapesTokenizer(codes=16, encoder=8, decoder=8, fine=8).eval()
    tokenizer.codebook.normal_()
    monkeypatch.setattr(train_ar, "SHARD", 16)
    monkeypatch.setattr(train_ar, "make_shard", lambda *a, **k: data.make_shard(*a, size=16, **k))
    monkeypatch.setattr(train_ar.ShapesNetwork.__init__, "__defaults__", (16, 16, 5, 2, 24))
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {})
    return lambda name: Trainer(tmp_path / name, tokenizer, PLAN, compiled=False)


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
    for one, other in zip(whole.averaged.parameters(), second.averaged.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "parts" / "ar.jsonl").read_text().splitlines()]
    assert rows[-1]["samples"] == PLAN.samples


def test_an_interrupted_tokenizer_ends_like_an_uninterrupted_one(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    for name, value in {"IMAGES": 16, "BATCH": 4, "CODEBOOK_START": 1, "RESTART_EVERY": 2}.items():
        monkeypatch.setattr(train_tokenizer, name, value)
    monkeypatch.setattr(train_tokenizer.ShapesTokenizer.__init__, "__defaults__", (256, 8, 8, 8, 8))
    whole = train_tokenizer.train_tokenizer(tmp_path / "whole", steps=6)
    step = train_tokenizer.TokenizerTrainer.step

    def interrupted(self, number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number)

    monkeypatch.setattr(train_tokenizer.TokenizerTrainer, "step", interrupted)
    assert train_tokenizer.train_tokenizer(tmp_path / "parts", steps=6) is None
    monkeypatch.setattr(train_tokenizer.TokenizerTrainer, "step", step)
    parts = train_tokenizer.train_tokenizer(tmp_path / "parts", steps=6)
    assert all(torch.equal(tensor, parts.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert whole.codebook.any()


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


def test_auxiliary_targets_name_the_next_object_and_count_what_is_to_come():
    owner = torch.zeros(1, TOKENS, dtype=torch.uint8)
    owner[0, 20:24], owner[0, 100:102] = 2, 1
    shape, color = torch.tensor([[3, 1, 0, 0]]), torch.tensor([[5, 4, 0, 0]])
    next_shape, next_color, remaining = auxiliary_targets(owner, shape, color)[:, 0]
    assert next_shape[[0, 23, 24, 101, 102]].tolist() == [1, 1, 3, 3, NOTHING]
    assert next_color[[0, 23, 24, 101, 102]].tolist() == [4, 4, 5, 5, NOTHING]
    assert remaining[[0, 20, 21, 100, 101]].tolist() == [2, 2, 1, 1, 0]


def test_loss_weights_look_only_at_emitted_neighbours():
    owner = torch.zeros(1, TOKENS, dtype=torch.uint8)
    owner[0, 5 * 16 + 5] = 1
    heavy = (context_weights(owner, 6.0)[0] == 6).nonzero()[:, 0].tolist()
    assert heavy == [5 * 16 + 6, 6 * 16 + 4, 6 * 16 + 5, 6 * 16 + 6]


def test_orthogonalized_matrices_have_singular_values_near_one():
    for shape in ((2, 16, 48), (1, 48, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.3 and values.max() < 1.4
