"""LlamaGen by class: heads of another size, labels, published layouts, sizes. It
concerns several modules: its family's, layouts and sizes."""

import hashlib
from dataclasses import replace

import pytest
import torch
from checkpoints import llamagen
from refusals import refused

from specbench.errors import BAD_INPUT
from specbench.metrics.catalog import default_metrics
from specbench.metrics.clip import Clip
from specbench.metrics.fid import bicubic256
from specbench.models.catalog import default_prompts, find_model, load_model
from specbench.models.facts import ModelChoice
from specbench.models.family_sizes import network_size
from specbench.prompts import Prompt, load_prompts


@torch.inference_mode()
def test_heads_of_100_give_the_official_logits(tmp_path):
    """As 3B has them; a network with heads of 64 meets the contract of every family."""
    tiny = llamagen.write_by_class(tmp_path, "c2i_3B_384.pt", bare=True, width=200, head=100)
    info = replace(find_model("llamagen-c2i-3b"), network=network_size("llamagen_class", 512, 200, 48, 2, 2, 2))
    model = load_model(info.configured(ModelChoice(str(tmp_path), tiny=True)), "cpu", "float32")
    stream = [code % llamagen.CODES for code in range(3, 120, 8)]
    session = model.begin(model.encode(["7"]), 1.75, columns=16)
    logits = session.forward(torch.tensor([[0, *stream]]), torch.arange(16)[None])[0]
    c, u = (tiny.logits("7", stream, half) for half in (True, False))
    torch.testing.assert_close(logits, u + 1.75 * (c - u), atol=1e-4, rtol=1e-4)


def test_labels_are_drawn_one_by_one_and_stay_the_same():
    labels = load_prompts("imagenet")
    texts = [prompt.text for prompt in labels.prompts]
    assert len(texts) == 50_000 and {int(text) for text in texts} == set(range(1000))
    assert hashlib.sha256(" ".join(texts).encode()).hexdigest()[:12] == "7b1ff633f2b5"
    assert not Clip("b16").accepts(None, labels.prompts[0].meta)
    assert default_metrics("llamagen-c2i-b", "imagenet")[-1] == "fid[tf1+bicubic256]"
    assert "clip[b16+299]" not in default_metrics("llamagen-c2i-b", "imagenet")
    assert default_prompts("llamagen-c2i-3b") == "imagenet"
    refused("is a class number; 'janus' takes captions", find_model("janus").check_prompts, labels.prompts)


@pytest.mark.parametrize("text", ["1000", "-1", "a cat", "", "7.0", "٣" * 400])
def test_what_is_no_class_is_one_line(text):
    model = find_model("llamagen-c2i-b")
    error = refused("is not a class of 'llamagen-c2i-b'", model.check_prompts, [Prompt("one", text)])
    assert error.exit_code == BAD_INPUT and len(str(error)) < 200


@pytest.mark.parametrize(("size", "millions"), [("b", 111), ("l", 343), ("xl", 775), ("xxl", 1400), ("3b", 3100)])
def test_parameters_match_the_readme(size, millions):
    """Which counts the network as trained: the token table, the head and the learned classes included."""
    assert find_model(f"llamagen-c2i-{size}").parameters / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_folder_with_another_size_names_its_model(tmp_path):
    llamagen.write_by_class(tmp_path, "c2i_L_384.pt")
    info = find_model("llamagen-c2i-l").configured(ModelChoice(weights=str(tmp_path)))
    assert (info.layers, info.network.width) == (llamagen.LAYERS, llamagen.WIDTH)
    by_text = find_model("llamagen").configured(ModelChoice(weights=str(tmp_path)))
    refused("contains LlamaGen by class, not 'llamagen'", by_text.files)


def test_a_folder_of_several_models_is_read_for_the_one_that_was_asked_for(tmp_path):
    llamagen.write_by_class(tmp_path, "c2i_B_384.pt")
    rows = {"output": 512, "layers.23.feed_forward.w1": 8, "layers.0.feed_forward.w1": 8}
    wide = {f"{name}.weight": torch.zeros(1).expand(count, 3200) for name, count in rows.items()}
    wide["cls_embedding.embedding_table.weight"] = torch.zeros(1).expand(1001, 3200)
    torch.save({"model": wide}, tmp_path / "c2i_3B_384.pt")
    (tmp_path / "t2i_XL_stage1_256.pt").touch()

    def network(size):
        info = find_model(f"llamagen-c2i-{size}").configured(ModelChoice(weights=str(tmp_path)))
        assert f"c2i_{size.upper()}_384.pt" in [path.name for path in info.files()]
        return info.network

    small, large = network("b"), network("3b")
    assert (small.width, small.heads) == (128, 2)
    assert (large.width, large.heads, large.head_size) == (3200, 32, 100), "as published, not 50 heads of 64"
    torch.save({"model": wide | {"freqs_cis": torch.zeros(577, 20, 2)}}, tmp_path / "c2i_3B_384.pt")
    assert network("3b").head_size == 40, "the file's own rotary table"
    (tmp_path / "c2i_3B_384.pt").rename(tmp_path / "c2i_B_384.pt")
    assert network("b").head_size == 40
    published = {f"{name}.weight": torch.zeros(1).expand(*shape) for name, shape in {
        "output": (16_384, 3200), "layers.23.feed_forward.w1": (1, 3200), "layers.0.feed_forward.w1": (8704, 3200),
        "cls_embedding.embedding_table": (1001, 3200)}.items()}  # fmt: skip
    torch.save({"model": published}, tmp_path / "c2i_B_384.pt")
    refused("has the size of 'llamagen-c2i-3b'", network, "b")


def test_a_checkpoint_of_other_classes_is_refused(tmp_path):
    llamagen.write_by_class(tmp_path, "c2i_B_384.pt")
    tensors = torch.load(tmp_path / "c2i_B_384.pt", weights_only=True)["model"]
    name = "cls_embedding.embedding_table.weight"
    torch.save({"model": {**tensors, name: tensors[name][:11]}}, tmp_path / "c2i_B_384.pt")
    info = find_model("llamagen-c2i-b").configured(ModelChoice(str(tmp_path), tiny=True))
    refused(r"has 10 classes, llamagen-c2i-b\+tiny has 1000", load_model, info, "cpu", "float32")


def test_images_of_384_are_reduced_as_in_the_authors_script():
    pixels = torch.randint(256, (384, 384, 3), dtype=torch.uint8)
    reduced = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None].float(), (256, 256), mode="bicubic")
    assert bicubic256(pixels.numpy()).tolist() == reduced[0].clamp(0, 255).byte().permute(1, 2, 0).tolist()
