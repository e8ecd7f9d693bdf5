"""What README and docs say of commands, decoders, settings, files and results is what the code says; the public Python
API covers the commands, and is documented."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer

import specbench
from specbench import cli, errors
from specbench.specs.run_spec import SAMPLING, RunSpec
from specbench.store.run_info import FORMER_NAMES, SCHEMA_VERSION, Invocation, RunInfo
from specbench.store.token_sums import SUMS
from specbench.system.version import __version__

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
import refresh_docs  # noqa: E402

PAGES = refresh_docs.pages()
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
FORMAT = ROOT / "docs" / "results-format.md"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@by_page
def test_generated_blocks_are_fresh(page):
    assert refresh_docs.refresh(page) == page.read_text(), "run `make docs`"


def _without_generated(text: str) -> str:
    return re.sub(r"<!-- begin:([a-z-]+).*?<!-- end:\1 -->", "", text, flags=re.DOTALL)


def long_sentences(text: str) -> list[str]:
    """Sentences of 25 words or more, outside code, tables and headings; code in a line counts as a word."""
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "\n\n", _without_generated(text), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^( {4}|\||#|!\[).*$", "\n", prose, flags=re.MULTILINE)
    prose = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", prose, flags=re.MULTILINE)
    prose = re.sub(r"`[^`]*`", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose))
    sentences = [part for block in prose.split("\n\n") for part in re.split(r"(?<=[.!?])[)*\"]*\s+", block)]
    return [" ".join(text.split()) for text in sentences if len(re.findall(r"[A-Za-z0-9][\w'+%.,/-]*", text)) >= 25]


@pytest.mark.parametrize("page", [page for page in PAGES if "notes" not in page.parts], ids=lambda page: page.name)
def test_a_guide_has_short_sentences_and_few_lines(page):
    assert long_sentences(page.read_text()) == []
    lines = _without_generated(page.read_text()).splitlines()
    assert len(lines) <= {"results-format.md": 140, "README.md": 130, "development.md": 130}.get(page.name, 120)


def commands_in(text: str) -> list[str]:
    """Every command line in code blocks, indented or fenced, and in spans of code."""
    blocks = re.findall(r"^```(?:sh|console|text)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (.*)$", text, re.MULTILINE) + [line for block in blocks for line in block.splitlines()]
    return [*"\n".join(lines).replace("\\\n", " ").splitlines(), *re.findall(r"`([^`\n]+)`", text)]


@by_page
def test_every_command_and_flag_in_it_exists(page):
    commands = refresh_docs._commands()
    flags_of = {name: {flag for p in it.params for flag in [*p.opts, *p.secondary_opts]} for name, it in commands}
    groups = {name.split()[0] for name in flags_of if " " in name}
    for line in commands_in(page.read_text()):
        command = re.match(r"(?:\$ )?specbench ([a-z][a-z-]*)( [a-z]+)?(.*)", line.split("  #")[0])
        if command is None:
            continue
        name = f"{command[1]}{command[2]}" if command[1] in groups else command[1]
        assert name in flags_of, line
        assert set(re.findall(r"(?<=\s)--[A-Za-z][\w-]*", command[0])) <= flags_of[name] | {"--help"}, line


@by_page
def test_every_link_to_a_file_leads_to_one(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not link.startswith(("http", "mailto")):
            assert (page.parent / link).exists(), link


@by_page
def test_every_make_target_in_it_exists(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in commands_in(page.read_text()) if re.match(r"make [a-z]", line)}
    assert named <= targets


def test_every_program_that_make_runs_exists():
    programs = re.findall(r"(?:dev|\.ci)/[\w./-]+\.py", (ROOT / "Makefile").read_text())
    assert programs and all((ROOT / program).is_file() for program in programs)


def test_every_command_has_help():
    for name, command in refresh_docs._commands():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)


def documented(heading: str) -> dict[str, str]:
    """The list below a heading of the page on the results format: names, and the types of those that have one."""
    part = FORMAT.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ")[0]
    lines = re.findall(r"^- ((?:`[^`]+`(?:, )?)+)(.*?):", part, re.MULTILINE)
    return {name: kind for names, kind in lines for name in re.findall(r"`([^`]+)`", names)}


def test_columns_and_keys_of_stored_runs_are_documented():
    keys = documented("run.json")
    for path in sorted((ROOT / "results" / "older").glob("*/run.json")):
        info = json.loads(path.read_text())
        spec = info["spec"]
        names = {*info, *(f"spec.{name}" for name in spec), *(f"spec.decoder.{name}" for name in spec["decoder"])}
        assert spec["sampling"].keys() <= SAMPLING.keys(), path
        names |= {f"invocations[].{name}" for call in info["invocations"] for name in call}
        assert names <= keys.keys(), path
        for samples in (path.parent / "samples").glob("*.parquet"):
            assert set(pq.read_schema(samples).names) <= {
                *documented("samples/*.parquet"), *SUMS.names, *FORMER_NAMES.values(),
            }  # fmt: skip
    assert {f"spec.{name}" for name in RunSpec.__dataclass_fields__} <= keys.keys()
    written = RunInfo.__dataclass_fields__.keys() - {"stored", "stack", "roofline"} | {"floor"}  # a roofline's inputs
    written |= {f"invocations[].{name}" for name in Invocation.__dataclass_fields__.keys() - {"stored"}}
    assert written <= keys.keys()


def test_exit_codes_schema_and_version_are_documented():
    codes = {0, *(value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int))}
    text = TEXT["docs/commands.md"]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes
    assert f"Everything stored has schema version {SCHEMA_VERSION};" in FORMAT.read_text()
    assert re.search(rf"^version: {re.escape(__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.search(r"^date-released: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## {__version__} - {released[1]}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_no_registry_host_or_private_path_is_named():
    words = ("pypi.org", "pythonhosted", "download.pytorch", "/root/", "/work/")
    names = ["Makefile", "pyproject.toml", "constraints.txt", ".ci/run", "mkdocs.yml", "CONTRIBUTING.md"]
    names.append("CHANGELOG.md")
    for name, text in {**TEXT, **{name: (ROOT / name).read_text() for name in names}}.items():
        assert not [word for word in words if word in text], name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="part of the extra 'docs'")
    pytest.importorskip("mkdocstrings", reason="part of the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "specbench.api.images.generate" in (tmp_path / "site" / "python.html").read_text()
    assert not re.findall(r'<(?:script|link)[^>]*"https?:[^>]*>', (tmp_path / "site" / "index.html").read_text())


FUNCTIONS = [name for name in specbench.__all__ if not name.startswith("_") and name != "SpecbenchError"]
OF_COMMAND = {
    "figure": "report",  # its frame has `.plot()` and `.images()`
    "import": "import_results",
    "list": "available",
    "merge": "merge_runs",
    "methods": "methods_paragraph",
    "prompts show": "show_prompts",
}


def test_every_command_has_its_function():
    app = typer.main.get_command(cli.build_app())
    parts = {name: getattr(command, "commands", [""]) for name, command in app.commands.items()}
    names = [" ".join(filter(None, (name, part))) for name in parts for part in parts[name]]
    assert {OF_COMMAND.get(name, name.replace("-", "_")) for name in names} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_returns_and_raises(name):
    function = getattr(specbench, name)
    text = inspect.getdoc(function)
    assert "Returns:" in text and "Raises:" in text, name
    assert not inspect.signature(function).parameters or "Args:" in text or name == "report_page"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specbench.nothing  # noqa: B018
