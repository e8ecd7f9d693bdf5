"""Help: start-up without heavy imports, literals printed as they are typed, each command's own defaults. It
concerns several modules: every command."""

import os
import re
import subprocess
import sys

import pytest
import typer

from specbench.cli import build_app, build_index
from specbench.runs.settings import run_settings
from specbench.specs.components import NAMED_TREES

# huggingface_hub itself is a few constants; its `file_download` brings the HTTP client.
HUB = ("huggingface_hub.file_download", "httpx", "httpx2")
LISTED = ("models", "decoders", "metrics", "prompts", "tables", "runs")
HEAVY = ("torch", "pandas", "transformers", "pyarrow", "matplotlib", "scipy", "safetensors", "PIL", "click", *HUB)
SCRIPT = """
import sys
from specbench.cli import main
{before}
for line in {lines!r}:
    try:
        main(line.split())
    except SystemExit as stopped:
        print("EXIT", stopped.code or 0, file=sys.stderr)
print("HEAVY", [name for name in {spared!r} if name in sys.modules], file=sys.stderr)
"""


SPARED = {
    "help": (["--help"], (*HEAVY, "specbench.cli.run", "specbench.cli.options", "importlib.metadata", "pydantic"), 0),
    "version and help of run": (["--version", "run --help"], (*HEAVY, "specbench.cli.report", "pydantic"), 0),
    "lists": ([f"list {what}" for what in (*LISTED, "decoders --json")], HEAVY, 0),
    "bad input": (
        [f"run {bad}" for bad in ("--top-k 100000", "--prompts empty.txt", "--out empty.txt", "--decoder x")],
        ("torch", "pandas", "transformers"), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "spared", "code"), SPARED.values(), ids=SPARED)
def test_nothing_heavy_is_imported(lines, spared, code, tmp_path):
    (tmp_path / "empty.txt").touch()
    script = SCRIPT.format(before="", lines=lines, spared=spared)
    # Only a checkpoint in the hub's cache takes the hub's library to judge.
    env = os.environ | {"HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=env)
    ends = [line for line in done.stderr.splitlines() if line.startswith(("EXIT ", "HEAVY "))]
    assert ends == [*[f"EXIT {code}"] * len(lines), "HEAVY []"], done.stderr


TABLE = """
name = "toy"
title = "One row"
columns = [{ key = "nfe", header = "NFE" }]
[defaults]
model = "lumina"
prompts = "coco"
protocol = "sjd"
[[rows]]
label = "AR"
decoder = "ar"
"""


def test_what_is_complete_needs_no_torch_and_a_run_says_first_what_it_does(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.toml").write_text(TABLE)
    run = "run --decoder ar --limit 1 --device cpu --compile off"
    complete = (run, "score --device cpu", "bench toy.toml --model shapes --limit 1 --device cpu --compile off")
    for line in complete:
        assert cli(*line.split()).code == 0
    lines = [*complete, run.replace("--limit 1", "--limit 2")]
    script = SCRIPT.format(before='sys.modules["torch"] = None  # importing it fails', lines=lines, spared=())
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    whole, *others, started = done.stderr.split("EXIT ")[:-1]
    assert [text.split()[0] for text in (*others, started)] == ["0", "0", "0"] and "EXIT 1\n" in done.stderr
    assert "shapes (float32, cpu): 1 prompt of shapes, 1 image with ar; about " in whole
    assert "1 of 1 images already done" in whole and "shapes (float32, cpu): 2 prompts of shapes, 2 images" in started


@pytest.mark.parametrize("command", [group.name for group in typer.main.get_command(build_app()).commands.values()])
def test_a_command_is_the_same_whichever_others_are_loaded(command):
    every, alone = (typer.main.get_command(build_app(named)).commands for named in (None, command))
    assert command in alone and set(alone) <= set(every)
    assert [each.opts for each in alone[command].params] == [each.opts for each in every[command].params]


def test_the_index_lists_every_command_with_its_help(cli):
    full, index = (typer.main.get_command(app).commands for app in (build_app(), build_index()))
    assert list(index) == list(full)
    for name, command in index.items():
        assert (full[name].help + "\n\n").startswith(f"{command.help}\n\n"), name
    assert cli("--", "list", "prompts").out == cli("list", "prompts").out


def _parameters(group, path="specbench"):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _parameters(command, f"{path} {name}")
        else:
            yield from ((f"{path} {name} {parameter.name}", parameter) for parameter in command.params)


def _accepted() -> dict[str, set[str]]:
    """Values that options accept literally, by option name."""
    values: dict[str, set[str]] = {"what": {*LISTED}}
    values["format"] = {"markdown", "csv", "latex", "json", "html", "parquet"}
    values["tree"] = {"chain", *NAMED_TREES}
    for setting in run_settings():
        for option in (setting, *setting.others):
            values.setdefault(setting.name, set()).update((*option.choices, *setting.words))
    values["mode"] |= {"latency", "throughput"}
    return values


def test_help_of_an_option_of_several_decoders_names_them():
    helps = {path.split()[-1]: parameter.help for path, parameter in _parameters(typer.main.get_command(build_app()))}
    assert "(default for eagle-gbv: 3; for pathexplore: 2)" in helps["flag_paths"]
    assert "(default for zipar/zipar-released: off; for zipar-adaptive: on)" in helps["flag_adaptive"]
    assert re.search(r"^For gsd: .+ \[dim\]\(default 0.5\)\[/dim\]\. For gsd-released: ", helps["flag_d"])


def test_help_prints_every_choice_in_the_case_in_which_it_is_accepted():
    accepted, checked = _accepted(), 0
    for path, parameter in _parameters(typer.main.get_command(build_app())):
        valid = accepted.get(parameter.opts[0].removeprefix("--"), set())
        typed = {choice.lower(): choice for choice in valid}
        text = re.sub(r"\[/?[a-z ]+\]", " ", parameter.help or "")
        assert not re.search(r"\((default)? ?\)", parameter.help or ""), path
        for word in re.findall(r"[\w+-]+", text):
            assert word in valid or word.lower() not in typed, (
                f"{path}: {word!r} is accepted as {typed[word.lower()]!r}"
            )
        checked += bool(valid)
    assert checked > 20


def test_help_of_bench_names_the_defaults_of_the_table():
    bench = typer.main.get_command(build_app("bench")).commands["bench"]
    texts = {parameter.opts[0]: parameter.help for parameter in bench.params}
    for name in ("--model", "--prompts"):
        assert "default the table's" in texts[name] and "default shapes" not in texts[name]


def test_importing_the_package_imports_its_version_only(tmp_path):
    script = "import sys, specbench; print([name for name in sys.modules if name.startswith('specbench.')])\n"
    script += "import specbench.api; print(sorted({'torch', 'pandas', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == "['specbench.system', 'specbench.system.version']\n[]\n"


def test_help_of_run_begins_with_what_is_most_used_and_has_a_decoders_options_if_it_is_named(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first = cli("run", "--help").out.splitlines()
    shown = [line for line in first[:50] if "--" in line]
    names = ("decoder", "prompts", "limit", "out", "dry-run")
    assert all(any(f"--{name} " in line for line in shown) for name in names)
    assert len(first) < 160 and not any("--delta" in line for line in first)
    gsd, every = cli("run", "--help", "gsd").out, cli("run", "--help", "all").out
    assert "--delta" in gsd and "(default 0.15)" in gsd and "--tau" not in gsd and "--tau" in every
    assert cli("run", "--help", "gsd:G=3,window=8").out == gsd
    assert "did you mean 'gsd'" in cli("run", "--help", "gds").err
