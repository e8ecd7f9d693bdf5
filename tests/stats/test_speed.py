"""Roofline of a run: bytes and operations against an explicit count, milliseconds against hand-computed values."""

import json

import pytest
import synthetic
import torch
from refusals import refused
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaModel

from specbench import stats
from specbench.checks import doctor
from specbench.models.catalog import find_model, load_model
from specbench.models.network_sizes import NetworkSize, Size
from specbench.reporting import report_rows
from specbench.system import device_peaks

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = [{"num_key_value_heads": 4}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1, "head_dim": 8}]
OUTPUTS = 11


def size_of(kind: dict) -> Size:
    return NetworkSize(0, 16, 24, 2, 4, kind["num_key_value_heads"], kind.get("head_dim", 0)).size(OUTPUTS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_llama_by_counting_its_tensors_and_its_operations(kind):
    network = LlamaModel(LlamaConfig(vocab_size=7, attn_implementation="eager", **SHAPE, **kind))
    head = torch.nn.Linear(16, OUTPUTS, bias=False)
    size = size_of(kind)
    tensors = {name: weight.numel() for name, weight in network.named_parameters() if "embed" not in name}
    assert size.weights == sum(tensors.values()) + head.weight.numel()
    rows, tokens = 3, 5
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        output = network(inputs_embeds=torch.randn(rows, tokens, 16))
        head(output.last_hidden_state)
    assert size.kv == sum(layer.keys[0, :, 0].numel() * 2 for layer in output.past_key_values.layers)
    norms = sum(count for name, count in tensors.items() if "norm" in name)
    products = size.operations(tokens, rows, tokens * tokens) - 2 * norms * tokens * rows
    # The rotation of queries and keys is also a product: two numbers times an angle, once per forward.
    rotary = 2 * tokens * network.rotary_emb.inv_freq.numel()
    assert counter.get_total_flops() - products in (0, rotary, rows * rotary)


def test_the_embedded_model_is_counted_from_its_configuration():
    model, size = load_model("shapes"), find_model("shapes").size
    weights = [weight for name, weight in model.backbone.named_parameters() if "embed" not in name]
    assert size.weights == sum(weight.numel() for weight in weights) + model._network.head.weight.numel()
    assert (size.kv, size.attention) == (2 * 6 * 128, 6 * 128)


FLOOR = {
    "size": {"weights": 1000, "kv": 10, "attention": 5}, "itemsize": 4, "rows_per_image": 2, "device": "a device",
    "bytes_per_s": 1e6, "flops": 1e9, "source": "its data sheet",
}  # fmt: skip


def test_roofline_milliseconds_equal_hand_computed_values():
    """Four slots committed by steps 1, 2, 3, 4: forwards see 1, 2, 3, 4 slots, so 10 in all, in each of two rows."""
    rows = synthetic.frame(synthetic.ar(1))
    bytes_read = 4 * (4 * 1000 + 2 * 10 * 10)
    assert list(stats.floor_ms(rows, FLOOR)) == pytest.approx([bytes_read / 1e6 * 1e3])
    assert stats.roofline_ratio(rows, FLOOR) == pytest.approx(44 / 16.8)
    operations = 2 * (2 * 4 * 1000 + 4 * 10 * 5)
    assert list(stats.floor_ms(rows, FLOOR | {"flops": 1e5})) == pytest.approx([operations / 1e5 * 1e3])


def test_a_batch_reads_the_weights_once():
    alone = stats.floor_ms(synthetic.frame([synthetic.generation(4, 40.0)]), FLOOR)[0]
    rows = synthetic.frame([synthetic.generation(4, 40.0, batch=2)], timed=False)
    assert alone - stats.floor_ms(rows, FLOOR)[0] == pytest.approx(4 * 4 * 1000 / 2 / 1e6 * 1e3)


def on_machine(out, **changed):
    """A run of AR on the machine of `FLOOR`."""
    folder = synthetic.folder(out, synthetic.AR, synthetic.ar())
    assert report_rows([folder])[0].roofline.over_floor is None
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"floor": FLOOR | changed}))
    return folder


def test_every_report_has_it_or_says_it_is_missing(tmp_path, cli):
    folder = on_machine(tmp_path)
    assert report_rows([folder])[0].roofline.over_floor == pytest.approx(44 / 16.8)
    shown = cli("report", "--all", "--explain", "--out", tmp_path).out
    assert "| 2.62x |" in shown and "- roofline ratio: " in shown and "its data sheet" in shown


def test_known_devices_need_no_measurement(monkeypatch):
    monkeypatch.setattr(device_peaks, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    half, single = (device_peaks.find_peak("cuda", dtype, 1) for dtype in ("bfloat16", "float32"))
    assert half.bandwidth(10**9) == 3.35e12 and half.flops == 989e12 and single.flops == 67e12


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Short measurements, stored in `tmp_path`, of a machine with other users `quick(cores)`."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(device_peaks, "COPIES_MIB", (1, 4))
    monkeypatch.setattr(device_peaks, "_SECONDS", 0.02)
    monkeypatch.setattr(device_peaks, "_CALLS", 1)
    monkeypatch.setattr(device_peaks, "measure_products", lambda device, dtype: {})

    def busy(cores: float, others: int | None = None):
        reading = {"other_cores": cores, "gpu_others": others}
        monkeypatch.setattr(device_peaks.MachineMonitor, "read", lambda self: reading)

    busy(0.1)
    return busy


def test_a_figure_of_a_busy_machine_is_not_kept(quick, tmp_path):
    kept = device_peaks.measure_peak("cpu", "float32", 1)
    for company in ((0.0, 2), (1.3, None)):
        quick(*company)
        refused(
            r"the measurement was discarded, because .*other processes", device_peaks.measure_peak, "cpu", "float32", 1
        )
    assert device_peaks.find_peak("cpu", "float32", 1) == kept
    rows = {row["name"]: row for row in doctor.doctor(out=tmp_path, measure=True)}
    row = rows["peak of cpu, float32, 1 thread"]
    assert row["status"] == "warning" and "was discarded" in row["detail"]
    assert "idle machine" in row["fix"] and device_peaks.find_peak("cpu", "bfloat16", 1) is None


def test_no_ratio_below_1_is_printed(tmp_path, cli):
    folder = on_machine(tmp_path, bytes_per_s=3e5)
    roofline = report_rows([folder])[0].roofline
    assert roofline.over_floor is None and "busy" in roofline.roofline_note and "cache" in roofline.roofline_note
    shown, card = cli("report", "--all", "--out", tmp_path).out, cli("show", folder.name, "--out", tmp_path).out
    assert "| peak too low |" in shown and "Roofline: no ratio, because decoding was faster" in shown
    assert "faster than the device's peak allows" in " ".join(card.split()) and "0.79" not in shown + card


def test_what_is_measured_is_kept_by_number_format_and_threads(tmp_path, quick):
    assert device_peaks.find_peak("cpu", "float32", 1) is None
    measured = device_peaks.measure_peak("cpu", "float32", 1)
    assert device_peaks.find_peak("cpu", "float32", 1) == measured and measured.flops > 1e6
    assert device_peaks.find_peak("cpu", "float32", 2) is None and device_peaks.find_peak("cpu", "bfloat16", 1) is None
    assert measured.bandwidth(3 * 2**20) == measured.bytes_per_s[2**20]
    assert measured.bandwidth(10**12) == measured.bytes_per_s[4 * 2**20]
    rows = {row["name"]: row["detail"] for row in doctor.doctor("shapes", tmp_path)}
    assert "TFLOP/s: measured" in rows["peak of cpu, float32, 1 thread"] and "per image" in rows["memory"]


def test_a_gpu_is_measured_without_a_number_of_threads(quick, monkeypatch):
    monkeypatch.setattr(device_peaks, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(device_peaks, "_measure", lambda device, dtype: ({1: 2e12}, 9e14))
    before = torch.get_num_threads()
    device_peaks.measure_peak("cuda:0", "bfloat16", 0)
    assert device_peaks.find_peak("cuda:0", "bfloat16", 0).flops == 9e14 and torch.get_num_threads() == before


def test_a_run_notes_the_floor_of_its_machine(tmp_path, cli, monkeypatch):
    monkeypatch.setattr(device_peaks, "find_peak", None)
    monkeypatch.setattr(
        "specbench.runs.preparation.find_peak",
        lambda *asked: device_peaks.Peak("a device", {0: 1e12}, 1e15, "a data sheet"),
    )
    asked = ("run", "--decoder", "ar", "--limit", "1", "--threads", "1", "--out", tmp_path, "-q")
    assert cli(*asked).code == 0
    (row,) = report_rows(list(tmp_path.iterdir()))
    assert Size(**row.roofline.floor["size"]) == find_model("shapes").size and row.roofline.over_floor > 0
