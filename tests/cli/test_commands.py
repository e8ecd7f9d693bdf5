"""Commands run, score, report, show and list on the embedded model: results on stdout, messages on stderr,
documented keys and exit codes. It concerns several modules: the modules of these commands."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from forked import forked_command
from refusals import refused

import specbench
from specbench.errors import SpecbenchError
from specbench.reporting import demo
from specbench.runs.executors import local
from specbench.runs.plan import make_plan
from specbench.runs.run_progress import Reporter
from specbench.runs.runner import announcement
from specbench.runs.settings import merge, run_settings
from specbench.store.merge_shards import incomplete_shards, merge_runs
from specbench.store.run_folders import find_runs, shards_in
from specbench.system.console import prepare_streams
from specbench.system.images import read_picture

PROGRAM = f"{shlex.quote(sys.executable)} -m specbench"
"""Beginning of a line for a shell; the checkout's path may have spaces."""
RUN = ("run", "--decoder", "ar,sjd", "--limit", "2", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs of `RUN`, made by the command line."""
    path = tmp_path_factory.mktemp("runs")
    done = forked_command([*RUN, "--json"], cwd=path)
    assert done.returncode == 0, done.stderr
    assert [row["run_id"].rpartition("-")[0] for row in json.loads(done.stdout)] == ["shapes-ar", "shapes-sjd"]
    return path


def shell(path, *arguments, **variables) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "specbench", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, capture_output=True, text=True, cwd=path, env=env, timeout=600)


@pytest.fixture
def there(folder, cli, monkeypatch):
    monkeypatch.chdir(folder)
    return cli


def test_the_same_command_again_decodes_nothing(there):
    assert there(*RUN, "--quiet").err == ""
    outcome = there(*RUN)
    assert outcome.code == 0 and "4 of 4 images already done" in outcome.err and len(outcome.out.splitlines()) == 2


@pytest.mark.parametrize("command, encoding", [
    (("report",), "ascii:surrogateescape"),  # LC_ALL=C
    (("report", "--format", "latex"), "ascii"),
])  # fmt: skip
def test_an_ascii_terminal_gets_every_line(folder, command, encoding):
    whole, ascii_only = shell(folder, *command), shell(folder, *command, PYTHONIOENCODING=encoding)
    assert ascii_only.returncode == 0 and ascii_only.stderr.isascii()
    assert ascii_only.stdout.encode().decode("unicode-escape" if "\\" not in whole.stdout else "ascii") == whole.stdout


@pytest.mark.parametrize(("encoding", "errors", "printed"), [
    ("utf-8", "surrogateescape", "é → ".encode() + b"n\xff"), ("utf-8", "strict", "é → n\\udcff".encode()),
    ("ascii", "surrogateescape", b"\\u00e9 \\u2192 n\xff"), ("ascii", "replace", b"? ? n?"),
])  # fmt: skip
def test_a_name_that_is_not_utf_8_keeps_its_bytes_and_a_letter_outside_the_encoding_is_its_number(
    encoding, errors, printed, monkeypatch
):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))
    prepare_streams()
    print("é → n\udcff", end="", flush=True)
    assert written.getvalue() == printed


@pytest.mark.parametrize("command", ["list decoders", "list nothing"])
def test_a_closed_stdout_is_one_line(folder, command):
    program = f"{PROGRAM} {command} >&-"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, cwd=folder, timeout=600)
    first, *rest = done.stderr.splitlines()
    assert first == "warning: stdout is closed, so output to it is not printed"
    assert (done.returncode, len(rest)) == ((2, 1) if "nothing" in command else (0, 0))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full")
def test_a_full_disk_behind_a_stream_is_one_line_or_nothing_and_ends_no_run(folder):
    def typed(line: str) -> subprocess.CompletedProcess:
        return subprocess.run(f"{PROGRAM} {line}", shell=True, capture_output=True, text=True, cwd=folder)

    assert typed("list decoders >/dev/full").stderr.splitlines() == ["error: No space left on device (free some space)"]
    outcome = typed("run --decoder ar --limit 1 --threads 1 --out logged 2>/dev/full")
    assert (outcome.returncode, outcome.stdout.startswith("logged/shapes-ar-")) == (0, True)
    assert typed("run --decoder nothing 2>/dev/full").returncode == 2


def test_output_goes_through_links_and_to_stdout(there, tmp_path):
    for number, output in enumerate((("--to",), ("--format", "json", "--to"), ("--html",), ("gsd-1", "--to"))):
        (link := tmp_path / f"link-{number}").symlink_to(tmp_path / f"file-{number}")
        assert there("report", *output, link).out.split() == [str(link)]
        assert link.is_symlink() and link.stat().st_size > 100
    printed = there("report", "--format", "json").out
    for stdout in ("-", "/dev/stdout"):
        done = shell(".", "report", "--format", "json", "--to", stdout)
        assert done.stdout == printed and done.returncode == 0, "and no name of a file behind it"
    assert not os.path.exists("-")


_TINY = {"model": "llamagen", "random_weights": True, "scale": "tiny", "prompts": "shapes", "threads": 1, "samples": 2}


def test_ar_decodes_the_first_prompts_of_a_run_without_it_and_a_longer_run_decodes_it_no_further(tmp_path):
    notes = []

    class Notes(Reporter):
        def note(self, text):
            notes.append(text)

    run = _TINY | {"decoder": "sjd", "baseline": 2, "out": str(tmp_path)}
    assert specbench.run(Notes(), **run, limit=3).done == 8 and "3 prompts of shapes, 6 images with sjd" in notes[0]
    assert notes[1] == "baseline for the speed-up: ar on the first 2 prompts (to omit it: --baseline 0)"
    states = {row["decoder"].split()[0]: row for row in specbench.status(tmp_path)}
    assert {name: (row["images"], row["wanted"]) for name, row in states.items()} == {"ar": (2, 2), "sjd": (6, 6)}
    sjd = specbench.report(out=tmp_path).set_index("decoder").loc["sjd"]
    assert sjd["pairs"] == 2 and sjd["speedup_note"] == "over the 2 images in common with AR"
    left = {row["decoder"]: (row["images"], row["done"]) for row in specbench.dry_run(**run, limit=5)}
    assert left == {"ar": (2, 2), "sjd": (10, 6)}
    notes.clear()
    assert specbench.run(Notes(), **run, limit=4).done == 2
    assert notes[1] == "baseline for the speed-up: ar on the first 2 prompts, stored already"


@pytest.mark.parametrize("setting", [{"batch": 4}, {"workers": 2}, {"decoder": ["ar", "sjd"]}, {"baseline": 0}])
def test_no_baseline_is_added_if_it_says_nothing_or_ar_is_there(setting, monkeypatch):
    monkeypatch.setattr("specbench.runs.decoder_args.BASELINE_PROMPTS", 8)
    assert [row["images"] for row in specbench.dry_run(**{"decoder": "sjd", "limit": 9} | setting)] in ([9], [9, 9])


def test_parts_of_a_run_share_its_baseline_and_say_how_much_of_it_is_theirs(tmp_path):
    """Of two samples a prompt, all first ones are in the first of two parts."""
    common = _TINY | {"decoder": "sjd", "limit": 4, "baseline": 2, "out": str(tmp_path)}
    for part in ("1/2", "2/2"):
        assert specbench.run(shard=part, **common).problem() is None
    assert incomplete_shards(shards_in(tmp_path)) == []
    error = refused("only shards of runs", find_runs, tmp_path)
    assert error.try_this == f"merge them first: specbench merge --out {tmp_path}"
    assert [run.rows for run in merge_runs(out=tmp_path)] == [2, 8]
    settings = {"decoder": "sjd", "limit": 12, "baseline": 8, "shard": "1/2"}
    [_, note] = announcement([make_plan(merge(run_settings(), settings, env={}))])
    assert note.startswith("baseline for the speed-up: ar on 4 of the first 8 prompts")
    [_, note] = announcement([make_plan(merge(run_settings(), {"decoder": "sjd", "baseline": 1}, env={}))])
    assert note.startswith("baseline for the speed-up: ar on the first prompt (")


def test_the_command_that_adds_ar_names_the_folder_where_the_run_is_now(cli, tmp_path):
    (tmp_path / "my.csv").write_text("id,words\n1,a red circle\n2,a blue square\n")
    run = ("run", "--limit", "1", "--threads", "1", "--decoder", "sjd")
    cli(*run, "--prompts", tmp_path / "my.csv", "--prompt-column", "words", "--out", tmp_path / "there")
    (tmp_path / "there").rename(tmp_path / "now here")
    report = cli("report", "--out", tmp_path / "now here").out
    folder = str(tmp_path / "now here")
    assert f"--out '{folder}'" in report and str(tmp_path / "there") not in report
    (command,) = [line for line in report.splitlines() if "To add AR" in line]
    assert cli(*shlex.split(command.partition(": specbench ")[2])).code == 0
    assert "No speed-up" not in cli("report", "--out", folder).out


def test_show_names_the_origin_of_every_setting(there):
    lines = dict(line.split(maxsplit=1) for line in there("show", "sjd").out.splitlines() if " (" in line)
    assert {lines[name].partition(" ")[2] for name in ("guidance", "temperature", "top_p")} == {"(left to the model)"}


def test_every_json_is_one_array_with_names_first(there):
    for what in ("models", "decoders", "metrics", "prompts", "runs"):
        rows = json.loads(there("list", what, "--json").out)
        assert rows and all(next(iter(row)) == "name" for row in rows)
    for command in (("show", "shapes-ar"), ("score",), ("doctor",)):
        assert isinstance(json.loads(there(*command, "--json").out), list)


def test_python_returns_what_the_command_line_prints(there):
    def printed(*arguments):
        return json.loads(there(*arguments, "--json").out)

    assert specbench.dry_run(decoder="ar,sjd", limit=3, threads=1) == printed(*RUN[:3], "--limit", "3", "--dry-run")
    assert specbench.show("shapes-sjd")[0]["numbers"]["nfe"] == printed("show", "shapes-sjd")[0]["numbers"]["nfe"]
    prompt = specbench.show_prompts("shapes", 1)[0]
    assert [prompt] == printed("prompts", "show", "shapes", "--limit", "1")
    assert specbench.show("shapes-sjd", prompt["text"])[0] == printed("show", "shapes-sjd", prompt["text"])[0]


def test_generate_is_the_stored_image_of_the_same_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a red circle\n")
    settings = {"decoder": "sjd", "window": 8, "seed": 5, "threads": 1}
    stored = specbench.load(specbench.run(prompts="mine.txt", samples=2, **settings).folders[0].name)
    generation, second = specbench.generate(["a red circle"] * 2, **settings)  # samples 0 and 1, as of --samples 2
    assert np.array_equal(stored["tokens"][0], generation.tokens) and generation.image.shape == (3, 64, 64)
    assert np.array_equal(stored["tokens"][1], second.tokens) and (second.tokens != generation.tokens).any()
    shown = read_picture(generation.save(tmp_path / "one.png"))
    assert np.array_equal(shown, generation.image.transpose(1, 2, 0))


def test_python_refuses_what_the_command_line_refuses():
    refused("GG", specbench.generate, "a red circle", decoder="gsd", GG=3)
    for of_stored_runs in ({"samples": 2}, {"limit": 1}, {"batch": 4}, {"out": "mine"}):
        refused("unknown setting", specbench.generate, "a red circle", **of_stored_runs)
    refused("cats", specbench.generate, "three cats")
    for settings in ({"decoder": "ar,sjd"}, {"decoder": "sjd", "window": "auto"}):
        refused("several decoders", specbench.generate, "a red circle", **settings)


def test_failed_images_exit_with_3_and_are_rows(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = local.decode

    def broken(model, requests, *rest, **options):
        if "circle" in requests[0].text:
            return [SpecbenchError("NaN logits", exit_code=1)]
        return real(model, requests, *rest, **options)

    monkeypatch.setattr(local, "decode", broken)
    (tmp_path / "mine.txt").write_text("a red square\na red circle\n")
    outcome = cli("run", "--prompts", "mine.txt", "--decoder", "sjd", "--threads", "1")
    assert outcome.code == 3 and "1 of 2 images failed" in outcome.err and "NaN logits" in outcome.err
    assert sorted(specbench.load(outcome.out.strip(), out="results")["status"]) == ["failed", "ok"]
    (tmp_path / "mine.txt").write_text("a red circle\n")
    assert cli("run", "--prompts", "mine.txt", "--decoder", "sjd", "--threads", "1", "--out", "all").code == 3
    cli("score", "--out", "all").refused("no image was decoded; the first failed", "NaN logits")


def test_interrupting_says_how_to_resume(tmp_path):
    command = [sys.executable, "-m", "specbench", "run", "--decoder", "ar", "--limit", "60", "--threads", "1"]
    command += ["--compile", "off"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("results/*/samples/*.parquet")):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "interrupted" in err and "run the same command again to resume" in err and "Traceback" not in err


def test_a_config_file_holds_the_same_settings(there, tmp_path):
    (tmp_path / "c.toml").write_text('decoder = ["ar", "gsd:G=5"]\nseed = 3\ntop-k = 7\n')
    _, row = json.loads(there("run", "--config", tmp_path / "c.toml", "--dry-run", "--json").out)
    assert (row["decoder"], row["options"]["G"], row["seed"], row["top_k"]) == ("gsd", 5, 3, 7)


def test_the_demo_leaves_a_table_and_a_picture(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "SHOWN", ("ar", "sjd"))
    outcome = cli("demo", "--limit", "1", "--compile", "off")
    assert outcome.code == 0, outcome.err
    lines = [line.strip() for line in outcome.out.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    head, *lines = lines[next(place for place, line in enumerate(lines) if line.startswith("decoder")) :]
    assert head.split()[0] == "decoder" and head.split()[-1] == "lossless"
    assert [line.split()[0] for line in lines[:2]] == ["ar", "sjd"] and "too few" in " ".join(lines)
    assert (tmp_path / lines[-1].split()[-1]).read_bytes().startswith(b"\x89PNG")
    first, *_, last = outcome.err.splitlines()
    assert first.startswith("2 decoders draw the same 1 caption") and last.strip().startswith("specbench run")
