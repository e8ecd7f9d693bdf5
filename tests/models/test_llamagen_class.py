"""LlamaGen by class: the official computation step by step, labels, published layouts, sizes, every decoder. It
concerns several modules: its family's, layouts and sizes."""

import hashlib
from dataclasses import replace

import pytest
import torch
from checkpoints import llamagen
from refusals import refused

from specbench.decoding.loop import Decoding, decode_tokens
from specbench.errors import BAD_INPUT
from specbench.metrics.catalog import default_metrics
from specbench.metrics.clip import Clip
from specbench.metrics.fid import bicubic256
from specbench.models.catalog import default_prompts, find_model, load_model
from specbench.models.facts import ModelChoice
from specbench.models.family_sizes import network_size
from specbench.prompts import Prompt, Request, load_prompts
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

WIDE = network_size("llamagen_class", 512, 200, 48, 2, 2, 2)
"""A network with heads of 100, as 3B has them."""


@pytest.fixture(scope="module", params=[("b", 128, 64), ("3b", 200, 100)], ids=["heads of 64", "heads of 100"])
def loaded(request, tmp_path_factory):
    size, width, head = request.param
    folder = tmp_path_factory.mktemp(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llamagen, "WIDTH", width)
        patch.setattr(llamagen, "HEAD", head)
        tensors = llamagen.write_by_class(folder, f"c2i_{size.upper()}_384.pt", bare=size == "3b")
    info = find_model(f"llamagen-c2i-{size}")
    info = replace(info, network=WIDE) if head == 100 else info
    return tensors, width, head, load_model(info.configured(ModelChoice(str(folder), tiny=True)), "cpu", "float32")


@torch.inference_mode()
@pytest.mark.parametrize("scale", [1.0, 1.75])
def test_logits_match_the_official_computation(loaded, scale, monkeypatch):
    tensors, width, head, model = loaded
    monkeypatch.setattr(llamagen, "WIDTH", width)
    monkeypatch.setattr(llamagen, "HEAD", head)
    stream = torch.randint(model.layout.v_image, (1, 16), generator=torch.Generator().manual_seed(4))
    session = model.begin(model.encode(["7"]), scale, columns=16)
    logits = session.forward(torch.nn.functional.pad(stream[:, :-1], (1, 0)), torch.arange(16)[None])[0]
    rows = [
        llamagen.official_features(tensors, None, 0, stream[0, :-1].tolist(), label) @ tensors["output.weight"].T
        for label in (7, 1000)
    ]
    torch.testing.assert_close(logits, rows[1] + scale * (rows[0] - rows[1]), atol=1e-4, rtol=1e-4)


def test_every_decoder_decodes_it(loaded):
    model = loaded[-1]
    requests = [Request("3", "3"), Request("999", "999")]
    greedy = Sampling(guidance=2.0, top_k=1)
    ar = decode_tokens(Decoding(model, resolve("ar"), greedy, 0), requests).tolist()
    for name in ("sjd", "gsd", "jacobi", "scd-mc", "zipar", "pjd"):
        tokens = decode_tokens(Decoding(model, resolve(name), greedy, 0), requests)
        assert tokens.shape == (2, 16)
        assert name in ("zipar", "pjd") or not resolve(name).lossless or tokens.tolist() == ar, name


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
    refused("holds LlamaGen by class, not 'llamagen'", by_text.files)


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
    tensors = llamagen.write_by_class(tmp_path, "c2i_B_384.pt")
    name = "cls_embedding.embedding_table.weight"
    torch.save({"model": {**tensors, name: tensors[name][:11]}}, tmp_path / "c2i_B_384.pt")
    info = find_model("llamagen-c2i-b").configured(ModelChoice(str(tmp_path), tiny=True))
    refused(r"has 10 classes, llamagen-c2i-b\+tiny has 1000", load_model, info, "cpu", "float32")


def test_images_of_384_are_reduced_as_in_the_authors_script():
    pixels = torch.randint(256, (384, 384, 3), dtype=torch.uint8)
    reduced = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None].float(), (256, 256), mode="bicubic")
    assert bicubic256(pixels.numpy()).tolist() == reduced[0].clamp(0, 255).byte().permute(1, 2, 0).tolist()
