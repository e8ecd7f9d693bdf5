"""Settings of `specbench run`, and their resolution: flag (`--top-k`), then environment (`SPECBENCH_TOP_K`), then
config file (`top-k`), then default. Every resolved value records its origin. Imports no torch."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from specbench import names
from specbench.errors import SpecbenchError, unknown_name
from specbench.models.facts import DTYPES, EIGHT_BITS_GAIN, SCALES, Form, Scale
from specbench.runs import compiler
from specbench.specs.components import CHOICES, COMPONENT_KINDS
from specbench.specs.options import (
    ENV_PREFIX,
    Component,
    Option,
    Setting,
    SettingOrigin,
    SettingSource,
    Use,
    parse_size,
)
from specbench.specs.presets import PRESETS, options_of
from specbench.specs.run_spec import SAMPLING, Mode
from specbench.system.files import text_of
from specbench.system.torch_device import AUTO, chosen_device

MAX_SEED = 2**63 - 1
OTHER_VARIABLES = {
    "SPECBENCH_CONFIG": "file of settings, as with `--config`",
    "SPECBENCH_CACHE": "folder for downloads and for measurements of this machine",
    "SPECBENCH_OFFLINE": "if 1, download nothing",
    "SPECBENCH_PROMPTS_MIRROR": "address of a copy of the [public prompt sets](prompts.md)",
    "SPECBENCH_REVISIONS": "[revisions of hub repositories](weights.md#pinned-commits), `owner/name@COMMIT`, separated "
    "by commas",
    "SPECBENCH_PINNED_ONLY": "if 1, download hub repositories only at pinned commits, of specbench or your own, as "
    "with `--pinned-only`",
    "SPECBENCH_DEBUG": "if 1, show tracebacks, as with `--debug`",
}
"""{environment variable that is no setting: meaning}, for docs/commands.md."""


def _in(panel: str, usual_uses: Use) -> Callable[..., Any]:
    """Return a function that makes dataclass fields for the settings of one help panel."""

    def setting(default: Any, help: str, metavar: str = "", unset: str = "", **more: Any) -> Any:
        more = {"panel": panel, "metavar": metavar, "unset": unset, "uses": usual_uses, **more}
        made = Setting("", default, help, **more)
        return field(default=made.value_unset, metadata={"setting": made})

    return setting


_FORMS, _MODES = get_args(Form), get_args(Mode)
_what, _where = _in("What to run", Use.REPEAT | Use.TABLES), _in("Where to run", Use.NONE)
_model, _output = _in("Model", Use.TARGET), _in("Output", Use.TABLES)
_draw = partial(_what, uses=Use.SELECTION)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run, from flags, environment, config files, sweeps or cells of papers' tables.

    The field `top_k` is the flag `--top-k`, the variable `SPECBENCH_TOP_K` and the key `top-k`; its metadata has help,
    bounds and default. A value of None is determined later, for example by the model.
    """

    # fmt: off
    decoder: tuple[str, ...] = _what("ar,sjd",
        "decoders, each with optional inline options, for example ar,gsd:G=50,window=16", "NAME[:OPTION=VALUE,...]",
        many=True, uses=Use.IMAGES)
    prompts: str | None = _what("",
        "prompt set or file", "SET|FILE", "the model",
        uses=(Use.TARGET ^ Use.IMAGES) | Use.CELLS)
    prompt_column: str | None = _what("",
        "column of the prompt file with the texts", "NAME", "text, prompt or caption", uses=Use.REPEAT)
    limit: int | None = _draw(1, "use only the first N prompts", "N", "all prompts", minimum=1,
        uses=Use.SELECTION | Use.ENGINES | Use.CELLS)
    offset: int = _draw(0, "skip the first N prompts", "N", minimum=0)
    sample: int | None = _draw(1,
        "use only a random sample of N prompts; the sample is the same in every run", "N", "all prompts", minimum=1)
    per_category: int | None = _draw(1, "use only the first N prompts of each category", "N", "all prompts", minimum=1)
    category: tuple[str, ...] = _draw("",
        "use only the prompts of these categories; quote a name with a comma", "NAME,...", many=True)
    ids: tuple[str, ...] = _draw("", "use only the prompts with these ids", "ID,...", many=True)
    samples: int = _what(1, "images per prompt", "N", minimum=1, maximum=10**6,
        uses=Use.REPEAT | Use.TABLES | Use.CELLS)
    seed: int = _what(0, "random seed", "N", minimum=0, maximum=MAX_SEED, uses=Use.DECODING | Use.CELLS)
    baseline: int | None = _what(8,
        "if no decoder is AR, also decode the first N prompts with AR, to compute the speed-up; 0: never", "N",
        "8; none with a batch or workers, whose latencies are not measured", minimum=0, uses=Use.NONE)
    batch: int | Literal["auto"] = _what(1,
        "images decoded together; auto: as many as fit in memory (always 1 in latency mode)", "N|auto", minimum=1,
        maximum=4096, words=("auto",), uses=(Use.DECODING ^ Use.IMAGES) | Use.ENGINES | Use.CELLS)

    workers: int | None = _where(1,
        "worker processes, each with its own copy of the model", "N", "one, or with --ray one per GPU or node",
        minimum=1, maximum=4096)
    ray: str | None = _where("", "address of a running Ray cluster, or auto", "ADDRESS", "this machine")
    shard: str | None = _where("",
        "decode only shard I of N shards of equal size; auto: as set by SLURM, LSF, MPI or torchrun", "I/N", "all",
        uses=Use.TABLES)
    mode: Mode | None = _where("",
        "purpose: latency (decode one image at a time, alone on the device), or throughput (report no latency)",
        "MODE", "latency for one worker and batch 1", choices=_MODES)

    model: str = _model("shapes", "name of a model, see 'specbench list models'", "NAME", uses=Use.TARGET | Use.CELLS)
    weights: str | None = _model("", "checkpoint that replaces the official checkpoint", "DIR|OWNER/NAME", "the model")
    revision: str | None = _model("", "revision of the checkpoint's Hugging Face repository", "REF", "the hub")
    guidance_rows: Form = _model("official",
        "unconditional prompt of lumina and anole: official (of the model's authors), or released (of SJD's and GSD's "
        "code: it keeps the last token of the prompt)", "NAME", choices=_FORMS,
        uses=(Use.TARGET ^ Use.TABLES) | Use.CELLS)
    prompt_form: Form = _model("official",
        "prompt of anole: official (the bare text), or released (SJD's script: 'Generate an image of ' before it)",
        "NAME", choices=_FORMS, uses=(Use.TARGET ^ Use.TABLES) | Use.CELLS)
    guidance_schedule: Form = _model("official",
        "guidance of lumina2: official (the requested scale), or released (as in its code: scales below 4 are raised "
        "to 4; scales above 4 fall to 4 within the first row)", "NAME", choices=_FORMS, uses=Use.TARGET ^ Use.TABLES)
    size: str | None = _model("", "image size in pixels, for models trained with several sizes", "WIDTHxHEIGHT",
        "the model", reads=names.size, check=parse_size)
    random_weights: bool = _model(False, "use random weights in the true architecture, to measure the speed only")
    scale: Scale = _model("full",
        "model size: full, or tiny (images of 4 x 4 tokens, and with --random-weights also a small network)", "SIZE",
        choices=SCALES)
    dtype: str | None = _model("float32",
        f"number format of the weights: {', '.join(DTYPES)} (int8wo: matrices in eight bits by torchao; it changes "
        f"the target distribution and {EIGHT_BITS_GAIN})", "TYPE", "the model", choices=DTYPES,
        uses=Use.TARGET | Use.CELLS)
    device: str = _model(AUTO, "torch device: cpu, cuda, cuda:1, or auto (CUDA if torch finds a GPU)", "DEVICE")
    threads: int = _model(0,
        "CPU threads; 0: one per core that no other process uses", "N", minimum=0, maximum=1024, uses=Use.DECODING)
    compile: compiler.CompileMode = _model("auto",
        "compile the decode step before timing; auto: on CUDA, and on a CPU if the run is long enough to gain from it",
        "WHEN", choices=compiler.MODES, uses=Use.DECODING)

    # sampling: given fields of `specbench.specs.run_spec.Sampling`. options: given components and decoder options
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    out: str = _output("results", "results folder", "DIR", uses=Use.REPEAT | Use.TABLES)
    trace: bool = _output(False,
        "record the total variation between draft and target and the draft's top-1 probability for each token",
        uses=Use.IMAGES)
    quiet: bool = _output(False, "print only errors")
    json: bool = _output(False, "print one JSON array on stdout")

    origins: Mapping[str, SettingOrigin] = field(default_factory=dict, repr=False, compare=False)  # by setting
    # fmt: on

    def value(self, name: str) -> Any:
        """Return the value of a setting by its name; None if it is not given."""
        if name in _OWN:
            return getattr(self, name.replace("-", "_"))
        return self.sampling.get(_SAMPLED[name]) if name in _SAMPLED else self.options.get(name)

    def is_given(self, name: str) -> bool:
        return name in self.origins and self.origins[name].given

    @property
    def by_name(self) -> dict[str, Any]:
        """{setting that was read: value}."""
        return {name: self.value(name) for name in self.origins}

    @property
    def given(self) -> dict[str, Any]:
        """The values of `by_name` that are not defaults."""
        return {name: value for name, value in self.by_name.items() if self.origins[name].given}

    def changed(self, values: Mapping[str, Any], origins: Mapping[str, SettingOrigin]) -> RunSettings:
        """Return a copy with the given values and origins of settings, keyed by name."""
        own = {name.replace("-", "_"): value for name, value in values.items() if name in _OWN}
        sampling = {**self.sampling, **{kept: values[name] for name, kept in _SAMPLED.items() if name in values}}
        options = {**self.options, **{name: values[name] for name in values if name not in (*_OWN, *_SAMPLED)}}
        for part, of in (("sampling", sampling), ("options", options)):
            own[part] = {name: value for name, value in of.items() if value is not None}
        return replace(self, **own, origins={**self.origins, **origins})


_OWN: Mapping[str, Setting] = {
    name: replace(part.metadata["setting"], name=name)
    for part in fields(RunSettings)
    if part.metadata and (name := part.name.replace("_", "-"))
}
_SAMPLED = {setting.name: name for name, setting in SAMPLING.items()}


def decoder_settings() -> tuple[Setting, ...]:
    """List one setting per component kind (drafter, init, ...) and per option of any decoder, in help order."""
    return _settings_of(*PRESETS, *(part for values in CHOICES.values() for part in values.values()))


@cache
def _settings_of(*_known: str | Component) -> tuple[Setting, ...]:
    """Return `decoder_settings`. The arguments renew the cache after a plug-in or a notebook adds a component."""
    kinds = (
        Setting(
            kind, "", f"{COMPONENT_KINDS[kind]}: {', '.join(values)}", choices=tuple(values), panel="Decoder choices",
            metavar="NAME", unset="the decoder",
        )
        for kind, values in CHOICES.items()
    )  # fmt: skip
    metavars, of_type = {"tree": "TREE", "head": "DIR", "pairs": "FILE"}, {int: "N", float: "X", bool: "", str: "TEXT"}
    variants: dict[str, dict[tuple[type, str], Option]] = {}
    components = (part for values in CHOICES.values() for part in values.values())
    presets = (options_of(preset).values() for preset in PRESETS.values())
    for option in chain(*(part.options for part in components), *presets):
        variants.setdefault(option.name, {}).setdefault((option.type, option.help), option)
    knobs = (
        Setting(
            **vars(first),
            panel="Decoder options",
            unset="the decoder",
            metavar="N|auto"
            if name == "window"
            else metavars.get(name) or ("NAME" if first.choices else of_type[first.type]),
            uses=Use.OPTION | Use.TABLES if name == "head" else Use.OPTION,
            words=("auto",) if name == "window" else (),
            others=tuple(others),
        )
        for name, (first, *others) in ((name, options.values()) for name, options in variants.items())
    )
    return (*kinds, *knobs)


def run_settings(names: Collection[str] | None = None, use: Use = Use.NONE) -> tuple[Setting, ...]:
    """Return the settings of `specbench run` in help order: all, only `names`, or only the settings with a use."""
    groups = {"sampling": tuple(SAMPLING.values()), "options": decoder_settings(), "origins": ()}
    groups |= {name.replace("-", "_"): (setting,) for name, setting in _OWN.items()}
    every = chain.from_iterable(groups[part.name] for part in fields(RunSettings))
    return tuple(setting for setting in every if use in setting.uses and (names is None or setting.name in names))


def names_with(use: Use) -> tuple[str, ...]:
    """Return the names of the settings with a use, in help order."""
    return tuple(setting.name for setting in run_settings(use=use))


def read_config(path: str | Path, keys: Iterable[str]) -> dict[str, object]:
    """Read settings by name from a TOML file."""
    try:
        values = tomllib.loads(text_of(Path(path).read_bytes()))
    except OSError as error:
        raise SpecbenchError(f"--config {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecbenchError(f"--config {path}: not a TOML file ({error})") from None
    keys = list(keys)
    return {setting_name(f"setting in {path}:", key, keys): value for key, value in values.items()}


def setting_name(kind: str, typed: str, keys: Iterable[str]) -> str:
    """Return the setting that a key of a config file or a Python argument means."""
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
) -> RunSettings:
    """Read settings into a record. The first source with a value counts: flag (None and () are no value), `env` (None:
    the environment of the process), `config` (as returned by `read_config`), default."""
    env = os.environ if env is None else env
    keys = [setting.name for setting in settings]
    given = {flag: value for flag, value in flags.items() if not (isinstance(value, tuple) and not value)}
    flags = {setting_name("setting", flag, keys): value for flag, value in given.items()}
    picked = {setting.name: _pick(setting, flags, env, config or {}, config_name) for setting in settings}
    read = RunSettings().changed(*({name: pair[part] for name, pair in picked.items()} for part in (0, 1)))
    if "prompts" in picked:
        read = _with_prompts(read)
    read = replace(read, model=_model_named(read.model))
    return replace(read, device=chosen_device(read.device)) if "device" in picked else read


def _with_prompts(read: RunSettings) -> RunSettings:
    """Return the settings with the full name of the prompt set, by default the model's default set."""
    from specbench.models.catalog import default_prompts  # not for `--help`
    from specbench.prompts import set_name

    if read.prompts is not None:
        return replace(read, prompts=set_name(read.prompts))
    model = _model_named(read.model)
    if (prompts := default_prompts(model)) is None:
        what = f"'{model}' is a second-stage model, so its prompts are images of a first-stage run"
        raise SpecbenchError(what, "use --prompts results/RUN with a run of tar-1.5b or tar-7b")
    return read.changed({"prompts": prompts}, {"prompts": SettingOrigin(SettingSource.DEFAULT, f"of {model}")})


def _model_named(typed: str) -> str:
    """Return the catalogue's name of a model. An unknown name is returned unchanged; `plan_model` rejects it later."""
    from specbench.models.catalog import model_name, models  # not for `--help`

    with suppress(SpecbenchError):
        return typed if typed in models() else model_name(typed)
    return typed


def check_environment(env: Mapping[str, str] | None = None) -> None:
    """Reject `SPECBENCH_` variables that no command reads, because a mistyped name would have no effect."""
    valid = [setting.env for setting in run_settings()] + list(OTHER_VARIABLES)
    for variable in os.environ if env is None else env:
        if variable.startswith(ENV_PREFIX) and variable not in valid:
            raise unknown_name("environment variable", variable, valid)


def _pick(
    setting: Setting, flags: Mapping[str, Any], env: Mapping[str, str], config: Mapping[str, Any], config_name: str
) -> tuple[Any, SettingOrigin]:
    """Return the value of a setting with its origin."""
    variable = env.get(setting.env) if setting.many else env.get(setting.env) or None
    sources = (
        (flags.get(setting.name), SettingOrigin(SettingSource.FLAG, f"--{setting.name}")),
        (variable, SettingOrigin(SettingSource.ENVIRONMENT, setting.env)),
        (config.get(setting.name), SettingOrigin(SettingSource.FILE, config_name)),
    )
    for raw, origin in sources:
        if raw is not None:
            try:
                return setting.parse(raw), origin
            except SpecbenchError as error:
                if Use.OPTION in setting.uses and ":" in str(flags.get("decoder")):
                    return raw, origin  # checked later by the decoder's option, which a user's file may define
                if origin.source is SettingSource.FLAG:
                    raise
                raise SpecbenchError(f"{error.what} ({origin})", error.try_this, error.exit_code) from None
    return setting.value_unset, setting.origin_unset
