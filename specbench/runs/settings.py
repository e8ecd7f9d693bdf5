"""One merge of the four places a value can come from: flag, then environment, then config file, then default.

A setting has one name everywhere: `--top-k` on the command line, `SPECBENCH_TOP_K` in the environment and `top-k` in a
config file. Every resolved value remembers where it came from. No torch here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from specbench.errors import SpecbenchError, unknown_name
from specbench.specs.components import CHOICES
from specbench.specs.options import Option
from specbench.specs.presets import PRESETS, options_of
from specbench.system import compiler

PREFIX = "SPECBENCH_"
MAX_SEED = 2**63 - 1
# Read at start-up by other parts of the tool, so allowed in the environment beside the settings.
OTHER_VARIABLES = ("SPECBENCH_DEBUG", "SPECBENCH_CONFIG", "SPECBENCH_CACHE", "SPECBENCH_OFFLINE")


@dataclass(frozen=True)
class Setting:
    """A knob of a command and how it is shown.

    Attributes:
        option: name, default, help and accepted values.
        panel: the help panel it belongs to.
        metavar: placeholder of its value in help screens; empty for switches.
        unset: who decides when nobody sets it, for example "the model"; empty when `option.default` applies.
        many: it may be given several times, and takes lists separated by commas.
        words: extra words accepted beside `option`'s type, for example "auto" for a number.
        others: further options of this name, of other decoders; a value stays text until its decoder reads it.
    """

    option: Option
    panel: str
    metavar: str
    unset: str = ""
    many: bool = False
    words: tuple[str, ...] = ()
    others: tuple[Option, ...] = ()

    @property
    def name(self) -> str:
        return self.option.name

    @property
    def env(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def default(self) -> object:
        if self.many:
            return [self.option.default] if self.option.default else []
        return None if self.unset else self.option.default

    def parse(self, value: object) -> object:
        """`value`, from any origin, as this setting's type.

        Raises:
            SpecbenchError: wrong type or out of range.
        """
        if self.many:
            items = value if isinstance(value, list | tuple) else [value]
            return [part for item in items for part in split_list(str(item))]
        if isinstance(value, list | tuple | dict):
            raise SpecbenchError(f"--{self.name} {value!r}: expected one value", self.option.help)
        if value in self.words:
            return value
        if any(_reads(option, value) for option in self.others):
            return value
        parsed = self.option.parse(value)
        return value if self.others else parsed


@dataclass(frozen=True)
class Value:
    """A resolved value and its origin: a flag, a variable, a file, a default, or who decides later."""

    value: object
    origin: str

    @property
    def given(self) -> bool:
        """Whether somebody set it, as opposed to a default."""
        return not self.origin.startswith(("default", "left to"))


def _reads(option: Option, value: object) -> bool:
    try:
        option.parse(value)
    except SpecbenchError:
        return False
    return True


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_DTYPES = ("float32", "bfloat16", "float16")
MODES = ("latency", "throughput")
_RUN, _WORKER_PANEL, _MODEL_PANEL = "What to run", "Where to run", "Model"

_WORK = (
    Setting(
        Option("decoder", "sjd", "decoders, with inline options if wanted: ar,gsd:G=50,window=16"),
        _RUN,
        "NAME[:OPTION=VALUE,...]",
        many=True,
    ),
    Setting(Option("prompts", "shapes", "a prompt set's name or a file of prompts"), _RUN, "SET|FILE"),
    Setting(Option("limit", 1, "only the first N prompts", minimum=1), _RUN, "N", unset="all prompts"),
    Setting(Option("ids", "", "only these prompt ids"), _RUN, "ID,...", many=True),
    Setting(Option("samples", 1, "images per prompt", minimum=1, maximum=10**6), _RUN, "N"),
    Setting(Option("seed", 0, "whole number that addresses all noise", minimum=0, maximum=MAX_SEED), _RUN, "N"),
    Setting(
        Option("batch", 1, "images decoded together, auto: as many as fit; latency means 1", minimum=1, maximum=4096),
        _RUN,
        "N|auto",
        words=("auto",),
    ),
)
_WORKERS = (
    Setting(
        Option("workers", 1, "processes that decode, each with a model of its own", minimum=1, maximum=4096),
        _WORKER_PANEL,
        "N",
        unset="one, or with --ray one per GPU or node",
    ),
    Setting(
        Option("ray", "", "address of a Ray cluster that is up, or auto"),
        _WORKER_PANEL,
        "ADDRESS",
        unset="this machine",
    ),
    Setting(Option("shard", "", "only the i-th of n equal parts of the images"), _WORKER_PANEL, "I/N", unset="all"),
    Setting(
        Option("mode", "", "latency: nothing shares the device; throughput: images only", choices=MODES),
        _WORKER_PANEL,
        "MODE",
        unset="latency for one worker and batch 1",
    ),
)
_MODEL = (
    Setting(Option("model", "shapes", "model to decode with; see 'specbench list models'"), _MODEL_PANEL, "NAME"),
    Setting(
        Option("weights", "", "a checkpoint other than the official one"),
        _MODEL_PANEL,
        "DIR|OWNER/NAME",
        unset="the model",
    ),
    Setting(Option("revision", "", "revision of its hub repository"), _MODEL_PANEL, "REF", unset="the hub"),
    Setting(
        Option("random-weights", False, "the true architecture with random weights, to measure speed only"),
        _MODEL_PANEL,
        "",
    ),
    Setting(
        Option("scale", "full", "tiny: a grid of 4 x 4 tokens, and random weights to match", choices=("full", "tiny")),
        _MODEL_PANEL,
        "SIZE",
    ),
    Setting(
        Option("dtype", "float32", f"number format: {', '.join(_DTYPES)}", choices=_DTYPES),
        _MODEL_PANEL,
        "TYPE",
        unset="the model",
    ),
    Setting(Option("device", "cpu", "device to run on, for example cpu, cuda or cuda:1"), _MODEL_PANEL, "DEVICE"),
    Setting(
        Option("threads", 0, "CPU threads; 0 means all that this process may use", minimum=0, maximum=1024),
        _MODEL_PANEL,
        "N",
    ),
    Setting(
        Option(
            "compile",
            "auto",
            "compile steps before the clock starts; auto: on CUDA only (on a CPU it takes minutes, the first time)",
            choices=compiler.MODES,
        ),
        _MODEL_PANEL,
        "WHEN",
    ),
)
_SAMPLING = tuple(
    Setting(option, "Sampling", metavar, unset="the model")
    for metavar, option in (
        ("X", Option("cfg", 1.0, "guidance scale; 1 switches guidance off", minimum=0.0, maximum=1e4)),
        ("X", Option("temperature", 1.0, "divides the guided logits", above=0.0, maximum=1e4)),
        ("K", Option("top-k", 0, "keep the K most likely tokens; 0 keeps all", minimum=0)),
        ("P", Option("top-p", 1.0, "keep the fewest tokens of this mass; 1 keeps all", above=0.0, maximum=1.0)),
    )
)
OUT = Setting(Option("out", "results", "the results folder"), "Output", "DIR")
QUIET = Setting(Option("quiet", False, "say nothing but errors"), "Output", "")
TRACE = Setting(
    Option("trace", False, "keep, token by token, how far the draft's law was from the target's (TV) and its top-1"),
    "Output",
    "",
)
JSON = Setting(Option("json", False, "one JSON array on stdout"), "Output", "")
OPEN_IN_TABLES = {
    *("model", "weights", "revision", "random-weights", "scale", "prompts", "limit", "ids", "samples", "seed"),
    *("batch", "dtype", "device", "threads", "compile", "cfg", "temperature", "top-k", "top-p"),
    *("out", "quiet", "json"),
}
"""Settings of `specbench run` that a paper's table leaves open, or whose values may take the place of its own."""


def decoder_settings() -> tuple[Setting, ...]:
    """One setting per choice (drafter, init, ...) and per option any decoder understands, in menu order."""
    choices = (
        Setting(
            Option(kind, "", f"{kind}: {', '.join(values)}", choices=tuple(values)),
            "Decoder choices",
            "NAME",
            unset="the decoder",
        )
        for kind, values in CHOICES.items()
    )
    variants: dict[str, dict[tuple, Option]] = {}
    components = (part for values in CHOICES.values() for part in values.values())
    presets = (options_of(preset).values() for preset in PRESETS.values())
    for option in chain(*(part.options for part in components), *presets):
        variants.setdefault(option.name, {}).setdefault((option.type, option.help), option)
    knobs = (
        Setting(
            first,
            "Decoder options",
            "N|auto" if name == "window" else _metavar(first),
            unset="the decoder",
            words=("auto",) if name == "window" else (),
            others=tuple(others),
        )
        for name, (first, *others) in ((name, found.values()) for name, found in variants.items())
    )
    return (*choices, *knobs)


def _metavar(option: Option) -> str:
    if option.choices:
        return "NAME"
    return {int: "N", float: "X", bool: "", str: "TEXT"}[option.type]


def run_settings() -> tuple[Setting, ...]:
    """Every setting of `specbench run`."""
    return (*_WORK, *_WORKERS, *_MODEL, *_SAMPLING, *decoder_settings(), OUT, TRACE, QUIET, JSON)


def read_config(path: str | Path, known: Iterable[str]) -> dict[str, object]:
    """A TOML file of settings, by name. Unknown names are refused.

    Raises:
        SpecbenchError: not a readable TOML file, or a key that is no setting.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise SpecbenchError(f"--config {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecbenchError(f"--config {path}: not a TOML file ({error})") from None
    known = list(known)
    for key in values:
        if key not in known:
            raise unknown_name(f"setting in {path}:", key, known)
    return values


def merge(
    settings: Sequence[Setting],
    flags: Mapping[str, object],
    env: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
    config_name: str = "config file",
) -> dict[str, Value]:
    """Every setting's value with its origin; flag over environment over config file over default.

    Args:
        flags: by setting name; None means not given.
        env: the environment; the process's own if None.
        config: as `read_config` returns it.

    Raises:
        SpecbenchError: an unknown flag name or `SPECBENCH_` variable, or a value that does not parse.
    """
    env = os.environ if env is None else env
    config = config or {}
    names = {setting.name for setting in settings}
    for flag in flags:
        if flag not in names:
            raise unknown_name("setting", flag, names)
    return {setting.name: _pick(setting, flags, env, config, config_name) for setting in settings}


def check_environment(env: Mapping[str, str] | None = None) -> None:
    """Refuse a `SPECBENCH_` variable that no command reads, as a mistyped name would otherwise be ignored."""
    valid = [setting.env for setting in run_settings()] + list(OTHER_VARIABLES)
    for variable in os.environ if env is None else env:
        if variable.startswith(PREFIX) and variable not in valid:
            raise unknown_name("environment variable", variable, valid)


def _pick(setting: Setting, flags: Mapping, env: Mapping, config: Mapping, config_name: str) -> Value:
    sources = (
        (flags.get(setting.name), f"flag --{setting.name}"),
        (env.get(setting.env) or None, f"environment {setting.env}"),
        (config.get(setting.name), f"file {config_name}"),
    )
    for raw, origin in sources:
        if raw is not None:
            try:
                return Value(setting.parse(raw), origin)
            except SpecbenchError as error:
                if origin.startswith("flag"):
                    raise
                raise SpecbenchError(f"{error.what} ({origin})", error.try_this, error.exit_code) from None
    return Value(setting.default, f"left to {setting.unset}" if setting.unset else "default")
