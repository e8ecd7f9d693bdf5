"""Downloads by the real client from a hub on the loopback, which serves what it should or anything else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import forked_command, forked_script
from loopback_hub import Hub, loopback_hub

from specbench.errors import INTERRUPTED

REPO, OLD, NEW = "owner/name", "a" * 40, "b" * 40
FETCH = """
from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import WantedFiles, Source
source = Source("the model", "owner/name", ("config.json", "*.safetensors"), "MIT")
try:
    print(WantedFiles(source).fetch().commits["owner/name"])
except SpecbenchError as error:
    print(error.exit_code, error)
"""


@pytest.fixture
def hub(tmp_path):
    with loopback_hub() as served:
        served.put(REPO, OLD, folder(tmp_path / "old", b"old weights"))
        yield served


def folder(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    (path / "other.md").write_text("not asked for")
    return path


def fetch(hub: Hub, home: Path, script: str = FETCH, **variables: str) -> subprocess.CompletedProcess:
    return forked_script(script, env={**os.environ, **hub.env(home), **variables})


def started(hub: Hub, home: Path, *command: str) -> subprocess.Popen:
    """A separate process of Python."""
    env = {**os.environ, **hub.env(home)}
    return subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_without_a_pinned_commit_main_is_taken_and_later_uses_keep_its_commit(hub, tmp_path):
    first = fetch(hub, tmp_path)
    assert first.stdout == f"{OLD}\n"
    assert f"downloading {REPO}, commit {OLD[:7]}: 13 bytes; licence: MIT" in first.stderr
    hub.put(REPO, NEW, folder(tmp_path / "new", b"new weights"))
    away = fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert away.stdout == f"{OLD}\n" and not away.stderr, "a hub that does not answer stops nobody who has the files"
    [weights] = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    weights.unlink()
    again = fetch(hub, tmp_path)
    assert again.stdout == f"{OLD}\n" and f"commit {OLD[:7]}: 11 bytes" in again.stderr
    del hub.commits[REPO][OLD]  # the history was rewritten
    weights.unlink()
    moved = fetch(hub, tmp_path)
    assert moved.stdout == f"{NEW}\n"
    assert f"the hub does not know commit {OLD[:12]}; main is used, at {NEW[:12]}" in moved.stderr


@pytest.mark.parametrize(("name", "sent", "problem"), [
    ("config.json", b"}{", "its git is "), ("model.safetensors", b"new weights", "its sha256 is "),
    ("model.safetensors", b"", "0 bytes instead of 11"),
])  # fmt: skip
def test_a_file_that_is_not_what_the_hub_states_is_refused_when_it_comes_and_later(hub, tmp_path, name, sent, problem):
    hub.spoil = lambda path, data: sent if "/resolve/" in path and path.endswith(name) else data
    come = fetch(hub, tmp_path)
    assert come.stdout.startswith(f"1 {REPO}: {name} differs from what the hub states: {problem}"), come.stdout
    hub.spoil = lambda path, data: data
    assert fetch(hub, tmp_path).stdout == f"{OLD}\n", "it was not kept"
    [path] = (tmp_path / "hf").rglob(f"snapshots/*/{name}")
    path.resolve().write_bytes(path.read_bytes()[::-1])
    refused = fetch(hub, tmp_path)
    assert refused.stdout.startswith("5 ") and "the digest that the hub states" in refused.stdout
    assert "to download it again: rm '" in refused.stdout
    for file in (path.resolve(), path):
        file.unlink()
    assert fetch(hub, tmp_path).stdout == f"{OLD}\n"


def test_a_pinned_commit_that_the_hub_does_not_know_gives_way_to_main(hub, tmp_path):
    pinned = f"from specbench.models import hub_downloads\nhub_downloads.REVISIONS = {{'{REPO}': '{NEW}'}}\n{FETCH}"
    refused = fetch(hub, tmp_path, pinned, SPECBENCH_PINNED_ONLY="1")
    _refused(refused, f"does not know commit {NEW[:12]}", f"SPECBENCH_REVISIONS={REPO}@COMMIT")
    chosen = fetch(hub, tmp_path, pinned, SPECBENCH_REVISIONS=f"{REPO}@{NEW}")
    _refused(chosen, f"has no revision '{NEW}'", "name another revision")
    taken = fetch(hub, tmp_path, pinned)
    assert taken.stdout == f"{OLD}\n"
    assert taken.stderr.count(f"the hub does not know commit {NEW[:12]}; main is used, at {OLD[:12]}\n") == 1
    hub.asked.clear()
    assert fetch(hub, tmp_path, pinned).stdout == f"{OLD}\n" and not hub.asked


def test_a_file_that_replaces_another_file_of_the_hub_is_enough(hub, tmp_path):
    (tmp_path / "old" / "model.bin").write_bytes(b"the same weights")
    either = FETCH.replace('"*.safetensors"', '"*.safetensors|*.bin"')
    assert fetch(hub, tmp_path, either).stdout == fetch(hub, tmp_path, either).stdout == f"{OLD}\n"


@pytest.mark.parametrize(("status", "headers", "problem", "command"), [
    (403, {"X-Error-Code": "GatedRepo"}, "is gated: accept its terms", "hf auth login"),
    (401, {}, "or you have no access (401)", "hf auth login"),
    (404, {"X-Error-Code": "RepoNotFound"}, "does not exist on", "hf auth login"),
    (404, {"X-Error-Code": "RevisionNotFound"}, "has no revision 'main'", "name another revision"),
    (429, {"RateLimit": '"api";r=0;t=300'}, "it asks to wait 300 s", "run the same command again"),
    (503, {}, "answers 503", "run the same command again"), (200, {}, "does not answer like a hub", "HF_ENDPOINT"),
])  # fmt: skip
def test_a_refusal_of_the_hub_is_one_short_line(hub, tmp_path, status, headers, problem, command):
    hub.refusals["/api/models/owner"] = (status, headers)
    _refused(fetch(hub, tmp_path), problem, command)


@pytest.mark.parametrize("path", ["/api/models/owner/name/tree", "/owner"])
def test_a_long_wait_is_said_at_once_wherever_the_hub_asks_for_it(hub, tmp_path, path):
    hub.refusals[path] = (429, {"Retry-After": "Fri, 27 Nov 2026 12:00:00 GMT"})
    begun = time.monotonic()
    _refused(fetch(hub, tmp_path), "it asks to wait until Fri, 27 Nov 2026 12:00:00 GMT", "the same command again")
    assert time.monotonic() - begun < 10, "the client would wait for an hour"


@pytest.mark.parametrize(("start", "old", "new", "problem"), [
    ("/", b"", b"<!DOCTYPE html>\n<title>Log in</title>", "Expecting value"),
    ("/api", b'"size": 11', b'"size": "11"', "a file 'model.safetensors' of '11' bytes"),
    ("/api", OLD.encode(), b"../../" + OLD[6:].encode(), "a commit '../../aaaa"),
    ("/api", OLD.encode(), NEW.encode(), "a commit 'bbbb"),
])  # fmt: skip
def test_an_answer_that_is_none_is_named(hub, tmp_path, start, old, new, problem):
    def spoil(path: str, data: bytes) -> bytes:
        return data if not path.startswith(start) else new if not old else data.replace(old, new)

    hub.spoil = spoil
    _refused(fetch(hub, tmp_path, SPECBENCH_REVISIONS=f"{REPO}@{OLD}"), problem, "HF_ENDPOINT")


def _refused(done: subprocess.CompletedProcess, problem: str, command: str) -> None:
    [line] = done.stdout.splitlines()
    assert line[0] in "125" and problem in line and command in line and len(line) <= 200, line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("variables", "problem", "command"), [
    ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused", "the same command again"),
    ({"HF_ENDPOINT": "http://nowhere.invalid"}, "does not answer like a hub", "the same command again"),
    ({"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_PROXY": ""}, "refused", "again"),
    ({"HF_HUB_OFFLINE": "1"}, "downloads are disabled", "specbench fetch owner/name"),
    ({"HF_ENDPOINT": "huggingface.co"}, "HF_ENDPOINT=huggingface.co: not an address", "https://HOST"),
    ({"HF_ENDPOINT": "https://x:y"}, "HF_ENDPOINT=https://x:y: not an address", "https://HOST"),
    ({"HF_HOME": "FILE"}, "cannot use", "HF_HOME"),
    ({"SSL_CERT_FILE": "/none.pem"}, "SSL_CERT_FILE=/none.pem: No such file", "python -m certifi"),
    ({"SSL_CERT_FILE": "FILE"}, "no certificates in it", "python -m certifi"),
    ({"HF_HUB_ETAG_TIMEOUT": "abc"}, "an HF_ variable of the environment: invalid literal for int", "or unset it"),
    ({"ALL_PROXY": "ftp://x", "NO_PROXY": ""}, "ALL_PROXY: Unknown scheme", "correct or unset it"),
])  # fmt: skip
def test_what_cannot_be_reached_or_used_is_one_short_line(hub, tmp_path, variables, problem, command):
    (file := tmp_path / "file").touch()
    named = {name: str(file) if value == "FILE" else value for name, value in variables.items()}
    if "unset" in command:  # what the client reads when it is imported
        env = os.environ | hub.env(tmp_path) | named
        done = subprocess.run([sys.executable, "-c", FETCH], env=env, capture_output=True, text=True)
    else:
        done = fetch(hub, tmp_path, **named)
    _refused(done, problem, command)


def test_files_that_do_not_fit_on_the_disk_are_refused_before_the_first_byte(hub, tmp_path):
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=5)\n"
    _refused(fetch(hub, tmp_path, full + FETCH), "do not fit", "free space")
    assert not any("/resolve/" in line for line in hub.asked)


def test_two_processes_share_a_download(hub, tmp_path):
    (tmp_path / "old" / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    processes = [started(hub, tmp_path, "-c", FETCH) for _ in range(2)]
    assert [process.communicate(timeout=300)[0].decode() for process in processes] == [f"{OLD}\n"] * 2
    asked = [line for line in hub.asked if line.startswith("GET") and line.endswith("model.safetensors")]
    assert len(asked) == 1, "the second waits for the first"


def test_a_download_that_was_killed_is_completed_by_the_same_command(hub, tmp_path):
    content = bytes(range(256)) * 4000
    (tmp_path / "old" / "model.safetensors").write_bytes(content)
    hub.cut_after = 100_000  # the client tries again and again
    with started(hub, tmp_path, "-c", FETCH) as run:
        for _ in range(600):
            if any((tmp_path / "hf").rglob("*.incomplete")):
                break
            time.sleep(0.1)
        else:
            pytest.fail("no download began")
        run.kill()
    hub.cut_after = None
    assert fetch(hub, tmp_path).stdout == f"{OLD}\n"
    [weights] = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    assert weights.read_bytes() == content
    assert not any((tmp_path / "hf").rglob("*.incomplete")), "what the killed process left is gone"


def test_ctrl_c_in_a_download_ends_it_at_once_with_one_line(hub, copied, tmp_path):
    """The client's threads would try again for minutes."""
    made = copied("janus")
    (made / "model.safetensors").write_bytes(bytes(4_000_000))
    hub.put("deepseek-community/Janus-Pro-1B", OLD, made)
    hub.cut_after = 100_000
    command = ("-m", "specbench", "fetch", "deepseek-community/Janus-Pro-1B", "--no-progress")
    with started(hub, tmp_path, *command) as run:
        while not any("GET" in line and "model.safetensors" in line for line in hub.asked):
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        output = run.communicate(timeout=20)[1].decode()
    assert run.returncode == INTERRUPTED, output
    assert output == "error: interrupted (finished work is kept; run the same command again to resume)\n"


def test_the_command_line_decodes_with_an_unpinned_model_from_an_empty_cache(hub, written, tmp_path):
    hub.put("deepseek-community/Janus-Pro-1B", OLD, written("janus"))
    run = ("run", "--model", "janus", "--scale", "tiny", "--decoder", "ar", "--limit", "1", "--threads", "1", "--json")
    command = (*run, "--prompts", "shapes", "--out", str(tmp_path / "out"))
    done = forked_command(command, env={**os.environ, **hub.env(tmp_path)})
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)
    facts = json.loads((Path(row["folder"]) / "run.json").read_text())
    assert facts["commits"] == {"deepseek-community/Janus-Pro-1B": OLD}


@pytest.mark.parametrize(
    "function", ["huggingface_hub.snapshot_download", "hub._refuse_altered", "hub.write_atomically"]
)
def test_a_kill_in_any_phase_is_made_good_by_the_same_command(hub, tmp_path, function):
    die = f"{function} = lambda *_, **__: os._exit(9)"
    imports = "import os, huggingface_hub, specbench.models.hub_downloads as hub"
    assert fetch(hub, tmp_path, f"{imports}\n{die}\n{FETCH}").returncode == 9
    assert fetch(hub, tmp_path).stdout == fetch(hub, tmp_path, HF_HUB_OFFLINE="1").stdout == f"{OLD}\n"
