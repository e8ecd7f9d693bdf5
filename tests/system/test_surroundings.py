"""Settings of a process by the machine and its user: home, name, working folder, width, threads, matplotlib's settings;
cores and memory that it may use: cgroups of both versions, SLURM's allocation, the page cache."""

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
    *(("SOURCE_DATE_EPOCH", value, "") for value in ("", "abc", "1.5", "-1", "9" * 12, "9" * 5000)),
])  # fmt: skip
def test_variables_that_libraries_fail_at_are_ignored(name, value, said, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    settle()
    assert name not in os.environ and said in (text := capsys.readouterr().err) and bool(said) == bool(text)


def test_a_date_of_reproducible_builds_stays(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    settle()
    assert os.environ["SOURCE_DATE_EPOCH"] == "0"


@pytest.mark.parametrize("epoch", ["", "abc"])
def test_a_report_is_printed_with_any_source_date_epoch(epoch, tmp_path):
    """In a new process: numpy reads the variable when scipy is imported."""
    command = [sys.executable, "-m", "specbench", "report", "--out", tmp_path]
    done = subprocess.run(command, env=os.environ | {"SOURCE_DATE_EPOCH": epoch}, capture_output=True, text=True)
    assert "no runs" in done.stderr and "bug" not in done.stderr, done.stderr


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


GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write files of a machine of 8 cores with 64 GiB available; the process is in the group /job of cgroup v2."""
    groups, process = tmp_path / "cgroup", tmp_path / "proc"
    monkeypatch.setattr(limits, "_GROUPS", groups)
    monkeypatch.setattr(limits, "_PROCESS", process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)

    def write(content: dict[str, str]) -> None:
        for name, text in content.items():
            path = (process if name in ("meminfo", "self/cgroup") else groups) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write({"meminfo": f"MemFree: 1024 kB\nMemAvailable: {64 * 2**20} kB\n", "self/cgroup": "0::/job\n"})
    return write


def test_a_cgroup_limits_memory_and_cores_and_so_does_the_one_around_it(machine):
    assert limits.available_memory() == 64 * GIB and limits.available_cores() == 8, "the page cache counts as free"
    stat = f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n"
    machine({"job/memory.max": f"{16 * GIB}\n", "job/memory.current": f"{6 * GIB}\n", "job/memory.stat": stat})
    machine({"job/cpu.max": "max 100000\n", "cpu.max": "350000 100000\n"})
    assert limits.available_memory() == 12 * GIB and limits.available_cores() == 3
    machine({"memory.max": f"{4 * GIB}\n", "memory.current": f"{5 * GIB}\n", "job/cpu.max": "50000 100000\n"})
    assert limits.available_memory() == 0 and limits.available_cores() == 1
    machine({"memory.max": "max\n", "job/memory.max": "max\n"})
    assert limits.available_memory() == 64 * GIB


def test_the_older_version_of_cgroups_also_limits_and_a_system_without_them_has_an_answer(
    machine, monkeypatch, tmp_path
):
    machine({"self/cgroup": "7:cpu,cpuacct:/box\n4:memory:/box\n0::/\n"})
    machine({"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"})
    machine({"memory/box/memory.limit_in_bytes": f"{8 * GIB}\n", "memory/box/memory.usage_in_bytes": f"{3 * GIB}\n"})
    machine({"memory/box/memory.stat": f"total_inactive_file {GIB}\ninactive_file 7\n"})
    assert limits.available_memory() == 6 * GIB and limits.available_cores() == 2
    machine({"cpu/box/cpu.cfs_quota_us": "-1\n"})
    assert limits.available_cores() == 8
    monkeypatch.setattr(limits, "_PROCESS", tmp_path / "nowhere")
    assert limits.available_cores() == 8 and (limits.available_memory() or 1) > 0


def test_slurm_allocates_cores_to_a_task(machine, monkeypatch):
    for nonsense in ("٣", "9" * 5000):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", nonsense)
        assert limits.available_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "6")
    assert limits.available_cores() == 6
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    assert limits.available_cores() == 2
