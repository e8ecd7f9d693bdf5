"""A device without enough memory, and one that computes nothing more: one line each, and nothing that is done is
lost. It concerns several modules: device_failures, and what decodes, loads models and scores."""

import dataclasses
import gc
import weakref
from unittest.mock import Mock

import pytest
import tiny
import torch
from refusals import refused
from stored_rows import contents

import specbench
from specbench.decoding.loop import decode
from specbench.errors import FAILURE
from specbench.metrics import scoring
from specbench.metrics.scoring import score
from specbench.models.catalog import find_model
from specbench.prompts import Request, requests_for
from specbench.reporting.answer import disturbances
from specbench.reporting.report_rows import report_rows
from specbench.runs import preparation
from specbench.runs.executors import local
from specbench.runs.executors.local import LocalExecutor
from specbench.runs.run_progress import Reporter
from specbench.runs.runner import run
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Compute
from specbench.store.run_store import RunStore
from specbench.system import device_failures

NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB"
REQUESTS = requests_for(tiny.prompts(), 4)


class Notes(Reporter):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


@pytest.mark.parametrize("name", PRESETS)
def test_nan_logits_are_one_line_with_top_p(name):
    model = tiny.tiny_model()
    model.conditional[:] = float("nan")
    sampling = dataclasses.replace(tiny.SAMPLING, top_p=0.9)
    images = decode(model, [Request(text, text) for text in tiny.TEXTS[:2]], resolve(name), sampling, 0)
    assert all("the model gave NaN logits at token" in image.what for image in images)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_device_that_computes_nothing_more_ends_the_run_and_a_rerun_makes_the_rest(tmp_path, monkeypatch, batch):
    honest, calls = local.StepWatch.__call__, []

    def assert_on_device(watch, committed):
        calls.append(committed)
        if len(calls) > 8:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")
        honest(watch, committed)

    def zeros(*_, **__):
        if len(calls) > 8:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return torch.ones(1)

    monkeypatch.setattr(local.StepWatch, "__call__", assert_on_device)
    monkeypatch.setattr(device_failures, "_probe", zeros)
    specs = [tiny.spec("sjd", batch=batch)]
    text = r"^cpu stopped working after: CUDA error: device-side assert trigg"
    lost = refused(text, run, tiny.executor(), specs, REQUESTS, tmp_path / "out")
    assert lost.exit_code == FAILURE and "again to resume" in lost.try_this and len(calls) == 9
    monkeypatch.undo()
    [folder] = (tmp_path / "out").iterdir()
    statuses = RunStore(folder).samples(["status"])["status"].to_list()
    assert 0 < len(statuses) < len(REQUESTS) and set(statuses) == {"ok"}
    run(tiny.executor(), specs, REQUESTS, tmp_path / "out")
    run(tiny.executor(), specs, REQUESTS, tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


class Large:
    """Takes the place of the tensors of a batch."""


@pytest.mark.parametrize("decoder", ["sjd", "zipar"])
def test_a_batch_that_does_not_fit_frees_its_memory_and_after_a_second_one_there_are_none(
    tmp_path, monkeypatch, decoder
):
    model, sizes, refs = tiny.tiny_model(), [], []
    honest = model.encode

    def encode(texts):
        gc.disable()
        sizes.append(len(texts))
        assert not [ref for ref in refs if ref() is not None], "memory of a batch that did not fit is still held"
        if len(texts) > 1:
            large = Large()
            refs.append(weakref.ref(large))
            raise torch.OutOfMemoryError(NO_MEMORY)
        return honest(texts)

    monkeypatch.setattr(model, "encode", encode)
    monkeypatch.setattr(device_failures, "gpu_users", lambda device: "process 4711 has 12.0 GiB")
    notes = Notes()
    spec = dataclasses.replace(tiny.spec("ar", batch=4), decoder=resolve(decoder))
    try:
        summary = run(LocalExecutor(model), [spec], REQUESTS, tmp_path, notes)
    finally:
        gc.enable()
    assert (summary.done, summary.failed) == (16, 0)
    assert sizes == [4, 4, *[1] * 4, 4, *[1] * 12]  # the warm-up, and two batches
    [folder] = tmp_path.iterdir()
    assert set(RunStore(folder).samples(["batch"])["batch"]) == {1}
    assert "16 of 16 images were decoded in smaller batches." in disturbances(report_rows([folder]))[0]
    first, second = (text for text in notes.texts if "does not fit" in text)
    parts = (
        "a batch of 4",
        "memory of cpu",
        "allocate 2.00 GiB; process 4711 has 12.0 GiB",
        "images are decoded one by",
    )
    assert all(part in first for part in parts) and "all further images are decoded one by one" in second


def test_a_model_that_does_not_fit_is_one_line(monkeypatch):
    monkeypatch.setattr(preparation, "load_model", Mock(side_effect=torch.OutOfMemoryError(NO_MEMORY)))
    text = r"^model 'shapes' \(float32\) does not fit into the memory of cpu: CUDA ou"
    error = refused(text, preparation.load_for_run, find_model("shapes"), Compute(1, "float32", "cpu", 1))
    assert "--dtype" in error.try_this and error.exit_code == FAILURE


def test_metrics_that_do_not_fit_are_one_line(tmp_path, monkeypatch):
    specbench.run(model="shapes", decoder="ar", limit=1, out=str(tmp_path))

    no_memory = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(scoring, "_add_features", Mock(side_effect=no_memory))
    outcomes = score(list(tmp_path.iterdir()), ["shapes-clip"])
    error = refused(r"^scoring by shapes-clip does not fit into the memory of cpu: ", outcomes.check)
    assert "fewer metrics" in error.try_this
