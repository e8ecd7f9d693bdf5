"""Trust on first use, by the real client against a hub on the loopback: a repository of which no commit is pinned is
downloaded at the newest one, which this machine keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from checkpoints import write
from forked import forked_command, forked_script
from loopback_hub import Hub, loopback_hub

from specbench.errors import INTERRUPTED

REPO, OLD, NEW = "owner/name", "a" * 40, "b" * 40
FETCH = """
from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import Source, fetch_checkpoint
source = Source("the model", "owner/name", ("config.json", "*.safetensors"), "MIT")
try:
    print(fetch_checkpoint(source).commits["owner/name"])
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


def kept(home: Path) -> dict:
    return tomllib.loads((home / "specbench" / "first-use.toml").read_text())


def test_the_first_use_takes_the_newest_commit_and_later_ones_keep_it(hub, tmp_path):
    first = fetch(hub, tmp_path)
    assert first.stdout == f"{OLD}\n"
    assert f"downloading {REPO}, commit {OLD[:12]}: 13 bytes; licence: MIT" in first.stderr
    assert kept(tmp_path)[REPO]["commit"] == OLD
    assert sorted(kept(tmp_path)[REPO]["files"]) == ["config.json", "model.safetensors"]
    hub.put(REPO, NEW, folder(tmp_path / "new", b"new weights"))
    again = fetch(hub, tmp_path)
    assert again.stdout == f"{OLD}\n" and "downloading" not in again.stderr
    assert f"main is at {NEW[:12]} now" in again.stderr
    away = fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert away.stdout == f"{OLD}\n", "a hub that does not answer stops nobody who has the files"


def test_a_file_that_differs_from_its_first_use_is_refused(hub, tmp_path):
    fetch(hub, tmp_path)
    [weights] = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    content = weights.resolve()
    content.write_bytes(b"changed weights")
    refused = fetch(hub, tmp_path)
    assert refused.stdout.startswith("5 ") and "differs from its first use here" in refused.stdout


def test_where_only_pinned_commits_are_allowed_the_hub_is_not_asked(hub, tmp_path):
    refused = fetch(hub, tmp_path, SPECBENCH_PINNED_ONLY="1")
    assert refused.stdout.startswith("5 ") and "--pinned-only" in refused.stdout
    assert not [line for line in hub.asked if REPO in line] and not (tmp_path / "specbench" / "first-use.toml").exists()


def test_a_cache_that_cannot_be_written_stops_nobody(hub, tmp_path):
    (tmp_path / "file").touch()
    done = fetch(hub, tmp_path, SPECBENCH_CACHE=str(tmp_path / "file" / "cache"))
    assert done.stdout == f"{OLD}\n" and "cannot be kept" in done.stderr


@pytest.mark.parametrize(
    ("status", "headers", "said", "command"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "is gated: accept its terms", "hf auth login"),
        (401, {}, "refuses access (401)", "hf auth login"),
        (404, {"X-Error-Code": "RepoNotFound"}, "is not on", "hf auth login"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "has no revision 'main'", "name another one"),
        (429, {"Retry-After": "120"}, "it asks to wait 120 s", "run the same command again"),
        (503, {}, "answers 503", "run the same command again"),
    ],
)
def test_a_refusal_of_the_hub_is_one_short_line_and_keeps_nothing(hub, tmp_path, status, headers, said, command):
    hub.refusals["/api/models/owner"] = (status, headers)
    _refused(fetch(hub, tmp_path), said, command)
    assert not (tmp_path / "specbench" / "first-use.toml").exists()


def _refused(done: subprocess.CompletedProcess, said: str, command: str) -> None:
    [line] = done.stdout.splitlines()
    assert line[0] in "15" and said in line and command in line and len(line) <= 200, line
    assert "Traceback" not in done.stderr


def test_what_cannot_be_reached_is_one_short_line(hub, tmp_path):
    _refused(fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9"), "Connection refused", "the same command again")
    _refused(fetch(hub, tmp_path, HF_ENDPOINT="http://nowhere.invalid"), "no answer from", "the same command again")
    proxied = fetch(hub, tmp_path, HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9", NO_PROXY="")
    _refused(proxied, "Connection refused", "the same command again")
    _refused(fetch(hub, tmp_path, HF_HUB_OFFLINE="1"), "downloads are disabled", "specbench fetch owner/name")


def test_a_file_of_another_size_than_the_hub_states_is_refused_and_not_kept(hub, tmp_path):
    hub.spoil = lambda path, data: b"" if path.endswith("model.safetensors") else data
    done = fetch(hub, tmp_path)
    assert done.stdout.startswith("1 owner/name: model.safetensors came with 0 bytes instead of 11"), done.stdout
    assert not (tmp_path / "specbench" / "first-use.toml").exists()
    hub.spoil = lambda path, data: data
    assert fetch(hub, tmp_path).stdout == f"{OLD}\n"


def test_files_that_do_not_fit_on_the_disk_are_refused_before_the_first_byte(hub, tmp_path):
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=5)\n"
    small = full + FETCH
    _refused(fetch(hub, tmp_path, small), "do not fit", "free space")
    assert not any("/resolve/" in line for line in hub.asked)


def test_two_processes_share_a_download(hub, tmp_path):
    content = bytes(range(256)) * 40_000
    (tmp_path / "old" / "model.safetensors").write_bytes(content)
    env = {**os.environ, **hub.env(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", FETCH], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=300)[0].decode() for one in started] == [f"{OLD}\n"] * 2
    asked = [line for line in hub.asked if line.startswith("GET") and line.endswith("model.safetensors")]
    assert len(asked) == 1, "the second waits for the first"


def test_a_download_that_was_killed_is_completed_by_the_same_command(hub, tmp_path):
    content = bytes(range(256)) * 4000
    (tmp_path / "old" / "model.safetensors").write_bytes(content)
    hub.cut_after = 100_000  # the client tries again and again
    env = {**os.environ, **hub.env(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", FETCH], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        for _ in range(600):
            if any((tmp_path / "hf").rglob("*.incomplete")):
                break
            time.sleep(0.1)
        else:
            pytest.fail("no download began")
        run.kill()
    assert not (tmp_path / "specbench" / "first-use.toml").exists()
    hub.cut_after = None
    assert fetch(hub, tmp_path).stdout == f"{OLD}\n"
    [weights] = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    assert weights.read_bytes() == content
    assert not any((tmp_path / "hf").rglob("*.incomplete")), "what the killed process left is gone"


def test_ctrl_c_in_a_download_ends_it_at_once_with_one_line(hub, tmp_path):
    """The client's threads would try again for minutes."""
    write("janus", made := folder(tmp_path / "janus", b""))
    (made / "model.safetensors").write_bytes(bytes(4_000_000))
    hub.put("deepseek-community/Janus-Pro-1B", OLD, made)
    hub.cut_after = 100_000
    env = {**os.environ, **hub.env(tmp_path)}
    command = [sys.executable, "-m", "specbench", "fetch", "deepseek-community/Janus-Pro-1B", "--no-progress"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        while not any("GET" in line and "model.safetensors" in line for line in hub.asked):
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        said = run.communicate(timeout=20)[1].decode()
    assert run.returncode == INTERRUPTED, said
    assert said == "error: interrupted (what is finished is kept; run the same command again to resume)\n"


def test_the_command_line_decodes_with_an_unpinned_model_from_an_empty_cache(hub, tmp_path):
    (tmp_path / "janus").mkdir()
    write("janus", tmp_path / "janus")
    hub.put("deepseek-community/Janus-Pro-1B", OLD, tmp_path / "janus")
    run = ("run", "--model", "janus", "--scale", "tiny", "--decoder", "ar", "--limit", "1", "--threads", "1", "--json")
    command = (*run, "--prompts", "shapes", "--out", str(tmp_path / "out"))
    env = {**os.environ, **hub.env(tmp_path)}
    done = forked_command(command, env=env)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)
    facts = json.loads((Path(row["folder"]) / "run.json").read_text())
    assert facts["commits"] == {"deepseek-community/Janus-Pro-1B": OLD}
    hub.put("deepseek-community/Janus-Pro-1B", NEW, tmp_path / "janus")
    again = forked_command((*command, "--limit", "2"), env=env)
    assert "1 image in" in again.stderr and "now (--revision main)" in again.stderr


KILLED = """
import os, specbench.models.first_use as first_use, specbench.models.hub_downloads as hub, specbench.system.downloads
import huggingface_hub
{module}.{function} = lambda *_, **__: os._exit(9)
"""


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("huggingface_hub", "snapshot_download"),
        ("first_use", "sha256_of"),
        ("first_use", "write_atomically"),
    ],
)
def test_a_kill_in_any_phase_is_made_good_by_the_same_command(hub, tmp_path, module, function):
    killed = fetch(hub, tmp_path, KILLED.format(module=module, function=function) + FETCH)
    assert killed.returncode == 9
    assert fetch(hub, tmp_path).stdout == f"{OLD}\n"
    assert kept(tmp_path)[REPO]["commit"] == OLD and len(kept(tmp_path)[REPO]["files"]) == 2
