"""It concerns several modules: commands and options complete in bash, zsh and fish."""

import pytest

from specbench.cli import command_completed

CASES = {"repo": {"report"}, "score --bundl": {"--bundled-only"}, "bench --shar": {"--shard"}, "prompts sh": {"show"}}


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
        offered = {text.split("\t")[0] for text in completed(shell, line).splitlines() if text}  # fish has helps
        assert offered >= CASES[line] and all(name.startswith(line.split()[-1]) for name in offered)
    assert all(f'"{name}"' in completed("zsh", line) for name in CASES[line])


def test_only_the_typed_command_is_built():
    assert command_completed({"COMP_WORDS": "specbench run --mod"}) == "run"
    assert command_completed({"_TYPER_COMPLETE_ARGS": "specbench list "}) == "list"
    assert command_completed({"COMP_WORDS": "specbench ru"}) is None
