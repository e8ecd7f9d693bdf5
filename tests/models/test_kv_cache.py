"""KV cache: windows, rejected drafts, ragged rows and tree branches give the logits of the uncached full forward."""

from dataclasses import replace

import pytest
import torch
from grouped_key_llama import VOCAB, WIDTH, TinyModel

from specbench.models.interface import Tree
from specbench.models.network_sizes import whole_blocks
from specbench.models.transformer.kv_cache import PositionLayer, whole_parts
from specbench.models.transformer.model import Prefix, TransformerSession

STREAM = 20


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
    """Guided logits [len(tokens) + 1, V] of one prompt, each half from one uncached unpadded forward."""
    halves = []
    for half in (row, row + len(prefix.embeds) // 2):
        stream = model.embed(torch.tensor([tokens]).long(), None, (prefix.state[0][half : half + 1],))
        inputs = torch.cat([prefix.embeds[half][None], stream], dim=1)
        positions = torch.arange(inputs.shape[1])[None]
        if prefix.shift is not None:
            positions = positions + prefix.shift[half]
        mask = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
        hidden = model.backbone(
            inputs_embeds=inputs, position_ids=positions, attention_mask=mask, use_cache=False
        ).last_hidden_state[0]
        halves.append(model.head(hidden[len(prefix.embeds[half]) - 1 :]))
    return halves[1] + guidance * (halves[0] - halves[1])


@torch.inference_mode()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("shift", [None, torch.tensor([3, 6, 7, 5])], ids=["no shift", "positions count padding"])
def test_ragged_windows_with_rollback_give_the_uncached_logits(model, prefix, guidance, shift):
    prefix = replace(prefix, shift=shift)
    generator = torch.Generator().manual_seed(2)
    session = model.begin(prefix, guidance, columns=8)
    committed = [[], []]
    for width, accepted in [(1, (1, 1)), (6, (2, 5)), (6, (6, 1)), (8, (3, 7)), (3, (1, 3)), (2, (2, 1))]:
        windows = torch.randint(VOCAB, (2, width), generator=generator)
        starts = torch.tensor([len(row) for row in committed])
        for row, stream in enumerate(committed):
            if stream:
                windows[row, 0] = stream[-1]
        logits = session.forward(windows, starts[:, None] + torch.arange(width))
        for row, stream in enumerate(committed):
            drafts = windows[row, 1:].tolist()
            expected = full_logits(model, prefix, row, stream + drafts, guidance)[len(stream) :]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
            stream += [*drafts, 0][: accepted[row]]


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
            expected = full_logits(model, prefix, row, tokens[row, :slot].tolist(), 2.0)[-1]
            torch.testing.assert_close(logits[row, 0], expected, atol=1e-4, rtol=1e-4)


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
            stream = start[row].tolist() + fed[row, path].tolist()
            expected = full_logits(model, prefix, row, stream, 2.0)[-1]
            torch.testing.assert_close(logits[row, column], expected, atol=1e-4, rtol=1e-4)
    # Row 0 keeps the branch of columns 3, 4, 5; row 1 its trunk, columns 1, 2.
    session.keep(torch.tensor([[3, 4, 5], [1, 2, 2]]), torch.tensor([[4, 5, 6], [4, 5, 5]]))
    kept = [start[0].tolist() + fed[0, 3:6].tolist(), start[1].tolist() + fed[1, 1:3].tolist()]
    last = torch.tensor([[kept[0][-1]], [kept[1][-1]]])
    logits = session.forward(last, torch.tensor([[6], [5]]))
    for row in range(2):
        expected = full_logits(model, prefix, row, kept[row], 2.0)[-1]
        torch.testing.assert_close(logits[row, 0], expected, atol=1e-4, rtol=1e-4)


def test_a_layer_can_be_made_by_every_version_of_transformers_allowed():
    """Before 5.13 the method that tells a cache's size had another name, without which no layer could be made."""
    assert PositionLayer.get_max_cache_shape is PositionLayer.get_max_length
