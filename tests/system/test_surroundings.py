"""Settings of a process by the machine and its user: home, name, working folder, width, threads, matplotlib's
settings."""

import getpass
import os
import pwd
import re
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import matplotlib as mpl
import pytest
from refusals import refused

from specbench.cli import main
from specbench.models.transformer import compilation
from specbench.reporting.figures import chart_figure, saved
from specbench.system import limits, surroundings
from specbench.system.digests import cache_folder
from specbench.system.surroundings import private_folder, settle


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A process of a user without a name and a home."""
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "SPECBENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # which is put back, whatever the process sets
        monkeypatch.delenv(name)
    private_folder.cache_clear()
    yield tmp_path
    private_folder.cache_clear()


def test_a_process_without_home_and_name_keeps_what_it_keeps_in_a_folder_of_its_own(nobody, monkeypatch, cli):
    monkeypatch.setenv("LOGNAME", "")
    settle()
    home = Path(os.environ["HOME"])
    assert getpass.getuser() == f"user-{os.getuid()}"
    assert home.parent == nobody and stat.S_IMODE(home.stat().st_mode) == 0o700
    assert cache_folder() == home / ".cache" / "specbench" and os.environ["LOGNAME"]
    assert cli("list", "prompts").code == 0


def test_a_folder_that_another_user_could_write_to_is_not_taken(nobody):
    (nobody / f"specbench-{os.getuid()}").mkdir(mode=0o777)
    (nobody / f"specbench-{os.getuid()}").chmod(0o777)
    refused("other users may write to", private_folder)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("HF_ENDPOINT", "", ""), (surroundings.COMPILED, "", "No such file"),
    (surroundings.COMPILED, "/dev/null/a", "Not a directory"),
])  # fmt: skip
def test_variables_that_libraries_fail_at_are_ignored(name, value, said, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    settle()
    assert name not in os.environ and said in (text := capsys.readouterr().err) and bool(said) == bool(text)


@pytest.mark.parametrize(("named", "expected"), [("", "pw"), ("relative", "pw"), ("/home/me", "/home/me")])
def test_a_home_that_is_no_path_is_the_one_of_the_user(named, expected, monkeypatch):
    monkeypatch.setenv("HOME", named)
    settle()
    assert os.environ["HOME"] == (pwd.getpwuid(os.getuid()).pw_dir if expected == "pw" else expected)


@pytest.mark.parametrize(
    ("columns", "width"), [("0", "80"), ("x", "80"), ("9" * 5000, "80"), ("39", "40"), ("60", "60")]
)
def test_widths_without_room_for_words_match_a_narrow_terminal(columns, width, monkeypatch, cli):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERMINAL_WIDTH", columns)
    monkeypatch.setenv("LINES", columns)
    monkeypatch.setattr("specbench.system.console.is_terminal", lambda: True)
    settle()
    assert os.environ.get("COLUMNS", "80") == width and os.environ.get("TERMINAL_WIDTH", columns) == columns
    with pytest.raises(SystemExit) as ended:
        main(["list", "decoders"])
    assert not ended.value.code


def test_a_deleted_working_folder_is_reported_in_one_line(monkeypatch, tmp_path, cli):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    cli("run", "--limit", "1").refused("the working folder does not exist", "cd to another folder", alone=True)
    for line in ([], ["--help"], ["help", "run"], ["score", "-h"], ["--version"]):
        assert "error" not in (outcome := cli(*line)).err and len(outcome.out + outcome.err) > 50


NO_NUMBER = ("abc", "0", "-1", "1,x", "99999999999", "9" * 5000)


@pytest.mark.parametrize(("omp", "mkl", "most", "threads"), [
    ("1,1", None, None, 1),
    ("2,1", None, None, 2),
    (" 3 ", None, None, 3),
    ("+2", None, None, 2),
    ("2, 4", "", None, 2),
    ("2", "3", None, 3),  # MKL's own variable has precedence, in MKL and in torch
    ("2", "0", None, 2),
    ("4", None, "3", 3),
    (None, None, "2", 2),
    (None, None, None, None),
    *((text, None, None, None) for text in NO_NUMBER),
])  # fmt: skip
def test_threads_are_asked_for_as_openmp_and_mkl_define_it(omp, mkl, most, threads, monkeypatch, capsys):
    limits._warn_ignored.cache_clear()
    for name, value in (("OMP_NUM_THREADS", omp), ("MKL_NUM_THREADS", mkl), ("OMP_THREAD_LIMIT", most)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (limits.asked_threads(), limits.asked_threads()) == (threads, threads)
    assert capsys.readouterr().err.count("is ignored") == (omp in NO_NUMBER) + (mkl in NO_NUMBER)


POINTS = [{"x": 1, "y": 2, "run": "a"}, {"x": 2, "y": 3, "run": "b"}]
CHART = {
    "title": "t", "scales": {"x": {"label": "s", "grid": True}, "color": {"domain": ["a", "b"], "range": ["r", "b"]}},
    "layers": [{"mark": "dot", "by": "run", "hollow": False, "points": POINTS}],
}  # fmt: skip


@pytest.mark.parametrize("fmt", ["png", "pdf", "svg"])
def test_figures_depend_on_the_packages_style_alone(fmt, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    plain = saved(chart_figure(CHART), fmt)
    for epoch in ("abc", "", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        assert saved(chart_figure(CHART), fmt) == plain and os.environ["SOURCE_DATE_EPOCH"] == epoch
    others = {"text.usetex": True, "font.size": 30, "axes.facecolor": "red", "savefig.bbox": "tight", "figure.dpi": 50}
    with mpl.rc_context(others | {"svg.fonttype": "path", "path.simplify": False, "font.family": "serif"}):
        assert saved(chart_figure(CHART), fmt) == plain
        assert mpl.rcParams["font.size"] == 30, "the user's own style stays"
    assert b"<dc:date>" not in plain and b"CreationDate" not in plain


def test_matplotlib_is_imported_without_the_backend_of_a_notebook():
    code = "import specbench.reporting.plotting, os; print(os.environ['MPLBACKEND'])"
    environment = os.environ | {"MPLBACKEND": "nonsense"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "nonsense\n", done.stderr


@pytest.mark.parametrize("name", ["plain", "ünï", "a b", "it's", 'a"b', "back\\slash"])
def test_code_is_compiled_in_a_folder_whose_path_the_compiler_takes(name, monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / name))
    folder = str(compilation.compiled_folder())
    assert folder.startswith(str(tmp_path)) == (name in ("plain", "ünï")) and not re.search(r"[\s'\"\\]", folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
    assert (compilation.compiled_folder() == tmp_path / name) == (name in ("plain", "ünï"))


def test_a_home_that_cannot_be_made_is_refused(monkeypatch):
    private_folder.cache_clear()
    monkeypatch.setattr(surroundings.os, "access", lambda place, mode: place == "/proc")
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    refused(r"cannot make /proc/specbench-", private_folder)
    private_folder.cache_clear()
