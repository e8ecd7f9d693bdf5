"""Draft heads: public checkpoints load, drafting follows the explicit formulas, training is reproducible, and a weak
head is distinguishable from a misaligned one."""

import gc
import json
import os
import weakref

import any_causal_lm
import numpy as np
import pytest
import torch
from draft_heads import noted_proposals
from grouped_key_llama import TinyModel
from refusals import refused
from transformers import LlamaConfig

from specbench.checks.enumerable_model import EnumerableModel
from specbench.decoding.loop import decode
from specbench.decoding.sampling import Target
from specbench.errors import SpecbenchError
from specbench.models import draft_head
from specbench.models.draft_head import eagle3_head_for, head_for, load_head, new_head, save_head
from specbench.models.draft_head_files import head_in
from specbench.models.facts import REFERENCES
from specbench.models.interface import TokenLayout
from specbench.models.loaded_model import LoadedModel
from specbench.models.transformer.model import Prefix
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.system.foreign_code import Code
from specbench.training import head as training
from specbench.training.alignment import alignment
from specbench.training.data import Corpus, corpus
from specbench.training.head import HeadPlan, train, untrained_eagle, untrained_eagle3

D, VOCAB = 16, 11
GUIDED = Sampling(2.0, 1.0, 8)


class Headless(TinyModel):
    """The tiny transformer with prompts of two lengths."""

    weights_sha256 = "tiny"

    def encode(self, prompts):
        draw = torch.Generator().manual_seed(5)
        lengths = [4 + len(text) % 2 for text in prompts] + [3 + len(text) % 2 for text in prompts]
        state = torch.randn(len(lengths), D, generator=draw)
        ids = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=draw)
        return Prefix([torch.randn(length, D, generator=draw) for length in lengths], (state,), ids=ids)


def enlarged(head, factor):
    for weights in head.parameters():
        weights.data.mul_(factor)
    return head


class Speaker(Headless):
    """The same with a separate head."""

    def own_head(self):
        return enlarged(untrained_eagle(self, seed=3), 3)

    def own_eagle3_head(self):
        head = enlarged(untrained_eagle3(self, seed=3), 2)
        head.fuse.weight.data += torch.randn(head.fuse.weight.shape, generator=torch.Generator().manual_seed(4))
        return head

    def draft_data(self, count, seed):
        requests = [Request("ab"[row % 2] * (1 + row % 2), f"{seed}", row) for row in range(count)]
        rows = decode(self, requests, resolve("ar"), Sampling(1.0), seed, render=False)
        texts = tuple(request.text for request in requests)
        return texts, torch.from_numpy(np.stack([row.tokens for row in rows])).long()


class Echo(Speaker):
    """One whose next token hangs on the last one more than on the caption."""

    def __init__(self):
        super().__init__()
        self.backbone.embed_tokens.weight.data.mul_(3)

    def encode(self, prompts):
        prefix = super().encode(prompts)
        return Prefix(prefix.embeds, (prefix.state[0] * 0,), ids=prefix.ids)


@pytest.fixture(scope="module")
def model():
    return Speaker()


def by_hand(model, head, prefix, row, tokens, drafts):
    """Guided distributions of the head, written out without any cache: after `tokens`, then after each of `drafts`."""
    extrapolated = []
    for half in (row, row + len(prefix.embeds) // 2):
        length = len(prefix.embeds[half])
        stream = model.embed(torch.tensor([tokens]), None, (prefix.state[0][half : half + 1],))
        inputs = torch.cat([prefix.embeds[half][None], stream], dim=1)
        states = model.backbone(inputs_embeds=inputs[:, :-1], use_cache=False, output_hidden_states=True)
        inner = [model.backbone.norm(states.hidden_states[tap]) for tap in head.taps]
        features = head.fused(torch.cat([states.last_hidden_state, *inner], -1))
        ids = [*prefix.ids[half, 1:length].tolist(), *tokens]
        guesses = []
        for number in range(len(drafts) + 1):
            path_ids = torch.tensor([ids + drafts[:number]])
            guesses.append(head.extrapolate(path_ids, torch.cat([features, *guesses], dim=1))[:, -1:])
        extrapolated.append(model.head(head.read(torch.cat(guesses, 1)[0])))
    logits = extrapolated[1] + GUIDED.guidance * (extrapolated[0] - extrapolated[1])
    positions = len(tokens) + torch.arange(len(drafts) + 1)
    return Target(model.layout, GUIDED, model.device)(logits[None], positions[None])[0]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("decoder", "tree"), [("eagle", "chain"), *((name, "0 1 00 01 10 000 001 100") for name in ("eagle", "eagle3"))]
)
def test_every_draft_distribution_is_the_one_written_out(model, decoder, tree, monkeypatch):
    seen = noted_proposals(monkeypatch)
    requests = [Request("a", "a"), Request("bb", "b")]
    spec = resolve(decoder, {"tree": tree, "verifier": "omega", "delta": 1e9})
    rows = decode(model, requests, spec, GUIDED, 1, False)
    head = (model.own_head() if decoder == "eagle" else model.own_eagle3_head()).eval()
    prefix, checked = model.encode(["a", "bb"]), 0
    for committed, fed in seen:
        for row in range(2):
            tokens = rows[row].tokens[: int(committed[row])].tolist()
            for column in [c for c in range(len(fed.tree.parents)) if c in fed.tree.parents]:
                path = [c for c in range(1, column + 1) if fed.tree.ancestors[column, c]]
                if len(tokens) + len(path) >= model.layout.length:
                    continue
                expected = by_hand(model, head, prefix, row, tokens, fed.tokens[row, path].tolist())[-1]
                torch.testing.assert_close(fed.q[row, column], expected, atol=2e-4, rtol=1e-3)
                checked += 1
    assert checked > 20
    assert max(row.accepted.sum() for row in rows) > 3


def test_siblings_are_distinct_and_follow_q_without_the_earlier_siblings(monkeypatch):
    seen = noted_proposals(monkeypatch)
    requests = [Request("", "p", sample) for sample in range(20_000)]
    model = EnumerableModel(TokenLayout.plain(1, 2, 4))
    decode(model, requests, resolve("eagle", {"tree": "0 1"}), Sampling(1.0), 0, False)
    fed = next(fed for _, fed in seen if fed.tokens.shape[1] == 3)
    q = fed.q[:, 0].double()
    first, second = fed.tokens[:, 1], fed.tokens[:, 2]
    assert (first != second).all()
    pairs = torch.zeros(4, 4, dtype=torch.double)
    pairs.index_put_((first, second), torch.ones(len(first), dtype=torch.double), accumulate=True)
    expected = (q[:, :, None] * q[:, None, :] / (1 - q[:, :, None])).sum(0).fill_diagonal_(0)
    assert ((pairs - expected).abs() < 5 * expected.sqrt() + 1e-9).all()


def test_greedy_images_are_ar_s(model):
    greedy, requests = Sampling(3.0, 1.0, 1), [Request("a", "a"), Request("bb", "b"), Request("a", "c")]

    def tokens(name, **options):
        return np.stack([row.tokens for row in decode(model, requests, resolve(name, options), greedy, 0, False)])

    for tree in ("chain", "mc_sim_7b_63", "naive_extend_57", "0 1 2 20 200"):
        assert np.array_equal(tokens("eagle", tree=tree), tokens("ar"))


def head_config(**changed):
    sizes = {"hidden_size": D, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=VOCAB, num_hidden_layers=1, pad_token_id=None, **(sizes | changed))


def test_a_stored_head_comes_back_and_others_are_refused(model, tmp_path):
    head = new_head(head_config(), torch.randn(VOCAB, D), seed=1)
    save_head(head, tmp_path / "good", {"trained_for": "tiny"})
    back = load_head(head_in(tmp_path / "good"))
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor.half(), back.state_dict()[name].half()), name
    assert head_for(model, str(tmp_path / "good")).config.hidden_size == D
    assert refused("", head_for, model, str(tmp_path / "nothing")).exit_code == 5
    save_head(new_head(head_config(hidden_size=32), torch.randn(VOCAB, 32), seed=1), tmp_path / "wide", {})
    refused("size is 32", head_for, model, str(tmp_path / "wide"))


def test_a_head_is_loaded_once_for_many_batches_and_again_once_its_file_or_the_model_has_changed(tmp_path, monkeypatch):
    model, loads = Speaker(), []
    honest = load_head
    monkeypatch.setattr(draft_head, "load_head", lambda folder: loads.append(folder) or honest(folder))
    for name, seed in (("one", 1), ("other", 2)):
        save_head(new_head(head_config(), torch.randn(VOCAB, D), seed), tmp_path / name, {})

    def made(model, name):
        decode(model, [Request("a", "a")], resolve("eagle", {"head": str(tmp_path / name)}), GUIDED, 0, render=False)
        return weights(head_for(model, str(tmp_path / name)))

    first = made(model, "one")
    assert torch.equal(first, made(model, "one")) and len(loads) == 1
    assert not torch.equal(first, made(model, "other")) and len(loads) == 2
    file = tmp_path / "other" / "model.safetensors"
    before = file.stat()
    save_head(new_head(head_config(), torch.randn(VOCAB, D), 3), tmp_path / "other", {})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert file.stat().st_size == before.st_size
    third = made(model, "other")
    assert len(loads) == 3 and torch.equal(third, weights(honest(head_in(tmp_path / "other"))))
    model.backbone.bfloat16()
    assert head_for(model, str(tmp_path / "other")).dtype == torch.bfloat16 and len(loads) == 4
    kept = weakref.ref(head_for(model, str(tmp_path / "other")))
    del model
    gc.collect()
    assert kept() is None


PLAN = HeadPlan(images=24, epochs=6, batch=8, lr=1e-2, seed=4)


def weights(head):
    return torch.cat([tensor.flatten() for tensor in head.state_dict().values()])


def test_training_reproduces_and_resumes_to_the_same_weights(model, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_EVERY", 4)
    once = weights(train(model, tmp_path / "once", PLAN))
    with pytest.raises(SpecbenchError, match="no run does not exist"):
        train(model, tmp_path / "again", PLAN, tmp_path / "no run")  # leaves nothing that the next line could meet
    assert torch.equal(once, weights(train(model, tmp_path / "again", PLAN)))

    for at in (("features", 16), ("steps", 7), ("steps", 18)):

        def kill(where, done, total, note, at=at):
            if (where, done) == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path / "killed", PLAN, tell=kill)
    other = HeadPlan(images=24, epochs=6, batch=8, lr=1e-3, seed=4)
    refused("other settings", train, model, tmp_path / "killed", other)
    edited = Code({"own": "0"})
    refused("other settings", train, model, tmp_path / "killed", PLAN, code=edited)
    assert torch.equal(once, weights(train(model, tmp_path / "killed", PLAN)))
    log = [json.loads(line) for line in (tmp_path / "killed" / "loss.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == list(range(1, 19))
    assert not (tmp_path / "killed" / "training").exists()
    other = HeadPlan(**{**vars(PLAN), "seed": 5})
    assert not torch.equal(once, weights(train(model, tmp_path / "other", other)))


def aligned(model, head):
    """Rows of a head's alignment on images that it was not trained on."""
    return alignment(model, head.eval(), Corpus(*model.draft_data(24, 99)), Sampling(2.0), depths=3, starts=4)


def test_alignment_distinguishes_a_trained_head_from_an_untrained_and_a_misled_head(tmp_path, monkeypatch):
    model, plan = Echo(), HeadPlan(images=48, epochs=30, batch=16, lr=1e-2)
    raw = aligned(model, untrained_eagle(model, 0))
    good = aligned(model, train(model, tmp_path / "good", plan))
    assert [row["depth"] for row in good] == ["1", "2", "3", "1, x_t"]
    assert good[0]["tv"] < raw[0]["tv"] - 0.05
    assert good[0]["tv"] < good[3]["tv"]

    honest = training.eagle_losses

    def shifted(model, head, batch, noise):
        ids = torch.nn.functional.pad(batch.ids[:, :-1], (1, 0))
        return honest(model, head, training.Examples(ids, batch.features, batch.prompt, batch.length), noise)

    monkeypatch.setitem(training.KINDS, "eagle", training.KINDS["eagle"]._replace(losses=shifted))
    misled = aligned(model, train(model, tmp_path / "misled", plan))
    assert misled[3]["tv"] < misled[0]["tv"]


def test_an_eagle3_head_learns_from_its_own_outputs_and_comes_back(tmp_path):
    model = Echo()
    head = train(model, tmp_path / "head", HeadPlan(images=48, epochs=20, batch=16, lr=1e-2, kind="eagle3"))
    heads = (untrained_eagle3(model, 0), head, eagle3_head_for(model, str(tmp_path / "head")))
    raw, good, again = (aligned(model, each) for each in heads)
    assert all(row["tv"] < before["tv"] - 0.05 for row, before in zip(good[:3], raw, strict=False))
    assert [row["tv"] for row in again] == pytest.approx([row["tv"] for row in good], abs=0.02)
    refused("not an EAGLE-1 head", head_for, model, str(tmp_path / "head"))


@pytest.fixture
def loaded(monkeypatch):
    """Return a function that loads a network of transformers as a plug-in does, with training images."""

    def load(name):
        model = LoadedModel(any_causal_lm.build(name, "sdpa"), (3, 4), range(20, 36), lambda text: ([1, 5], [1]))
        images = Corpus(("a", "b", "c", "d"), torch.randint(16, (4, 12)))
        monkeypatch.setattr(training, "corpus", lambda *_: images)
        return model

    return load


def test_advice_names_a_users_model_as_it_is_typed(monkeypatch):
    monkeypatch.setitem(REFERENCES, "tiny", "own:MODEL")
    model = Headless()
    model.name = "tiny"
    refused("specbench run --model own:MODEL --decoder ar", corpus, model, 1, 0, None)
    refused("specbench train-head --model own:MODEL.$", head_for, model, "")
    refused("specbench train-head --model own:MODEL --kind eagle3", eagle3_head_for, model, "")


@pytest.mark.parametrize("kind", ["eagle", "vertical"])
def test_a_head_is_trained_for_a_network_that_a_plug_in_loads(kind, loaded, tmp_path):
    head = train(loaded("llama"), tmp_path, HeadPlan(images=4, epochs=2, batch=2, kind=kind))
    assert weights(head).isfinite().all() and (tmp_path / "model.safetensors").is_file()


def test_networks_whose_sizes_or_layers_a_head_cannot_use_are_refused_without_a_folder(loaded, tmp_path):
    for name, kind, why in (("llama", "eagle3", "inner layers"), ("gpt2", "eagle", "has no ")):
        refused(why, train, loaded(name), tmp_path / name, HeadPlan(images=4, epochs=2, batch=2, kind=kind))
        assert not (tmp_path / name).exists()


def test_drafting_needs_a_head():
    error = refused("no draft head", decode, Headless(), [Request("a", "a")], resolve("eagle"), GUIDED, 0, False)
    assert error.exit_code == 5


CHECK_HEAD = ("check-head", "--model", "shapes", "--depths", "2")


@pytest.mark.parametrize(
    ("kind", "depths"), [("eagle", ["1", "2", "1, x_t"]), ("eagle3", ["1", "2", "1, x_t"]), ("vertical", ["1", "2"])]
)
def test_each_kind_of_head_is_measured_as_such_and_one_image_has_no_interval(kind, depths, cli):
    alone = json.loads(cli(*CHECK_HEAD, "--kind", kind, "--images", "1", "--json").out)
    assert [row["depth"] for row in alone] == depths
    assert all(0 < row["tv"] < 1 and row["tv_low"] is None and row["tv_high"] is None for row in alone)
    two = json.loads(cli(*CHECK_HEAD, "--kind", kind, "--images", "2", "--json").out)
    assert all(row["tv_low"] <= row["tv"] <= row["tv_high"] for row in two)
    cli(*CHECK_HEAD, "--kind", "vertikal").refused("unknown kind of draft head 'vertikal'")
