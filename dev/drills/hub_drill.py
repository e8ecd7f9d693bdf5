"""Downloads from a hub on the loopback: a correct hub, and a hub with arbitrary answers."""

import atexit
import contextlib
import functools
import hashlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from cases import junk
from huggingface_hub import constants
from hypothesis import strategies as st

from specbench.errors import SpecbenchError
from specbench.models.hub_downloads import repository_download
from specbench.system.downloads import Remote, fetch_all, fetch_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from loopback_hub import Hub, loopback_hub

REPO, COMMIT = "owner/name", "c" * 40
_until_the_end = contextlib.ExitStack()
atexit.register(_until_the_end.close)  # else the interpreter would wait at exit for a server without a thread


@functools.cache
def hub() -> Hub:
    """Serve a repository of three files and another file on the loopback, until the process ends."""
    box = Path(tempfile.mkdtemp(prefix="specbench-drill-"))
    (box / "repo").mkdir()
    for number, size in enumerate((20, 2 * 2**20, 2**20)):
        (box / "repo" / f"{number}.bin").write_bytes(random.Random(number).randbytes(size))
    served = _until_the_end.enter_context(loopback_hub())
    served.put(REPO, COMMIT, box / "repo")
    served.files["/file"] = box / "repo" / "1.bin"
    return served


def fetch(home: Path) -> None:
    """Download all that the hub serves, as a user whose caches are in `home`."""
    served = hub()
    template = served.address + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    changed = {"ENDPOINT": served.address, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    changed |= {"HF_HUB_CACHE": str(home / "hf"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    env = {"SPECBENCH_CACHE": str(home / "specbench"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, env))
        for name, value in changed.items():
            stack.enter_context(mock.patch.object(constants, name, value))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        content = served.files["/file"].read_bytes()
        remote = Remote(f"{served.address}/file", f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
        fetch_file(remote, home / "specbench" / "file")
        fetch_all([repository_download(REPO, None, ("*.bin",), "MIT")])


@st.composite
def answers(draw) -> tuple[str, int, dict[str, str], int | None, tuple]:
    """Draw a hub's answers: first affected path, status and headers of a refusal (0: none), position at which bodies
    are cut, and their damage."""
    path = draw(st.sampled_from(["/api/models", "/owner", "/file", "/"]))
    status = draw(st.sampled_from([0, 0, 200, 301, 302, 401, 403, 404, 410, 416, 429, 451, 503]))
    headers = {"X-Error-Code": draw(st.sampled_from(["GatedRepo", "RepoNotFound", "RevisionNotFound", "x"]))}
    if status in (429, 503):
        headers["Retry-After"] = draw(st.sampled_from(["0", "11", "9" * 5000, "Fri, 27 Nov 2026 12:00:00 GMT", "x"]))
    if status in (301, 302):
        places = ["file:///etc/passwd", "http://127.0.0.1:9/x", "//", "ftp://x/y", "/"]
        headers["Location"] = draw(st.sampled_from(places))
    cut = draw(st.sampled_from([None, None, 0, 10**6]))
    kinds = ["cut", "flip", "insert", "junk", "page", "other commit", "other digest"]
    change = draw(st.none() | st.tuples(st.sampled_from(kinds), st.integers(0, 400), junk))
    return path, status, headers, cut, change


def spoilt(start: str, change: tuple | None) -> Callable[[str, bytes], bytes]:
    """Apply a change of `answers` to each body below a path."""

    def spoil(path: str, data: bytes) -> bytes:
        if change is None or not path.startswith(start):
            return data
        kind, place, more = change
        if kind == "junk":
            return json.dumps(more).encode("utf-8", "surrogatepass")
        if kind == "page":
            return b"<!DOCTYPE html><title>Log in to this network</title>"
        if kind.startswith("other"):
            return data.replace(COMMIT.encode() if kind == "other commit" else b'"sha256": "', b"%x" % place)
        if kind == "cut":
            return data[:place]
        return data[:place] + b"\xff" + data[place + (kind == "flip") :]

    return spoil


def download_from(box: Path, case) -> None:
    """Download from a hub with arbitrary answers; files that count as complete must equal the published files."""
    path, code, headers, cut, change = case
    served = hub()
    served.refusals = {path: (code, headers)} if code else {}
    served.cut_after, served.spoil = cut, spoilt(path, change)
    try:
        with mock.patch("time.sleep"), mock.patch("specbench.models.hub_downloads._LOOK_EVERY_S", 0.01):
            fetch(box)
    except SpecbenchError as error:
        assert "\n" not in error.what and "a bug" not in error.what, error
        raise SpecbenchError(error.what) from error
    # Files of a failed download are checked by the next download, so only this download's files are checked here.
    whole = {path.name: path.read_bytes() for path in served.commits[REPO][COMMIT].iterdir()}
    for kept in box.glob("hf/*/snapshots/*/*"):
        assert kept.read_bytes() == whole[kept.name], kept
