"""Training of the `shapes` network is seeded: an interrupted training ends with the same weights.

It concerns several modules: shapes.train_ar, train_tokenizer, muon and the command.
"""

import json
import os
import signal
import sys

import pytest
import torch

from dev.shapes import __main__ as command
from dev.shapes import data, train_ar, train_tokenizer
from dev.shapes.muon import orthogonalize
from dev.shapes.train_ar import NOTHING, Trainer, TrainingPlan, auxiliary_targets, loss_weights
from specbench.errors import INTERRUPTED
from specbench.models.shapes.tokenizer import TOKENS, ShapesTokenizer

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
    for one, other in zip(whole.averaged.parameters(), second.averaged.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "parts" / "ar.jsonl").read_text().splitlines()]
    assert rows[-1]["samples"] == PLAN.samples


def test_an_interrupted_tokenizer_ends_like_an_uninterrupted_one(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    for name, value in {"_IMAGES": 16, "_BATCH": 4, "CODEBOOK_START": 1, "RESTART_EVERY": 2}.items():
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
        assert all(torch.allclose(one, other, rtol=tolerance, atol=1e-4) for one, other in pairs)
    assert second.rate() == PLAN.batch / PLAN.warmup  # warm-up, as the optimizers start anew
    assert second.run() and second.samples == PLAN.samples


def test_attention_in_blocks_is_causal_attention():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 11, 8, generator=generator) for _ in range(3))
    blocked, _ = train_ar.blocked_attention(None, query, key, value, None, scaling=8**-0.5)
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(blocked, whole.transpose(1, 2), atol=1e-5)


def test_loss_weights_look_only_at_positions_and_emitted_neighbours():
    plan = TrainingPlan(object_weight=6.0, corner_weight=3.0, noise_weight=0.5)
    owner, noisy = torch.zeros(1, TOKENS, dtype=torch.uint8), torch.zeros(1, TOKENS, dtype=torch.bool)
    owner[0, 5 * 16 + 5] = 1
    weights = loss_weights(owner, noisy, plan)[0]
    heavy = (weights == 6).nonzero()[:, 0].tolist()
    assert heavy == [5 * 16 + 6, 6 * 16 + 4, 6 * 16 + 5, 6 * 16 + 6]
    corners = (weights == 3).nonzero()[:, 0].tolist()
    assert corners == [16 * y + x for y in range(0, 16, 2) for x in range(0, 16, 2) if 16 * y + x not in heavy]
    assert (weights == 1).sum() == TOKENS - len(heavy) - len(corners)
    noisy[0, 9 * 16 + 9] = True
    light = (loss_weights(owner, noisy, plan)[0] == 0.5).nonzero()[:, 0].tolist()
    assert light == [9 * 16 + 10, 10 * 16 + 9]  # its two other neighbours can be corners of a card


def test_orthogonalized_matrices_have_singular_values_near_one():
    for shape in ((2, 16, 48), (1, 48, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.3 and values.max() < 1.4


def test_scenes_are_drawn_as_often_as_the_plan_weighs_them():
    """Scenes of 1, 2 (beside each other or not), 3 unlike, and 2 and 3 like objects."""
    objects, like = [1, 2, 2, 3, 2, 3], [4, 5]
    owner = torch.zeros(6, 256, dtype=torch.uint8)
    for row, count in enumerate(objects):
        owner[row, torch.arange(count) * 32] = torch.arange(1, count + 1, dtype=torch.uint8)
    owner[2, 1] = 2
    shape = torch.tensor([[0, 1, 2, 0]] * 6, dtype=torch.uint8)
    shape[like] = 0
    color = torch.zeros_like(shape)
    copies = 2000
    tables = [table.repeat(copies, *[1] * (table.ndim - 1)) for table in (owner, shape, color)]
    owner, shape, color = tables
    shard = data.Shard(owner, owner, owner, owner, shape, color)
    plan = TrainingPlan(pair_weight=2, beside_weight=3, triple_weight=4)
    drawn = train_ar.scene_order(shard, plan, torch.Generator().manual_seed(0)) % 6
    shares = torch.bincount(drawn, minlength=6) / len(drawn)
    expected = torch.tensor([1.0, 2, 6, 4, 1, 1])
    assert torch.allclose(shares, expected / expected.sum(), atol=0.02)
    evenly = train_ar.scene_order(shard, TrainingPlan(), torch.Generator().manual_seed(0))
    assert len(set(evenly.tolist())) == len(owner)
