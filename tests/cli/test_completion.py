"""Values complete in bash, zsh and fish: names of decoders, models, metrics, tables, prompt sets, runs and prompts."""

import shutil
import subprocess
import sys

import pytest

from specbench.cli.completion import command_completed

CASES = {
    "run --decoder ar,gsd-r": {"ar,gsd-released"},
    "run --model lumina-3": {"lumina-34b"},
    "run --dtype b": {"bfloat16"},
    "run --category count": {"counting"},
    "score --metric shapes-": {"shapes-clip", "shapes-detector", "shapes-frechet"},
    "bench gsd-fig1": {"gsd-fig10"},
    "prompts show shapes-": {"shapes-hard"},
    "list mo": {"models"},
    "check sjd-p": {"sjd-pac"},
}


@pytest.fixture
def completed(cli, monkeypatch):
    """`completed(shell, line)`: the answer to a shell that asks what `line` may become."""

    def ask(shell: str, line: str) -> str:
        words = ["specbench", *line.split()]
        monkeypatch.setenv("_SPECBENCH_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"specbench {line}")
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        return cli().out

    return ask


@pytest.mark.parametrize("line", CASES)
def test_names_complete(completed, line):
    for shell in ("bash", "fish"):
        found = set(completed(shell, line).split())
        assert found >= CASES[line] and all(name.startswith(line.split()[-1]) for name in found)
    assert all(f'"{name}"' in completed("zsh", line) for name in CASES[line])


def test_runs_and_their_prompts_complete(completed, tmp_path):
    (tmp_path / "shapes-ar-0123").mkdir()
    (tmp_path / "shapes-ar-0123" / "run.json").write_text("{")
    assert completed("bash", f"compare --out {tmp_path} shapes-").split() == ["shapes-ar-0123"]
    assert completed("bash", f"show --out {tmp_path} shapes-ar-0123 a") == "\n", "a damaged run completes to nothing"


def test_bash_is_given_names_as_they_are_typed(completed):
    assert completed("bash", "run --prompts parti/F").strip() == r"parti/Food\ \&\ Beverage"
    assert "parti/Food & Beverage" in completed("fish", "run --prompts parti/F")


def test_only_the_command_at_hand_is_built():
    asked = {"_SPECBENCH_COMPLETE": "complete_bash"}
    assert command_completed(asked | {"COMP_WORDS": "specbench run --mod"}) == "run"
    assert command_completed(asked | {"_TYPER_COMPLETE_ARGS": "specbench list "}) == "list"
    assert command_completed(asked | {"COMP_WORDS": "specbench ru"}) is None
    assert command_completed({"COMP_WORDS": "specbench run --mod"}) is None


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_itself_completes(tmp_path):
    program = tmp_path / "specbench"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specbench "$@"\n')
    program.chmod(0o755)
    source = f"set -x PATH {tmp_path} $PATH; env _SPECBENCH_COMPLETE=source_fish specbench | source"
    asked = f'{source}; complete -C "specbench bench gsd-fig1"'
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["gsd-fig10"], done.stderr
