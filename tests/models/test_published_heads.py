"""Heads that authors publish: their forward is that of the authors' own module on the same weights, and the model's
head is found, downloaded and used without being named.

It concerns several modules: draft head files, the head, plans. The authors' module is LANTERN's (jadohu/LANTERN at
3a56e45), read from a checkout of it that LANTERN_FOLDER names.
"""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from draft_heads import write_head

from specbench.errors import SpecbenchError
from specbench.models.draft_head import load_head
from specbench.models.draft_head_files import PUBLISHED_HEADS, HeadFiles, head_in, published_head
from specbench.models.families.llamagen import LlamaGen
from specbench.papers.planned_cells import head_of

LANTERN = os.environ.get("LANTERN_FOLDER", "")
WORDS, WIDTH, LENGTH = 24, 128, 150


def test_each_published_head_is_known_by_its_model():
    assert published_head("llamagen-512+released-rows") == "jadohu/llamagen2_drafter"
    assert (
        published_head("llamagen+random+tiny") == published_head("janus") == published_head("lumina", "vertical") == ""
    )
    with pytest.raises(SpecbenchError, match="sihwanpark/LANTERN-Lumina-mGPT-7B-768 is not on this disk") as error:
        HeadFiles(published_head("lumina"), "lumina").find()
    assert error.value.try_this == "specbench fetch sihwanpark/LANTERN-Lumina-mGPT-7B-768"
    assert PUBLISHED_HEADS["lumina"].licence == "Apache-2.0"


def test_bench_takes_a_head_for_each_model():
    assert head_of("a/b", "lumina") == "a/b"
    assert [head_of("lumina=x,llamagen=y/z", name) for name in ("lumina", "llamagen", "anole")] == ["x", "y/z", None]
    with pytest.raises(SpecbenchError, match="unknown model 'lumnia'"):
        head_of("lumnia=x", "lumina")


@pytest.fixture
def lantern(monkeypatch):
    """LANTERN's drafter modules, without its package, which imports all of its models."""
    if not LANTERN:
        pytest.skip("LANTERN_FOLDER names no checkout of jadohu/LANTERN at 3a56e45")
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
        "intermediate_size": tensors["layers.0.mlp.up_proj.weight"].shape[0],
    }
    shared |= {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1, "hidden_act": "silu"}
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
