"""Arguments and options that several commands share: their names, placeholders and completion in one place.

A type such as `Runs` is a whole parameter. Where only the help differs, a function makes the parameter's annotation:
`Annotated[str | None, model_option("Test this model.")]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.cli import completion

TABLE_FORMATS = ("markdown", "csv", "latex", "json", "html", "parquet")
RUN_FORMATS = ("markdown", "csv", "json", "latex", "html", "parquet")
_RUN = "Run id, prefix of a run id, or run folder."
_RUNS = "Run ids, prefixes of run ids, or run folders."
_DECODERS = "Decoder names, or plug-ins as package.module:Name."


def option(name: str, metavar: str, help: str, **more: Any) -> Any:
    """An option with the placeholder of its value; further arguments as for `typer.Option`."""
    return typer.Option(name, metavar=metavar, help=help, **more)


def switch(name: str, help: str, **more: Any) -> Any:
    """An option without a value; further arguments as for `typer.Option`."""
    return typer.Option(name, help=help, **more)


def model_option(help: str, **more: Any) -> Any:
    return option("--model", "NAME", help, autocompletion=completion.models, **more)


def metric_option(help: str) -> Any:
    return option("--metric", "NAME", help, autocompletion=completion.metrics)


def protocol_option(help: str) -> Any:
    return option("--protocol", "NAME", help, autocompletion=completion.of("sjd", "cool-sd"))


def prompts_option(help: str, **more: Any) -> Any:
    return option("--prompts", "SET|FILE", help, autocompletion=completion.prompt_sets, **more)


def weights_option(help: str) -> Any:
    return option("--weights", "DIR|OWNER/NAME", help)


def revision_option(help: str) -> Any:
    return option("--revision", "REF", help)


def device_option(help: str, **more: Any) -> Any:
    return option("--device", "DEVICE", help, **more)


def threads_option(help: str) -> Any:
    return option("--threads", "N", help)


def python_option(help: str, **more: Any) -> Any:
    return option("--python", "FILE", help, **more)


def decoders_argument(show_default: str) -> Any:
    return typer.Argument(
        metavar="DECODER", help=_DECODERS, show_default=show_default, autocompletion=completion.decoders
    )


def runs_argument(metavar: str = "RUN", help: str = _RUNS, with_tables: bool = False) -> Any:
    names = completion.runs_or_tables if with_tables else completion.runs
    return typer.Argument(metavar=metavar, help=help, show_default="all runs", autocompletion=names)


def run_argument(metavar: str = "RUN", help: str = _RUN) -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=completion.runs)


def dry_run_switch(**more: Any) -> Any:
    text = "Print every setting of the runs, what they take, and what stands in their way, and stop."
    return switch("--dry-run", text, **more)


def format_option(formats: tuple[str, ...]) -> Any:
    return option("--format", "NAME", f"One of {', '.join(formats)}.", autocompletion=completion.of(*formats))


Runs = Annotated[list[str] | None, runs_argument()]
Run = Annotated[str, run_argument()]
Reference = Annotated[
    Path | None, option("--reference", "DIR", "Folder of reference images for FID.", show_default="the COCO images")
]
Offline = Annotated[bool, switch("--offline", "Disable downloads (also HF_HUB_OFFLINE=1).")]
