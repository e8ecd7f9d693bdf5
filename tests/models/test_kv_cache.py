"""KV cache: windows, rejected drafts, ragged rows and tree branches give the logits of the uncached full forward. A
Llama's layers that run directly give the bits of transformers' own forward of them. It concerns several modules:
kv_cache and llama_layer."""

from dataclasses import replace

import pytest
import torch
from grouped_key_llama import VOCAB, WIDTH, TinyModel
from ragged import ragged_windows
from transformers import LlamaConfig, LlamaModel

from specbench.models.interface import Tree
from specbench.models.network_sizes import whole_blocks
from specbench.models.transformer.forward import last_hidden_state
from specbench.models.transformer.kv_cache import PositionCache, whole_parts
from specbench.models.transformer.llama_layer import runs_directly, use_grouped_attention
from specbench.models.transformer.model import Prefix, TransformerSession


@pytest.fixture(scope="module")
def model():
    return TinyModel()


@pytest.fixture(params=["as on a CPU", "as on a GPU"], autouse=True)
def slots_read(request, monkeypatch):
    """A GPU allocates whole blocks and reads whole parts of them, so also empty slots."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(TransformerSession, "_room", lambda session, slots: whole_blocks(slots))
        monkeypatch.setattr(TransformerSession, "_readable", lambda session, end: whole_parts(end, len(session._index)))


@pytest.fixture
def prefix():
    """Two prompts with their unconditional twins, all of different length."""
    generator = torch.Generator().manual_seed(1)
    embeds = [torch.randn(length, WIDTH, generator=generator) for length in (5, 2, 1, 3)]
    return Prefix(embeds, (torch.randn(4, WIDTH, generator=generator),))


def full_logits(model, prefix, row, tokens, guidance):
    """Guided logits [len(tokens) + 1, V] of a prompt, each half from one uncached unpadded forward."""
    halves = []
    for half in (row, row + len(prefix.embeds) // 2):
        stream = model.embed(torch.tensor([tokens]).long(), None, (prefix.state[0][half : half + 1],))
        inputs = torch.cat([prefix.embeds[half][None], stream], dim=1)
        positions = torch.arange(inputs.shape[1])[None]
        if prefix.shift is not None:
            positions = positions + prefix.shift[half]
        mask = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
        given = {"inputs_embeds": inputs, "position_ids": positions, "attention_mask": mask}
        hidden = model.backbone(**given, use_cache=False).last_hidden_state[0]
        halves.append(model.head(hidden[len(prefix.embeds[half]) - 1 :]))
    return halves[1] + guidance * (halves[0] - halves[1])


def check(logits, *given):
    """Compare the logits [C, V] of the last columns with those of the full forward."""
    torch.testing.assert_close(logits, full_logits(*given)[-len(logits) :], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("shift", [None, torch.tensor([3, 6, 7, 5])], ids=["no shift", "positions count padding"])
def test_ragged_windows_with_rollback_give_the_uncached_logits(model, prefix, guidance, shift):
    prefix = replace(prefix, shift=shift)
    session = model.begin(prefix, guidance, columns=8)
    for row, stream, drafts, logits in ragged_windows(session.forward, VOCAB):
        assert len(logits) == 1 + len(drafts)
        check(logits, model, prefix, row, stream + drafts, guidance)


@torch.inference_mode()
def test_rows_at_one_slot_give_the_uncached_logits_column_by_column(model):
    """Rows of equal prompts take the shortest way: one column, no mask."""
    generator = torch.Generator().manual_seed(3)
    embeds = [torch.randn(3, WIDTH, generator=generator) for _ in range(4)]
    prefix = Prefix(embeds, (torch.randn(4, WIDTH, generator=generator),))
    session, tokens = model.begin(prefix, 2.0, columns=1), torch.randint(VOCAB, (2, 5), generator=generator)
    for slot in range(6):
        fed = tokens[:, slot - 1 : slot] if slot else torch.zeros(2, 1).long()
        logits = session.forward(fed, torch.full((2, 1), slot))
        for row in range(2):
            check(logits[row], model, prefix, row, tokens[row, :slot].tolist(), 2.0)


@torch.inference_mode()
def test_shared_keys_are_not_copied_for_a_window(model, prefix, monkeypatch):
    """Attention is handed the keys as they are cached, for a lone column and for a window."""
    heads = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        heads.append(key.shape[1])
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    session = model.begin(prefix, 2.0, columns=8)
    for width in (1, 6):
        session.forward(torch.zeros(2, width).long(), torch.arange(width).repeat(2, 1))
    assert set(heads) == {model.backbone.config.num_key_value_heads}


@torch.inference_mode()
def test_branches_of_a_tree_and_the_path_kept(model, prefix):
    tree = Tree((-1, 0, 1, 0, 3, 4, 0))
    generator = torch.Generator().manual_seed(3)
    session = model.begin(prefix, 2.0, columns=len(tree.parents))
    start = torch.randint(VOCAB, (2, 3), generator=generator)
    session.forward(torch.cat([torch.zeros(2, 1).long(), start], 1), torch.arange(4).expand(2, 4))
    fed = torch.randint(VOCAB, (2, len(tree.parents)), generator=generator)
    fed[:, 0] = start[:, -1]
    logits = session.forward(fed, 3 + torch.tensor(tree.depth).expand(2, -1), tree)
    for row in range(2):
        for column in range(len(tree.parents)):
            path = [ancestor for ancestor in range(1, column + 1) if tree.ancestors[column, ancestor]]
            tokens = start[row].tolist() + fed[row, path].tolist()
            check(logits[row, column : column + 1], model, prefix, row, tokens, 2.0)
    # Row 0 keeps the branch of columns 3, 4, 5; row 1 its trunk, columns 1, 2.
    session.keep(torch.tensor([[3, 4, 5], [1, 2, 2]]), torch.tensor([[4, 5, 6], [4, 5, 5]]))
    kept = [start[0].tolist() + fed[0, 3:6].tolist(), start[1].tolist() + fed[1, 1:3].tolist()]
    logits = session.forward(torch.tensor([[kept[0][-1]], [kept[1][-1]]]), torch.tensor([[6], [5]]))
    for row in range(2):
        check(logits[row], model, prefix, row, kept[row], 2.0)


SLOTS, START = 24, 9


def network(kv_heads: int, dtype: torch.dtype, bias: bool) -> LlamaModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "attention_bias": bias, "mlp_bias": bias}
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**sizes, **heads, attn_implementation="sdpa")).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    use_grouped_attention(model)
    return model


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (6, 1), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "bias"), [(4, False), (2, True)])
@torch.inference_mode()
def test_the_layers_give_the_bits_of_transformers(kv_heads, bias, dtype, rows, columns):
    model = network(kv_heads, dtype, bias)
    embeds = torch.randn(rows, columns, 32).to(dtype)
    positions = torch.arange(START, START + columns).expand(rows, -1)
    mask = (torch.arange(SLOTS) <= positions[..., None])[:, None]
    buffers = [tuple(torch.randn(rows, kv_heads, SLOTS, 8).to(dtype) for _ in range(2)) for _ in range(2)]
    caches = [PositionCache(2, SLOTS, [(k.clone(), v.clone()) for k, v in buffers]) for _ in range(2)]
    for cache in caches:
        cache.place(positions, SLOTS)
    assert runs_directly(model.layers[0], embeds, mask)
    hidden = last_hidden_state(model, embeds, positions, mask, caches[0])
    inputs = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
    assert torch.equal(hidden, model(**inputs, past_key_values=caches[1], use_cache=True).last_hidden_state)
    for buffer, other in zip(caches[0].buffers(), caches[1].buffers(), strict=True):
        assert torch.equal(buffer[0], other[0]) and torch.equal(buffer[1], other[1])


def test_other_attention_and_training_take_the_librarys_way():
    model, embeds, mask = network(4, torch.float32, False), torch.zeros(1, 3, 32), torch.ones(1, 1, 3, SLOTS).bool()
    assert not runs_directly(model.layers[0], embeds, None)
    assert not runs_directly(model.train().layers[0], embeds, mask)
    model.eval().config._attn_implementation = "eager"
    assert not runs_directly(model.layers[0], embeds, mask)
