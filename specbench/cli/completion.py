"""Completion of values in a shell: names of decoders, models, metrics, tables, prompt sets, runs and prompts.

Every function takes the text typed so far and returns what it may become. What cannot be read completes to nothing.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.commands import COMPLETION
from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench.runs.settings import Setting

Complete = Callable[[Any, str], list[str]]  # Called with the context of the command line and the text typed so far
_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # Variables in which bash, and zsh and fish, hand over the command line


def command_completed(environment: Mapping[str, str]) -> str | None:
    """Name of the command whose line a shell asks to complete; None without one, or while it is being typed."""
    if COMPLETION not in environment:
        return None
    line = next((environment[name] for name in _LINES if environment.get(name)), "")
    try:
        words = shlex.split(line)
    except ValueError:  # an open quotation mark
        words = line.split()
    return words[1] if len(words) > 2 or (len(words) == 2 and line[-1:].isspace()) else None


def of_setting(setting: Setting) -> Complete | None:
    """Completion of a setting's value; None where its values have no names."""
    named = {"decoder": decoders, "model": models, "prompts": prompt_sets, "ids": prompt_ids, "category": categories}
    names = (*setting.choices, *setting.words)
    return named.get(setting.name) or (_from(lambda ctx: names) if names else None)


def _from(names: Callable[[Any], Iterable[str]], several: bool = False) -> Complete:
    """Completion from a list of names, which may need the other values of the command line; of the last name where
    `several` may stand there, separated by commas."""

    def complete(ctx, incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        try:
            known = list(names(ctx))
        except (SpecbenchError, OSError):  # there is nobody to tell: the shell shows no errors
            return []
        return [_typed(done + comma + name) for name in known if name.startswith(last)]

    return complete


def _typed(name: str) -> str:
    """A name as it is typed: bash inserts it unquoted, the other shells quote it themselves."""
    in_bash = os.environ.get(COMPLETION, "").endswith("bash")
    return re.sub(r"([^\w@%+=:,./~\[\]-])", r"\\\1", name) if in_bash else name


def _named(place: str) -> Callable[[Any], Iterable[str]]:
    """Names that stand at "module:attribute", or that its function returns."""

    def names(ctx) -> Iterable[str]:
        module, _, attribute = place.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        return value() if callable(value) else value

    return names


_table_names = _named("specbench.papers.table_files:table_names")


def _run_names(ctx) -> Iterable[str]:
    from specbench.store.run_folders import runs_in

    return [folder.name for folder in runs_in(Path(_out(ctx)))]


def _prompt_ids(ctx) -> Iterable[str]:
    """Ids of the prompts of the run that is named, else of the set that is named."""
    if run := ctx.params.get("run"):
        from specbench.store.run_folders import find_runs
        from specbench.store.run_store import RunStore

        rows = (RunStore(folder).samples([]) for folder in find_runs(_out(ctx), [run]))
        return dict.fromkeys(name for frame in rows for name in frame["prompt_id"])
    return [prompt.id for prompt in _prompts(ctx)]


def _prompts(ctx):
    from specbench.prompts import load_prompts

    return load_prompts(ctx.params.get("flag_prompts") or os.environ.get("SPECBENCH_PROMPTS") or "shapes").prompts


def _out(ctx) -> str:
    return ctx.params.get("out") or ctx.params.get("flag_out") or os.environ.get("SPECBENCH_OUT") or "results"


decoders = _from(_named("specbench.specs.presets:PRESETS"), several=True)
models = _from(_named("specbench.models.catalog:models"))
metrics = _from(_named("specbench.metrics.catalog:metric_names"))
tables = _from(_table_names)
prompt_sets = _from(_named("specbench.prompts:prompt_set_names"))
runs = _from(_run_names)
runs_or_tables = _from(lambda ctx: [*_run_names(ctx), *_table_names(ctx)])
prompt_ids = _from(_prompt_ids, several=True)
categories = _from(
    lambda ctx: dict.fromkeys(prompt.category for prompt in _prompts(ctx) if prompt.category), several=True
)
fetchable = _from(_named("specbench.papers.downloads:fetchable"))


def of(*names: str) -> Complete:
    """Completion from fixed names."""
    return _from(lambda ctx: names)
