"""FID, KID and their standard errors against independent computations; four preprocessing variants against their
tools."""

from types import SimpleNamespace

import authors_formats as formats
import calibrated
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from refusals import refused
from scipy import linalg

from specbench.errors import MISSING_PREREQUISITE
from specbench.metrics import compbench, distances, geneval, published_weights
from specbench.metrics.base import CODE_VERSIONS, Sample, Settings, made_features, made_score
from specbench.metrics.catalog import metric
from specbench.metrics.clip import bilinear299
from specbench.metrics.distances import (
    Gaussian,
    fid_infinity,
    frechet_distance,
    frechet_influence,
    inception_score,
    kid,
    kid_influence,
    neighbourhood,
)
from specbench.metrics.fid import CROPS, FRONT_ENDS, Fid, fid_difference, fid_estimate
from specbench.metrics.inception_network import load_inception
from specbench.metrics.openclip import short_side_centre, squashed, torchvision_if_it_loads
from specbench.metrics.preference import hps_input
from specbench.stats import Estimate


def cloud(n: int, d: int, seed: int, shift: float = 0.3) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, d)) @ (np.eye(d) + 0.4 * draw.normal(size=(d, d)) / np.sqrt(d)) + shift


def by_scipy(x: np.ndarray, y: np.ndarray) -> float:
    root = linalg.sqrtm(np.cov(x.T) @ np.cov(y.T)).real
    gap = x.mean(0) - y.mean(0)
    return float(gap @ gap + np.trace(np.cov(x.T) + np.cov(y.T) - 2 * root))


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    return calibrated.save_inception(tmp_path_factory.mktemp("inception") / "inception.pth")


@pytest.fixture
def published(weights, monkeypatch):
    """The calibrated file as the published file, digest and all."""
    return formats.stand_in(monkeypatch, "inception", weights)


@pytest.mark.parametrize("sizes", [(400, 300), (30, 400), (30, 20), (400, 20)])
def test_distance_equals_scipy_with_more_and_with_fewer_images_than_dimensions(sizes):
    x, y = cloud(sizes[0], 40, 1), cloud(sizes[1], 40, 2, 0.0)
    assert frechet_distance(Gaussian(x), Gaussian(y)) == pytest.approx(by_scipy(x, y), rel=1e-6)


def test_a_large_mean_loses_no_digits():
    x, y = cloud(400, 20, 1), cloud(400, 20, 2)
    near = frechet_distance(Gaussian(x), Gaussian(y))
    far = frechet_distance(Gaussian((x + 1e3).astype(np.float32)), Gaussian((y + 1e3).astype(np.float32)))
    assert far == pytest.approx(near, rel=1e-3)


def test_standard_error_covers_and_is_not_idle():
    reference = Gaussian(cloud(4000, 12, 3))
    values, errors, paired, paired_errors = [], [], [], []
    for seed in range(150):
        x, y = (np.random.default_rng([seed, k]).normal(0.3, 1 + 0.1 * k, (600, 12)) for k in (0, 1))
        y = 0.8 * x + 0.2 * y
        first, second = frechet_influence(Gaussian(x), reference), frechet_influence(Gaussian(y), reference)
        values.append(frechet_distance(Gaussian(x), reference))
        paired.append(values[-1] - frechet_distance(Gaussian(y), reference))
        errors.append(first.std() / np.sqrt(600))
        paired_errors.append((first - second).std() / np.sqrt(600))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.25)
    assert np.mean(paired_errors) == pytest.approx(np.std(paired), rel=0.25)
    assert np.mean(paired_errors) < 0.8 * np.mean(errors)


def test_images_of_one_prompt_count_as_one_witness_and_no_error_is_claimed_if_it_is_undefined():
    x = np.repeat(cloud(200, 8, 1), 4, axis=0)
    reference = Gaussian(cloud(900, 8, 2))
    alone = fid_estimate(Gaussian(x), reference, [str(i) for i in range(800)])
    together = fid_estimate(Gaussian(x), reference, [str(i // 4) for i in range(800)])
    assert (together.high - together.low) == pytest.approx(2 * (alone.high - alone.low), rel=0.01)
    x, y = Gaussian(cloud(12, 16, 1)), Gaussian(cloud(900, 16, 2))
    assert fid_estimate(x, y, range(12)) == Estimate(frechet_distance(x, y), None, None)


def test_difference_of_two_runs_uses_the_images_both_have():
    reference = Gaussian(cloud(500, 8, 9))
    rows = pd.DataFrame({"prompt_id": [f"p{i}" for i in range(60)], "sample": 0, "feature": list(cloud(60, 8, 1))})
    other = rows.assign(feature=list(cloud(60, 8, 2, 0.0)))
    difference, n = fid_difference(rows.iloc[10:], other.iloc[:50], reference)
    mine, theirs = (np.stack(table["feature"].iloc[10:50].to_list()) for table in (rows, other))
    expected = frechet_distance(Gaussian(mine), reference) - frechet_distance(Gaussian(theirs), reference)
    assert n == 40 and difference.value == pytest.approx(expected) and difference.low < expected < difference.high


def test_kid_is_the_unbiased_estimate_the_same_every_time_and_in_blocks(monkeypatch):
    x, y = cloud(50, 5, 1), cloud(50, 5, 2)

    def k(a, b):
        return (a @ b / 5 + 1) ** 3

    within = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    theirs = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    expected = within + theirs - 2 * np.mean([k(a, b) for a in x for b in y])
    assert kid(x, y) == pytest.approx(expected)
    draws = [kid(cloud(40, 5, 2 * s, 0), cloud(40, 5, 2 * s, 0)) for s in range(3)]
    assert all(value < 0 for value in draws), "equal sets: the unbiased estimate lies below zero"
    x, y = cloud(60, 5, 1), cloud(90, 5, 2)
    torch.manual_seed(1)
    before = torch.rand(3)
    torch.manual_seed(1)
    assert kid(x, y) == kid(x, y) and torch.equal(torch.rand(3), before)
    assert kid(x, y) == pytest.approx(np.mean([kid(x, y[s : s + 60]) for s in range(0, 31, 5)]), rel=0.4)
    x, y = cloud(50, 5, 1), cloud(40, 5, 2)
    at_once = kid_influence(x, y)
    monkeypatch.setattr(distances, "_ROWS", 7)
    assert np.allclose(kid_influence(x, y), at_once)


def slow_neighbourhood(x: np.ndarray, y: np.ndarray, k: int) -> dict[str, float]:
    """Precision, recall, density and coverage, one pair of vectors at a time."""

    def far(points, at):
        return sorted(np.linalg.norm(points[at] - other) for place, other in enumerate(points) if place != at)[k - 1]

    real, made = ([far(points, at) for at in range(len(points))] for points in (y, x))
    near = [[np.linalg.norm(image - reference) for reference in y] for image in x]
    return {
        "precise": np.mean([any(gap < radius for gap, radius in zip(row, real, strict=True)) for row in near]),
        "density": np.mean([sum(gap < radius for gap, radius in zip(row, real, strict=True)) / k for row in near]),
        "recalled": np.mean([any(near[i][j] < made[i] for i in range(len(x))) for j in range(len(y))]),
        "covered": np.mean([any(near[i][j] < real[j] for i in range(len(x))) for j in range(len(y))]),
    }


@pytest.mark.parametrize("sizes", [(60, 45, 6), (45, 60, 40)])
def test_precision_recall_density_coverage_equal_slow_loops_and_another_k_is_noticed(sizes, monkeypatch):
    x, y = cloud(sizes[0], sizes[2], 1, 0.5), cloud(sizes[1], sizes[2], 2, 0.0)
    monkeypatch.setattr(distances, "_ROWS", 16)  # several blocks
    means = {name: values.mean() for name, values in neighbourhood(x, y)._asdict().items()}
    assert means == pytest.approx(slow_neighbourhood(x, y, 3)) and means != pytest.approx(slow_neighbourhood(x, y, 4))
    assert neighbourhood(x[:3], y) is None


@pytest.mark.parametrize("n", [21, 40, 103])
def test_inception_score_matches_its_definition_and_a_change_of_one_percent_shows(n):
    logits = torch.tensor(cloud(n, 12, 5) * 3)
    value, deviation = inception_score(logits)
    torch.manual_seed(0)
    share, scores = logits[torch.randperm(n)].softmax(1).double().numpy(), []
    for split in range(10):  # of Salimans et al.: some splits have one image more than others
        part = share[split * n // 10 : (split + 1) * n // 10]
        scores.append(np.exp(np.mean(np.sum(part * np.log(part / part.mean(0)), axis=1))))
    assert (value, deviation) == pytest.approx((np.mean(scores), np.std(scores)), rel=1e-5)
    assert inception_score(logits * 1.01)[0] != pytest.approx(value, rel=1e-4)


def test_kid_error_is_its_spread():
    reference, values, errors = cloud(150, 6, 0), [], []
    for seed in range(40):
        x = np.random.default_rng(seed).normal(0.5, 1, (150, 6))
        values.append(kid(x, reference))
        errors.append(kid_influence(x, reference).std() / np.sqrt(150))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.3)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_extrapolated_fid_finds_the_true_distance_that_the_plug_in_never_covers(shift):
    d, n = 20, 49
    spread = np.linspace(0.7, 1.3, d)
    truth, covered, plug_in, limits = d * shift**2 + np.square(spread - 1).sum(), 0, [], []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        x, y = Gaussian(draw.normal(size=(n, d))), Gaussian(shift + draw.normal(size=(n, d)) * spread)
        plain = fid_estimate(x, y, range(n))
        limit = fid_infinity(x, y, range(n), plain.value)
        covered += limit.low < truth < limit.high
        plug_in.append(plain)
        limits.append(limit.value)
    assert covered >= 35
    assert abs(np.mean(limits) - truth) < 0.15 * (np.mean([estimate.value for estimate in plug_in]) - truth)
    assert sum(estimate.low < truth < estimate.high for estimate in plug_in) <= 2


def test_extrapolation_halves_whole_prompts_and_claims_no_interval_without_images_enough():
    x, y = Gaussian(cloud(60, 16, 1)), Gaussian(cloud(90, 16, 2))
    prompts = [str(number // 20) for number in range(60)]
    assert fid_infinity(x, y, prompts, 1.0) is None, "three prompts are too few"
    assert fid_infinity(x, y, range(60), 1.0).low is not None
    assert fid_infinity(Gaussian(x.features[:30]), y, range(30), 1.0).low is None


def test_clean_is_pillows_bicubic_clipped_and_not_rounded():
    pixels = calibrated.images(1, 40, 60)[0]
    red = Image.fromarray(pixels[..., 0].astype(np.float32)).resize((299, 299), Image.Resampling.BICUBIC)
    resized, x_CHW = np.asarray(red), FRONT_ENDS["clean"](pixels)
    assert resized.min() < -5 and resized.max() > 260, "the picture has edges that bicubic overshoots"
    assert np.allclose(x_CHW[0].numpy() * 128 + 128, resized.clip(0, 255), atol=1e-4) and (x_CHW * 128 % 1 != 0).any()


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (31, 30), (30, 33), (33, 30), (20, 25), (640, 427)])
def test_center256_takes_torchvisions_middle_square(shape):
    pixels = calibrated.images(1, *shape)[0]
    side = min(shape)
    top, left = (int(round((length - side) / 2.0)) for length in shape)  # noqa: RUF046 - as torchvision writes it
    square = Image.fromarray(pixels[top : top + side, left : left + side])
    expected = np.asarray(square.resize((256, 256), Image.Resampling.LANCZOS))
    assert np.array_equal(CROPS["center256"](pixels), expected)


GOLDEN = {
    ("pytorch-fid", 1): -15.257, ("tf1", 1): 4.309, ("tm-aa", 1): -15.253, ("clean", 2): -7.852, ("whole", 1): 122.559,
    ("center256", 2): 5.489, ("bilinear299", 1): -0.651, ("short_side_centre", 1): -6.274, ("hps_input", 1): 16.186,
    ("squashed", 1): 4.759, ("mask2former", 1): 5.334,
}  # fmt: skip
"""Results of each version of the preprocessing code on a picture. If this test fails, raise the function's version in
`CODE_VERSIONS`, so that stored features of the earlier version are not used again, and write down the new numbers."""


def test_preprocessing_of_another_result_has_another_version():
    pixels = calibrated.images(1, 90, 121, seed=4)[0]
    functions = {**FRONT_ENDS, "whole": CROPS["none"], "center256": CROPS["center256"], "bilinear299": bilinear299}
    functions |= {"short_side_centre": short_side_centre, "hps_input": hps_input}
    functions |= {"squashed": squashed, "mask2former": geneval.mask2former_input}
    sized = dict.fromkeys(("short_side_centre", "squashed"), (64,))
    scores = {}
    for name, function in functions.items():
        made = function(pixels, *sized.get(name, ()))
        made = np.asarray(made[0] if isinstance(made, tuple) else made, dtype=np.float64)
        weights = np.cos(np.arange(made.size)).reshape(made.shape)
        scores[name, CODE_VERSIONS.get(function.__name__, 1)] = float((made * weights).sum() / made.std())
    assert scores == pytest.approx(GOLDEN, abs=0.02)


@pytest.mark.parametrize(("name", "function"), [
    ("geneval[hf-m2f]", geneval.mask2former_input), ("compbench[blip-vqa]", squashed),
    ("shapes-clip", short_side_centre), ("fid[clean]", FRONT_ENDS["clean"]), ("fid[tf1+center256]", CROPS["center256"]),
])  # fmt: skip
def test_every_network_of_several_says_which_version_prepared_its_images(name, function, monkeypatch):
    monkeypatch.setattr(published_weights, "hub_folder", lambda *_: None)
    monkeypatch.setattr(published_weights, "folder_identity", lambda *_: "weights")
    monkeypatch.setattr(published_weights, "file_digest", lambda _: "digest")
    monkeypatch.setattr(compbench, "version", lambda _: "1")
    now = made_features(metric(name)(Settings())).fingerprint
    monkeypatch.setitem(CODE_VERSIONS, function.__name__, 9)
    assert made_features(metric(name)(Settings())).fingerprint != now


def test_features_equal_torch_fidelity_and_torchmetrics(weights):
    try:
        with torchvision_if_it_loads():
            import torch_fidelity  # noqa: F401
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        from torchmetrics.image.fid import NoTrainInceptionV3
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    network = load_inception(weights)
    pixels = torch.from_numpy(np.stack(calibrated.images(2, 64, 96))).permute(0, 3, 1, 2)
    theirs = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
    metrics = NoTrainInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
    with torch.no_grad():
        for name, oracle in (("tf1", theirs), ("tm-aa", metrics)):
            images = [image.permute(1, 2, 0).numpy() for image in pixels]
            mine = network(torch.stack([FRONT_ENDS[name](image) for image in images]))
            expected = oracle(pixels)
            expected = expected[0] if isinstance(expected, tuple) else expected
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-5), name
            assert (mine - expected.flip(0)).abs().max() > 0.01, "another picture has other features"


def save(pictures: list[np.ndarray], folder):
    folder.mkdir(parents=True)
    for number, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_metric_from_images_to_scores_with_a_reference_folder(published, tmp_path, monkeypatch):
    folder = save(calibrated.images(3, 30, 50, seed=5), tmp_path / "real")
    metric = Fid("tm-aa+center256", Settings(reference=folder, batch=2))
    shown = enumerate(calibrated.images(3, 40, 40))
    rows = metric.features([Sample(f"p{i}", 0, "", None, {}, pixels) for i, pixels in shown])
    frame = pd.DataFrame([{"prompt_id": f"p{i}", "sample": 0} | row for i, row in enumerate(rows)])
    fid, kid = metric.scores(metric.statistics(frame))
    assert (fid.name, kid.name, fid.n) == ("fid[tm-aa+center256]", "kid[tm-aa+center256]", 3)
    assert "too large" in fid.note and "no interval" in fid.note
    mine, real = np.stack(frame["feature"].to_list()), metric.reference_features
    assert fid.estimate.value == pytest.approx(frechet_distance(Gaussian(mine), Gaussian(real)))
    monkeypatch.setattr("specbench.metrics.fid.Fid.embed", lambda *_: pytest.fail("extracted twice"))
    assert np.array_equal(Fid("tm-aa+center256", Settings(reference=folder)).reference_features, real)


def test_fewer_images_than_the_reference_say_how_much_too_large_fid_is(published, tmp_path):
    draw = np.random.default_rng(0)
    metric = Fid("clean", Settings(reference=save(calibrated.images(2), tmp_path / "real")))
    metric.reference_features = draw.normal(size=(60, 8)).astype(np.float32)
    metric.network = SimpleNamespace(unbiased_logits=lambda features: features)
    frame = pd.DataFrame({"prompt_id": [f"p{i}" for i in range(40)], "feature": list(draw.normal(size=(40, 8)))})
    scores = {score.name: score for score in metric.scores(frame)}
    fid, limit = scores["fid[clean]"].estimate.value, scores["fid-infinity[clean]"].estimate
    assert f"too large by about {fid - limit.value:.3g}" in scores["fid[clean]"].note
    assert "40 images are fewer than the 60" in scores["fid[clean]"].note
    assert "unbiased" in scores["kid[clean]"].note and limit.low < limit.value < limit.high and limit.value < fid
    metric.reference_features = metric.reference_features[:40]
    del metric._reference
    noted = {score.name for score in metric.scores(frame) if score.note}
    assert noted == {f"{name}[clean]" for name in ("precision", "recall", "density", "coverage", "inception-score")}


def test_a_fingerprint_of_features_is_of_the_variant_and_one_of_a_score_also_of_the_reference(published, tmp_path):
    one, two = (save(calibrated.images(2, seed=seed), tmp_path / str(seed)) for seed in (2, 3))
    first, second = (Fid("clean", Settings(reference=folder)) for folder in (one, two))
    assert made_score(first).fingerprint != made_score(second).fingerprint
    assert made_features(first).fingerprint == made_features(second).fingerprint
    assert first.identity()["reference_n"] == "2"
    variants = [front + crop for front in FRONT_ENDS for crop in ("", "+center256")]
    assert len({made_features(Fid(variant, Settings(reference=one))).fingerprint for variant in variants}) == 8


def test_coco_is_the_reference_of_coco_prompts_only(published):
    metric = Fid("clean")
    assert metric.accepts(None, {"image": "000000000139.jpg"}) and not metric.accepts("counting", {"include": []})
    assert "specbench fetch coco --images" in metric.missing()[0][1]


def test_weights_with_another_digest_are_never_opened(published, monkeypatch):
    published.path.unlink()
    published.path.write_bytes(b"not the weights")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("opened"))
    error = refused("", Fid("clean", Settings(offline=True)).embed, [torch.zeros(3, 299, 299)])
    assert error.exit_code == MISSING_PREREQUISITE and "specbench fetch" in error.try_this
    assert "is not the published file" in Fid("clean").missing()[0][0]
