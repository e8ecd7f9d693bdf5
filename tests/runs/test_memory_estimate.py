"""The memory of a batch is predicted before it runs, compared with the tensors, and refused if it does not fit."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from refusals import refused
from tiny_llama import Tiny
from transformers import LlamaConfig, LlamaModel
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from specbench.decoding.loop import Decoding, Loop, begin, decode
from specbench.decoding.timing import Spans
from specbench.models.catalog import ModelInfo, find_model, load_model
from specbench.models.checkpoint_loading import randomise
from specbench.models.families import emu3, vq_decoder
from specbench.models.interface import TokenLayout
from specbench.models.network_sizes import whole_blocks
from specbench.models.transformer.kv_cache import PositionLayer
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.prompts import Request
from specbench.runs import memory_estimate
from specbench.specs.components import CHOICES
from specbench.specs.options import MEMORY, Component
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "dev" / "speed" / "memory.py"))
CAPTION = "a red circle left of a blue square"


def stop_after(steps: int, monkeypatch) -> None:
    """Break the decode off: a few steps take the memory of all."""
    left = iter(range(steps))
    step = Loop.step

    def counted(self, *args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Loop, "step", counted)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "guidance"), [("ar", 1.0), ("sjd", 3.0), ("scd-mc", 3.0), ("eagle", 3.0), ("vvs", 3.0)]
)
def test_the_cache_is_predicted_within_a_tenth(name, guidance, device, monkeypatch):
    if device == "cuda":  # allocate as on a GPU
        monkeypatch.setattr(TransformerSession, "_room", lambda session, slots: whole_blocks(slots))
    sizes = []
    allocate = PositionLayer.lazy_initialization

    def counting(self, keys, values):
        allocate(self, keys, values)
        sizes.append(self.keys.nbytes + self.values.nbytes)

    monkeypatch.setattr(PositionLayer, "lazy_initialization", counting)
    monkeypatch.setattr(memory_estimate, "ASSUMED_PROMPT_TOKENS", 16)
    model, decoder, sampling = load_model("shapes"), resolve(name), Sampling(guidance, top_k=256)
    requests = [Request(CAPTION, "p", sample) for sample in range(2)]
    stop_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        decode(model, requests, decoder, sampling, 0)
    need = memory_estimate.footprint(find_model("shapes"), decoder, sampling, "float32", device)
    assert 2 * need.cache == pytest.approx(sum(sizes), rel=0.1)


def test_drafts_in_several_image_rows_keep_a_distribution_per_slot():
    request, model, sampling = Request(CAPTION, "p", 0), find_model("shapes"), Sampling(1.0)
    loop = begin(Decoding(load_model("shapes"), resolve("pjd"), sampling, 0), [request], Spans(torch.device("cpu")))
    pjd, zipar = (memory_estimate.footprint(model, resolve(name), sampling, "float32") for name in ("pjd", "zipar"))
    assert pjd.inputs - zipar.inputs == loop._q.nbytes


@pytest.mark.parametrize(
    ("name", "batch"),
    [(name, 2) for name in ("ar", "sjd", "sjd, init left-sample", "eagle", "lantern", "zipar")]
    + [("sjd", 1)]
    + [pytest.param(name, 2, marks=pytest.mark.slow) for name in ("scd-gs", "sjd-pac", "best-lossless")],
)
def test_the_peak_from_prompt_to_pixels_is_predicted_within_a_tenth(name, batch):
    decoder, shapes = BENCH["DECODERS"][name], find_model("shapes")
    measured = BENCH["peak"](load_model("shapes"), decoder, shapes.sampling(), batch)
    expected = BENCH["predicted"](shapes, decoder, shapes.sampling(), batch)["besides"]
    assert expected == pytest.approx(measured, rel=0.1)


SIZES = {"codes": 2000, "width": 32, "inner": 80, "layers": 2, "heads": 2}


class Narrow(Tiny):
    """A network smaller than its distributions, with the facts of a checkpoint; its images take no memory."""

    codebook = None

    def __init__(self):
        torch.manual_seed(0)
        codes, width, inner, layers, heads = SIZES.values()
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
        sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        config = LlamaConfig(vocab_size=codes, num_attention_heads=heads, **sizes)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        self.matrix = torch.randn(width, codes)
        self.layout = TokenLayout.plain(12, 12, codes)

    def encode(self, prompts):
        rows = torch.arange(BENCH["PROMPT"]).repeat(2 * len(prompts), 1)
        return Prefix(list(self.backbone.embed_tokens(rows)), ids=rows)

    @classmethod
    def facts(cls, folder: Path) -> ModelInfo:
        (folder / "config.json").write_text(json.dumps({"network": SIZES}))
        return ModelInfo("narrow", "", "", (12, 12), 144, "", folder / "config.json")


@pytest.mark.parametrize(("name", "sampling"), [
    ("sjd", Sampling(3.0, top_k=100)), ("sjd", Sampling(3.0, top_p=0.9)), ("sjd", Sampling(1.0, 0.7, top_p=0.9)),
    ("scd-mc", Sampling(3.0)),
])  # fmt: skip
def test_the_peak_is_predicted_if_distributions_dominate(name, sampling, tmp_path):
    decoder, facts = resolve(name, {"window": 32}), Narrow.facts(tmp_path)
    measured = BENCH["peak"](Narrow(), decoder, sampling, 2)
    expected = BENCH["predicted"](facts, decoder, sampling, 2)
    assert expected["step"] > expected["cache"] and expected["besides"] == pytest.approx(measured, rel=0.1)


def test_drawing_a_picture_takes_what_the_catalog_says():
    decoder = vq_decoder.random_taming(vq_decoder.CHAMELEON_VQ, normalise=False, attention=False, device="cpu")
    with torch.inference_mode(), BENCH["Live"]() as live:
        vq_decoder.render_codes(decoder, torch.zeros(2, 4, 4, dtype=torch.long))
    assert 4 * 64 * 64 * find_model("lumina").pixel_numbers == pytest.approx(live.most, rel=0.1)


@pytest.mark.parametrize("name", ["lumina2", "emu3"])
def test_drawing_with_movqgan_takes_what_the_catalog_says(name):
    """One frame of Emu3's decoder, and norms in slices; on the meta device, with the published sizes."""
    if name == "emu3":
        decoder = vq_decoder.Emu3Decoder(randomise(emu3.image_network(Emu3VQVAEConfig()), "meta", torch.float32))
    else:
        network = randomise(vq_decoder.movq_network(vq_decoder.MOVQ), "meta", torch.float32)
        decoder = vq_decoder.MovqDecoder(network)
    with torch.inference_mode(), BENCH["Live"]() as live:
        vq_decoder.render_codes(decoder, torch.zeros(1, 8, 8, dtype=torch.long, device="meta"))
    assert 4 * 64 * 64 * find_model(name).pixel_numbers == pytest.approx(live.most, rel=0.01)


def test_the_largest_batch_fits_and_one_more_does_not():
    need = memory_estimate.Footprint(weights=100, cache=20, inputs=10, step=10)
    assert memory_estimate.largest_batch([need], 1000) == 20 and need.total(20) <= 900 < need.total(21)
    assert memory_estimate.largest_batch([need, memory_estimate.Footprint(100, 40, 20, 20)], 1000) == 10
    assert memory_estimate.largest_batch([need], 50) < 1
    # Pictures are drawn while the caches are in memory.
    one_by_one = memory_estimate.Footprint(weights=100, cache=20, inputs=10, step=10, picture=200)
    assert [one_by_one.total(batch) for batch in (0, 1, 30)] == [100, 330, 1300]
    assert memory_estimate.largest_batch([one_by_one], 300) == 0
    together = memory_estimate.Footprint(100, 20, 10, 10, picture=200, together=True)
    assert together.total(3) == 790 and together.per_image == 230


def test_a_batch_that_cannot_fit_is_refused_before_anything_runs(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: 64 * 2**20)
    batch = ("run", "--batch", "64", "--limit", "2", "--out", tmp_path / "out")
    cli(*batch).refused("--batch 64: ", "do not fit", alone=True)
    assert not (tmp_path / "out").exists()
    auto = ("run", "--random-weights", "--prompts", "shapes", "--batch", "auto", "--out", tmp_path / "o", "--model")
    assert cli(*auto, "lumina").code == 2
    assert "--batch auto" in cli(*auto, "llamagen", "--scale", "tiny").err, "nobody has counted"
    assert {need for kinds in CHOICES.values() for part in kinds.values() for need in part.memory} == MEMORY
    refused("unknown kind of memory 'temporray'", Component, "m:C", "a component", memory={"temporray": 1})


def test_auto_takes_what_fits_and_takes_it_again(cli, tmp_path, monkeypatch):
    asked = ("run", "--decoder", "ar", "--batch", "auto", "--threads", "1", "--out", tmp_path, "--json", "-q")
    outcome = cli(*asked, "--limit", "2")
    assert outcome.code == 0, outcome.err
    (first,) = json.loads(outcome.out)
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: 200 * 2**20)
    (again,) = json.loads(cli(*asked, "--limit", "3").out)
    assert first == again
    info = json.loads((tmp_path / first["run_id"] / "run.json").read_text())
    assert info["spec"]["batch"] == 2 and info["memory"]["largest"] >= 2


def test_list_doctor_and_run_state_the_same_memory(cli, tmp_path, monkeypatch):
    """The estimate of an image with AR: in `list models`, in `doctor`, and behind the batch size of `run`."""
    listed = {row["name"]: row["memory_gib"] for row in json.loads(cli("list", "models", "--json").out)}
    checked = json.loads(cli("doctor", "--model", "lumina", "--random-weights", "--out", tmp_path, "--json").out)
    (memory,) = (row["detail"] for row in checked if row["name"] == "memory")
    model = find_model("lumina")
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: 2**40)
    _, facts = memory_estimate.settle_batch(2, model, [resolve("ar")], model.sampling(), model.dtype, "cpu")
    fields = memory_estimate.Footprint.__dataclass_fields__
    planned = memory_estimate.Footprint(**{name: facts[name] for name in fields}).total(1) / 2**30
    assert f"{listed['lumina']:.3g}" == f"{planned:.3g}" and f"about {planned:.1f} GiB" in memory
