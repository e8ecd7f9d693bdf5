"""Device names: invalid ones and devices that are not here are refused in one short line, by every command."""

import itertools
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from refusals import refused

from specbench import api
from specbench.checks import doctor
from specbench.decoding.timing import Spans
from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics.base import Settings
from specbench.models.catalog import find_model, load_model
from specbench.runs import compiler
from specbench.system import device_peaks, environment
from specbench.system.torch_device import check_device_name, require_device, use_device


@pytest.mark.parametrize("name", ["nope", "CPU", "cpu:0", "mps:1", "cuda:", "cuda:-1", "", "x" * 5000])
@pytest.mark.parametrize(
    "check", [check_device_name, lambda name: Settings(name).check(), lambda name: load_model("shapes", name)]
)
def test_a_name_that_is_no_device_is_refused_in_a_short_line(name, check):
    error = refused("not a device", check, name)
    assert error.exit_code == BAD_INPUT and len(str(error)) < 150


def test_a_device_that_is_not_here_is_a_missing_prerequisite_and_two_are_refused_with_what_helps(monkeypatch):
    error = refused("a model decodes on a single device", check_device_name, "cuda:0,cuda:1")
    assert error.exit_code == BAD_INPUT and "--dtype int8wo" in error.try_this
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda")
    require_device("cuda:1")
    error = refused(r"cuda:2: torch .* does not find this device", require_device, "cuda:2")
    assert error.exit_code == MISSING_PREREQUISITE


@pytest.mark.parametrize(("build", "message", "reason"), [
    (None, "", "this build of torch is for CPUs only"),
    ("13.0", "The NVIDIA driver is too old (found version 11040). Please", r"too old \(found version 11040\)"),
    ("13.0", "No CUDA GPUs are available", r"No CUDA GPUs are available \(CUDA_VISIBLE_DEVICES=7\)"),
])  # fmt: skip
def test_a_machine_without_a_gpu_that_torch_can_use_says_why(build, message, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(message)))
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    refused(rf"does not find this device: .*{reason}", require_device, "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_run_on_a_gpu_that_is_not_here_is_one_line_before_anything_else(cli, tmp_path):
    answer = cli("run", "--device", "cuda", "--decoder", "ar", "--limit", "1", "--out", tmp_path)
    answer.refused("does not find this device: ", code=MISSING_PREREQUISITE, alone=True)
    assert not answer.out


@pytest.fixture
def cards(monkeypatch):
    """Two fake CUDA cards: the calls of torch.cuda that name one, in order."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None, name=name: calls.append((name, device)))
    return calls


def test_a_card_with_a_number_becomes_the_current_one_before_anything_is_loaded(cards, monkeypatch):
    def load(info, device, dtype):
        assert cards == [("set_device", "cuda:1")]
        raise SpecbenchError("loaded")

    monkeypatch.setattr("specbench.models.catalog.ModelInfo.load", load)
    refused("loaded", load_model, "shapes", "cuda:1")
    cards.clear()
    Settings("cuda").check()
    assert cards == [("set_device", "cuda:0")], "the first one, also after another, as run.json says"


def test_spans_wait_for_their_own_card_and_use_their_events_again(cards, monkeypatch):
    """A card that is two spans behind the host."""
    made = []
    clock = itertools.count()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            made.append(self)

        def record(self):
            self.at = next(clock)

        def query(self):
            return bool(cards) or max(event.at for event in made) - self.at >= 4

        def elapsed_time(self, other):
            return 5.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    spans = Spans(torch.device("cuda:1"))
    for _ in range(50):
        with spans("target"):
            pass
    assert not cards and len(made) <= 8
    assert spans.totals_ms() == {"target": 250.0} and cards == [("synchronize", torch.device("cuda:1"))]


def test_a_measurement_of_a_card_waits_for_it(cards, monkeypatch):
    """Its tensors are on the CPU here, whatever device they are asked for."""
    honest = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: honest(*size, **options))
    monkeypatch.setattr(device_peaks, "_SECONDS", 0)
    monkeypatch.setattr(device_peaks, "COPIES_MIB", (1,))
    monkeypatch.setattr(torch, "mm", lambda *_, **__: None)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: tensor.clone() if tensor.ndim == 1 else tensor)
    monkeypatch.setattr(device_peaks, "MachineMonitor", lambda device: type("", (), {"read": lambda self: {}})())
    monkeypatch.setattr(device_peaks, "measure_products", lambda *_: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {device}")
    peak = device_peaks.measure_peak("cuda:1", "float32", 0)
    assert set(cards) == {("synchronize", "cuda:1")} and peak.name == "card of cuda:1"


def test_float32_is_not_tf32_on_a_card(cards, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    assert environment.hardware()["tf32"] is True
    use_device("cuda:0")
    assert environment.hardware()["tf32"] is False
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_no_decoder_runs_on_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    Settings("mps").check()
    for call in (lambda: load_model("shapes", "mps"), lambda: api.run(device="mps", limit=1)):
        error = refused("--device mps: decoding needs float64", call)
        assert error.exit_code == BAD_INPUT and "--device cpu" in error.try_this


@pytest.fixture
def old_card(cards, monkeypatch):
    """A card like a T4, without native bfloat16; triton and a compiler are installed."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(compiler, "missing", lambda device: None)


def test_a_card_without_bfloat16_decodes_in_float32_eagerly_and_others_keep_their_format(old_card, monkeypatch):
    dtype, compiled, [note] = compiler.settle_precision(None, "bfloat16", "auto", "cuda:1")
    assert (dtype, compiled) == ("float32", False)
    assert note.startswith("cuda:1 has no native bfloat16: decoding in float32, eagerly; --dtype float16 needs")
    for asked, mode, made in (("float16", "auto", False), ("float16", "on", True), ("bfloat16", "on", False)):
        assert compiler.settle_precision(asked, "bfloat16", mode, "cuda")[:2] == (asked, made)
    assert compiler.settle_precision(None, "bfloat16", "auto", "cpu") == ("bfloat16", False, ())
    assert compiler.settle_precision(None, "bfloat16", "auto", "cuda:9") == ("bfloat16", True, ())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert compiler.settle_precision(None, "bfloat16", "auto", "cuda") == ("bfloat16", True, ())


def test_a_dry_run_and_doctor_count_on_the_number_format_of_the_card(old_card, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 * 2**30, 16 * 2**30))
    asked = {"model": "janus", "device": "cuda", "decoder": "ar", "limit": 1, "out": tmp_path}
    rows = [api.dry_run(**asked, dtype=dtype)[0] for dtype in (None, "float16")]
    assert [row["dtype"] for row in rows] == ["float32", "float16"]
    assert rows[0]["memory_gib"] == pytest.approx(2 * rows[1]["memory_gib"], rel=0.1)
    [memory] = doctor._memory(find_model("janus"))
    assert memory["detail"].startswith(f"about {rows[0]['memory_gib']:.1f} GiB in float32")
