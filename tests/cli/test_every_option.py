"""Every option of every command, from their declarations: a value, an absurd one and none never end in "a bug". It
concerns several modules: all commands and the settings from which options are made."""

import pytest
import typer

from specbench.cli import build_app, command_completed

STARTS = {
    "run": ["--dry-run", "--limit", "1"], "bench": ["sjd-1", "--dry-run"],
    "demo": ["--limit", "0", "--out", "/dev/null/results"], "doctor": ["--model", "nothing"], "audit": ["nothing"],
    "check": ["nothing"], "train-head": ["--model", "nothing"], "check-head": ["--model", "nothing"],
}  # fmt: skip
"""Keep commands from work that takes long; of `run` and `bench` settings are read all the same."""


def _commands(group, path=()):
    """The options of the program, then of each command, with its words."""
    yield path, group.params
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command.params


COMMAND = typer.main.get_command(build_app())
OPTIONS = {
    path: [
        (name, getattr(param, "is_flag", False))
        for param in params
        if param.param_type_name == "option" and param.name not in ("help", "flag_ray")  # Ray takes seconds to say no
        for name in (*param.opts, *param.secondary_opts)
    ]
    for path, params in _commands(COMMAND)
}
_AS_OF_RUN = {name for name, _ in OPTIONS[("run",)]}
PARTS = [
    pytest.param(path, options[at : at + 8], marks=marks, id=" ".join((*path, options[at][0])))
    for path, all_options in OPTIONS.items()
    for repeated, marks in ((False, ()), (True, pytest.mark.slow))
    for options in [[option for option in all_options if (path == ("bench",) and option[0] in _AS_OF_RUN) == repeated]]
    for at in range(0, len(options), 8)
]
"""Eight options a test; options of `bench` that are settings of `run` are left to the slow tests."""


@pytest.mark.parametrize(("path", "options"), PARTS)
def test_every_option_is_answered(path, options, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("specbench.cli._app_of", lambda arguments: COMMAND)  # made once: that is half of the time
    for name, switch in options:
        for typed in ([name], [f"{name}=x"]) if switch else ([name], [name, "1"], [name, "no such/thing=1,:x"]):
            outcome = cli(*path, *STARTS.get(path[0] if path else "", ()), *typed)
            assert outcome.code in (0, 2, 5) and "(a bug" not in outcome.err, (typed, outcome)
            if outcome.code == 2:
                assert outcome.err.count("error: ") <= 1, (typed, outcome)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed(shell, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    # if no shell started it, as on some CI, no shell is found
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    shown = cli("--show-completion", shell)
    assert shown.code == 0 and "specbench" in shown.out and not shown.err
    installed = cli("--install-completion", shell)
    assert installed.code == 0 and "completion installed" in installed.out and not installed.err


OFFERED = {"repo": {"report"}, "score --bundl": {"--bundled-only"}, "bench --shar": {"--shard"}, "prompts sh": {"show"}}


def completed(cli, monkeypatch, shell: str, line: str) -> str:
    """Return the answer to a shell that asks what `line` may become."""
    words = ["specbench", *line.split()]
    monkeypatch.setenv("_SPECBENCH_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"specbench {line}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    return cli().out


@pytest.mark.parametrize("line", OFFERED)
def test_names_complete(line, cli, monkeypatch):
    bash, fish, zsh = (completed(cli, monkeypatch, shell, line) for shell in ("bash", "fish", "zsh"))
    for answer in (bash, fish):
        offered = {text.split("\t")[0] for text in answer.splitlines() if text}  # fish has helps
        assert offered >= OFFERED[line] and all(name.startswith(line.split()[-1]) for name in offered)
    assert all(f'"{name}"' in zsh for name in OFFERED[line])


def test_only_the_typed_command_is_built():
    assert command_completed({"COMP_WORDS": "specbench run --mod"}) == "run"
    assert command_completed({"_TYPER_COMPLETE_ARGS": "specbench list "}) == "list"
    assert command_completed({"COMP_WORDS": "specbench ru"}) is None
