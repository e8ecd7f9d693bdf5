"""Tar's two stages, together and each alone. It concerns several modules: both families, the loop that asks for the
pictures, prompts from a run, report columns. The de-tokenizer, TA-Tok and the image decoder were compared with the
authors' code (csuhan/Tar, 47da8e1) separately."""

import json

import pandas as pd
import pytest
import torch
from checkpoints import configured, tar
from refusals import refused

from specbench.decoding.loop import decode, second_stage
from specbench.metrics.clip import Clip
from specbench.models.catalog import find_model, load_model, recorded_model
from specbench.models.facts import ModelChoice
from specbench.prompts import Prompt, Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling


@pytest.fixture(scope="module")
def stages(made, tiny_of):
    """(folder, tiny checkpoint, loaded model) of the language model and of the de-tokenizer with the same weights."""
    return [(made(kind)[0], *tiny_of(kind)) for kind in ("tar-1.5b", "tar-dtok-1024")]


@torch.inference_mode()
@pytest.mark.parametrize("codes", [16, 5, 20], ids=["all", "too few", "too many"])
def test_the_condition_is_the_features_of_the_codes_in_the_prompt(stages, codes):
    _, tiny, model = stages[1]
    text = "a cat" + "".join(f"<I{7 * code % tar.CODES}>" for code in range(codes))
    stream = torch.randint(tar.IMAGE_TOKENS, (1, 16), generator=torch.Generator().manual_seed(4))
    session = model.begin(model.encode([text]), 4.0, columns=16)
    logits = session.forward(torch.nn.functional.pad(stream[:, :-1], (1, 0)), torch.arange(16)[None])[0]
    c, u = (tiny.logits(text, stream[0, :-1].tolist(), half) for half in (True, False))
    torch.testing.assert_close(logits, u + 4.0 * (c - u), atol=1e-4, rtol=1e-4)
    assert (c - tiny.logits("", stream[0, :-1].tolist(), True)).abs().max() > 0.1, "codes matter"


def test_one_run_decodes_both_stages_and_a_second_run_the_same_pictures(stages, cli, run_tiny, tmp_path):
    pictures, rows = [], []
    asked, texts = ("--samples", "2"), ("a red circle", "a blue square")
    for name, (folder, *_) in zip(("tar-1.5b", "tar-dtok-1024"), stages, strict=True):
        decoder = ("--decoder", "sjd", "--window", "4")
        outcome = run_tiny(name, "--weights", folder, *decoder, *asked, "--json", texts=texts)
        assert outcome.code == 0, outcome.err
        run = tmp_path / "results" / json.loads(outcome.out)[0]["run_id"]
        asked = ("--prompts", run)
        rows.append(pd.read_parquet(run / "samples").sort_values(["prompt_id", "sample"]))
        pictures.append([(run / image).read_bytes() for image in rows[-1]["image"]])
    assert len(pictures[0]) == 4 and sorted(pictures[0]) == sorted(pictures[1])
    first, second = (table["facts"].map(json.loads) for table in rows)
    assert sorted(fact["stage2_nfe"] for fact in first) == sorted(rows[1]["nfe"])
    assert all(fact["stage2_tested"] > 0 for fact in first) and "stage2_nfe" not in second.iloc[0]
    assert all(fact["stage2_ms"] < ms for fact, ms in zip(first, rows[0]["render_ms"], strict=True))
    assert rows[1]["prompt_id"].iloc[0].endswith("#0 (stage 2)") and rows[1]["meta"].iloc[0] == '{"codes": 16}'
    assert not Clip("b16").accepts(None, json.loads(rows[1]["meta"].iloc[0]))
    report = cli("report", "--all", "--out", run.parent).out
    assert "| steps of stage 2" in report and "both stages ms" in report


def test_the_stages_share_no_noise_and_a_head_drafts_its_own_stage_only(stages):
    model, requests = stages[0][2], [Request("a cat", "a", 3)]
    tokens = torch.arange(16)[None]
    second, [asked], decoder, sampling = second_stage(model, tokens, requests, resolve("sjd"))
    assert second is model.second and sampling == Sampling(guidance=4.0) and decoder == resolve("sjd")
    assert asked.key == ("a#3 (stage 2)", 0) and asked.text == "a cat" + "".join(f"<I{code}>" for code in range(16))
    assert second_stage(model, tokens, requests, resolve("eagle"))[2] == resolve("ar")
    (image,) = decode(model, requests, resolve("ar"), Sampling(1.0), seed=0)
    (alone,) = decode(second, second_stage(model, torch.tensor(image.tokens)[None], requests, resolve("ar"))[1],
                      resolve("ar"), sampling, seed=0)  # fmt: skip
    assert (alone.image == image.image).all() and image.facts["stage2_nfe"] == 16


def test_the_penalty_of_the_file_holds_and_its_other_settings_do_not(copied):
    folder, settings = copied("tar-7b"), {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    facts = configured("tar-7b", folder)
    assert facts.sampling() == Sampling(1.0, 1.0, 1200, 0.95)
    assert load_model(facts, "cpu", "float32").repetition_penalty == 1.1


def test_a_size_chooses_the_de_tokenizer(tmp_path):
    chosen = find_model("tar-7b").configured(ModelChoice(random=True, size="256x256"))
    assert (chosen.name, chosen.resolution, chosen.grid) == ("tar-7b+256x256+random", (256, 256), (27, 27))
    assert chosen.companions[0].files[0] == "ar_dtok_lp_256px.pth" and recorded_model(chosen.name) == chosen
    assert find_model("tar-7b").resolution == (1024, 1024)
    refused("valid: 1024x1024, 512x512, 256x256", find_model("tar-7b").configured, ModelChoice(size="768x768"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("tar-dtok-256", "a cat"), ("tar-dtok-256", "<I65536>"), ("tar-1.5b", "a <I70000> cat")],
)  # fmt: skip
def test_prompts_without_codes_or_with_impossible_ones_are_one_line(name, text):
    refused("has no codes, or a code above 65535", find_model(name).check_prompts, [Prompt("one", text)])
    find_model("tar-1.5b").check_prompts([Prompt("one", "a cat")])


@pytest.mark.parametrize("name", ["tar-1.5b", "janus", "llamagen-c2i-b"])
def test_the_codes_of_a_run_are_prompts_of_a_second_stage_alone(name):
    of_a_run = Prompt("one", "<I3><I1>", meta={"codes": 2})
    refused("codes of a run are for a second stage", find_model(name).check_prompts, [of_a_run])
    find_model("tar-dtok-256").check_prompts([of_a_run])


def test_a_second_stage_wants_a_run_of_a_first_one(cli, tmp_path):
    out = "--out", tmp_path, "--quiet"
    assert cli("run", "--model", "shapes", "--decoder", "ar", "--limit", "1", *out).code == 0
    (run,) = tmp_path.glob("shapes-ar-*")
    second = "run", "--model", "tar-dtok-256", "--random-weights", "--scale", "tiny", *out
    cli(*second).refused("its prompts are images", alone=True)
    cli(*second, "--prompts", run).refused("is not a run of a model with a second", alone=True)


def test_files_that_do_not_fit_are_one_line(copied):
    folder = copied("tar-dtok-256")
    content = torch.load(folder / "ar_dtok_lp_256px.pth", weights_only=True)
    tensors = content["model"]["sd"]
    places = tensors.pop("abs_pe")
    for more, problem in (
        ({}, "lacks 'abs_pe'"),
        ({"abs_pe": places[:, :20]}, "has 20 positions, too few for 16 codes"),
    ):
        torch.save({"model": content["model"] | {"sd": tensors | more}}, folder / "ar_dtok_lp_256px.pth")
        refused(problem, load_model, configured("tar-dtok-256", folder), "cpu", "float32")
    refused(r"contains Tar's de-tokenizer, not 'tar-1.5b\+tiny'", configured("tar-1.5b", folder).files)
