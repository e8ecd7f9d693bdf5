"""Provenance: version and commit of a checkout, of an installed package with and without a record."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbench.system import environment
from specbench.system.version import __version__

PACKAGE = Path(environment.__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def installed(tmp_path) -> Path:
    """The modules that know the version, copied out of the checkout."""
    for name in ("__init__.py", "system/__init__.py", "system/version.py", "system/limits.py", "system/environment.py"):
        (tmp_path / "specbench" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / "specbench" / name)
    return tmp_path


def output(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said_by(folder: Path) -> str:
    script = "from specbench.system.environment import describe_installation; print(describe_installation())"
    return output(folder, sys.executable, "-c", script)


def git(folder: Path, *arguments: str) -> str:
    return output(folder, "git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments)


def test_an_installed_package_says_the_commit_it_was_built_from(installed):
    record = installed / "specbench" / "system" / environment.BUILD_RECORD.name
    record.write_text(f'{{"revision": "{COMMIT}", "dirty": false}}\n')
    assert said_by(installed).startswith(f"specbench {__version__}, git {COMMIT[:10]}, python 3.")
    record.write_text(f'{{"revision": "{COMMIT}", "dirty": true}}\n')
    assert f"git {COMMIT[:10]} with changes, " in said_by(installed)


@pytest.mark.parametrize("record", [None, "", "{}", "[]", '{"revision": "abc"}'])
def test_without_a_readable_record_no_commit_is_named(record, installed):
    if record is not None:
        (installed / "specbench" / "system" / environment.BUILD_RECORD.name).write_text(record)
    assert re.match(rf"specbench {re.escape(__version__)}, python 3\.", said_by(installed))


def test_a_checkout_says_its_own_commit_and_a_foreign_one_around_it_is_not_asked(installed):
    (installed / "other.txt").write_text("")
    git(installed, "init", "--quiet")
    git(installed, "add", "other.txt")
    git(installed, "commit", "--quiet", "--message", "another project")
    assert "git" not in said_by(installed), "an environment inside of somebody's repository"
    git(installed, "add", "specbench")
    git(installed, "commit", "--quiet", "--message", "this one")
    head = git(installed, "rev-parse", "HEAD")
    assert f"git {head[:10]}, " in said_by(installed)
    (installed / "specbench" / "system" / "version.py").write_text('__version__ = "9.9"\n')
    assert said_by(installed).startswith(f"specbench 9.9, git {head[:10]} with changes, ")


@pytest.mark.parametrize(("cpuinfo", "programs", "processor", "expected"), [
    ("model name\t: AMD EPYC 9654\n", {}, "x86_64", "AMD EPYC 9654"),
    ("CPU part\t: 0xd4f\n", {"lscpu": "Architecture: aarch64\nModel name:  Neoverse-V2\n"}, "", "Neoverse-V2"),
    ("CPU part\t: 0xd40\n", {"lscpu": "Model name: -\n"}, "", "aarch64"),
    (None, {"sysctl": "Apple M4 Max"}, "arm", "Apple M4 Max"),
])  # fmt: skip
def test_every_processor_has_a_name(cpuinfo, programs, processor, expected, monkeypatch):
    def read(path, *arguments, **options):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(environment, "_output", lambda program, *_: programs.get(program))
    monkeypatch.setattr(environment.platform, "processor", lambda: processor)
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    assert environment.hardware()["cpu"] == expected
