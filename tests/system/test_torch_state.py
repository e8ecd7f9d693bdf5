"""State of torch that a program or a plug-in set for itself: a run's numbers do not depend on it, and it is left as it
was. It concerns loading, decoding and audits alike."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from types import SimpleNamespace

import numpy as np
import pytest
import synthetic
import torch
from drawn import drawn_run

from specbench import api
from specbench.metrics.inception_network import Inception
from specbench.prompts import load_prompts
from specbench.reporting.image_tiles import sample_frame
from specbench.system.torch_state import _STATES, PinnedTorch, _read

KINDS = ("cpu", "cuda")
LEGACY = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "default device": (torch.set_default_device, "meta", None),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "convolutions": (lambda on: setattr(torch.backends.cudnn, "allow_tf32", on), False, True),
    "determinism": (torch.use_deterministic_algorithms, True, False),
    **{f"autocast {kind}": (lambda on, kind=kind: torch.set_autocast_enabled(kind, on), True, False) for kind in KINDS},
}
METRICS = ["shapes-clip", "shapes-frechet"]
NEW = {"precision of all": (lambda name: setattr(torch.backends, "fp32_precision", name), "tf32", "none")}


@pytest.fixture(params=[LEGACY, NEW], ids=["legacy", "new"])
def foreign(request):
    """Every state is other than torch's own, and read afterwards as before."""
    if request.param is NEW and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("since torch 2.9")
    threads, clean = torch.get_num_threads(), [_read(state) for state in _STATES]
    with ExitStack() as undo:
        for write, other, usual in request.param.values():
            undo.callback(write, usual)
            write(other)
        seen = torch.get_default_device(), [_read(state) for state in _STATES]
        assert seen[1] != clean
        yield
        assert (torch.get_default_device(), [_read(state) for state in _STATES]) == seen
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module")
def clean():
    return api.generate("a red circle", decoder="vertical-coupled", window=32, threads=1)


def test_an_image_is_the_same_whatever_state_torch_is_in_and_the_state_is_left(clean, foreign):
    threads = max(1, torch.get_num_threads() - 1)
    image = api.generate("a red circle", decoder="vertical-coupled", window=32, threads=threads)
    assert np.array_equal(image.tokens, clean.tokens) and np.allclose(image.logp, clean.logp, atol=1e-3)


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_no_context_reaches_into_a_pinned_one_and_a_generator_gives_the_state_back(in_float64):
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.no_grad():
        with PinnedTorch(False):
            product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
            assert (product.dtype, product.device.type, product.requires_grad) == (torch.float32, "cpu", True)
        assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled() and torch.ones(1).device.type == "meta"

    @PinnedTorch()
    def dtypes():
        for _ in range(2):
            yield torch.get_default_dtype()

    assert [(inside, torch.get_default_dtype()) for inside in dtypes()] == [(torch.float32, torch.float64)] * 2


def test_threads_that_decode_at_once_leave_the_state_to_the_last_of_them(in_float64):
    inside, left = Barrier(2), Event()

    def decode(first):
        with PinnedTorch():
            inside.wait(10)
            first or left.wait(10)
            return torch.get_default_dtype()

    with ThreadPoolExecutor(2) as pool:
        first, last = pool.submit(decode, True), pool.submit(decode, False)
        seen = [first.result(), left.set() or last.result()]
    assert (seen, torch.get_default_dtype()) == ([torch.float32] * 2, torch.float64)


def test_features_of_images_and_references_do_not_depend_on_the_state(tmp_path, foreign, monkeypatch):
    """A score under autocast would be another network's."""
    monkeypatch.setattr("specbench.metrics.shapes.RENDERS", 4)
    rng = np.random.default_rng(0)
    prompts = load_prompts("shapes").prompts[:2]
    pictures = [rng.integers(0, 255, (3, 64, 64), dtype=np.uint8) for _ in prompts]
    run = synthetic.pictured(tmp_path / "there", prompts, picture=pictures.__getitem__)
    scored = api.score([run], metrics=METRICS)
    with PinnedTorch(False):
        clean = synthetic.pictured(tmp_path / "clean", prompts, picture=pictures.__getitem__)
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
        assert scored["shapes-frechet"].equals(api.score([clean], metrics=METRICS)["shapes-frechet"])
    seen, expected = (sample_frame([folder])["shapes-clip"].to_numpy() for folder in (run, clean))
    assert np.array_equal(seen, expected)


def test_scores_and_differences_of_stored_features_do_not_depend_on_the_state(tmp_path, foreign, monkeypatch):
    monkeypatch.setattr("specbench.metrics.shapes.RENDERS", 4)
    runs = [drawn_run(tmp_path, 3, wrong, spec).name for spec, wrong in ((synthetic.AR, ()), (synthetic.SJD, (1,)))]

    def numbers():
        for stored in tmp_path.glob("*/scores/*.parquet"):
            stored.unlink()
        scored = api.score(metrics="shapes-frechet", out=tmp_path)["shapes-frechet"]
        gap = api.differences(runs[0], runs[1:], metrics="shapes-frechet", out=tmp_path)["difference"]
        features = torch.linspace(-1, 1, 6, dtype=torch.float32, device="cpu").reshape(2, 3)
        logits = Inception.unbiased_logits(SimpleNamespace(fc=SimpleNamespace(weight=features)), features)
        return [*scored, *gap, *logits.flatten().tolist()]

    numbers()  # stores the features
    with PinnedTorch(False):
        expected = numbers()
    assert numbers() == expected
