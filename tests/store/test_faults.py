"""A clock that jumps, a disk that turns read-only, logits that are no numbers, two Ctrl-C: one line each, and after
a rerun every row is there once, with the tokens of an undisturbed run. It concerns several modules: run_store,
merge_shards, and the runner above them."""

import errno
import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest
import tiny
from refusals import refused
from stored_rows import contents
from tiny import REQUESTS, SPECS

import specbench
from specbench.errors import FAILURE, PARTIAL
from specbench.runs.executors import local
from specbench.runs.executors.local import LocalExecutor
from specbench.runs.runner import run
from specbench.store.merge_shards import merge_runs
from specbench.store.run_store import RunStore, read_image
from specbench.system import environment

SOURCE = Path(specbench.__file__).parent


def go(out: Path, executor=None, **kwargs):
    return run(executor or tiny.executor(), SPECS, REQUESTS, out, **kwargs)


def test_a_clock_that_jumps_moves_no_row(tmp_path, undisturbed, monkeypatch):
    """Back by years, forth, and standing still, in the middle of a run, its resumption and a merge of its shards."""
    jumps = itertools.cycle(["2031-01-01T00:00:00.000+00:00", "1999-12-31T23:59:59.999+00:00"])
    monkeypatch.setattr(environment, "now", lambda: next(jumps))
    monkeypatch.setattr("specbench.store.run_store.now", lambda: next(jumps))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    half = REQUESTS[::2]
    run(tiny.executor(), SPECS, half, tmp_path / "out")
    go(tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed
    for number in range(2):
        run(tiny.executor(), SPECS, REQUESTS[number::2], tmp_path / f"shard{number}")
    merge_runs([tmp_path / "shard1", tmp_path / "shard0"], tmp_path / "merged")
    assert contents(tmp_path / "merged") == undisturbed


def test_a_disk_that_turns_read_only_is_one_line_and_the_rows_before_it_stay(tmp_path, undisturbed, monkeypatch):
    honest, opened = open, []

    def read_only(path, mode="r", *rest, **more):
        if "w" in mode and str(tmp_path) in str(path):
            opened.append(path)
            if len(opened) > 9:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return honest(path, mode, *rest, **more)

    monkeypatch.setattr("builtins.open", read_only)
    error = refused("Read-only file system", go, tmp_path)
    assert error.exit_code == FAILURE and "resume" in error.try_this
    monkeypatch.undo()
    done = sum(len(RunStore(folder).samples(["status"])) for folder in tmp_path.iterdir())
    assert 0 < done < len(undisturbed)
    assert go(tmp_path).resumed == done and contents(tmp_path) == undisturbed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_image_and_a_rerun_makes_it(tmp_path, undisturbed, value):
    model = tiny.tiny_model()
    model.conditional[model.prompts.index("two | cats")] = value
    summary = go(tmp_path, LocalExecutor(model))
    assert (summary.done, summary.failed, summary.problem().exit_code) == (18, 6, PARTIAL)
    assert all("'CAT'" in error for error in summary.errors)
    go(tmp_path)
    assert contents(tmp_path) == undisturbed


def test_a_second_ctrl_c_stops_at_once_and_loses_no_finished_row(tmp_path, undisturbed, monkeypatch):
    healthy, calls = local.decode, []

    def slow(model, requests, *rest, **more):
        calls.append(requests)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            assert len(calls) == 5, "the first one lets the image go on"
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("unreachable")
        return healthy(model, requests, *rest, **more)

    before, counter = signal.getsignal(signal.SIGINT), tiny.OnRow()
    monkeypatch.setattr(local, "decode", slow)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, reporter=counter)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before and counter.rows == 4 and go(tmp_path).resumed == 4
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize("garbage", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a" + b"\0" * 99])
def test_a_garbage_picture_is_named_and_made_again_once_it_is_deleted(tmp_path, undisturbed, garbage):
    go(tmp_path)
    picture = next(tmp_path.glob("*/images/cat-1.png"))
    picture.write_bytes(garbage)
    error = refused(re.escape(str(picture)), read_image, picture.parents[1], "images/cat-1.png", None)
    assert "run again" in error.try_this
    picture.unlink()
    assert go(tmp_path).done == 1 and contents(tmp_path) == undisturbed


def test_nothing_foreign_is_unpickled_no_shell_is_started_and_no_duration_is_of_the_clock_of_the_wall():
    """torch 2.6 and later load tensors only by default; programs are started from a list of words."""
    banned = r"weights_only=False|allow_pickle=True|shell\s*=\s*True|os\.(system|popen)\(|(?<![.\w])(eval|exec)\("
    banned += r"|\btime\.time\("
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(banned, text), path
        if "pickle." in text:
            assert path.name in ("ray_workers.py", "compile_ahead.py"), "which unpickle what this program sent itself"
