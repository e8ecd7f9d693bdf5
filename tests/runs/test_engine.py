"""Tokens from the address of a serving engine: what is asked, what is stored, what is refused."""

import json
import time
from contextlib import contextmanager
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from served import served, sglang, vllm

from specbench import api
from specbench.errors import BAD_INPUT, FAILURE
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore

PROMPTS = "a cat\na dog\ntwo cats\na red dog\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    (place / "tar").mkdir()
    checkpoints.tar.write(place / "tar")
    (place / "p.txt").write_text(PROMPTS)
    return place


@contextmanager
def engine(respond, change=lambda path, body, content: content):
    """An engine whose answers are changed, and what it was asked."""
    asked = []

    def answer(path, body):
        asked.append((path, body))
        return change(path, body, respond(path, body))

    with served(answer) as address:
        yield address, asked


def drawn(cli, folder, address, out, *more):
    line = f"import tokens --from {address} --model tar-1.5b --weights {folder}/tar --scale tiny --dtype float32"
    return cli(*line.split(), "--prompts", folder / "p.txt", "--top-k", 20, "--out", out, *more)


@pytest.mark.parametrize(("respond", "name"), [(vllm, "vLLM 0.32.0"), (sglang, "SGLang 0.5.23")])
def test_an_engine_draws_images_that_become_a_run_in_a_table_with_ar(respond, name, folder, tmp_path, cli):
    with engine(respond) as (address, asked):
        place = Path(drawn(cli, folder, address, tmp_path).out.strip())
        together = Path(drawn(cli, folder, f"{address}/v1/", tmp_path, "--batch", 4).out.strip())
    model = checkpoints.loaded("tar-1.5b", folder / "tar")
    rows, bodies = RunStore(place).samples(), [body for _, body in asked if body]
    prompts = [body.get("prompt") or body["input_ids"] for body in bodies]
    wanted = [model.prompt_ids(text)[0] for text in PROMPTS.splitlines()]
    assert prompts == [wanted[:1], *([ids] for ids in wanted), wanted[:1], wanted], "the first of each call is a probe"
    ids = model.table_ids(torch.from_numpy(np.stack(rows["tokens"]))).tolist()
    answer = respond("/v1/completions" if respond is vllm else "/generate", bodies[1])
    assert ids[0] == (answer["choices"][0]["token_ids"] if respond is vllm else answer[0]["output_ids"])
    assert np.stack(rows["logp"]).tolist() == [[-1.5] * 16] * 4
    told = read_info(place).engine
    assert f"{told['program']} {told['version']}" == name and told["address"] == address and told["fingerprint"]
    single, batched = (api.report(run).squeeze() for run in (place, together))
    assert single["latency_ms"] > 0 and single["tokens_per_second"] > 0 and np.isnan(single["speedup"])
    assert np.isnan(batched["latency_ms"]) and batched["images_per_hour"] > 0 and place != together
    report = cli("report", place).out
    assert "tokens per second" in report and "the times are of another program" in report and "theirs" in report


def test_what_is_asked_names_every_parameter_and_the_ids_of_the_image_alone(folder, tmp_path, cli):
    model = checkpoints.loaded("tar-1.5b", folder / "tar")
    image = list(range(checkpoints.tar.FIRST, checkpoints.tar.FIRST + checkpoints.tar.CODES))
    claim = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.0}
    claim |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True}
    for respond, path in ((vllm, "/v1/completions"), (sglang, "/generate")):
        with engine(respond) as (address, asked):
            drawn(cli, folder, address, tmp_path, "--limit", 1, "--top-k", 0)
            every = asked[-1][1]
            drawn(cli, folder, address, tmp_path, "--limit", 1, "--temperature", 0.9, "--min-p", 0.1)
        assert asked[-1][0] == path
        body = asked[-1][1]
        sampling = body.get("sampling_params", body)
        assert claim.items() <= sampling.items()
        if respond is vllm:
            assert body["allowed_token_ids"] == image and body["max_tokens"] == 16 and body["return_token_ids"]
        else:
            barred = {str(number) for number in range(model.backbone.embed_tokens.num_embeddings)} - {*map(str, image)}
            assert sampling["logit_bias"].keys() == barred and sampling["max_new_tokens"] == 16
        assert every.get("sampling_params", every)["top_k"] == -1, "0 is no valid top-k of SGLang"


def test_a_run_goes_on_where_it_was_cut_off(folder, tmp_path, cli, monkeypatch):
    monkeypatch.setattr("specbench.runs.engine.PAUSE_S", 0)
    left = [3]

    def dies(path, body, content):
        if path == "/v1/completions":
            left[0] -= 1
            return content if left[0] >= 0 else 503
        return content

    with engine(vllm, dies) as (address, asked):
        drawn(cli, folder, address, tmp_path).refused("503: refused", "run the same command again", code=FAILURE)
        assert len([body for _, body in asked if body]) == 7, "a probe, two images, four tries"
        left[0] = 9
        asked.clear()
        whole = drawn(cli, folder, address, tmp_path)
        assert "2 of 4 images already stored" in whole.err
        assert len([body for _, body in asked if body]) == 3 and len(RunStore(whole.out.strip()).samples()) == 4
        with engine(vllm) as (elsewhere, _):
            again = drawn(cli, folder, elsewhere, tmp_path)
    assert again.out == whole.out and "all 4 images already stored" in again.err, "the address makes no other run"


def test_rows_that_the_grammar_closes_are_a_request_each_and_an_image_takes_the_time_of_all(tmp_path, cli):
    def slow(path, body, content):
        time.sleep(0.1 if body else 0)
        return content

    (tmp_path / "emu").mkdir()
    checkpoints.emu35.write(tmp_path / "emu")
    (tmp_path / "p.txt").write_text("a cat\n")
    with engine(vllm, slow) as (address, asked):
        line = (
            f"import tokens --from {address} --model emu3.5 --weights {tmp_path}/emu --scale tiny --cfg 1 --served tar"
        )
        outcome = cli(*line.split(), "--prompts", tmp_path / "p.txt", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert RunStore(outcome.out.strip()).samples()["latency_ms"].item() >= 400
    first, *rows = [body for _, body in asked if body]
    assert [body["max_tokens"] for body in rows] == [4] * 4
    ends = [rows[number + 1]["prompt"][0][-1] for number in range(3)]
    assert ends == [checkpoints.emu35.SPECIALS["<|extra_200|>"]] * 3, "each goes on after the end of the row before"
    assert len(rows[3]["prompt"][0]) == len(first["prompt"][0]) + 15


@pytest.mark.parametrize(("change", "problem"), [
    (lambda choice: choice.pop("token_ids"), "no token ids in the answer"),
    (lambda choice: choice["token_ids"].pop(), "tokens instead of the requested 4"),
    (lambda choice: choice["token_ids"].__setitem__(2, "5"), "returned the id '5', which is not a whole number"),
    (lambda choice: choice["token_ids"].__setitem__(2, 5.0), "returned the id 5.0, which is not a whole number"),
    (lambda choice: choice["token_ids"].__setitem__(2, 5), "image 1: slot 2 holds 5, a token of text"),
    (lambda choice: choice["logprobs"]["token_logprobs"].pop(), "returned 3 log p for 4 tokens"),
    (lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(1, 3.0), "returned log p 3, above 0"),
    (lambda choice: choice["prompt_token_ids"].append(1), "read a prompt that differs from the ids"),
])  # fmt: skip
def test_answers_that_are_no_image_are_refused_in_a_line(change, problem, folder, tmp_path, cli):
    def changed(path, body, content):
        if path == "/v1/completions":
            content = json.loads(json.dumps(content))
            change(content["choices"][0])
        return content

    with engine(vllm, changed) as (address, _):
        drawn(cli, folder, address, tmp_path).refused("error: http://127.0.0.1", problem)


@pytest.mark.parametrize(("page", "content", "problem"), [
    ("/v1/completions", {"error": {"message": "out of memory"}}, "returned an error: out of memory"),
    ("/v1/completions", {"object": "error", "message": "too long"}, "returned an error: too long"),
    ("/v1/completions", {"choices": [], "usage": {"prompt_tokens": 9}}, "returned 0 images for 1 prompts"),
    ("/v1/completions", b"<html>", "returned no valid JSON: Expecting value"),
    ("/v1/completions", (400, {"error": None, "code": None}), 'returned status 400: {"error": null, "code": null}'),
    ("/v1/models", b"<html>", "give the address of an engine"),
    ("/v1/models", {"error": "no"}, "lists no models at /v1/models"),
])  # fmt: skip
def test_pages_that_are_no_answer_are_refused_in_a_line(page, content, problem, folder, tmp_path, cli):
    with engine(vllm, lambda path, body, usual: content if path == page else usual) as (address, _):
        drawn(cli, folder, address, tmp_path).refused(problem, alone=True)


@pytest.mark.parametrize(("page", "content", "warned"), [
    ("/version", 404, False), ("/version", ["0.32"], False), ("/version", {"commit": "a"}, False),
    ("/v1/models", {"data": [{"id": "tar", "owned_by": "llamacpp"}]}, True),
])  # fmt: skip
def test_an_engine_without_a_version_and_one_of_another_name_draw(page, content, warned, folder, tmp_path, cli):
    with engine(vllm, lambda path, body, usual: content if path == page else usual) as (address, _):
        outcome = drawn(cli, folder, address, tmp_path, "--limit", 1)
    assert outcome.code == 0, outcome.err
    assert ("models of 'llamacpp', not of vLLM or SGLang" in outcome.err) == warned


@pytest.mark.parametrize(("more", "code", "problem"), [
    (["--served", "qwen"], BAD_INPUT, "serves tar, not qwen"),
    (["--model", "tar-7b", "--weights", "", "--random-weights"], BAD_INPUT, "serves tar, not tar-7b or tar-7b-v0.1"),
    (["--batch", "auto"], BAD_INPUT, "--batch auto"),
    (["--ids", "codes"], BAD_INPUT, "an engine always returns ids of the model's vocabulary"),
    (["--entropy-scale", "2"], BAD_INPUT, "vLLM offers neither --entropy-scale nor --top-n-sigma"),
    (["--from", "http://127.0.0.1:9"], FAILURE, "http://127.0.0.1:9/v1/models does not answer: Connection refused"),
    (["--from", "http://127.0.0.1:x"], BAD_INPUT, "http://127.0.0.1:x/v1/models: nonnumeric port"),
])  # fmt: skip
def test_other_engines_and_settings_are_refused_in_a_line(more, code, problem, folder, tmp_path, cli):
    with engine(vllm) as (address, _):
        drawn(cli, folder, address, tmp_path, *more).refused(problem, code=code, alone=True)


def test_models_that_no_engine_serves_are_refused_in_a_line(folder, tmp_path, cli):
    problems = {
        "shapes": "an engine takes prompts as token ids", "janus": "are not in the served model's vocabulary",
        "simplear": "does not offer guidance, but simplear+random+tiny would use 6",
    }  # fmt: skip
    with engine(vllm) as (address, _):
        for name, problem in problems.items():
            line = f"import tokens --from {address} --served tar --model {name} --out {tmp_path}"
            more = [] if name == "shapes" else ["--random-weights", "--scale", "tiny", "--prompts", folder / "p.txt"]
            more += ["--cfg", 1] if name == "janus" else []
            cli(*line.split(), *more).refused(problem, alone=True)


def test_audit_engine_draws_and_then_audits_the_run(folder, tmp_path, cli, monkeypatch):
    audited = []
    monkeypatch.setattr("specbench.cli.checks.audit_runs", lambda runs, *more: audited.extend(runs))
    with engine(vllm) as (address, _):
        line = (
            f"audit --engine {address} --model tar-1.5b --weights {folder}/tar --scale tiny --limit 2 --dtype float32"
        )
        outcome = cli(*line.split(), "--prompts", folder / "p.txt", "--out", tmp_path)
        assert outcome.code == 0 and len(RunStore(audited[0]).samples()) == 2
        assert "--engine excludes DECODER" in cli("audit", "sjd", "--engine", address).err
    assert "--engine ADDRESS" in cli("audit", "--limit", 3).err
    assert "http://127.0.0.1:8000" in cli("audit", "--engine", "127.0.0.1:8000").err
