"""A `generation_config.json` that the authors' script inherits is applied, for every decoder alike, or refused."""

import json
import shutil

import checkpoints
import pytest
import torch
from ragged import ragged_windows
from refusals import refused
from transformers import RepetitionPenaltyLogitsProcessor

from specbench.decoding.loop import decode
from specbench.decoding.sampling import Target
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

PENALTY, SCALE = 1.3, 6.0


@pytest.fixture(scope="module")
def path(written, tmp_path_factory):
    return shutil.copytree(written("simplear"), tmp_path_factory.mktemp("penalised") / "simplear")


def loaded(folder, **entries):
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0.8, **entries}))
    return checkpoints.loaded("simplear", folder)


def official(tiny, stream: list[int]) -> torch.Tensor:
    """p [V] of the next slot in the order of `generate`: penalty on raw conditional logits, then guidance on
    log-probabilities, then the image tokens alone."""
    conditional, unconditional = (tiny.logits("a cat", stream, half)[-1:] for half in (True, False))
    ids = torch.tensor([[3, 5, 8] + [tiny.image_ids.start + token for token in stream]])
    conditional = RepetitionPenaltyLogitsProcessor(PENALTY)(ids, conditional).log_softmax(-1)
    unconditional = unconditional.log_softmax(-1)
    mixed = unconditional + SCALE * (conditional - unconditional)
    return mixed[0, tiny.image_ids.start : tiny.image_ids.stop].softmax(-1)


@torch.inference_mode()
def test_every_column_of_every_window_is_penalised_as_generate_does(path, made):
    model, (_, tiny) = loaded(path, repetition_penalty=PENALTY), made("simplear")
    target = Target(model.layout, Sampling(guidance=SCALE), torch.device("cpu"))
    session = model.begin(model.encode(["a cat", "a cat"]), SCALE, 4)
    plan = ((4, (3, 1)), (4, (2, 4)), (3, (1, 1)))
    forward = lambda tokens, slots: target(session.forward(tokens, slots), slots)  # noqa: E731
    for _, stream, drafts, p in ragged_windows(forward, 4, plan):  # of so few words some are repeated
        for column in range(len(p)):
            expected = official(tiny, stream + drafts[:column])
            torch.testing.assert_close(p[column, : model.layout.v_image], expected, atol=1e-5, rtol=1e-3)


@torch.inference_mode()
def test_lossless_decoders_keep_the_penalised_target(path):
    """At top-k 1 each draws exactly what AR does, and something else than without the penalty, which favours repeats
    below 1: a vocabulary this large has no others in so small an image."""
    greedy = Sampling(guidance=SCALE, top_k=1)

    def tokens(model, decoder, **options):
        return list(decode(model, [Request("a cat", "a")], resolve(decoder, options), greedy, 0)[0].tokens)

    model = loaded(path, repetition_penalty=0.05)
    expected = tokens(model, "ar")
    assert tokens(model, "sjd", window=5) == tokens(model, "predictive", window=4) == expected
    assert expected != tokens(loaded(path), "ar")


def test_the_penalty_is_part_of_the_models_identity(path):
    assert len({loaded(path, repetition_penalty=value).weights_sha256 for value in (1.0, 1.1, 1.2)}) == 3


def test_the_penalty_is_recorded_and_shown_and_quiet_is_quiet(path, cli, run_tiny, tmp_path):
    loaded(path, repetition_penalty=1.1)
    run = ("simplear", "--weights", path, "--decoder", "ar")
    assert run_tiny(*run, "--out", tmp_path / "quiet", "--quiet").err == ""
    assert "repetition penalty 1.1 from generation_config.json" in run_tiny(*run).err
    (record,) = (tmp_path / "results").glob("*/run.json")
    assert json.loads(record.read_text())["processors"] == {"repetition_penalty": 1.1}
    outputs = [cli(*command, "--out", tmp_path / "results").out for command in (("report",), ("show", "simplear"))]
    assert all("repetition penalty 1.1" in output for output in outputs), outputs
    loaded(path)
    assert run_tiny(*run, "--out", tmp_path / "plain").code == 0
    (record,) = (tmp_path / "plain").glob("*/run.json")
    assert "processors" not in json.loads(record.read_text())


@pytest.mark.parametrize("decoder", ["eagle", "zipar", "sjd-pac"])
def test_decoders_without_a_chain_are_refused_by_name(decoder, path, run_tiny, tmp_path):
    loaded(path, repetition_penalty=1.1)
    head = ("--head", tmp_path) if decoder == "eagle" else ()
    outcome = run_tiny("simplear", "--weights", path, "--decoder", decoder, *head)
    assert outcome.code and "Traceback" not in outcome.err
    if decoder != "eagle":
        assert "repetition penalty 1.1" in outcome.err


@pytest.mark.parametrize(("entries", "code", "problem"), [
    ({"no_repeat_ngram_size": 3}, 2, "no_repeat_ngram_size = 3"), ({"suppress_tokens": [1]}, 2, "suppress_tokens"),
    ({"typical_p": 0.9}, 2, "typical_p"), ({"repetition_penalty": 0}, 5, "repetition_penalty = 0"),
    ({"repetition_penalty": "much"}, 5, "repetition_penalty"),
])  # fmt: skip
def test_what_is_not_applied_is_refused_by_name(entries, code, problem, path):
    error = refused("", loaded, path, **entries)
    assert error.exit_code == code and problem in error.what and "generation_config.json" in error.what


def test_what_has_no_effect_is_taken(path):
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "eos_token_id": [1]}
    neutral["min_p"] = None
    assert loaded(path, **neutral).repetition_penalty == 1.0
