"""An installed wheel contains all data files of a checkout."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = "specbench/system/build.json"
pytest.importorskip("hatchling", reason="builds the wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def built(kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


def test_an_installed_specbench_finds_prompts_and_tables_and_nothing_else_of_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path)
    script = (
        "import specbench; from specbench.papers.table_files import load_table, papers, table_names;"
        "from specbench.prompts import load_prompts;"
        "print(specbench.__file__, len(load_prompts('shapes').prompts), load_table('gsd-1').source, len(papers()));"
        "print(*table_names())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    first, tables = done.stdout.splitlines()
    assert first.startswith(str(tmp_path)) and first.split()[2:4] == ["Table", "1"], done.stderr
    assert set(tables.split()) == {path.stem for path in (ROOT / "benchmarks").glob("*.toml")} - {"papers"}
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    info = next(n.split("/")[0] for n in names if "dist-info" in n)
    assert {name.split("/")[0] for name in names} == {"specbench", info}
    assert not [name for name in names if name.endswith((".pyc", "bench.py")) and "_data" in name]


def test_the_source_distribution_is_the_checkout_and_knows_its_commit_as_the_wheel_does(wheel, tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    with tarfile.open(built("sdist", tmp_path)) as content:
        names = {name.partition("/")[2]: name for name in content.getnames()}
        record = content.extractfile(names[RECORD]).read()
    assert not {name for name in listed.stdout.splitlines() if (ROOT / name).exists()} - names.keys()
    with zipfile.ZipFile(wheel) as content:
        assert content.read(RECORD) == record
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert json.loads(record)["revision"] == head


def test_a_checkout_can_be_installed_for_work_on_it(tmp_path):
    script = "import hatchling.build, sys; print(hatchling.build.build_editable(sys.argv[1]))"
    command = [sys.executable, "-c", script, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    with zipfile.ZipFile(tmp_path / done.stdout.strip()) as content:
        paths = [content.read(name).decode().strip() for name in content.namelist() if name.endswith(".pth")]
    assert paths == [str(ROOT)], done.stderr
