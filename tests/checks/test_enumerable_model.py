"""The instrument itself: enumerable models answer for the right prefix, and the statistics neither cry wolf
nor sleep."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbench.checks import divergence, enumerable_model
from specbench.checks.divergence import AUDIT_LEVEL, AUDIT_POWER, Counts, detectable_tv, p_value
from specbench.checks.divergence import total_variation as tv
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer, image_index, joint, processed
from specbench.models.interface import TokenLayout, Tree
from specbench.specs.run_spec import Sampling

LAYOUT = TokenLayout.with_row_ends(2, 2, 3)


def session(rows: int, model: EnumerableModel | None = None, guidance: float = 1.0):
    model = model or EnumerableModel(LAYOUT, ("a", "b"))
    return model.begin(model.encode(["a", "b"] * (rows // 2)), guidance, columns=8)


def logits_of(state, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every slot of whole streams."""
    fed = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    return state.forward(fed, torch.arange(tokens.shape[1]).expand(len(tokens), -1))


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(0))


def row_of(model: EnumerableModel, prefix: list[int]) -> int:
    return model.offsets[len(prefix)] + sum(token * 4**slot for slot, token in enumerate(prefix))


def test_every_column_sees_exactly_its_row_s_prefix():
    model = EnumerableModel(LAYOUT, ("a", "b"))
    tokens = random_tokens(6, LAYOUT.length)
    seen = logits_of(session(6, model), tokens)
    for row in range(6):
        for slot in range(LAYOUT.length):
            expected = model.conditional[row % 2, row_of(model, tokens[row, :slot].tolist())]
            assert torch.equal(seen[row, slot], expected)


def test_ragged_rows_overwrite_rejected_slots_and_guidance_mixes_the_two_tables():
    model = EnumerableModel(LAYOUT, ("a", "b"))
    state = session(2, model)
    state.forward(torch.tensor([[0, 1, 2], [0, 2, 2]]), torch.arange(3).expand(2, 3))
    seen = state.forward(torch.tensor([[0, 1], [1, 3]]), torch.tensor([[2, 3], [1, 2]]))
    assert torch.equal(seen[0, 1], model.conditional[0, row_of(model, [1, 0, 1])])
    assert torch.equal(seen[1, 1], model.conditional[1, row_of(model, [1, 3])])
    state = session(2)
    assert state.forward(random_tokens(2, 8), torch.arange(8).expand(2, 8) + 3).shape == (2, 8, 3)
    model = EnumerableModel(LAYOUT, ("a", "b"))
    seen = session(2, model, guidance=2.5).forward(torch.zeros(2, 1), torch.zeros(2, 1))
    torch.testing.assert_close(seen, (2.5 * model.conditional - 1.5 * model.unconditional)[:, :1])


def test_a_tree_forward_is_each_of_its_branches_as_a_chain():
    tree, depth_one = Tree((-1, 0, 1, 0, 3)), random_tokens(4, 3)
    tokens = random_tokens(4, 5)
    positions = torch.tensor([[3], [2], [3], [1]]) + torch.tensor(tree.depth)
    branches = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 3], 4: [0, 3, 4]}

    def prefilled():
        state = session(4)
        state.forward(depth_one, torch.arange(3).expand(4, 3))
        return state

    state = prefilled()
    seen = state.forward(tokens, positions, tree)
    for column, path in branches.items():
        assert torch.equal(seen[:, column], prefilled().forward(tokens[:, path], positions[:, path])[:, -1])
    state.keep(torch.tensor([[3, 4]]).expand(4, 2), positions[:, [3, 4]])
    assert torch.equal(state.forward(tokens[:, 4:], positions[:, 4:])[:, 0], seen[:, 4])


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(2.0, 0.7, 2), Sampling(1.0, 1.0, 0, 0.8)])
def test_the_joint_is_the_product_of_conditionals(sampling):
    model = EnumerableModel(LAYOUT, ("a", "b"), seed=5)
    truth = joint(model, sampling, "b")
    assert math.isclose(truth.sum(), 1.0, rel_tol=1e-12)
    if sampling == Sampling(1.0):
        image, stream = [2, 0, 1, 1], [2, 0, 3, 1, 1, 3]
        chance = 1.0
        for slot, token in enumerate(stream):
            if token < 3:
                chance *= model.conditional[1, row_of(model, stream[:slot])].double().softmax(0)[token].item()
        assert math.isclose(truth[image_index(np.array(image), 3)], chance, rel_tol=1e-12)


def test_ties_at_top_k_are_kept_and_top_p_keeps_the_first_token():
    logits = np.array([[1.0, 2.0, 1.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(processed(logits, Sampling(1.0, 1.0, 2)) > 0, [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(processed(logits, Sampling(1.0, 1.0, 0, 0.1)) > 0, [[0, 1, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(processed(logits, Sampling(1.0, 1.0, 0, 0.7)) > 0, [[1, 1, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("on", [["half", "two"], ["two", "half"]])
def test_filters_without_a_formula_here_are_applied_in_the_order_of_the_decoders(on, monkeypatch):
    def above(logits, share):  # drops tokens below a share of the mean of the others: depends on earlier filters
        p = logits.exp()
        return p < share * p.sum(-1, keepdim=True) / (p > 0).sum(-1, keepdim=True)

    rules = {"half": above, "two": lambda logits, count: logits < logits.topk(count).values[..., -1:]}
    monkeypatch.setattr(enumerable_model, "FILTER_RULES", rules)
    off = vars(Sampling(1.0))
    p = processed(np.log([[0.5, 0.3, 0.2]]), SimpleNamespace(**off, filters=on, half=0.8, two=2))
    np.testing.assert_allclose(p, [[0.625, 0.375, 0.0]])


def test_more_prefixes_than_table_rows_are_hashed_and_the_session_agrees_with_the_joint():
    layout = TokenLayout.with_row_ends(5, 2, 3)
    model = EnumerableModel(layout, ("a",))
    assert layout.vocab ** (layout.length - 1) > model.slot_rows[-1]
    tokens = random_tokens(4, layout.length)
    seen = logits_of(model.begin(model.encode(["a"] * 4), 1.0, layout.length), tokens)
    codes = tokens[:, :-1].numpy() @ 4 ** np.arange(layout.length - 1)
    np.testing.assert_array_equal(seen[:, -1].numpy(), model.guided("a", layout.length - 1, codes, 1.0))


def test_a_transformer_s_joint_is_what_teacher_forced_forwards_with_the_cache_say():
    layout = TokenLayout.with_row_ends(2, 2, 2)
    model, sampling = EnumerableTransformer(layout, ("a", "b")), Sampling(2.0, 0.9)
    truth = model.joint(sampling, "b")
    images = np.array([[0, 1, 1, 0], [1, 1, 0, 1]])
    stream = torch.full((2, layout.length), 2)
    stream[:, layout.free_slots()] = torch.from_numpy(images)
    state = model.begin(model.encode(["b", "b"]), sampling.guidance, layout.length)
    logits = logits_of(state, stream).double().numpy()
    p = np.take_along_axis(processed(logits, sampling), stream.clamp(max=1).numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(truth[image_index(images, 2)], p[:, layout.free_slots()].prod(1), rtol=1e-4)
    assert math.isclose(truth.sum(), 1.0, rel_tol=1e-12)


def test_long_images_are_counted_by_runs_of_tokens_whose_marginals_are_the_joint_s():
    exact = np.random.default_rng(0).dirichlet(np.ones(2**12))
    observed = np.random.default_rng(1).multinomial(10_000, exact, size=2)
    counts = Counts(np.pad(observed, ((0, 0), (0, 1)), constant_values=3), np.append(exact, 0.0), 2)
    assert len(counts.runs) == 12 - 7 + 1 and len(counts.blocks) == 2
    third = image_index((np.arange(2**12)[:, None] >> np.arange(11, -1, -1) & 1)[:, 2:9], 2)
    np.testing.assert_allclose(counts.runs[2].exact, np.append(np.bincount(third, exact, 128), 0.0))
    images = np.bincount(third, counts.total[:-1], 128)
    np.testing.assert_array_equal(counts.runs[2].total, np.append(images, 6))  # 6 images broke the grammar


def experiment(shift: float, images: int, seed: int, tables: int = 6, cells: int = 81):
    """Multinomial counts whose joint is `shift` in total variation from each table's exact joint."""
    rng = np.random.default_rng(seed)
    counts, distance = [], 0.0
    for _ in range(tables):
        exact = rng.dirichlet(np.full(cells, 0.8))
        tilt = exact * rng.choice([-1.0, 1.0], cells)
        tilt -= exact * tilt.sum()
        joint = np.clip(exact + tilt * shift / (np.abs(tilt).sum() / 2), 0, None)
        joint /= joint.sum()
        distance += np.abs(joint - exact).sum() / 2 / tables
        half = images // tables // 2
        counts.append(Counts(np.stack([rng.multinomial(half, joint), rng.multinomial(half, joint)]), exact))
    return counts, distance


def test_an_exact_sampler_is_called_lossless_with_p_values_spread_evenly():
    runs = [experiment(0.0, 60_000, seed)[0] for seed in range(300)]
    p, distances = np.array([p_value(run) for run in runs]), np.array([tv(run) for run in runs])
    assert p.min() > AUDIT_LEVEL and (p < 0.1).mean() < 0.16
    assert distances[:, 0].mean() < 0.002 and (distances[:, 1] > 0).mean() < 0.06


def test_a_distance_of_detectable_size_is_found_with_the_declared_power():
    sizes = [experiment(0.0, 60_000, seed)[0] for seed in range(3)]
    threshold = max(detectable_tv(run) for run in sizes)
    rejected = [p_value(experiment(threshold, 60_000, seed)[0]) < AUDIT_LEVEL for seed in range(200)]
    assert np.mean(rejected) > AUDIT_POWER - 0.04


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.03, 0.1, 0.4])
def test_the_interval_covers_the_true_distance(shift):
    covered = []
    for seed in range(200):
        counts, distance = experiment(shift, 60_000, seed)
        estimate, low, high = tv(counts)
        covered.append(low <= distance <= high)
        assert low <= estimate <= high
    assert np.mean(covered) > 0.95


def test_one_impossible_image_is_enough_and_one_of_a_very_rare_kind_is_not():
    exact = np.array([0.5, 0.5, 0.0])
    counts = Counts(np.array([[500, 500, 0], [500, 499, 1]]), exact)
    assert p_value([counts]) == 0 and tv([counts])[2] <= 1
    exact = np.array([0.6, 0.4 - 1e-6, 1e-6])
    counts = Counts(np.array([[300, 200, 0], [300, 199, 1]]), exact)
    assert p_value([counts]) > 0.5


BITS, HALF, COPIED = 12, 6, 0.99


def test_the_summed_statistic_of_exact_samples_has_its_variance_and_would_be_wider_without_the_correction():
    """Of images of 12 tokens of 2, each of the second half equal to its partner with probability COPIED: dependent
    blocks of an image have the level that the audit states."""
    bits = np.arange(2**BITS)[:, None] >> np.arange(BITS - 1, -1, -1) & 1
    same = (bits[:, HALF:] == bits[:, :HALF]).sum(1)
    exact = np.append(0.5**HALF * COPIED**same * (1 - COPIED) ** (HALF - same), 0.0)
    rng, corrected, plain = np.random.default_rng(5), [], []
    for _ in range(1000):
        tables = [Counts(rng.multinomial(10_000, exact, size=2), exact, 2)]
        (scaled, dof), scale = divergence._summed(tables), divergence._scale(tables)
        corrected.append((scaled - dof) / np.sqrt(2 * dof))
        plain.append((scaled - dof) * scale / np.sqrt(2 * dof * scale))
    assert np.std(corrected) == pytest.approx(1.0, abs=0.08) and abs(np.mean(corrected)) < 0.15 and np.std(plain) > 1.1
