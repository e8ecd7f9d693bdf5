"""Settings of `specbench run`, and their resolution: flag, then environment, then config file, then default: `--top-k`,
`SPECBENCH_TOP_K`, `top-k`. Every resolved value records its origin. Imports no torch."""

from __future__ import annotations

import csv
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from specbench import names
from specbench.errors import SpecbenchError, unknown_name
from specbench.models.facts import DTYPES, EIGHT_BITS_GAIN
from specbench.runs import compiler
from specbench.specs.components import CHOICES, COMPONENT_KINDS
from specbench.specs.options import Option, SettingSource, parse_size
from specbench.specs.presets import PRESETS, options_of
from specbench.system.files import text_of
from specbench.system.torch_device import AUTO, chosen_device

_PREFIX = "SPECBENCH_"
MAX_SEED = 2**63 - 1
OTHER_VARIABLES = {
    "SPECBENCH_CONFIG": "a settings file, as `--config`",
    "SPECBENCH_CACHE": "folder of downloads and of this machine's measurements",
    "SPECBENCH_OFFLINE": "1: download nothing",
    "SPECBENCH_PROMPTS_MIRROR": "address of a copy of the [public prompt sets](prompts.md)",
    "SPECBENCH_REVISIONS": "[revisions of hub repositories](weights.md#pinned-commits), `owner/name@COMMIT`, separated "
    "by commas",
    "SPECBENCH_PINNED_ONLY": "1: download no hub repository at a commit that neither specbench nor you have named, as "
    "`--pinned-only`",
    "SPECBENCH_DEBUG": "1: show tracebacks, as `--debug`",
}
"""Environment variables other than the settings' own, with their meaning, for docs/commands.md."""


@dataclass(frozen=True)
class Setting(Option):
    """An option of `specbench run` and its presentation in help."""

    panel: str = ""  # the help panel it belongs to
    metavar: str = ""  # placeholder of its value in help screens; empty for switches
    unset: str = ""  # source of the value when it is not set, for example "the model"; empty when `default` applies
    many: bool = False  # may be repeated, and accepts lists separated by commas
    words: tuple[str, ...] = ()  # extra words accepted in addition to the type, for example "auto" for a number
    # options with the same name of other decoders; the value stays text until a decoder parses it
    others: tuple[Option, ...] = ()

    @property
    def env(self) -> str:
        return _PREFIX + self.name.replace("-", "_").upper()

    @property
    def value_unset(self) -> object:
        if self.many:
            return split_list(str(self.default))
        return None if self.unset else self.default

    def parse(self, value: object) -> object:
        """Parse `value`, from any origin, into this setting's type."""
        if self.many:
            items = [value] if isinstance(value, str | dict) or not isinstance(value, Iterable) else value
            if not (parts := [part for item in items for part in split_list(str(item))]):
                raise SpecbenchError(f"no {self.name} given", f"name some, or omit --{self.name}")
            return parts
        if isinstance(value, list | tuple | dict):
            raise SpecbenchError(f"--{self.name} {value!r}: expected one value", self.help)
        if value in self.words:
            return value
        return value if self.others else super().parse(value)


@dataclass(frozen=True)
class Value:
    """A resolved value and its source; `detail`: which flag, variable, file, model or publication."""

    value: Any
    source: SettingSource
    detail: str = ""

    @property
    def origin(self) -> str:
        return " ".join(filter(None, (self.source, self.detail)))

    @property
    def given(self) -> bool:
        return self.source not in (SettingSource.DEFAULT, SettingSource.LEFT)


def plain_values(values: Mapping[str, Value]) -> dict[str, Any]:
    return {name: value.value for name, value in values.items()}


def split_list(text: str) -> list[str]:
    """Split at commas; a part that contains a comma is quoted."""
    parts = next(csv.reader([text], skipinitialspace=True)) if '"' in text and text.isprintable() else text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _panel(panel: str, default_unset: str = "") -> Callable[..., Setting]:
    """A maker of the settings of one help panel."""

    def setting(
        name: str, default: Any, help: str, metavar: str = "", unset: str = default_unset, **more: Any
    ) -> Setting:
        return Setting(name, default, help, panel=panel, metavar=metavar, unset=unset, **more)

    return setting


_MODES = ("latency", "throughput")
_what, _where, _model = _panel("What to run"), _panel("Where to run"), _panel("Model")
_sampling, _output = _panel("Sampling", "the model"), _panel("Output")

COLUMN = _what("prompt-column", "", "column of the prompt file that holds the texts", "NAME", "text, prompt or caption")
DRAWN = (
    _what("limit", 1, "use only the first N prompts", "N", "all prompts", minimum=1),
    _what("offset", 0, "leave out the first N prompts", "N", minimum=0),
    _what("sample", 1, "use only a random sample of N prompts, the same one every time", "N", "all prompts", minimum=1),
    _what("per-category", 1, "use only the first N prompts of each category", "N", "all prompts", minimum=1),
    _what("category", "", "use only the prompts of these categories (a comma: in quotes)", "NAME,...", many=True),
    _what("ids", "", "use only the prompts with these ids", "ID,...", many=True),
)
"""Which prompts of a set are used, see `specbench.prompts.prompt_set.Drawing`."""

# fmt: off
_WORK = (
    _what("decoder", "ar,sjd",
        "decoders, each with optional inline options, for example ar,gsd:G=50,window=16", "NAME[:OPTION=VALUE,...]",
        many=True),
    _what("prompts", "", "prompt set or file; by default the model's own set, else parti", "SET|FILE", "the model"),
    COLUMN,
    *DRAWN,
    _what("samples", 1, "images per prompt", "N", minimum=1, maximum=10**6),
    _what("seed", 0, "random seed", "N", minimum=0, maximum=MAX_SEED),
    _what("baseline", 8,
        "also decode AR on the first N prompts, for the speed-up, if no decoder is AR; 0: never", "N",
        "8; none with a batch or workers, whose latencies are not measured", minimum=0),
    _what("batch", 1,
        "images decoded together, or auto: as many as fit in memory (always 1 in latency mode)", "N|auto", minimum=1,
        maximum=4096, words=("auto",)),
)
_WORKERS = (
    _where("workers", 1,
        "worker processes, each with its own copy of the model", "N", "one, or with --ray one per GPU or node",
        minimum=1, maximum=4096),
    _where("ray", "", "address of a running Ray cluster, or auto", "ADDRESS", "this machine"),
    _where("shard", "", "decode only part I of N equal parts; auto: of SLURM, LSF, MPI or torchrun", "I/N", "all"),
    _where("mode", "",
        "purpose of the run; latency: one image at a time, alone on the device; throughput: no latency is reported",
        "MODE", "latency for one worker and batch 1", choices=_MODES),
)
_MODEL = (
    _model("model", "shapes", "model, one of 'specbench list models'", "NAME"),
    _model("weights", "", "checkpoint to load instead of the official one", "DIR|OWNER/NAME", "the model"),
    _model("revision", "", "revision of the checkpoint's Hugging Face repository", "REF", "the hub"),
    _model("guidance-rows", "official",
        "unconditional prompt of lumina and anole: official, or released as in SJD's and GSD's code, which keeps "
        "the last token of the prompt", "NAME", choices=("official", "released")),
    _model("prompt-form", "official",
        "prompt of anole: official (the bare text), or released (SJD's script: 'Generate an image of ' before it)",
        "NAME", choices=("official", "released")),
    _model("guidance-schedule", "official",
        "guidance of lumina2: official (the scale that is asked for), or released (its code: every scale below 4 is "
        "raised to 4, above 4 it falls back to 4 within the first row)", "NAME", choices=("official", "released")),
    _model("size", "", "image size in pixels, of models that were trained for several", "WIDTHxHEIGHT", "the model",
        reads=names.size, check=parse_size),
    _model("random-weights", False, "use random weights in the true architecture; measures speed only"),
    _model("scale", "full",
        "model size; tiny: 4 x 4 tokens, with --random-weights a small network", "SIZE", choices=("full", "tiny")),
    _model("dtype", "float32",
        f"number format of the weights: {', '.join(DTYPES)} (matrices in eight bits, by torchao: another target; "
        f"{EIGHT_BITS_GAIN})", "TYPE", "the model", choices=DTYPES),
    _model("device", AUTO, "torch device: cpu, cuda, cuda:1, or auto: CUDA where torch finds a GPU", "DEVICE"),
    _model("threads", 0, "CPU threads; 0 uses the cores that other processes leave free", "N", minimum=0, maximum=1024),
    _model("compile", "auto",
        "compile the decode step before timing; auto: on CUDA, and on a CPU if there are enough images to pay for it",
        "WHEN", choices=compiler.MODES),
)
_SAMPLING = (
    _sampling("cfg", 1.0, "classifier-free guidance scale; 1 disables guidance", "X", minimum=0.0, maximum=1e4),
    _sampling("temperature", 1.0, "sampling temperature, applied after guidance", "X", minimum=1e-6, maximum=1e4,
        outside="--top-k 1 takes the most probable token every time, as temperature 0 would"),
    _sampling("top-k", 0, "sample from the K most probable tokens; 0 disables the filter", "K", minimum=0),
    _sampling("top-p", 1.0,
        "sample from the smallest set of tokens with total probability P; 1 disables the filter", "P", above=0.0,
        maximum=1.0),
    _sampling("entropy-scale", 0.0,
        "multiply the temperature by 2.5 exp(-H/X) + 0.6, H the entropy after top-k; 0 disables it", "X", minimum=0.0,
        maximum=1e4),
    _sampling("min-p", 0.0,
        "sample from the tokens of at least P times the largest probability; 0 disables the filter", "P", minimum=0.0,
        maximum=1.0),
    _sampling("top-n-sigma", 0.0,
        "sample from the logits within N standard deviations of the largest one, after top-k; 0 disables the filter",
        "N", minimum=0.0, maximum=1e4),
)
_OUTPUT = (
    _output("out", "results", "results folder", "DIR"),
    _output("trace", False,
        "record per-token total variation between draft and target distributions, and the draft's top-1 probability"),
    _output("quiet", False, "print only errors"),
    _output("json", False, "print one JSON array on stdout"),
)
# fmt: on
RUN_ORIGINS = (*(setting.name for setting in (*_MODEL, *_SAMPLING)), "prompts", "seed", "batch")
"""Settings, other than the decoder's, that distinguish runs."""
OPEN_IN_TABLES = {
    *("model", "weights", "revision", "random-weights", "scale", "size", "prompts", "limit", "ids", "samples", "seed"),
    *("offset", "sample", "per-category", "category"),
    *("batch", "shard", "dtype", "device", "threads", "compile", "cfg", "temperature", "top-k", "top-p"),
    *("entropy-scale", "min-p", "top-n-sigma", "head", "out", "quiet", "json"),
}
"""Settings of `specbench run` that a paper's table does not fix, or whose values may override the table's."""


OF_TOKENS = ({setting.name for setting in (*_MODEL, *_SAMPLING)} | {"prompts"}) - {"threads", "compile"}
"""Settings of `specbench run` that an import of tokens takes: the model, and the sampling that is claimed."""
OF_ENGINES = OF_TOKENS | {"limit", "batch"}
"""Settings that drawing by a serving engine takes."""
OF_IMAGES = OF_TOKENS - {"prompts"} | {"threads", "compile", "decoder", "seed", "trace"}
"""Settings of `specbench run` for images that are not stored, in addition to the options of their decoder."""


def decoder_settings() -> tuple[Setting, ...]:
    """List one setting per component kind (drafter, init, ...) and per option of any decoder, in help order."""
    return _settings_of(tuple(PRESETS), tuple(tuple(values.values()) for values in CHOICES.values()))


@cache
def _settings_of(_presets: tuple, _components: tuple) -> tuple[Setting, ...]:
    """`decoder_settings` of these presets and components, which plug-ins and cells add to."""
    choice, knob = _panel("Decoder choices", "the decoder"), _panel("Decoder options", "the decoder")
    kinds = (
        choice(kind, "", f"{COMPONENT_KINDS[kind]}: {', '.join(values)}", "NAME", choices=tuple(values))
        for kind, values in CHOICES.items()
    )
    metavars, of_type = {"tree": "TREE", "head": "DIR", "pairs": "FILE"}, {int: "N", float: "X", bool: "", str: "TEXT"}
    variants: dict[str, dict[tuple, Option]] = {}
    components = (part for values in CHOICES.values() for part in values.values())
    presets = (options_of(preset).values() for preset in PRESETS.values())
    for option in chain(*(part.options for part in components), *presets):
        variants.setdefault(option.name, {}).setdefault((option.type, option.help), option)
    knobs = (
        knob(
            **vars(first),
            metavar="N|auto"
            if name == "window"
            else metavars.get(name) or ("NAME" if first.choices else of_type[first.type]),
            words=("auto",) if name == "window" else (),
            others=tuple(others),
        )
        for name, (first, *others) in ((name, options.values()) for name, options in variants.items())
    )
    return (*kinds, *knobs)


def run_settings() -> tuple[Setting, ...]:
    return (*_WORK, *_WORKERS, *_MODEL, *_SAMPLING, *decoder_settings(), *_OUTPUT)


def read_config(path: str | Path, keys: Iterable[str]) -> dict[str, object]:
    """Read settings from a TOML file, by name."""
    try:
        values = tomllib.loads(text_of(Path(path).read_bytes()))
    except OSError as error:
        raise SpecbenchError(f"--config {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecbenchError(f"--config {path}: not a TOML file ({error})") from None
    keys = list(keys)
    return {setting_name(f"setting in {path}:", key, keys): value for key, value in values.items()}


def setting_name(kind: str, typed: str, keys: Iterable[str]) -> str:
    """The setting that a key of a file or an argument means."""
    keys = list(keys)
    name = names.option(typed, keys)
    if name is None and (advice := names.advice(typed)):
        raise SpecbenchError(f"unknown {kind} '{typed}'", advice)
    if name is None:
        raise unknown_name(kind, typed, keys)
    return name


def merge(
    settings: Sequence[Setting],
    flags: Mapping[str, object],
    env: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
    config_name: str = "config file",
) -> dict[str, Value]:
    """Resolve every setting to a value and its origin; precedence: flag (None and (): not given), environment (None:
    the process's), config file (as `read_config` returns it), default."""
    env = os.environ if env is None else env
    config = config or {}
    keys = [setting.name for setting in settings]
    given = {flag: value for flag, value in flags.items() if not (isinstance(value, tuple) and not value)}
    flags = {setting_name("setting", flag, keys): value for flag, value in given.items()}
    values = {setting.name: _pick(setting, flags, env, config, config_name) for setting in settings}
    return {name: _settled(name, value, values) for name, value in values.items()}


def _settled(name: str, value: Value, values: Mapping[str, Value]) -> Value:
    """A value whose default depends on this machine or on the model."""
    if name == "device":
        return replace(value, value=chosen_device(value.value))
    if name == "model":
        return replace(value, value=_model_named(value.value))
    if name == "prompts" and (value.value is not None or "model" in values):
        from specbench.prompts import default_prompts, set_name  # not for `--help`

        if value.value is not None:
            return replace(value, value=set_name(value.value))
        model = _model_named(values["model"].value)
        if (prompts := default_prompts(model)) is None:
            what = f"'{model}' is a second stage, whose prompts are the images of a first one"
            raise SpecbenchError(what, "--prompts results/RUN, a run of tar-1.5b or tar-7b")
        return Value(prompts, SettingSource.DEFAULT, f"of {model}")
    return value


def _model_named(typed: str) -> str:
    """Name of a model in the catalogue; an unknown name is returned as typed, and refused when the model is loaded."""
    from specbench.models.catalog import model_name, models  # not for `--help`

    with suppress(SpecbenchError):
        return typed if typed in models() else model_name(typed)
    return typed


def check_environment(env: Mapping[str, str] | None = None) -> None:
    """Reject `SPECBENCH_` variables that no command reads; a mistyped name would otherwise be ignored."""
    valid = [setting.env for setting in run_settings()] + list(OTHER_VARIABLES)
    for variable in os.environ if env is None else env:
        if variable.startswith(_PREFIX) and variable not in valid:
            raise unknown_name("environment variable", variable, valid)


def _pick(setting: Setting, flags: Mapping, env: Mapping, config: Mapping, config_name: str) -> Value:
    sources = (
        (flags.get(setting.name), SettingSource.FLAG, f"--{setting.name}"),
        (
            env.get(setting.env) if setting.many else env.get(setting.env) or None,
            SettingSource.ENVIRONMENT,
            setting.env,
        ),
        (config.get(setting.name), SettingSource.FILE, config_name),
    )
    for raw, source, detail in sources:
        if raw is not None:
            try:
                return Value(setting.parse(raw), source, detail)
            except SpecbenchError as error:
                if setting.panel == "Decoder options" and ":" in str(flags.get("decoder")):
                    return Value(
                        raw, source, detail
                    )  # the option of the decoder that is run decides, be it of a user's file
                if source is SettingSource.FLAG:
                    raise
                raise SpecbenchError(f"{error.what} ({source} {detail})", error.try_this, error.exit_code) from None
    return Value(setting.value_unset, SettingSource.LEFT if setting.unset else SettingSource.DEFAULT, setting.unset)
