"""Tokens of other programs: formats, kinds of ids, refusals with the slot, and the run that comes of them."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import checkpoints.janus
import checkpoints.llamagen
import checkpoints.tar
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from refusals import refused
from tiny_llama import Tiny
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from specbench import api
from specbench.checks.logp_kinds import log_p_of
from specbench.checks.run_audit import OTHERS, audit_run
from specbench.checks.verify import verify
from specbench.cli.checks import notes
from specbench.errors import GATE
from specbench.models.catalog import find_model, load_model
from specbench.models.loaded_model import LoadedModel
from specbench.runs.engine import refuse_other_prompt
from specbench.runs.token_import import read_stream
from specbench.store.run_store import RunStore


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A run of AR, as if another program had drawn it."""
    out = tmp_path_factory.mktemp("ours")
    (folder,) = api.run(decoder=["ar"], prompts="shapes", limit=4, batch=4, threads=1, quiet=True, out=out).folders
    rows = RunStore(folder).samples()
    rows.attrs["folder"] = folder
    return rows


def as_rows(rows, **more):
    return [
        {
            "prompt": row.prompt, "tokens": row.tokens.tolist(), "logp": row.logp.tolist(),
            "seconds": (1, 2, 1.25, 1.75)[place % 4],
        }
        | more
        for place, row in enumerate(rows.itertuples())
    ]  # fmt: skip


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        np.savez(path, **{name: np.array([row[name] for row in rows]) for name in rows[0]})
    return path


def imported(cli, path, *more):
    return cli("import", "tokens", "--model", "shapes", "--program", "engine 1.2", "--from", path, *more)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "npz"])
def test_tokens_become_a_run_with_pictures_scores_report_and_verdict(suffix, ours, tmp_path, cli):
    theirs, out = as_rows(ours), tmp_path / "results"
    theirs[0]["tokens"] = (
        [float(token) for token in theirs[0]["tokens"]] if suffix != "parquet" else theirs[0]["tokens"]
    )
    path = written(tmp_path / f"tokens.{suffix}", theirs)
    folder = imported(cli, path, "--prompts", "shapes", "--out", out).out.strip()
    rows = RunStore(folder).samples()
    assert [row.tolist() for row in rows["tokens"]] == [row.tolist() for row in ours["tokens"]]
    assert rows["image_sha256"].tolist() == ours["image_sha256"].tolist()
    assert rows["nfe"].isna().all() and set(rows["prompt_id"]) == set(ours["prompt_id"])
    row = api.report(folder).squeeze()
    assert row["label"] == "engine 1.2" and row[["speedup", "tokens_per_step", "nll_gap"]].isna().all()
    assert row["latency_ms"] == 1500
    if suffix == "jsonl":
        assert "first: specbench score" in cli("compare", ours.attrs["folder"], folder).err
        assert cli("score", folder, "--metric", "shapes-clip").code == 0
        report = cli("report", folder, ours.attrs["folder"]).out
        assert "theirs" in report and "To add AR" not in report, "AR has no times to compare with theirs"
        assert report.count("###") == 1, "in a table with AR: same prompts and sampling"
        # once more: nothing is stored twice
        again = imported(cli, path, "--prompts", "shapes", "--out", out)
        assert again.out.strip() == folder and "all 4 images already stored" in again.err


CALLS = {  # columns of four images, their latencies and what is said
    "alone": ({"seconds": [2.5, 1.5, 2.25, 1.75]}, [2500, 1500, 2250, 1750], "'seconds': 2.0 s per image (median)\n"),
    "in turns": ({"seconds": [2.0, 3.0, 2.0, 3.0]}, [None] * 4, "4 images of calls with an unknown number of images"),
    "half a call": ({"seconds": [2.0] * 4, "batch": [8] * 4}, [None] * 4, "'batch' of 4 images does not divide"),
    "alone, by the file": ({"seconds": [2.0] * 4, "batch": [1] * 4}, [2000] * 4, "2.0 s per image (median)\n"),
    "one call": (
        {"seconds": [2.0] * 4, "batch": [4] * 4}, [None] * 4, "(median), no latency: 4 images shared a call",
    ),
    "not said": ({"seconds": [2.0] * 4}, [None] * 4, "4 images of calls with an unknown number of images: no latency"),
    "one of them": (
        {"seconds": [2.0, 2.0, 2.0, 3.0]}, [None] * 3 + [3000], "3 images of calls with an unknown number of images",
    ),
    "none": ({"seconds": [None] * 4}, [None] * 4, ""),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "latencies", "said"), CALLS.values(), ids=CALLS)
def test_the_time_of_a_call_that_drew_several_images_is_no_latency(columns, latencies, said, ours, tmp_path, cli):
    rows = [row | {name: of[place] for name, of in columns.items()} for place, row in enumerate(as_rows(ours))]
    outcome = imported(cli, written(tmp_path / "t.jsonl", rows), "--out", tmp_path)
    stored = RunStore(outcome.out.strip()).samples()["latency_ms"]
    assert [None if np.isnan(value) else value for value in stored.astype(float)] == latencies and said in outcome.err
    [title] = [line for line in cli("report", "--out", tmp_path).out.splitlines() if line.startswith("###")]
    batch = 4 if "batch" in columns and columns["batch"][0] == 4 else 1 if any(latencies) else None
    assert title.endswith(f", float32, batch {batch}" if batch else ", float32"), "the batch that is known"


def test_whatever_reads_runs_reads_imported_ones(ours, tmp_path, cli):
    """Nobody counted their steps, and no machine is known."""
    path, out = written(tmp_path / "tokens.jsonl", as_rows(ours)), tmp_path / "results"
    folder = imported(cli, path, "--out", out).out.strip()
    shutil.copytree(ours.attrs["folder"], out / "ours")
    report = cli("report", "--out", out).out
    assert report.count("###") == 2 and "AR, which differs in the prompt set (import --prompts)" in report
    for command in (
        ("report", folder, "--all", "--explain"),
        ("report", folder, "--over", "seed"),
        ("report", folder, "--html", tmp_path / "page.html"),
        ("report", folder, "--long", "--to", tmp_path / "long.parquet"),
        ("figure", "pictures", folder, "--to", tmp_path / "pictures.png"),
        ("show", folder),
        ("status", "--out", out),
        ("export", "dataset", folder, "--to", tmp_path / "dataset"),
    ):
        outcome = cli(*command)
        assert outcome.code == 0, f"{command}: {outcome.err}"
        assert not re.search(r"\bnan\b", outcome.out, re.IGNORECASE), command
    assert "omit these runs, whose tokens come from other programs" in cli("methods", folder).err


def test_seeds_of_another_program_are_no_contradiction_and_copies_are_reported(ours, tmp_path, cli):
    path = written(tmp_path / "t.jsonl", as_rows(ours, seed=7))
    folder = imported(cli, path, "--prompts", "shapes", "--out", tmp_path).out.strip()
    assert [row["status"] for row in verify(folder) if row["check"] == "prompts"] == ["ok"]
    outcome = imported(cli, written(tmp_path / "t.jsonl", as_rows(ours)[:2] * 2), "--out", tmp_path)
    assert "warning: 2 images are exact copies of others (image 3 of 1, image 4 of 2)" in outcome.err
    assert "cop" not in imported(cli, written(tmp_path / "u.jsonl", as_rows(ours)), "--out", tmp_path).err


@pytest.mark.parametrize(("kind", "asked", "verdict"), [
    ("raw", None, "consistent"), ("conditional-tempered", None, "consistent"), ("raw", "tempered", OTHERS),
    ("none", None, OTHERS),
])  # fmt: skip
def test_what_log_p_is_is_found_and_a_kind_that_it_is_not_is_refused(kind, asked, verdict, ours, tmp_path, cli):
    sampling = replace(find_model("shapes").sampling(), temperature=0.9, top_k=100, top_p=0.9)
    options = ("--temperature", "0.9", "--top-k", "100", "--top-p", "0.9", "--out", tmp_path)
    logp = np.full((4, 256), -3.0) if kind == "none" else log_p_of(load_model("shapes"), ours, sampling, [kind])[kind]
    rows = [row | {"logp": np.maximum(of_row, -99).tolist()} for row, of_row in zip(as_rows(ours), logp, strict=True)]
    folder = imported(cli, written(tmp_path / "t.jsonl", rows), *options).out.strip()
    audit = audit_run(folder, explain=False, keep=False, logp=asked)
    assert audit["logp_kind"] == (None if verdict == OTHERS else kind)
    assert (audit["verdict"] == OTHERS) == (verdict == OTHERS)
    assert any("log p is the model's" in line for line in notes(audit)) == (audit["logp_kind"] not in (None, "sampled"))
    assert audit["logp_fits"] == (None if kind == "none" else kind)


def test_a_few_wrong_log_p_leave_the_kind_of_the_others_and_are_counted(ours, tmp_path, cli):
    sampling = replace(find_model("shapes").sampling(), temperature=0.9, top_k=100)
    logp = log_p_of(load_model("shapes"), ours, sampling, ["raw"])["raw"]
    logp[:, ::10] = -30.0
    rows = [row | {"logp": of_row.tolist()} for row, of_row in zip(as_rows(ours), logp, strict=True)]
    path = written(tmp_path / "t.jsonl", rows)
    folder = imported(cli, path, "--temperature", "0.9", "--top-k", "100", "--out", tmp_path).out.strip()
    audit = audit_run(folder, explain=False, keep=False)
    assert audit["logp_kind"] is None and audit["logp_nearest"] == "raw" and audit["verdict"] == OTHERS
    assert audit["agreement"]["log p"]["beyond"] == pytest.approx(26 / 256)
    assert any("no kind of log p fits all tokens; compared with raw (" in line for line in notes(audit))


def test_wrong_log_p_of_tokens_that_fit_is_not_said_of_the_tokens(ours, tmp_path, cli, monkeypatch):
    monkeypatch.setattr("specbench.checks.likely_causes.likely_causes", lambda *_: ([], []))
    for name, logp, asked, said in (("none", None, None, "of an unknown kind"), ("ours", 0, "raw", "sampling")):
        rows = [row | {"logp": [-3.0] * 256} if logp is None else row for row in as_rows(ours)]
        folder = imported(cli, written(tmp_path / f"{name}.jsonl", rows), "--out", tmp_path).out.strip()
        audit = audit_run(folder, keep=False, logp=asked)
        assert audit["verdict"] == OTHERS and audit["failed"] and not audit["deviates"] and audit["cause"] is None
        assert audit["sentence"].startswith("the tokens fit samples of") and said in audit["sentence"]


@pytest.mark.parametrize(("change", "problem"), [
    ({"tokens": [2**64 - 1] * 256}, "image 1: slot 0 holds 18446744073709551615, not an image id (0 to 511)"),
    ({"seed": 1.5}, "image 1: invalid seed 1.5, which must be a whole number from 0 to "),
    ({"seconds": 0}, "invalid seconds 0, which must be a number above 0"),
    ({"batch": 0}, "invalid batch 0, which must be a whole number from 1"),
    ({"tokens": [1] * 255}, "image 1: 255 tokens, but an image of this model has 256"),
    ({"tokens": [1] * 255 + [9999]}, "image 1: slot 255 holds 9999, not an image id (0 to 511)"),
    ({"tokens": ["a"] * 256}, "image 1: tokens are not a list of whole numbers"),
    ({"tokens": [1.5] * 256}, "image 1: tokens are not a list of whole numbers"),
    ({"tokens": None}, "image 1: tokens are not a list of whole numbers"),
    ({"prompt": "a red dog"}, "image 1: 'a red dog' is not a prompt of 'shapes'"),
    ({"prompt": "a red dog", "prompt_id": "single_object-54af117f"},
     "'a red dog' is not prompt single_object-54af117f of 'shapes', which is 'a square on a smooth background'"),
    ({"prompt": 5}, "image 1: its prompt is not text"),
    ({"logp": [0.1] * 256}, "image 1: invalid logp: a value above 0"),
    ({"logp": [-1.0]}, "invalid logp: 1 values of 256 tokens"),
    ({"logp": -1.0}, "image 1: invalid logp, which must be a list of numbers"),
    ({"seed": 2**70}, "invalid seed 1180591620717411303424, which must be"),
    ({"seconds": "soon"}, "image 1: invalid seconds soon, which must be a number above 0"),
])  # fmt: skip
def test_what_is_no_image_is_reported_in_one_line(change, problem, ours, tmp_path, cli):
    rows = as_rows(ours)
    rows[0] |= change
    path = written(tmp_path / "t.jsonl", rows)
    imported(cli, path, "--prompts", "shapes", "--out", tmp_path).refused(problem, alone=True)


@pytest.mark.parametrize(("content", "problem"), [
    ("", "has none of the columns prompt, tokens"),
    ("{", "cannot be read: line 1 is not JSON"),
    ('{"prompt": "x"}\n\n{"', "line 3 is not JSON"),
    (f'{{"prompt": "a red dog", "tokens": {[1] * 256}}}', "t.jsonl: image 1: prompt '"),
    (
        "".join(f'{{"prompt": "{text}", "prompt_id": 0, "tokens": [1]}}\n' for text in "xxy"),
        "prompt_id '0' has two different prompts, in image 1 and 3",
    ),
    ('{"prompt": "x"}\n', "has no column 'tokens'"),
    ("[1]\n", "each line must be one object"),
    ('{"prompt": "x", "latency_ms": 3}\n', "t.jsonl: ignored columns: latency_ms"),
    ('{"Prompt": "x", "token_ids": [3.0], "logprobs": [-1]}\n',
     "Prompt (did you mean 'prompt'?), token_ids (did you mean 'tokens'?), logprobs (did you mean 'logp'?) ("),
    ('{"tokens": [1]}', "has no column 'prompt'"),
])  # fmt: skip
def test_a_file_without_images_is_reported_in_one_line(content, problem, tmp_path, cli):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    imported(cli, path, "--out", tmp_path).refused(problem, "t.jsonl")


def test_pipes_single_values_and_too_much_are_refused_before_they_are_read(tmp_path, cli, monkeypatch):
    os.mkfifo(tmp_path / "pipe.npz")
    os.mkfifo(tmp_path / "pipe.parquet")
    np.savez(tmp_path / "scalar.npz", prompt=np.array("x"), tokens=np.array(1))
    large = written(tmp_path / "large.parquet", [{"prompt": "x", "tokens": [1] * 4000}])
    problems = {name: "not a regular file" for name in ("pipe.npz", "pipe.parquet")}
    problems["scalar.npz"] = "'prompt' is a single value"
    for name, what in problems.items():
        imported(cli, tmp_path / name, "--out", tmp_path).refused(what, alone=True)
    monkeypatch.setattr("specbench.runs.token_files.MAX_BYTES", 100)
    assert "too large" in imported(cli, large, "--out", tmp_path).err
    monkeypatch.setattr("specbench.runs.token_files.MAX_BYTES", large.stat().st_size)
    assert "too large" in imported(cli, large, "--out", tmp_path).err, "its content is what counts"


class OwnIds(Tiny):
    """Its image ids follow 100 ids of text in the vocabulary; the end of a row is 7."""

    def table_ids(self, tokens):
        return (tokens + 100).where(tokens < 5, tokens.new_tensor(7))


def test_ids_of_the_vocabulary_are_read_with_and_without_row_ends(tmp_path):
    model, whole = OwnIds(), [[1, 2, 5, 3, 4, 5]]
    for streams in ([[1, 2, 3, 4]], whole, [[101, 102, 103, 104]], [[101, 102, 7, 103, 104, 7]]):
        rows = read_stream([np.array(stream) for stream in streams], model, tmp_path, None)
        assert [row.tolist() for row in rows] == whole


@pytest.mark.parametrize(("stream", "problem"), [
    ([101, 102, 103, 104, 101, 7], "slot 2 holds 103, but the grammar has 7 (the end of a row)"),
    ([101, 102, 103, 50], "slot 4 holds 50, a token of text or grammar, not of the image"),
    ([101, 102, 103], "3 tokens, but an image of this model has 4, or 6 with row ends"),
])  # fmt: skip
def test_tokens_of_text_and_missing_row_ends_are_reported_with_their_slot(stream, problem, tmp_path):
    refused(re.escape(problem), read_stream, [np.array(stream)], OwnIds(), tmp_path, None)


@pytest.mark.slow
def test_tokens_of_our_own_are_consistent_in_a_sentence_and_a_false_claim_is_not(ours, tmp_path, cli, monkeypatch):
    path = written(tmp_path / "t.jsonl", as_rows(ours))
    false = imported(cli, path, "--prompts", "shapes", "--cfg", "5", "--out", tmp_path).out.strip()
    true = imported(cli, path, "--prompts", "shapes", "--out", tmp_path).out.strip()
    outcome = cli("audit", "--run", true, "--json")
    assert outcome.code == 0 and json.loads(outcome.out)[0]["sentence"].startswith("consistent with samples of shapes")
    with monkeypatch.context() as patch:
        patch.setattr("specbench.checks.likely_causes.likely_causes", None)  # verify seeks none
        assert "audit --run also searches for likely causes" in cli("verify", true).out
    lie = cli("audit", "--run", false)
    assert lie.code == GATE and lie.err.count("likely cause: guidance 1.") == 1
    assert "the tokens are consistent (p = " in lie.err
    assert "searching for likely causes in 4 images: takes about" in lie.err


@pytest.mark.slow
def test_the_lines_for_transformers_draw_samples_of_the_model_and_a_fault_in_them_is_named(tmp_path, cli, monkeypatch):
    checkpoints.janus.write(tmp_path / "janus")
    page = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if "JanusFor" in block).partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("".join(f"a cat on mat {number}\n" for number in range(60)))
    torch.manual_seed(1)
    for fault, verdict in (("", "consistent"), ("temperature=0.5, ", "likely cause: temperature 0.")):
        lines = code.replace("deepseek-community/Janus-Pro-1B", "janus")
        lines = lines.replace("guidance_scale", f"{fault}guidance_scale")
        exec(lines, {})
        line = "import tokens --model janus --weights janus --scale tiny --dtype float32 --from tokens.jsonl"
        folder = cli(*line.split(), "--program", "transformers").out.strip()
        assert verdict in cli("audit", "--run", folder).err


def test_a_prompt_that_differs_from_the_ids_that_a_program_read_is_named(tmp_path, cli):
    checkpoints.janus.write(tmp_path / "janus")
    model = checkpoints.loaded("janus", tmp_path / "janus")
    rows = [
        {"prompt": f"a {what} cat", "tokens": [1] * 16, "prompt_token_ids": model.prompt_ids(f"a {read} cat")[0]}
        for what, read in (("red", "red"), ("green", "blue"))
    ]
    line = ["import", "tokens", "--model", "janus", "--scale", "tiny", "--dtype", "float32", "--program", "vLLM"]
    line += ["--ids", "codes", "--weights", tmp_path / "janus", "--out", tmp_path / "results", "--from"]
    wrong = cli(*line, written(tmp_path / "t.jsonl", rows))
    wrong.refused("image 2: the program read the prompt '", "<|User|>: a blue cat", "<|User|>: a green cat")
    green = model.prompt_ids("a green cat")[0]
    for ids, code in ((green[:-1], 2), ([-1], 2), ("a blue cat", 2), (None, 0), (green, 0)):
        rows[1]["prompt_token_ids"] = ids
        assert cli(*line, written(tmp_path / "t.jsonl", rows)).code == code
    rows = [{"prompt": "a red circle", "tokens": [1] * 256, "prompt_token_ids": [1, 2]}]
    line = ["import", "tokens", "--model", "shapes", "--ids", "codes", "--program", "vLLM", "--out", tmp_path, "--from"]
    assert "prompt_token_ids are not compared" in cli(*line, written(tmp_path / "t.jsonl", rows)).err


def test_prompt_ids_of_a_network_of_the_user_are_compared():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LoadedModel(LlamaForCausalLM(config), (2, 2), range(4), lambda text: ([5, len(text)], [5]))
    refuse_other_prompt(model, "a cat", [5, 5], "f")
    refused(r"read the prompt '\[5, 6\]' instead of '\[5, 5\]'", refuse_other_prompt, model, "a cat", [5, 6], "f")


@pytest.mark.slow
def test_raw_log_p_over_all_words_as_vllm_returns_it_is_found(tmp_path, cli):
    checkpoints.tar.write(tmp_path / "tar")
    network = Qwen2ForCausalLM.from_pretrained(tmp_path / "tar").eval()
    tokenizer, first = Tokenizer.from_file(str(tmp_path / "tar" / "tokenizer.json")), checkpoints.tar.FIRST
    draws, rows = torch.Generator().manual_seed(1), []
    for number in range(40):
        turn = "<|im_start|>{}\n{}<|im_end|>\n".format
        asked = turn("system", "You are a helpful assistant.") + turn("user", f"cat {number}")
        ids, logp = tokenizer.encode(asked + "<|im_start|>assistant\n<im_start><S0>").ids, []
        for _ in range(16):
            with torch.inference_mode():
                raw = network(torch.tensor([ids])).logits[0, -1]
            token = first + int(torch.multinomial((raw[first:] / 0.8).softmax(-1), 1, generator=draws))
            logp.append(float(raw.log_softmax(-1)[token]))
            ids.append(token)
        rows.append({"prompt": f"cat {number}", "tokens": [token - first for token in ids[-16:]], "logp": logp})
    line = f"import tokens --model tar-1.5b --weights {tmp_path}/tar --scale tiny --dtype float32 --ids codes"
    options = (
        "--program", "vLLM", "--temperature", "0.8", "--top-k", "0", "--top-p", "1", "--out", tmp_path / "results",
    )  # fmt: skip
    folder = cli(*line.split(), "--from", written(tmp_path / "t.jsonl", rows), *options).out.strip()
    outcome = cli("audit", "--run", folder)
    assert outcome.code == 0, outcome.err
    assert (
        "log p is the model's log p before temperature and truncation, over the whole vocabulary, as vLLM"
        in outcome.err
    )


def test_imported_tokens_of_a_plug_ins_model_are_audited(tmp_path, cli, monkeypatch):
    """The run records the plug-in's code, as a decoded run does; without it, no audit accepts the plug-in."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "examples" / "plugin")
    greys, out = "toy_plugin.greys:MODEL", tmp_path / "results"
    asked = {"model": greys, "prompts": "toy_plugin:PROMPTS", "samples": 4, "threads": 1, "quiet": True}
    (folder,) = api.run(decoder=["ar"], out=tmp_path / "ours", **asked).folders
    path = written(tmp_path / "theirs.jsonl", as_rows(RunStore(folder).samples()))
    done = cli("import", "tokens", "--model", greys, "--program", "mine", "--from", path, "--out", out)
    run = done.out.strip()
    assert done.code == 0 and RunStore(Path(run)).info().spec.model_code == RunStore(folder).info().spec.model_code
    done = cli("audit", "--run", run, "--recompute", "--model", greys)
    assert done.code == 0 and "consistent with samples of greys" in done.err
    assert "--model requires --recompute" in cli("audit", "--run", run, "--model", greys).err
    for name in [name for name in sys.modules if name.startswith("toy_plugin")]:
        del sys.modules[name]
