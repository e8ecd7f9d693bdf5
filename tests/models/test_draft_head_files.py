"""Draft heads in the published layout for LlamaGen, Lumina and Anole: draft distributions equal the official
computation, and the commands accept the heads. The authors' module is LANTERN's (jadohu/LANTERN at 3a56e45), read from
a checkout of it that LANTERN_FOLDER names; a head's forward equals the forward of their module on the same weights. It
concerns several modules: draft head files, the head, plans."""

import importlib
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
import torch
from checkpoints import AUTHORS, llamagen, loaded, write
from checkpoints.slow import attended, gated, rms
from draft_heads import INNER, noted_proposals, write_head, write_janus_head
from refusals import refused
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

from specbench.decoding.loop import decode
from specbench.models.draft_head import head_for, load_head
from specbench.models.draft_head_files import PUBLISHED_HEADS, HeadFiles, head_in, published_head
from specbench.models.families.llamagen import LlamaGen
from specbench.models.interface import DraftPrompt
from specbench.papers.planned_cells import head_of
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

TEXTS = ("a red circle", "two blue squares")
SAMPLING = Sampling(guidance=2.0)


def extrapolate(tensors, ids, features, grid):
    """The head's feature after the last element, one position and one attention head at a time."""
    weights = {name.removeprefix("layers.0.").removeprefix("self_attn."): t for name, t in tensors.items()}
    x = torch.cat([tensors["embed_tokens.weight"][torch.tensor(ids[1:])], features[: len(ids) - 1]], 1)
    x = x @ tensors["fc.weight"].T + tensors["fc.bias"]
    eps, size = (1e-6, 64) if grid else (1e-5, 8)
    seen = x if grid else rms(x, weights["input_layernorm.weight"], eps)
    outputs = []
    for head, start in enumerate(range(0, x.shape[1], size)):
        part = slice(start, start + size)
        q, k, v = (seen @ weights[f"{name}_proj.weight"].T[:, part] for name in "qkv")
        if not grid:
            q, k = (normed(weights, name, y, head) for name, y in (("q", q), ("k", k)))
        turn = (lambda row, at: llamagen.rotate(row, at, caption=119)) if grid else turn_halves
        q, k = (torch.stack([turn(row, at) for at, row in enumerate(y)]) for y in (q, k))
        outputs.append(attended(q, k, v))
    x = x + torch.cat(outputs, 1) @ weights["o_proj.weight"].T
    h = rms(x, weights["post_attention_layernorm.weight"], eps)
    return (x + gated(h, *(weights[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))))[-1]


def normed(weights, name, y, head):
    weight, bias = (weights[f"{name}_norm.{part}"] for part in ("weight", "bias"))
    row = min(head, len(weight) - 1)
    return functional.layer_norm(y, y.shape[-1:], eps=1e-5) * weight[row] + bias[row]


def turn_halves(vector, position):
    half = len(vector) // 2
    angle = position * 10_000.0 ** (-torch.arange(half) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


@pytest.fixture(autouse=True)
def tiny_grids(monkeypatch):
    """Published heads know grids of 16 x 16 and 32 x 32; these ones are written for the tiny grid."""
    monkeypatch.setattr("specbench.models.families.llamagen.HEAD_GRIDS", {"t2i": 4})


@pytest.fixture
def pair(request, tmp_path):
    """A tiny checkpoint of the model, and a head for it."""
    (tmp_path / "weights").mkdir()
    tiny = write(request.param, tmp_path / "weights")
    words = 24 if request.param.startswith("llamagen") else 600
    tensors = write_head(tmp_path / "head", request.param, words, tiny.output.shape[1])
    return request.param, tiny, tensors, tmp_path / "head"


@pytest.mark.parametrize("pair", ["llamagen", "lumina", "anole"], indirect=True)
@torch.inference_mode()
def test_drafts_follow_the_official_distribution(pair, monkeypatch):
    name, tiny, tensors, folder = pair
    model, seen = loaded(name, tiny.folder), noted_proposals(monkeypatch)
    spec = resolve("eagle", {"tree": "0 00", "head": str(folder), "verifier": "omega", "delta": 1e9})
    requests = [Request(text, text) for text in TEXTS]
    rows = decode(model, requests, spec, SAMPLING, 0, render=False)
    again = decode(model, requests, spec, SAMPLING, 0, render=False)
    assert all((image.tokens == other.tokens).all() for image, other in zip(rows, again, strict=True))
    checked = 0
    for committed, fed in seen[1:5]:
        for row, text in enumerate(TEXTS):
            stream = rows[row].tokens[: int(committed[row])].tolist()
            if model.layout.forced[len(stream)] >= 0:
                continue
            logits = []
            for conditional in (True, False):
                ids, features = tiny.seen(text, stream, conditional)
                logits.append(extrapolate(tensors, ids, features, name == "llamagen") @ tiny.output.T)
            expected = (logits[1] + 2 * (logits[0] - logits[1])).softmax(-1)
            torch.testing.assert_close(fed.q[row, 0, :24], expected, atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked > 4 and sum(row.accepted.sum() for row in rows) > 2


@pytest.mark.parametrize("pair", ["llamagen", "lumina", "anole"], indirect=True)
def test_the_command_takes_a_published_head(pair, run_tiny, tmp_path, monkeypatch):
    name, tiny, _, folder = pair
    head = ("--head", folder, "--decoder", "eagle,cool-sd,lantern++:k=3", "--tree", "0 1 00")
    outcome = run_tiny(name, "--weights", tiny.folder, *head, "--json")
    assert outcome.code == 0, outcome.err
    for run in json.loads(outcome.out):
        rows = pd.read_parquet(tmp_path / "results" / run["run_id"] / "samples")
        assert rows["status"].tolist() == ["ok"] and json.loads(rows["facts"][0])["draft_tv_1"] > 0
    monkeypatch.setenv("SPECBENCH_OFFLINE", "1")
    published = PUBLISHED_HEADS[name].repo  # the default
    run_tiny(name, "--weights", tiny.folder, "--decoder", "eagle").refused(published, code=5)


@torch.inference_mode()
def test_a_head_in_the_layout_of_janus_computes_what_the_authors_code_does(tmp_path, run_tiny):
    (tmp_path / "weights").mkdir()
    tiny = AUTHORS["janus"](tmp_path / "weights")
    target = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    layer = json.loads((tmp_path / "weights" / "config.json").read_text())["language_config"]
    tensors = write_janus_head(tmp_path / "head", target, layer)
    model = loaded("janus-7b", tiny.folder)
    head = head_for(model, str(tmp_path / "head"))
    codes, features = torch.tensor([3, 1, 4, 1, 5]), torch.randn(5, layer["hidden_size"])
    aligner = [tensors[f"gen_aligner.layers.{number}.{part}"] for number in (0, 2) for part in ("weight", "bias")]
    embedded = functional.linear(tensors["gen_embed.weight"][codes], *aligner[:2])
    embedded = functional.linear(functional.gelu(embedded), *aligner[2:])
    fused = torch.cat([features, embedded], 1) @ tensors["fusion.weight"].T + tensors["fusion.bias"]
    network = LlamaModel(LlamaConfig(**layer | {"num_hidden_layers": 1, "torch_dtype": "float32"})).eval()
    start = "language_model.model."
    network.load_state_dict({n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)})
    expected = network(inputs_embeds=functional.silu(fused)[None]).last_hidden_state
    ids = model.table_ids(codes)[None]
    torch.testing.assert_close(head.extrapolate(ids, features[None]), expected, atol=1e-4, rtol=1e-3)
    lengths = head.seen_prompt(DraftPrompt(torch.tensor([9, 7]), torch.zeros(2, 8, 32), None)).lengths
    assert lengths.tolist() == [1, 1] and PUBLISHED_HEADS["janus-7b"].repo == "seliny2/JanusPro-Eagle-Drafter"
    drafting = ("--decoder", "eagle", "--tree", "0 1 00", "--head", tmp_path / "head")
    assert run_tiny("janus-7b", "--weights", tiny.folder, *drafting).code == 0


@pytest.mark.parametrize("pair", ["llamagen", "lumina"], indirect=True)
def test_a_head_of_another_vocabulary_without_a_tensor_or_cut_off_after_its_index_is_refused(pair, tmp_path):
    name, tiny, tensors, folder = pair
    model = loaded(name, tiny.folder)
    write_head(tmp_path / "small", name, 10, tiny.output.shape[1])
    refused("its ids end below 10", head_for, model, str(tmp_path / "small"))
    (path,) = (file for file in folder.iterdir() if file.suffix in (".bin", ".safetensors"))
    whole = path.read_bytes()
    index = 8 + int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else 0
    path.write_bytes(whole[: index + (len(whole) - index) // 2])
    refused(path.name, head_for, model, str(folder))
    del tensors["fc.bias"]
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)
    refused(r"fc\.bias", head_for, model, str(folder))


@pytest.mark.parametrize(
    ("grids", "problem"), [({"t2i": 16, "t2i2": 32}, "t2i is 16 x 16, t2i2 is 32 x 32"), ({"other": 4}, "'t2i'")]
)
def test_a_head_for_another_grid_is_refused(grids, problem, run_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.models.families.llamagen.HEAD_GRIDS", grids)
    (tmp_path / "weights").mkdir()
    tiny = write("llamagen", tmp_path / "weights")
    write_head(tmp_path / "head", "llamagen", llamagen.CODES, tiny.output.shape[1])
    error = refused("", head_for, loaded("llamagen", tiny.folder), str(tmp_path / "head"))
    assert problem in error.what and "'llamagen+tiny' decodes 4 x 4" in error.what
    outcome = run_tiny("llamagen", "--weights", tiny.folder, "--decoder", "eagle", "--head", tmp_path / "head")
    outcome.refused("decodes 4 x 4")


@pytest.mark.parametrize(
    ("decoder", "config"),
    [("eagle", {"hidden_size": 24}), ("eagle3", {"hidden_size": 24}), ("vertical", {"width": 24}),
     ("eagle", {"language_config": {"hidden_size": 24}}), ("vertical", {"kind": "eagle", "hidden_size": 128})],
)  # fmt: skip
def test_a_head_of_another_width_or_kind_is_refused_in_the_plan(decoder, config, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.runs.preparation.load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = ("run", "--model", "shapes", "--decoder", decoder, "--head", tmp_path, "--limit", 1, "--out", tmp_path / "o")
    for more in ((), ("--dry-run",)):
        kind = "its kind is eagle, but the decoder uses vertical"
        cli(*run, *more).refused(kind if "kind" in config else "its feature size is 24, but 'shapes' has 128")
    (tmp_path / "config.json").write_text("[]")
    cli(*run, "--dry-run").refused("is not the configuration of a draft head")


LANTERN = os.environ.get("LANTERN_FOLDER", "")
WORDS, WIDTH, LENGTH = 24, 128, 150


def test_each_published_head_is_known_by_its_model():
    assert published_head("llamagen-512+released-rows") == "jadohu/llamagen2_drafter"
    assert {published_head("llamagen+random+tiny"), published_head("janus"), published_head("lumina", "vertical")} == {
        ""
    }
    repository, files = "sihwanpark/LANTERN-Lumina-mGPT-7B-768", HeadFiles(published_head("lumina"), "lumina")
    assert refused(f"{repository} is not on this disk", files.find).try_this == f"specbench fetch {repository}"
    assert PUBLISHED_HEADS["lumina"].licence == "Apache-2.0"


def test_bench_takes_a_head_for_each_model():
    assert head_of("a/b", "lumina") == "a/b"
    assert [head_of("lumina=x,llamagen=y/z", name) for name in ("lumina", "llamagen", "anole")] == ["x", "y/z", None]
    refused("unknown model 'lumnia'", head_of, "lumnia=x", "lumina")


@pytest.fixture
def lantern(monkeypatch):
    """LANTERN's drafter modules, without its package, which imports all of its models."""
    if not LANTERN:
        pytest.skip("LANTERN_FOLDER names no checkout of jadohu/LANTERN at 3a56e45")
    monkeypatch.setattr("specbench.models.families.llamagen.HEAD_GRIDS", {"t2i": 16})
    package = ModuleType("models")
    package.__path__ = [f"{LANTERN}/models"]
    monkeypatch.setitem(sys.modules, "models", package)
    yield lambda name: importlib.import_module(f"models.drafters.cnets_{name}").Model
    for name in [name for name in sys.modules if name.startswith("models.")]:
        del sys.modules[name]


@pytest.mark.parametrize(("name", "module"), [("llamagen", "llamagen"), ("lumina", "lumina_mgpt"), ("anole", "anole")])
@torch.inference_mode()
def test_a_head_extrapolates_as_the_authors_module_does(lantern, name, module, tmp_path):
    tensors = write_head(tmp_path / "head", name, WORDS, WIDTH)
    files = head_in(tmp_path / "head")
    heads = WIDTH // (64 if name == "llamagen" else 8)
    shared = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
    }
    shared |= {"rms_norm_eps": 1e-6 if name == "llamagen" else 1e-5, "rope_scaling": None, "rope_theta": 10_000.0}
    shared |= {"pad_token_id": None, "pretraining_tp": 1, "max_position_embeddings": 4096, "input_type": "t2i"}
    shared |= {"attention_bias": False, "attention_dropout": 0.0, "dropout": 0.0, "mlp_bias": False}
    shared |= {"model_parallel_size": 1 if name == "lumina" else heads, "_attn_implementation": "eager"}
    theirs = lantern(module)(SimpleNamespace(**shared)).eval()
    theirs.load_state_dict(tensors)
    ours = load_head(files).eval()
    if name == "llamagen":
        layout = SimpleNamespace(height=16, width=16)
        ours = LlamaGen.adopt_head(SimpleNamespace(name=name, layout=layout), ours)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (2, LENGTH), generator=draw)
    features, output = torch.randn(2, LENGTH, WIDTH, generator=draw), torch.randn(WORDS, WIDTH, generator=draw)
    expected, extrapolated = theirs(features, input_ids=ids), ours.extrapolate(ids, features)
    torch.testing.assert_close(extrapolated, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(extrapolated @ output.T, expected @ output.T, atol=2e-4, rtol=1e-4)
    assert PUBLISHED_HEADS[name].files[0] == "config.json"
